"""The figures of a study: learning curves with the relative gain below, paired differences, learning-rate search.

Every figure is a pure function of the results. `svg` and `png` turn it into bytes that are the same for the same
results: no dates, no random ids. In a page (`themed`) ink and arm colours follow the page's own, dark mode's too.
"""

from __future__ import annotations

import functools
import io
import math
import re
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from qurve.study.results import Arm, StudyResults
from qurve.study.statistics import compare

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1b1f24"
"""Text and axes; `currentColor` in a page."""
PALETTE = ("#5f6670", "#0072b2", "#d55e00", "#009e73", "#b5579a", "#a67c00", "#3aa0d8", "#8c3b1e")
"""Told apart in the common colour blindnesses (after Okabe and Ito). The first is the baseline's."""
MARKERS = "osD^vPXh*p<>"
WIDE, NARROW = 8.8, 3.9
"""Figure widths in inches: a page's column, a phone's."""

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "axes.unicode_minus": True,
    "figure.constrained_layout.use": True,
}


def _styled(draw: Callable[[StudyResults, float], Figure]) -> Callable[[StudyResults, float], Figure]:
    """matplotlib reads its settings when an artist is made, so a whole figure is drawn under them."""

    @functools.wraps(draw)
    def drawn(results: StudyResults, width: float = WIDE) -> Figure:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            return draw(results, width)

    return drawn


def colour_index(results: StudyResults, arm: Arm) -> int:
    """Index into `PALETTE`: 0 for the baseline, the others in turn."""
    if arm.name == results.baseline.name:
        return 0
    return 1 + [other.name for other in results.others].index(arm.name) % (len(PALETTE) - 1)


def _look(results: StudyResults, arm: Arm) -> dict[str, Any]:
    place = [results.baseline.name, *(other.name for other in results.others)].index(arm.name)
    return {"color": PALETTE[colour_index(results, arm)], "marker": MARKERS[place % len(MARKERS)]}


def _fate(arm: Arm) -> str:
    """What a reader must know of the arm's seeds before looking at its line; nothing when they finished."""
    if arm.diverged:
        return f" ({arm.diverged} of {len(arm.runs)} diverged)"
    return "" if arm.finished else " (no seed finished)"


def _shorten(label: str, limit: int = 38) -> str:
    return label if len(label) <= limit else label[: limit - 1] + "…"


# -------------------------------------------------------------------------------------------------------------- curves


@_styled
def curves_figure(results: StudyResults, width: float) -> Figure:
    """Validation loss per arm (solid: mean over the finished seeds; thin: each seed) with the best arm's training loss
    (dashed), and below the relative log-loss gain of every other arm over the baseline, both against steps.
    """
    fig = _figure(width, width * (0.74 if width > 5 else 1.35))
    top, bottom = fig.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    first = _first_step(results)
    for arm in results.arms:
        look = _look(results, arm)
        for run in arm.runs.values():
            _line(top, [(s, loss) for s, loss in run.val if s >= first], color=look["color"], alpha=0.35, linewidth=0.7)
        mean = _mean_curve([run.val for run in arm.finished])
        fate = _fate(arm)
        label = _shorten(arm.label, 38 - len(fate)) + fate
        _line(top, [(s, v) for s, v in mean if s >= first], label=label, linewidth=1.7, markersize=3.5, **look)
    best = results.best
    if best is not None:
        smooth = [(s, v) for s, v in smoothed(_mean_curve([run.train for run in best.finished])) if s >= first]
        label = f"{_shorten(best.label, 26 if width > 5 else 18)}, training (smoothed)"
        colour = _look(results, best)["color"]
        _line(top, smooth, label=label, color=colour, linewidth=1.1, linestyle=(0, (4, 2)))
    top.set_ylabel("loss (nats per token)")
    _frame(results, top)

    bottom.axhline(0, color=PALETTE[0], linewidth=1.2)
    for arm in results.others:
        look = _look(results, arm)
        pairs = [(arm.runs[s], results.baseline.runs[s]) for s in results.seeds]
        pairs = [(run, base) for run, base in pairs if run.finished and base.finished]
        for run, base in pairs:
            _line(bottom, _gain(run.val, base.val, first), color=look["color"], alpha=0.35, linewidth=0.7)
        ours, theirs = (_mean_curve([pair[i].val for pair in pairs]) for i in (0, 1))
        _line(bottom, _gain(ours, theirs, first), linewidth=1.7, markersize=3.5, **look)
    bottom.set_ylabel("gain over the\nbaseline, ΔLL (%)")
    bottom.set_xlabel("step (optimiser updates)")
    bottom.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _legend(fig, top, width)
    return fig


def smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """A centred running mean over a fortieth of the points; at the ends the window is what there is of it."""
    half = max(1, len(points) // 80)
    values = [value for _, value in points]
    return [(step, statistics.fmean(values[max(0, i - half) : i + half + 1])) for i, (step, _) in enumerate(points)]


def _first_step(results: StudyResults) -> int:
    """Where the figure begins: the first twelfth is left out (it would flatten the rest) if enough points remain."""
    steps = sorted({step for run in results.runs for step, _ in run.val})
    late = [step for step in steps if steps and step >= steps[-1] / 12]
    return late[0] if len(late) >= 3 else 0


def _frame(results: StudyResults, axes: Axes) -> None:
    """Limit the loss axis to what happens after a fifth of the training, and mark where runs diverged, inside of it."""
    shown = [run for run in results.runs if run.finished and run.val] or [run for run in results.runs if run.val]
    late = [loss for run in shown for step, loss in run.val if step >= run.val[-1][0] / 5]
    if not late:
        return
    margin = 0.06 * (max(late) - min(late)) or 0.01
    low, high = min(late) - margin, max(late) + margin
    axes.set_ylim(low, high)
    for run in results.runs:
        if run.status == "diverged":
            step, loss = run.val[-1] if run.val else (run.step, high)
            colour = PALETTE[colour_index(results, next(arm for arm in results.arms if arm.name == run.arm))]
            height = min(max(loss, low), high)
            axes.plot(step, height, "x", color=colour, markersize=7, markeredgewidth=1.8, clip_on=False)


def _mean_curve(curves_of_seeds: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Mean over the seeds at the steps that all of them have: a mean over changing sets would jump."""
    curves = [dict(curve) for curve in curves_of_seeds]
    shared = [step for step in curves[0] if all(step in curve for curve in curves)] if curves else []
    return [(step, statistics.fmean(curve[step] for curve in curves)) for step in shared]


def _gain(curve: Sequence[tuple[int, float]], base: Sequence[tuple[int, float]], first: int) -> list[tuple[int, float]]:
    reference = dict(base)
    return [
        (step, 100 * (reference[step] - loss) / reference[step])
        for step, loss in curve
        if step in reference and step >= first
    ]


def _line(axes: Axes, points: Sequence[tuple[int, float]], **look: Any) -> None:
    axes.plot([x for x, _ in points], [y for _, y in points], **look)


# --------------------------------------------------------------------------------------------------------- differences


@_styled
def differences_figure(results: StudyResults, width: float) -> Figure:
    """Per arm: its difference to the baseline, seed by seed (hollow), the mean and, from three seeds, the interval."""
    fig = _figure(width, 0.8 + 0.5 * max(1, len(results.others)))
    axes = fig.subplots()
    axes.axvline(0, color=PALETTE[0], linewidth=1.2)
    axes.grid(axis="y", visible=False)
    for row, arm in enumerate(results.others):
        pair, look = compare(results, arm), _look(results, arm)
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
            axes.text(0, row, " no seed finished in both", va="center", color=look["color"])
    length = 28 if width > 5 else 18
    labels = [_shorten(arm.label, length) + _fate(arm).replace(" (", "\n(") for arm in results.others]
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


@_styled
def search_figure(results: StudyResults, width: float) -> Figure:
    """The learning-rate search: mean validation loss against the peak rate, the chosen point ringed, and crosses at the
    upper edge for points where a run did not finish.
    """
    assert results.search is not None
    fig = _figure(width, width * (0.4 if width > 5 else 0.85))
    axes = fig.subplots()
    axes.set_xscale("log")
    rates: set[float] = set()
    for arm in results.arms:
        look, grid = _look(results, arm), results.search.grid(arm.name)
        rates |= {lr for lr, _ in grid}
        finite = {point: loss for point, loss in grid.items() if loss is not None}
        lowest = {lr: min(loss for (r, _), loss in finite.items() if r == lr) for lr, _ in finite}
        _line(axes, sorted(lowest.items()), color=look["color"], linewidth=1.5)  # type: ignore[arg-type]
        axes.plot(
            [lr for lr, _ in finite],
            list(finite.values()),
            linestyle="",
            markersize=4.5,
            label=_shorten(arm.label),
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
    _legend(fig, axes, width)
    return fig


# ----------------------------------------------------------------------------------------------------------- rendering


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def _legend(fig: Figure, axes: Axes, width: float) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        longest = max(len(label) for label in labels)
        columns = max(1, min(len(labels), int(width * 12.5 / (longest + 7))))
        fig.set_figheight(fig.get_figheight() + 0.19 * (math.ceil(len(labels) / columns) - 1))  # the plot keeps its own
        fig.legend(handles, labels, loc="outside upper left", ncols=columns, borderaxespad=0.2, columnspacing=1.4)


def png(fig: Figure) -> bytes:
    """The figure on white, 160 dots an inch."""
    return _save(fig, "qurve", format="png", dpi=160, facecolor="white", metadata={"Software": None})


def svg(fig: Figure, salt: str, *, themed: bool) -> str:
    """The figure as an SVG document, or, `themed`, as an element to put into a page whose CSS sets `color` and
    `--arm-0`, `--arm-1`, …; `salt` keeps the ids of several figures in one page apart.
    """
    metadata = {"Date": None, "Creator": None}
    text = _save(fig, salt, format="svg", transparent=themed, metadata=metadata).decode()
    if not themed:
        return text
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    return re.sub(r"<[^>]*>", lambda tag: _themed_tag(tag[0], salt), text)  # tags alone: a label stays as it is


def _themed_tag(tag: str, salt: str) -> str:
    tag = re.sub(r"'DejaVu Sans'[^;\"]*?sans-serif", "system-ui, sans-serif", tag)
    tag = re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{salt}-", tag)
    tag = tag.replace(INK, "currentColor")
    for index, colour in enumerate(PALETTE):
        tag = tag.replace(colour, f"var(--arm-{index})")
    return tag


def _save(fig: Figure, salt: str, **options: Any) -> bytes:
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a label may use any script
        fig.savefig(out, **options)
    return out.getvalue()
