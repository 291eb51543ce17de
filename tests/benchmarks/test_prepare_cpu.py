from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import prepare_cpu
import pytest
from prepare_cpu import SIDES, write_text


def documents(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


def test_text_is_repeated_document_by_document_to_fill(tmp_path: Path) -> None:
    given = tmp_path / "given.jsonl"
    given.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("aé", "b")))
    made, counts = write_text([given], 11e-6, tmp_path / "made.jsonl")
    assert documents(made) == ["aé", "b", "aé", "b", "aé"]
    assert counts == {"bytes": 11, "documents": 5}


def test_default_text_is_cut_into_documents_of_a_pages_length(tmp_path: Path) -> None:
    made, _ = write_text(None, 0.1, tmp_path / "made.jsonl")
    assert 3000 < np.mean([len(text) for text in documents(made)]) < 8000


@pytest.mark.slow
def test_both_sides_give_the_same_tokens_and_other_ones_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    text, _ = write_text(None, 0.05, tmp_path / "text.jsonl")

    def run(side: str, text: Path) -> None:
        (tmp_path / side).mkdir(exist_ok=True)
        assert SIDES[side](text, tmp_path / side, 1)["seconds"] > 0

    prepare_cpu._same_tokens(run, text, tmp_path)
    train = tmp_path / "nanogpt" / "train.bin"
    tokens = np.fromfile(train, dtype=np.uint16)
    tokens[3] += 1
    tokens.tofile(train)
    with pytest.raises(SystemExit, match="do not give the same tokens: train"):
        prepare_cpu._same_tokens(lambda *_: None, text, tmp_path)


def test_memory_over_time() -> None:
    samples = [{"own": own, "mapped": 2 * own} for own in (*range(100), 7)]
    found = prepare_cpu._over_time(samples)
    assert found["peak"] == {"own": 99, "mapped": 198}
    assert found["own_by_tenth"][:2] == [4, 14]
    assert all(a < b for a, b in itertools.pairwise(found["own_by_tenth"]))
