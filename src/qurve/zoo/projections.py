"""Other papers' projections, one token at a time: a gated output, a nonlinear adapter, a plain MLP.

`W_Q = I` and the linear residual, which our own is anchored to, stand in `qurve.projections.identity`.

Legend: B batch, T tokens, D input width, O output width, R rank, C width of the block's input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qurve.projections import Bottleneck, Dims, ParameterSpec, ProjectionConfig
from qurve.projections import functional as F
from qurve.projections.base import Moments, Reach
from qurve.projections.functional import Activation

if TYPE_CHECKING:
    from torch import Tensor

    from qurve.projections.module import Projection


@ProjectionConfig.register("gated")
@dataclass(frozen=True)
class GatedOutput(ProjectionConfig):
    """An output projection behind a sigmoid gate: `(y * sigmoid(x W_g)) W_O`, `y` the heads' outputs side by side.

    `x` is the block's normalised input: one gate for every channel of every head, as in the best variant of its source.
    Parameters: `weight [O, D]` and `gate [D, C]`, so D C more than a linear output: D^2 where the heads are as wide as
    the model; with biases D more. The gates start around one half. Source: Qiu et al., arXiv 2505.06708.
    """

    also_reads = "block_input"

    def parameters(self, dims: Dims) -> Mapping[str, ParameterSpec]:
        d_in, d_out, bias, d_block = dims
        specs = {"weight": ParameterSpec((d_out, d_in)), "gate": ParameterSpec((d_in, d_block))}
        if bias:
            specs |= {"bias": ParameterSpec((d_out,), "zeros"), "gate_bias": ParameterSpec((d_in,), "zeros")}
        return specs

    def preserving(self, dims: Dims, moments: Moments) -> Mapping[str, float]:
        return {"weight": 2 / math.sqrt(dims.d_in * moments.input)}

    def forward(self, p: Projection, y_BTD: Tensor, *other: Tensor) -> Tensor:
        (x_BTC,) = other
        gate_BTD = F.wide(F.linear(x_BTC, p.gate, p.get("gate_bias"))).sigmoid()
        return F.linear(y_BTD * gate_BTD, p.weight, p.get("bias"))

    def stem_rows(self, dims: Dims) -> int:
        return 0


@ProjectionConfig.register("nonlinear_lora")
@dataclass(frozen=True)
class NonlinearLoRA(ProjectionConfig):
    """A linear projection with a nonlinear low-rank adapter: `x W + (alpha / R) * act(x A) B`.

    `B` starts at zero, so that the start is `x W`. Nothing is frozen here: for adaptation, freeze `weight`. Parameters:
    `weight [O, D]`, `a [R, D]`, `b [O, R]`: R (D + O) more than a linear one; its usual places are queries and values.
    With the activation `identity` it is LoRA itself (Hu et al., arXiv 2106.09685); a nonlinearity between the two
    factors is what breaks the bound on the rank (Dong et al., arXiv 2505.18738, who learn it; here it is fixed).
    """

    rank: int = 8
    alpha: float = 16.0
    activation: Activation = "gelu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise ValueError(f"rank = {self.rank}: the adapter needs at least one unit")

    def parameters(self, dims: Dims) -> Mapping[str, ParameterSpec]:
        d_in, d_out, bias, _ = dims
        specs = {
            "weight": ParameterSpec((d_out, d_in)),
            "a": ParameterSpec((self.rank, d_in)),
            "b": ParameterSpec((d_out, self.rank), "zeros"),
        }
        return specs | {"bias": ParameterSpec((d_out,), "zeros")} if bias else specs

    def reach(self, dims: Dims) -> Reach:
        return Reach(True, 0 if self.activation == "identity" else min(dims.d_out, self.rank))

    def forward(self, p: Projection, x_BTD: Tensor, *other: Tensor) -> Tensor:
        return self._adapted(p, F.linear(x_BTD, p.weight), F.linear(x_BTD, p.a))

    def stem_rows(self, dims: Dims) -> int:
        return dims.d_out + self.rank

    def stem(self, p: Projection) -> Tensor:
        import torch

        return torch.cat([p.weight, p.a])

    def head(self, p: Projection, stem_BTS: Tensor, x_BTD: Tensor, *other: Tensor) -> Tensor:
        return self._adapted(p, stem_BTS[..., : p.dims.d_out], stem_BTS[..., p.dims.d_out :])

    def _adapted(self, p: Projection, y_BTO: Tensor, a_BTR: Tensor) -> Tensor:
        adapter_BTO = F.linear(F.activate(self.activation, F.wide(a_BTR)), p.b)
        out_BTO = y_BTO + self.alpha / self.rank * adapter_BTO
        if p.dims.bias:
            out_BTO = out_BTO + p.bias
        return out_BTO.to(y_BTO.dtype)


def mlp_projection(d_model: int) -> Bottleneck:
    """A plain MLP for queries, keys or values, without anchor and norms: `ReLU(x W1) W2`, `W1: D -> 2D`.

    The form of its source's language-modelling experiment, where it replaces all three (and biases are on:
    `model.bias`). Parameters: `4 D^2` each, `3 D^2` more than a linear one (plus 3 D for biases). Source: Zhang, arXiv
    2310.11398 and its code.
    """
    return Bottleneck("none", 2 * d_model, "relu", pre_norm="none", post_norm="none", scale=1.0)
