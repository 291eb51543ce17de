"""The figures of a study for papers: learning curves with the relative gain below, the gain from the first step on,
paired differences, learning-rate search, dynamics.

Every figure is a pure function of the results and a width in inches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from qurve.study.curves import (
    Band,
    Curve,
    band,
    first_step,
    from_step,
    gains,
    loss_range,
    points_a_run,
    smoothed,
    thinned,
)
from qurve.study.drawing import MARKERS, PALETTE, WASH, WIDE, blank, legend, line, shorten, styled
from qurve.study.dynamics import Picture, curves_of, panels, pictures_of
from qurve.study.results import Arm, StudyResults
from qurve.study.statistics import comparisons

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Draw = Callable[[StudyResults, float], "Figure"]

DASHES = ("solid", (0, (4, 2)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5)))
"""Of the lines of a picture of dynamics, in their order."""


def figures_of(results: StudyResults) -> dict[str, Draw]:
    """The figures that this study has, by name."""
    drawings: dict[str, Draw] = {"curves": curves_figure}
    if results.others:
        drawings |= {"gains": gains_figure, "differences": differences_figure}
    if results.search is not None and any(results.search.grid(arm.name) for arm in results.arms):
        drawings["search"] = search_figure
    return drawings | {picture.name: partial(dynamics_figure, picture) for picture in pictures_of(results)}


def colour_index(results: StudyResults, arm: Arm) -> int:
    """Index into `PALETTE`: 0 for the baseline, the others in turn; at the baseline's best point an architecture keeps
    its colour."""
    if arm.name == results.baseline.name:
        return 0
    if arm.matched is not None:
        own = next((other for other in results.arms if other.name == arm.matched and other.matched is None), None)
        if own is not None:
            return colour_index(results, own)
    return 1 + [other.name for other in results.others].index(arm.name) % (len(PALETTE) - 1)


def drawn(results: StudyResults) -> list[Arm]:
    """The arms whose curves are drawn: those at the baseline's best point would double the lines."""
    return [arm for arm in results.arms if arm.matched is None]


def _look(results: StudyResults, arm: Arm) -> dict[str, Any]:
    place = [results.baseline.name, *(other.name for other in results.others)].index(arm.name)
    return {"color": PALETTE[colour_index(results, arm)], "marker": MARKERS[place % len(MARKERS)]}


def fate(arm: Arm) -> str:
    """What a reader must know of the arm's seeds before looking at its line; nothing when they finished."""
    if arm.diverged:
        return f" ({arm.diverged} of {len(arm.runs)} diverged)"
    return "" if arm.finished else " (no seed finished)"


# -------------------------------------------------------------------------------------------------------------- curves


@styled
def curves_figure(results: StudyResults, width: float = WIDE) -> Figure:
    """Validation loss per arm (solid: mean over the finished seeds; shaded: from the smallest to the largest of them;
    thin: what did not finish) with the best arm's training loss (dashed), and below the relative log-loss gain of
    every other arm over the baseline, both against steps.
    """
    fig = blank(width, width * (0.74 if width > 5 else 1.35))
    top, bottom = fig.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    first = first_step(results)
    for arm in drawn(results):
        look, seeds = _look(results, arm), band([run.val for run in arm.finished])
        for run in arm.unfinished:
            line(top, _shown(results, run.val, first), color=look["color"], alpha=0.5, linewidth=0.7)
        label = shorten(arm.label, 38 - len(fate(arm))) + fate(arm)
        _shade(results, top, seeds, first, look["color"])
        points = _shown(results, seeds.mean, first)
        line(top, points, label=label, linewidth=1.7, markersize=3.5, **_marked(results, arm, points))
    best = results.best
    if best is not None:
        smooth = _shown(results, smoothed(band([run.train for run in best.finished]).mean), first)
        label = f"{shorten(best.label, 26 if width > 5 else 18)}, training (smoothed)"
        colour = _look(results, best)["color"]
        line(top, smooth, label=label, color=colour, linewidth=1.1, linestyle=(0, (4, 2)))
    top.set_ylabel("loss (nats per token)")
    _frame(results, top)
    _gains(results, bottom, first)
    bottom.set_ylabel("gain over the\nbaseline, ΔLL (%)")
    legend(fig, top, width)
    return fig


@styled
def gains_figure(results: StudyResults, width: float = WIDE) -> Figure:
    """The relative log-loss gain of every arm over the baseline from the first evaluation on, so that the gains of the
    warm-up show; shaded: from the smallest to the largest seed's. The legend has each arm's parameters.
    """
    fig = blank(width, width * (0.46 if width > 5 else 0.95))
    axes = fig.subplots()
    _gains(results, axes, 0)
    axes.set_ylabel("gain over the\nbaseline, ΔLL (%)")
    legend(fig, axes, width)
    return fig


def with_parameters(arm: Arm, limit: int = 30) -> str:
    """The arm's label with its non-embedding parameters in millions."""
    return f"{shorten(arm.label, limit)}, {arm.non_embedding / 1e6:,.2f} M{fate(arm)}"


def _gains(results: StudyResults, axes: Axes, first: int) -> None:
    axes.axhline(0, color=PALETTE[0], linewidth=1.2)
    for arm in drawn(results):
        if arm is results.baseline:
            continue
        look, seeds = _look(results, arm), gains(results, arm)
        _shade(results, axes, seeds, first, look["color"])
        points = _shown(results, seeds.mean, first)
        label = with_parameters(arm) + ("" if points or fate(arm) else " (no verdict)")
        line(axes, points, label=label, linewidth=1.7, markersize=3.5, **_marked(results, arm, points))
    axes.set_xlabel("step (optimiser updates)")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _shown(results: StudyResults, curve: Sequence[tuple[int, float]], first: int) -> Curve:
    """From the first step on, and no more points than one can see: a page has each figure twice."""
    return thinned(from_step(curve, first), points_a_run(4 * len(results.arms)) // 2)


def _shade(results: StudyResults, axes: Axes, seeds: Band, first: int, colour: str) -> None:
    if seeds.n > 1:
        low, high = (_shown(results, edge, first) for edge in (seeds.low, seeds.high))
        bottom, top = ([y for _, y in edge] for edge in (low, high))
        axes.fill_between([x for x, _ in low], bottom, top, color=colour, alpha=WASH, linewidth=0)


def _marked(results: StudyResults, arm: Arm, points: Curve) -> dict[str, Any]:
    """The arm's look, with a marker on some thirty of the points: more would hide the line, and of many lines fewer."""
    most = max(3, min(30, 600 // len(results.arms)))
    return _look(results, arm) | {"markevery": max(1, len(points) // most)}


def _frame(results: StudyResults, axes: Axes) -> None:
    """Limit the loss axis to what happens after a fifth of the training, and mark where runs diverged, inside of it."""
    limits = loss_range(results)
    if limits is None:
        return
    low, high = limits
    axes.set_ylim(low, high)
    for arm in drawn(results):
        for run in arm.runs.values():
            if run.status == "diverged":
                step, loss = run.val[-1] if run.val else (run.step, high)
                height, colour = min(max(loss, low), high), _look(results, arm)["color"]
                axes.plot(step, height, "x", color=colour, markersize=7, markeredgewidth=1.8, clip_on=False)


# --------------------------------------------------------------------------------------------------------- differences


@styled
def differences_figure(results: StudyResults, width: float = WIDE) -> Figure:
    """Per arm: its difference to the baseline, seed by seed (hollow), the mean and, from three seeds, the interval."""
    fig = blank(width, 0.8 + 0.5 * max(1, len(results.others)))
    axes = fig.subplots()
    axes.axvline(0, color=PALETTE[0], linewidth=1.2)
    axes.grid(axis="y", visible=False)
    pairs = comparisons(results)
    for row, (arm, pair) in enumerate(zip(results.others, pairs, strict=True)):
        look = _look(results, arm)
        if pair.low is not None and pair.high is not None and pair.n > 2:
            axes.plot([pair.low, pair.high], [row, row], color=look["color"], linewidth=2.4, solid_capstyle="butt")
        if pair.diff is not None:
            axes.plot([pair.diff], [row], linestyle="", markersize=7, **look)
        axes.plot(
            pair.differences,
            [row + 0.27] * pair.n,
            linestyle="",
            marker="o",
            markersize=4,
            markerfacecolor="none",
            markeredgecolor=look["color"],
        )
        if pair.diff is None:
            axes.text(
                0, row, f" {'no verdict' if pair.n else 'no seed finished in both'}", va="center", color=look["color"]
            )
    length = 28 if width > 5 else 18
    labels = [shorten(arm.label, length) + fate(arm).replace(" (", "\n(") for arm in results.others]
    axes.set_yticks(range(len(results.others)), labels)
    axes.set_ylim(len(results.others) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(
        "← lower loss · difference (nats per token) · higher loss →" if width > 5 else "difference (nats per token)"
    )
    axes.locator_params(axis="x", nbins=7 if width > 5 else 4)
    return fig


# -------------------------------------------------------------------------------------------------------------- search


@styled
def search_figure(results: StudyResults, width: float = WIDE) -> Figure:
    """The learning-rate search: mean validation loss against the peak rate, the chosen point ringed, and crosses at the
    upper edge for points where a run did not finish.
    """
    assert results.search is not None
    fig = blank(width, width * (0.4 if width > 5 else 0.85))
    axes = fig.subplots()
    axes.set_xscale("log")
    rates: set[float] = set()
    for arm in results.arms:
        look, grid = _look(results, arm), results.search.grid(arm.name)
        if not grid:  # not tried yet, or not searched: no line in the legend
            continue
        rates |= {lr for lr, _ in grid}
        finite = {point: loss for point, loss in grid.items() if loss is not None}
        lowest = {lr: min(loss for (r, _), loss in finite.items() if r == lr) for lr, _ in finite}
        line(axes, sorted(lowest.items()), color=look["color"], linewidth=1.5)
        axes.plot(
            [lr for lr, _ in finite],
            list(finite.values()),
            linestyle="",
            markersize=4.5,
            label=shorten(arm.label),
            **look,
        )
        broken = [lr for (lr, _), loss in grid.items() if loss is None]
        axes.plot(
            broken, [1.0] * len(broken), "x", color=look["color"], transform=axes.get_xaxis_transform(), clip_on=False
        )
        chosen = results.search.chosen.get(arm.name)
        if chosen is not None and (chosen.lr, chosen.min_lr) in finite:
            axes.plot(
                [chosen.lr],
                [finite[chosen.lr, chosen.min_lr]],
                "o",
                markersize=11,
                markerfacecolor="none",
                markeredgecolor=look["color"],
                markeredgewidth=1.4,
            )
    from matplotlib.ticker import NullLocator

    axes.set_xticks(sorted(rates), [f"{lr:g}" for lr in sorted(rates)])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("peak learning rate")
    axes.set_ylabel("validation loss\n(nats per token)")
    legend(fig, axes, width)
    return fig


# ------------------------------------------------------------------------------------------------------------ dynamics


@styled
def dynamics_figure(picture: Picture, results: StudyResults, width: float = WIDE) -> Figure:
    """One panel for each block that is shown: the mean over the finished seeds, thin what did not finish."""
    shown = panels(results)
    columns = min(len(shown), 3 if width > 5 else 2)
    rows = math.ceil(len(shown) / columns)
    fig = blank(width, 0.5 + 1.5 * rows)
    grid = fig.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place >= len(shown):
            axes.set_visible(False)
            continue
        axes.set_title(f"block {shown[place]}", fontsize=8, loc="left")
        for arm in drawn(results):
            colour = _look(results, arm)["color"]
            for kind, dash in zip(picture.lines, DASHES, strict=False):
                look = {"color": colour, "linestyle": dash}
                for points in curves_of(arm.unfinished, kind.measure, shown[place]):
                    line(axes, _shown(results, points, 0), alpha=0.5, linewidth=0.7, **look)
                mean = band(curves_of(arm.finished, kind.measure, shown[place])).mean
                label = shorten(arm.label) if kind is picture.lines[0] and place == 0 else None
                line(axes, _shown(results, mean, 0), linewidth=1.4, label=label, **look)
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    fig.supxlabel("step (optimiser updates)", fontsize=9)
    fig.supylabel(picture.axis, fontsize=9)
    legend(fig, grid.flat[0], width)
    return fig
