"""The rows of `experiments/table1.py`, and the paper's figures beside ours."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, NONLINEAR, write_study

from qurve import presets
from qurve.study.definition import load_study

FILE = Path(__file__).parents[2] / "experiments" / "table1.py"


@pytest.fixture(scope="module")
def module() -> dict[str, Any]:
    return runpy.run_path(str(FILE))


@pytest.mark.parametrize("name", ["STUDY", "PAPER"])
def test_every_printed_row_is_an_arm(name: str, module: dict[str, Any]) -> None:
    study = module[name]
    assert [f"paper/{arm.name}" for arm in study.arms] == list(presets.PRINTED)
    assert [arm.paper for arm in study.arms] == list(presets.PRINTED.values())
    assert study.seeds == (1, 2, 3, 4, 5)


def test_the_small_rows_keep_the_published_proportions(module: dict[str, Any]) -> None:
    chosen = presets.small_search()["chosen"]["baseline"]["point"]["train.lr"]
    assert module["STUDY"].arms[0].config.train.lr == chosen
    for arm in module["STUDY"].arms:
        small, published = arm.config, presets.get(f"paper/{arm.name}")
        assert small.train.lr / chosen == pytest.approx(published.train.lr / 6e-4, rel=5e-3)
        assert small.train.min_lr / small.train.lr == pytest.approx(
            published.train.min_lr / published.train.lr, rel=5e-3
        )
        assert small.train.weight_decay == published.train.weight_decay
        assert small.model.query == published.model.query
        assert small.model.d_ff / small.model.d_model == published.model.d_ff / published.model.d_model


def test_the_command_line_takes_it(module: dict[str, Any]) -> None:
    assert load_study(str(FILE)) == module["STUDY"]


def test_evidence_of_a_folder(
    module: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path / "study", (BASELINE, NONLINEAR), search=False)
    out = tmp_path / "evidence.json"
    monkeypatch.setattr(sys, "argv", ["table1.py", "--study", str(tmp_path / "study"), "--out", str(out)])
    module["main"]()
    tree = json.loads(out.read_text())
    base, layer = tree["table"]
    assert (base["printed"]["val_loss"], base["ours"]["dll_percent"]) == ("2.9441", None)
    losses = {one["arm"]: one["val_loss"] for one in tree["arms"]}
    assert base["ours"]["loss"] == pytest.approx(sum(losses["baseline"].values()) / 3)
    assert layer["printed"]["dll"] == "+2.40 %"
    assert layer["ours"]["diff_low"] < layer["ours"]["diff"] < layer["ours"]["diff_high"] < 0
    assert layer["ours"]["delta_params_percent"] == pytest.approx(100 * 512 / 800_000)
    assert "2.8736" in capsys.readouterr().out
