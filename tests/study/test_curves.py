from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, NONLINEAR, arm, config, write_study
from hypothesis import given
from hypothesis import strategies as st

from qurve.study import curves, figures
from qurve.study.page import plots
from qurve.study.page.sections import SECTIONS
from qurve.study.results import load
from qurve.study.statistics import comparisons

VALUES = st.floats(0.1, 10, allow_nan=False)
CURVES = st.lists(st.dictionaries(st.integers(0, 12), VALUES, min_size=1).map(lambda c: sorted(c.items())), max_size=4)


def test_smoothing_keeps_a_constant_and_averages_noise():
    assert curves.smoothed([(s, 2.0) for s in range(9)]) == [(s, 2.0) for s in range(9)]
    zigzag = curves.smoothed([(s, float(s % 2)) for s in range(400)])
    assert all(abs(value - 0.5) < 0.1 for _, value in zigzag)
    assert curves.smoothed([]) == []


@given(CURVES)
def test_a_band_is_over_the_steps_that_all_runs_have_and_holds_them(seeds):
    found = curves.band(seeds)
    shared = set.intersection(*({step for step, _ in curve} for curve in seeds)) if seeds else set()
    assert [step for step, _ in found.mean] == sorted(shared)
    for (step, mean), (_, low), (_, high) in zip(found.mean, found.low, found.high, strict=True):
        values = [dict(curve)[step] for curve in seeds]
        assert (low, high) == (min(values), max(values))
        assert mean == pytest.approx(sum(values) / len(values))


@given(st.integers(0, 700), st.integers(2, 90))
def test_thinning_keeps_points_and_both_ends(n, most):
    points = [(step, step / 7) for step in range(n)]
    kept = curves.thinned(points, most)
    assert len(kept) == min(n, most) == len(set(kept))
    assert set(kept) <= set(points)
    assert kept[:1] == points[:1]
    assert kept[-1:] == points[-1:]


def test_many_runs_share_the_points():
    assert curves.points_a_run(9) == curves.MOST_POINTS
    assert curves.points_a_run(200) * 200 <= curves.MOST_POINTS_IN_ALL
    assert curves.points_a_run(0) == curves.MOST_POINTS


REFUSED = {
    "other batches": (NONLINEAR, {("res-gelu", 2): "other-batches"}),
    "other windows": ({**NONLINEAR, "config": config(eval__windows=3)}, {}),
    "a broken seed": (NONLINEAR, {("res-gelu", 2): "diverged"}),
    "a running one": (NONLINEAR, {("baseline", 2): "running"}),
}


@pytest.mark.parametrize(("new", "fates"), REFUSED.values(), ids=REFUSED)
def test_no_gain_is_drawn_of_an_arm_that_is_not_compared(new: Any, fates: Any, tmp_path: Path) -> None:
    results = load(write_study(tmp_path, (BASELINE, new), fates=fates))
    assert comparisons(results)[0].diff is None
    assert curves.gains(results, results.arms[1]) == curves.Band([], [], [], 0)
    assert curves.compared_pairs(results, results.arms[1]) == []
    (axes,) = figures.gains_figure(results).axes
    assert not any(line.get_linewidth() == 1.7 and len(line.get_xdata()) for line in axes.lines)
    assert any(word in axes.get_legend_handles_labels()[1][0] for word in ("(no verdict)", "diverged)"))
    assert plots.gains_plot(results)["traces"] == []
    section = next(one for one in SECTIONS if one.title == "Gain from the first step on").fragment(results)
    assert section is not None
    assert f"No gain is drawn where there is no verdict: {new['label']}." in section
    assert "Relative log-loss gain over the baseline, in per cent" not in section


def test_an_a_a_arm_of_other_batches_has_its_gain(tmp_path: Path) -> None:
    fates = {("twin", seed): "other-batches" for seed in (1, 2, 3)}
    results = load(write_study(tmp_path, (BASELINE, arm("twin", "Twin", seed_offset=1000)), fates=fates))
    assert curves.gains(results, results.arms[1]).n == 3


def test_the_gain_is_that_of_the_mean_losses(tmp_path):
    results = load(write_study(tmp_path))
    arm, base = results.arms[2], results.baseline
    found = curves.gains(results, arm)
    ours, theirs = (sum(a.runs[s].val[-1][1] for s in (1, 2, 3)) for a in (arm, base))
    assert found.n == 3
    assert found.mean[-1] == (400, pytest.approx(100 * (theirs - ours) / theirs))
