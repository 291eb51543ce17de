"""A study's geometry against its gains as a page: every arm has its mark, and what could not be taken has none."""

from __future__ import annotations

from typing import Any

import pytest

from qurve.study.page.gains import AXES, draw_gains, figures, gains_page
from qurve.study.worth import Table


def point(arm: str, figure: float, gain: float) -> dict[str, Any]:
    return {"arm": arm, "figure": figure, "gain": gain, "seeds": 3}


POINTS = [point("wide", 0.0, 0.3), point("bent", 0.02, 1.5), point("<odd>", 0.0, -0.1)]
FOUND = {"points": POINTS, "correlation": 0.97, "p": 1 / 3}
TREE: dict[str, Any] = {
    "study": "runs/theory",
    "figures": {},
    "associations": {
        "bent": FOUND,
        "participation_ratio": {**FOUND, "points": [{**one, "figure": 7.0 + one["gain"]} for one in POINTS]},
        "participation_ratio_of_f": {"why_none": "there is 1"},
        "jacobian_spread": FOUND,
    },
}
NOTHING: dict[str, Any] = {"figures": {}, "associations": {"bent": {"why_none": "there is 1"}}}


@pytest.mark.parametrize("width", [8.8, 3.9])
def test_each_arm_has_its_mark_in_each_panel(width: float) -> None:
    fig = draw_gains(TREE, width)
    panels = [axes for axes in fig.axes if axes.get_visible()]
    assert [axes.get_xlabel() for axes in panels] == [
        AXES[name] for name in ("bent", "participation_ratio", "jacobian_spread")
    ]
    for axes, name in zip(panels, ("bent", "participation_ratio", "jacobian_spread"), strict=True):
        level, *marks = axes.lines
        assert list(level.get_ydata()) == [0, 0]
        wanted = [([one["figure"]], [one["gain"]]) for one in TREE["associations"][name]["points"]]
        assert [(list(mark.get_xdata()), list(mark.get_ydata())) for mark in marks] == wanted
        assert len({mark.get_color() for mark in marks}) == len(marks)
        assert axes.get_title(loc="left") == "correlation +0.97, p = 0.333"
    (legend,) = fig.legends
    assert [text.get_text() for text in legend.get_texts()] == ["wide", "bent", "<odd>"]


def test_the_page_is_whole() -> None:
    table = Table("Does it go with the gain?", ["figure", "p"], [["bent", "0.333"]], ["bent: <why>"])
    page = gains_page("Geometry and gains of <study>", ["Newest checkpoints."], TREE, [table])
    assert "Geometry and gains of &lt;study&gt;" in page
    assert "bent: &lt;why&gt;" in page
    assert '<figure id="gains"' in page
    assert "<script" not in page
    assert list(figures(TREE)) == ["gains.svg"]


def test_without_an_association_there_is_no_figure() -> None:
    assert figures(NOTHING) == {}
    assert "<figure" not in gains_page("A study", [], NOTHING, [])
