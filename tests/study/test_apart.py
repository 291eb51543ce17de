"""Peak and floor apart: what the tables say is what the search's scores hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, NONLINEAR, WIDER, searched, write_study

from qurve.study.apart import apart_tables
from qurve.study.page import pieces
from qurve.study.page.build import page
from qurve.study.results import load
from qurve.study.searched import Searched, read_evidence

LABELS = {"baseline": "Baseline", "mlp": "MLP", "layer": "Layer", "layer@baseline": "at the baseline's point"}
LOSSES = {  # arm -> (peak, share) -> loss
    "baseline": {(1e-3, 0.1): 5.1, (1e-3, 1.0): 5.0, (2e-3, 0.1): 5.3, (2e-3, 1.0): 5.2},
    "mlp": {(1e-3, 0.1): 4.9, (1e-3, 1.0): 5.0, (2e-3, 0.1): 5.4, (2e-3, 1.0): None},
    "layer": {(1e-3, 0.1): 4.8, (1e-3, 1.0): 4.9, (2e-3, 0.1): 4.7, (2e-3, 1.0): 4.75},
}


def evidence(axes: tuple[str, ...] = ("train.lr", "train.min_lr/train.lr"), **changes: Any) -> Searched:
    def point(place: tuple[float, float]) -> dict[str, float]:
        return {"train.lr": place[0], "train.min_lr": place[0] * place[1]}

    scores = [
        {"arm": arm, "point": point(place), "seed": 101, "val_loss": loss, "status": "finished"}
        for arm, losses in LOSSES.items()
        for place, loss in losses.items()
    ]
    chosen = {"baseline": (1e-3, 1.0), "mlp": (1e-3, 0.1), "layer": (2e-3, 0.1)}
    tree = {
        "axes": axes,
        "seeds": [101],
        "steps": 400,
        "chosen": {arm: {"point": point(place), "val_loss": LOSSES[arm][place]} for arm, place in chosen.items()},
        "scores": scores,
    }
    return read_evidence({**tree, **changes})


def test_each_axis_alone_has_the_best_over_the_others() -> None:
    peaks, floors, _ = apart_tables(evidence(), LABELS)
    assert (peaks.title, peaks.head) == ("By peak alone", ["arm", "peak 1e-3", "peak 2e-3"])
    assert peaks.rows == [
        ["Baseline", "5.0000 ◂", "5.2000"],
        ["MLP", "4.9000 ◂", "5.4000"],
        ["Layer", "4.8000", "4.7000 ◂"],
    ]
    assert floors.head == ["arm", "floor / peak 0.1", "floor / peak 1"]
    assert floors.rows == [
        ["Baseline", "5.1000", "5.0000 ◂"],
        ["MLP", "4.9000 ◂", "5.0000"],
        ["Layer", "4.7000 ◂", "4.7500"],
    ]
    assert "over floor / peak. One seed: no test." in peaks.notes[0]


def test_controls_are_shown_at_the_variants_point() -> None:
    table = apart_tables(evidence(), LABELS)[-1]
    assert table.head == ["arm", "peak 1e-3, floor 1e-3", "peak 1e-3, floor 1e-4", "peak 2e-3, floor 2e-4"]
    assert table.rows == [
        ["Baseline", "5.0000 ◂", "5.1000", "5.3000"],
        ["MLP", "5.0000", "4.9000 ◂", "5.4000"],
        ["Layer", "4.9000", "4.8000", "4.7000 ◂"],
    ]


def test_what_diverged_or_was_not_tried_is_said() -> None:
    scores = [
        {"arm": arm, "point": {"train.lr": lr, "train.min_lr": lr}, "seed": 1, "val_loss": loss, "status": "any"}
        for arm, lr, loss in (("baseline", 1e-3, 5.0), ("mlp", 1e-3, None), ("mlp", 2e-3, 4.0))
    ]
    points = {"baseline": scores[0], "mlp": scores[2]}
    chosen = {arm: {key: score[key] for key in ("point", "val_loss")} for arm, score in points.items()}
    peaks, table = apart_tables(evidence(scores=scores, seeds=[1], chosen=chosen), LABELS)  # one share alone: no table
    assert table.rows == [["Baseline", "5.0000 ◂", "–"], ["MLP", "did not finish", "4.0000 ◂"]]
    assert peaks.rows[1] == ["MLP", "did not finish", "4.0000 ◂"]


def test_a_search_that_is_not_over_has_no_choices_and_one_axis_no_margins() -> None:
    assert len(apart_tables(evidence(chosen={}), LABELS)) == 2
    assert apart_tables(evidence(chosen={}, scores=[]), LABELS) == []
    alone = apart_tables(evidence(axes=("train.lr",)), LABELS)
    assert [table.title for table in alone] == ["Each arm at the points chosen for the others"]


def test_the_report_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "svg", lambda *_, **__: "<svg></svg>")
    folder = write_study(tmp_path, searched(BASELINE, WIDER, NONLINEAR))
    tree = json.loads((folder / "study.json").read_text())
    tree["search"]["axes"].append("train.min_lr/train.lr")
    (folder / "study.json").write_text(json.dumps(tree))
    text = page(load(folder))
    assert all(f'<table id="apart-{place}"' in text for place in (1, 2, 3))
    assert "By floor / peak alone" in text
