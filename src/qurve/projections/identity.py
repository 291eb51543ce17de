"""Queries without a weight, and the linear residual: the priors that the paper's layer is anchored to.

Source: Karbevski and Mijoski (arXiv 2510.23912), who train with `W_Q = I`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qurve.projections import functional as F
from qurve.projections.base import Dims, Moments, ParameterSpec, ProjectionConfig, Reach

if TYPE_CHECKING:
    from torch import Tensor

    from qurve.projections.module import Projection


def require_square(kind: str, dims: Dims, way_out: str) -> None:
    """Raise `ValueError`, with the way out, for another output width: the identity maps a space to itself."""
    if dims.d_in != dims.d_out:
        raise ValueError(
            f"{kind} adds the input to the output, so both need one width, not {dims.d_in} -> {dims.d_out}; {way_out}"
        )


def beside_identity(scale: float, moment: float) -> float:
    """Root mean square of `f` with which `scale * (x + f)` has mean square 1, if `x` has `moment` and both are
    uncorrelated; 1 where `x` alone is too large for that."""
    missing = 1 / scale**2 - moment if abs(scale) > 1e-6 else 0.0  # a smaller one leaves nothing to make up for
    return math.sqrt(missing) if missing > 0 else 1.0


@ProjectionConfig.register("identity")
@dataclass(frozen=True)
class Identity(ProjectionConfig):
    """`x` itself, `[B, T, D]`, without a parameter: `W_Q = I`. Source: Karbevski and Mijoski, arXiv 2510.23912."""

    def check(self, dims: Dims) -> None:
        require_square("the identity projection", dims, "use 'linear'")

    @property
    def identity_term(self) -> float:
        return 1.0

    def parameters(self, dims: Dims) -> Mapping[str, ParameterSpec]:
        return {}

    def preserving(self, dims: Dims, moments: Moments) -> Mapping[str, float]:
        return {}

    def reach(self, dims: Dims) -> Reach:
        return Reach(True, 0)

    def forward(self, p: Projection, x_BTD: Tensor, *other: Tensor) -> Tensor:
        return x_BTD

    def stem_rows(self, dims: Dims) -> int:
        return 0

    def head(self, p: Projection, stem_BTS: Tensor, x_BTD: Tensor, *other: Tensor) -> Tensor:
        return x_BTD


@ProjectionConfig.register("residual")
@dataclass(frozen=True)
class Residual(ProjectionConfig):
    """`(x + x W (+ b)) / 2`, with `weight [D, D]`: D^2 parameters. Source: arXiv 2510.23912."""

    scale: float = 0.5
    """What the sum is multiplied by."""

    def check(self, dims: Dims) -> None:
        require_square("the residual projection", dims, "use 'linear'")

    @property
    def identity_term(self) -> float:
        return self.scale

    def preserving(self, dims: Dims, moments: Moments) -> Mapping[str, float]:
        return {"weight": beside_identity(self.scale, moments.input) / math.sqrt(dims.d_in * moments.input)}

    def parameters(self, dims: Dims) -> Mapping[str, ParameterSpec]:
        specs = {"weight": ParameterSpec((dims.d_out, dims.d_in))}
        return specs | {"bias": ParameterSpec((dims.d_out,), "zeros")} if dims.bias else specs

    def reach(self, dims: Dims) -> Reach:
        return Reach(True, 0)

    def forward(self, p: Projection, x_BTD: Tensor, *other: Tensor) -> Tensor:
        return self.head(p, F.linear(x_BTD, p.weight), x_BTD)

    def stem_rows(self, dims: Dims) -> int:
        return dims.d_out

    def stem(self, p: Projection) -> Tensor:
        return p.weight

    def head(self, p: Projection, stem_BTS: Tensor, x_BTD: Tensor, *other: Tensor) -> Tensor:
        out_BTD = x_BTD + stem_BTS
        if p.dims.bias:
            out_BTD = out_BTD + p.bias
        return (self.scale * out_BTD).to(stem_BTS.dtype)
