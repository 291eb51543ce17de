"""Queries from what the previous block's feed-forward has already computed.

    Q(x) = (x + h W) / 2           h = a(... W_up), the previous block's hidden activations, F wide; W: F -> D

Source: arXiv 2603.13381, appendix B.1 (all of `h`) and section 3 (its first D channels alone).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qurve.projections import functional as F
from qurve.projections.base import Dims, Moments, ParameterSpec, ProjectionConfig, Reach
from qurve.projections.identity import beside_identity, require_square
from qurve.projections.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from qurve.projections.module import Projection


@ProjectionConfig.register("mlp_reuse")
@dataclass(frozen=True)
class MLPReuse(ProjectionConfig):
    """`scale * (x + h W)`, with `weight [D, F]`: not parameter-neutral, F - D columns more than the weight it replaces.

    Sliced, it is `h[0:D] W` with `weight [D, D]`, which is. It reads `[B, T, D]` and `[B, T, F]`, gives `[B, T, D]`,
    and raises `ValueError` where these differ in D, and where the previous block has no hidden activations.
    """

    also_reads = "mlp_hidden"

    sliced: bool = False
    """Whether it reads the first D hidden activations alone."""
    scale: float = 0.5
    """What the sum is multiplied by."""
    first: ProjectionConfig = field(default_factory=Linear)
    """The first block's projection: there is no block before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first.also_reads == self.also_reads:
            raise ValueError(
                f"first = {self.first.kind!r}: the first block has no block before it to read; use 'linear'"
            )

    def at_first(self) -> ProjectionConfig:
        return self.first

    def check(self, dims: Dims) -> None:
        require_square("MLP reuse", dims, "use another projection, or give heads that are d_model wide together")
        if not dims.d_other:
            raise ValueError(
                "MLP reuse reads the hidden activations of the previous block's feed-forward, and there are none: a "
                "mixture of experts has other ones for every token; use a dense or gated model.mlp"
            )
        if self.sliced and dims.d_other < dims.d_out:
            raise ValueError(
                f"sliced MLP reuse takes the first {dims.d_out} hidden activations of the previous block, which has "
                f"{dims.d_other}; use sliced = false"
            )

    @property
    def identity_term(self) -> float:
        return self.scale

    def preserving(self, dims: Dims, moments: Moments) -> Mapping[str, float]:
        read = dims.d_out if self.sliced else dims.d_other
        return {"weight": beside_identity(self.scale, moments.input) / math.sqrt(read * moments.other)}

    def parameters(self, dims: Dims) -> Mapping[str, ParameterSpec]:
        specs = {"weight": ParameterSpec((dims.d_out, dims.d_out if self.sliced else dims.d_other))}
        return specs | {"bias": ParameterSpec((dims.d_out,), "zeros")} if dims.bias else specs

    def reach(self, dims: Dims) -> Reach:
        return Reach(True, min(dims.d_out, dims.d_other))

    def forward(self, p: Projection, x_BTD: Tensor, *other: Tensor) -> Tensor:
        (h_BTF,) = other
        h_BTF = h_BTF[..., : p.weight.shape[1]]
        y_BTD = F.linear(h_BTF, p.weight, p.get("bias"))
        return (self.scale * (x_BTD + y_BTD)).to(y_BTD.dtype)

    def stem_rows(self, dims: Dims) -> int:
        return 0
