"""How loss falls with size: power laws with intervals, what a gain is worth along them, and how it changes with scale.

Sizes are parameters, FLOPs or tokens; losses are in nats per token. Numbers in, numbers out: nothing here reads a
study. What lies farther than `MOST_BEYOND` times outside of the measured sizes is refused, never extrapolated.

The fits weigh relative errors: a loss's logarithm scatters alike at every size. Their intervals are parametric (the
fit's covariance, t quantiles over the residual degrees of freedom): three to five seeds are too few to bootstrap.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qurve.errors import BadInput

MOST_BEYOND = 2.0
"""Times the largest measured size (or below the smallest) up to which a fit is asked."""
SIZES_FOR_A_FLOOR = 4
"""Fewer different sizes cannot tell a floor `E` from a smaller exponent: then it is fixed, at zero if none is given."""

LEVEL = 0.95
"""Of intervals; a slope is called one when its p leaves less than the rest of it."""

STEEPEST = 3.0
"""Largest exponent that is looked for."""
LARGEST_LOG = 700.0
"""The exponential of more overflows."""

Floats = npt.NDArray[np.float64]
Losses = Mapping[float, Sequence[float]]
"""Size -> the losses of its runs, one a seed."""


@dataclass(frozen=True)
class Estimate:
    """A number with its two-sided interval; `low` and `high` are None where `n` values allow none."""

    value: float
    low: float | None
    high: float | None
    n: int


# ---------------------------------------------------------------------------------------------------------- published


@dataclass(frozen=True)
class Published:
    """A fit that others have published, as they state it."""

    name: str
    form: str
    numbers: dict[str, float]
    source: str
    caveat: str


PUBLISHED = (
    Published(
        "Kaplan et al. 2020",
        "L = (N_c / N)^alpha_N, L = (D_c / D)^alpha_D, L = (C_c / C)^alpha_C",
        {"alpha_N": 0.076, "alpha_D": 0.095, "alpha_C": 0.050},
        "arXiv 2001.08361, equations 1.1 to 1.3",
        "N without embeddings, WebText2, a vocabulary of 50,257; each with the others not limiting, no floor",
    ),
    Published(
        "Hoffmann et al. 2022",
        "L = E + A / N^alpha + B / D^beta",
        {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28},
        "arXiv 2203.15556, section 3.3 and appendix D.3",
        "N with embeddings, MassiveText, a vocabulary of 32,000; a later fit to its data differs (arXiv 2404.10102)",
    ),
)
"""Printed beside a measured exponent, never used in its place: other data and tokens."""


def hoffmann_loss(parameters: float, tokens: float) -> float:
    """The loss that Hoffmann et al. predict, in nats per token of their data."""
    by = PUBLISHED[1].numbers
    return by["E"] + by["A"] * math.pow(parameters, -by["alpha"]) + by["B"] * math.pow(tokens, -by["beta"])


def hoffmann_exponents(parameters: float, tokens: float) -> dict[str, float]:
    """Their local exponents, `-d ln L / d ln x`: what a fit without a floor finds. Over parameters `N` at fixed tokens,
    over tokens `D` at fixed parameters, and over `N` with `D` growing alike."""
    by, loss = PUBLISHED[1].numbers, hoffmann_loss(parameters, tokens)
    over_N = by["alpha"] * by["A"] * math.pow(parameters, -by["alpha"]) / loss
    over_D = by["beta"] * by["B"] * math.pow(tokens, -by["beta"]) / loss
    return {"N": over_N, "D": over_D, "N with D": over_N + over_D}


# ---------------------------------------------------------------------------------------------------------- power laws


@dataclass(frozen=True)
class Fit:
    """`L = E + A / size^alpha`, fitted; `A` is the fall at size one, `floor_is_fitted` says whether E was free."""

    E: float
    A: float
    alpha: Estimate
    floor: Estimate
    floor_is_fitted: bool
    sizes: tuple[float, ...]
    n: int
    """Runs."""
    degrees_of_freedom: int
    residual: float | None
    """Relative standard deviation of the sizes' mean losses about the curve; None without a degree of freedom."""
    covariance: tuple[tuple[float, ...], ...] | None
    """Of the loss's amplitude at the middle size, alpha and, where it is free, E; None without a degree of freedom."""

    def in_words(self, of: str = "N", points: str = "sizes") -> str:
        """The form, and why it is that one; `of` is what the loss falls with, at so many `points`."""
        if self.floor_is_fitted:
            return f"L = E + A / {of}^alpha over {len(self.sizes)} {points}"
        fixed = f"L = A / {of}^alpha" if self.E == 0 else f"L = {self.E:g} + A / {of}^alpha, that floor given"
        few = f"{len(self.sizes)} {points}" + (
            f" (a floor E is fitted from {SIZES_FOR_A_FLOOR} on)"
            if len(self.sizes) < SIZES_FOR_A_FLOOR
            else ", which show no floor"
        )
        return f"{fixed} over {few}"

    def predict(self, size: float, level: float = 0.95) -> Estimate:
        """The curve's loss at `size`, with the interval of the curve itself (a new run scatters about it besides).

        Raises `BadInput` beyond the stated range.
        """
        check_range(size, self.sizes, "a loss")
        value = self.E + self.A * size**-self.alpha.value
        if self.covariance is None:
            return Estimate(value, None, None, self.n)
        middle = _middle(self.sizes)
        fall = (size / middle) ** -self.alpha.value
        amplitude = self.A * middle**-self.alpha.value
        slope = np.array([fall, -amplitude * fall * math.log(size / middle), 1.0])[: 3 if self.floor_is_fitted else 2]
        half = _quantile(self.degrees_of_freedom, level) * math.sqrt(float(slope @ np.array(self.covariance) @ slope))
        return Estimate(value, value - half, value + half, self.n)


def fit_power_law(losses: Losses, *, floor: float | None = None, level: float = 0.95) -> Fit:
    """Fit the loss's fall with size, over the mean at each size, by least squares of relative errors.

    A size counts once, however many runs it has: what lifts it off the curve lifts them all, and more seeds of the same
    sizes make no more points.

    The floor E is free from four different sizes on, unless it is given; with fewer it is fixed at zero, and so it is
    where the free fit finds none above zero. For each exponent the best E and A are a linear problem, so that the
    search is over the exponent alone: no starting values, no local optimum missed.

    Raises `BadInput` with fewer than two sizes, for a loss that is not above the given floor, and where the loss does
    not fall with size.
    """
    size_N, loss_N = _flat(losses)
    sizes = tuple(sorted(set(size_N.tolist())))
    if len(sizes) < 2:
        raise BadInput(f"a power law needs two sizes at least, not {len(sizes)}")
    given = 0.0 if floor is None else floor
    if not 0 <= given < loss_N.min():
        raise BadInput(f"a floor of {given:g} is not between zero and the lowest loss, {loss_N.min():.4f}")
    runs = len(loss_N)
    loss_N = np.array([loss_N[size_N == size].mean() for size in sizes])
    x_N = np.array(sizes) / _middle(sizes)
    is_free = floor is None and len(sizes) >= SIZES_FOR_A_FLOOR
    alpha, E, a = _best_exponent(x_N, loss_N, None if is_free else given)
    if is_free and E <= 0:
        is_free, (alpha, E, a) = False, _best_exponent(x_N, loss_N, 0.0)
    if alpha <= 0 or a <= 0:
        raise BadInput("the loss does not fall with size here: there is no exponent to speak of")
    if alpha > 0.999 * STEEPEST:
        raise BadInput(f"the loss falls more steeply than with an exponent of {STEEPEST:g}: that is no power law")

    fall_N = x_N**-alpha
    columns = [fall_N, -a * fall_N * np.log(x_N), np.ones_like(x_N)][: 3 if is_free else 2]
    jacobian = np.stack(columns, axis=1) / loss_N[:, None]
    dof = len(loss_N) - jacobian.shape[1]
    residual, covariance = None, None
    if dof > 0:
        error_N = (E + a * fall_N - loss_N) / loss_N
        residual = math.sqrt(float(error_N @ error_N) / dof)
        covariance = residual**2 * np.linalg.pinv(jacobian.T @ jacobian)

    def estimate(value: float, place: int) -> Estimate:
        if covariance is None:
            return Estimate(value, None, None, runs)
        half = _quantile(dof, level) * math.sqrt(float(covariance[place, place]))
        return Estimate(value, value - half, value + half, runs)

    return Fit(
        E=E,
        A=a * _middle(sizes) ** alpha,
        alpha=estimate(alpha, 1),
        floor=estimate(E, 2) if is_free else Estimate(E, None, None, runs),
        floor_is_fitted=is_free,
        sizes=sizes,
        n=runs,
        degrees_of_freedom=dof,
        residual=residual,
        covariance=None if covariance is None else tuple(tuple(map(float, row)) for row in covariance),
    )


def _best_exponent(x_N: Floats, loss_N: Floats, floor: float | None) -> tuple[float, float, float]:
    """`(alpha, E, A)` of the least relative squares; `floor` None leaves E free. `alpha` 0: the loss does not fall."""
    from scipy.optimize import minimize_scalar

    grid = np.geomspace(1e-4, STEEPEST, 200)
    costs = [_linear(alpha, x_N, loss_N, floor)[0] for alpha in grid]
    best = int(np.argmin(costs))
    low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    found = minimize_scalar(
        lambda alpha: _linear(alpha, x_N, loss_N, floor)[0],
        bounds=(low, high),
        method="bounded",
        options={"xatol": 1e-9},
    )
    alpha = float(found.x) if found.fun <= costs[best] else float(grid[best])
    _, E, a = _linear(alpha, x_N, loss_N, floor)
    return (0.0, E, a) if best == 0 else (alpha, E, a)


def _linear(alpha: float, x_N: Floats, loss_N: Floats, floor: float | None) -> tuple[float, float, float]:
    """`(cost, E, A)` for this exponent."""
    fall_N = x_N**-alpha / loss_N
    if floor is not None:
        wanted_N = (loss_N - floor) / loss_N
        a = float(fall_N @ wanted_N / (fall_N @ fall_N))
        error_N = a * fall_N - wanted_N
        return float(error_N @ error_N), floor, a
    terms = np.stack([1 / loss_N, fall_N], axis=1)
    (E, a), *_ = np.linalg.lstsq(terms, np.ones_like(loss_N), rcond=None)
    error_N = terms @ np.array([E, a]) - 1
    return float(error_N @ error_N), float(E), float(a)


def _flat(losses: Losses) -> tuple[Floats, Floats]:
    pairs = [(float(size), float(loss)) for size, of_size in losses.items() for loss in of_size]
    for size, loss in pairs:
        if not (size > 0 and loss > 0 and math.isfinite(size) and math.isfinite(loss)):
            raise BadInput(f"a power law needs sizes and losses above zero, not {size:g} and {loss:g}")
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _middle(sizes: Sequence[float]) -> float:
    """Geometric mean: there amplitude and exponent are told apart best."""
    return math.exp(statistics.fmean(map(math.log, sizes)))


def _quantile(degrees_of_freedom: int, level: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, (1 + level) / 2))


def check_range(size: float, sizes: Sequence[float], what: str, most: float = MOST_BEYOND) -> None:
    """Raise `BadInput` for a size more than `most` times beyond what was measured, on either side."""
    low, high = min(sizes) / most, max(sizes) * most
    if not low <= size <= high:
        raise BadInput(
            f"{what} at {size:,.4g} would be extrapolated: measured were {min(sizes):,.4g} to {max(sizes):,.4g}, and "
            f"{most:g} times beyond is the most that is answered; measure a size nearer to it"
        )


# ------------------------------------------------------------------------------------------------------ equivalent gain


@dataclass(frozen=True)
class Equivalent:
    """How much larger the baseline would have to be for the arm's loss, along the baseline's own fall with size."""

    percent: Estimate
    """Size that the baseline would need beyond its own, in per cent: +35 means 1.35 times as large."""
    net_percent: Estimate
    """The same beyond the arm's own size: what an arm that is larger itself has gained besides."""
    exponent: float
    """The baseline's local exponent, `-d ln L / d ln size`, mean over the seeds."""
    measured_to: float
    """The other size farthest from the baseline's that was measured, as a multiple of it."""


def equivalent(
    base: Sequence[float],
    arm: Sequence[float],
    sized: Mapping[float, Sequence[float]],
    *,
    own: float = 1.0,
    most: float = MOST_BEYOND,
    level: float = 0.95,
) -> Equivalent:
    """What the arm's lower loss is worth in baseline size, by the local exponent between the baseline's own sizes.

    `base` and `arm` have a loss for each seed, and so has each of `sized`: baselines of another size, by its ratio to
    the baseline's; `own` is the arm's size likewise. A line through the baseline in `ln L` against `ln size` gives the
    exponent; the answer is `exp(gain / exponent) - 1`, the gain being `ln L_base - ln L_arm`. From 0.94 % at 1.125
    times the parameters, 2.40 % are worth +35.4 % (arXiv 2603.13381, appendix). A loss that flattens with size is
    steeper near the baseline than the line: sizes far from it overstate what a small gain is worth.

    The interval, from three seeds on, is Fieller's for a ratio of two means, paired by seed: gain and exponent share
    the baseline's noise. Raises `BadInput` without another size, where the larger ones are not better (from three
    seeds on: not beyond the noise), and for an answer more than `most` times beyond what was measured.
    """
    n = len(base)
    if not sized:
        raise BadInput("no baseline of another size was measured; add one, such as an MLP widened by an eighth")
    if not n or any(len(losses) != n for losses in (arm, *sized.values())):
        raise BadInput("the baseline, the arm and every other size need the loss of the same seeds, one at least")
    if any(ratio <= 0 or ratio == 1 for ratio in sized):
        raise BadInput(f"other sizes have ratios above zero and not one, not {', '.join(f'{r:g}' for r in sized)}")
    logs = {math.log(ratio): np.log(np.asarray(base) / np.asarray(losses)) for ratio, losses in sized.items()}
    exponent_S = sum(x * gain_S for x, gain_S in logs.items()) / sum(x * x for x in logs)
    gain_S = np.log(np.asarray(base) / np.asarray(arm))
    exponent, gain = float(np.mean(exponent_S)), float(np.mean(gain_S))
    if exponent <= 0:
        raise BadInput("the larger baseline is not better than the baseline: there is no rate to convert the gain with")
    value, low, high = gain / exponent, None, None
    if n >= 3:
        bounds = ratio_interval(gain_S, exponent_S, level)
        if bounds is None:
            raise BadInput(
                f"the larger baseline cannot be told from the baseline in {n} seeds: the rate to convert the gain with "
                "is not known; take more seeds, or a larger one"
            )
        low, high = bounds
    check_range(math.exp(min(value, LARGEST_LOG)), [1.0, *sized], "a size relative to the baseline's", most)
    farthest = max(sized, key=lambda ratio: abs(math.log(ratio)))

    def beyond(size: float) -> Estimate:
        percents = [None if x is None else 100 * math.expm1(min(x - math.log(size), LARGEST_LOG)) for x in (low, high)]
        return Estimate(100 * math.expm1(value - math.log(size)), percents[0], percents[1], n)

    return Equivalent(beyond(1.0), beyond(own), exponent, farthest)


def ratio_interval(over_S: Floats, under_S: Floats, level: float = 0.95) -> tuple[float, float] | None:
    """Fieller's interval for the ratio of two means, paired by seed (two at least).

    It holds every ratio r for which the mean of `over - r * under` is within its noise of zero; None where that set has
    no end, because the mean of `under` cannot be told from zero.
    """
    n = len(over_S)
    (v_oo, v_ou), (_, v_uu) = (np.cov(over_S, under_S) * (_quantile(n - 1, level) ** 2 / n)).tolist()
    over, under = float(np.mean(over_S)), float(np.mean(under_S))
    a, b, c = under**2 - v_uu, over * under - v_ou, over**2 - v_oo
    if a <= 0:
        return None
    root = math.sqrt(max(0.0, b * b - a * c))
    return (b - root) / a, (b + root) / a


# ------------------------------------------------------------------------------------------------------ gain with scale


@dataclass(frozen=True)
class Trend:
    """A straight line of a gain over the logarithm of scale: does it grow or shrink?"""

    per_doubling: Estimate
    """Change of the gain when the scale doubles, in the gain's unit."""
    at_middle: float
    middle: float
    """The line goes through `at_middle` at this scale, the geometric mean of all scales."""
    scales: tuple[float, ...]
    p: float | None
    """Of the t test that the slope is zero; None without a degree of freedom."""
    p_holm: float | None
    """The same, corrected by Holm where several slopes are judged together; of one alone it is p."""

    @property
    def outcome(self) -> str:
        """`grows`, `shrinks` or `no change told` by the corrected p; `not known` where there is none."""
        if self.p_holm is None:
            return "not known"
        if self.p_holm > 1 - LEVEL:
            return "no change told"
        return "grows" if self.per_doubling.value > 0 else "shrinks"

    def predict(self, scale: float) -> float:
        """The line's gain at `scale`. Raises `BadInput` beyond the stated range."""
        check_range(scale, self.scales, "a gain")
        return self.at_middle + self.per_doubling.value * math.log2(scale / self.middle)


def trend(gains: Mapping[float, Sequence[float]], level: float = LEVEL) -> Trend:
    """Fit a line to gains by scale, over the mean at each scale (least squares; t interval and test of its slope).

    A scale counts once, however many seeds it has: its own deviation from the line is common to all of them, and a test
    over the seeds would take a bend for a slope.

    Raises `BadInput` with fewer than two scales.
    """
    runs = sum(map(len, gains.values()))
    scales = tuple(sorted(float(scale) for scale, of_scale in gains.items() if of_scale))
    if len(scales) < 2 or scales[0] <= 0:
        raise BadInput(f"a slope needs two scales above zero at least, not {list(scales)}")
    x_S, gain_S = np.log2(scales), np.array([statistics.fmean(gains[scale]) for scale in scales])
    off_S = x_S - x_S.mean()
    slope = float(off_S @ gain_S / (off_S @ off_S))
    low = high = p = None
    if (dof := len(scales) - 2) > 0:
        from scipy.special import stdtr

        residual_S = gain_S - gain_S.mean() - slope * off_S
        error = math.sqrt(float(residual_S @ residual_S) / dof / float(off_S @ off_S))
        half = _quantile(dof, level) * error
        low, high = slope - half, slope + half
        p = min(1.0, 2 * float(stdtr(dof, -abs(slope) / error))) if error else float(slope == 0)
    at_middle, middle = float(gain_S.mean()), float(2 ** x_S.mean())
    return Trend(Estimate(slope, low, high, runs), at_middle, middle, scales, p, p)
