"""The configurations of `experiments/figure2.py`: as many as were published, and what its evidence says of them."""

from __future__ import annotations

import json
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, NONLINEAR, write_study

from qurve import accounting, plugins, presets
from qurve.study.definition import load_study

FILE = Path(__file__).parents[2] / "experiments" / "figure2.py"


@pytest.fixture(scope="module")
def module() -> dict[str, Any]:
    plugins.make_importable(FILE.parent)
    return runpy.run_path(str(FILE))


def test_every_published_configuration_is_there_once(module: dict[str, Any]) -> None:
    arms = module["PAPER"].arms
    nonlinear = [arm for arm in arms if arm.config.model.query.kind == "bottleneck"]
    assert len(nonlinear) == 29 + 2
    assert sum(map(len, module["REPOSITORY"].values())) == 29
    points = {(arm.config.train.weight_decay, arm.config.train.lr, arm.config.train.min_lr) for arm in nonlinear}
    assert len(points) == 31
    assert Counter(decay for decay, _, _ in points) == {0.1: 3, 0.05: 4, 2**-5: 16, 0.025: 3, 2**-6: 5}
    for row in ("res-gelu-wd005", "res-gelu-4e-3", "res-gelu-best"):
        train = presets.get(f"paper/{row}").train
        assert (train.weight_decay, train.lr, train.min_lr) in points
    sizes = [accounting.count(arm.config.model).non_embedding / 1e6 for arm in arms if arm.name.startswith("mlp")]
    assert (round(min(sizes), 1), round(max(sizes), 1)) == (89.7, 95.6)
    assert {round(accounting.count(arm.config.model).non_embedding / 1e6, 2) for arm in nonlinear} == {84.97}
    assert {arm.config.eval.every for arm in arms} == {1_000}


def test_names_and_labels_say_the_settings(module: dict[str, Any]) -> None:
    arms = {arm.name: arm for arm in module["PAPER"].arms}
    one = arms["wd-2-5@0.0024-3e-05"]
    assert one.label == "Res. GELU, decay 2^-5, 0.0024 to 3e-05"
    assert (one.config.train.weight_decay, one.config.train.lr, one.config.train.min_lr) == (2**-5, 2.4e-3, 3e-5)


def test_the_small_ones_are_among_the_published(module: dict[str, Any]) -> None:
    published = {arm.name: arm for arm in module["PAPER"].arms}
    small = module["STUDY"]
    decays = Counter()
    for arm in small.arms:
        theirs = published[arm.name].config
        assert arm.label == published[arm.name].label
        assert arm.config.train.weight_decay == theirs.train.weight_decay
        assert arm.config.train.lr / small.arms[0].config.train.lr == pytest.approx(theirs.train.lr / 6e-4, rel=5e-3)
        decays[theirs.train.weight_decay] += arm.config.model.query.kind == "bottleneck"
    assert set(decays) == set(module["DECAYS"].values())
    config = small.arms[0].config
    assert config.eval.every < config.train.warmup_steps, "the warm-up's gains are not seen"


def test_the_command_line_takes_it(module: dict[str, Any]) -> None:
    assert load_study(str(FILE)) == module["STUDY"]


def test_evidence_of_a_folder(
    module: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path / "study", (BASELINE, NONLINEAR), search=False)
    out = tmp_path / "evidence.json"
    monkeypatch.setattr(sys, "argv", ["figure2.py", "--study", str(tmp_path / "study"), "--out", str(out)])
    module["main"]()
    tree = json.loads(out.read_text())
    assert tree["curves"].keys() == {"res-gelu"}
    curve = tree["curves"]["res-gelu"]
    assert (curve["seeds"], curve["non_embedding"]) == (3, 800_512)
    points = curve["gain_percent"]
    assert (points[0]["step"], points[-1]["step"]) == (20, 400)
    row = next(row for row in tree["rows"] if row["arm"] == "res-gelu")
    assert points[-1]["mean"] == pytest.approx(row["dll_percent"])
    assert points[-1]["smallest"] < points[-1]["mean"] < points[-1]["largest"]
    assert any("70 %" in line for line in tree["unknown"])
    assert "400:" in capsys.readouterr().out
