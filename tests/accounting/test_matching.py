"""Controls are solved for: the achieved cost is the wanted one, as nearly as a whole width allows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurve import presets
from qurve.accounting import Match, count, match, mlp_widened
from qurve.accounting.matching import Quantity, measure
from qurve.errors import BadInput
from qurve.model.config import ModelConfig, Subspaces
from qurve.model.feed_forward import Dense, FeedForwardConfig, Gated, MixtureOfExperts
from qurve.projections import Bottleneck, Identity
from qurve.projections.mlp_reuse import MLPReuse

PAPER = ModelConfig()
QUANTITIES: tuple[Quantity, Quantity] = ("params", "flops")
MLPS: list[FeedForwardConfig] = [Dense(), Gated(), MixtureOfExperts(4, 2)]


def test_the_papers_control_comes_out() -> None:
    config, found = mlp_widened(PAPER, match="params", by=0.125)
    assert config == presets.get("paper/mlp-4.75").model
    assert (found.achieved, found.d_ff) == (95_570_688, (3072, 3648))
    assert str(found) == (
        "95,570,688 non-embedding parameters where 95,573,088 were wanted (-0.003 %), by d_ff 3,648 in place of 3,072"
    )


def test_other_controls_that_were_once_typed_come_out() -> None:
    small, paper = (presets.get(f"{family}/baseline").model for family in ("small", "paper"))
    assert mlp_widened(small, match="params", by=0.125).config == presets.get("small/mlp-4.75").model
    identity = presets.get("paper/identity").model
    assert match("params", paper, identity).config == presets.get("paper/identity-mlp-4.5").model


@pytest.mark.parametrize("quantity", QUANTITIES)
@given(st.sampled_from(MLPS), st.integers(1, 4), st.integers(200, 900), st.floats(-0.3, 2.0), st.booleans())
def test_no_other_width_comes_nearer(
    quantity: Quantity, mlp: FeedForwardConfig, n_layers: int, d_ff: int, by: float, tie: bool
) -> None:
    widths = {"n_layers": n_layers, "d_model": 32, "n_heads": 2, "d_ff": d_ff, "context": 16, "vocab_size": 64}
    baseline = ModelConfig(**widths, mlp=mlp, tie_embeddings=tie)
    config, found = mlp_widened(baseline, match=quantity, by=by)
    assert config == dataclasses.replace(baseline, d_ff=config.d_ff)
    assert found.wanted == pytest.approx((1 + by) * measure(quantity, baseline))
    assert found.achieved == measure(quantity, config)
    assert found.d_ff == (d_ff, config.d_ff)
    for other in (config.d_ff - 1, config.d_ff + 1):
        missed = measure(quantity, dataclasses.replace(baseline, d_ff=other)) - found.wanted
        assert abs(found.achieved - found.wanted) <= abs(missed)


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize(
    "arm",
    [
        dataclasses.replace(PAPER, query=MLPReuse()),
        dataclasses.replace(PAPER, key=Bottleneck(anchor="linear"), value=Bottleneck(anchor="linear")),
        dataclasses.replace(PAPER, subspaces=Subspaces(q=64, kv=128)),
        dataclasses.replace(PAPER, mlp=MixtureOfExperts(4, 2)),
        dataclasses.replace(PAPER, query=Identity()),
    ],
    ids=["reuse", "keys-and-values", "subspaces", "experts", "identity"],
)
def test_the_baseline_becomes_as_large_as_the_arm(quantity: Quantity, arm: ModelConfig) -> None:
    config, found = match(quantity, arm, PAPER)
    assert found.wanted == measure(quantity, arm)
    assert found.achieved == measure(quantity, config)
    assert abs(found.error) < 1e-3
    assert config == dataclasses.replace(PAPER, d_ff=config.d_ff)
    assert (config.d_ff < PAPER.d_ff) == (measure(quantity, arm) < measure(quantity, PAPER))


def test_quantities_are_the_ones_that_count_gives() -> None:
    found = count(PAPER)
    assert measure("params", PAPER) == found.non_embedding
    assert measure("flops", PAPER) == found.forward_flops_per_token


def test_error_is_relative_and_positive_when_the_control_is_larger() -> None:
    assert Match("params", 200.0, 201, (1, 2)).error == pytest.approx(0.005)


def test_an_arm_smaller_than_any_width_allows() -> None:
    with pytest.raises(BadInput, match=r"with model\.d_ff = 1 the baseline still has .* take a smaller baseline"):
        match("params", dataclasses.replace(PAPER, n_layers=3), PAPER)


@pytest.mark.parametrize(("by", "d_ff"), [(0.1, 5), (0.05, 4)], ids=["too-large", "too-small"])
def test_a_width_that_is_too_coarse(by: float, d_ff: int) -> None:
    tiny = ModelConfig(n_layers=1, d_model=8, n_heads=1, d_ff=4, mlp=MixtureOfExperts(8, 2), context=8, vocab_size=8)
    message = rf"no model\.d_ff comes within 0\.5 %; the nearest: .* by d_ff {d_ff} in place of 4"
    with pytest.raises(BadInput, match=message):
        mlp_widened(tiny, match="params", by=by)


@pytest.mark.parametrize("quantity", ["param", "loss", ""])
def test_an_unknown_quantity_is_refused(quantity: Any) -> None:
    with pytest.raises(BadInput, match=f"'{quantity}' cannot be matched: it is 'params' or 'flops'"):
        mlp_widened(ModelConfig(), match=quantity, by=0.1)
