"""Residual schemes: how a block's sublayers (attention, then feed-forward) read the residual stream and write to it.

A scheme is a frozen configuration. The stream may be any tensor: `expand` makes it of the embeddings `x_BTD`, each
sublayer's module has `read(stream, norm) -> inputs` and `write(stream, y_BTD, norm) -> stream`, and `collapse` makes
`x_BTD` of it again. Register a kind with `@ResidualConfig.register("name")`. No torch at import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from qurve.config import Choice, check_values

if TYPE_CHECKING:
    from torch import Tensor

    from qurve.model.config import ModelConfig
    from qurve.model.residual_modules import Residual

Sublayer = Literal["attention", "mlp"]
SUBLAYERS: tuple[Sublayer, Sublayer] = ("attention", "mlp")


@dataclass(frozen=True)
class ResidualConfig(Choice):
    """Base of the kinds; register one with `@ResidualConfig.register("name")`."""

    registry: ClassVar[dict[str, type[ResidualConfig]]]

    def __post_init__(self) -> None:
        check_values(self)

    # What a topology may change; other schemes keep both skips and norms before each sublayer.
    @property
    def norm_place(self) -> Literal["pre", "post", "none"]:
        """Whether norms stand before each sublayer, after each sum, or nowhere."""
        return "pre"

    @property
    def attention_skip(self) -> bool:
        """Whether the stream also goes past attention."""
        return True

    @property
    def mlp_skip(self) -> bool:
        """Whether the stream also goes past the feed-forward."""
        return True

    def check(self, config: ModelConfig) -> None:
        """Raise `ValueError`, naming the way out, for what cannot be combined with this scheme."""

    def build(self, config: ModelConfig, layer: int, sublayer: Sublayer) -> Residual:
        """The module of one sublayer."""
        raise NotImplementedError

    def expand(self, x_BTD: Tensor) -> Tensor:
        """The stream, of the embeddings `[B, T, D]`."""
        return x_BTD

    def collapse(self, stream: Tensor) -> Tensor:
        """`[B, T, D]`, of the stream behind the last block."""
        return stream

    def num_params(self, config: ModelConfig, sublayer: Sublayer) -> int:
        """Parameters of one sublayer's module."""
        raise NotImplementedError

    def flops_per_token(self, config: ModelConfig, sublayer: Sublayer) -> int:
        """Forward FLOPs of its matrix products for one token."""
        raise NotImplementedError


@ResidualConfig.register("skip")
@dataclass(frozen=True)
class Skip(ResidualConfig):
    """`x + sublayer(norm(x))`, and the topologies that leave a norm or a skip out.

    Where a skip is missing, weights start so that the signal is kept: the projections on the way keep its mean square
    at one, and attention is shaped as `I + A - C` (C: uniform attention), which begins as the identity (He and Hofmann,
    arXiv 2311.01906). Without norms the embeddings start at unit scale.
    """

    norms: Literal["pre", "post", "none"] = "pre"
    """Before each sublayer and at the end (GPT-2), after each sum (Vaswani et al.), or nowhere."""
    attention: bool = True
    """Whether attention is skipped over."""
    mlp: bool = True
    """Whether the feed-forward is."""

    def check(self, config: ModelConfig) -> None:
        if self.norms == "none" and not self.mlp and config.mlp.quadratic:
            raise ValueError(
                "without norms and without a skip over it, a gated, expert or squared-ReLU feed-forward squares the "
                "signal's size block by block, until it vanishes or overflows; use model.mlp = dense with gelu, relu "
                "or silu, or keep norms or the skip"
            )

    @property
    def norm_place(self) -> Literal["pre", "post", "none"]:
        return self.norms

    @property
    def attention_skip(self) -> bool:
        return self.attention

    @property
    def mlp_skip(self) -> bool:
        return self.mlp

    def build(self, config: ModelConfig, layer: int, sublayer: Sublayer) -> Residual:
        from qurve.model.residual_modules import SkipConnection

        return SkipConnection(self.norms, self.attention if sublayer == "attention" else self.mlp)

    def num_params(self, config: ModelConfig, sublayer: Sublayer) -> int:
        return 0

    def flops_per_token(self, config: ModelConfig, sublayer: Sublayer) -> int:
        return 0
