from __future__ import annotations

import pytest
from fake_study import write_study
from hypothesis import given
from hypothesis import strategies as st

from qurve.study import curves
from qurve.study.results import load

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


def test_the_gain_is_that_of_the_mean_losses(tmp_path):
    results = load(write_study(tmp_path, fates={("res-gelu", 3): "failed"}))
    arm, base = results.arms[2], results.baseline
    found = curves.gains(results, arm)
    ours, theirs = (sum(a.runs[s].val[-1][1] for s in (1, 2)) for a in (arm, base))
    assert found.n == 2
    assert found.mean[-1] == (400, pytest.approx(100 * (theirs - ours) / theirs))
