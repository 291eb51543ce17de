"""A model's geometry as a page: the spectrum of every block's queries, keys and values, and what it comes to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qurve.analysis.hull import LayerHull
from qurve.analysis.spectrum import FLOOR, TOLERANCE
from qurve.study.drawing import PALETTE, blank, legend, line, styled
from qurve.study.page.build import plotly, safe_json, script
from qurve.study.page.pieces import environment, in_table, picture, text
from qurve.study.worth import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIRECTION = "principal direction of (q, k, v)"
DEVIATION = "deviation, share of the largest"
DECADES = range(-7, 1)


def geometry_page(title: str, words: Sequence[str], layers: Sequence[LayerHull], tables: Sequence[Table]) -> str:
    """One HTML file: sentences on top, the spectra, then the tables."""
    from markupsafe import Markup

    figure = picture(
        "spectra",
        lambda width: draw_spectra(layers, width),
        alt="Deviations of queries, keys and values along their principal directions, a line for each block",
        caption="One line a block: how far its queries, keys and values together deviate along each of their principal "
        "directions. Upright lines: where a linear pathway has to end, where this one has to, and the paper's bound; "
        "the level one: the tolerance of the rank.",
    )
    numbers = "".join(in_table(f"table-{place}", table) for place, table in enumerate(tables))
    parts = [("Spectra", figure), ("In numbers", numbers)]
    return (
        environment()
        .get_template("geometry.html")
        .render(
            results={"title": title},
            words=words,
            css=Markup(text("page.css")),
            scripts=[script(source) for source in (plotly(), text("page.js"))],
            plot=Markup(safe_json(spectra_plot(layers))),
            sections=[{"title": name, "fragment": Markup(html), "folded": False} for name, html in parts],
        )
    )


def spectra_plot(layers: Sequence[LayerHull]) -> dict[str, Any]:
    """The living figure (see `plots`): logarithms of the deviations, as shares of the largest; a button a block."""
    names = [f"block {hull.layer}" for hull in layers]
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "meta": {"arm": name, "layer": ""},
            "x": list(range(1, len(hull.qkv.deviations) + 1)),
            "y": _logarithms(hull),
            "line": {"color": f"$arm-{_colour(hull)}", "width": 1.8},
            "hovertemplate": "<b>%{fullData.name}</b><br>direction %{x:,}<br>10<sup>%{y:.2f}</sup> of the largest"
            "<extra></extra>",
        }
        for name, hull in zip(names, layers, strict=True)
    ]
    ends = _ends(layers)
    thin = {"color": "$soft", "width": 1}
    upright = [{"type": "line", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1} for x in set(ends.values())]
    level = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": math.log10(TOLERANCE),
        "y1": math.log10(TOLERANCE),
    }
    look = {"gridcolor": "$line", "linecolor": "$line", "zeroline": False, "automargin": True}
    layout = {
        "height": 420,
        "xaxis": look | {"title": {"text": DIRECTION}, "range": [0, max(hull.bound.ambient for hull in layers) + 1]},
        "yaxis": look
        | {"title": {"text": DEVIATION}, "range": [DECADES[0] - 0.2, 0.2]}
        | {"tickvals": list(DECADES), "ticktext": [f"10<sup>{n}</sup>".replace("-", "−") for n in DECADES]},
        "shapes": [shape | {"line": thin | {"dash": "dash"}} for shape in upright]
        + [level | {"line": thin | {"dash": "dot"}}],
        "annotations": [
            {"x": x, "y": 1 - 0.07 * place, "yref": "paper", "xanchor": "left", "xshift": 3, "showarrow": False}
            | {"text": name, "font": {"color": "$soft"}}
            for place, (name, x) in enumerate(ends.items())
        ],
    }
    buttons = [{"name": n, "label": n, "colour": _colour(hull)} for n, hull in zip(names, layers, strict=True)]
    return {"traces": traces, "layout": layout, "arms": buttons, "layers": []}


@styled
def draw_spectra(layers: Sequence[LayerHull], width: float) -> Figure:
    """The same, still; `width` in inches."""
    fig = blank(width, width * (0.46 if width > 5 else 0.9))
    axes = fig.subplots()
    for hull in layers:
        points = list(enumerate(_logarithms(hull), 1))
        line(axes, points, color=PALETTE[_colour(hull)], linewidth=1.4, label=f"block {hull.layer}")
    for name, x in _ends(layers).items():
        axes.axvline(x, color=PALETTE[0], linewidth=0.8, linestyle="--")
        axes.annotate(name, (x, 1), xycoords=("data", "axes fraction"), rotation=90, va="top", ha="right", fontsize=7)
    axes.axhline(math.log10(TOLERANCE), color=PALETTE[0], linewidth=0.8, linestyle=":")
    axes.set_yticks(list(DECADES), [f"1e{n}" for n in DECADES])
    axes.set_xlabel(DIRECTION)
    axes.set_ylabel(DEVIATION)
    legend(fig, axes, width)
    return fig


def _ends(layers: Sequence[LayerHull]) -> dict[str, float]:
    """Where spectra have to end, by name: half a step after the last direction. Of blocks that differ, the largest."""
    found = {kind: max(getattr(hull.bound, kind) for hull in layers) for kind in ("flat", "tight", "paper")}
    words = {"flat": "linear", "tight": "bound", "paper": "the paper's"}
    return {f"{words[kind]}: {dimension}": dimension + 0.5 for kind, dimension in found.items()}


def _logarithms(hull: LayerHull) -> list[float]:
    """What lies below the floor is rounding, and drawn there."""
    largest = hull.qkv.deviations[0] or 1.0
    return [round(math.log10(max(deviation / largest, FLOOR)), 3) for deviation in hull.qkv.deviations]


def _colour(hull: LayerHull) -> int:
    """One of the page's seven colours beside the baseline's."""
    return 1 + hull.layer % (len(PALETTE) - 1)
