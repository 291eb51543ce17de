"""The arms of `experiments/context.py`, and the gains that are taken between them."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_study import arm, config, write_study

from qurve.study.definition import load_study
from qurve.study.tables import signed

FILE = Path(__file__).parents[2] / "experiments" / "context.py"


@pytest.fixture(scope="module")
def module() -> dict[str, Any]:
    return runpy.run_path(str(FILE))


@pytest.mark.parametrize("name", ["STUDY", "PAPER"])
def test_arms_are_what_they_are_called(name: str, module: dict[str, Any]) -> None:
    study = module[name]
    assert len({arm.name for arm in study.arms}) == 12
    assert study.baseline == "linear"
    for one in study.arms:
        query, *around = one.name.split("+")
        model = one.config.model
        assert model.query.kind == {"linear": "linear", "nonlinear": "bottleneck"}[query]
        assert model.positions.kind == ("rope" if {"rope", "modern"} & set(around) else "learned")
        assert model.output.kind == ("gated" if "gate" in around else "linear")
        modern = (model.norm, model.mlp.kind, model.kv_heads < model.n_heads)
        assert modern == (("rmsnorm", "gated", True) if "modern" in around else ("layernorm", "dense", False))


def test_the_command_line_takes_it(module: dict[str, Any]) -> None:
    assert load_study(str(FILE)) == module["STUDY"]


def test_gains_are_taken_where_all_else_is_alike(
    module: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = tuple(arm(one.name, one.label, 0.01 * i, config=config()) for i, one in enumerate(module["STUDY"].arms))
    write_study(tmp_path / "study", arms, seeds=(1, 2), search=False)
    out = tmp_path / "evidence.json"
    monkeypatch.setattr(sys, "argv", ["context.py", "--study", str(tmp_path / "study"), "--out", str(out)])
    module["main"]()
    tree = json.loads(out.read_text())
    pairs = {(gain["of"], gain["from"], gain["to"]) for gain in tree["gains"]}
    assert len(pairs) == len(tree["gains"]) == 6 + 4 + 6
    assert {p for p in pairs if p[0] == "rotary"} == {
        ("rotary", f"{query}{gate}", f"{query}+rope{gate}")
        for query in ("linear", "nonlinear")
        for gate in ("", "+gate")
    }
    assert ("query", "linear+modern+gate", "nonlinear+modern+gate") in pairs
    assert ("gate", "nonlinear+rope", "nonlinear+rope+gate") in pairs
    losses = {one["arm"]: one["val_loss"] for one in tree["arms"]}
    for gain in tree["gains"]:
        before, after = losses[gain["from"]], losses[gain["to"]]
        assert gain["diff"] == pytest.approx(sum(after[seed] - before[seed] for seed in "12") / 2)
        assert gain["diff_low"] < gain["diff"] < gain["diff_high"]
    assert tree["yardstick"]["dll_percent"] == 1.78
    told = capsys.readouterr().out
    assert "yardstick: +1.78 %" in told
    assert "plus is a gain" in told
    assert not re.search(r"\d\.\d{5}", told), "a number that is not rounded"
    for gain in tree["gains"]:
        (line,) = [line for line in told.splitlines() if f" {gain['from']} -> {gain['to']}:" in line]
        assert signed(gain["dll_percent"], 2, "%") in line
        assert f"[{signed(gain['diff_low'], 4)}, {signed(gain['diff_high'], 4)}], n = 2, p = " in line
