"""The feed-forward half of a block: dense, gated, or a mixture of gated experts. Configurations; no torch at import.

Legend: B batch, T tokens, D model width, F hidden width (`model.d_ff`), N experts, K experts that a token goes to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qurve.config import Choice, check_values
from qurve.errors import BadInput
from qurve.projections.functional import Activation

if TYPE_CHECKING:
    from torch import nn

    from qurve.model.config import ModelConfig


@dataclass(frozen=True)
class FeedForwardConfig(Choice):
    """Base of the kinds; register one with `@FeedForwardConfig.register("name")`."""

    registry: ClassVar[dict[str, type[FeedForwardConfig]]]
    if TYPE_CHECKING:
        activation: Activation  # every kind has one

    def __post_init__(self) -> None:
        check_values(self)

    def build(self, config: ModelConfig) -> nn.Module:
        """The module: `[B, T, D]` to `[B, T, D]` and the hidden activations `[B, T, F]`, None where there are none."""
        raise NotImplementedError

    def matrices(self, d_model: int, d_ff: int) -> dict[str, tuple[int, int]]:
        """Shape `[out, in]` of each weight that every token is multiplied by."""
        raise NotImplementedError

    def hidden_width(self, d_ff: int) -> int:
        """Width of the hidden activations that the next block may read; 0 where a token has none of its own."""
        return d_ff

    @property
    def quadratic(self) -> bool:
        """Whether a large input of twice the size gives about four times the output."""
        return self.activation == "relu2"

    def num_params(self, d_model: int, d_ff: int, bias: bool) -> int:
        """Learnable numbers."""
        return sum(out * (into + bias) for out, into in self.matrices(d_model, d_ff).values())

    def active_params(self, d_model: int, d_ff: int, bias: bool) -> int:
        """Parameters that act on one token."""
        return self.num_params(d_model, d_ff, bias)

    def flops_per_token(self, d_model: int, d_ff: int) -> int:
        """Forward FLOPs of the matrix products for one token."""
        return sum(2 * out * into for out, into in self.matrices(d_model, d_ff).values())


@FeedForwardConfig.register("dense")
@dataclass(frozen=True)
class Dense(FeedForwardConfig):
    """`a(x W_up) W_down`: GELU as in GPT-2, squared ReLU as in Primer (So et al., arXiv 2109.08668)."""

    activation: Activation = "gelu"

    def matrices(self, d_model: int, d_ff: int) -> dict[str, tuple[int, int]]:
        return {"up": (d_ff, d_model), "down": (d_model, d_ff)}

    def build(self, config: ModelConfig) -> nn.Module:
        from qurve.model.feed_forward_modules import DenseFeedForward

        return DenseFeedForward(config, self)


@FeedForwardConfig.register("gated")
@dataclass(frozen=True)
class Gated(FeedForwardConfig):
    """`(a(x W_gate) * x W_up) W_down`; with SiLU it is SwiGLU (Shazeer, arXiv 2002.05202)."""

    activation: Activation = "silu"

    def matrices(self, d_model: int, d_ff: int) -> dict[str, tuple[int, int]]:
        return {"gate": (d_ff, d_model), "up": (d_ff, d_model), "down": (d_model, d_ff)}

    @property
    def quadratic(self) -> bool:
        return True

    def build(self, config: ModelConfig) -> nn.Module:
        from qurve.model.feed_forward_modules import GatedFeedForward

        return GatedFeedForward(config, self)


@FeedForwardConfig.register("moe")
@dataclass(frozen=True)
class MixtureOfExperts(FeedForwardConfig):
    """Each token goes to the `active` gated experts that the router likes best, weighted by a softmax over those.

    No expert has a capacity, so no token is dropped. The training loss gains `balance` times the load-balancing loss
    `N * sum_n share_n * probability_n` (Fedus et al., arXiv 2101.03961), which is 1 when all experts are used alike.

    Raises `BadInput` unless `active` is between 1 and `experts` and `balance` at least 0.
    """

    experts: int = 8
    """N: gated feed-forwards to choose from."""
    active: int = 2
    """K: how many of them a token goes to."""
    activation: Activation = "silu"
    balance: float = 0.01
    """Weight of the load-balancing loss in the training loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.active <= self.experts:
            raise BadInput(f"mlp.active = {self.active}: it must be between 1 and mlp.experts = {self.experts}")
        if self.balance < 0:
            raise BadInput(f"mlp.balance = {self.balance}: it must be at least 0")

    def matrices(self, d_model: int, d_ff: int) -> dict[str, tuple[int, int]]:
        return Gated(self.activation).matrices(d_model, d_ff)

    @property
    def quadratic(self) -> bool:
        return True

    def hidden_width(self, d_ff: int) -> int:
        return 0  # each token's are those of its experts

    def num_params(self, d_model: int, d_ff: int, bias: bool) -> int:
        return self.experts * (super().num_params(d_model, d_ff, bias) + d_model)  # and the router's row

    def active_params(self, d_model: int, d_ff: int, bias: bool) -> int:
        return self.active * super().num_params(d_model, d_ff, bias) + self.experts * d_model

    def flops_per_token(self, d_model: int, d_ff: int) -> int:
        return self.active * super().flops_per_token(d_model, d_ff) + 2 * self.experts * d_model

    def build(self, config: ModelConfig) -> nn.Module:
        from qurve.model.feed_forward_modules import ExpertFeedForward

        return ExpertFeedForward(config, self)
