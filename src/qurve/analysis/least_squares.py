"""Least squares over more tokens than memory holds: `y ~ x A + b`, from sums that grow with no batch.

Legend: N tokens, D inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SINGULAR = 1e-10
"""Directions of `x` with less than this share of its largest variance are taken for none: there `A` is zero. (What a
layer norm gives lies in a hyperplane, so one direction always is.)"""


@dataclass(frozen=True)
class Affine:
    """`x A + b`, and the mean of `y` in the fit, which is what `A = 0` would give. In float64."""

    weight_DO: Tensor
    bias_O: Tensor
    mean_O: Tensor
    tokens: int
    """How many it was fitted on."""

    def __call__(self, x_ND: Tensor) -> Tensor:
        """`x A + b` in the dtype of `x`, any leading shape."""
        return x_ND @ self.weight_DO.to(x_ND.dtype) + self.bias_O.to(x_ND.dtype)

    def squared_errors(self, x_ND: Tensor, y_NO: Tensor) -> tuple[Tensor, Tensor]:
        """Summed over the tokens, `[O]` each: of `x A + b`, and of the fit's mean.

        `1 - errors / errors of the mean` is R^2: 1 where the map is exact, 0 where it is no better than the mean,
        below on tokens that it was not fitted on and is worse for.
        """
        x_ND, y_NO = _flat(x_ND), _flat(y_NO)
        return (y_NO - self(x_ND)).square().sum(0), (y_NO - self.mean_O).square().sum(0)


class LeastSquares:
    """The sums: `add` tokens as they come, `solve` at the end."""

    def __init__(self) -> None:
        self._tokens = 0
        self._sums: list[Tensor] = []

    def add(self, x_ND: Tensor, y_NO: Tensor) -> None:
        """Count in some tokens, any leading shape; sums are in float64."""
        x_ND, y_NO = _flat(x_ND), _flat(y_NO)
        self._tokens += len(x_ND)
        sums = [x_ND.sum(0), y_NO.sum(0), x_ND.T @ x_ND, x_ND.T @ y_NO]
        self._sums = [a + b for a, b in zip(self._sums, sums, strict=True)] if self._sums else sums

    def solve(self) -> Affine:
        """The map of least squared error, the smallest one where several are. `ValueError` for too few tokens."""
        d_in = len(self._sums[0]) if self._sums else 0
        if self._tokens < d_in + 2:
            raise ValueError(
                f"{self._tokens} tokens fit a linear map of {d_in} channels exactly, whatever they are; give at least "
                f"{d_in + 2}, and better ten times as many"
            )
        x_D, y_O, xx_DD, xy_DO = (total / self._tokens for total in self._sums)
        variance_D, basis_DD = torch.linalg.eigh(xx_DD - torch.outer(x_D, x_D))
        kept = variance_D > SINGULAR * variance_D[-1].clamp(min=torch.finfo(torch.float64).tiny)
        inverse_DD = (basis_DD[:, kept] / variance_D[kept]) @ basis_DD[:, kept].T
        weight_DO = inverse_DD @ (xy_DO - torch.outer(x_D, y_O))
        return Affine(weight_DO, y_O - x_D @ weight_DO, y_O, self._tokens)


def _flat(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1]).double()
