"""Rotary positions: against the definition, by complex numbers, and by what they are for."""

from __future__ import annotations

import cmath
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qurve.errors import BadInput
from qurve.model.positions import Rope, rotate, rotations

Layout = Literal["half", "interleaved"]


def turned(config: Rope, x_TE: torch.Tensor, positions: list[int]) -> torch.Tensor:
    pairs = rotations(config, torch.tensor([positions]), x_TE.shape[1])
    return rotate(config, x_TE[None, None], pairs)[0, 0]


@given(layout=st.sampled_from(["half", "interleaved"]), half=st.integers(1, 6), at=st.integers(0, 5000))
def test_each_pair_turns_by_its_angle(layout: Layout, half: int, at: int) -> None:
    width = 2 * half
    x_E = torch.randn(width, generator=torch.Generator().manual_seed(at))
    y_E = turned(Rope(layout=layout), x_E[None], [at])[0]
    for i in range(half):
        first, second = (i, i + half) if layout == "half" else (2 * i, 2 * i + 1)
        angle = at * 10_000.0 ** (-2 * i / width)
        expected = complex(x_E[first], x_E[second]) * cmath.exp(1j * angle)
        assert complex(y_E[first], y_E[second]) == pytest.approx(expected, abs=2e-3)  # float32 angles of thousands


@pytest.mark.parametrize("config", [Rope(), Rope(layout="interleaved"), Rope(scaling="linear"), Rope(scaling="llama3")])
def test_products_depend_on_distance_alone(config: Rope) -> None:
    q_E, k_E = torch.randn(2, 12)
    products = [(turned(config, q_E[None], [at + 7]) @ turned(config, k_E[None], [at]).T).item() for at in (0, 3, 100)]
    assert products == pytest.approx([products[0]] * 3, abs=1e-4)
    other = turned(config, q_E[None], [9]) @ turned(config, k_E[None], [0]).T
    assert other.item() != pytest.approx(products[0], abs=1e-4)


def test_linear_scaling_stretches_positions() -> None:
    x_TE = torch.randn(1, 8)
    stretched = turned(Rope(scaling="linear", factor=4.0), x_TE, [12])
    assert torch.allclose(stretched, turned(Rope(), x_TE, [3]), atol=1e-6)


def test_llama_scaling_slows_low_frequencies_alone() -> None:
    """Wavelengths below 8192 / 4 stay, those above 8192 are eight times as long; in between it is monotonous."""
    plain = Rope(theta=500_000.0).frequencies(128)
    scaled = Rope(theta=500_000.0, scaling="llama3", factor=8.0).frequencies(128)
    for before, after in zip(plain, scaled, strict=True):
        wavelength = 2 * cmath.pi / before
        if wavelength < 8192 / 4:
            assert after == before
        elif wavelength > 8192:
            assert after == pytest.approx(before / 8)
        else:
            assert before / 8 < after < before
    assert scaled == sorted(scaled, reverse=True)


@pytest.mark.parametrize("bad", [{"theta": 0.0}, {"factor": -1.0}, {"high_frequency_factor": 1.0}])
def test_frequencies_that_cannot_be_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(BadInput, match=rf"positions\.{next(iter(bad))} = "):
        Rope(**bad)  # type: ignore[arg-type]
