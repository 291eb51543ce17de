"""`NonlinearQuery`: the paper's layer as a module for anybody's model."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from qurve.ops.heads import Impl
from qurve.projections.base import Dims
from qurve.projections.bottleneck import Anchor, Bottleneck
from qurve.projections.functional import Activation, Norm
from qurve.projections.module import Projection, set_impl


class NonlinearQuery(Projection):
    """`Q(x) = (x + f(x)) / 2` with `f(x) = LN(GELU(RMSNorm(x) W1) W2)`, in place of a query weight.

        query = NonlinearQuery(768)
        q_BTD = query(x_BTD)            # then split into heads, as after a linear query

    Takes and returns `[B, T, d_model]` (any leading shape) on any device, in float64, float32 or bfloat16, under
    autocast or not; norms run in float32. Matrices have `d_model**2` parameters together, the norms `2 * d_model` more.
    Feed it the output of the block's first norm, and keep the attention scale `1 / sqrt(head width)`.

    Parameters: `w1 [R, D]`, `w2 [O, R]`, `pre_gain [D]`, `post_gain [O]`. All options: `Bottleneck`'s fields, `d_out`
    for an output width other than `d_model` (not with the identity anchor), `bias` for biases in every part.

    `NonlinearQuery.from_linear(layer)` takes over a pretrained weight.

    `impl` says how it is run, not what it computes: `reference`, `compiled` (`torch.compile` of what follows the first
    product, for a model that is not compiled as a whole; each new shape takes seconds), `triton` (one kernel, on CUDA),
    or `auto`, the fastest of them by measurement.

    Raises `ValueError` for widths that cannot be, and for `triton` where there is no kernel. Source: arXiv 2603.13381,
    equations 2 and 3.
    """

    def __init__(
        self,
        d_model: int,
        d_out: int | None = None,
        *,
        width: int | None = None,
        anchor: Anchor = "identity",
        activation: Activation = "gelu",
        pre_norm: Norm = "rmsnorm",
        post_norm: Norm = "layernorm",
        eps: float = 1e-5,
        scale: float = 0.5,
        norm_stage: Literal["coupled", "separate"] = "coupled",
        start: Literal["usual", "exact"] = "usual",
        bias: bool = False,
        impl: Impl = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        config = Bottleneck(anchor, width, activation, pre_norm, post_norm, eps, scale, norm_stage, start)
        dims = Dims(d_model, d_model if d_out is None else d_out, bias)
        super().__init__(config, dims, device=device, dtype=dtype)
        set_impl(self, impl)

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls,
        linear: nn.Linear | Projection,
        *,
        start: Literal["usual", "exact"] = "exact",
        scale: float = 0.5,
        **options: Any,
    ) -> NonlinearQuery:
        """`scale * (x W + f(x))` with `W = W_Q / scale`: the query of a pretrained weight `W_Q`, made nonlinear.

            block.query = NonlinearQuery.from_linear(block.query)

        `linear` is an `nn.Linear` or a projection of the linear kind; its weight (and bias) are copied, with their
        dtype and device. At the exact start the function is the original's to rounding, in half precision too where
        `1 / scale` is a power of two: scale 1/2 doubles `W_Q`, scale 1 takes it as it is. Raises `ValueError` for a
        module without one weight matrix, and for `scale = 0`. Source: arXiv 2603.13381, section 3.
        """
        weight, bias = getattr(linear, "weight", None), getattr(linear, "bias", None)
        if (
            weight is None
            or weight.dim() != 2
            or isinstance(linear, nn.Embedding)
            or (isinstance(linear, Projection) and linear.config.kind != "linear")
        ):
            raise ValueError(f"{linear} is no linear projection: it has to be x W (+ b), with one weight [out, in]")
        if scale == 0:
            raise ValueError("scale = 0 cannot be made up for by any weight; use 0.5 or 1")
        (d_out, d_in), factory = weight.shape, {"device": weight.device, "dtype": weight.dtype}
        query = cls(d_in, d_out, anchor="linear", start=start, scale=scale, bias=bias is not None, **options, **factory)
        query.weight.copy_(weight / scale)
        if bias is not None:
            query.bias.copy_(bias / scale)
        return query
