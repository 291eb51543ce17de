"""Covariances in parts: the same spectrum as of all points at once, known answers, and memory that does not grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qurve.analysis import spectrum
from qurve.analysis.spectrum import FLOOR, Spectrum, StreamingCovariance, affine_hull_dimension


def drawn(points: int, width: int, seed: int = 1) -> Tensor:
    return torch.randn(points, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spectrum_of(*parts: Tensor) -> Spectrum:
    covariance = StreamingCovariance(parts[0].shape[-1])
    for part in parts:
        covariance.add(part)
    return covariance.spectrum()


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    width=st.integers(1, 6),
    far=st.sampled_from([0.0, 1e5]),
    seed=st.integers(0, 2**31),
)
def test_parts_give_the_singular_values_of_all_points_together(
    sizes: list[int], width: int, far: float, seed: int
) -> None:
    x_MN = drawn(sum(sizes), width, seed) + far
    centred_MN = x_MN - x_MN.mean(0)
    expected = torch.linalg.svdvals(centred_MN) / len(x_MN) ** 0.5
    expected = torch.cat([expected, expected.new_zeros(width - len(expected))])
    found = spectrum_of(*x_MN.split(sizes))
    assert found.points == len(x_MN)
    assert found.deviations == pytest.approx(expected.tolist(), rel=1e-6, abs=2 * FLOOR * expected[0].item() + 1e-10)


@pytest.mark.parametrize("columns", [1, 3, 7])
def test_columns_in_parts_give_the_same(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x_MN = drawn(30, 7) @ drawn(7, 7, seed=2)
    whole, some = spectrum_of(x_MN).deviations, spectrum_of(x_MN[:, 2:6]).deviations
    monkeypatch.setattr(spectrum, "COLUMNS", columns)
    covariance = StreamingCovariance(7)
    for part in x_MN.split(11):
        covariance.add(part)
    assert covariance.spectrum().deviations == pytest.approx(whole, rel=1e-9)
    assert covariance.spectrum(slice(2, 6)).deviations == pytest.approx(some, rel=1e-9)


def test_any_leading_shape_is_points_and_coordinates_can_be_chosen() -> None:
    x_MN = drawn(24, 5)
    covariance = StreamingCovariance(5)
    covariance.add(x_MN.view(2, 3, 4, 5).float())
    assert covariance.spectrum().deviations == pytest.approx(spectrum_of(x_MN).deviations, rel=1e-5)
    assert covariance.spectrum(slice(1, 3)).deviations == pytest.approx(spectrum_of(x_MN[:, 1:3]).deviations, rel=1e-5)


def test_known_answers() -> None:
    axes_MN = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=torch.float64))[:3]
    found = spectrum_of(axes_MN, -axes_MN)  # variances 9/3, 4/3, 1/3, 0
    assert [3 * deviation**2 for deviation in found.deviations] == pytest.approx([9, 4, 1, 0])
    assert found.rank() == 3
    assert found.rank(0.5) == 2
    assert found.variance == pytest.approx(14 / 3)
    assert found.participation_ratio == pytest.approx(14**2 / (81 + 16 + 1))
    assert found.stable_rank == pytest.approx(14 / 9)
    assert [found.outside(n) for n in range(5)] == pytest.approx([1, 5 / 14, 1 / 14, 0, 0])


def test_even_spread_counts_every_direction_and_one_point_none() -> None:
    even = Spectrum((2.0,) * 7, 100)
    assert (even.participation_ratio, even.stable_rank, even.rank()) == (pytest.approx(7), pytest.approx(7), 7)
    alone = spectrum_of(drawn(1, 3))
    assert (alone.participation_ratio, alone.stable_rank, alone.rank(), alone.outside(0)) == (0, 0, 0, 0)


@settings(max_examples=40)
@given(rank=st.integers(0, 7), width=st.integers(1, 7), seed=st.integers(0, 2**31))
def test_a_planted_rank_is_found(rank: int, width: int, seed: int) -> None:
    rank = min(rank, width)
    flat_MN = drawn(40, rank, seed) @ drawn(rank, width, seed + 1) + drawn(1, width, seed + 2)
    assert affine_hull_dimension(flat_MN, 1e-5) == rank


def test_few_points_span_little() -> None:
    assert affine_hull_dimension(drawn(4, 9)) == 3
    assert affine_hull_dimension([[0, 0, 0], [1, 2, 3], [2, 4, 6]]) == 1


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that anything makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given_to_it = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given_to_it:
            self.numbers = max(self.numbers, made.numel())
        return made


def test_memory_is_bounded_whatever_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound by construction: what is held is `N^2 + N` numbers, and no step makes more than one part."""
    monkeypatch.setattr(spectrum, "MOST_NUMBERS", 200)
    x_MN = drawn(5_000, 10).float()  # 50,000 numbers, to be widened
    covariance = StreamingCovariance(10)
    with Largest() as largest:
        covariance.add(x_MN)
    assert 100 <= largest.numbers <= 200  # the scatter alone has a hundred
    held = [value for value in vars(covariance).values() if isinstance(value, Tensor)]
    assert sum(value.untyped_storage().nbytes() for value in held) == 8 * (10 * 10 + 10)
    assert covariance.points == 5_000
    assert covariance.spectrum().deviations == pytest.approx(spectrum_of(x_MN).deviations, rel=1e-9)


def test_what_cannot_be_is_refused() -> None:
    covariance = StreamingCovariance(3)
    with pytest.raises(ValueError, match="no points were added"):
        covariance.spectrum()
    with pytest.raises(ValueError, match="points of 4 coordinates, where there were 3"):
        covariance.add(drawn(2, 4))
    with pytest.raises(ValueError, match="not finite"):
        covariance.add(torch.tensor([[0.0, torch.inf, 0.0]]))
    with pytest.raises(ValueError, match="at least 1e-07"):
        spectrum_of(drawn(9, 2)).rank(1e-9)
    with pytest.raises(ValueError, match="below 1"):
        spectrum_of(drawn(9, 2)).rank(1.0)
    with pytest.raises(ValueError, match="at least one coordinate"):
        Spectrum((), 3)
