"""Asymmetry and norms of heads as figures: every head is drawn, and the page holds them and its tables."""

from __future__ import annotations

from typing import Any

import pytest

from qurve.study.page.symmetry import (
    asymmetry_of,
    draw_asymmetry,
    draw_excess,
    excess_of,
    figures,
    symmetry_page,
)
from qurve.study.worth import Table

LINEAR = {
    "block": 0,
    "asymmetry": [0.4, 0.6],
    "logit_asymmetry": [0.1, 0.3],
    "logits": [{"excess": 1.5}, {"excess": None}],  # a head without weights
    "values": [{"excess": 1.0}, {"excess": 1.2}],
}
NONLINEAR = {"block": 1, "asymmetry": None, "logit_asymmetry": [0.2, 0.2], "logits": None, "values": [{"excess": 2.0}]}
TREE: dict[str, Any] = {"blocks": [LINEAR, NONLINEAR]}


def test_what_is_drawn_is_what_heads_have() -> None:
    assert asymmetry_of(TREE) == {"weights": [(0, [0.4, 0.6])], "logits": [(0, [0.1, 0.3]), (1, [0.2, 0.2])]}
    assert excess_of(TREE) == {"queries and keys": [(0, [1.5])], "values and outputs": [(0, [1.0, 1.2]), (1, [2.0])]}


@pytest.mark.parametrize("width", [8.8, 3.9])
def test_each_head_has_its_mark_and_each_block_its_mean(width: float) -> None:
    (axes,) = draw_asymmetry(TREE, width).axes
    level, weights, of_weights, logits, of_logits = (list(line.get_ydata()) for line in axes.lines)
    assert level == [0.5, 0.5]
    assert (weights, logits) == ([0.4, 0.6], [0.1, 0.3, 0.2, 0.2])
    assert (of_weights, of_logits) == (pytest.approx([0.5]), pytest.approx([0.2, 0.2]))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1"]
    assert {round(float(x) % 1, 9) for line in axes.lines[1:] for x in line.get_xdata()} == {0.1, 0.9}
    (alone,) = draw_asymmetry({"blocks": [NONLINEAR]}, width).axes
    assert {float(x) for line in alone.lines[1:] for x in line.get_xdata()} == {1.0}
    (axes,) = draw_excess(TREE, width).axes
    assert list(axes.lines[0].get_ydata()) == [1, 1]
    assert [line.get_label() for line in axes.lines if not line.get_label().startswith("_")] == list(excess_of(TREE))


def test_the_page_is_whole() -> None:
    table = Table("Symmetries", ["symmetry", "dimension"], [["hidden states", "31"]], ["A note <of> what it is."])
    page = symmetry_page("Symmetry of <run>", ["31 of 99 parameters change nothing."], TREE, [table])
    assert "Symmetry of &lt;run&gt;" in page
    assert "A note &lt;of&gt; what it is." in page
    assert "31 of 99 parameters" in page
    assert all(f'<figure id="{name}"' in page for name in ("asymmetry", "excess"))
    assert "<script" not in page
    assert list(figures(TREE)) == ["asymmetry.svg", "excess.svg"]


def test_without_two_linear_factors_there_are_no_norms() -> None:
    tree = {"blocks": [{**NONLINEAR, "values": None}]}
    assert list(figures(tree)) == ["asymmetry.svg"]
    assert '<figure id="excess"' not in symmetry_page("A run", [], tree, [])
