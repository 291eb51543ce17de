"""`experiments/ten_million.py`: the fair search's arms at another size, and what `REPRODUCE.md` says that they take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qurve import accounting
from qurve.study.definition import load_study
from qurve.study.plan import make_plan

ROOT = Path(__file__).parents[2]
FILE = ROOT / "experiments" / "ten_million.py"
SECONDS_A_DAY = 86_400


def test_the_fair_searchs_arms_with_twenty_tokens_a_parameter() -> None:
    study = load_study(str(FILE))
    fair = load_study(str(ROOT / "experiments" / "fair_search.py"))
    assert [(arm.name, arm.label) for arm in study.arms] == [(arm.name, arm.label) for arm in fair.arms]
    config = study.arms[0].config
    size = accounting.count(config.model).non_embedding
    assert size == pytest.approx(10.6e6, rel=0.01)
    assert config.train.steps * config.train.tokens_per_step == pytest.approx(20 * size, rel=1e-3)


def test_the_time_that_is_told_is_the_plans_at_the_measured_speed() -> None:
    speed = json.loads((ROOT / "results" / "train-cpu.json").read_text())
    flops = make_plan(load_study(str(FILE)), 0.002, None)["flops"]
    days = flops / (speed["share_of_peak_linear"] * speed["matrix_peak_flops"]) / SECONDS_A_DAY
    said = (ROOT / "REPRODUCE.md").read_text()
    (row,) = [line for line in said.splitlines() if line.startswith("| `experiments/ten_million.py` |")]
    assert f"{days:.0f} days" in row
    assert f"{flops:.3g}" in row
