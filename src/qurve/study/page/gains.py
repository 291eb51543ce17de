"""Whether a study's geometry goes with its gains, as a page: each figure of the arms against what they gain.

`tree` is what `qurve analyze geometry` leaves of a study as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qurve.study.drawing import INK, MARKERS, PALETTE, WIDE, blank, legend, shorten, styled, svg
from qurve.study.page.analysis import analysis_page
from qurve.study.page.pieces import picture
from qurve.study.worth import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AXES = {
    "bent": "bent, share of the variance",
    "participation_ratio": "participation ratio",
    "participation_ratio_of_f": "participation ratio of f",
    "second_difference": "second difference",
    "jacobian_spread": "Jacobian spread",
}
"""Figures in words. None has a unit."""


def gains_page(title: str, words: Sequence[str], tree: dict[str, Any], tables: Sequence[Table]) -> str:
    """One HTML file without a script: sentences on top, the figures that go with something, then the tables."""
    shown = [("Geometry and gain", _gains(tree))] if associations_of(tree) else []
    return analysis_page("geometry", title, words, shown, tables)


def figures(tree: dict[str, Any]) -> dict[str, str]:
    """The page's figures by file name, as SVG."""
    return {"gains.svg": svg(draw_gains(tree, WIDE), "gains", themed=False)} if associations_of(tree) else {}


def associations_of(tree: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Those that could be taken, by their figure."""
    return {name: found for name, found in tree["associations"].items() if "why_none" not in found}


def _gains(tree: dict[str, Any]) -> str:
    return picture(
        "gains",
        lambda width: draw_gains(tree, width),
        alt="Gain of every arm over the baseline against each figure of its geometry; the tables have the numbers",
        caption="A mark for each arm, a panel for each figure: mean over the arm's seeds and blocks, against its gain "
        "in final loss. Dashed: the baseline's loss. No line is fitted: arms differ in more than their geometry.",
    )


@styled
def draw_gains(tree: dict[str, Any], width: float) -> Figure:
    """A panel a figure; `width` in inches."""
    found = associations_of(tree)
    arms = list(dict.fromkeys(point["arm"] for one in found.values() for point in one["points"]))
    columns = min(len(found), 2 if width > 5 else 1)
    rows = math.ceil(len(found) / columns)
    fig = blank(width, 0.5 + 2.1 * rows)
    panels = fig.subplots(rows, columns, sharey=True, squeeze=False)
    for place, axes in enumerate(panels.flat):
        axes.set_visible(place < len(found))
    for axes, (name, one) in zip(panels.flat, found.items(), strict=False):
        axes.axhline(0, color=INK, linewidth=0.8, linestyle="--")
        for point in one["points"]:
            number = arms.index(point["arm"])
            look = {"color": PALETTE[1 + number % (len(PALETTE) - 1)], "marker": MARKERS[number % len(MARKERS)]}
            axes.plot([point["figure"]], [point["gain"]], linestyle="", label=shorten(point["arm"]), **look)
        axes.set_title(f"correlation {one['correlation']:+.2f}, p = {one['p']:.3f}", fontsize=8, loc="left")
        axes.set_xlabel(AXES.get(name, name.replace("_", " ")))
        axes.locator_params(axis="x", nbins=5)
    fig.supylabel("gain over the baseline, ΔLL (%)", fontsize=9)
    legend(fig, panels.flat[0], width)
    return fig
