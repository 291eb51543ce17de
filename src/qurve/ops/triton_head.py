"""The bottleneck's head as one Triton kernel, and one more for its backward pass.

    z = s * inverse_deviation(x) + b1      y = a(z) W2 + b2      out = scale * (anchor + norm(y) * gain + offset)

A program takes a few rows (tokens) and their whole output width, so that the norm after the product needs no second
pass: the units `a(z)` never reach memory, nor does anything in float32. All that is kept for the backward pass is `y`,
in the products' dtype; the rest is computed again. The backward kernel gives every gradient but that of `W2`, a sum
over all tokens: it writes `dy` and the units, and their product is torch's.

Norms and activations are in float32, products in the dtype of `W2` with float32 sums (float32 products are exact ones,
never TF32). Sums over tokens are made by program, then added up in a fixed order: the same input gives the same bits.
With `TRITON_INTERPRET=1` set before Triton is imported the kernels run on the CPU, slowly: for tests.

No GPU has run these kernels yet: they are checked in the interpreter, and compile for one.

Legend: B batch, T tokens, N tokens of all sequences, D input width, R bottleneck width, O output width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from qurve.ops.triton_kernels import backward_kernel, forward_kernel


class Rule(NamedTuple):
    """What a head computes, besides its tensors; the fields are `Bottleneck`'s."""

    activation: str
    pre_norm: str
    post_norm: str
    eps: float
    scale: float


def fused_head(
    rule: Rule,
    s_BTR: Tensor,
    x_BTD: Tensor,
    w2_OR: Tensor,
    *,
    b1_R: Tensor | None,
    b2_O: Tensor | None,
    gain_O: Tensor | None,
    offset_O: Tensor | None,
    anchor_BTO: Tensor | None,
) -> Tensor:
    """The formula at the top: from the stem's product `s` to `[B, T, O]`, in the dtype of `W2`; differentiable once.

    An anchor that is `x` itself is the identity. Tensors are float32 or bfloat16, of any leading shape;
    O is at most `WIDEST`.
    """
    on_identity = anchor_BTO is x_BTD
    anchor_NO = None if on_identity or anchor_BTO is None else _rows(anchor_BTO)
    tensors = (_rows(s_BTR), _rows(x_BTD), w2_OR.contiguous(), b1_R, b2_O, gain_O, offset_O, anchor_NO)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    out_NO: Tensor = _head(*tensors, on_identity, *rule, keep)[0]
    return out_NO.view(*x_BTD.shape[:-1], w2_OR.shape[0])


def _rows(x_BTD: Tensor) -> Tensor:
    """`[N, D]`, a view of a slice of the stems too: rows may lie apart, each is in one piece."""
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    return x_ND if x_ND.stride(-1) == 1 else x_ND.contiguous()


def blocks(d_in: int, d_out: int, dtype: torch.dtype) -> dict[str, int]:
    """How much of each axis a program takes at a time, and its warps and pipeline stages.

    It holds `BLOCK_N x BLOCK_O` sums in registers, and in shared memory tiles of `W2` twice over, to load one while it
    multiplies with the other. Compiled for a Hopper GPU, neither kernel spills registers with these sizes (with twice
    as many rows both do). Few rows have a price: each program reads the whole of `W2`, from the cache at best.
    """
    wide = triton.next_power_of_2(max(16, d_out))
    return {
        "BLOCK_N": max(16, min(64, 16_384 // wide)),
        "BLOCK_D": min(128, triton.next_power_of_2(max(16, d_in))),
        "BLOCK_R": 32 if dtype.itemsize == 2 else 16,
        "BLOCK_O": wide,
        "num_warps": 8 if wide >= 512 else 4,
        "num_stages": 2,
    }


# ------------------------------------------------------------------------------------------------------------- forward


@torch.library.custom_op("qurve::bottleneck_head", mutates_args=())
def _head(
    s_NR: Tensor,
    x_ND: Tensor,
    w2_OR: Tensor,
    b1_R: Tensor | None,
    b2_O: Tensor | None,
    gain_O: Tensor | None,
    offset_O: Tensor | None,
    anchor_NO: Tensor | None,
    on_identity: bool,
    activation: str,
    pre_norm: str,
    post_norm: str,
    eps: float,
    scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """The output, and `y` where the backward pass will ask for it (else nothing)."""
    out_NO, y_NO = _outputs(s_NR, w2_OR, post_norm, keep)
    if on_identity:
        anchor_NO = x_ND
    anchor_stride = 0 if anchor_NO is None else anchor_NO.stride(0)
    rows, (d_out, rank), d_in = len(s_NR), w2_OR.shape, x_ND.shape[1]
    sizes = blocks(d_in, d_out, w2_OR.dtype)
    if rows:
        with torch.cuda.device(s_NR.get_device()):  # Triton launches on the current one
            forward_kernel[(triton.cdiv(rows, sizes["BLOCK_N"]),)](
                *(s_NR, x_ND, w2_OR, b1_R, b2_O, gain_O, offset_O, anchor_NO, out_NO, _or_none(y_NO)),
                *(rows, s_NR.stride(0), x_ND.stride(0), anchor_stride, eps, scale),
                *(d_in, rank, d_out, activation, pre_norm, post_norm),
                **sizes,
            )
    return out_NO, y_NO


def _outputs(s_NR: Tensor, w2_OR: Tensor, post_norm: str, keep: bool) -> tuple[Tensor, Tensor]:
    n, d_out = len(s_NR), len(w2_OR)
    return w2_OR.new_empty(n, d_out), w2_OR.new_empty(n if keep and post_norm != "none" else 0, d_out)


@_head.register_fake
def _(s_NR: Tensor, x_ND: Tensor, w2_OR: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, post_norm, _eps, _scale, keep = others
    return _outputs(s_NR, w2_OR, post_norm, keep)


def _or_none(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.numel() else None


# ------------------------------------------------------------------------------------------------------------ backward


@torch.library.custom_op("qurve::bottleneck_head_backward", mutates_args=())
def _head_backward(
    grad_NO: Tensor,
    s_NR: Tensor,
    x_ND: Tensor,
    w2_OR: Tensor,
    b1_R: Tensor | None,
    gain_O: Tensor | None,
    y_NO: Tensor,
    on_identity: bool,
    activation: str,
    pre_norm: str,
    post_norm: str,
    eps: float,
    scale: float,
    anchor_dtype: torch.dtype | None,
    has_b2: bool,
    has_offset: bool,
) -> list[Tensor]:
    """`dy`, the units, and the gradients of s, x, the anchor, b1, b2, gain, offset; an empty tensor for what is not
    there. The last four are `[P, …]`, for the sum over the P programs to be made."""
    made = _gradients(
        s_NR, x_ND, w2_OR, b1_R, gain_O, on_identity or pre_norm != "none", anchor_dtype, has_b2, has_offset
    )
    rows, (d_out, rank), d_in = len(s_NR), w2_OR.shape, x_ND.shape[1]
    sizes = blocks(d_in, d_out, w2_OR.dtype)
    if rows:
        with torch.cuda.device(s_NR.get_device()):  # Triton launches on the current one
            backward_kernel[(triton.cdiv(rows, sizes["BLOCK_N"]),)](
                *(grad_NO, s_NR, x_ND, w2_OR, b1_R, gain_O, y_NO),
                *map(_or_none, made),
                *(rows, s_NR.stride(0), x_ND.stride(0), eps, scale),
                *(d_in, rank, d_out, activation, pre_norm, post_norm, on_identity),
                **sizes,
            )
    return made


def _gradients(
    s_NR: Tensor,
    x_ND: Tensor,
    w2_OR: Tensor,
    b1_R: Tensor | None,
    gain_O: Tensor | None,
    has_dx: bool,
    anchor_dtype: torch.dtype | None,
    has_b2: bool,
    has_offset: bool,
) -> list[Tensor]:
    """What the backward kernel fills, in its order."""
    n, (d_out, rank), d_in = len(s_NR), w2_OR.shape, x_ND.shape[1]
    programs = triton.cdiv(n, blocks(d_in, d_out, w2_OR.dtype)["BLOCK_N"])

    def sums(wanted: bool, width: int) -> Tensor:
        return s_NR.new_empty(programs if wanted else 0, width, dtype=torch.float32)

    return [
        w2_OR.new_empty(n, d_out),
        w2_OR.new_empty(n, rank),
        s_NR.new_empty(n, rank),
        x_ND.new_empty(n if has_dx else 0, d_in),
        w2_OR.new_empty(0 if anchor_dtype is None else n, d_out, dtype=anchor_dtype),
        sums(b1_R is not None, rank),
        sums(has_b2, d_out),
        sums(gain_O is not None, d_out),
        sums(has_offset, d_out),
    ]


@_head_backward.register_fake
def _(
    grad_NO: Tensor,
    s_NR: Tensor,
    x_ND: Tensor,
    w2_OR: Tensor,
    b1_R: Tensor | None,
    gain_O: Tensor | None,
    y_NO: Tensor,
    on_identity: bool,
    activation: str,
    pre_norm: str,
    *others: Any,
) -> list[Tensor]:
    *_, anchor_dtype, has_b2, has_offset = others
    has_dx = on_identity or pre_norm != "none"
    return _gradients(s_NR, x_ND, w2_OR, b1_R, gain_O, has_dx, anchor_dtype, has_b2, has_offset)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    s_NR, x_ND, w2_OR, b1_R, b2_O, gain_O, offset_O, anchor_NO, on_identity, *rule, _ = inputs
    ctx.save_for_backward(s_NR, x_ND, w2_OR, b1_R, gain_O, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.dtypes = [None if t is None else t.dtype for t in (b1_R, b2_O, gain_O, offset_O)]
    ctx.rule = (on_identity, *rule, None if anchor_NO is None else anchor_NO.dtype)


def _backward(ctx: Any, grad_NO: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_NO is None:
        return (None,) * 15
    s_NR, x_ND, w2_OR, b1_R, gain_O, y_NO = ctx.saved_tensors
    has_b2, has_offset = ctx.dtypes[1] is not None, ctx.dtypes[3] is not None
    dy_NO, h_NR, ds_NR, dx_ND, danchor_NO, *sums = _head_backward(
        grad_NO.contiguous(), s_NR, x_ND, w2_OR, b1_R, gain_O, y_NO, *ctx.rule, has_b2, has_offset
    )
    dw2_OR = dy_NO.T @ h_NR if ctx.needs_input_grad[2] else None
    small = [None if dtype is None else part.sum(0).to(dtype) for part, dtype in zip(sums, ctx.dtypes, strict=True)]
    on_identity, _, pre_norm, *_, anchor_dtype = ctx.rule
    dx = dx_ND if on_identity or pre_norm != "none" else None
    return ds_NR, dx, dw2_OR, *small, None if anchor_dtype is None else danchor_NO, *(None,) * 7


_head.register_autograd(_backward, setup_context=_keep)
