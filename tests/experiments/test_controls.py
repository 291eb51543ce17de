"""The arms of `experiments/controls.py`: what each control costs, and that all are tried at the same rates."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, NONLINEAR, searched, write_study

from qurve import accounting, plugins, presets
from qurve.config import differences
from qurve.study.definition import Study, load_study
from qurve.study.search import trials

FILE = Path(__file__).parents[2] / "experiments" / "controls.py"


@pytest.fixture(scope="module")
def module() -> dict[str, Any]:
    plugins.make_importable(FILE.parent)
    return runpy.run_path(str(FILE))


def points(study: Study, arm: str) -> list[dict[str, Any]]:
    assert study.search is not None
    return [dict(trial.point) for trial in trials(study.search, study.configs, ()) if trial.arm == arm]


@pytest.mark.parametrize("name", ["STUDY", "PAPER"])
def test_controls_cost_what_is_said(name: str, module: dict[str, Any]) -> None:
    models = {arm.name: arm.config.model for arm in module[name].arms}
    cost = {arm: accounting.count(model) for arm, model in models.items()}
    assert cost["mlp-4.75"].non_embedding / cost["baseline"].non_embedding == pytest.approx(1.125, rel=2e-3)
    for quantity in ("params", "flops"):
        control = accounting.match(quantity, models["res-gelu"], models["baseline"])
        assert control.config.d_ff - models["baseline"].d_ff in (0, 1), "the baseline is this control itself"
    assert {arm: model.query.kind for arm, model in models.items()} == dict.fromkeys(models, "linear") | {
        "res-gelu": "bottleneck"
    }


def test_the_time_matched_control_is_as_wide_as_was_measured(module: dict[str, Any]) -> None:
    found = json.loads(module["TIME_MATCH"].read_text())
    models = {arm.name: arm.config.model for arm in module["STUDY"].arms}
    assert models["mlp-time"].d_ff == found["d_ff"]
    assert found["baseline_d_ff"] == models["baseline"].d_ff == presets.get("small/baseline").model.d_ff
    assert found["low"] <= 1.02
    assert found["high"] >= 0.98
    assert "mlp-time" not in module["PAPER"].configs, "nobody measured it at that scale"


@pytest.mark.parametrize("name", ["STUDY", "PAPER"])
def test_arms_differ_in_their_models_alone_and_are_tried_at_the_same_points(name: str, module: dict[str, Any]) -> None:
    study = module[name]
    for config in study.configs.values():
        assert {path.partition(".")[0] for path in differences(study.configs["baseline"], config)} <= {"model"}
        assert config.eval.splits == ("val", "test")
    assert all(points(study, arm) == points(study, "baseline") for arm in study.configs)


def test_the_published_rates_are_in_the_grid_and_scaled_as_in_table_1(module: dict[str, Any]) -> None:
    published = [presets.get(f"paper/{row}").train for row in ("baseline", "res-gelu-best", "res-gelu-4e-3")]
    for train in published:
        assert {"train.lr": train.lr, "train.min_lr": train.min_lr} in points(module["PAPER"], "baseline")
    table1 = load_study(str(FILE.with_name("table1.py")))
    for arm in ("baseline", "res-gelu-best", "res-gelu-4e-3"):
        train = table1.configs[arm].train
        assert {"train.lr": train.lr, "train.min_lr": train.min_lr} in points(module["STUDY"], "res-gelu")


def test_evidence_comes_from_a_folder_with_its_search(
    module: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_study(str(FILE)) == module["STUDY"]
    folder, out = write_study(tmp_path / "study", searched(BASELINE, NONLINEAR)), tmp_path / "evidence.json"
    monkeypatch.setattr(sys, "argv", ["controls.py", "--study", str(folder), "--out", str(out)])
    module["main"]()
    tree = json.loads(out.read_text())
    assert tree["search"] == json.loads((folder / "study.json").read_text())["search"]
    assert str(tmp_path) not in out.read_text()
