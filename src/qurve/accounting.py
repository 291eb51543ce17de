"""What a model costs, by asking its configuration: parameters, FLOPs. Tests hold it against the built module."""

from __future__ import annotations

from dataclasses import dataclass

from qurve.model.config import ModelConfig
from qurve.model.positions import Learned
from qurve.projections import Dims, Linear


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
    d_model, bias = config.d_model, config.bias
    q_width = config.n_heads * config.head_width
    projections = [*zip(config.qkv, config.qkv_dims, strict=True), (Linear(), Dims(q_width, d_model, bias))]
    norm = d_model * (2 if bias and config.norm == "layernorm" else 1)
    block = sum(projection.num_params(dims) for projection, dims in projections) + 2 * norm
    block += config.mlp.num_params(d_model, config.d_ff, bias) + (2 * config.head_width if config.qk_norm else 0)
    non_embedding = config.n_layers * block + norm
    head = config.vocab_size * d_model
    positions = config.context * d_model if isinstance(config.positions, Learned) else 0
    embeddings = head + positions + (0 if config.tie_embeddings else head)
    attention = 4 * q_width * config.context  # q k^T and its product with v, two FLOPs a multiply-add
    block_flops = sum(projection.flops_per_token(dims) for projection, dims in projections) + attention
    block_flops += config.mlp.flops_per_token(d_model, config.d_ff)
    forward = config.n_layers * block_flops + 2 * head
    return Count(non_embedding, non_embedding + embeddings, forward, 3 * forward)
