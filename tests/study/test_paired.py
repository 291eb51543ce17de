"""The tests' own answers: by hand, by scipy, and by simulation with planted effects."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from qurve.study.paired import (
    deviation_interval,
    holm,
    paired_interval,
    paired_p,
    sign_flip_p,
    smallest_sign_flip_p,
)

values = st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=2, max_size=9)
chances = st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=8)
CHANCE = random.Random(3)
DRAWN = [[CHANCE.gauss(0.01, 0.02) for _ in range(n)] for n in (2, 3, 5, 7, 12)]


# ------------------------------------------------------------------------------------------------------------ interval


def test_interval_known_by_hand():
    # mean -0.02, deviation 0.01, three values: half width = 4.302653 * 0.01 / sqrt(3)
    mean, low, high = paired_interval([-0.01, -0.02, -0.03])
    assert mean == pytest.approx(-0.02)
    assert low == pytest.approx(-0.02 - 0.0248414, abs=1e-7)
    assert high == pytest.approx(-0.02 + 0.0248414, abs=1e-7)


def test_interval_of_two_uses_one_degree_of_freedom():
    # the deviation of {0, 0.02} is 0.0141421, its standard error 0.01, and the t quantile 12.706205
    mean, low, high = paired_interval([0.0, 0.02])
    assert (low, high) == (pytest.approx(0.01 - 0.12706205, abs=1e-7), pytest.approx(0.01 + 0.12706205, abs=1e-7))
    assert mean == pytest.approx(0.01)


def test_interval_needs_two():
    with pytest.raises(ValueError, match="at least two"):
        paired_interval([0.1])


@pytest.mark.parametrize("n", [3, 5])
def test_interval_covers_the_truth_as_often_as_it_says(n):
    draw = random.Random(17)
    covered = 0
    for _ in range(2000):
        _, low, high = paired_interval([draw.gauss(-0.02, 0.05) for _ in range(n)])
        covered += low <= -0.02 <= high
    assert 0.93 <= covered / 2000 <= 0.97


@given(values, st.floats(-1, 1))
def test_interval_moves_with_its_data_and_mirrors(differences, shift):
    mean, low, high = paired_interval(differences)
    assert low <= mean <= high
    moved = paired_interval([d + shift for d in differences])
    assert moved == pytest.approx((mean + shift, low + shift, high + shift), abs=1e-9)
    mirrored = paired_interval([-d for d in differences])
    assert mirrored == pytest.approx((-mean, -high, -low), abs=1e-12)


# --------------------------------------------------------------------------------------------------------------- t test


@pytest.mark.parametrize("differences", DRAWN, ids=len)
def test_p_is_scipys(differences):
    base = [3.0 + 0.1 * place for place in range(len(differences))]
    arm = [loss + difference for loss, difference in zip(base, differences, strict=True)]
    assert paired_p(differences) == pytest.approx(stats.ttest_rel(arm, base).pvalue, rel=1e-6)


@pytest.mark.parametrize(("differences", "p"), [([0.0, 0.0, 0.0], 1.0), ([-0.5, -0.5], 0.0)])
def test_p_of_differences_without_spread(differences, p):
    assert paired_p(differences) == p


@given(values)
def test_p_is_at_most_a_twentieth_just_where_the_interval_leaves_out_zero(differences):
    _, low, high = paired_interval(differences)
    p = paired_p(differences)
    if abs(p - 0.05) > 1e-9:
        assert (p < 0.05) == (low > 0 or high < 0)


def test_p_needs_two():
    with pytest.raises(ValueError, match="at least two"):
        paired_p([0.1])


@pytest.mark.parametrize("n", [3, 5, 7])
def test_without_an_effect_one_in_twenty_is_a_false_alarm(n):
    draw = random.Random(n)
    alarms = sum(paired_p([draw.gauss(0, 0.02) for _ in range(n)]) <= 0.05 for _ in range(2000))
    assert 0.035 <= alarms / 2000 <= 0.065  # three standard errors


# ----------------------------------------------------------------------------------------------------------------- Holm


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # 3 * 0.01, 2 * 0.03, then never less
    assert holm([0.01, None, 0.03]) == [pytest.approx(0.03), None, pytest.approx(0.06)]
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.04]) == [0.04]
    assert holm([]) == []


@given(chances)
def test_holm_is_never_below_p_keeps_the_order_and_stays_within_bonferroni(p_values):
    adjusted = holm(p_values)
    assert [p is None for p in p_values] == [p is None for p in adjusted]
    pairs = sorted((p, q) for p, q in zip(p_values, adjusted, strict=True) if p is not None and q is not None)
    assert [q for _, q in pairs] == sorted(q for _, q in pairs)
    assert all(p <= q <= min(1, len(p_values) * p) for p, q in pairs)


@given(chances, st.randoms())
def test_holm_does_not_hang_on_the_order_of_the_arms(p_values, chance):
    places = list(range(len(p_values)))
    chance.shuffle(places)
    adjusted = holm(p_values)
    assert holm([p_values[place] for place in places]) == [adjusted[place] for place in places]


def test_three_arms_without_an_effect_make_one_false_claim_in_twenty_studies_at_most():
    """The baseline's noise is in every arm's difference, so that the tests are not independent of each other."""
    draw = random.Random(5)
    alone = together = 0
    for _ in range(2000):
        base = [draw.gauss(0, 0.02) for _ in range(5)]
        found = [paired_p([draw.gauss(0, 0.02) - b for b in base]) for _ in range(3)]
        alone += min(found) <= 0.05
        together += min(p for p in holm(found) if p is not None) <= 0.05
    assert together / 2000 <= 0.06
    assert alone / 2000 > 0.08  # which is what the correction is for


# ------------------------------------------------------------------------------------------------------------ sign flip


@pytest.mark.parametrize("differences", DRAWN, ids=len)
def test_sign_flip_p_is_scipys(differences):
    expected = stats.permutation_test(
        (np.array(differences), np.zeros(len(differences))),
        lambda a, b, axis: np.mean(a - b, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
    )
    assert sign_flip_p(differences) == pytest.approx(expected.pvalue)


def test_sign_flip_known_by_hand():
    assert sign_flip_p([1.0, 2.0, 3.0]) == 0.25  # +6 and -6 of eight sums
    assert sign_flip_p([-1.0, 2.0, 3.0]) == 0.5  # 4, 6 and their mirrors
    assert sign_flip_p([0.0, 0.0]) == 1.0
    assert smallest_sign_flip_p(5) == 0.0625


@given(values)
def test_sign_flip_is_blind_to_the_sign_and_no_less_than_its_smallest(differences):
    p = sign_flip_p(differences)
    assert smallest_sign_flip_p(len(differences)) <= p <= 1
    assert sign_flip_p([-d for d in differences]) == p


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=9))
def test_differences_of_one_sign_reach_the_smallest(differences):
    assert sign_flip_p(differences) == smallest_sign_flip_p(len(differences))


@pytest.mark.parametrize("n", [0, 21])
def test_sign_flip_takes_what_can_be_tried_wholly(n):
    with pytest.raises(ValueError, match=f"takes 1 to 20 differences, not {n}"):
        sign_flip_p([0.1] * n)


def test_sign_flip_of_twenty_is_exact():
    assert sign_flip_p([0.1] * 20) == smallest_sign_flip_p(20) == 2**-19


# ------------------------------------------------------------------------------------------------------------ deviation


def test_deviation_interval_known_by_hand():
    # chi-square of four degrees of freedom: 0.484419 and 11.143287
    low, high = deviation_interval(0.01, 5)
    assert low == pytest.approx(0.01 * math.sqrt(4 / 11.143287), rel=1e-6)
    assert high == pytest.approx(0.01 * math.sqrt(4 / 0.484419), rel=1e-5)
    with pytest.raises(ValueError, match="at least two values"):
        deviation_interval(0.01, 1)
