from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import matplotlib.text
import pytest
from fake_study import BASELINE, NONLINEAR, THREE_ARMS, arm, searched, write_study

from qurve.study import figures
from qurve.study.drawing import INK, NARROW, PALETTE, png, svg
from qurve.study.results import load

DRAW = (figures.curves_figure, figures.gains_figure, figures.differences_figure, figures.search_figure)


def curve(axes, colour, width):
    """The line of this colour and width, as {x: y}."""
    (line,) = [
        x for x in axes.lines if x.get_color() == colour and x.get_linewidth() == width and len(x.get_xdata()) > 2
    ]
    return dict(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_curves_show_the_means_and_the_gain_of_the_pairs(tmp_path):
    results = load(write_study(tmp_path, fates={("res-gelu", 3): "failed"}))
    top, bottom = figures.curves_figure(results).axes
    arm, wider, base = results.arms[2], results.arms[1], results.baseline
    assert curve(top, PALETTE[2], 1.7)[400] == pytest.approx(sum(dict(arm.runs[s].val)[400] for s in (1, 2)) / 2)
    mean, reference = (sum(dict(one.runs[s].val)[400] for s in (1, 2, 3)) / 3 for one in (wider, base))
    assert curve(bottom, PALETTE[1], 1.7)[400] == pytest.approx(100 * (reference - mean) / reference)
    assert min(curve(top, PALETTE[0], 1.7)) == 40  # the first twelfth is left out
    assert "MLP 4.75, training (smoothed)" in top.get_legend_handles_labels()[1]  # the best whole arm
    assert "step" in bottom.get_xlabel()
    assert "nats" in top.get_ylabel()


def test_a_diverged_run_is_marked_and_enters_no_mean(tmp_path):
    fates = {("res-gelu", seed): "diverged" for seed in (1, 2, 3)}
    top, bottom = figures.curves_figure(load(write_study(tmp_path, fates=fates))).axes
    marks = [line for line in top.lines if line.get_marker() == "x"]
    assert [list(mark.get_xdata()) for mark in marks] == [[140]] * 3
    assert "Res. GELU (nonlinear\nquery) (3 of 3 diverged)" in top.get_legend_handles_labels()[1]
    assert not any(len(line.get_xdata()) for line in bottom.lines if line.get_color() == PALETTE[2])


def test_one_diverged_seed_is_told_beside_those_that_finished(tmp_path):
    results = load(write_study(tmp_path, fates={("res-gelu", 2): "diverged"}))
    top, _ = figures.curves_figure(results).axes
    assert len([line for line in top.lines if line.get_marker() == "x"]) == 1
    assert any(label.endswith(" (1 of 3 diverged)") for label in top.get_legend_handles_labels()[1])
    (axes,) = figures.differences_figure(results).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert [label.endswith("\n(1 of 3 diverged)") for label in labels] == [False, True]


def test_a_run_that_diverged_before_it_was_measured_is_marked_at_the_edge(tmp_path):
    folder = write_study(tmp_path, fates={("res-gelu", 2): "diverged"})
    file = folder / "runs" / "res-gelu" / "seed-2" / "metrics.jsonl"
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines() if "split" not in line))
    top, _ = figures.curves_figure(load(folder)).axes
    (mark,) = [line for line in top.lines if line.get_marker() == "x"]
    assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([140], [top.get_ylim()[1]])


def test_the_gains_begin_with_the_first_evaluation_and_their_band_holds_every_seed(tmp_path):
    results = load(write_study(tmp_path))
    (axes,) = figures.gains_figure(results).axes
    points = curve(axes, PALETTE[2], 1.7)
    arm, base = results.arms[2], results.baseline
    assert min(points) == 0
    of_seeds = [[100 * (1 - loss / dict(base.runs[s].val)[step]) for step, loss in arm.runs[s].val] for s in (1, 2, 3)]
    edges = {tuple(vertex) for band in axes.collections for path in band.get_paths() for vertex in path.vertices}
    for step, *gains in zip((step for step, _ in arm.runs[1].val), *of_seeds, strict=True):
        assert min(gains) <= points[step] <= max(gains)
        for bound in (min(gains), max(gains)):
            assert any(x == step and y == pytest.approx(bound) for x, y in edges)
    assert "MLP 4.75, 0.90 M" in axes.get_legend_handles_labels()[1]


def test_one_seed_has_no_band(tmp_path):
    results = load(write_study(tmp_path, seeds=(1,)))
    assert not any(axes.collections for axes in figures.curves_figure(results).axes)


def test_search_rings_the_chosen_and_crosses_the_broken(tmp_path):
    (axes,) = figures.search_figure(load(write_study(tmp_path))).axes
    rings = [line for line in axes.lines if line.get_markersize() == 11]
    assert [line.get_xdata()[0] for line in rings] == [2e-3, 4e-3, 8e-3]
    crosses = [x for line in axes.lines if line.get_marker() == "x" for x in line.get_xdata()]
    assert set(crosses) == {1.6e-2}
    assert axes.get_xscale() == "log"


def test_the_ring_is_around_the_chosen_point_even_when_another_is_lower(tmp_path):
    file = write_study(tmp_path) / "study.json"
    tree = json.loads(file.read_text())
    losses = [score for score in tree["search"]["scores"] if score["arm"] == "mlp-4.75"]
    other = losses[-3]
    assert losses[0]["val_loss"] != other["val_loss"] > min(score["val_loss"] for score in losses if score["val_loss"])
    tree["search"]["chosen"]["mlp-4.75"] = {key: other[key] for key in ("point", "val_loss")}
    file.write_text(json.dumps(tree))
    (axes,) = figures.search_figure(load(tmp_path)).axes
    rings = [line for line in axes.lines if line.get_markersize() == 11]
    assert (rings[1].get_xdata()[0], rings[1].get_ydata()[0]) == (other["point"]["train.lr"], other["val_loss"])


def test_arms_at_the_baselines_point_are_drawn_among_the_differences_alone(tmp_path):
    results = load(write_study(tmp_path, searched(*THREE_ARMS)))
    for axes in (figures.curves_figure(results).axes[0], figures.gains_figure(results).axes[0]):
        assert not any("settings of" in label for label in axes.get_legend_handles_labels()[1])
    (axes,) = figures.differences_figure(results).axes
    assert len(axes.get_yticklabels()) == 4
    assert [figures.colour_index(results, arm) for arm in results.arms] == [0, 1, 2, 1, 2]
    assert figures.search_figure(results).axes[0].get_legend_handles_labels()[1] == [
        "Baseline",
        "MLP 4.75",
        "Res. GELU (nonlinear query)",
    ]


def test_two_seeds_get_no_interval_in_the_figure(tmp_path):
    for n, bars in ((2, 0), (3, 2)):
        results = load(write_study(tmp_path / str(n), THREE_ARMS, seeds=tuple(range(1, n + 1))))
        (axes,) = figures.differences_figure(results).axes
        assert len([line for line in axes.lines if line.get_linewidth() == 2.4]) == bars


@pytest.mark.parametrize("draw", DRAW)
def test_figures_are_the_same_twice_and_themed_ones_follow_the_page(tmp_path, draw):
    results = load(write_study(tmp_path))
    once, twice = (svg(draw(results), "salt", themed=False) for _ in range(2))
    assert once == twice
    assert "<dc:date>" not in once
    assert png(draw(results)) == png(draw(results))
    themed = svg(draw(results, NARROW), "salt", themed=True)
    ET.fromstring(themed)
    assert "currentColor" in themed
    assert "var(--arm-1)" in themed
    assert not any(colour in themed for colour in (INK, *PALETTE))
    assert "http:" not in themed.replace("http://www.w3.org/", "")


def test_many_arms_leave_the_plot_its_height(tmp_path):
    def height(arms):
        fig = figures.search_figure(load(write_study(tmp_path / str(len(arms)), arms, seeds=(1,))), NARROW)
        fig.draw_without_rendering()
        return fig.axes[0].get_window_extent().height

    many = (BASELINE, *(arm(f"arm-{i}", f"Arm number {i}") for i in range(12)))
    assert height(many) > 0.9 * height(many[:2])


def test_labels_are_text_not_markup_and_not_mathematics(tmp_path):
    hostile = "<script>alert(1)</script> $x_1$ #0072b2"
    results = load(write_study(tmp_path, (BASELINE, arm("new", hostile))))
    fig = figures.differences_figure(results)
    themed = svg(fig, "salt", themed=True)
    assert "<script" not in themed
    assert any(text.get_text().startswith("<script>") for text in fig.findobj(matplotlib.text.Text))
    texts = [node.text for node in ET.fromstring(themed).iter("{http://www.w3.org/2000/svg}text")]
    assert any(text and text.startswith("<script>alert") for text in texts)


def test_an_unfamiliar_script_draws_without_warning(tmp_path):
    results = load(write_study(tmp_path, (BASELINE, arm("new", "単"))))
    assert png(figures.curves_figure(results)).startswith(b"\x89PNG")


def test_a_study_of_nothing_yet_is_drawn(tmp_path):
    fates = {(name, seed): "missing" for name in ("baseline", "res-gelu") for seed in (1, 2, 3)}
    results = load(write_study(tmp_path, (BASELINE, NONLINEAR), fates=fates))
    for draw in DRAW:
        ET.fromstring(svg(draw(results), "salt", themed=True))
