"""The page's living figures, as plain data for Plotly: traces, layout, and what the buttons beside them switch.

`$ink`, `$line`, `$card` and `$arm-N` stand for the page's colours, `$arm-N/0.16` for one of them washed out; the page's
script puts the present ones in. A trace's `meta` has the arm (`None`: every arm) and the layer it belongs to. An arm
`aside` starts hidden, with a button in a group of its own: those at the baseline's best point, which would double the
lines.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from qurve.study.curves import (
    Band,
    Curve,
    band,
    compared_pairs,
    first_step,
    from_step,
    gains,
    loss_range,
    points_a_run,
    relative_gain,
    smoothed,
    thinned,
)
from qurve.study.drawing import WASH, shorten
from qurve.study.dynamics import PICTURES, Picture, curve_of, curves_of, panels, pictures_of
from qurve.study.figures import colour_index, fate, with_parameters
from qurve.study.results import Arm, Run, StudyResults

STEP = "step (optimiser updates)"
GAIN = "gain over the baseline, ΔLL (%)"
LOSS = "loss (nats per token)"
DASHES = ("solid", "dash", "dot", "dashdot")
"""Of the lines of a picture of dynamics, in their order."""


def curves_plot(results: StudyResults) -> dict[str, Any]:
    """Figure 1: validation loss above with the best arm's training loss, the gain below. The seeds and the other
    training losses are there at the press of a button.
    """
    most = points_a_run(len(results.runs))
    traces: list[dict[str, Any]] = []
    for arm in results.arms:
        seeds, training = band([run.val for run in arm.finished]), band([run.train for run in arm.finished])
        traces += _shade(results, arm, seeds, "y")
        runs = arm.runs.values()
        traces += _each(results, arm, [(run, run.val) for run in runs if run.finished], most, "y", "seeds")
        traces += _each(results, arm, [(run, run.val) for run in runs if not run.finished], most, "y", "")
        traces += _line(results, arm, seeds.mean, "y", hover=f"loss %{{y:.4f}}, mean of {seeds.n}")
        smooth = _line(results, arm, smoothed(training.mean), "y", hover="training loss %{y:.4f}, smoothed")
        for trace in smooth:
            trace["line"] |= {"dash": "dash", "width": 1.2}
            trace["mode"] = "lines"
            trace["meta"] = {"arm": arm.name, "layer": "" if arm is results.best else "training"}
        traces += smooth
        traces += _crosses(results, arm)
        if arm is not results.baseline:
            traces += _gain(results, arm, "y2", most)
    first, last = first_step(results), max((run.step for run in results.runs), default=0)
    layout: dict[str, Any] = {
        "height": 560,
        "xaxis": _axis(STEP, anchor="y2", range=[first, max(last, first + 1) * 1.01], tickformat=",d"),
        "yaxis": _axis(LOSS, domain=[0.42, 1.0]),
        "yaxis2": _axis("ΔLL (%)", domain=[0.0, 0.34], zeroline=True),
    }
    if (limits := loss_range(results)) is not None:
        layout["yaxis"]["range"] = list(limits)
    late = [y for arm in results.others for edge in _edges(gains(results, arm)) for _, y in from_step(edge, first)]
    if late:
        layout["yaxis2"]["range"] = _around([*late, 0.0])
    return _plot(results, results.arms, traces, layout, {"training": "Every training loss", "seeds": "Each seed"})


def gains_plot(results: StudyResults) -> dict[str, Any]:
    """Figure 2: the relative gain of every arm from the first evaluation on."""
    most = points_a_run(len(results.runs))
    traces = [trace for arm in results.others for trace in _gain(results, arm, "y", most)]
    layout = {
        "height": 420,
        "xaxis": _axis(STEP, tickformat=",d"),
        "yaxis": _axis(GAIN, zeroline=True),
    }
    names = {arm.name: with_parameters(arm) for arm in results.others}
    return _plot(results, results.others, traces, layout, {"seeds": "Each seed"}, names)


def search_plot(results: StudyResults) -> dict[str, Any]:
    """The learning-rate search: every point tried, the chosen ones ringed, crosses where a run did not finish."""
    assert results.search is not None
    traces: list[dict[str, Any]] = []
    rates: set[float] = set()
    arms = [arm for arm in results.arms if results.search.grid(arm.name)]
    finite = [loss for arm in arms for loss in results.search.grid(arm.name).values() if loss is not None]
    edge = _around(finite)[1] if finite else 1.0
    for arm in arms:
        grid, colour = results.search.grid(arm.name), f"$arm-{colour_index(results, arm)}"
        rates |= {lr for lr, _ in grid}
        tried = [(lr, floor, loss) for (lr, floor), loss in grid.items() if loss is not None]
        lowest = {lr: min(loss for rate, _, loss in tried if rate == lr) for lr, _, _ in tried}
        common = {"type": "scatter", "name": _name(arm), "meta": {"arm": arm.name, "layer": ""}}
        hover = "<b>%{fullData.name}</b><br>peak %{x:.3g}%{customdata}<br>loss %{y:.4f}<extra></extra>"
        if tried:
            traces.append(
                common
                | {"x": list(lowest), "y": _rounded(lowest.values()), "mode": "lines", "hoverinfo": "skip"}
                | {"line": {"color": colour, "width": 1.6}}
            )
            traces.append(
                common
                | {"x": [lr for lr, _, _ in tried], "y": _rounded(loss for _, _, loss in tried), "mode": "markers"}
                | {"customdata": [_floor(floor) for _, floor, _ in tried], "hovertemplate": hover}
                | {"marker": {"color": colour, "size": 8}}
            )
        broken = [(lr, floor) for (lr, floor), loss in grid.items() if loss is None]
        if broken:
            traces.append(
                common
                | {
                    "x": [lr for lr, _ in broken],
                    "y": [edge] * len(broken),
                    "customdata": [_floor(floor) for _, floor in broken],
                }
                | {"mode": "markers", "marker": {"symbol": "x", "color": colour, "size": 9}}
                | {"hovertemplate": hover.replace("loss %{y:.4f}", "did not finish")}
            )
        chosen = results.search.chosen.get(arm.name)
        loss = grid.get((chosen.lr, chosen.min_lr)) if chosen is not None else None
        if chosen is not None and loss is not None:
            traces.append(
                common
                | {"x": [chosen.lr], "y": _rounded([loss]), "mode": "markers", "hoverinfo": "skip"}
                | {"marker": {"symbol": "circle-open", "color": colour, "size": 16, "line": {"width": 2}}}
            )
    ticks = sorted(rates)
    layout = {
        "height": 420,
        "xaxis": _axis("peak learning rate", type="log", tickvals=ticks, ticktext=[f"{lr:g}" for lr in ticks]),
        "yaxis": _axis("validation loss (nats per token)"),
    }
    return _plot(results, arms, traces, layout, {})


def _floor(value: float | None) -> str:
    """As a point's label has it: nothing where the floor was not searched."""
    return "" if value is None else f", floor {value:.3g}"


def dynamics_plot(name: str, results: StudyResults) -> dict[str, Any]:
    """One panel for each block that is shown: the mean over the finished seeds, and thin what did not finish."""
    (picture,) = (found for found in pictures_of(results) if found.name == name)
    shown, traces = panels(results), list[dict[str, Any]]()
    most = points_a_run(len(results.runs) * len(shown))
    for number, block in zip(_numbers(shown), shown, strict=True):
        for arm in results.arms:
            for kind, dash in zip(picture.lines, DASHES, strict=False):
                hover = f"{kind.label}: %{{y:.4g}}, block {block}"
                mean = band(curves_of(arm.finished, kind.measure, block)).mean
                each, broken = (
                    [(run, curve_of(run, kind.measure, block)) for run in runs]
                    for runs in (arm.finished, arm.unfinished)
                )
                found = _line(results, arm, thinned(mean, most), f"y{number}", hover)
                found += _each(results, arm, each, most, f"y{number}", "seeds")
                found += _each(results, arm, broken, most, f"y{number}", "")
                for trace in found:
                    trace["line"] |= {"dash": dash}
                    traces.append(trace | {"xaxis": f"x{number}", "marker": {"size": 3}})
    arms = [arm for arm in results.arms if any(run.dynamics for run in arm.runs.values())]
    return _plot(results, arms, traces, _small_multiples(picture, shown, traces), {"seeds": "Each seed"})


def _small_multiples(picture: Picture, shown: Sequence[int], traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A grid of panels with one range: three in a row at most, and four in a square."""
    columns = 2 if len(shown) == 4 else min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    gap = 0.2 / rows
    height = (1 - (rows - 1) * gap) / rows
    heights = [y for trace in traces for y in trace["y"] if y is not None]
    last = max(x for trace in traces for x in trace["x"] if x is not None)
    span = _around(heights) if any(heights) else [-0.05, 1.05]  # of shares, say, that are all zero
    layout: dict[str, Any] = {"height": max(320, 70 + 165 * rows), "annotations": []}
    for place, (number, block) in enumerate(zip(_numbers(shown), shown, strict=True)):
        row, column = divmod(place, columns)
        left, bottom = column / columns, 1 - (row + 1) * height - row * gap
        is_lowest, more = place + columns >= len(shown), {} if place == 0 else {"matches": "x"}
        layout[f"xaxis{number}"] = _axis(
            STEP if is_lowest and column == columns // 2 else "", anchor=f"y{number}", tickformat="~s", nticks=3,
            tickangle=0, showticklabels=is_lowest, range=[0, 1.01 * last],
            domain=[left + 0.05, left + 0.99 / columns], **more,
        )  # fmt: skip
        layout[f"yaxis{number}"] = _axis(
            picture.axis if column == 0 else "", anchor=f"x{number}", nticks=5, range=span,
            domain=[max(0, bottom), bottom + 0.9 * height],
        )  # fmt: skip
        layout["annotations"].append(
            {"text": f"block {block}", "xref": f"x{number} domain", "yref": f"y{number} domain", "x": 0, "y": 1}
            | {"xanchor": "left", "yanchor": "bottom", "showarrow": False}
        )
    return layout


def _numbers(shown: Sequence[int]) -> list[str]:
    """What Plotly's names of the panels' axes end in."""
    return ["", *map(str, range(2, len(shown) + 1))][: len(shown)]


PLOTS: dict[str, Callable[[StudyResults], dict[str, Any]]] = {
    "curves": curves_plot,
    "gains": gains_plot,
    "search": search_plot,
    **{picture.name: partial(dynamics_plot, picture.name) for picture in PICTURES},
}
"""Which of the figures live, by the names of `figures_of`."""


# -------------------------------------------------------------------------------------------------------------- pieces


def _plot(
    results: StudyResults,
    arms: Sequence[Arm],
    traces: list[dict[str, Any]],
    layout: dict[str, Any],
    layers: dict[str, str],
    names: dict[str, str] | None = None,
) -> dict[str, Any]:
    buttons = [
        {
            "name": arm.name,
            "label": (names or {}).get(arm.name) or shorten(arm.label, 38) + fate(arm),
            "colour": colour_index(results, arm),
            "aside": arm.matched is not None,
        }
        for arm in arms
    ]
    here = {trace["meta"]["layer"] for trace in traces if trace["x"]}
    used = [{"name": name, "label": label} for name, label in layers.items() if name in here]
    return {"traces": traces, "layout": layout, "arms": buttons, "layers": used}


def _line(results: StudyResults, arm: Arm, points: Curve, axis: str, hover: str) -> list[dict[str, Any]]:
    points = thinned(points, points_a_run(len(results.arms)))
    if not points:
        return []
    colour = f"$arm-{colour_index(results, arm)}"
    return [
        _trace(arm, points, axis, "")
        | {"mode": "lines+markers" if len(points) <= 40 else "lines"}
        | {"line": {"color": colour, "width": 2} | ({"dash": "dot"} if arm.matched else {}), "marker": {"size": 5}}
        | {"hovertemplate": f"<b>%{{fullData.name}}</b><br>step %{{x:,}}<br>{hover}<extra></extra>"}
    ]


def _shade(results: StudyResults, arm: Arm, seeds: Band, axis: str) -> list[dict[str, Any]]:
    low, high = (thinned(edge, points_a_run(len(results.arms))) for edge in (seeds.low, seeds.high))
    if seeds.n < 2 or not low:
        return []
    shape = _trace(arm, [*high, *reversed(low)], axis, "")
    fill = f"$arm-{colour_index(results, arm)}/{WASH}"
    return [shape | {"mode": "lines", "line": {"width": 0}, "fill": "toself", "fillcolor": fill, "hoverinfo": "skip"}]


def _each(
    results: StudyResults, arm: Arm, curves: Sequence[tuple[Run, Sequence[tuple[int, float]]]], most: int, axis: str,
    layer: str,
) -> list[dict[str, Any]]:  # fmt: skip
    """The runs of an arm as one trace, with gaps between them: hundreds of traces would be slow. One finished run
    alone is the mean already.
    """
    if layer == "seeds" and len(curves) < 2:
        return []
    xs: list[int | None] = []
    ys: list[float | None] = []
    names: list[str] = []
    for run, curve in curves:
        points = thinned(curve, most)
        xs += [*(step for step, _ in points), None]
        ys += [*_rounded(value for _, value in points), None]
        names += [str(run.seed)] * (len(points) + 1)
    if len(xs) == len(curves):
        return []
    trace = _trace(arm, [], axis, layer) | {"x": xs, "y": ys, "text": names, "connectgaps": False, "mode": "lines"}
    hover = "<b>%{fullData.name}</b><br>seed %{text}, step %{x:,}<br>%{y:.4f}<extra></extra>"
    colour = f"$arm-{colour_index(results, arm)}/0.55"
    return [trace | {"line": {"color": colour, "width": 1}, "hovertemplate": hover}]


def _crosses(results: StudyResults, arm: Arm) -> list[dict[str, Any]]:
    broken = [run for run in arm.runs.values() if run.status == "diverged" and run.val]
    if not broken:
        return []
    limits = loss_range(results)
    heights = [run.val[-1][1] if limits is None else min(max(run.val[-1][1], limits[0]), limits[1]) for run in broken]
    trace = _trace(arm, [], "y", "") | {"x": [run.val[-1][0] for run in broken], "y": _rounded(heights)}
    hover = "<b>%{fullData.name}</b><br>seed %{text} diverged after step %{x:,}<extra></extra>"
    marker = {"symbol": "x", "size": 10, "color": f"$arm-{colour_index(results, arm)}"}
    return [
        trace | {"mode": "markers", "marker": marker, "text": [str(r.seed) for r in broken], "hovertemplate": hover}
    ]


def _gain(results: StudyResults, arm: Arm, axis: str, most: int) -> list[dict[str, Any]]:
    seeds = gains(results, arm)
    each = [(run, relative_gain(run.val, base.val)) for run, base in compared_pairs(results, arm)]
    return [
        *_shade(results, arm, seeds, axis),
        *_each(results, arm, each, most, axis, "seeds"),
        *_line(results, arm, seeds.mean, axis, hover=f"ΔLL %{{y:+.2f}} %, mean of {seeds.n}"),
    ]


def _edges(seeds: Band) -> tuple[Curve, Curve]:
    return seeds.low, seeds.high


def _trace(arm: Arm, points: Sequence[tuple[int, float]], axis: str, layer: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": _name(arm),
        "meta": {"arm": arm.name, "layer": layer},
        "x": [step for step, _ in points],
        "y": _rounded(value for _, value in points),
        "yaxis": axis,
    }


def _name(arm: Arm) -> str:
    return html.escape(shorten(arm.label, 60))  # Plotly reads a few tags in what it shows


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.7g}") for value in values]


def _around(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or max(1e-3, 0.01 * math.fabs(high))
    return [low - margin, high + margin]


def _axis(title: str, **more: Any) -> dict[str, Any]:
    look = {
        "gridcolor": "$line",
        "linecolor": "$line",
        "zeroline": False,
        "zerolinecolor": "$arm-0",
        "automargin": True,
    }
    return look | {"title": {"text": title}} | more
