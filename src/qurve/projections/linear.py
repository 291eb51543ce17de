"""The linear projection of every transformer: `x W`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qurve.projections import functional as F
from qurve.projections.base import Dims, ParameterSpec, ProjectionConfig, Reach

if TYPE_CHECKING:
    from torch import Tensor

    from qurve.projections.module import Projection


@ProjectionConfig.register("linear")
@dataclass(frozen=True)
class Linear(ProjectionConfig):
    """`x W (+ b)`, `[B, T, D]` to `[B, T, O]`, with `weight [O, D]` and, where the model carries biases, `bias [O]`."""

    def parameters(self, dims: Dims) -> Mapping[str, ParameterSpec]:
        specs = {"weight": ParameterSpec((dims.d_out, dims.d_in))}
        return specs | {"bias": ParameterSpec((dims.d_out,), "zeros")} if dims.bias else specs

    def reach(self, dims: Dims) -> Reach:
        return Reach(True, 0)

    def forward(self, p: Projection, x_BTD: Tensor, *other: Tensor) -> Tensor:
        return F.linear(x_BTD, p.weight, p.bias if p.dims.bias else None)

    def stem_rows(self, dims: Dims) -> int:
        return dims.d_out

    def stem(self, p: Projection) -> Tensor:
        return p.weight

    def head(self, p: Projection, stem_BTS: Tensor, x_BTD: Tensor, *other: Tensor) -> Tensor:
        return stem_BTS + p.bias.to(stem_BTS.dtype) if p.dims.bias else stem_BTS
