"""Which linear weights are redundant, as a page: what becomes of each, and where a forced change of basis is wrong.

`tree` is what `qurve analyze redundancy` leaves as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qurve.study.drawing import INK, PALETTE, WIDE, blank, legend, styled, svg
from qurve.study.page.analysis import analysis_page
from qurve.study.page.pieces import Numbers, picture
from qurve.study.worth import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 0.21
"""Inches."""
BECOMES = {"identity": "identity", "triangular": "triangular", "kept": "stays", "none": "no such weight"}
"""Outcomes in words."""
SHAPES = {"identity": "o", "triangular": "^", "kept": "s"}
KINDS = ("norm", "skip", "tie")


def redundancy_page(title: str, words: Sequence[str], tree: dict[str, Any], tables: Sequence[Table]) -> str:
    """One HTML file: sentences on top, the figures that there are numbers for, then the tables."""
    shown = []
    if _known(tree):
        shown.append(("What becomes of each weight", _conditions(tree)))
    if tree["violations"]:
        shown.append(("Forced", _violations(tree)))
    return analysis_page("redundancy", title, words, shown, tables)


def figures(tree: dict[str, Any]) -> dict[str, str]:
    """The page's figures by file name, as SVG."""
    drawn = {}
    if known := _known(tree):
        drawn["conditions"] = draw_conditions(known, WIDE)
    if tree["violations"]:
        drawn["violations"] = draw_violations(tree["violations"], WIDE)
    return {f"{name}.svg": svg(figure, name, themed=False) for name, figure in drawn.items()}


def _known(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """The verdicts on weights that are there, square and not singular."""
    return [one for one in tree["verdicts"] if one["condition"] is not None and one["outcome"] in SHAPES]


def _conditions(tree: dict[str, Any]) -> str:
    return picture(
        "conditions",
        lambda width: draw_conditions(_known(tree), width),
        alt="Condition number of each weight, block by block, marked by what becomes of it",
        caption="Condition number of each weight: the higher, the more rounding grows in its basis. Filled: it goes "
        "(as the identity, or as a triangle); open: it stays, and the table says what is in the way.",
    )


def _violations(tree: dict[str, Any]) -> str:
    return picture(
        "violations",
        lambda width: draw_violations(tree["violations"], width),
        alt="Size of what is wrong at each norm, skip and tie when every weight is made the identity",
        caption="With every weight made the identity by force: each place that does not let the change of basis pass, "
        "in the order of the network. Norm of what is wrong there by the norm of what should be.",
        numbers=Numbers(
            "Size of what is wrong at each place",
            ["place", "kind", "size"],
            [[one["where"], one["kind"], f"{one['size']:.3g}"] for one in tree["violations"]],
        ),
    )


@styled
def draw_conditions(verdicts: Sequence[dict[str, Any]], width: float) -> Figure:
    """A mark each, coloured by weight; `width` in inches."""
    fig = blank(width, width * (0.36 if width > 5 else 0.8))
    axes = fig.subplots()
    names = list(dict.fromkeys(one["weight"] for one in verdicts))
    for weight, outcome in dict.fromkeys((one["weight"], one["outcome"]) for one in verdicts):
        here = [one for one in verdicts if (one["weight"], one["outcome"]) == (weight, outcome)]
        colour = PALETTE[1 + names.index(weight)]
        axes.plot(
            [one["layer"] for one in here],
            [math.log10(one["condition"]) for one in here],
            SHAPES[outcome],
            color=colour,
            markerfacecolor="none" if outcome == "kept" else colour,
            markersize=6,
            label=f"{weight}: {BECOMES[outcome]}",
        )
    axes.set_xticks(sorted({one["layer"] for one in verdicts}))
    _in_tens(axes, "y", [math.log10(one["condition"]) for one in verdicts])
    axes.set_xlabel("block")
    axes.set_ylabel("condition number")
    legend(fig, axes, width)
    return fig


@styled
def draw_violations(violations: Sequence[dict[str, Any]], width: float) -> Figure:
    """A row each, from the top in the order of the network; `width` in inches."""
    fig = blank(width, 0.9 + ROW * len(violations))
    axes = fig.subplots()
    sizes = [math.log10(one["size"]) for one in violations]
    axes.axvline(0, color=INK, linewidth=0.8, linestyle="--")
    for kind in dict.fromkeys(one["kind"] for one in violations):
        rows = [place for place, one in enumerate(violations) if one["kind"] == kind]
        colour = PALETTE[1 + KINDS.index(kind)]
        axes.plot([sizes[row] for row in rows], rows, "o", color=colour, markersize=4.5, label=kind)
    axes.set_yticks(range(len(violations)), [one["where"] for one in violations], fontsize=8 if width > 5 else 6)
    axes.invert_yaxis()
    _in_tens(axes, "x", [*sizes, 0.0])
    axes.set_xlabel("wrong, as a share of what should be")
    legend(fig, axes, width)
    return fig


def _in_tens(axes: Axes, axis: str, logarithms: Sequence[float]) -> None:
    """Ticks at the powers of ten around values that are drawn by their logarithms."""
    low, high = math.floor(min(logarithms)), math.ceil(max(logarithms))
    ticks = range(low, max(high, low + 1) + 1, max(1, (high - low) // 6))
    getattr(axes, f"set_{axis}ticks")(list(ticks), [f"{10.0**n:g}" for n in ticks])
