"""Initial weights: drawn per parameter, from a hash of its name and the seed.

So two models that share a name and a shape share that tensor, whatever else differs between them, and an extra layer
shifts nobody's random numbers. Draws are made on the CPU in float32, wherever the parameter lives.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

from qurve.projections.module import STD, Projection

RESIDUAL_WRITERS = ("attention.output.weight", "mlp.down.weight")
"""What writes into the residual stream starts smaller, by 1 / sqrt(2 L), as in GPT-2."""


def stream_seed(seed: int, name: str) -> int:
    """A seed for the random numbers called `name`: independent streams from one seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1


@torch.no_grad()
def initialize(model: nn.Module, n_layers: int, seed: int) -> None:
    """Matrices and embeddings normal with std 0.02, residual writers 0.02 / sqrt(2 L), gains one, biases zero."""
    ones = {f"{prefix}.{name}" for prefix, module in model.named_modules() for name in _gains(module)}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        if name in ones:
            parameter.fill_(1.0)
        elif parameter.dim() < 2:
            parameter.zero_()
        else:
            std = STD / math.sqrt(2 * n_layers) if name.endswith(RESIDUAL_WRITERS) else STD
            generator = torch.Generator().manual_seed(stream_seed(seed, f"init/{name}"))
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))


def _gains(module: nn.Module) -> list[str]:
    if isinstance(module, Projection):
        return [name for name, spec in module.config.parameters(module.dims).items() if spec.init == "ones"]
    return ["weight"] if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) else []
