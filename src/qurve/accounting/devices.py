"""Peak rates of known devices, and how much of it a run has used. Of other devices nothing is guessed."""

from __future__ import annotations

from typing import Literal

PEAK_FLOPS: dict[str, dict[Literal["bf16", "float32"], float]] = {
    # NVIDIA A100 Tensor Core GPU datasheet
    "NVIDIA A100-SXM4-40GB": {"bf16": 312e12, "float32": 19.5e12},
    "NVIDIA A100-SXM4-80GB": {"bf16": 312e12, "float32": 19.5e12},
    "NVIDIA A100-PCIE-40GB": {"bf16": 312e12, "float32": 19.5e12},
    "NVIDIA A100 80GB PCIe": {"bf16": 312e12, "float32": 19.5e12},
    # NVIDIA H100 and H200 Tensor Core GPU datasheets; half of the tensor figures there, which are with sparsity
    "NVIDIA H100 80GB HBM3": {"bf16": 989.5e12, "float32": 67e12},
    "NVIDIA H100 PCIe": {"bf16": 756.5e12, "float32": 51e12},
    "NVIDIA H200": {"bf16": 989.5e12, "float32": 67e12},
    # NVIDIA HGX B200 datasheet, one of eight
    "NVIDIA B200": {"bf16": 2250e12},
    # NVIDIA L4 and L40S datasheets
    "NVIDIA L4": {"bf16": 121e12, "float32": 30.3e12},
    "NVIDIA L40S": {"bf16": 362.05e12, "float32": 91.6e12},
    # NVIDIA Ada and Blackwell GPU architecture whitepapers; bf16 with sums in float32
    "NVIDIA GeForce RTX 4090": {"bf16": 165.2e12, "float32": 82.6e12},
    "NVIDIA GeForce RTX 5090": {"bf16": 209.5e12, "float32": 104.8e12},
}
"""FLOP/s of dense matrix products as the vendor states them, by the device's name in torch: bf16 on tensor cores,
float32 without (torch's default, no TF32)."""


def utilisation(device: str | None, flops_per_second: float, precision: str) -> float | None:
    """Share of one device's peak that `flops_per_second` are (model FLOPs utilisation); None where none is known."""
    peak = next((rate for kind, rate in PEAK_FLOPS.get(device or "", {}).items() if kind == precision), None)
    return None if peak is None else flops_per_second / peak
