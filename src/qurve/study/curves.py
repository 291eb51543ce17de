"""Curves over the steps, as points: what both the printed figures and those of the page are drawn from.

A curve is `(step, value)` in ascending steps. Means and bands are taken at the steps that all of the runs have: over a
changing set of runs they would jump.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from qurve.study.results import Arm, Run, StudyResults
from qurve.study.statistics import refusal

Curve = list[tuple[int, float]]

MOST_POINTS = 400
"""Of one run's curve in the page."""
MOST_POINTS_IN_ALL = 30_000
"""Of all runs' curves of one kind in the page."""


@dataclass(frozen=True)
class Band:
    """Several runs as one curve: their mean, and the smallest and the largest of them, at the steps they share."""

    mean: Curve
    low: Curve
    high: Curve
    n: int


def band(curves_of_seeds: Sequence[Sequence[tuple[int, float]]]) -> Band:
    curves = [dict(curve) for curve in curves_of_seeds]
    shared = [step for step in curves[0] if all(step in curve for curve in curves)] if curves else []
    columns = [[curve[step] for curve in curves] for step in shared]
    mean, low, high = (
        [(step, of(column)) for step, column in zip(shared, columns, strict=True)]
        for of in (statistics.fmean, min, max)
    )
    return Band(mean, low, high, len(curves))


def relative_gain(curve: Sequence[tuple[int, float]], base: Sequence[tuple[int, float]]) -> Curve:
    """The gain in log-loss over `base` in per cent, at the steps that both have."""
    reference = dict(base)
    return [(s, 100 * (reference[s] - loss) / reference[s]) for s, loss in curve if reference.get(s)]


def compared_pairs(results: StudyResults, arm: Arm) -> list[tuple[Run, Run]]:
    """`(the arm's run, the baseline's)` of each seed that both have finished; none where the arm has no verdict."""
    if refusal(results, arm, other_batches=bool(arm.seed_offset)) is not None:
        return []
    pairs = [(arm.runs[seed], results.baseline.runs[seed]) for seed in results.seeds]
    return [(run, base) for run, base in pairs if run.finished and base.finished]


def gains(results: StudyResults, arm: Arm) -> Band:
    """The relative gain of `arm` over the baseline: of the mean losses, with the smallest and largest seed's. Empty
    where the two are not compared."""
    pairs = compared_pairs(results, arm)
    of_seeds = band([relative_gain(run.val, base.val) for run, base in pairs])
    ours, theirs = (band([pair[i].val for pair in pairs]).mean for i in (0, 1))
    return Band(relative_gain(ours, theirs), of_seeds.low, of_seeds.high, len(pairs))


def from_step(points: Sequence[tuple[int, float]], first: int) -> Curve:
    return [(step, value) for step, value in points if step >= first]


def first_step(results: StudyResults) -> int:
    """Where figure 1 begins: the first twelfth is left out (it would flatten the rest) if enough points remain."""
    steps = sorted({step for run in results.runs for step, _ in run.val})
    late = [step for step in steps if steps and step >= steps[-1] / 12]
    return late[0] if len(late) >= 3 else 0


def loss_range(results: StudyResults) -> tuple[float, float] | None:
    """Of what happens after a fifth of the training, with a margin; None where nothing was evaluated."""
    shown = [run for run in results.runs if run.finished and run.val] or [run for run in results.runs if run.val]
    late = [loss for run in shown for step, loss in run.val if step >= run.val[-1][0] / 5]
    if not late:
        return None
    margin = 0.06 * (max(late) - min(late)) or 0.01
    return min(late) - margin, max(late) + margin


def smoothed(points: Sequence[tuple[int, float]]) -> Curve:
    """A centred running mean over a fortieth of the points; at the ends the window is what there is of it."""
    half = max(1, len(points) // 80)
    values = [value for _, value in points]
    return [(step, statistics.fmean(values[max(0, i - half) : i + half + 1])) for i, (step, _) in enumerate(points)]


def thinned(points: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> Curve:
    """At most `most` (two at least) of the points themselves, evenly spread, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def points_a_run(runs: int) -> int:
    """How many points of each of so many runs the page shows."""
    return max(50, min(MOST_POINTS, MOST_POINTS_IN_ALL // max(1, runs)))
