"""A model's geometry as a page: the spectrum of every block's queries, keys and values, what it comes to, and how it
came about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qurve.analysis.hull import LayerHull
from qurve.analysis.spectrum import FLOOR, TOLERANCE
from qurve.study.drawing import PALETTE, WIDE, blank, legend, line, styled, svg
from qurve.study.page.analysis import analysis_page
from qurve.study.page.pieces import Numbers, picture
from qurve.study.worth import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Training = Sequence[tuple[int, Sequence[LayerHull]]]
"""Steps, ascending, and the blocks' hulls after them."""
DIRECTION = "principal direction of (q, k, v)"
DEVIATION = "deviation, share of the largest"
DECADES = range(-7, 1)


def geometry_page(title: str, words: Sequence[str], training: Training, tables: Sequence[Table]) -> str:
    """One HTML file: sentences on top, the newest spectra, how it came to them, then the tables."""
    newest = training[-1][1]
    shown = [("Spectra", _spectra(newest))]
    if len(training) > 1:
        shown.append(("Over training", _training(training)))
    return analysis_page("geometry", title, words, shown, tables, {"spectra": spectra_plot(newest)})


def figures(training: Training) -> dict[str, str]:
    """The page's figures by file name, as SVG."""
    drawn = {"spectra": draw_spectra(training[-1][1], WIDE)}
    if len(training) > 1:
        drawn["training"] = draw_training(training, WIDE)
    return {f"{name}.svg": svg(figure, name, themed=False) for name, figure in drawn.items()}


def _spectra(layers: Sequence[LayerHull]) -> str:
    return picture(
        "spectra",
        lambda width: draw_spectra(layers, width),
        alt="Deviations of queries, keys and values along their principal directions, a line for each block",
        caption="One line a block: how far its queries, keys and values together deviate along each of their principal "
        "directions. Upright lines: where a linear pathway has to end, where this one has to, and the paper's bound; "
        "the level one: the tolerance of the rank.",
    )


def _training(training: Training) -> str:
    rows = [
        [f"{hull.layer}, {name}", *(f"{value:.3g}" for _, value in points)]
        for place, hull in enumerate(training[-1][1])
        for name, points in _over_training(training, place).items()
    ]
    return picture(
        "training",
        lambda width: draw_training(training, width),
        alt="Bent share and participation ratio of every block against steps; the table below has the numbers",
        caption="One line a block, from the model before training on. Bent: share of the variance of queries, keys and "
        "values together that leaves every flat which a linear pathway could have. Participation ratio: in how many "
        "directions they vary, weighted by how much.",
        numbers=Numbers(
            "Bent share and participation ratio of every block",
            ["block", *(f"step {step:,}" for step, _ in training)],
            rows,
        ),
    )


def _over_training(training: Training, place: int) -> dict[str, list[tuple[float, float]]]:
    """What is drawn of one block, against the steps."""
    blocks = [(step, layers[place]) for step, layers in training]
    return {
        "bent, per cent of the variance": [(step, 100 * hull.bent) for step, hull in blocks],
        "participation ratio": [(step, hull.qkv.participation_ratio) for step, hull in blocks],
    }


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
def draw_training(training: Training, width: float) -> Figure:
    """Two panels, a line for each block; `width` in inches."""
    wide = width > 5
    fig = blank(width, width * (0.36 if wide else 1.2))
    panels = fig.subplots(1, 2) if wide else fig.subplots(2, 1)
    for place, hull in enumerate(training[-1][1]):
        look = {"color": PALETTE[_colour(hull)], "linewidth": 1.4, "marker": ".", "label": f"block {hull.layer}"}
        for axes, (name, points) in zip(panels, _over_training(training, place).items(), strict=True):
            line(axes, points, **look)
            axes.set_xlabel("step")
            axes.set_ylabel(name)
    if all(hull.bent for _, layers in training for hull in layers):
        panels[0].set_yscale("log")  # what is left after training may be a hundredth of the beginning's
        panels[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    legend(fig, panels[0], width)
    return fig


@styled
def draw_spectra(layers: Sequence[LayerHull], width: float) -> Figure:
    """The same, still; `width` in inches."""
    fig = blank(width, width * (0.46 if width > 5 else 0.9))
    axes = fig.subplots()
    for hull in layers:
        points = list(enumerate(_logarithms(hull), 1))
        line(axes, points, color=PALETTE[_colour(hull)], linewidth=1.4, label=f"block {hull.layer}")
    named: dict[float, str] = {}  # where others would cover them, names are one
    for name, x in sorted(_ends(layers).items(), key=lambda end: end[1]):
        axes.axvline(x, color=PALETTE[0], linewidth=0.8, linestyle="--")
        near = next((at for at in named if x - at < max(hull.bound.ambient for hull in layers) / 20), None)
        named |= {x: name} if near is None else {near: f"{named[near]}, {name}"}
    for x, name in named.items():
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
