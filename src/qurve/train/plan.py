"""A dry run: what a training will take, before anything is created."""

from __future__ import annotations

import time
from typing import Any

import torch

from qurve import accounting
from qurve.train.checkpoint import disk_needed
from qurve.train.config import RunConfig
from qurve.train.runtime import available_cores, modest_micro_batch, resolve_device, resolve_precision

MOST_LAYERS = 200
"""Of a model whose activations a plan measures: it takes some hundredths of a second a layer."""

ASSUMED_UTILISATION = 0.5
"""Share of the measured matrix peak that training is assumed to reach; the estimate's stated guess."""


def make_plan(name: str, config: RunConfig) -> dict[str, Any]:
    """Parameters, tokens, FLOPs, an estimate of the hours on this machine, and bytes in memory and on disk, of one run.

    Prefill is of a prompt as long as the context, decoding of its last token; the cache is of one such sequence, in the
    run's precision. The activations are those of one micro-batch, neither compiled nor checkpointed.
    """
    model, settings = config.model, config.train
    cost = accounting.count(model)
    sequences = config.sequences
    tokens = settings.updates * settings.tokens_per_step
    flops = tokens * cost.flops_per_token
    device = resolve_device(settings.device)
    kind = device.partition(":")[0]
    precision = resolve_precision(settings.precision, kind)
    micro_batch = settings.micro_batch or modest_micro_batch(config, kind, sequences)
    peak = matrix_peak(device, precision, settings.threads or available_cores())
    checkpoints, disk_bytes = disk_needed(config)
    decoding = {}
    if model.attends != "bidirectional":
        decoding = {
            "prefill_flops_per_token": cost.prefill_flops(model.context),
            "decode_flops_per_token": cost.decode_flops(model.context - 1),
            "cache_bytes": accounting.state_bytes(model, 1, model.context, 2 if precision == "bf16" else 4),
        }
    activations = {}
    if model.n_layers <= MOST_LAYERS:
        activations["activation_bytes"] = accounting.activation_bytes(model, micro_batch, model.context, precision)
    return {
        "preset": name,
        "non_embedding_parameters": cost.non_embedding,
        "active_parameters": cost.active,
        "embedding_parameters": cost.embedding,
        "total_parameters": cost.total,
        "steps": settings.updates,
        "tokens_per_step": settings.tokens_per_step,
        "sequences_per_step": sequences,
        "tokens": tokens,
        "forward_flops_per_token": cost.forward_flops_per_token,
        "backward_flops_per_token": cost.backward_flops_per_token,
        "flops_per_token": cost.flops_per_token,
        "flops": flops,
        "device": device,
        "precision": precision,
        "measured_matrix_flops_per_s": peak,
        "assumed_utilisation": ASSUMED_UTILISATION,
        "estimated_hours": flops / (peak * ASSUMED_UTILISATION) / 3600,
        **decoding,
        "micro_batch": micro_batch,
        **activations,
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
