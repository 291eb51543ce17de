from __future__ import annotations

import dataclasses
import random

import pytest
from fake_study import BASELINE, arm, write_study
from hypothesis import given
from hypothesis import strategies as st

from qurve.study.paired import paired_p
from qurve.study.power import detectable, minimum_detectable, power_of, seeds_needed
from qurve.study.results import load
from qurve.study.worth import EFFECTS_ASKED, noise_table

SD = 0.01


def test_power_of_a_textbook_case():
    # Cohen, paired t, effect half a deviation, two-sided 5 %: n = 34 is the first with 80 %
    assert seeds_needed(0.5, 1.0) == 34
    assert power_of(0.5, 1.0, 34) == pytest.approx(0.8078, abs=1e-4)
    assert power_of(0.5, 1.0, 33) == pytest.approx(0.7954, abs=1e-4)


def test_power_without_an_effect_is_the_level():
    assert power_of(0, SD, 5) == pytest.approx(0.05)
    assert power_of(0, SD, 5, arms=5) == pytest.approx(0.01)


@pytest.mark.parametrize(("effect", "n", "arms"), [(0.015, 5, 1), (0.01, 7, 1), (0.02, 5, 3)])
def test_planted_effects_are_found_as_often_as_predicted(effect, n, arms):
    draw = random.Random(n)
    found = sum(paired_p([draw.gauss(-effect, SD) for _ in range(n)]) <= 0.05 / arms for _ in range(2000))
    assert found / 2000 == pytest.approx(power_of(effect, SD, n, arms=arms), abs=0.033)  # three standard errors


@given(st.floats(0.2, 20), st.integers(1, 6))
def test_the_seeds_needed_are_enough_and_one_fewer_is_not(effect, arms):
    n = seeds_needed(effect, 1.0, arms=arms)
    assert power_of(effect, 1.0, n, arms=arms) >= 0.8
    assert n == 3 or power_of(effect, 1.0, n - 1, arms=arms) < 0.8
    assert seeds_needed(-effect, 1.0, arms=arms) == n


@given(st.integers(3, 200), st.integers(1, 6), st.floats(1e-4, 10))
def test_what_can_just_be_detected_needs_that_many_seeds(n, arms, sd):
    effect = minimum_detectable(n, sd, arms=arms)
    assert power_of(effect, sd, n, arms=arms) == pytest.approx(0.8, abs=1e-6)
    assert seeds_needed(effect * (1 + 1e-9), sd, arms=arms) == n


def test_fewer_than_three_seeds_show_nothing():
    assert power_of(100, SD, 2) == 0
    assert minimum_detectable(2, SD) is None
    assert seeds_needed(100, SD) == 3


def test_what_no_number_of_seeds_shows():
    assert seeds_needed(1e-9, 1.0) is None
    with pytest.raises(ValueError, match="other than zero"):
        seeds_needed(0, SD)
    for sd in (0.0, float("nan")):
        with pytest.raises(ValueError, match="a standard deviation of"):
            seeds_needed(0.1, sd)
    with pytest.raises(ValueError, match="for 0 arms"):
        power_of(0.1, SD, 5, arms=0)


SD_OF_BOTH = ((0.011547**2 + 0.0152753**2) / 2) ** 0.5
"""Of the two arms' differences in `two_arms`, pooled over two degrees of freedom each."""


def two_arms(folder):
    arms = (BASELINE, arm("a", "A"), arm("b", "B"))
    losses = {"baseline": (3.0, 3.1, 2.9), "a": (3.01, 3.09, 2.91), "b": (2.99, 3.12, 2.9)}
    finals = {(name, seed): loss for name, of in losses.items() for seed, loss in enumerate(of, 1)}
    return arms, losses, load(write_study(folder, arms, finals=finals))


@pytest.mark.parametrize(("looks", "level"), [((), 0.05), ((3, 5), 0.025)])
def test_the_seeds_that_a_report_asks_for_are_for_all_its_arms_and_looks(looks, level, tmp_path):
    _, _, results = two_arms(tmp_path)
    results = dataclasses.replace(results, looks=looks)
    told = " ".join(noise_table(results).notes)
    for share in EFFECTS_ASKED:
        n = seeds_needed(3.0 * share, SD_OF_BOTH, arms=2, level=level)
        assert n != seeds_needed(3.0 * share, SD_OF_BOTH, level=level)
        assert n != seeds_needed(3.0 * share, SD_OF_BOTH, arms=2, level=0.075 - level)
        assert f"{100 * share:g} % takes {n} seeds" in told
    assert f"80 % power: {detectable(results)[0]:.4f} nats per token" in told


def test_what_a_study_could_have_seen(tmp_path):
    arms, losses, results = two_arms(tmp_path / "s")
    nats, percent = detectable(results)
    assert nats == pytest.approx(minimum_detectable(3, SD_OF_BOTH, arms=2), rel=1e-4)
    assert percent == pytest.approx(100 * nats / 3.0)
    looked = dataclasses.replace(results, looks=(3, 5))
    assert detectable(looked)[0] == pytest.approx(minimum_detectable(3, SD_OF_BOTH, arms=2, level=0.025), rel=1e-4)
    assert detectable(load(write_study(tmp_path / "one", arms, seeds=(1,)))) is None
    same = {(name, seed): 3.0 for name in losses for seed in (1, 2, 3)}
    assert detectable(load(write_study(tmp_path / "same", arms, finals=same))) is None
