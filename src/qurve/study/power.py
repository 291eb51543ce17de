"""Power: how many seeds a study needs to see an effect, and how small an effect so many seeds can show.

Exact for normal differences, by the noncentral t distribution. With several arms each is judged at the strictest level
that Holm may ask of it, `level / arms`, so that the true power is at least the one given. An effect and the standard
deviation of the paired differences are in the same unit, nats per token say.

A claim takes at least `LEAST_SEEDS` seeds here, whatever the test says of two.
"""

from __future__ import annotations

import math

from qurve.study.noise import noise_floor
from qurve.study.results import StudyResults

LEAST_SEEDS = 3
"""Of a verdict: one seed has no interval, and two decide nothing."""

MOST_SEEDS = 100_000
"""More are no answer."""

POWER = 0.8
LEVEL = 0.05


def power_of(effect: float, sd: float, n: int, *, level: float = LEVEL, arms: int = 1) -> float:
    """The chance that n seeds show an effect of this size, in either direction of the test."""
    from scipy.special import nctdtr, stdtrit

    _check(sd, level, arms)
    if n < LEAST_SEEDS:
        return 0.0
    freedom, shift = n - 1, abs(effect) / sd * math.sqrt(n)
    bound = float(stdtrit(freedom, 1 - level / arms / 2))
    below, low_tail = (float(nctdtr(freedom, shift, end)) for end in (bound, -bound))
    return 1 - _or_zero(below) + _or_zero(low_tail)


def _or_zero(tail: float) -> float:
    """scipy gives nan for some tails too small to tell from zero."""
    return 0.0 if math.isnan(tail) else tail


def seeds_needed(
    effect: float, sd_of_differences: float, *, power: float = POWER, level: float = LEVEL, arms: int = 1
) -> int | None:
    """The fewest seeds that show `effect` with at least this power; None where it takes more than `MOST_SEEDS`."""
    _check(sd_of_differences, level, arms)
    if not effect or not math.isfinite(effect):
        raise ValueError(f"an effect of {effect} cannot be planned for: it must be a finite number other than zero")

    def enough(n: int) -> bool:
        return power_of(effect, sd_of_differences, n, level=level, arms=arms) >= power

    few, many = LEAST_SEEDS - 1, LEAST_SEEDS
    while not enough(many):
        few, many = many, 2 * many
        if few > MOST_SEEDS:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many if many <= MOST_SEEDS else None


def minimum_detectable(n: int, sd: float, *, power: float = POWER, level: float = LEVEL, arms: int = 1) -> float | None:
    """The smallest effect that n seeds show with this power; None below `LEAST_SEEDS`, which show nothing."""
    _check(sd, level, arms)
    if n < LEAST_SEEDS:
        return None
    low, high = 0.0, sd
    while power_of(high, sd, n, level=level, arms=arms) < power:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if power_of(middle, sd, n, level=level, arms=arms) >= power else (middle, high)
    return high


def detectable(results: StudyResults) -> tuple[float, float] | None:
    """The minimum detectable effect of a study as it stands: in nats per token, and in per cent of the baseline's loss.

    By the noise of its own paired differences, for all arms of its first comparison and declared looks. None where
    that is not known.
    """
    floor = noise_floor(results)
    if floor is None or floor.differences is None or floor.differences.value == 0:
        return None
    n, sd = floor.differences.n, floor.differences.value
    nats = minimum_detectable(n, sd, level=LEVEL / max(1, len(results.looks)), arms=max(1, results.family))
    return None if nats is None else (nats, 100 * nats / floor.base_loss)


def _check(sd: float, level: float, arms: int) -> None:
    if not (sd > 0 and math.isfinite(sd)):
        raise ValueError(f"a standard deviation of {sd}: it must be a finite number above zero")
    if not 0 < level < 1 or arms < 1:
        raise ValueError(f"level {level} for {arms} arms: it must lie between 0 and 1, for one arm at least")
