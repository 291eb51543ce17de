"""How a model knows where a token stands: learned embeddings, rotations of queries and keys, or not at all.

No torch at import: configurations stay light.

Legend: B batch, H heads, T tokens, E head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from qurve.config import Choice, check_values
from qurve.errors import BadInput
from qurve.projections.functional import wide

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PositionConfig(Choice):
    """Base of the kinds of positions; register one with `@PositionConfig.register("name")`."""

    registry: ClassVar[dict[str, type[PositionConfig]]]

    def __post_init__(self) -> None:
        check_values(self)


@PositionConfig.register("learned")
@dataclass(frozen=True)
class Learned(PositionConfig):
    """One vector a position, added to the token's embedding, as in GPT-2."""


@PositionConfig.register("none")
@dataclass(frozen=True)
class NoPositions(PositionConfig):
    """Nothing: a causal model tells positions by what each token may look at."""


@PositionConfig.register("rope")
@dataclass(frozen=True)
class Rope(PositionConfig):
    """Rotary positions (Su et al., arXiv 2104.09864): each pair of a head's channels turns by an angle of its own."""

    layout: Literal["half", "interleaved"] = "half"
    """Which channels make a pair: `(i, i + E/2)` as in Llama's converted weights, or `(2i, 2i + 1)` as in the paper."""
    theta: float = 10_000.0
    """Base of the frequencies `theta^(-2i/E)`."""
    scaling: Literal["none", "linear", "llama3"] = "none"
    """`linear` divides every position by `factor`; `llama3` slows the low frequencies alone, smoothly in between."""
    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192
    """Context before the stretching; `llama3` compares wavelengths with it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("theta", "factor", "low_frequency_factor", "high_frequency_factor", "original_context"):
            if getattr(self, name) <= 0:
                raise BadInput(f"positions.{name} = {getattr(self, name)}: it must be above zero")
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise BadInput(
                f"positions.high_frequency_factor = {self.high_frequency_factor} must be above "
                f"low_frequency_factor = {self.low_frequency_factor}"
            )

    def frequencies(self, width: int) -> list[float]:
        """Radians a position, one for each of the `width / 2` pairs."""
        plain = [self.theta ** (-2 * i / width) for i in range(width // 2)]
        if self.scaling == "linear":
            return [f / self.factor for f in plain]
        return [self._slowed(f) for f in plain] if self.scaling == "llama3" else plain

    def _slowed(self, frequency: float) -> float:
        turns = self.original_context * frequency / (2 * math.pi)
        """Full turns within the original context: many for the high frequencies, which stay as they are."""
        low, high = self.low_frequency_factor, self.high_frequency_factor
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        return frequency * (share + (1 - share) / self.factor)


def rotations(config: Rope, positions_BT: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[B or 1, 1, T, E/2]` of every angle, in float32."""
    import torch

    frequencies = torch.tensor(config.frequencies(width), dtype=torch.float32, device=positions_BT.device)
    angles = positions_BT[:, None, :, None].float() * frequencies
    return angles.cos(), angles.sin()


def rotate(config: Rope, x_BHTE: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of channels by its angle, in float32 or wider; the result has the input's dtype."""
    import torch

    cos, sin = rotation
    x = wide(x_BHTE)
    a, b = (x[..., 0::2], x[..., 1::2]) if config.layout == "interleaved" else x.chunk(2, dim=-1)
    turned = a * cos - b * sin, a * sin + b * cos
    joined = torch.stack(turned, dim=-1).flatten(-2) if config.layout == "interleaved" else torch.cat(turned, dim=-1)
    return joined.to(x_BHTE.dtype)
