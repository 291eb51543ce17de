"""Power laws, equivalent gains and slopes: planted ones are found, known answers met, and what is not known refused."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurve.errors import BadInput
from qurve.study.scaling import (
    PUBLISHED,
    equivalent,
    fit_power_law,
    hoffmann_exponents,
    hoffmann_loss,
    ratio_interval,
    trend,
)

SIZES = (1e5, 3e5, 1e6, 3e6, 1e7)
exponents = st.floats(0.03, 0.6)


def planted(alpha: float, E: float = 0.0, A: float = 10.0, sizes=SIZES, noise: float = 0.0, seeds: int = 3, seed=0):
    draw = random.Random(seed)
    return {
        size: [(E + A * size**-alpha) * math.exp(draw.gauss(0, noise)) for _ in range(seeds if noise else 1)]
        for size in sizes
    }


# ---------------------------------------------------------------------------------------------------------- power laws


@given(alpha=exponents, A=st.floats(1, 500))
def test_a_planted_power_law_is_found(alpha: float, A: float) -> None:
    fit = fit_power_law(planted(alpha, A=A, sizes=SIZES[:3]))
    assert not fit.floor_is_fitted
    assert fit.alpha.value == pytest.approx(alpha, rel=1e-4)
    assert pytest.approx(A, rel=1e-2) == fit.A
    assert fit.predict(2e6).value == pytest.approx(A * 2e6**-alpha, rel=1e-5)


@given(alpha=st.floats(0.15, 0.6), E=st.floats(0.5, 3), fall=st.floats(0.5, 3))
def test_a_planted_floor_is_found(alpha: float, E: float, fall: float) -> None:
    fit = fit_power_law(planted(alpha, E, fall * 1e5**alpha))
    assert fit.floor_is_fitted
    assert (fit.E, fit.alpha.value) == (pytest.approx(E, rel=1e-2), pytest.approx(alpha, rel=2e-2))
    assert fit.floor.value == fit.E


def test_the_published_law_is_found_in_its_own_losses() -> None:
    fit = fit_power_law({N: [hoffmann_loss(N, 1e30)] for N in (1e8, 1e9, 1e10, 1e11)})
    assert (fit.E, fit.A, fit.alpha.value) == pytest.approx((1.69, 406.4, 0.34), rel=2e-3)


@given(alpha=exponents, factor=st.floats(0.01, 100))
def test_units_of_size_change_no_exponent(alpha: float, factor: float) -> None:
    losses = planted(alpha, noise=0.01)
    fit, scaled = fit_power_law(losses), fit_power_law({factor * size: of_size for size, of_size in losses.items()})
    assert scaled.alpha.value == pytest.approx(fit.alpha.value, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(("E", "sizes"), [(0.0, SIZES[:3]), (2.0, SIZES)], ids=["without a floor", "with a floor"])
def test_intervals_cover_as_often_as_they_say(E: float, sizes: tuple[float, ...]) -> None:
    covered = predicted = 0
    for seed in range(400):
        losses = planted(0.3, E, 60.0, sizes, noise=0.003, seed=seed)
        fit = fit_power_law(losses, floor=E)
        assert fit.alpha.low is not None
        assert fit.alpha.high is not None
        covered += fit.alpha.low <= 0.3 <= fit.alpha.high
        at = fit.predict(2e6)
        assert at.low is not None
        assert at.high is not None
        predicted += at.low <= E + 60.0 * 2e6**-0.3 <= at.high
    assert 0.92 <= covered / 400 <= 0.98
    assert 0.92 <= predicted / 400 <= 0.98


def test_few_sizes_or_no_floor_leave_it_fixed_and_say_so() -> None:
    assert fit_power_law(planted(0.1, sizes=SIZES[:3])).in_words() == (
        "L = A / N^alpha over 3 sizes (a floor E is fitted from 4 on)"
    )
    assert fit_power_law(planted(0.1, 2.0), floor=2.0).in_words().startswith("L = 2 + A / N^alpha, that floor given")
    bent = {size: [5 - 0.3 * math.log10(size) ** 1.2] for size in SIZES}  # falls ever faster: no floor above zero
    fit = fit_power_law(bent)
    assert (fit.E, fit.floor_is_fitted, fit.in_words()) == (
        0,
        False,
        "L = A / N^alpha over 5 sizes, which show no floor",
    )


def test_two_points_give_a_curve_and_no_interval() -> None:
    fit = fit_power_law({1e6: [4.0], 2e6: [3.8]})
    assert fit.alpha.value == pytest.approx(math.log(4 / 3.8) / math.log(2), rel=1e-6)
    assert (fit.alpha.low, fit.residual, fit.predict(1.5e6).low) == (None, None, None)


@pytest.mark.parametrize(
    ("losses", "floor", "message"),
    [
        ({1e6: [3.0, 3.1]}, None, "two sizes at least, not 1"),
        ({1e6: [3.0], 1.1e6: [2.0]}, None, "more steeply than with an exponent of 3"),
        ({1e6: [3.0], 2e6: [3.1]}, None, "does not fall with size"),
        ({1e6: [3.0], 2e6: [2.9]}, 2.95, "a floor of 2.95 is not between zero and the lowest loss"),
        ({1e6: [3.0], 2e6: [math.nan]}, None, "sizes and losses above zero"),
        ({0.0: [3.0], 2e6: [2.0]}, None, "sizes and losses above zero"),
    ],
)
def test_what_is_no_power_law_is_refused(losses, floor: float | None, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        fit_power_law(losses, floor=floor)


@pytest.mark.parametrize("size", [2.01e7, 0.49e5])
def test_nothing_is_extrapolated_beyond_twice_what_was_measured(size: float) -> None:
    fit = fit_power_law(planted(0.1))
    assert fit.predict(2e7).value < fit.predict(0.5e5).value
    with pytest.raises(BadInput, match=r"would be extrapolated: measured were 1e\+05 to 1e\+07, and 2 times beyond"):
        fit.predict(size)


# ------------------------------------------------------------------------------------------------------ equivalent gain

PAPER = {"base": [1.0], "sized": {1.125: [1 - 0.0094]}}


def test_the_papers_own_numbers_are_worth_35_per_cent() -> None:
    found = equivalent(PAPER["base"], [1 - 0.0240], PAPER["sized"])
    assert found.percent.value == pytest.approx(35.4, abs=0.05)
    assert (found.percent.low, found.percent.n) == (None, 1)
    assert found.exponent == pytest.approx(0.0802, abs=1e-4)
    assert found.measured_to == 1.125


def test_the_wider_arm_is_worth_its_own_size_and_the_baseline_nothing() -> None:
    assert equivalent(PAPER["base"], [1 - 0.0094], PAPER["sized"]).percent.value == pytest.approx(12.5)
    assert equivalent(PAPER["base"], [1.0], PAPER["sized"]).percent.value == pytest.approx(0, abs=1e-9)
    assert equivalent(PAPER["base"], [1 - 0.0094], PAPER["sized"], own=1.125).net_percent.value == pytest.approx(
        0, abs=1e-9
    )


@given(alpha=exponents, ratio=st.floats(1.05, 3), worth=st.floats(0.7, 1.9))
def test_along_a_power_law_it_is_exact(alpha: float, ratio: float, worth: float) -> None:
    found = equivalent([3.0], [3.0 * worth**-alpha], {ratio: [3.0 * ratio**-alpha], 0.8: [3.0 * 0.8**-alpha]})
    assert found.percent.value == pytest.approx(100 * (worth - 1), abs=1e-6)
    assert found.exponent == pytest.approx(alpha)


def test_its_interval_covers_as_often_as_it_says() -> None:
    """Noise that the three arms share, and noise of their own; the truth is +35 %."""
    draw = np.random.default_rng(5)
    truth, alpha, covered = 1.35, 0.08, 0
    for _ in range(1000):
        shared, own = draw.normal(0, 0.01, 5), draw.normal(0, 0.0008, (3, 5))
        base, arm, wide = (
            np.exp(shared + noise) * size**-alpha for size, noise in zip((1.0, truth, 1.125), own, strict=True)
        )
        found = equivalent(base, arm, {1.125: wide}).percent
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 100 * (truth - 1) <= found.high
    assert 0.93 <= covered / 1000 <= 0.97


@pytest.mark.parametrize(
    ("base", "arm", "sized", "message"),
    [
        ([3.0], [2.9], {}, "no baseline of another size was measured"),
        ([3.0], [2.9], {1.125: [3.01]}, "the larger baseline is not better than the baseline"),
        ([3.0, 3.1, 2.9], [2.9, 3.0, 2.8], {1.125: [2.9, 3.2, 2.79]}, "cannot be told from the baseline in 3 seeds"),
        ([3.0], [2.0], {1.125: [2.97]}, "a size relative to the baseline's at .* would be extrapolated"),
        ([3.0], [1.0], {1.125: [3.0 - 1e-9]}, "a size relative to the baseline's at .* would be extrapolated"),
        ([3.0, 3.0], [2.9, 2.9], {1.125: [2.97]}, "the loss of the same seeds"),
        ([], [], {1.125: []}, "one at least"),
        ([3.0], [2.9], {1.0: [2.97]}, "ratios above zero and not one, not 1"),
    ],
)
def test_what_cannot_be_converted_is_refused(base, arm, sized, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        equivalent(base, arm, sized)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_what_a_gain_is_worth_has_an_interval_from_three_seeds_on(n: int) -> None:
    base, wide, arm = [3.0, 3.1, 2.9], [2.97, 3.07, 2.869], [2.95, 3.05, 2.852]
    found = equivalent(base[:n], arm[:n], {1.125: wide[:n]}).percent
    assert (found.n, found.low is None, found.high is None) == (n, n < 3, n < 3)


def test_a_ratio_of_means_known_by_hand() -> None:
    """Nothing varies above, so that the interval's ends are the mean over the ends of the mean below."""
    over, under = np.array([2.0, 2.0, 2.0]), np.array([0.9, 1.0, 1.1])
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert ratio_interval(over, under) == pytest.approx((2 / (1 + half), 2 / (1 - half)), rel=1e-6)
    assert ratio_interval(over, under - 0.9) is None


# ------------------------------------------------------------------------------------------------------ gain with scale


@given(at_one=st.floats(-3, 3), slope=st.floats(-1, 1))
def test_a_planted_slope_is_found(at_one: float, slope: float) -> None:
    found = trend({2.0**k: [at_one + slope * k + wobble for wobble in (-0.1, 0, 0.1)] for k in (20, 22, 25)})
    assert found.per_doubling.value == pytest.approx(slope, abs=1e-9)
    assert found.predict(2.0**23) == pytest.approx(at_one + 23 * slope, abs=1e-6)


@pytest.mark.parametrize(("slope", "outcome"), [(0.5, "grows"), (-0.5, "shrinks"), (0.0, "no change told")])
def test_a_slope_says_whether_the_gain_grows(slope: float, outcome: str) -> None:
    found = trend({2.0**k: [2 + slope * k - 0.1, 2 + slope * k + 0.1] for k in (20, 22, 24)})
    assert found.outcome == outcome


def test_a_bend_that_all_seeds_share_is_no_slope() -> None:
    """Scales that lie off any line by more than their seeds scatter: a claim in 5 of 100 ladders, not in half."""
    random = np.random.default_rng(7)
    claims = 0
    for _ in range(2_000):
        ladder = {2.0**k: list(random.normal(random.normal(0, 1.0), 0.2, 3)) for k in (15, 17, 18)}
        claims += trend(ladder).outcome != "no change told"
    assert 70 <= claims <= 130


def test_more_seeds_of_the_same_sizes_make_no_more_points() -> None:
    once = fit_power_law({1e5: [4.0], 2e5: [3.7], 4e5: [3.6]})
    often = fit_power_law({1e5: [4.0] * 5, 2e5: [3.7] * 5, 4e5: [3.6] * 5})
    assert (often.alpha.low, often.alpha.high) == pytest.approx((once.alpha.low, once.alpha.high))
    assert (once.n, often.n, often.degrees_of_freedom) == (3, 15, 1)


def test_a_slope_of_two_points_has_no_interval_and_claims_nothing() -> None:
    found = trend({1e6: [1.0], 2e6: [3.0]})
    assert (found.per_doubling.value, found.per_doubling.low, found.outcome) == (pytest.approx(2), None, "not known")
    with pytest.raises(BadInput, match="a gain at 8e"):
        found.predict(8e6)
    with pytest.raises(BadInput, match="two scales"):
        trend({1e6: [1.0, 2.0]})


# ----------------------------------------------------------------------------------------------------------- published


def test_published_numbers_are_those_of_their_papers() -> None:
    kaplan, hoffmann = PUBLISHED
    assert kaplan.numbers == {"alpha_N": 0.076, "alpha_D": 0.095, "alpha_C": 0.050}
    assert hoffmann.numbers == {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
    assert hoffmann_loss(70e9, 1.4e12) == pytest.approx(1.937, abs=0.001)  # Chinchilla itself, by their fit


@given(N=st.floats(1e7, 1e11), D=st.floats(1e9, 1e13))
def test_local_exponents_are_the_derivatives_of_the_published_law(N: float, D: float) -> None:
    h, found, here = 1e-5, hoffmann_exponents(N, D), math.log(hoffmann_loss(N, D))
    assert found["N"] == pytest.approx((here - math.log(hoffmann_loss(N * math.exp(h), D))) / h, rel=1e-3, abs=1e-8)
    assert found["D"] == pytest.approx((here - math.log(hoffmann_loss(N, D * math.exp(h)))) / h, rel=1e-3, abs=1e-8)
    assert found["N with D"] == found["N"] + found["D"]
