"""The arms of `experiments/at_the_peak.py`: all at the one point, which is the published one, scaled as in Table 1."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, NONLINEAR, write_study

from qurve import plugins, presets
from qurve.config import differences
from qurve.study.definition import load_study

FILE = Path(__file__).parents[2] / "experiments" / "at_the_peak.py"


@pytest.fixture(scope="module")
def module() -> dict[str, Any]:
    plugins.make_importable(FILE.parent)
    return runpy.run_path(str(FILE))


def test_all_arms_are_at_the_published_point(module: dict[str, Any]) -> None:
    published = presets.get("paper/res-gelu-best").train
    table1 = load_study(str(FILE.with_name("table1.py"))).configs["res-gelu-best"].train
    for name, point in (("PAPER", published), ("STUDY", table1)):
        study = module[name]
        for config in study.configs.values():
            assert (config.train.lr, config.train.min_lr) == (point.lr, point.min_lr)
            assert {path.partition(".")[0] for path in differences(study.configs["baseline"], config)} <= {"model"}


def test_the_arms_are_the_controls_and_what_may_bear_a_high_rate(module: dict[str, Any]) -> None:
    models = {arm.name: arm.config.model for arm in module["STUDY"].arms}
    assert list(models) == ["baseline", "mlp-4.75", "mlp-time", "res-gelu", "identity", "qk-norm"]
    assert [name for name, model in models.items() if model.qk_norm] == ["qk-norm"]
    kinds = {name: model.query.kind for name, model in models.items()}
    assert kinds == dict.fromkeys(kinds, "linear") | {"res-gelu": "bottleneck", "identity": "identity"}
    scales = {name: model.scale * model.head_width**0.5 for name, model in models.items()}
    assert scales == pytest.approx(dict.fromkeys(scales, 1.0) | {"identity": 0.5})
    assert "mlp-time" not in module["PAPER"].configs


def test_evidence_comes_from_a_folder(module: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_study(str(FILE)) == module["STUDY"]
    folder, out = write_study(tmp_path / "study", (BASELINE, NONLINEAR), search=False), tmp_path / "evidence.json"
    monkeypatch.setattr(sys, "argv", ["at_the_peak.py", "--study", str(folder), "--out", str(out)])
    module["main"]()
    assert [row["arm"] for row in json.loads(out.read_text())["rows"]] == ["baseline", "res-gelu"]
    assert str(tmp_path) not in out.read_text()
