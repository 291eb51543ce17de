"""Where points lie, of however many: the spectrum of their covariance, in one pass and in bounded memory.

The points' deviations along their principal axes tell the dimension of the smallest flat that holds them (the numerical
rank, at a stated tolerance), and how evenly they fill it (participation ratio, stable rank).

Legend: M points, N coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = 1e-6
"""A direction counts where the points deviate along it by more than this share of their largest deviation. Activations
that were computed in float32 leave 1e-8 to 2e-7 where they should leave nothing (seen at widths up to 768)."""
FLOOR = 1e-7
"""Below it, deviations are rounding: a float64 covariance knows its eigenvalues to about 1e-16 of the largest, and
deviations are their roots."""
ROUNDING = 1e-14
"""Of float64, with a little to spare."""
MOST_NUMBERS = 2**22
"""Numbers of one part of the points, 32 MiB: however many come at once, they are taken in parts."""
COLUMNS = 256
"""Of a covariance that are added to at a time, from the diagonal down: of many columns, half of the work."""


@dataclass(frozen=True)
class Spectrum:
    """Standard deviations of M points along their principal axes, descending. Raises `ValueError` without one."""

    deviations: tuple[float, ...]
    points: int

    def __post_init__(self) -> None:
        if not self.deviations:
            raise ValueError("a spectrum needs at least one coordinate")

    def rank(self, tolerance: float = TOLERANCE) -> int:
        """Dimension of the points' affine hull: deviations above `tolerance` times the largest. M points have no more
        than M - 1.

        Raises `ValueError` for a tolerance that rounding alone would pass.
        """
        if not FLOOR <= tolerance < 1:
            raise ValueError(f"tolerance = {tolerance:g}: it must be at least {FLOOR:g} (rounding) and below 1")
        return sum(deviation > tolerance * self.deviations[0] for deviation in self.deviations)

    @property
    def variance(self) -> float:
        """Sum over all directions."""
        return math.fsum(deviation**2 for deviation in self.deviations)

    @property
    def participation_ratio(self) -> float:
        """`(sum l)^2 / sum l^2` over the variances l: N where all are alike, 1 where one is all; 0 for one point."""
        squares = math.fsum(deviation**4 for deviation in self.deviations)
        return self.variance**2 / squares if squares else 0.0

    @property
    def stable_rank(self) -> float:
        """`sum l / max l`: at most the rank, and little moved by small directions; 0 for one point."""
        return self.variance / self.deviations[0] ** 2 if self.deviations[0] else 0.0

    def outside(self, dimensions: int) -> float:
        """Share of the variance that no flat of so many dimensions holds (Eckart and Young): 0 to 1."""
        return math.fsum(deviation**2 for deviation in self.deviations[dimensions:]) / (self.variance or 1.0)


class StreamingCovariance:
    """Mean and covariance of points that come in parts: `N^2 + N` numbers in float64, whatever M is.

        covariance = StreamingCovariance(768)
        for x_BTD in activations:
            covariance.add(x_BTD)
        covariance.spectrum().rank()

    Each part is centred on its own mean, and the parts' means are joined afterwards (Chan, Golub and LeVeque 1983), so
    that a mean far from zero costs no digits.
    """

    def __init__(self, width: int, device: torch.device | str | None = None) -> None:
        self.points = 0
        self.mean_N = torch.zeros(width, dtype=torch.float64, device=device)
        self.scatter_NN = torch.zeros(width, width, dtype=torch.float64, device=device)
        """`sum (x - mean)(x - mean)^T`. What lies well above the diagonal is left out: it mirrors what lies below."""

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Take in the points `[…, N]`. Raises `ValueError` for another width, and for what is not finite."""
        width = len(self.mean_N)
        if x.shape[-1] != width:
            raise ValueError(f"points of {x.shape[-1]} coordinates, where there were {width}")
        for part_MN in torch.split(x.reshape(-1, width), max(1, MOST_NUMBERS // width)):
            self._add(part_MN.to(self.mean_N))

    def _add(self, x_MN: Tensor) -> None:
        m, mean_N = len(x_MN), x_MN.mean(0)
        if not mean_N.isfinite().all():
            raise ValueError("a point is not finite: it lies nowhere")
        centred_MN, apart_N = x_MN - mean_N, mean_N - self.mean_N
        both = self.points + m
        for begin in range(0, x_MN.shape[1], COLUMNS):
            columns = slice(begin, begin + COLUMNS)
            self.scatter_NN[begin:, columns].addmm_(centred_MN[:, begin:].T, centred_MN[:, columns])
        self.scatter_NN.addr_(apart_N, apart_N, alpha=self.points * m / both)
        self.mean_N += m / both * apart_N
        self.points = both

    def spectrum(self, coordinates: slice = slice(None)) -> Spectrum:
        """Of all coordinates, or of some. Raises `ValueError` before the first point."""
        if not self.points:
            raise ValueError("no points were added, so there is no spectrum")
        covariance_NN = self.scatter_NN[coordinates, coordinates] / self.points
        deviations = torch.linalg.eigvalsh(covariance_NN, UPLO="L").clamp(min=0).flip(0).sqrt()
        coarse = ROUNDING * self.mean_N[coordinates].norm()  # points so far away are known no better
        return Spectrum(tuple(deviations.where(deviations > coarse, 0.0).tolist()), self.points)


def affine_hull_dimension(points: Tensor | Sequence[Sequence[float]], tolerance: float = TOLERANCE) -> int:
    """`dim aff(S)`, the dimension of the smallest flat that holds the points `[…, N]`, numerically.

    Source: arXiv 2603.13381, appendix B.2.
    """
    points = torch.as_tensor(points, dtype=torch.float64)
    covariance = StreamingCovariance(points.shape[-1], points.device)
    covariance.add(points)
    return covariance.spectrum().rank(tolerance)
