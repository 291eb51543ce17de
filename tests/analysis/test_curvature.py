"""Curvature: known answers of maps written by hand, zero for what is linear, and models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from qurve.analysis import curvature
from qurve.analysis.curvature import Curvature, CurvatureMeter, local_ranks, measure_curvature, slope
from qurve.analysis.pathways import Pathway
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.projections import Bottleneck, Linear, MLPReuse

D, T = 8, 10


class Map(nn.Module):
    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.step = step

    def forward(self, x_MD: Tensor) -> Tensor:
        return self.step(x_MD)


def pathway(step: Callable[[Tensor], Tensor], x: Any, length: int | None = None) -> Pathway:
    x_MD = torch.as_tensor(x, dtype=torch.float64)
    return Pathway(Map(step), x_MD, (), len(x_MD) if length is None else length)


def measured(*passes: Pathway) -> Curvature:
    meter = CurvatureMeter()
    for one in passes:
        meter.see(0, {"query": one})
    (found,) = meter.found()
    return found


def drawn(points: int = 40, width: int = D, seed: int = 1) -> Tensor:
    return torch.randn(points, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), far=st.sampled_from([0.0, 100.0]))
def test_an_affine_map_has_no_curvature(seed: int, far: float) -> None:
    weight_DO, bias_O = drawn(D, 5, seed), drawn(1, 5, seed + 1)
    found = measured(pathway(lambda x_MD: x_MD @ weight_DO + bias_O, drawn(seed=seed + 2) + far))
    assert (found.neighbours, found.distant) == (pytest.approx(0, abs=1e-11), pytest.approx(0, abs=1e-11))
    assert found.jacobian_spread < 1e-10
    assert found.rank == 5


def test_a_square_by_hand() -> None:
    """`a^2 - 2 ((a + b) / 2)^2 + b^2 = (a - b)^2 / 2`, the way is `b^2 - a^2`, and the derivative is 2 x."""
    x = [1.0, 2.0, 4.0, 7.0]
    found = measured(pathway(torch.square, [[a] for a in x]))

    def bend(pairs: list[tuple[float, float]]) -> float:
        return math.sqrt(sum(((a - b) ** 2 / 2) ** 2 for a, b in pairs) / sum((b**2 - a**2) ** 2 for a, b in pairs))

    assert found.neighbours == pytest.approx(bend([(1, 2), (2, 4), (4, 7)]))
    assert found.distant == pytest.approx(bend([(1, 4), (2, 7)]))
    mean, square = sum(x) / 4, sum(a * a for a in x) / 4
    assert found.jacobian_spread == pytest.approx((square - mean**2) / square, rel=1e-6)


def test_neighbours_stand_in_one_sequence() -> None:
    """The absolute value is straight within each of these sequences, and bent between them."""
    x = [[1.0], [2.0], [5.0], [-1.0], [-3.0], [-4.0]]
    found = measured(pathway(torch.abs, x, length=3))
    assert found.neighbours == 0
    assert found.distant > 0.5
    assert measured(pathway(torch.abs, x)).neighbours > 0.1


def test_the_spread_is_that_of_whole_jacobians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curvature, "PROBES", 1500)
    weight_DO, x_MD = drawn(D, D, 3), drawn(24)
    step = lambda x: torch.tanh(x @ weight_DO)  # noqa: E731
    jacobian_MOD = torch.stack([torch.func.jacrev(step)(x_D) for x_D in x_MD])
    apart_MOD = jacobian_MOD - jacobian_MOD.mean(0)
    expected = (apart_MOD.square().sum() / jacobian_MOD.square().sum()).item()
    assert measured(pathway(step, x_MD)).jacobian_spread == pytest.approx(expected, rel=0.05)


def test_slopes_are_those_of_automatic_differentiation() -> None:
    weight_DO, x_MD, v_D = drawn(D, 5, 3), 30 * drawn(6), drawn(1, D, 4)[0]
    step = lambda x: torch.tanh(x @ weight_DO / 30)  # noqa: E731
    jacobian_MOD = torch.stack([torch.func.jacrev(step)(x_D) for x_D in x_MD])
    assert torch.allclose(slope(pathway(step, x_MD), v_D), jacobian_MOD @ v_D, rtol=1e-5, atol=1e-7)


def test_curvature_has_no_unit() -> None:
    x_MD = drawn()
    found, larger, shifted = (
        measured(pathway(step, x_MD)) for step in (torch.tanh, lambda x: 7 * torch.tanh(x), lambda x: 3 + torch.tanh(x))
    )
    for other in (larger, shifted):
        assert other.neighbours == pytest.approx(found.neighbours, rel=1e-9)
        assert other.distant == pytest.approx(found.distant, rel=1e-9)
        assert other.jacobian_spread == pytest.approx(found.jacobian_spread, rel=1e-6)


def test_passes_add_up() -> None:
    x_MD = drawn(30)
    whole = measured(pathway(torch.tanh, x_MD, length=10))
    parts = measured(pathway(torch.tanh, x_MD[:20], length=10), pathway(torch.tanh, x_MD[20:], length=10))
    assert parts.neighbours == pytest.approx(whole.neighbours, rel=1e-12)
    assert parts.jacobian_spread == pytest.approx(whole.jacobian_spread, rel=1e-3)  # the step follows each pass's size


# --------------------------------------------------------------------------------------------------------------- models

IDS_BT = torch.randint(61, (6, T), generator=torch.Generator().manual_seed(5))


def build(**changes: Any) -> GPT:
    sizes: dict[str, Any] = {"n_layers": 2, "d_model": D, "n_heads": 2, "d_ff": 16, "context": T, "vocab_size": 61}
    model = GPT(ModelConfig(**(sizes | changes)), seed=1)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.normal_(0, 0.7, generator=torch.Generator().manual_seed(seed))
    return model.eval()


@pytest.mark.parametrize(
    ("changes", "bent"),
    [
        ({}, set()),
        ({"query": Bottleneck()}, {"query"}),
        ({"query": Bottleneck(activation="identity", pre_norm="none", post_norm="none")}, set()),
        ({"key": Bottleneck(anchor="linear"), "value": Bottleneck(anchor="none")}, {"key", "value"}),
        ({"query": MLPReuse()}, set()),  # in its input alone
    ],
    ids=["linear", "paper", "linear-bottleneck", "keys-values", "reuse"],
)
def test_the_nonlinear_pathways_are_curved_and_the_others_flat(changes: dict[str, Any], bent: set[str]) -> None:
    found = measure_curvature(build(**changes), IDS_BT.split(2))
    assert [(c.layer, c.pathway) for c in found] == [(n, p) for n in (0, 1) for p in ("query", "key", "value")]
    for one in found:
        figures = (one.neighbours, one.distant, one.jacobian_spread)
        if one.pathway in bent:
            assert min(figures) > 0.01
        else:
            assert max(figures) < 1e-7


def test_the_identity_restores_the_rank_at_each_token() -> None:
    """`f` goes through R channels, and its LayerNorm takes one more (it fixes the length); `x + f` has all of D."""
    model = build(query=Bottleneck(eps=1e-12))
    for one in measure_curvature(model, [IDS_BT]):
        if one.pathway == "query":
            assert (one.rank_f, one.rank) == (D // 2 - 1, D)
        else:
            assert (one.rank_f, one.rank) == (None, D)
    for one in measure_curvature(build(query=Bottleneck(post_norm="none", pre_norm="none")), [IDS_BT]):
        assert one.pathway != "query" or one.rank_f == D // 2


def test_local_ranks_are_of_the_token_asked_for() -> None:
    x = [[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0]]
    assert [local_ranks(pathway(torch.relu, x), token) for token in range(3)] == [(2, None), (1, None), (0, None)]


def test_a_linear_query_of_the_same_width_is_told_from_a_nonlinear_one() -> None:
    kinds = {"linear": Linear(), "narrow": Bottleneck(width=1), "wide": Bottleneck(width=4 * D)}
    spread = {name: measure_curvature(build(query=kind), [IDS_BT])[0].jacobian_spread for name, kind in kinds.items()}
    assert spread["linear"] < 1e-7 < min(spread["narrow"], spread["wide"])
