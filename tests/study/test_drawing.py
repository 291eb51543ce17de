from __future__ import annotations

import math
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from qurve import plugins
from qurve.study.drawing import NARROW, PALETTE, WIDE, Points, heatmap, png, scatter_fit, shorten, svg

RATES, DECAYS = ["1e-3", "2e-3", "4e-3"], ["0", "0.1"]
MAP = [[3.2, 3.1, None], [3.4, 3.0, math.nan]]


def stability(**more):
    return heatmap(MAP, DECAYS, RATES, row_axis="weight decay", column_axis="peak learning rate", **more)


def test_a_heat_map_says_its_numbers_and_crosses_what_diverged():
    axes, _ = stability(marks=[(1, 1)]).axes
    assert {text.get_position(): text.get_text() for text in axes.texts} == {
        (0, 0): "3.200",
        (1, 0): "3.100",
        (0, 1): "3.400",
        (1, 1): "3.000",
    }
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "x"] == [(2, 0)]
    rings = [patch for patch in axes.patches if patch.get_linewidth() == 1.6]
    assert [(ring.get_x() + 0.47, ring.get_y() + 0.45) for ring in rings] == [(1, 1)]
    assert [label.get_text() for label in axes.get_xticklabels()] == RATES
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("peak learning rate", "weight decay")


def test_the_lowest_cell_of_a_heat_map_is_the_darkest():
    axes, _ = stability().axes
    cells = {(p.get_x() + 0.5, p.get_y() + 0.5): p.get_alpha() for p in axes.patches if p.get_fill()}
    assert max(cells, key=cells.get) == (1, 1)
    assert min(cells, key=cells.get) == (0, 1)


def test_maps_with_one_scale_have_one_colour_for_one_loss_and_a_bar_that_says_it():
    """Each with its own lowest and highest would give 3.1 two colours."""
    maps = [[[3.0, 3.1]], [[3.1, 3.9]]]
    shades, bars = [], []
    for values in maps:
        axes, bar = heatmap(values, ["0"], ["1", "2"], row_axis="a", column_axis="b", scale=(3.0, 4.0)).axes
        cells = {patch.get_x() + 0.5: patch.get_alpha() for patch in axes.patches if patch.get_fill()}
        shades.append(cells[values[0].index(3.1)])
        bars.append([label.get_text() for label in bar.get_yticklabels()])
        colours = [patch.get_alpha() for patch in sorted(bar.patches, key=lambda patch: patch.get_y())]
        assert colours == sorted(colours, reverse=True)
        assert min(colours) < shades[-1] < max(colours)
    assert shades[0] == shades[1]
    assert bars == [["3.000", "3.500", "4.000"]] * 2
    assert not heatmap([[3.0]], ["0"], ["1"], row_axis="a", column_axis="b").axes[1].patches


def test_a_heat_map_of_nothing_but_divergence_is_drawn():
    for values in ([[None]], [[math.nan]], [[2.0]]):
        ET.fromstring(svg(heatmap(values, ["0"], ["1"], row_axis="a", column_axis="b"), "salt", themed=True))


@pytest.mark.parametrize("values", [[[1.0]], [[1.0, 2.0, 3.0]], [[1.0, 2.0, 3.0], [1.0]]])
def test_a_heat_map_with_a_cell_too_few_is_refused(values):
    with pytest.raises(ValueError, match="2 rows and 3 columns"):
        heatmap(values, DECAYS, RATES, row_axis="a", column_axis="b")


LADDER = [
    Points("Baseline", [(1e5, 4.0), (1e6, 3.5)], fit=[(1e5, 4.0), (1e6, 3.5)]),
    Points(
        "Res. GELU",
        [(1e5, 3.9), (1e6, 3.4)],
        intervals=[(3.8, 4.0), None],
        fit=[(1e5, 3.9), (1e6, 3.4)],
        band=[(1e5, 3.85, 3.95), (1e6, 3.3, 3.5)],
    ),
]


def test_a_scatter_has_points_intervals_line_and_band():
    (axes,) = scatter_fit(LADDER, x_axis="non-embedding parameters", y_axis="loss", log_y=True, zero=False).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    bars = [line for line in axes.lines if line.get_linewidth() == 2.2]
    assert [(list(bar.get_xdata()), list(bar.get_ydata())) for bar in bars] == [([1e5, 1e5], [3.8, 4.0])]
    dots = [line for line in axes.lines if line.get_linestyle() == "None"]
    assert [list(line.get_ydata()) for line in dots] == [[4.0, 3.5], [3.9, 3.4]]
    assert [line.get_color() for line in dots] == list(PALETTE[:2])
    assert axes.get_legend_handles_labels()[1] == ["Baseline", "Res. GELU"]
    assert len(axes.collections) == 1


def test_what_a_logarithm_cannot_take_is_refused():
    with pytest.raises(ValueError, match="gain: a logarithmic y axis takes positive values alone"):
        scatter_fit([Points("gain", [(1.0, -0.1)])], x_axis="a", y_axis="b", log_y=True)
    with pytest.raises(ValueError, match="gain: 2 points and 1 intervals"):
        scatter_fit([Points("gain", [(1.0, 1.0), (2.0, 1.0)], intervals=[None])], x_axis="a", y_axis="b")


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_both_drawings_are_the_same_twice_and_follow_the_page(width):
    for draw in (
        lambda: stability(width=width),
        lambda: scatter_fit(LADDER, x_axis="a", y_axis="b", zero=True, width=width),
    ):
        assert png(draw()) == png(draw())
        themed = svg(draw(), "salt", themed=True)
        assert themed == svg(draw(), "salt", themed=True)
        assert not any(colour in themed for colour in PALETTE)
        ET.fromstring(themed)


@pytest.mark.parametrize("name", ["STUDY", "PAPER"])
@pytest.mark.parametrize("limit", [18, 26, 28, 38])
def test_labels_that_differ_at_their_ends_still_do_in_a_legend(name: str, limit: int) -> None:
    experiments = Path(__file__).parents[2] / "experiments"
    plugins.make_importable(experiments)
    arms = runpy.run_path(str(experiments / "figure2.py"))[name].arms
    short = [shorten(arm.label, limit) for arm in arms]
    assert len(set(short)) == len(arms)
    assert all(len(line) <= limit for label in short for line in label.split("\n"))
    assert all(label.count("\n") <= 2 for label in short)


def test_a_label_of_more_than_three_lines_is_cut():
    assert shorten("one two three four five six", 9) == "one two\nthree\nfour…"
    assert shorten("", 9) == ""


def test_a_legend_of_very_many_says_how_many_more_there_are():
    fig = scatter_fit([Points(f"arm {i}", [(1.0, float(i))]) for i in range(43)], x_axis="a", y_axis="b")
    (drawn,) = fig.legends
    assert len(drawn.get_texts()) == 40
    assert "3 more" in drawn.get_title().get_text()
