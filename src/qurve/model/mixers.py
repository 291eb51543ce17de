"""What mixes tokens in a block: softmax attention, and whatever takes its place. Configurations; no torch at import.

A mixer is a frozen configuration that builds a module with `forward(inputs, view, hidden, state) -> y_BTD`:

- `inputs`: the block's normalised input for queries, keys and values, `[B, T, D]` each, often one and the same tensor;
- `view`: who may see whom, and where each token stands (`qurve.model.view`);
- `hidden`: the previous block's hidden activations `[B, T, F]`, where a projection reads them;
- `state`: what decoding keeps of the tokens before, made by `state(...)`; None outside of decoding.

Register a kind with `@MixerConfig.register("name")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from qurve.config import Choice, check_values

if TYPE_CHECKING:
    from torch import nn

    from qurve.model.config import ModelConfig


@dataclass(frozen=True)
class MixerConfig(Choice):
    """Base of the kinds; register one with `@MixerConfig.register("name")`.

    Wherever a `ModelConfig` is given, it is the one of the block: `config.at(layer)`.
    """

    registry: ClassVar[dict[str, type[MixerConfig]]]
    projections: ClassVar[tuple[str, ...]] = ("query", "key", "value", "output")
    """Which of the model's projections it has."""

    def __post_init__(self) -> None:
        check_values(self)

    def check(self, config: ModelConfig) -> None:
        """Raise `ValueError`, naming the way out, for what cannot be combined with this mixer."""

    def build(self, config: ModelConfig, layer: int) -> nn.Module:
        """The module of block `layer`; `config` is the whole model's here."""
        raise NotImplementedError

    def state(self, config: ModelConfig, batch: int, length: int, **factory: Any) -> Any:
        """What decoding keeps: a `qurve.model.cache.State`, which has room for `length` tokens and can grow.

        `factory` has `device` and `dtype`.
        """
        raise NotImplementedError

    def num_params(self, config: ModelConfig) -> int:
        """Parameters beside those of the projections and of QK-norm."""
        raise NotImplementedError

    def mixing_flops(self, config: ModelConfig, seen: int) -> int:
        """Forward FLOPs per token, beside the projections', of mixing with `seen` tokens (all of them, unmasked)."""
        raise NotImplementedError

    def mixing_backward_flops(self, config: ModelConfig, seen: int) -> int:
        """The same of the backward pass: each product's two gradients, but for those of constants."""
        return 2 * self.mixing_flops(config, seen)

    def decoding_flops(self, config: ModelConfig, held: int, new: int) -> int:
        """Forward FLOPs per token of mixing `new` tokens with each other and with a state that holds `held` before."""
        return self.mixing_flops(config, held + new)

    def state_numbers(self, config: ModelConfig, length: int) -> int:
        """Numbers that the decoding state of one sequence of `length` tokens holds, in one block."""
        raise NotImplementedError

    def state_bytes(self, config: ModelConfig, length: int, dtype_bytes: int) -> int:
        """Bytes of the same, in a cache of a type that takes `dtype_bytes` a number."""
        return dtype_bytes * self.state_numbers(config, length)


@MixerConfig.register("softmax")
@dataclass(frozen=True)
class Softmax(MixerConfig):
    """`softmax(scale * q k^T) v`, the attention of every transformer. Decoding keeps keys and values."""

    def build(self, config: ModelConfig, layer: int) -> nn.Module:
        from qurve.model.attention import Attention

        return Attention(config, layer)

    def state(self, config: ModelConfig, batch: int, length: int, **factory: Any) -> Any:
        from qurve.model.cache import KeysValues

        return KeysValues(config, batch, length, **factory)

    def num_params(self, config: ModelConfig) -> int:
        return 0 if config.residual.attention_skip else 3 * config.n_heads  # the shaping

    def mixing_flops(self, config: ModelConfig, seen: int) -> int:
        # q k^T and its product with v, two FLOPs a multiply-add; shaped, once more for the uniform attention
        return 4 * config.n_heads * config.head_width * seen * (1 if config.residual.attention_skip else 2)

    def mixing_backward_flops(self, config: ModelConfig, seen: int) -> int:
        # the uniform attention has zeros for queries, which take no gradient
        zeros = 0 if config.residual.attention_skip else 2 * config.n_heads * config.head_width * seen
        return super().mixing_backward_flops(config, seen) - zeros

    def state_numbers(self, config: ModelConfig, length: int) -> int:
        return 2 * config.kv_heads * config.head_width * length
