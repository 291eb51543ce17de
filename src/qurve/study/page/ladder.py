"""A ladder's page: how a gain changes with scale, in words, pictures and numbers."""

from __future__ import annotations

from collections.abc import Callable

from qurve.study.drawing import Points, scatter_fit
from qurve.study.effects import Unknown
from qurve.study.ladder_results import (
    LadderResults,
    RungResults,
    Series,
    doubts,
    fit,
    gain,
    gain_trend,
    loss,
    series,
)
from qurve.study.ladder_tables import JUDGED, costs_table, ladder_commands, lines, percent, rungs_table
from qurve.study.page.pieces import Numbers, environment, in_table, macro, picture, text
from qurve.study.scaling import Estimate
from qurve.study.tables import NONE, with_interval

ON_A_LINE = 24
"""Points of a fitted line."""


def ladder_page(results: LadderResults) -> str:
    """`report.html` of a ladder: one file, without a script."""
    from markupsafe import Markup

    said = lines(results)
    trends = [words for words in said if ", gain along " in words or words == JUDGED]
    found = rungs_table(results), costs_table(results)
    parts = [("Every rung", in_table("rungs", found[0]) + in_table("costs", found[1]))]
    for place, one in enumerate(series(results), 1):
        parts.append((f"Along {one.along}, {one.fixed}", _pictures(results, one, place)))
    parts.append(("What the rungs say together", macro("sentences", [words for words in said if words not in trends])))
    parts.append(("How to reproduce", macro("commands", ladder_commands(results), results.data_fingerprint)))
    return (
        environment()
        .get_template("ladder.html")
        .render(
            results=results,
            css=Markup(text("page.css")),
            scripts=[],
            trends=trends,
            doubts=doubts(results),
            sections=[{"title": title, "fragment": Markup(html), "folded": False} for title, html in parts],
        )
    )


def _pictures(results: LadderResults, one: Series, place: int) -> str:
    others = [arm for arm in results.arms if arm != results.baseline]
    axis = "non-embedding parameters of the baseline" if one.along == "size" else "tokens of training"
    losses = [_points(results, one, arm, loss, _loss_line) for arm in results.arms]
    gains = [_points(results, one, arm, lambda rung, arm: gain(results, rung, arm), _gain_line) for arm in others]
    gains.insert(0, Points(f"{results.arms[results.baseline]} (the line at zero)", []))
    return picture(
        f"gain-{place}",
        lambda width: scatter_fit(gains, x_axis=axis, y_axis="gain, ΔLL (%)", zero=True, width=width),
        alt=f"Relative gain over the baseline along {one.along}; the table below has the numbers",
        caption="Gain at each rung with its 95 % interval, and a straight line over the logarithm of scale. One that "
        "rises is a gain that grows.",
        numbers=_numbers(results, one, others, lambda rung, arm: percent(gain(results, rung, arm))),
    ) + picture(
        f"loss-{place}",
        lambda width: scatter_fit(losses, x_axis=axis, y_axis="loss (nats per token)", width=width),
        alt=f"Loss of every arm along {one.along}; the table below has the numbers",
        caption="Mean loss at each rung with its 95 % interval over the seeds, and the power law fitted to every run, "
        "with the interval of its curve.",
        numbers=_numbers(results, one, list(results.arms), lambda rung, arm: _loss_in_words(loss(rung, arm))),
    )


def _points(
    results: LadderResults,
    one: Series,
    arm: str,
    at: Callable[[RungResults, str], Estimate | Unknown],
    line: Callable[[LadderResults, Series, str], tuple[list[tuple[float, float]], list[tuple[float, float, float]]]],
) -> Points:
    found = [(one.scale[rung.name], at(rung, arm)) for rung in one.rungs]
    known = [(scale, value) for scale, value in found if not isinstance(value, Unknown)]
    intervals = [None if v.low is None or v.high is None else (v.low, v.high) for _, v in known]
    through, band = line(results, one, arm)
    return Points(results.arms[arm], [(scale, value.value) for scale, value in known], intervals, through, band)


def _scales(one: Series) -> list[float]:
    low, high = min(one.scale.values()), max(one.scale.values())
    inner = [low * (high / low) ** (i / (ON_A_LINE - 1)) for i in range(1, ON_A_LINE - 1)]
    return [low, *inner, high]


def _loss_line(
    results: LadderResults, one: Series, arm: str
) -> tuple[list[tuple[float, float]], list[tuple[float, float, float]]]:
    found = fit(one, arm)
    if isinstance(found, Unknown):
        return [], []
    curve = [(scale, found.predict(scale)) for scale in _scales(one)]
    band = [(scale, at.low, at.high) for scale, at in curve if at.low is not None and at.high is not None]
    return [(scale, at.value) for scale, at in curve], band


def _gain_line(
    results: LadderResults, one: Series, arm: str
) -> tuple[list[tuple[float, float]], list[tuple[float, float, float]]]:
    found = gain_trend(results, one, arm)
    return ([], []) if isinstance(found, Unknown) else ([(scale, found.predict(scale)) for scale in _scales(one)], [])


def _numbers(results: LadderResults, one: Series, arms: list[str], cell: Callable[[RungResults, str], str]) -> Numbers:
    head = ["arm", *(rung.name for rung in one.rungs)]
    return Numbers(
        f"Along {one.along}", head, [[results.arms[arm], *(cell(rung, arm) for rung in one.rungs)] for arm in arms]
    )


def _loss_in_words(found: Estimate | Unknown) -> str:
    return NONE if isinstance(found, Unknown) else with_interval(found, lambda x: f"{x:.4f}")
