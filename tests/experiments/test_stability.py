"""The grid of `experiments/stability.py`: its points are those of the claims, and its evidence comes from a folder."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_study import arm, config, write_study

from qurve.study.claims import CLAIMS, NEAR, PAPER_RATE
from qurve.study.definition import load_study
from qurve.study.stability import architecture

FILE = Path(__file__).parents[2] / "experiments" / "stability.py"


@pytest.fixture(scope="module")
def module() -> dict[str, Any]:
    return runpy.run_path(str(FILE))


@pytest.mark.parametrize(("name", "base_rate"), [("STUDY", 2e-3), ("PAPER", PAPER_RATE)])
def test_every_claim_has_a_point(name: str, base_rate: float, module: dict[str, Any]) -> None:
    study = module[name]
    arms = {arm.name: arm.config for arm in study.arms}
    assert arms[study.baseline].train.lr == base_rate
    assert arms[study.baseline].train.weight_decay == 0.1
    for claim in CLAIMS:
        near = [
            config
            for arm, config in arms.items()
            if architecture(arm) == claim.arm
            and config.train.weight_decay == claim.weight_decay
            and 1 / NEAR <= config.train.lr / (claim.multiple * base_rate) <= NEAR
        ]
        assert near, claim


@pytest.mark.parametrize("name", ["STUDY", "PAPER"])
def test_points_are_what_they_are_called(name: str, module: dict[str, Any]) -> None:
    study = module[name]
    assert len(study.arms) == 4 * 6 * 4
    assert study.seeds == (1,)
    models = {}
    for point in study.arms:
        family, _, place = point.name.partition("@")
        train = point.config.train
        assert place == f"{train.lr:g}-{train.weight_decay:g}"
        assert train.min_lr == pytest.approx(0.1 * train.lr)
        assert point.config.eval.attention_logits
        assert models.setdefault(family, point.config.model) == point.config.model
    baseline, width = models["baseline"], models["baseline"].head_width
    assert (baseline.query.kind, baseline.qk_norm) == ("linear", False)
    assert (models["res-gelu"].query.kind, models["res-gelu"].scale) == ("bottleneck", baseline.scale)
    assert (models["identity"].query.kind, models["identity"].scale) == ("identity", 1 / (2 * width**0.5))
    assert (models["qk-norm"].query.kind, models["qk-norm"].qk_norm) == ("linear", True)


def test_the_papers_scale_is_the_papers(module: dict[str, Any]) -> None:
    config = module["PAPER"].arms[0].config
    assert (config.train.steps, config.train.tokens_per_step, config.model.d_model) == (60_000, 491_520, 768)
    assert {arm.config.train.lr for arm in module["PAPER"].arms} >= {6e-4, 2.4e-3, 3e-3, 4e-3}


def test_the_command_line_takes_it(module: dict[str, Any]) -> None:
    assert load_study(str(FILE)) == module["STUDY"]


def test_evidence_of_a_folder(
    module: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [
        arm(f"{name}@{lr:g}-0.05", name, config=config(train__lr=lr, train__weight_decay=0.05, model__d_ff=d_ff))
        for name, d_ff in (("baseline", 512), ("res-gelu", 500))
        for lr in (2e-3, 1e-2)
    ]
    fates = {("res-gelu@0.01-0.05", 1): "diverged"}
    write_study(tmp_path / "study", tuple(points), seeds=(1,), search=False, fates=fates)
    out = tmp_path / "evidence.json"
    monkeypatch.setattr(sys, "argv", ["stability.py", "--study", str(tmp_path / "study"), "--out", str(out)])
    module["main"]()
    tree = json.loads(out.read_text())
    assert tree["machine"]["torch"] == "2.13.0"
    assert {map_["arm"] for map_ in tree["maps"]} == {"baseline", "res-gelu"}
    assert str(tmp_path) not in out.read_text()
    printed = capsys.readouterr().out
    ours = printed.partition("our inference:")[2]
    assert "  seen here: res-gelu, 5 x the baseline's rate, decay 0.05, inferred to diverge (no statement of" in ours
    assert "res-gelu, 5 x the baseline's rate, decay 0.05" not in printed.partition("our inference:")[0]
    assert "800,000 non-embedding parameters, 400 steps of 2,048 tokens, seeds [1]. Seen at this study's" in printed
