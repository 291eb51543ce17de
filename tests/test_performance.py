"""The page of speeds and the guard against becoming slower: what they say of the evidence, not the figures."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qurve.data.prepare import prepare
from qurve.projections.module import project

ROOT = Path(__file__).parents[1]
performance = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "performance.py")))
guard = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "bench_check.py")))


def spread(median: float) -> dict[str, float]:
    return {"median": median, "low": median - 0.1, "high": median + 0.1}


# ------------------------------------------------------------------------------------------------------------ the page


def test_without_evidence_every_section_says_so(tmp_path: Path) -> None:
    text = performance.page(tmp_path)
    assert text.count("\n## ") == len(performance.SECTIONS)
    assert text.count("**Not measured yet**") == sum(len(section.parts) for section in performance.SECTIONS)


@pytest.mark.parametrize(
    ("value", "at_most", "verdict"),
    [
        (1.5, False, "reached"),
        (1.49, False, "**missed**"),
        (1.5, True, "reached"),
        (1.51, True, "**missed**"),
        (spread(1.4), False, "**missed**"),
        ([1.4, 1.6, 1.6], False, "reached"),
        (None, False, ""),
    ],
)
def test_a_missed_target_is_said_to_be_missed(value: Any, at_most: bool, verdict: str) -> None:
    assert performance.Target("speed", 1.5, at_most).row(value)[-1] == verdict


def test_figures_are_told_with_their_quartiles() -> None:
    assert performance.figure(spread(2), ".1f") == "2.0 (1.9 to 2.1)"
    assert performance.figure([1.0, 2.0, 3.0], ".2f") == "2.00 (1.50 to 2.50)"
    assert performance.figure(None) == "not measured"


def test_training_shows_speed_beside_its_targets_and_memory(tmp_path: Path) -> None:
    evidence = {
        "shape": dict.fromkeys(("layers", "heads", "context", "batch", "vocab", "threads"), 1)
        | {"width": 384, "precision": "bf16"},
        "rounds": {"ratio_to_nanogpt": [2.1, 2.1], "ratio_nonlinear_to_linear": [0.99, 0.99], "linear": [7.0, 7.0]},
        "compile_seconds": {"linear": 3.2},
        "peak_memory_bytes": {"linear": 1.5e9},
        "memory_ratio_to_nanogpt": 0.61,
        "command": "python x.py",
        "torch": "9.9",
    }
    (tmp_path / "train-cpu.json").write_text(json.dumps(evidence))
    text = performance.page(tmp_path)
    assert "*`results/train-cpu.json`: `python x.py`, torch 9.9.*" in text
    assert "nanoGPT's tokens/s | 2.100 (2.100 to 2.100) | at least 2.2 | **missed** |" in text
    assert "times nanoGPT's | 0.61 | at most 0.6 | **missed** |" in text
    assert "linear one's tokens/s | 0.990 (0.990 to 0.990) | at least 0.985 | reached |" in text
    assert "| linear | 7 (7 to 7) | 3 s | 1.50 GB |" in text


def test_prices_come_in_a_table_for_each_setting(tmp_path: Path) -> None:
    parts = {part: spread(1.2) for part in ("forward", "backward", "decode")}
    rows = [
        {"choice": choice, "how": how, "width": 8, "tokens": 4, "batch": 2, "precision": "bf16", "ratio": parts}
        for choice in ("gelu", "relu")
        for how in ("eager", "compiled")
    ]
    (tmp_path / "prices-cpu.json").write_text(json.dumps({"machine": {"torch": "9.9", "cpu": "C"}, "rows": rows}))
    text = performance.page(tmp_path)
    assert text.count("**D8 T4 B2, bf16, ") == 2
    assert text.count("| gelu | 1.20 (1.10 to 1.30) |") == 2


def test_growth_names_the_largest_step(tmp_path: Path) -> None:
    row = {"how": "eager", "tokens_per_s": spread(10), "seconds_of_base": spread(1)}
    evidence = {
        "machine": {"torch": "9.9", "cpu": "C"},
        "base": {"T": 2},
        **{"vocab": 9, "precision": "bf16", "threads": 1},
        "summary": {"T eager": {"exponent": 1.1, "largest_step": 1.3, "step_at": "2 to 4"}},
        "rows": [{**row, "axis": "T", "size": size, "flops": 10 * size} for size in (2, 4)],
    }
    (tmp_path / "scaling-cpu.json").write_text(json.dumps(evidence))
    text = performance.page(tmp_path)
    assert "| T eager | 1.100 | 1.300 | 2 to 4 |" in text
    assert "| T = 4, eager | 10 (10 to 10) | 1.000 (0.900 to 1.100) | 2.000 |" in text


def test_decoding_holds_each_ratio_against_its_own_target(tmp_path: Path) -> None:
    evidence = {
        "shape": dict.fromkeys(("n_layer", "n_embd", "n_head", "vocab_size", "prompt", "new", "rounds"), 1),
        "rounds": {
            "ratios": {
                "linear eager float32 1 against nanogpt, step": [16.0],
                "linear eager bf16 1 against nanogpt, step": [16.0],
                "linear eager bf16 8 against hugging-face, step": [1.4, 1.4],
                "linear eager bf16 8 against hugging-face, prompt": [1.0, 1.0],
                "time of nonlinear eager bf16 8 to linear": [1.04, 1.04],
            },
            "bandwidth_share": {"linear eager bf16 1": [0.69, 0.69]},
        },
        "seconds": {"linear eager bf16 8": {"step": 0.1, "prompt": 0.5}},
        "setup_seconds": {"linear eager bf16 8": 3.0},
        **{"threads": 2, "bandwidth_bytes_per_s": 28e9, "machine": "C", "torch": "9.9"},
    }
    (tmp_path / "decode-cpu.json").write_text(json.dumps(evidence))
    text = performance.page(tmp_path)
    assert "*`results/decode-cpu.json`: C; torch 9.9.*" in text
    assert "float32 1 against nanogpt, step | 16.00 | at least 15 | reached |" in text
    assert "bf16 1 against nanogpt, step | 16.00 | at least 20 | **missed** |" in text
    assert "bf16 8 against hugging-face, step | 1.40 (1.40 to 1.40) | at least 1.3 | reached |" in text
    assert "bf16 8 against hugging-face, prompt | 1.00 (1.00 to 1.00) |  |  |" in text
    assert "to linear | 1.04 (1.04 to 1.04) | at most 1.03 | **missed** |" in text
    assert "share of the bandwidth, linear eager bf16 1 | 0.69 (0.69 to 0.69) | at least 0.7 | **missed** |" in text
    assert "| linear eager bf16 8 | 80.0 | 500 | 3.0 s |" in text


def test_without_a_gpu_the_kernel_is_said_not_to_be_timed(tmp_path: Path) -> None:
    timed = {"reference": {"us": spread(10), "to_reference": spread(1.0)}}
    row = {"rows": 4, "d": 8, "r": 2, "dtype": "bfloat16", "first_call_seconds": {"reference": 0.5}}
    evidence = {"machine": {"torch": "9.9", "cpu": "C"}, "device": "cpu"}
    evidence["rows"] = [{**row, "forward": timed, "forward_backward": timed}]
    (tmp_path / "kernel-cpu.json").write_text(json.dumps(evidence))
    text = performance.page(tmp_path)
    assert "the Triton kernel is not timed" in text
    assert "| 4, 8, 2, bfloat16 | reference | 10; 1.00 (0.90 to 1.10) | 10; 1.00 (0.90 to 1.10) | 0.50 s |" in text


def test_a_rehearsal_is_no_evidence_of_a_gpu(tmp_path: Path) -> None:
    evidence = {"machine": {"torch": "9.9", "gpu": "G"}, "rehearsal": False, "rows": []}
    evidence["summary"] = {"train 124M": {"MFU": 0.4, "nonlinear / linear": spread(0.99)}}
    file = tmp_path / "gpu-g.json"
    file.write_text(json.dumps(evidence))
    text = performance.page(tmp_path)
    assert "| MFU of our linear query at 124 M | 0.400 | at least 0.5 | **missed** |" in text
    assert "nanoGPT's tokens/s | not measured | at least 1.4 |  |" in text
    assert "times our linear one's | 0.990 (0.890 to 1.090) | at least 0.98 | reached |" in text
    file.write_text(json.dumps({**evidence, "rehearsal": True}))
    with pytest.raises(ValueError, match="no evidence"):
        performance.page(tmp_path)


# ----------------------------------------------------------------------------------------------------------- the guard


def test_a_fallen_ratio_is_noticed() -> None:
    committed = {"a": 2.0, "b": 1.0, "only committed": 1.0, "none": 1.0}
    measured = {"a": 1.49, "b": 0.76, "new": 0.1, "none": math.nan}
    assert guard.fallen(committed, measured) == {"a": pytest.approx(0.255), "only committed": 1.0, "none": 1.0}
    said = guard.report(committed, measured)
    assert "a FELL by 26 %: from 2.000 to 1.490" in said
    assert "only committed WAS NOT MEASURED" in said
    assert not [line for line in said if line.startswith("b FELL")]


def test_what_rises_or_is_new_has_not_fallen() -> None:
    assert guard.fallen({"a": 1.0}, {"a": 5.0, "new": 0.1}) == {}


@pytest.mark.parametrize(("measured", "code"), [({"a": 0.8}, None), ({"a": 0.7}, 1)], ids=["near", "fallen"])
def test_the_guards_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Any, code: int | None) -> None:
    committed = tmp_path / "committed.json"
    committed.write_text(json.dumps({"ratios": {"a": 1.0, "b of nanoGPT": 1.0}}))
    inside = guard.main.__globals__
    monkeypatch.setitem(inside, "COMMITTED", committed)
    monkeypatch.setitem(inside, "measure", lambda peer: measured)
    monkeypatch.setattr("sys.argv", ["bench_check.py"])
    if code is None:
        guard.main()
    else:
        with pytest.raises(SystemExit) as ended:
            guard.main()
        assert ended.value.code == code


def test_nothing_to_compare_with_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(guard.main.__globals__, "COMMITTED", guard.ROOT / "results" / "no-such.json")
    monkeypatch.setattr("sys.argv", ["bench_check.py"])
    with pytest.raises(SystemExit) as ended:
        guard.main()
    assert ended.value.code == 2
    assert "no-such.json is missing" in capsys.readouterr().err


def test_committing_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = guard.main.__globals__
    monkeypatch.setitem(inside, "COMMITTED", tmp_path / "new.json")
    monkeypatch.setitem(inside, "measure", lambda peer: {"a": 0.81})
    monkeypatch.setattr("sys.argv", ["bench_check.py", "--write"])
    guard.main()
    assert json.loads((tmp_path / "new.json").read_text())["ratios"] == {"a": 0.81}


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts something in the place of what the guard calls."""

    def put(**others: Any) -> None:
        for name, other in others.items():
            monkeypatch.setitem(guard.main.__globals__, name, other)

    return put


def test_times_as_fast_is_of_the_best_rounds_after_a_warm_up() -> None:
    ours, other = iter([0.1, 3.0, 1.0]), iter([0.1, 2.0, 4.0])
    assert guard._times_as_fast(lambda: next(ours), lambda: next(other), rounds=2) == 2.0


def test_ratios_of_benchmarks_are_the_right_way_round(inside: Callable[..., None]) -> None:
    called: dict[str, tuple[Any, ...]] = {}
    speed = {"linear": 100.0, "nonlinear": 80.0, "nanogpt": 50.0}
    rounds = {side: [best / 3, best, best / 2] for side, best in speed.items()}

    def benchmark(name: str, *arguments: Any) -> dict[str, Any]:
        called[name] = arguments
        sides = [side for side in speed if side != "nanogpt" or "--peer" in arguments]
        return {"tokens_per_s": dict.fromkeys(sides), "rounds": rounds, "ratio_to_training": 7.0}

    inside(_benchmark=benchmark, prepared=lambda: 2.0, fused=lambda: 3.0, decoded=lambda: 4.0)
    expected = {
        "training: nonlinear / linear": 0.8,
        "training: linear / nanoGPT": 2.0,
        "loader / training": 7.0,
        "prepare / plain tiktoken loop": 2.0,
        "fused / unfused stems": 3.0,
        "decoding: nonlinear / linear": 4.0,
    }
    assert guard.measure(Path("peer")) == expected
    assert called["train_cpu"][-2:] == ("--peer", Path("peer"))
    assert called["loader_cpu"][-2:] == ("--rate", 100.0)
    del expected["training: linear / nanoGPT"]
    assert guard.measure(None) == expected


def test_what_is_decoded_and_fused_is_timed_against_what_is_plain(
    inside: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []

    class Queries:
        """A decoder that says which model it decodes."""

        def __init__(self, config: Any, *_: Any) -> None:
            used.append(config.query.kind)

        def read(self, ids_BT: torch.Tensor) -> torch.Tensor:
            return torch.zeros(1, 2)

    def watched(*arguments: Any) -> Any:
        used.append("project")
        return project(*arguments)

    def sides(ours: Callable[[], float], other: Callable[[], float], rounds: int) -> list[list[str]]:
        found = []
        for side in (ours, other):
            used.clear()
            assert 0 < side() < 60
            found.append(list(dict.fromkeys(used)))
        return found

    monkeypatch.setattr("qurve.generate.decoder.Decoder", Queries)
    inside(_times_as_fast=sides, GPT=lambda config: SimpleNamespace(eval=lambda: config), project=watched)
    assert guard.decoded() == [["bottleneck"], ["linear"]]
    assert guard.fused() == [["project"], []]


@pytest.mark.parametrize("left_out", [0, 1])
def test_prepare_is_timed_against_a_loop_that_makes_as_many_tokens(
    left_out: int, inside: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [f"document {n}" for n in range(300)]
    used: list[str] = []

    def write_text(_: None, megabytes: float, file: Path) -> tuple[Path, int]:
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        return file, 0

    def watched(*arguments: Any, **options: Any) -> Any:
        used.append("prepare")
        assert options["workers"] == 1
        return prepare(*arguments, **options)

    def sides(ours: Callable[[], float], other: Callable[[], float], rounds: int) -> float:
        ours()
        assert used == ["prepare"]
        other()
        assert used == ["prepare"]
        return 1.5

    fewer = SimpleNamespace(documents=lambda: documents[left_out:])
    monkeypatch.setattr("prepare_cpu.write_text", write_text)
    inside(_times_as_fast=sides, prepare=watched, Sources=lambda files: fewer)
    if left_out:
        with pytest.raises(SystemExit, match="do not give as many tokens"):
            guard.prepared()
    else:
        assert guard.prepared() == 1.5
