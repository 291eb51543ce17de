"""The ladders of `experiments/ladder.py`: Primer and QK-norm on every rung, and evidence that can be read again."""

from __future__ import annotations

import dataclasses
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, NONLINEAR, write_study

from qurve.config import differences
from qurve.study.ladder import LENGTHS, load_definition
from qurve.study.ladder_results import FILE as LADDER_FILE
from qurve.study.ladder_results import LadderResults, load_ladder, measured, to_json

FILE = Path(__file__).parents[2] / "experiments" / "ladder.py"


@pytest.fixture(scope="module")
def module() -> dict[str, Any]:
    return runpy.run_path(str(FILE))


@pytest.mark.parametrize("name", ["LADDER", "LARGER", "PAPER"])
def test_every_rung_has_every_arm(name: str, module: dict[str, Any]) -> None:
    for rung in module[name].rungs:
        models = {arm.name: arm.config.model for arm in rung.study.arms}
        assert list(models) == ["baseline", "mlp-4.75", "res-gelu", "primer", "qk-norm"]
        assert {model.d_model for model in models.values()} == {rung.d_model}
        primer = differences(models["baseline"], models["primer"])
        assert {path.partition(".")[0] for path in primer} == {"mixer", "mlp"}
        assert set(differences(models["baseline"], models["qk-norm"])) == {"qk_norm"}
        base = rung.study.arms[0].config.train
        assert {arm.config.train for arm in rung.study.arms[3:]} == {base}


@pytest.mark.parametrize(("name", "sizes"), [("LADDER", 3), ("PAPER", 4)])
def test_it_goes_along_size_and_along_length(name: str, sizes: int, module: dict[str, Any]) -> None:
    rungs = module[name].rungs
    assert [rung.tokens_per_parameter for rung in rungs] == [20.0] * sizes + list(LENGTHS)
    assert len({rung.d_model for rung in rungs[:sizes]}) == sizes
    assert {rung.d_model for rung in rungs[sizes:]} == {rungs[0].d_model}


def test_the_small_one_takes_under_an_hour_of_two_cores(module: dict[str, Any]) -> None:
    rate = {32: 50_000, 64: 33_000, 96: 22_000}  # tokens/s of a core, as the docstring has them
    seconds = 0.0
    for rung in module["LADDER"].rungs:
        train, study = rung.study.arms[0].config.train, rung.study
        seconds += len(study.arms) * len(study.seeds) * train.steps * train.tokens_per_step / rate[rung.d_model]
    assert seconds / 2 < 3600


def test_the_command_line_takes_it(module: dict[str, Any]) -> None:
    assert load_definition(str(FILE)) == module["LADDER"]


def test_evidence_of_a_folder(
    module: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rung = measured(write_study(tmp_path / "rung", (BASELINE, NONLINEAR), search=False), "2x32@20", (2, 32), 20, 10**6)
    longer = dataclasses.replace(rung, name="2x32@60", tokens_per_parameter=60.0, tokens=3 * rung.tokens)
    found = LadderResults("ladder", "A ladder", "qurve study ladder …", "baseline", "f" * 64, (rung, longer))
    folder, out = tmp_path / "ladder", tmp_path / "evidence.json"
    folder.mkdir()
    (folder / LADDER_FILE).write_text(to_json(found))
    monkeypatch.setattr(sys, "argv", ["ladder.py", "--ladder", str(folder), "--out", str(out)])
    module["main"]()
    assert load_ladder(out) == found
    assert str(tmp_path) not in out.read_text()
    assert "gain along length" in capsys.readouterr().out
