"""Does what bends more gain more? A figure of the arms' geometry against their gains, over the arms of a study.

An association over a handful of arms, which differ in more than their geometry: it can speak against an explanation,
and hardly for one.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from qurve.errors import BadInput
from qurve.study.effects import final_losses, log_loss_gain, not_comparable, shared_seeds
from qurve.study.results import Arm, StudyResults

Figures = Mapping[str, Mapping[int, float]]
"""arm -> seed -> the figure of that run's model."""

FEWEST_ARMS = 3
MOST_PERMUTED = 8
"""Arms of which every order is tried; of more, this many drawn ones:"""
DRAWN = 20_000


@dataclass(frozen=True)
class Point:
    """One arm, each number a mean over the seeds that it shares with the baseline."""

    arm: str
    figure: float
    gain: float
    """Of the final loss over the baseline's, in per cent."""
    seeds: int


@dataclass(frozen=True)
class Association:
    """Over the arms beside the baseline, whose own gain is zero by definition."""

    points: tuple[Point, ...]
    correlation: float
    """Pearson's."""
    p: float
    """Two-sided, by permutation: the share of the orders of the arms' gains that go as well with the figure. Of three
    arms there are six orders, so that p is at least 1/6; of four at least 1/24. Where the figure is the same for all of
    n arms but one, an order is which gain that one gets: at least 1/n."""


def association(results: StudyResults, figures: Figures) -> Association:
    """The figure against the gain, of every arm that is comparable and has figures for its finished runs.

    Raises `BadInput` for fewer than three such arms, and where the figure or the gain is the same for all.
    """
    points = [
        point for arm in results.primary if (point := _point(results, arm, figures.get(arm.name, {}))) is not None
    ]
    if len(points) < FEWEST_ARMS:
        raise BadInput(
            f"an association needs at least {FEWEST_ARMS} arms beside the baseline with the figure and a verdict, "
            f"and there are {len(points)}"
        )
    xs, gains = [point.figure for point in points], [point.gain for point in points]
    for what, values in (("the figure", xs), ("the gain", gains)):
        if len(set(values)) == 1:
            raise BadInput(f"{what} is {values[0]:g} for every arm, so nothing can go with it")
    return Association(
        points=tuple(points),
        correlation=statistics.correlation(xs, gains),
        p=permutation_p(xs, gains),
    )


def permutation_p(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Share of the orders of `ys` whose correlation with `xs` is as far from zero as the one found.

    All orders of up to eight values; of more, 20,000 that a fixed seed draws, and the one found.
    """
    mean = statistics.fmean(xs)
    centred = [x - mean for x in xs]
    products = [abs(sum(x * y for x, y in zip(centred, order, strict=True))) for order in _orders(ys)]
    rounding = 1e-12 * sum(map(abs, centred)) * max(map(abs, ys))
    return statistics.fmean(product >= products[0] - rounding for product in products)


def _orders(ys: Sequence[float]) -> Iterator[Sequence[float]]:
    """The order found first."""
    if len(ys) <= MOST_PERMUTED:
        yield from itertools.permutations(ys)
        return
    yield ys
    generator = random.Random(0)
    for _ in range(DRAWN):
        yield generator.sample(ys, len(ys))


def _point(results: StudyResults, arm: Arm, figures: Mapping[int, float]) -> Point | None:
    if not_comparable(results, arm) is not None:
        return None
    seeds = [seed for seed in shared_seeds(results, [arm]) if seed in figures]
    if not seeds:
        return None
    gain = log_loss_gain(final_losses(arm, seeds), final_losses(results.baseline, seeds)).value
    return Point(arm.name, statistics.fmean(figures[seed] for seed in seeds), gain, len(seeds))
