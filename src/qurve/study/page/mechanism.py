"""What a trained `f` does, as a page: losses under interventions, conjunctions in the query beside its input, tables.

`tree` is what `qurve analyze mechanism` leaves as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from qurve.study.drawing import INK, PALETTE, WIDE, blank, legend, styled, svg
from qurve.study.page.analysis import analysis_page
from qurve.study.page.pieces import picture
from qurve.study.worth import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROW = 0.21
"""Inches."""


def mechanism_page(title: str, words: Sequence[str], tree: dict[str, Any], tables: Sequence[Table]) -> str:
    """One HTML file without a script: sentences on top, the figures that there are numbers for, then the tables."""
    shown = []
    if "interventions" in tree:
        shown.append(("What f is worth", _interventions(tree)))
        shown.append(("Conjunctions", _conjunctions(tree)))
    return analysis_page("mechanism", title, words, shown, tables)


def figures(tree: dict[str, Any]) -> dict[str, str]:
    """The page's figures by file name, as SVG."""
    if "interventions" not in tree:
        return {}
    drawn = {
        "interventions": draw_interventions(tree["interventions"], WIDE),
        "conjunctions": draw_conjunctions(tree["probes"]["trained"]["conjunctions"], WIDE),
    }
    return {f"{name}.svg": svg(figure, name, themed=False) for name, figure in drawn.items()}


def _interventions(tree: dict[str, Any]) -> str:
    return picture(
        "interventions",
        lambda width: draw_interventions(tree["interventions"], width),
        alt="Loss under each intervention beside the untouched model's, with intervals",
        caption="What the loss rises by when something else stands in f's place, with 95 % intervals over windows. "
        "Open marks: in every block at once.",
    )


def _conjunctions(tree: dict[str, Any]) -> str:
    pairs = tree["probes"]["trained"]["conjunctions"]
    return picture(
        "conjunctions",
        lambda width: draw_conjunctions(pairs, width),
        alt="How well each conjunction can be read off the query, over how well it can be read off its input",
        caption="Each mark is one pair of concepts: R² of its conjunction read off the block's input and off the "
        "query. Above the line the query holds more. Small grey marks: the query with f's matrices turned at random.",
    )


def row_labels(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What each intervention is called beside the figure."""
    return [f"{row['name']}  {'all' if _in_all(row, rows) else ', '.join(map(str, row['layers']))}" for row in rows]


def _in_all(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a row is of every block at once; a swap is of a pair, even if there are no others."""
    every = max(len(one["layers"]) for one in rows)
    return row["name"] != "swap" and len(row["layers"]) == every > 1


@styled
def draw_interventions(rows: Sequence[dict[str, Any]], width: float) -> Figure:
    """A line each from the lower to the upper end of its interval; `width` in inches."""
    fig = blank(width, 0.9 + ROW * len(rows))
    axes = fig.subplots()
    names = list(dict.fromkeys(row["name"] for row in rows))
    axes.axvline(0, color=INK, linewidth=0.8)
    for place, row in enumerate(rows):
        colour = PALETTE[1 + names.index(row["name"]) % (len(PALETTE) - 1)]
        axes.plot([row["low"], row["high"]], [place, place], color=colour, linewidth=1.6)
        face = "none" if _in_all(row, rows) else colour
        axes.plot([row["difference"]], [place], "o", color=colour, markerfacecolor=face, markersize=4.5)
    axes.set_yticks(range(len(rows)), row_labels(rows))
    axes.invert_yaxis()
    axes.set_xlabel(f"loss above the untouched{' ' if width > 5 else chr(10)}model's (nats per token)")
    return fig


@styled
def draw_conjunctions(pairs: Sequence[dict[str, Any]], width: float) -> Figure:
    """A mark each, coloured by block; `width` in inches."""
    fig = blank(width, min(width, 4.6))
    axes = fig.subplots()
    randoms = [(pair["x"], fmean(pair["q_random"])) for pair in pairs if pair["q_random"]]
    axes.plot([x for x, _ in randoms], [y for _, y in randoms], ".", color=PALETTE[0], markersize=2.5, alpha=0.6)
    for layer in sorted({pair["layer"] for pair in pairs}):
        here = [pair for pair in pairs if pair["layer"] == layer]
        colour = PALETTE[1 + layer % (len(PALETTE) - 1)]
        xs, qs = [pair["x"] for pair in here], [pair["q"] for pair in here]
        axes.plot(xs, qs, "o", color=colour, markersize=4, alpha=0.8, label=f"block {layer}")
    axes.axline((0, 0), slope=1, color=INK, linewidth=0.8, linestyle="--")
    axes.set_xlabel("R², read off the input")
    axes.set_ylabel("R², read off the query")
    legend(fig, axes, width)
    return fig
