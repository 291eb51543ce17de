"""`NonlinearQuery`: the paper's layer as a module for anybody's model."""

from __future__ import annotations

import torch

from qurve.projections.base import Dims
from qurve.projections.bottleneck import Anchor, Bottleneck
from qurve.projections.functional import Activation, Norm
from qurve.projections.module import Projection


class NonlinearQuery(Projection):
    """`Q(x) = (x + f(x)) / 2` with `f(x) = LN(GELU(RMSNorm(x) W1) W2)`, in place of a query weight.

        query = NonlinearQuery(768)
        q_BTD = query(x_BTD)            # then split into heads, as after a linear query

    Takes and returns `[B, T, d_model]` (any leading shape) on any device, in float64, float32 or bfloat16, under
    autocast or not; norms run in float32. Matrices have `d_model**2` parameters together, the norms `2 * d_model` more.
    Feed it the output of the block's first norm, and keep the attention scale `1 / sqrt(head width)`.

    Parameters: `w1 [R, D]`, `w2 [O, R]`, `pre_gain [D]`, `post_gain [O]`. All options: `Bottleneck`'s fields, `d_out`
    for an output width other than `d_model` (not with the identity anchor), `bias` for biases in every part.

    Raises `ValueError` for widths that cannot be. Source: arXiv 2603.13381, equations 2 and 3.
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
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        config = Bottleneck(anchor, width, activation, pre_norm, post_norm, eps, scale)
        dims = Dims(d_model, d_model if d_out is None else d_out, bias)
        super().__init__(config, dims, device=device, dtype=dtype)
