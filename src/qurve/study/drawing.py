"""How figures look and become bytes, and the two kinds of drawing that need to know nothing of a study.

`svg` and `png` give the same bytes for the same figure: no dates, no random ids. In a page (`themed`) ink and arm
colours follow the page's own, dark mode's too.
"""

from __future__ import annotations

import functools
import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec

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
MOST_ENTRIES = 40
"""In a legend."""
BAR_STEPS = 24
"""Shades of a colour bar."""
WASH = 0.16
"""Opacity of a seed band."""

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

P = ParamSpec("P")


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """matplotlib reads its settings when an artist is made, so a whole figure is drawn under them."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return drawn


def blank(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def shorten(label: str, limit: int = 38) -> str:
    """Over as many as three lines, so that labels that differ at their ends still do; cut after that."""
    return "\n".join(textwrap.wrap(label, limit, max_lines=3, placeholder="…", break_on_hyphens=False)) or label


def line(axes: Axes, points: Sequence[tuple[float, float]], **look: Any) -> None:
    axes.plot([x for x, _ in points], [y for _, y in points], **look)


def legend(fig: Figure, axes: Axes, width: float) -> None:
    """Above the plot; of very many entries the first, and how many more there are."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    more = len(labels) - MOST_ENTRIES
    handles, labels = handles[:MOST_ENTRIES], labels[:MOST_ENTRIES]
    longest = max(len(part) for label in labels for part in label.split("\n"))
    columns = max(1, min(len(labels), int(width * 12.5 / (longest + 7))))
    rows = math.ceil(sum(label.count("\n") + 1 for label in labels) / columns) + (more > 0)
    fig.set_figheight(fig.get_figheight() + 0.19 * (rows - 1))  # the plot keeps its own
    drawn = fig.legend(handles, labels, loc="outside upper left", ncols=columns, borderaxespad=0.2, columnspacing=1.4)
    if more > 0:
        drawn.set_title(f"the first {MOST_ENTRIES}; {more} more are drawn")


# ------------------------------------------------------------------------------------------------- drawings of any data


@styled
def heatmap(
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    row_axis: str,
    column_axis: str,
    digits: int = 3,
    scale: tuple[float, float] | None = None,
    marks: Sequence[tuple[int, int]] = (),
    width: float = WIDE,
) -> Figure:
    """A table as colours: the lower the value, the darker; each cell says its number, and a bar the colours.

    `scale` are the values of the darkest and the palest colour, the same for maps that are to be compared; by default
    the lowest and the highest here.
    `values[row][column]` is None where a run diverged (hatched, with a cross) and NaN where there is none (left empty).
    `marks` are cells to ring, as (row, column): the chosen ones, say. The first row is drawn at the bottom, so that
    both axes ascend. Raises `ValueError` where the shapes do not fit.
    """
    if len(values) != len(rows) or any(len(row) != len(columns) for row in values):
        raise ValueError(f"a heat map of {len(rows)} rows and {len(columns)} columns needs a value for each cell")
    from matplotlib.patches import Rectangle

    fig = blank(width, 0.75 + 0.44 * max(1, len(rows)))
    axes, bar = fig.subplots(1, 2, width_ratios=(1, 0.022 if width > 5 else 0.045))
    axes.grid(visible=False)
    finite = [value for row in values for value in row if value is not None and math.isfinite(value)]
    low, high = scale or ((min(finite), max(finite)) if finite else (0.0, 0.0))
    _colour_bar(bar, low, high, digits)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            corner = (x - 0.5, y - 0.5)
            if value is None:
                axes.add_patch(
                    Rectangle(corner, 1, 1, fill=False, hatch="////", edgecolor=INK, linewidth=0, alpha=0.35)
                )
                axes.plot([x], [y], "x", color=PALETTE[2], markersize=8, markeredgewidth=1.8)
            elif math.isfinite(value):
                axes.add_patch(Rectangle(corner, 1, 1, **_shade_of(value, low, high)))
                axes.text(x, y, f"{value:.{digits}f}", ha="center", va="center", fontsize=8.5 if width > 5 else 6.5)
    for y, x in marks:
        axes.add_patch(Rectangle((x - 0.47, y - 0.45), 0.94, 0.9, fill=False, edgecolor=INK, linewidth=1.6))
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.set_xlabel(column_axis)
    axes.set_ylabel(row_axis)
    return fig


def _shade_of(value: float, low: float, high: float) -> dict[str, Any]:
    depth = min(1.0, max(0.0, (high - value) / (high - low))) if high > low else 0.5
    return {"facecolor": PALETTE[1], "alpha": 0.08 + 0.42 * depth, "linewidth": 0}


def _colour_bar(axes: Axes, low: float, high: float, digits: int) -> None:
    """The colours from the lowest value, at the bottom, to the highest; where there is but one value, none."""
    from matplotlib.patches import Rectangle

    if not high > low:
        axes.set_axis_off()
        return
    axes.grid(visible=False)
    for step in range(BAR_STEPS):
        value = low + (high - low) * (step + 0.5) / BAR_STEPS
        axes.add_patch(Rectangle((0, step), 1, 1, **_shade_of(value, low, high)))
    axes.set_xlim(0, 1)
    axes.set_ylim(0, BAR_STEPS)
    axes.set_xticks([])
    ends = [low, (low + high) / 2, high]
    axes.set_yticks([0, BAR_STEPS / 2, BAR_STEPS], [f"{value:.{digits}f}" for value in ends])
    axes.tick_params(length=0, labelsize=8 if digits > 2 else 6.5)
    axes.yaxis.tick_right()


@dataclass(frozen=True)
class Points:
    """One group of a scatter: measured points, each with its interval or None, and the line fitted to them."""

    label: str
    points: Sequence[tuple[float, float]]
    intervals: Sequence[tuple[float, float] | None] = ()
    """Of the heights; empty, or one for each point."""
    fit: Sequence[tuple[float, float]] = ()
    """Where the line goes through: within the range that it was fitted over, nowhere else."""
    band: Sequence[tuple[float, float, float]] = ()
    """The line's interval as (x, low, high)."""


@styled
def scatter_fit(
    groups: Sequence[Points],
    *,
    x_axis: str,
    y_axis: str,
    log_x: bool = True,
    log_y: bool = False,
    zero: bool = False,
    width: float = WIDE,
) -> Figure:
    """Points with their intervals and a fitted line for each group; the first group has the baseline's colour.

    `zero` draws a line at height 0. Raises `ValueError` where a group has intervals for some of its points alone, or
    a logarithmic axis would need the logarithm of what is not positive.
    """
    for group in groups:
        if group.intervals and len(group.intervals) != len(group.points):
            raise ValueError(f"{group.label}: {len(group.points)} points and {len(group.intervals)} intervals")
        for name, log, axis in (("x", log_x, 0), ("y", log_y, 1)):
            if log and any(point[axis] <= 0 for point in (*group.points, *group.fit)):
                raise ValueError(f"{group.label}: a logarithmic {name} axis takes positive values alone")
    fig = blank(width, width * (0.46 if width > 5 else 0.9))
    axes = fig.subplots()
    if log_x:
        axes.set_xscale("log")
    if log_y:
        axes.set_yscale("log")
    if zero:
        axes.axhline(0, color=INK, linewidth=1)
    for place, group in enumerate(groups):
        colour, marker = PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)]
        if group.band:
            xs, lows, highs = zip(*group.band, strict=True)
            axes.fill_between(xs, lows, highs, color=colour, alpha=WASH, linewidth=0)
        line(axes, group.fit, color=colour, linewidth=1.4)
        for (x, _), interval in zip(group.points, group.intervals, strict=False):
            if interval is not None:
                axes.plot([x, x], interval, color=colour, linewidth=2.2, solid_capstyle="butt")
        line(axes, group.points, linestyle="", marker=marker, markersize=6, color=colour, label=shorten(group.label))
    if log_x:
        from matplotlib.ticker import NullLocator

        ticks = sorted({x for group in groups for x, _ in group.points})
        axes.set_xticks(ticks, [_amount(x) for x in ticks])  # what was measured; a power of ten would be written as TeX
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(x_axis)
    axes.set_ylabel(y_axis)
    legend(fig, axes, width)
    return fig


def _amount(value: float) -> str:
    """`25.1 k`, `0.84 M`"""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


# ----------------------------------------------------------------------------------------------------------- rendering


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
