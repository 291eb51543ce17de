"""Interventions and conjunctions as figures: every one is drawn, and the page holds them and its tables."""

from __future__ import annotations

from typing import Any

import pytest

from qurve.study.drawing import svg
from qurve.study.page.mechanism import draw_conjunctions, draw_interventions, mechanism_page, row_labels
from qurve.study.worth import Table

ROWS = [
    {
        "name": name,
        "layers": layers,
        "difference": 0.01 * place,
        "low": 0.01 * place - 0.02,
        "high": 0.01 * place + 0.02,
    }
    for place, (name, layers) in enumerate([("zero", [0]), ("zero", [1]), ("zero", [0, 1]), ("swap", [0, 1])])
]
PAIRS = [{"layer": layer, "pair": ["a", "b"], "x": 0.1 * layer, "q": 0.2, "q_random": [0.1, 0.3]} for layer in range(9)]
TREE: dict[str, Any] = {"interventions": ROWS, "probes": {"trained": {"conjunctions": PAIRS}}}


@pytest.mark.parametrize("width", [8.8, 3.9])
def test_every_intervention_has_its_row(width: float) -> None:
    fig = draw_interventions(ROWS, width)
    (axes,) = fig.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == row_labels(ROWS)
    intervals = [
        tuple(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) == 2 and line.get_marker() == "None"
    ]
    assert intervals[1:] == [(row["low"], row["high"]) for row in ROWS]  # the first is the line at zero
    marks = [line for line in axes.lines if line.get_marker() == "o"]
    assert [line.get_xdata()[0] for line in marks] == [row["difference"] for row in ROWS]
    assert [line.get_markerfacecolor() == "none" for line in marks] == [False, False, True, False]
    assert row_labels(ROWS) == ["zero  0", "zero  1", "zero  all", "swap  0, 1"]


def test_every_pair_has_its_mark() -> None:
    fig = draw_conjunctions(PAIRS, 8.8)
    (axes,) = fig.axes
    by_block = [line for line in axes.lines if line.get_label().startswith("block")]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in by_block] == [(p["x"], p["q"]) for p in PAIRS]
    controls = next(line for line in axes.lines if line.get_marker() == ".")
    assert list(controls.get_ydata()) == pytest.approx([0.2] * 9)
    assert "block 8" in svg(fig, "test", themed=True)


def test_the_page_is_whole() -> None:
    table = Table("Scale", ["matrix", "size"], [["query.w1", "0.02"]], ["A note <of> what it is."])
    page = mechanism_page("What f does in <run>", ["Step 480."], TREE, [table])
    assert "What f does in &lt;run&gt;" in page
    assert "A note &lt;of&gt; what it is." in page
    assert '<figure id="interventions"' in page
    assert '<figure id="conjunctions"' in page
    assert "<script" not in page
    assert "Step 480." in page


def test_without_an_f_there_are_tables_alone() -> None:
    page = mechanism_page("What f does in run", [], {}, [Table("Scale", ["matrix"], [["query.weight"]])])
    assert "<figure" not in page
    assert "query.weight" in page
