"""Initial weights: drawn per parameter, from a hash of its name and the seed.

So two models that share a name and a shape share that tensor, whatever else differs between them, and an extra layer
shifts nobody's random numbers. Draws are made on the CPU in float32, wherever the parameter lives.

What starts otherwise says so: a projection in its `parameters`, any other module in its `starts`, a dictionary from the
names of its own parameters to a number or a tensor.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from qurve.model.config import ModelConfig
from qurve.model.feed_forward import MixtureOfExperts
from qurve.projections.base import STD, Moments
from qurve.projections.functional import SECOND_MOMENT
from qurve.projections.module import Projection


def stream_seed(seed: int, name: str) -> int:
    """A seed for the random numbers called `name`: independent streams from one seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Matrices and embeddings normal with std 0.02, gains one, biases zero; what is on the meta device is left alone.

    What writes into the residual stream starts smaller, by 1 / sqrt(2 L), as in GPT-2. Where a skip is missing, the
    projections on the way keep the signal's size instead (`ProjectionConfig.preserving`); queries, keys and routers,
    which carry none of it, start as ever.
    """
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if parameter.is_meta:
                continue
            start, std = _start(prefix, module, name.rpartition(".")[2], parameter, config)
            if std is None:
                parameter.copy_(torch.as_tensor(start, dtype=parameter.dtype).expand(parameter.shape))
            else:
                generator = torch.Generator().manual_seed(stream_seed(seed, f"init/{name}"))
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))


def _start(
    prefix: str, module: nn.Module, name: str, parameter: Tensor, config: ModelConfig
) -> tuple[float | Tensor, float | None]:
    """The constant that a parameter starts with, or the standard deviation that it is drawn with."""
    if isinstance(module, Projection):
        init = module.config.parameters(module.dims)[name].init
        if init == "zeros":
            return 0.0, None
        value = _size(prefix, module, name, STD if init == "normal" else 1.0, config)
        return (0.0, value) if init == "normal" else (value, None)
    starts: dict[str, float | Tensor] = getattr(module, "starts", {})
    if name in starts:
        return starts[name], None
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and name == "weight":
        return 1.0, None
    std = config.embedding_std if isinstance(module, nn.Embedding) else STD
    return 0.0, std if parameter.dim() >= 2 else None


def _size(prefix: str, projection: Projection, name: str, usual: float, config: ModelConfig) -> float:
    """The standard deviation of a projection's matrix, or the value of its gain."""
    residual, mlp = config.residual, config.at(int(prefix.split(".")[1])).mlp  # blocks.N.…
    last = prefix.endswith((".output", ".down"))
    if residual.attention_skip if ".attention." in prefix else residual.mlp_skip:
        return usual / math.sqrt(2 * config.n_layers) if last and name in projection.config.writers() else usual
    if prefix.endswith((".query", ".key", ".router")):
        return usual
    hidden = SECOND_MOMENT[mlp.activation] / (mlp.active if isinstance(mlp, MixtureOfExperts) else 1)
    moments = Moments(input=hidden if prefix.endswith((".down", ".subspaces")) else 1.0, other=hidden)
    return projection.config.preserving(projection.dims, moments).get(name, usual)
