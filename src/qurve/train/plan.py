"""A dry run: what a training will take, before anything is created."""

from __future__ import annotations

import time
from typing import Any

import torch

from qurve import accounting
from qurve.train.checkpoint import disk_needed
from qurve.train.config import RunConfig
from qurve.train.runtime import available_cores, resolve_device, resolve_precision

ASSUMED_UTILISATION = 0.5
"""Share of the measured matrix peak that training is assumed to reach; the estimate's stated guess."""


def make_plan(name: str, config: RunConfig) -> dict[str, Any]:
    """Parameters, tokens, FLOPs, an estimate of the hours on this machine, and bytes on disk, of one run."""
    cost, settings = accounting.count(config.model), config.train
    sequences = config.sequences
    tokens = settings.updates * settings.tokens_per_step
    flops = tokens * cost.flops_per_token
    device = resolve_device(settings.device)
    precision = resolve_precision(settings.precision, device.partition(":")[0])
    peak = matrix_peak(device, precision, settings.threads or available_cores())
    checkpoints, disk_bytes = disk_needed(config)
    return {
        "preset": name,
        "non_embedding_parameters": cost.non_embedding,
        "total_parameters": cost.total,
        "steps": settings.updates,
        "tokens_per_step": settings.tokens_per_step,
        "sequences_per_step": sequences,
        "tokens": tokens,
        "flops_per_token": cost.flops_per_token,
        "flops": flops,
        "device": device,
        "precision": precision,
        "measured_matrix_flops_per_s": peak,
        "assumed_utilisation": ASSUMED_UTILISATION,
        "estimated_hours": flops / (peak * ASSUMED_UTILISATION) / 3600,
        "checkpoints": checkpoints,
        "disk_bytes": disk_bytes,
    }


def matrix_peak(device: str, precision: str, threads: int, seconds: float = 0.5) -> float:
    """FLOP/s of a square matrix product on this machine, measured now: the best of the tries that fit `seconds`."""
    size = 1024 if device == "cpu" else 8192
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a = torch.ones(size, size, dtype=dtype, device=device)
    before, best = torch.get_num_threads(), float("inf")
    torch.set_num_threads(threads)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or best == float("inf"):
        started = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - started)
    torch.set_num_threads(before)
    return 2 * size**3 / best
