"""Rates that vendors state, and nothing where they are not known."""

from __future__ import annotations

import pytest

from qurve.accounting import PEAK_FLOPS, utilisation


def test_share_of_the_peak() -> None:
    assert utilisation("NVIDIA A100-SXM4-80GB", 156e12, "bf16") == 0.5
    assert utilisation("NVIDIA A100-SXM4-80GB", 19.5e12, "float32") == 1.0


@pytest.mark.parametrize(
    ("device", "precision"),
    [(None, "bf16"), ("a made-up processor", "bf16"), ("NVIDIA H200 MIG 1g.18gb", "bf16"), ("NVIDIA B200", "float32")],
)
def test_unknown_peaks_are_not_guessed(device: str | None, precision: str) -> None:
    assert utilisation(device, 1e12, precision) is None


def test_tensor_cores_are_faster_than_float32() -> None:
    for rates in PEAK_FLOPS.values():
        assert 1e13 < rates.get("float32", 2e13) < rates["bf16"] < 1e16
