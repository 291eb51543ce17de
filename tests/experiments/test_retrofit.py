"""`experiments/retrofit.py`, end to end with a tiny model: equal parameters, an equal search, one file as it goes."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "experiments" / "retrofit.py"

# Accelerate calls what transformers has renamed.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning:transformers")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama and a tokenizer of bytes."""
    import tokenizers
    import transformers
    from tiny_families import tiny

    folder = tmp_path_factory.mktemp("model")
    tiny("llama", vocab_size=300).save_pretrained(folder)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i + 3 for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|end|>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["retrofit.py", *map(str, args)])
    main: Any = runpy.run_path(str(FILE))["main"]
    code: int = main()
    return code


def test_end_to_end_and_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text", tmp_path / "out.json"
    text.mkdir()
    for i in range(20):
        (text / f"{i:02}.txt").write_text(f"The {i}th address to the same audience. " * 20)
    size = ("--steps", 3, "--batch", 2, "--length", 16, "--held-out", 4, "--rank", 3)
    plan = ("--model", folder, "--text", text, "--out", out, *size, "--rates", 1e-3, 1e-2, "--seeds", 1)
    assert run(monkeypatch, *plan) == 0
    tree = json.loads(out.read_text())
    assert len(tree["runs"]) == 2 * 2 + 2
    arms = tree["summary"]["arms"]
    # LoRA: 3 (32 + 32 + 32 + 16) a layer; the adapter: width 4, R (32 + 32) + 64
    assert arms["lora"]["parameters"] == 2 * 336
    assert arms["adapter"]["parameters"] == 2 * (4 * 64 + 64)
    assert arms["adapter"]["rate"] in (1e-3, 1e-2)
    assert all(run["test"] != tree["base"]["test"] for run in tree["runs"])
    before = out.read_text()
    assert run(monkeypatch, *plan) == 0  # nothing is left to do
    assert out.read_text() == before
    assert run(monkeypatch, *plan[:-1], 1, 2) == 2
    assert "another plan" in capsys.readouterr().err


def test_bad_input(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    (tmp_path / "short.txt").write_text("too short")
    assert run(monkeypatch, "--model", tmp_path, "--out", out) == 2
    assert "there is no config.json" in capsys.readouterr().err
    assert run(monkeypatch, "--model", folder, "--text", tmp_path / "short.txt", "--out", out) == 2
    assert "tokens; 51,200 are needed" in capsys.readouterr().err
    assert run(monkeypatch, "--model", folder, "--out", out, "--seeds", 101) == 2
    assert not out.exists()
