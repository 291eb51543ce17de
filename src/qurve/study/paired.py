"""The mathematics of paired differences: intervals, tests, and what correction several arms need.

Differences are losses of an arm minus the baseline's, one for each seed that both have. Nothing here knows of studies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

MOST_FLIPPED = 20
"""Differences of which every combination of signs is tried."""


def paired_interval(differences: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Mean and two-sided t interval of paired differences (two at least), as `(mean, low, high)`."""
    from scipy.special import stdtrit

    mean, error = _mean_and_error(differences, "an interval")
    half = float(stdtrit(len(differences) - 1, (1 + level) / 2)) * error
    return mean, mean - half, mean + half


def paired_p(differences: Sequence[float]) -> float:
    """Two-sided p of the paired t test that the mean difference is zero, of two differences at least.

    Differences that are all alike have no spread to be judged by: p is 0, or 1 where they are all zero.
    """
    from scipy.special import stdtr

    mean, error = _mean_and_error(differences, "a t test")
    if error == 0:
        return float(mean == 0)
    return min(1.0, 2 * float(stdtr(len(differences) - 1, -abs(mean) / error)))


def _mean_and_error(differences: Sequence[float], what: str) -> tuple[float, float]:
    n = len(differences)
    if n < 2:
        raise ValueError(f"{what} needs at least two differences, not {n}")
    return statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(n)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjusted p of every test of a family: those at most 0.05 may be called real, with 5 % risk for all together.

    A test without a p (None) keeps its place in the family, and gets none: an arm that breaks eases no other's test.
    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        adjusted[place] = largest
    return adjusted


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of the exact sign-flip test, of one to `MOST_FLIPPED` differences.

    The share of all 2^n choices of signs whose sum is at least as far from zero as the one found. It assumes only that
    without an effect each difference may as well have the other sign; the price is that n differences can reach no p
    below `smallest_sign_flip_p(n)`.
    """
    import numpy as np

    n = len(differences)
    if not 1 <= n <= MOST_FLIPPED:
        raise ValueError(f"the sign-flip test takes 1 to {MOST_FLIPPED} differences, not {n}")
    sums = np.array([differences[0]])  # the first sign stays: with the other one, every sum is mirrored
    with np.errstate(over="ignore", invalid="ignore"):
        for difference in differences[1:]:
            sums = np.concatenate([sums + difference, sums - difference])
    rounding = 1e-12 * sum(map(abs, differences))
    return float(np.mean(np.abs(sums) >= abs(sums[0]) - rounding))  # the first sum has the signs as they were found


def smallest_sign_flip_p(n: int) -> float:
    """The smallest p that the sign-flip test can reach with n differences: 0.0625 with 5."""
    return 2.0 ** (1 - n)


def deviation_interval(deviation: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Chi-square interval of a standard deviation that was found with n normal values (two at least)."""
    from scipy.special import chdtri

    if n < 2:
        raise ValueError(f"a standard deviation needs at least two values, not {n}")
    low, high = (
        deviation * math.sqrt((n - 1) / float(chdtri(n - 1, tail))) for tail in ((1 - level) / 2, (1 + level) / 2)
    )
    return low, high
