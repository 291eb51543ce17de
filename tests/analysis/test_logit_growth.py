"""Scale invariance, degrees and growth: by scaling weights, by Euler's rule, and on numbers that are known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from qurve.analysis.logit_growth import (
    effective_rate,
    growth,
    growth_by_arm,
    invariant_parameters,
    logit_degree,
    radial_cosines,
    scaled,
    settled_turn,
)
from qurve.analysis.mechanism import Window, f_of, window_losses
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.model.positions import Rope
from qurve.projections import Bottleneck, Identity, Linear, Residual
from qurve.study.stability import Ending
from qurve.zoo.linear_attention import LinearAttention

T = 8
BASE: dict[str, Any] = {"n_layers": 2, "d_model": 12, "n_heads": 3, "d_ff": 8, "context": T, "vocab_size": 29}


def build(**changes: Any) -> GPT:
    model = GPT(ModelConfig(**{**BASE, "norm_eps": 1e-14, **changes}), seed=1).double().eval()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(seed))
    return model


def text(windows: int) -> list[Window]:
    ids = torch.randint(29, (windows, T + 1), generator=torch.Generator().manual_seed(3))
    return [(row[None, :-1], row[None, 1:]) for row in ids]


WINDOWS = text(3)


def bottleneck(**options: Any) -> Bottleneck:
    return Bottleneck(**{"eps": 1e-14, **options})


KINDS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "paper": ({"query": bottleneck()}, {"query.w2"}),
    "relu": ({"query": bottleneck(activation="relu")}, {"query.w1", "query.w2", "query.pre_gain"}),
    "relu2-no-pre-norm": ({"query": bottleneck(activation="relu2", pre_norm="none")}, {"query.w1", "query.w2"}),
    "silu-rmsnorm": ({"query": bottleneck(activation="silu", post_norm="rmsnorm")}, {"query.w2"}),
    "linear-anchor": ({"query": bottleneck(anchor="linear")}, {"query.w2"}),
    "no-post-norm": ({"query": bottleneck(post_norm="none", activation="relu")}, set()),
    "separate": ({"query": bottleneck(norm_stage="separate")}, set()),
    "separate-no-anchor": ({"query": bottleneck(norm_stage="separate", anchor="none")}, {"query.w2"}),
    "biases": ({"query": bottleneck(), "bias": True, "positions": Rope()}, set()),
    "baseline": ({"query": Linear()}, set()),
    "qk-norm": ({"query": Linear(), "qk_norm": True}, {"query.weight", "key.weight"}),
    "qk-norm-residual": ({"query": Residual(), "qk_norm": True}, {"key.weight"}),
    "nonlinear-value": ({"value": bottleneck(), "key": bottleneck()}, {"value.w2", "key.w2"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_invariant_is_what_can_be_scaled_without_a_change_and_nothing_else(kind: str) -> None:
    changes, expected = KINDS[kind]
    model = build(**changes)
    before, found = window_losses(model, WINDOWS), set()
    attention = model.blocks[1].attention
    for name, parameter in attention.named_parameters():
        with scaled([parameter], 3.0):
            if window_losses(model, WINDOWS) == pytest.approx(before, abs=1e-9):
                found.add(name)
    assert found == expected == invariant_parameters(model.config, 1)


def test_f_is_blind_to_the_size_of_its_input_and_the_query_is_not() -> None:
    query = build(query=bottleneck()).blocks[0].attention.query
    x_BTD = torch.randn(1, 4, 12, dtype=torch.float64)
    assert torch.allclose(f_of(query, (3 * x_BTD,)), f_of(query, (x_BTD,)))
    assert torch.allclose(query(3 * x_BTD) - query(x_BTD), x_BTD)  # (3 x - x) / 2, the anchor's


@pytest.mark.parametrize("kind", ["paper", "relu", "qk-norm"])
def test_gradients_of_invariant_weights_are_orthogonal_to_them(kind: str) -> None:
    changes, expected = KINDS[kind]
    cosines = radial_cosines(build(**changes), WINDOWS)
    assert len(cosines) == len(list(build(**changes).parameters()))
    of_projections = {name: c for name, c in cosines.items() if ".attention." in name and "norm" not in name}
    small = {name for name, cosine in of_projections.items() if abs(cosine) < 1e-9}
    assert small == {f"blocks.{layer}.attention.{name}" for layer in (0, 1) for name in expected}


def test_the_radial_cosine_by_hand() -> None:
    model = build(dropout=0.3).train()
    weight = model.blocks[0].attention.value.weight
    weight.grad = torch.ones_like(weight)
    found = radial_cosines(model, WINDOWS)["blocks.0.attention.value.weight"]
    assert model.training
    assert torch.equal(weight.grad, torch.ones_like(weight))  # what was there stays
    weight.grad = None
    model.eval()
    sum(model.loss(*window) for window in WINDOWS).backward()  # type: ignore[union-attr]
    cosine = torch.cosine_similarity(weight.flatten(), weight.grad.flatten(), dim=0)
    assert found == pytest.approx(cosine.item())
    assert abs(found) > 1e-3


def test_a_parameter_without_a_gradient_has_no_cosine() -> None:
    model = build(query=Identity())
    model.blocks[0].attention.register_parameter("unused", torch.nn.Parameter(torch.ones(3, dtype=torch.float64)))
    assert math.isnan(radial_cosines(model, WINDOWS)["blocks.0.attention.unused"])


# ------------------------------------------------------------------------------------------------------------- degrees


@pytest.mark.parametrize(
    ("changes", "query", "key"),
    [
        ({"query": Linear()}, 1.0, 1.0),
        ({"query": Identity()}, 0.0, 1.0),
        ({"query": bottleneck(activation="relu")}, 0.0, 1.0),
        ({"query": Linear(), "qk_norm": True}, 0.0, 0.0),
        ({"query": bottleneck(anchor="none", post_norm="none", activation="relu")}, 2.0, 1.0),
    ],
    ids=["baseline", "identity", "relu-f", "qk-norm", "two-matrices"],
)
def test_degrees_that_follow_from_the_formula(changes: dict[str, Any], query: float, key: float) -> None:
    found = logit_degree(build(**changes), WINDOWS)
    assert [one.layer for one in found] == [0, 1]
    for one in found:
        assert (one.query, one.key) == pytest.approx((query, key), abs=1e-9)
        assert one.together == pytest.approx(query + key, abs=1e-9)


def test_the_papers_layer_and_the_linear_residual_lie_between() -> None:
    linear, nonlinear = (logit_degree(build(query=kind), WINDOWS)[1] for kind in (Residual(), bottleneck()))
    assert 0 < linear.query < 1.2
    assert linear.query != pytest.approx(1.0, abs=1e-3)
    assert abs(nonlinear.query) < 0.5 * linear.query


def test_blocks_without_logits_have_no_degree() -> None:
    assert logit_degree(build(mixer=LinearAttention()), WINDOWS) == []


def test_scaling_is_undone_to_the_last_bit() -> None:
    model = build()
    before = {name: p.clone() for name, p in model.named_parameters()}
    logit_degree(model, WINDOWS)
    with pytest.raises(RuntimeError, match="broken"), scaled(model.parameters(), 1 / 3):
        raise RuntimeError("broken")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(block.attention._forward_pre_hooks for block in model.blocks)


# --------------------------------------------------------------------------------------------------------------- rates


def test_an_update_of_adam_turns_by_the_effective_rate() -> None:
    weight = torch.nn.Parameter(torch.randn(40, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    before = weight.detach().clone()
    weight.grad = torch.randn(40, 50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0).step()
    turned = torch.acos(torch.cosine_similarity(weight.flatten(), before.flatten(), dim=0)).item()
    assert turned == pytest.approx(effective_rate(before, 1e-3), rel=0.01)


@pytest.mark.parametrize(("lr", "decay", "beta1"), [(0.05, 0.2, 0.9), (0.05, 0.2, 0.0)])
def test_turns_settle_where_decay_and_updates_balance(lr: float, decay: float, beta1: float) -> None:
    """A scale-invariant weight under random gradients, from a tenth and from ten times the length it settles at."""
    turns, size = [], math.sqrt(lr / (2 * decay))
    for start in (0.1, 10.0):
        generator = torch.Generator().manual_seed(1)
        draw = lambda g=generator: torch.randn(2000, generator=g, dtype=torch.float64)  # noqa: E731
        weight = torch.nn.Parameter(start * size * draw())
        optimizer = torch.optim.AdamW([weight], lr=lr, betas=(beta1, 0.95), weight_decay=decay)
        late = []
        for step in range(700):
            gradient, unit = draw(), weight.detach() / weight.detach().norm()
            weight.grad = (gradient - (gradient @ unit) * unit) / weight.detach().norm()
            optimizer.step()
            if step >= 600:
                late.append(torch.acos((weight.detach() / weight.detach().norm()) @ unit).item())
        turns.append(sum(late) / len(late))
    assert turns == pytest.approx([settled_turn(lr, decay, beta1)] * 2, rel=0.06)


# -------------------------------------------------------------------------------------------------------------- growth


def test_a_power_is_found() -> None:
    found = growth((rate, 7 * rate**1.5) for rate in (1e-3, 2e-3, 8e-3))
    assert (found.power, found.low, found.high) == pytest.approx((1.5,) * 3)
    assert found.points == 3
    assert growth([(1.0, 1.0), (2.0, 4.0)]).power == pytest.approx(2.0)
    assert growth([(1.0, 1.0), (2.0, 4.0)]).high == math.inf


def test_its_interval_covers_as_often_as_it_says() -> None:
    noise_NP, covered = 0.3 * torch.randn(2000, 6, dtype=torch.float64), 0
    for noise in noise_NP.tolist():
        found = growth((2.0**n, 4.0**n * math.exp(noise[n])) for n in range(6))
        covered += found.low <= 2 <= found.high
    assert 0.935 <= covered / 2000 <= 0.965


def test_one_rate_has_no_growth() -> None:
    with pytest.raises(ValueError, match="2 trainings at one rate"):
        growth([(1e-3, 2.0), (1e-3, 3.0)])


def test_the_trainings_of_a_stability_study() -> None:
    def ending(arm: str, lr: float, logit: float | None, status: str = "finished") -> Ending:
        return Ending(arm, lr, 0.1, 1, status, 10, 5.0, 4.0, 0, logit)

    endings = [
        *(ending("baseline", lr, 3 * lr**2) for lr in (1e-3, 2e-3, 4e-3)),
        ending("baseline", 8e-3, 1.0, "diverged"),
        *(ending("res-gelu", lr, 5 * lr) for lr in (1e-3, 2e-3)),
        ending("res-gelu", 4e-3, None),
        ending("identity", 1e-3, 2.0),
    ]
    found = growth_by_arm((e.arm, e.lr, e.max_logit) for e in endings if e.status == "finished")
    assert {arm: one.power for arm, one in found.items()} == pytest.approx({"baseline": 2.0, "res-gelu": 1.0})
    assert found["baseline"].points == 3
