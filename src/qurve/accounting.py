"""What a model costs, by asking its configuration: parameters, FLOPs. Tests hold it against the built module."""

from __future__ import annotations

from dataclasses import dataclass

from qurve.model.config import ModelConfig
from qurve.model.positions import Learned
from qurve.model.residual import SUBLAYERS


@dataclass(frozen=True)
class Count:
    """Sizes of one model."""

    non_embedding: int
    """Parameters without token and position embeddings and without the head."""
    total: int
    """All parameters; a tied head counts once."""
    forward_flops_per_token: int
    """Matrix products of one forward pass over a full context, per token; attention counted unmasked."""
    flops_per_token: int
    """Forward and backward, the backward twice the forward: `6 N + 12 L D T`."""


def count(config: ModelConfig) -> Count:
    """Exact parameters and FLOPs of `GPT(config)`, without building it."""
    norm = 0
    if config.residual.norm_place != "none":
        norm = config.d_model * (2 if config.bias and config.norm == "layernorm" else 1)
    blocks = [(_block(config, layer, norm), times) for layer, times in config.distinct_layers()]
    parameters = sum((1 if config.share_blocks else times) * block[0] for block, times in blocks)
    forward = sum(times * block[1] for block, times in blocks)
    non_embedding = parameters + (norm if config.residual.norm_place == "pre" else 0)
    head = config.vocab_size * config.d_model
    positions = config.context * config.d_model if isinstance(config.positions, Learned) else 0
    embeddings = head + positions + (0 if config.tie_embeddings else head)
    forward += 2 * head
    return Count(non_embedding, non_embedding + embeddings, forward, 3 * forward)


def _block(config: ModelConfig, layer: int, norm: int) -> tuple[int, int]:
    """Parameters of block `layer`, and its forward FLOPs per token over a full context."""
    here, projections = config.at(layer), config.projections(layer).values()
    subspaces = config.subspaces.total * config.d_ff if layer < config.n_layers - 1 else 0
    parameters = sum(kind.num_params(dims) for kind, dims in projections) + subspaces + 2 * norm
    parameters += here.mixer.num_params(here) + here.mlp.num_params(config.d_model, config.d_ff, config.bias)
    parameters += 2 * config.head_width if config.qk_norm else 0
    flops = sum(kind.flops_per_token(dims) for kind, dims in projections) + 2 * subspaces
    flops += here.mixer.mixing_flops(here, config.context) + here.mlp.flops_per_token(config.d_model, config.d_ff)
    for sublayer in SUBLAYERS:
        parameters += config.residual.num_params(config, sublayer)
        flops += config.residual.flops_per_token(config, sublayer)
    return parameters, flops
