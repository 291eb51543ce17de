"""What a trained `f` does, from the command line: what is printed and left behind, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from qurve.analysis.mechanism import fit, interventions, linear_share, window_losses
from qurve.cli.analyze import mechanism as analyze_mechanism
from qurve.cli.analyze.mechanism import mechanism
from qurve.data.loader import TokenData
from qurve.data.order import fixed_eval_windows
from qurve.errors import BadInput
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.study.paired import paired_interval
from qurve.train.loop import train
from tiny import tiny

NONLINEAR = ("model.query=bottleneck", "train.lr=0.05")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few controls, for the sake of time."""
    monkeypatch.setattr(analyze_mechanism, "SEEDS", (0, 1))
    monkeypatch.setattr(analyze_mechanism, "RANDOM_CONCEPTS", 0)


@pytest.fixture(scope="module")
def runs(data: TokenData, tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """Two seeds with nonlinear queries."""
    folder = tmp_path_factory.mktemp("mechanism")
    seeds = [(f"data.path={data.folder}", f"train.seed={seed}", *NONLINEAR) for seed in (1, 2)]
    return [train(tiny(*settings), folder / settings[1], data) for settings in seeds]


@pytest.fixture(scope="module")
def baseline(data: TokenData, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(tiny(f"data.path={data.folder}"), tmp_path_factory.mktemp("mechanism") / "baseline", data)


def document(capsys: pytest.CaptureFixture[str], *arguments: Any, **options: Any) -> Any:
    assert mechanism(*arguments, as_json=True, **options) == 0
    return json.loads(capsys.readouterr().out)


def test_the_document_has_it_all(
    runs: list[RunFolder],
    baseline: RunFolder,
    data: TokenData,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, other = runs
    against, out = (other.path, baseline.path), tmp_path / "new" / "out"
    found = document(capsys, run.path, windows=4, against=against, out=out)
    assert json.loads((out / "mechanism.json").read_text()) == found
    assert "<figure" in (out / "mechanism.html").read_text()
    assert all("</svg>" in (out / f"{name}.svg").read_text() for name in ("interventions", "conjunctions"))
    assert [found[name] for name in ("step", "split", "windows", "context", "fitted_on")] == [4, "val", 4, 32, 4]

    model, starts = GPT.from_run(run.path), fixed_eval_windows(len(data.split("val")), context=32, count=8)
    windows = [tuple(map(torch.from_numpy, data.split("val").windows(starts[n : n + 1], 32))) for n in range(8)]
    fitted, untouched = fit(model, windows[::2]), window_losses(model, windows[1::2])
    assert found["loss"] == pytest.approx(fmean(untouched))
    expected = interventions(model, fitted)
    assert [(row["name"], tuple(row["layers"])) for row in found["interventions"]] == [
        (one.name, one.layers) for one in expected
    ]
    losses = window_losses(model, windows[1::2], expected[2].replace)
    interval = paired_interval([a - b for a, b in zip(losses, untouched, strict=True)])
    row = found["interventions"][2]
    assert [row[name] for name in ("difference", "low", "high")] == pytest.approx(interval, abs=1e-6)
    shares = linear_share(model, fitted, windows[1::2])
    assert {row["layer"]: row["r2"] for row in found["linear_share"]} == pytest.approx(shares, abs=1e-4)
    start = GPT(model.config, seed=1)
    at_start = linear_share(start, fit(start, windows[::2]), windows[1::2])
    assert {row["layer"]: row["untrained"] for row in found["linear_share"]} == pytest.approx(at_start, abs=1e-4)

    assert list(found["probes"]) == ["trained", "untrained"]
    for probes in found["probes"].values():
        assert {row["layer"] for row in probes["conjunctions"]} == {row["layer"] for row in probes["reweighting"]}
        assert all(len(row["q_random"]) == len(found["control_seeds"]) == 2 for row in probes["conjunctions"])
        assert any("opens a word" in name for row in probes["conjunctions"] for name in row["pair"])
    assert found["probes"]["trained"] != found["probes"]["untrained"]

    matrices = {(row["layer"], row["name"]): row for row in found["matrices"]}
    assert {name for (_, name), row in matrices.items() if row["invariant"]} == {"query.w2"}
    assert abs(matrices[1, "query.w2"]["radial_cosine"]) < 1e-3 < abs(matrices[1, "value.weight"]["radial_cosine"])
    assert [row["key"] for row in found["degrees"]] == pytest.approx([1, 1], abs=1e-3)

    assert [one["same_architecture"] for one in found["attention"]] == [True, False]
    for one in found["attention"]:
        assert [block["layer"] for block in one["blocks"]] == [0, 1]
        assert all(block["low"] < block["mean"] < block["high"] and 0 < block["mean"] < 1 for block in one["blocks"])


def test_people_get_tables(runs: list[RunFolder], capsys: pytest.CaptureFixture[str]) -> None:
    mechanism(runs[0].path, windows=2, against=(runs[1].path,))
    shown = " ".join(capsys.readouterr().out.split())
    for title in ("Something else in f's place", "Conjunctions of", "How differently", "Scale", "Attention beside"):
        assert title in shown
    for word in ("zero", "mean", "other text", "linear", "swap", "0 and 1", "all", "untrained", "train.seed=2 same"):
        assert word in shown


def test_a_linear_run_has_scale_and_attention_alone(
    baseline: RunFolder, runs: list[RunFolder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mechanism(baseline.path, windows=2, against=(runs[0].path,), out=tmp_path, as_json=True) == 0
    assert "anchor plus an f: only scale and attention are looked at" in (tmp_path / "mechanism.html").read_text()
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert "no block's query is an anchor plus an f" in printed.err
    assert "interventions" not in found
    assert "probes" not in found
    assert [row["together"] for row in found["degrees"]] == pytest.approx([2, 2], abs=1e-3)
    assert len(found["attention"]) == 1


def test_other_objectives_are_judged_by_their_own_loss(
    data: TokenData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    masked = (f"data.path={data.folder}", "model.attends=bidirectional", "train.objective=mlm", *NONLINEAR)
    run = train(tiny(*masked, "model.vocab_size=384", "train.steps=1"), tmp_path / "run", data)
    assert document(capsys, run.path, windows=2)["loss"] > 4


def test_what_cannot_be_is_refused_before_anything_is_made(
    runs: list[RunFolder], data: TokenData, tmp_path: Path
) -> None:
    run, out = runs[0].path, tmp_path / "out"
    with pytest.raises(BadInput, match="--windows 1: it must be at least 2"):
        mechanism(run, windows=1, out=out)
    with pytest.raises(BadInput, match="is not a run folder"):
        mechanism(tmp_path / "nothing", out=out)
    with pytest.raises(BadInput, match="is not a run folder"):
        mechanism(run, against=(tmp_path / "nothing",), out=out)
    wide = train(tiny(f"data.path={data.folder}", "model.n_heads=4", "train.steps=1"), tmp_path / "wide", data)
    with pytest.raises(BadInput, match=r"wide: the models cannot be compared head by head: model\.n_heads is 2 here"):
        mechanism(run, against=(wide.path,), out=out)
    tree = json.loads(wide.config_file.read_text())
    tree["data"]["fingerprint"] = "0" * 64
    wide.config_file.write_text(json.dumps(tree))
    with pytest.raises(BadInput, match="wide: it was trained on other data"):
        mechanism(run, against=(wide.path,), out=out)
    assert not out.exists()


def test_too_little_text_is_refused(data: TokenData, tmp_path: Path) -> None:
    settings = (f"data.path={data.folder}", "model.d_model=256", "model.d_ff=8", "train.steps=1", *NONLINEAR)
    run = train(tiny(*settings), tmp_path / "run", data)
    with pytest.raises(BadInput, match=r"8 windows of 32 tokens are too few: .* at least 258 tokens"):
        mechanism(run.path, windows=4)
