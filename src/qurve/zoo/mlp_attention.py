"""MLP-attention: an MLP in the place of queries and keys. Configuration; no torch at import."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from qurve.config import or_else
from qurve.errors import BadInput
from qurve.model.mixers import MixerConfig
from qurve.model.positions import Rope
from qurve.projections import Linear

if TYPE_CHECKING:
    from torch import nn

    from qurve.model.config import ModelConfig


@MixerConfig.register("mlp_attention")
@dataclass(frozen=True)
class MLPAttention(MixerConfig):
    """`softmax(relu(x_t W_1) W_2) v`: a head's MLP maps a token to one logit for each position of the context.

    Position `s` has the logit of column `s` (of those that the mask lets token `t` see), whatever token stands there:
    the weights know the content at `t` and the place of `s`. Columns count from the first real token. Source: Morsali
    et al., "MLP-Attention: Improving Transformer Architecture with MLP Attention Weights" (submitted to Tiny Papers at
    ICLR 2023), where the hidden width is the context; biases here follow `model.bias`, on the hidden layer alone.

    In place of queries' and keys' parameters it has `H * hidden * (D + context)`, and the biases. Decoding keeps
    values.
    """

    projections: ClassVar[tuple[str, ...]] = ("value", "output")
    hidden: int | None = field(default=None, metadata=or_else("the context"))
    """Width of each head's hidden layer; None takes the context's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden is not None and self.hidden < 1:
            raise BadInput(f"mixer.hidden = {self.hidden}: it must be at least 1")

    def width(self, config: ModelConfig) -> int:
        """The hidden width, resolved."""
        return config.context if self.hidden is None else self.hidden

    def check(self, config: ModelConfig) -> None:
        for name, kind in (("query", config.query), ("key", config.key)):
            if kind != Linear():
                raise ValueError(f"MLP-attention has no {name} projection; leave model.{name} at 'linear'")
        if config.qk_norm:
            raise ValueError("MLP-attention has no queries and keys to normalise; leave model.qk_norm")
        if isinstance(config.positions, Rope):
            raise ValueError("MLP-attention has no queries and keys to rotate; use learned positions or none")
        if config.attention_scale is not None:
            raise ValueError("MLP-attention's logits are no products to be scaled; leave model.attention_scale")
        for name in ("q", "k", "qk"):
            if getattr(config.subspaces, name):
                raise ValueError(
                    f"MLP-attention has no queries and keys to see model.subspaces.{name}; allot those channels to v"
                )

    def build(self, config: ModelConfig, layer: int) -> nn.Module:
        from qurve.zoo.mlp_attention_modules import PositionAttention

        return PositionAttention(config, layer, self.width(config))

    def state(self, config: ModelConfig, batch: int, length: int, **factory: Any) -> Any:
        from qurve.zoo.mlp_attention_modules import Values

        return Values(config, batch, length, **factory)

    def num_params(self, config: ModelConfig) -> int:
        hidden, shaping = self.width(config), 0 if config.residual.attention_skip else 3
        return config.n_heads * (hidden * (config.d_model + config.bias + config.context) + shaping)

    def mixing_flops(self, config: ModelConfig, seen: int) -> int:
        averages = 1 if config.residual.attention_skip else 2  # shaped, there is the uniform one too
        logits = self.width(config) * (config.d_model + seen)
        return 2 * config.n_heads * (logits + averages * seen * config.head_width)

    def mixing_backward_flops(self, config: ModelConfig, seen: int) -> int:
        # the uniform average's weights take no gradient
        uniform = 0 if config.residual.attention_skip else 2 * config.n_heads * config.head_width * seen
        return 2 * self.mixing_flops(config, seen) - uniform

    def state_numbers(self, config: ModelConfig, length: int) -> int:
        return config.kv_heads * config.head_width * length
