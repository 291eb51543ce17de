"""The arms of `experiments/fair_search.py`: what is matched with what, and that each is given the same search."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, NONLINEAR, searched, write_study

from qurve import accounting
from qurve.config import differences
from qurve.presets import get
from qurve.study.definition import load_study
from qurve.study.search import trials

FILE = Path(__file__).parents[2] / "experiments" / "fair_search.py"


@pytest.fixture(scope="module")
def module() -> dict[str, Any]:
    return runpy.run_path(str(FILE))


@pytest.mark.parametrize("name", ["STUDY", "PAPER"])
def test_arms_are_of_the_sizes_and_scales_that_are_said(name: str, module: dict[str, Any]) -> None:
    models = {arm.name: arm.config.model for arm in module[name].arms}
    size = {arm: accounting.count(model).non_embedding for arm, model in models.items()}
    base = models["baseline"]
    assert size["mlp-4.75"] / size["baseline"] == pytest.approx(1.125, rel=2e-3)
    for arm in ("res-gelu", "identity-mlp-4.5", "qk-norm"):
        assert size[arm] == pytest.approx(size["baseline"], rel=2e-3)
    assert size["baseline"] - size["identity"] == base.n_layers * base.d_model**2
    scales = {arm: model.scale * model.head_width**0.5 for arm, model in models.items()}
    assert scales == pytest.approx(dict.fromkeys(scales, 1.0) | dict.fromkeys(("identity", "identity-mlp-4.5"), 0.5))
    kinds = {arm: model.query.kind for arm, model in models.items()}
    assert kinds == dict.fromkeys(kinds, "linear") | {
        "res-gelu": "bottleneck",
        "identity": "identity",
        "identity-mlp-4.5": "identity",
    }
    assert [arm for arm, model in models.items() if model.qk_norm] == ["qk-norm"]


@pytest.mark.parametrize("name", ["STUDY", "PAPER"])
def test_arms_differ_in_their_models_alone_and_are_given_the_same_search(name: str, module: dict[str, Any]) -> None:
    study = module[name]
    baseline = study.configs["baseline"]
    for config in study.configs.values():
        assert {path.partition(".")[0] for path in differences(baseline, config)} <= {"model"}
    assert baseline.eval.splits == ("val", "test")
    offered: dict[str, list[Any]] = {}
    for trial in trials(study.search, study.configs, ()):
        offered.setdefault(trial.arm, []).append((trial.point, trial.seed, trial.steps))
    assert offered.keys() == study.configs.keys()
    assert all(points == offered["baseline"] for points in offered.values())


def test_the_papers_own_points_are_in_its_grid(module: dict[str, Any]) -> None:
    study = module["PAPER"]
    points = [dict(trial.point) for trial in trials(study.search, study.configs, ()) if trial.arm == "res-gelu"]
    for preset in ("paper/baseline", "paper/res-gelu-best"):
        train = get(preset).train
        assert {"train.lr": train.lr, "train.min_lr": train.min_lr} in points
    assert study.configs["baseline"].model == get("paper/baseline").model


def test_evidence_comes_from_a_folder_with_its_search(
    module: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_study(str(FILE)) == module["STUDY"]
    folder, out = write_study(tmp_path / "study", searched(BASELINE, NONLINEAR)), tmp_path / "evidence.json"
    monkeypatch.setattr(sys, "argv", ["fair_search.py", "--study", str(folder), "--out", str(out)])
    module["main"]()
    tree = json.loads(out.read_text())
    assert tree["search"] == json.loads((folder / "study.json").read_text())["search"]
    assert [arm["arm"] for arm in tree["arms"]] == ["baseline", "res-gelu", "res-gelu@baseline"]
    assert tree["split"] == "test"
    assert str(tmp_path) not in out.read_text()
