"""A figure against the gains of a study's arms: planted associations are found, and what is none is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, arm, write_study

from qurve.errors import BadInput
from qurve.study import geometry
from qurve.study.geometry import association, permutation_p
from qurve.study.results import StudyResults, load

GAINS = {"a": 0.01, "b": 0.02, "c": 0.05, "d": 0.08}
ARMS = (BASELINE, *(arm(name, name.upper(), gain) for name, gain in GAINS.items()))


@pytest.fixture
def results(tmp_path: Path) -> StudyResults:
    return load(write_study(tmp_path, arms=ARMS))


def figures(results: StudyResults, of_gain: Any) -> dict[str, dict[int, float]]:
    return {name: {seed: of_gain(gain) for seed in results.seeds} for name, gain in GAINS.items()}


def test_a_figure_that_is_the_gain_goes_with_it(results: StudyResults) -> None:
    found = association(results, figures(results, lambda gain: 3 * gain + 1))
    assert found.correlation > 0.99
    assert found.p == pytest.approx(1 / 24)
    assert [point.arm for point in found.points] == ["a", "b", "c", "d"]
    base = results.baseline.val_loss
    for point, one in zip(found.points, results.others, strict=True):
        assert point.gain == pytest.approx(100 * (base - one.val_loss) / base)
        assert point.figure == pytest.approx(3 * GAINS[point.arm] + 1)
        assert point.seeds == len(results.seeds)
    assert association(results, figures(results, lambda gain: -gain)).correlation < -0.99


def test_a_figure_that_is_not_goes_with_nothing(results: StudyResults) -> None:
    found = association(results, figures(results, {0.01: 1.0, 0.02: -1.0, 0.05: -1.0, 0.08: 1.0}.get))
    assert abs(found.correlation) < 0.6
    assert found.p > 0.3


def test_arms_that_broke_or_were_not_measured_are_left_out(tmp_path: Path) -> None:
    results = load(write_study(tmp_path, arms=ARMS, fates={("b", 2): "diverged"}))
    known = figures(results, lambda gain: gain)
    assert [point.arm for point in association(results, known).points] == ["a", "c", "d"]
    known["c"] = {results.seeds[0]: 0.3}
    assert [(point.seeds, point.figure) for point in association(results, known).points][1] == (1, 0.3)
    del known["c"]
    with pytest.raises(BadInput, match=r"at least 3 arms .*, and there are 2$"):
        association(results, known)


def test_what_does_not_vary_is_refused(results: StudyResults) -> None:
    with pytest.raises(BadInput, match="the figure is 2 for every arm"):
        association(results, figures(results, lambda gain: 2.0))


def test_one_arm_that_differs_is_one_of_all_of_them(results: StudyResults) -> None:
    """An order of the gains is then no more than which of them that arm gets: here the largest, and the farthest."""
    found = association(results, figures(results, lambda gain: float(gain == 0.08)))
    assert found.p == pytest.approx(1 / len(GAINS))


def test_the_permutation_p_counts_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    xs, ys = [0.3, 1.0, 2.0, 2.5, 7.0], [1.0, 3.0, 2.0, 0.5, 4.0]
    mean = sum(xs) / 5
    dot = lambda order: abs(sum((x - mean) * y for x, y in zip(xs, order, strict=True)))  # noqa: E731
    as_far = sum(dot(order) >= dot(ys) - 1e-12 for order in itertools.permutations(ys))
    assert permutation_p(xs, ys) == pytest.approx(as_far / 120)
    monkeypatch.setattr(geometry, "DRAWN", 2000)
    many = [float(i) for i in range(12)]
    assert permutation_p(many, many) < 1e-3
    assert permutation_p(many, many) == permutation_p(many, many)
