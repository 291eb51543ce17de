"""Least squares from sums: against torch's own, and on maps that are known."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qurve.analysis.least_squares import LeastSquares


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 999))
def test_an_affine_map_is_found_from_parts(d_in: int, d_out: int, parts: int, seed: int) -> None:
    weight_DO, bias_O = random(d_in, d_out, seed=seed), random(d_out, seed=seed + 1)
    x_PND = 3 * random(parts, 2, 9, d_in, seed=seed + 2) + 1
    sums = LeastSquares()
    for x_BTD in x_PND:
        sums.add(x_BTD, x_BTD @ weight_DO + bias_O)
    found = sums.solve()
    assert torch.allclose(found.weight_DO, weight_DO, atol=1e-8)
    assert torch.allclose(found.bias_O, bias_O, atol=1e-8)
    assert found.tokens == 18 * parts


def test_noise_is_left_as_torch_leaves_it() -> None:
    x_ND, y_NO = random(50, 4, seed=1), random(50, 3, seed=2)
    sums = LeastSquares()
    sums.add(x_ND, y_NO)
    found = sums.solve()
    with_one_ND = torch.cat([x_ND, torch.ones(50, 1, dtype=torch.float64)], dim=1)
    theirs = torch.linalg.lstsq(with_one_ND, y_NO).solution
    assert torch.allclose(torch.cat([found.weight_DO, found.bias_O[None]]), theirs, atol=1e-10)
    of_map_O, of_mean_O = found.squared_errors(x_ND, y_NO)
    assert torch.allclose(of_map_O, (y_NO - with_one_ND @ theirs).square().sum(0))
    assert torch.allclose(of_mean_O, (y_NO - y_NO.mean(0)).square().sum(0))
    assert found(x_ND.float()).dtype == torch.float32


def test_other_tokens_are_judged_by_the_mean_of_the_fit() -> None:
    sums = LeastSquares()
    sums.add(random(20, 2, seed=1), random(20, 1, seed=2))
    found, x_ND, y_NO = sums.solve(), random(5, 2, seed=3), random(5, 1, seed=4) + 3
    _, of_mean_O = found.squared_errors(x_ND, y_NO)
    assert torch.allclose(of_mean_O, (y_NO - random(20, 1, seed=2).mean(0)).square().sum(0))


def test_a_direction_without_variance_gets_no_weight() -> None:
    """What a layer norm gives sums to zero: of all maps that fit, the smallest."""
    x_ND = random(40, 5, seed=3)
    x_ND = x_ND - x_ND.mean(-1, keepdim=True)
    y_NO = x_ND @ random(5, 2, seed=4)
    sums = LeastSquares()
    sums.add(x_ND.float(), y_NO)
    found = sums.solve()
    assert torch.allclose(found(x_ND), y_NO, atol=1e-5)
    assert found.weight_DO.sum(0).abs().max() < 1e-6


def test_constant_inputs_leave_the_mean() -> None:
    y_NO = random(9, 2, seed=5)
    sums = LeastSquares()
    sums.add(torch.ones(9, 3), y_NO)
    assert torch.equal(sums.solve().weight_DO, torch.zeros(3, 2, dtype=torch.float64))
    assert torch.allclose(sums.solve().bias_O, y_NO.mean(0))


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_too_few_tokens_are_refused(tokens: int) -> None:
    sums = LeastSquares()
    if tokens:
        sums.add(random(tokens, 4, seed=1), random(tokens, 1, seed=2))
    with pytest.raises(ValueError, match=f"{tokens} tokens fit a linear map"):
        sums.solve()
