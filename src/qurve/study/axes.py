"""What an axis of a search has: values, or a `Range` to draw them from, and where it ends."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from qurve.errors import BadInput

Value = float | int | str | bool | None

DIGITS = 4
"""Significant digits of a value that is drawn."""
EDGE = 0.1
"""A value that is drawn from a `Range` lies at its edge in the first and in the last so much of the way."""


@dataclass(frozen=True)
class Range:
    """Values from `low` to `high` to draw from: evenly in the logarithm, or evenly as they are."""

    low: float
    high: float
    log: bool = True

    def __post_init__(self) -> None:
        if not (is_finite(self.low) and is_finite(self.high) and self.low < self.high):
            raise BadInput(
                f"a range goes from a number to a larger one, not from {self.low!r:.40} to {self.high!r:.40}"
            )
        if self.log and self.low <= 0:
            raise BadInput(f"a logarithmic range begins above 0, not at {self.low}; or take log=False")

    def at(self, share: float) -> float:
        """The value at `share` (0 to 1) of the way."""
        if self.log:
            return rounded(self.low * (self.high / self.low) ** share)
        return rounded(self.low + (self.high - self.low) * share)

    def share(self, value: float) -> float:
        """How much of the way from `low` to `high` a value is: the inverse of `at`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def beyond(axis: str, values: Sequence[Value], value: Value) -> float | None:
    """The value that a geometric axis would have beyond `value`; None unless that is an edge, and an open one.

    Closed are the edges that nothing lies beyond: 0 below, and 1 of a share.
    """
    numbers = sorted({float(v) for v in values if is_number(v)})  # type: ignore[arg-type]
    if len(numbers) < 2 or not is_number(value):
        return None
    if math.isclose(value, numbers[0]) and numbers[0] > 0:  # type: ignore[arg-type]
        return rounded(numbers[0] * numbers[0] / numbers[1], 12)
    if math.isclose(value, numbers[-1]):  # type: ignore[arg-type]
        new = numbers[-1] * (numbers[-1] / numbers[-2] if numbers[-2] > 0 else 2)
        new = rounded(min(new, 1.0) if "/" in axis else new, 12)
        return new if new > numbers[-1] else None
    return None


def is_near_end(axis: str, values: Range, value: float) -> bool:
    """Whether a value that was drawn is at an open end of its range, by `EDGE`. Closed ones are as in `beyond`."""
    if not values.low < value < values.high:
        low, high = value <= values.low, value >= values.high  # by rounding it may lie outside
    else:
        share = values.share(value)
        low, high = share <= EDGE, share >= 1 - EDGE
    return (low and values.low > 0) or (high and not ("/" in axis and values.high >= 1))


def is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: Value) -> bool:
    """Whether it is a number that a float can be."""
    return is_number(value) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def rounded(value: float, digits: int = DIGITS) -> float:
    return float(f"{value:.{digits}g}")
