"""Parameters, FLOPs and decoding state of a model, without building it. Tests hold them against the built module."""

from __future__ import annotations

from dataclasses import dataclass, field

from qurve.errors import BadInput
from qurve.model.config import ModelConfig
from qurve.model.positions import Learned
from qurve.model.residual import SUBLAYERS


@dataclass(frozen=True)
class Count:
    """Sizes of one model. FLOPs are those of matrix products, two a multiply-add; attention is counted unmasked."""

    config: ModelConfig = field(repr=False)
    non_embedding: int
    """Parameters without token and position embeddings and without the head. Shared blocks count once."""
    embedding: int
    """The others; a tied head counts once."""
    active: int
    """Non-embedding parameters that act on a token: of a mixture's experts only those that it goes to."""
    forward_flops_per_token: int
    """One forward pass over a full context, per token. Shared blocks count every time they are used."""
    backward_flops_per_token: int
    """Its backward pass: the gradients of both factors of every product, so twice the forward but for constants."""

    @property
    def total(self) -> int:
        return self.non_embedding + self.embedding

    @property
    def flops_per_token(self) -> int:
        """Training, forward and backward: `6 N + 12 L D T` for a plain transformer."""
        return self.forward_flops_per_token + self.backward_flops_per_token

    def prefill_flops(self, length: int) -> int:
        """Forward, per token of a prompt of `length` tokens that fills a cache; each token's logits are computed."""
        _check_decodes(self.config)
        _check_length(self.config, length)
        layers = ((self.config.at(layer), times) for layer, times in self.config.distinct_layers())
        return _tokenwise_flops(self.config) + sum(n * c.mixer.decoding_flops(c, 0, length) for c, n in layers)

    def decode_flops(self, length: int) -> int:
        """Forward, of one token that follows `length` others, which the decoding state holds."""
        _check_decodes(self.config)
        _check_length(self.config, length + 1)
        layers = ((self.config.at(layer), times) for layer, times in self.config.distinct_layers())
        return _tokenwise_flops(self.config) + sum(n * c.mixer.decoding_flops(c, length, 1) for c, n in layers)


def count(config: ModelConfig) -> Count:
    """Exact parameters and FLOPs of `GPT(config)`."""
    blocks = [(*_block_parameters(config, layer), times) for layer, times in config.distinct_layers()]
    final_norm = _norm_parameters(config) if config.residual.norm_place == "pre" else 0
    non_embedding, active = (
        final_norm + sum(block[which] * (1 if config.share_blocks else block[2]) for block in blocks)
        for which in (0, 1)
    )
    table = config.vocab_size * config.d_model
    positions = config.context * config.d_model if isinstance(config.positions, Learned) else 0
    tokenwise, mixing, mixing_backward = _tokenwise_flops(config), 0, 0
    for layer, times in config.distinct_layers():
        here = config.at(layer)
        mixing += times * here.mixer.mixing_flops(here, config.context)
        mixing_backward += times * here.mixer.mixing_backward_flops(here, config.context)
    return Count(
        config=config,
        non_embedding=non_embedding,
        embedding=table * (1 if config.tie_embeddings else 2) + positions,
        active=active,
        forward_flops_per_token=tokenwise + mixing,
        backward_flops_per_token=2 * tokenwise + mixing_backward,
    )


def state_bytes(config: ModelConfig, batch: int, length: int, dtype_bytes: int = 4) -> int:
    """Bytes that `Cache(config, batch, length)` holds: keys and values, or what the mixers keep in their place."""
    _check_decodes(config)
    layers = ((config.at(layer), times) for layer, times in config.distinct_layers())
    return batch * sum(times * here.mixer.state_bytes(here, length, dtype_bytes) for here, times in layers)


def _norm_parameters(config: ModelConfig) -> int:
    if config.residual.norm_place == "none":
        return 0
    return config.d_model * (2 if config.bias and config.norm == "layernorm" else 1)


def _block_parameters(config: ModelConfig, layer: int) -> tuple[int, int]:
    """Parameters of block `layer`, and how many of them act on one token."""
    here = config.at(layer)
    parameters = sum(kind.num_params(dims) for kind, dims in config.projections(layer).values())
    parameters += here.mixer.num_params(here) + (2 * config.head_width if config.qk_norm else 0)
    parameters += sum(config.residual.num_params(config, sublayer) for sublayer in SUBLAYERS)
    parameters += 2 * _norm_parameters(config) + _subspace_numbers(config, layer)
    widths = config.d_model, config.d_ff, config.bias
    return parameters + here.mlp.num_params(*widths), parameters + here.mlp.active_params(*widths)


def _tokenwise_flops(config: ModelConfig) -> int:
    """Forward FLOPs per token of everything but the mixing of tokens; the head included."""
    flops = 2 * config.vocab_size * config.d_model
    for layer, times in config.distinct_layers():
        block = sum(kind.flops_per_token(dims) for kind, dims in config.projections(layer).values())
        block += config.at(layer).mlp.flops_per_token(config.d_model, config.d_ff)
        block += sum(config.residual.flops_per_token(config, sublayer) for sublayer in SUBLAYERS)
        flops += times * (block + 2 * _subspace_numbers(config, layer))
    return flops


def _subspace_numbers(config: ModelConfig, layer: int) -> int:
    """Entries of the matrix that makes the subspaces' channels; the last block has none."""
    return config.subspaces.total * config.d_ff if layer < config.n_layers - 1 else 0


def _check_length(config: ModelConfig, length: int) -> None:
    if not 1 <= length <= config.context:
        raise BadInput(f"{length} tokens: the model takes 1 to {config.context}, its model.context")


def _check_decodes(config: ModelConfig) -> None:
    if config.attends == "bidirectional":
        raise BadInput("a bidirectional model sees the tokens to come: it is not decoded one token at a time")
