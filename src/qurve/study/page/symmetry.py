"""How heads use their bases, as a page: asymmetry of weights and of logits, and how far norms are from the least.

`tree` is what `qurve analyze symmetry` leaves as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from qurve.study.drawing import INK, PALETTE, WIDE, blank, legend, line, styled, svg
from qurve.study.page.analysis import analysis_page
from qurve.study.page.pieces import picture
from qurve.study.worth import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNRELATED = 0.5
"""Asymmetry of queries and keys that know nothing of each other."""
APART = 0.1
"""Blocks by which two kinds of marks of one block stand apart."""
Kinds = dict[str, list[tuple[int, list[float]]]]
"""kind -> (block, a value for each head)."""


def symmetry_page(title: str, words: Sequence[str], tree: dict[str, Any], tables: Sequence[Table]) -> str:
    """One HTML file: sentences on top, the figures that there are numbers for, then the tables."""
    shown = [("Asymmetry", _asymmetry(tree))]
    if excess_of(tree):
        shown.append(("Norms of heads", _excess(tree)))
    return analysis_page("symmetry", title, words, shown, tables)


def figures(tree: dict[str, Any]) -> dict[str, str]:
    """The page's figures by file name, as SVG."""
    drawn = {"asymmetry": draw_asymmetry(tree, WIDE)}
    if excess_of(tree):
        drawn["excess"] = draw_excess(tree, WIDE)
    return {f"{name}.svg": svg(figure, name, themed=False) for name, figure in drawn.items()}


def asymmetry_of(tree: dict[str, Any]) -> Kinds:
    """Of each block's heads; nonlinear queries have no weights to ask."""
    kinds = {"weights": "asymmetry", "logits": "logit_asymmetry"}
    found = {kind: [(b["block"], b[name]) for b in tree["blocks"] if b[name]] for kind, name in kinds.items()}
    return {kind: blocks for kind, blocks in found.items() if blocks}


def excess_of(tree: dict[str, Any]) -> Kinds:
    """Of each block's heads, where both factors are linear."""
    found: Kinds = {}
    for kind, name in (("queries and keys", "logits"), ("values and outputs", "values")):
        for block in tree["blocks"]:
            if known := [head["excess"] for head in block[name] or () if head["excess"] is not None]:
                found.setdefault(kind, []).append((block["block"], known))
    return found


def _asymmetry(tree: dict[str, Any]) -> str:
    return picture(
        "asymmetry",
        lambda width: draw_asymmetry(tree, width),
        alt="Asymmetry of every head, block by block, of its weights and of its logits",
        caption="A mark for each head; lines: means over a block's heads. 0: symmetric, a token asks for what it "
        "offers; 0.5, dashed: queries and keys that know nothing of each other; 1: antisymmetric.",
    )


def _excess(tree: dict[str, Any]) -> str:
    return picture(
        "excess",
        lambda width: draw_excess(tree, width),
        alt="Squared norms of every head's two factors over the least that its basis allows, block by block",
        caption="A mark for each head; lines: means over a block's heads. Squared norms of a head's two factors over "
        "the least that another basis could give the same head: at 1, dashed, they are balanced.",
    )


def draw_asymmetry(tree: dict[str, Any], width: float) -> Figure:
    """`width` in inches."""
    return _draw(asymmetry_of(tree), "asymmetry", UNRELATED, width)


def draw_excess(tree: dict[str, Any], width: float) -> Figure:
    """`width` in inches."""
    return _draw(excess_of(tree), "norms, over the least", 1.0, width)


@styled
def _draw(kinds: Kinds, axis: str, level: float, width: float) -> Figure:
    fig = blank(width, width * (0.36 if width > 5 else 0.8))
    axes = fig.subplots()
    axes.axhline(level, color=INK, linewidth=0.8, linestyle="--")
    for place, (kind, blocks) in enumerate(kinds.items()):
        colour, aside = PALETTE[1 + place], APART * (2 * place - 1) if len(kinds) > 1 else 0.0
        marks = [(block + aside, value) for block, values in blocks for value in values]
        line(axes, marks, linestyle="", marker="o", markersize=4, alpha=0.7, color=colour)
        means = [(block + aside, fmean(values)) for block, values in blocks]
        line(axes, means, linewidth=1.4, color=colour, label=kind)
    axes.set_xticks(sorted({block for blocks in kinds.values() for block, _ in blocks}))
    axes.set_xlabel("block")
    axes.set_ylabel(axis)
    legend(fig, axes, width)
    return fig
