"""The paper's projection and its open choices: an anchor plus a bottleneck MLP.

    Q(x) = (x + f(x)) / 2          f(x) = LN(GELU(RMSNorm(x) W1) W2)          W1: D -> R,  W2: R -> D,  R = D / 2

Source: "Beyond Linearity in Attention Projections" (arXiv 2603.13381), equations 2 and 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from qurve.projections import functional as F
from qurve.projections.base import Dims, ParameterSpec, ProjectionConfig
from qurve.projections.functional import Activation, Norm
from qurve.projections.identity import require_square

if TYPE_CHECKING:
    from torch import Tensor

    from qurve.projections.module import Projection

Anchor = Literal["identity", "linear", "none"]


@ProjectionConfig.register("bottleneck")
@dataclass(frozen=True)
class Bottleneck(ProjectionConfig):
    """`scale * (anchor(x) + f(x))`; the defaults are the paper's layer.

    Parameters: `w1 [R, D]`, `w2 [O, R]`, `pre_gain [D]`, `post_gain [O]` (a norm that is off has none), with the linear
    anchor `weight [O, D]`; where the model carries biases also `b1 [R]`, `b2 [O]`, `pre_bias`, `post_bias` (layer norms
    alone) and the anchor's `bias [O]`.
    """

    anchor: Anchor = "identity"
    """What `f` is added to: the input, a linear projection of it (for pretrained weights), or nothing."""
    width: int | None = None
    """R, the bottleneck's width; None means D / 2, which makes `W1` and `W2` as large as the weight they replace."""
    activation: Activation = "gelu"
    pre_norm: Norm = "rmsnorm"
    post_norm: Norm = "layernorm"
    eps: float = 1e-5
    scale: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width is not None and self.width < 1:
            raise ValueError(f"width = {self.width}: the bottleneck needs at least one unit")
        if self.eps <= 0:
            raise ValueError(f"eps = {self.eps}: it must be above zero")

    def check(self, dims: Dims) -> None:
        if self.anchor == "identity":
            require_square("the identity anchor", dims, "use anchor 'linear' or 'none'")
        if self.rank(dims) < 1:
            raise ValueError(f"a bottleneck of half of {dims.d_in} has no unit; give its width")

    def rank(self, dims: Dims) -> int:
        """R, resolved."""
        return dims.d_in // 2 if self.width is None else self.width

    def writers(self) -> tuple[str, ...]:
        return ("w2" if self.post_norm == "none" else "post_gain", "weight")

    def parameters(self, dims: Dims) -> Mapping[str, ParameterSpec]:
        d_in, d_out, bias, _ = dims
        rank = self.rank(dims)
        specs = {"w1": ParameterSpec((rank, d_in)), "w2": ParameterSpec((d_out, rank))}
        if self.pre_norm != "none":
            specs["pre_gain"] = ParameterSpec((d_in,), "ones")
        if self.post_norm != "none":
            specs["post_gain"] = ParameterSpec((d_out,), "ones")
        if self.anchor == "linear":
            specs["weight"] = ParameterSpec((d_out, d_in))
        if bias:
            specs |= {"b1": ParameterSpec((rank,), "zeros"), "b2": ParameterSpec((d_out,), "zeros")}
            if self.pre_norm == "layernorm":
                specs["pre_bias"] = ParameterSpec((d_in,), "zeros")
            if self.post_norm == "layernorm":
                specs["post_bias"] = ParameterSpec((d_out,), "zeros")
            if self.anchor == "linear":
                specs["bias"] = ParameterSpec((d_out,), "zeros")
        return specs

    def forward(self, p: Projection, x_BTD: Tensor, *other: Tensor) -> Tensor:
        n_BTD = F.normalize(self.pre_norm, x_BTD, p.get("pre_gain"), p.get("pre_bias"), self.eps)
        h_BTR = F.activate(self.activation, F.wide(F.linear(n_BTD, p.w1, p.get("b1"))))
        y_BTO = F.linear(h_BTR, p.w2, p.get("b2"))
        f_BTO = F.normalize(self.post_norm, y_BTO, p.get("post_gain"), p.get("post_bias"), self.eps)
        return self._anchored(p, F.linear(x_BTD, p.weight) if self.anchor == "linear" else x_BTD, f_BTO, y_BTO)

    def stem_rows(self, dims: Dims) -> int:
        return self.rank(dims) + (dims.d_out if self.anchor == "linear" else 0)

    def stem(self, p: Projection) -> Tensor:
        import torch

        w1 = p.w1 if self.pre_norm == "none" else F.fold(self.pre_norm, p.w1, p.pre_gain)
        return torch.cat([w1, p.weight]) if self.anchor == "linear" else w1

    def head(self, p: Projection, stem_BTS: Tensor, x_BTD: Tensor, *other: Tensor) -> Tensor:
        rank = self.rank(p.dims)
        s_BTR = F.wide(stem_BTS[..., :rank])
        if self.pre_norm != "none":
            s_BTR = s_BTR * F.inverse_deviation(self.pre_norm, x_BTD, self.eps)
        if p.dims.bias:
            s_BTR = s_BTR + p.b1
            if self.pre_norm == "layernorm":
                s_BTR = s_BTR + F.wide(p.w1) @ F.wide(p.pre_bias)
        y_BTO = F.linear(F.activate(self.activation, s_BTR), p.w2, p.get("b2"))
        f_BTO = F.normalize(self.post_norm, y_BTO, p.get("post_gain"), p.get("post_bias"), self.eps)
        return self._anchored(p, stem_BTS[..., rank:] if self.anchor == "linear" else x_BTD, f_BTO, y_BTO)

    def _anchored(self, p: Projection, anchor_BTO: Tensor, f_BTO: Tensor, y_BTO: Tensor) -> Tensor:
        """`scale * (anchor + f)`, in the dtype that the matrix products ran in."""
        out_BTO = f_BTO if self.anchor == "none" else anchor_BTO + f_BTO
        if self.anchor == "linear" and p.dims.bias:
            out_BTO = out_BTO + p.bias
        return (self.scale * out_BTO).to(y_BTO.dtype)
