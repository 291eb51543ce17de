"""Measuring a training on its way: `qurve.analysis.dynamics` and the gradients, block by block."""

from __future__ import annotations

import torch
from torch import nn

from qurve.analysis.dynamics import PATHWAYS, recording
from qurve.data.loader import TokenData
from qurve.model.gpt import GPT
from qurve.train.config import RunConfig
from qurve.train.distributed import gradient_norm
from qurve.train.runtime import autocast
from qurve.train.windows import batch, training_stream, training_windows

MEASURED_TOKENS = 2048
"""At most, but for a single longer window."""

DIGITS = 5
"""Significant digits of what is recorded."""


def measure_dynamics(
    config: RunConfig, data: TokenData, model: GPT, loss_module: nn.Module
) -> dict[str, list[float | None]]:
    """Every measure by block, of the weights and gradients as they are; between the backward pass and the update.

    The forward pass is over the first windows of the first step, each time, so that what changes is the model. It is
    made without dropout and not compiled, along the way that gathers sharded weights. Every process measures the same.
    Weights, gradients and random numbers stay as they were. Collective.
    """
    found = gradient_norms(model)
    starts = training_windows(config, data, 0)[0][: max(1, MEASURED_TOKENS // config.model.context)]
    model.eval()
    try:
        with recording(model) as dynamics, autocast(config), torch.no_grad():
            loss_module(*batch(config, data.split("train"), starts, training_stream(config, 1)))
    finally:
        model.train()
    return {
        measure: [_rounded(value) for value in values] for measure, values in (found | dynamics.by_measure()).items()
    }


def gradient_norms(model: GPT) -> dict[str, list[float | None]]:
    """The norm of the gradient of each block, and of its queries', keys' and values' parameters. Collective."""
    found: dict[str, list[float | None]] = {}
    for layer in range(model.config.n_layers):
        block = model.blocks[0 if model.config.share_blocks else layer]
        attention = block.get_submodule("attention")
        parts = {"block": block, **{name: part for name in PATHWAYS if (part := attention._modules.get(name))}}
        for name, part in parts.items():
            if any(parameter.grad is not None for parameter in part.parameters()):
                norms = found.setdefault(f"{name}.gradient", [None] * model.config.n_layers)
                norms[layer] = gradient_norm(part).item()
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
