"""The paper's architectures at GPT-3's sizes: their shapes, rates and protocol, and their toys, which are trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from qurve import presets
from qurve.accounting import PEAK_FLOPS, count
from qurve.config import differences
from qurve.data.loader import TokenData
from qurve.presets import scale
from qurve.projections import Bottleneck
from qurve.train.config import RunConfig

# Layers, width, heads (of the largest 16 as wide as its 24) and peak rate of table 2.1 of arXiv 2005.14165.
TABLE = {"350m": (24, 1024, 16, 3e-4), "760m": (24, 1536, 16, 2.5e-4), "1.3b": (24, 2048, 16, 2e-4)}


def arm(size: str, name: str) -> RunConfig:
    return presets.get(f"scale/{size}/{name}")


@pytest.mark.parametrize("size", TABLE)
def test_baselines_are_gpt_3s_under_the_papers_protocol(size: str) -> None:
    n_layers, d_model, n_heads, lr = TABLE[size]
    baseline = arm(size, "baseline")
    model, train = baseline.model, baseline.train
    assert (model.n_layers, model.d_model, model.n_heads, model.d_ff) == (n_layers, d_model, n_heads, 4 * d_model)
    assert (train.lr, train.min_lr) == (lr, pytest.approx(lr / 10))
    changed = {"model.n_layers", "model.d_model", "model.n_heads", "model.d_ff", "train.lr", "train.min_lr"}
    assert set(differences(presets.get("paper/baseline"), baseline)) == changed
    assert count(model).non_embedding == 12 * n_layers * d_model**2 + (2 * n_layers + 1) * d_model


@pytest.mark.parametrize("size", TABLE)
def test_arms_differ_as_the_papers_do(size: str) -> None:
    baseline, wide, nonlinear = (arm(size, name) for name in scale.ARMS)
    assert set(differences(baseline, wide)) == {"model.d_ff"}
    assert count(wide.model).non_embedding / count(baseline.model).non_embedding == pytest.approx(1.125, abs=1e-4)
    changed = {path for path in differences(baseline, nonlinear) if not path.startswith("model.query.")}
    assert changed == {"train.lr", "train.min_lr"}
    assert nonlinear.model.query == Bottleneck()
    paper, best = presets.get("paper/baseline").train, presets.get("paper/res-gelu-best").train
    assert nonlinear.train.lr / baseline.train.lr == pytest.approx(best.lr / paper.lr)
    assert nonlinear.train.min_lr / baseline.train.min_lr == pytest.approx(best.min_lr / paper.min_lr)


@pytest.mark.parametrize("name", [f"scale/{name}" for name in scale.NAMES])
def test_a_toy_keeps_what_its_arm_is(name: str) -> None:
    config = presets.get(name)
    toy = scale.toy(config)
    assert count(toy.model).total < 200_000
    assert toy.model.query == config.model.query
    assert toy.model.d_ff / toy.model.d_model == config.model.d_ff / config.model.d_model
    assert (toy.train.lr, toy.train.min_lr, toy.data.order) == (config.train.lr, config.train.min_lr, "paper")
    assert toy.train.warmup_steps / toy.train.steps == pytest.approx(1 / 30, abs=0.02)


def test_a_toy_trains(data: TokenData, tmp_path: Path) -> None:
    from qurve.train.loop import train

    toy = scale.toy(arm("1.3b", "res-gelu"))
    run = train(toy, tmp_path / "toy", data)
    losses = [line["loss"] for line in run.eval_lines()]
    assert run.status()["status"] == "finished"
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", [f"scale/{name}" for name in scale.NAMES])
def test_the_guide_says_what_each_run_takes(name: str) -> None:
    config = presets.get(name)
    cost, train = count(config.model), config.train
    flops = train.updates * train.tokens_per_step * cost.flops_per_token
    hours = flops / (0.4 * PEAK_FLOPS["NVIDIA H200"]["bf16"]) / 3600
    row = f"| `{name}` | {cost.total:,} | {flops:.3g} | {hours:.0f} |"
    assert row in (Path(__file__).parents[2] / "REPRODUCE.md").read_text(encoding="utf-8")
