"""Conditions and violations as figures: every one is drawn, and the page holds them and its tables."""

from __future__ import annotations

from typing import Any

import pytest

from qurve.study.drawing import svg
from qurve.study.page.redundancy import draw_conditions, draw_violations, figures, redundancy_page
from qurve.study.worth import Table


def verdict(layer: int, weight: str, outcome: str, condition: float | None) -> dict[str, Any]:
    return {"layer": layer, "weight": weight, "outcome": outcome, "condition": condition}


VERDICTS = [
    verdict(0, "query", "identity", 10.0),
    verdict(1, "query", "kept", 1000.0),
    verdict(1, "output", "triangular", 100.0),
    verdict(2, "query", "kept", None),  # singular
    verdict(3, "query", "none", None),
]
VIOLATIONS = [
    {"kind": "norm", "where": "blocks.0.attention_norm", "size": 0.1},
    {"kind": "skip", "where": "the skip over attention of block 0", "size": 10.0},
    {"kind": "norm", "where": "blocks.0.mlp_norm", "size": 1.0},
    {"kind": "tie", "where": "token_embedding", "size": 2.0},
]
TREE: dict[str, Any] = {"verdicts": VERDICTS, "violations": VIOLATIONS}


def marks(figure: Any) -> dict[str, list[tuple[float, float]]]:
    (axes,) = figure.axes
    named = [line for line in axes.lines if not line.get_label().startswith("_")]
    return {line.get_label(): list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in named}


def test_every_weight_that_has_a_condition_has_its_mark() -> None:
    assert marks(draw_conditions(VERDICTS[:3], 8.8)) == {
        "query: identity": [(0, 1)],
        "query: stays": [(1, 3)],
        "output: triangular": [(1, 2)],
    }
    (axes,) = draw_conditions(VERDICTS[:3], 8.8).axes
    assert [line.get_markerfacecolor() == "none" for line in axes.lines] == [False, True, False]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["10", "100", "1000"]


@pytest.mark.parametrize("width", [8.8, 3.9])
def test_every_place_has_its_row_from_the_top(width: float) -> None:
    figure = draw_violations(VIOLATIONS, width)
    found = {kind: [(round(x, 6), y) for x, y in points] for kind, points in marks(figure).items()}
    assert found == {"norm": [(-1, 0), (0, 2)], "skip": [(1, 1)], "tie": [(0.30103, 3)]}
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [one["where"] for one in VIOLATIONS]
    assert figure.axes[0].yaxis_inverted()
    assert "the skip over attention of block 0" in svg(figure, "test", themed=True)


def test_the_page_is_whole() -> None:
    table = Table("Linear weights", ["block", "becomes"], [["0", "identity"]], ["A note <of> what it is."])
    page = redundancy_page("Redundancy in <run>", ["nothing can be absorbed exactly"], TREE, [table])
    assert "Redundancy in &lt;run&gt;" in page
    assert "A note &lt;of&gt; what it is." in page
    assert "nothing can be absorbed exactly" in page
    assert all(f'<figure id="{name}"' in page for name in ("conditions", "violations"))
    assert "<script" not in page
    assert list(figures(TREE)) == ["conditions.svg", "violations.svg"]


def test_what_there_are_no_numbers_for_is_not_drawn() -> None:
    tree = {"verdicts": VERDICTS[3:], "violations": []}
    assert figures(tree) == {}
    assert "<figure" not in redundancy_page("A run", [], tree, [])
