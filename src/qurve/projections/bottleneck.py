"""The paper's projection and its open choices: an anchor plus a bottleneck MLP.

    Q(x) = (x + f(x)) / 2          f(x) = LN(GELU(RMSNorm(x) W1) W2)          W1: D -> R,  W2: R -> D,  R = D / 2

Source: "Beyond Linearity in Attention Projections" (arXiv 2603.13381), equations 2 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from qurve.config import or_else
from qurve.ops.heads import WIDEST
from qurve.projections import functional as F
from qurve.projections.base import Dims, Moments, ParameterSpec, ProjectionConfig, Reach
from qurve.projections.functional import Activation, Norm
from qurve.projections.identity import beside_identity, require_square

if TYPE_CHECKING:
    from torch import Tensor

    from qurve.projections.module import Projection

Anchor = Literal["identity", "linear", "none"]


@ProjectionConfig.register("bottleneck")
@dataclass(frozen=True)
class Bottleneck(ProjectionConfig):
    """An anchor plus `f`; the defaults are the paper's layer.

        coupled     Q(x) = scale * (anchor(x) + post(a(pre(x) W1) W2))
        separate    Q(x) = post(scale * (anchor(n) + a(n W1) W2)),   n = pre(x)

    `anchor` is the identity, a matrix `W`, or nothing; `a` the activation; `pre` and `post` the norms, which a separate
    norm stage puts around the whole projection (the paper's section 1 names both).

    Parameters: `w1 [R, D]`, `w2 [O, R]`, `pre_gain [D]`, `post_gain [O]` (a norm that is off has none), with the linear
    anchor `weight [O, D]`; where the model carries biases also `b1 [R]`, `b2 [O]`, `pre_bias`, `post_bias` (layer norms
    alone) and the anchor's `bias [O]`.

    Raises `ValueError` for a width or an eps that is not above zero, and for an exact start that cannot be; an
    identity anchor needs as many outputs as inputs.
    """

    heavy_head: ClassVar[bool] = True

    anchor: Anchor = "identity"
    """What `f` is added to: the input, a linear projection of it (for pretrained weights), or nothing."""
    width: int | None = field(default=None, metadata=or_else("D / 2"))
    """R, the bottleneck's width; None means D / 2, which makes `W1` and `W2` as large as the weight they replace."""
    activation: Activation = "gelu"
    """`a`, entry by entry, in float32. GELU is the exact one, `relu2` the square of ReLU."""
    pre_norm: Norm = "rmsnorm"
    """Before `W1`, over the D channels of each token."""
    post_norm: Norm = "layernorm"
    """Behind `W2`, over the O channels of each token."""
    eps: float = 1e-5
    """Added to the mean square, or the variance, in both norms."""
    scale: float = 0.5
    """What the sum of anchor and `f` is multiplied by."""
    norm_stage: Literal["coupled", "separate"] = "coupled"
    """Whether the norms belong to `f`, as in the paper, or stand around the whole projection."""
    start: Literal["usual", "exact"] = "usual"
    """Exact: the post-norm's gain starts at zero, so that `Q(x) = scale * anchor(x)` to the last bit. `W2` starts as
    usual: at zero it would hold the layer norm where its slope is `1 / sqrt(eps)`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width is not None and self.width < 1:
            raise ValueError(f"width = {self.width}: the bottleneck needs at least one unit")
        if self.eps <= 0:
            raise ValueError(f"eps = {self.eps}: it must be above zero")
        if self.start == "exact":
            self._check_exact()

    def _check_exact(self) -> None:
        if self.anchor == "none":
            raise ValueError("start = 'exact' leaves the anchor alone, and anchor = 'none' has none; use 'linear'")
        if self.post_norm == "none":
            raise ValueError(
                "start = 'exact' puts the post-norm's gain at zero, and post_norm = 'none' has none; use "
                "'layernorm' or 'rmsnorm'"
            )
        if self.norm_stage == "separate":
            raise ValueError(
                "start = 'exact' needs norm_stage = 'coupled': a separate post-norm spans the anchor too, so that its "
                "gain at zero would silence everything"
            )

    def check(self, dims: Dims) -> None:
        if self.anchor == "identity":
            require_square("the identity anchor", dims, "use anchor 'linear' or 'none'")
        if self.rank(dims) < 1:
            raise ValueError(f"a bottleneck of half of {dims.d_in} has no unit; give its width")

    def rank(self, dims: Dims) -> int:
        """R, resolved: units of the bottleneck."""
        return dims.d_in // 2 if self.width is None else self.width

    @property
    def identity_term(self) -> float:
        return self.scale if self.anchor == "identity" and self.norm_stage == "coupled" else 0.0

    def writers(self) -> tuple[str, ...]:
        if self.post_norm == "none":
            return ("w2", "weight")
        return ("post_gain", "weight") if self.norm_stage == "coupled" else ("post_gain",)

    def preserving(self, dims: Dims, moments: Moments) -> Mapping[str, float]:
        m_in = moments.input if self.pre_norm == "none" else 1.0
        m_hidden = self.rank(dims) * F.SECOND_MOMENT[self.activation]
        m_anchor = m_in if self.norm_stage == "separate" else moments.input
        whole = 1 / abs(self.scale) if self.scale else 1.0
        f = {"none": whole, "linear": whole / math.sqrt(2), "identity": beside_identity(self.scale, m_anchor)}[
            self.anchor
        ]
        found = {"w1": 1 / math.sqrt(dims.d_in * m_in), "w2": 1 / math.sqrt(m_hidden)}
        if self.post_norm == "none" or self.norm_stage == "separate":
            found["w2"] *= f
        else:
            found["post_gain"] = f
        if self.anchor == "linear":
            found["weight"] = (whole if self.start == "exact" else f) / math.sqrt(dims.d_in * m_anchor)
        return found

    def reach(self, dims: Dims) -> Reach:
        """`f` stays within the R columns of `W2`: the post-norm scales a token's row, and a LayerNorm's centring sends
        them into the `O - 1` dimensions whose entries sum to zero (its gain only tilts those). A bias before the norm
        is scaled with them, and is one direction more; one after it is the same for all tokens. A separate stage's
        norms divide the anchor by each token's own size, so that it is no linear term any more.
        """
        has_norm = self.pre_norm != "none" or self.post_norm != "none"
        if self.activation == "identity" and not has_norm:
            return Reach(True, 0)
        most = dims.d_out - (self.post_norm == "layernorm")
        if self.norm_stage == "separate" and has_norm and self.anchor != "none":
            return Reach(False, most)
        columns = self.rank(dims) + (dims.bias and self.post_norm != "none")
        return Reach(self.anchor != "none", min(columns, most))

    def parameters(self, dims: Dims) -> Mapping[str, ParameterSpec]:
        d_in, d_out, bias, _ = dims
        rank = self.rank(dims)
        specs = {"w1": ParameterSpec((rank, d_in)), "w2": ParameterSpec((d_out, rank))}
        if self.pre_norm != "none":
            specs["pre_gain"] = ParameterSpec((d_in,), "ones")
        if self.post_norm != "none":
            specs["post_gain"] = ParameterSpec((d_out,), "zeros" if self.start == "exact" else "ones")
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
        anchored_BTD = x_BTD if self.norm_stage == "coupled" else self._pre(p, x_BTD)
        anchor_BTO = F.linear(anchored_BTD, p.weight) if self.anchor == "linear" else anchored_BTD
        return self._together(p, anchor_BTO, self.units(p, x_BTD))

    def units(self, p: Projection, x_BTD: Tensor) -> Tensor:
        """The bottleneck's units `a(pre(x) W1)`, `[B, T, R]`."""
        return F.activate(self.activation, F.wide(F.linear(self._pre(p, x_BTD), p.w1, p.get("b1"))))

    def stem_rows(self, dims: Dims) -> int:
        return self.rank(dims) + (dims.d_out if self.anchor == "linear" else 0)

    def stem(self, p: Projection) -> Tensor:
        import torch

        w1, weight = p.w1, p.get("weight")
        if self.pre_norm != "none":
            w1 = F.fold(self.pre_norm, w1, p.pre_gain)
            if weight is not None and self.norm_stage == "separate":
                weight = F.fold(self.pre_norm, weight, p.pre_gain)
        return w1 if weight is None else torch.cat([w1, weight])

    def head(self, p: Projection, stem_BTS: Tensor, x_BTD: Tensor, *other: Tensor) -> Tensor:
        rank = self.rank(p.dims)
        s_BTR, anchor_BTO = F.wide(stem_BTS[..., :rank]), stem_BTS[..., rank:]
        separate_linear = self.anchor == "linear" and self.norm_stage == "separate"
        if self.anchor == "identity":
            anchor_BTO = x_BTD if self.norm_stage == "coupled" else self._pre(p, x_BTD)
        if self.pre_norm != "none":
            inverse_BT1 = F.inverse_deviation(self.pre_norm, x_BTD, self.eps)
            s_BTR = s_BTR * inverse_BT1
            if separate_linear:
                anchor_BTO = F.wide(anchor_BTO) * inverse_BT1
        if p.dims.bias:
            s_BTR = s_BTR + p.b1
            if self.pre_norm == "layernorm":
                s_BTR = s_BTR + F.wide(p.w1) @ F.wide(p.pre_bias)
                if separate_linear:
                    anchor_BTO = anchor_BTO + F.wide(p.weight) @ F.wide(p.pre_bias)
        return self._together(p, anchor_BTO, F.activate(self.activation, s_BTR))

    def triton_refusal(self, dims: Dims) -> str | None:
        if self.norm_stage == "separate":
            return "the kernel knows norm_stage = 'coupled' alone"
        if dims.d_out > WIDEST:
            return f"the kernel gives at most {WIDEST} outputs, and this projection has {dims.d_out}"
        return None

    def triton_head(self, p: Projection, stem_BTS: Tensor, x_BTD: Tensor, *other: Tensor) -> Tensor:
        import torch

        from qurve.ops.triton_head import Rule, fused_head

        rank, b1_R, offset_O = self.rank(p.dims), p.get("b1"), p.get("post_bias")
        if b1_R is not None and self.pre_norm == "layernorm":
            b1_R = b1_R + F.wide(p.w1) @ F.wide(p.pre_bias)
        if p.dims.bias and self.anchor == "linear":
            offset_O = p.bias if offset_O is None else offset_O + p.bias
        device = x_BTD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else p.w2.dtype
        return fused_head(
            Rule(self.activation, self.pre_norm, self.post_norm, self.eps, self.scale),
            stem_BTS[..., :rank],
            x_BTD,
            p.w2.to(dtype),
            b1_R=b1_R,
            b2_O=p.get("b2"),
            gain_O=p.get("post_gain"),
            offset_O=offset_O,
            anchor_BTO={"identity": x_BTD, "linear": stem_BTS[..., rank:], "none": None}[self.anchor],
        )

    def _pre(self, p: Projection, x_BTD: Tensor) -> Tensor:
        return F.normalize(self.pre_norm, x_BTD, p.get("pre_gain"), p.get("pre_bias"), self.eps)

    def _post(self, p: Projection, y_BTO: Tensor) -> Tensor:
        return F.normalize(self.post_norm, y_BTO, p.get("post_gain"), p.get("post_bias"), self.eps)

    def _together(self, p: Projection, anchor_BTO: Tensor, h_BTR: Tensor) -> Tensor:
        """From the anchor (without its bias) and the bottleneck's units to the output, in the products' dtype."""
        y_BTO = F.linear(h_BTR, p.w2, p.get("b2"))
        out_BTO = self._post(p, y_BTO) if self.norm_stage == "coupled" else y_BTO
        if self.anchor != "none":
            out_BTO = anchor_BTO + out_BTO
        if self.anchor == "linear" and p.dims.bias:
            out_BTO = out_BTO + p.bias
        out_BTO = self.scale * out_BTO
        if self.norm_stage == "separate":
            out_BTO = self._post(p, out_BTO)
        return out_BTO.to(y_BTO.dtype)
