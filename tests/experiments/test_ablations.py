"""The arms of `experiments/ablations.py`: each changes what it is called after, and nothing else."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, NONLINEAR, arm, config, write_study

from qurve import accounting
from qurve.config import content_hash, differences
from qurve.study.definition import load_study

FILE = Path(__file__).parents[2] / "experiments" / "ablations.py"

CHANGES = {
    "width-d8": {"query.width"},
    "width-d4": {"query.width"},
    "width-d": {"query.width"},
    "width-2d": {"query.width"},
    "act-relu": {"query.activation"},
    "act-relu2": {"query.activation"},
    "act-silu": {"query.activation"},
    "act-identity": {"query.activation"},
    "norms-none": {"query.pre_norm", "query.post_norm"},
    "norms-pre": {"query.post_norm"},
    "norms-post": {"query.pre_norm"},
    "separate": {"query.norm_stage"},
    "separate-pre": {"query.norm_stage", "query.post_norm"},
    "separate-post": {"query.norm_stage", "query.pre_norm"},
    "pre-layernorm": {"query.pre_norm"},
    "post-rmsnorm": {"query.post_norm"},
    "eps-1e-6": {"query.eps"},
    "eps-1e-3": {"query.eps"},
    "anchor-linear": {"query.anchor"},
    "anchor-none": {"query.anchor"},
    "scale-1": {"query.scale"},
}
"""Leaves of the model that differ from the layer's."""


@pytest.fixture(scope="module")
def module() -> dict[str, Any]:
    return runpy.run_path(str(FILE))


@pytest.mark.parametrize("name", ["STUDY", "PAPER"])
def test_each_arm_changes_one_choice(name: str, module: dict[str, Any]) -> None:
    arms = {arm.name: arm for arm in module[name].arms}
    layer, d = arms["res-gelu"].config, arms["baseline"].config.model.d_model
    assert arms.keys() == CHANGES.keys() | {
        *("baseline", "res-gelu", "key", "value", "all-three"),
        *("width-d-mlp", "all-three-mlp", "width-2d-mlp"),
    }
    assert len({content_hash(arm.config) for arm in arms.values()}) == len(arms)
    for changed, leaves in CHANGES.items():
        assert set(differences(layer.model, arms[changed].config.model)) == leaves, changed
        assert arms[changed].config.train == layer.train
    widths = [arms[f"width-{end}"].config.model.query.width for end in ("d8", "d4", "d", "2d")]
    assert widths == [d // 8, d // 4, d, 2 * d]
    assert arms["scale-1"].config.model.query.scale == 1.0


@pytest.mark.parametrize("name", ["STUDY", "PAPER"])
def test_keys_values_and_controls(name: str, module: dict[str, Any]) -> None:
    models = {arm.name: arm.config.model for arm in module[name].arms}
    kinds = {arm: tuple(getattr(m, part).kind for part in ("query", "key", "value")) for arm, m in models.items()}
    assert kinds["key"] == ("linear", "bottleneck", "linear")
    assert kinds["value"] == ("linear", "linear", "bottleneck")
    assert kinds["all-three"] == ("bottleneck",) * 3
    assert models["key"].key.anchor == "linear"

    size = {name: accounting.count(model).non_embedding for name, model in models.items()}
    for larger in ("width-d", "all-three", "width-2d"):
        assert set(differences(models["baseline"], models[f"{larger}-mlp"])) == {"d_ff"}
        assert size[f"{larger}-mlp"] == pytest.approx(size[larger], rel=1e-3)
    for larger in ("anchor-linear", "key", "value"):
        assert size[larger] == pytest.approx(size["width-d-mlp"], rel=2e-3)


def test_the_command_line_takes_it(module: dict[str, Any]) -> None:
    assert load_study(str(FILE)) == module["STUDY"]
    assert module["STUDY"].seeds == (1, 2, 3)
    assert all(study.search.seeds == (101,) for study in (module["STUDY"], module["PAPER"]))


def test_evidence_of_a_folder(
    module: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    relu = arm("act-relu", "ReLU", 0.02, config=config(model__query={"kind": "bottleneck", "activation": "relu"}))
    write_study(tmp_path / "study", (BASELINE, NONLINEAR, relu), search=False)
    out = tmp_path / "evidence.json"
    monkeypatch.setattr(sys, "argv", ["ablations.py", "--study", str(tmp_path / "study"), "--out", str(out)])
    module["main"]()
    tree = json.loads(out.read_text())
    assert tree["arms"][2]["changes"]["model.query.activation"] == "relu"
    losses = [statement["val_loss"] for statement in tree["arms"]]
    wanted = sum(losses[2][seed] - losses[1][seed] for seed in "123") / 3
    (against,) = (row for row in tree["against_the_layer"] if row["arm"] == "act-relu")
    assert against["diff"] == pytest.approx(wanted)
    assert "the reference" in capsys.readouterr().out
