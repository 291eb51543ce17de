"""Controls that cost what an arm costs: the baseline with a wider feed-forward, its width solved for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, NamedTuple

from qurve.accounting.costs import count
from qurve.errors import BadInput
from qurve.model.config import ModelConfig

Quantity = Literal["params", "flops"]
TOLERANCE = 0.005
"""Relative: nothing farther off is called matched."""

NAMES: dict[Quantity, str] = {"params": "non-embedding parameters", "flops": "forward FLOPs per token"}


@dataclass(frozen=True)
class Match:
    """How near a control comes. `str()` says it in a sentence."""

    quantity: Quantity
    """Non-embedding parameters, or forward FLOPs per token over a full context."""
    wanted: float
    achieved: int
    d_ff: tuple[int, int]
    """The feed-forward's width before and after."""

    @property
    def error(self) -> float:
        """Relative; positive where the control is larger than wanted."""
        return self.achieved / self.wanted - 1

    def __str__(self) -> str:
        before, after = self.d_ff
        return (
            f"{self.achieved:,} {NAMES[self.quantity]} where {self.wanted:,.0f} were wanted "
            f"({100 * self.error:+.3f} %), by d_ff {after:,} in place of {before:,}"
        )


class Matched(NamedTuple):
    config: ModelConfig
    match: Match


def mlp_widened(baseline: ModelConfig, *, match: Quantity, by: float) -> Matched:
    """The baseline with the `d_ff` that makes it `1 + by` times as large, as nearly as a whole number can.

        mlp_widened(baseline, match="params", by=0.125)         # the paper's control: d_ff from 3072 to 3648

    Raises `BadInput` where that is not within 0.5 %.
    """
    return _solve(baseline, match, (1 + by) * measure(match, baseline))


def match(quantity: Quantity, arm: ModelConfig, baseline: ModelConfig) -> Matched:
    """The baseline with the `d_ff` that makes it as large as `arm`, as nearly as a whole number can.

    Raises `BadInput` where that is not within 0.5 %, or the arm is smaller than the baseline with hardly any d_ff.
    """
    return _solve(baseline, quantity, measure(quantity, arm))


def measure(quantity: Quantity, config: ModelConfig) -> int:
    """What is matched."""
    if quantity not in NAMES:
        raise BadInput(f"{quantity!r} cannot be matched: it is 'params' or 'flops'")
    cost = count(config)
    return cost.non_embedding if quantity == "params" else cost.forward_flops_per_token


def _solve(baseline: ModelConfig, quantity: Quantity, wanted: float) -> Matched:
    """Every matrix has at most one side that is `d_ff` wide: the cost is a straight line over it."""
    here = measure(quantity, baseline)
    slope = measure(quantity, dataclasses.replace(baseline, d_ff=baseline.d_ff + 1)) - here
    d_ff = baseline.d_ff + round((wanted - here) / slope)
    if d_ff < 1:
        least = here - slope * (baseline.d_ff - 1)
        raise BadInput(
            f"{wanted:,.0f} {NAMES[quantity]} are wanted, and with model.d_ff = 1 the baseline still has {least:,}; "
            "take a smaller baseline"
        )
    config = dataclasses.replace(baseline, d_ff=d_ff)
    found = Match(quantity, wanted, measure(quantity, config), (baseline.d_ff, d_ff))
    if abs(found.error) > TOLERANCE:
        raise BadInput(f"no model.d_ff comes within {100 * TOLERANCE:g} %; the nearest: {found}")
    return Matched(config, found)
