"""Causal attention on the CPU as a few large matrix products, for compiled models.

torch's own kernel works on tiles of 32 queries, in which bf16 products stay far below what the processor can do. Here a
block of queries meets all keys that it may see in one product; what it may not see is mostly not computed. Only the
logarithm of each query's normaliser is kept for the backward pass, as flash attention does. Unlike in torch's kernel,
logits are rounded to the compute dtype, like those of any product here.

Legend: B batch, H heads, T tokens, E head width, N = B H.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qurve.ops import compiled

BLOCK = 128
"""Queries at a time: fewer make small products, more compute much that the mask then hides."""


def causal_attention(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, scale: float) -> Tensor:
    """`softmax(scale * q k^T + causal mask) v`, `[B, H, T, E]`; all three of one shape and dtype, on the CPU.

    Softmax in float32 or wider. Up to rounding the same as `scaled_dot_product_attention`. For compiled code: where
    nothing is fused, torch's own kernel is faster.
    """
    y_BHTE: Tensor = _forward(q_BHTE, k_BHTE, v_BHTE, scale)[0]
    return y_BHTE


def _attend(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    q_NTE, k_NTE, v_NTE = (t.reshape(-1, *t.shape[2:]) for t in (q_BHTE, k_BHTE, v_BHTE))
    parts, log_sums = [], []
    for begin, end in _blocks(q_NTE.shape[1]):
        logits_NTS = _logits(q_NTE[:, begin:end], _first(k_NTE, end), begin, scale)
        peak_NT1 = logits_NTS.amax(-1, keepdim=True)
        weights_NTS = torch.exp(logits_NTS - peak_NT1)
        sum_NT1 = weights_NTS.sum(-1, keepdim=True)
        y_NTE = torch.bmm(weights_NTS.to(v_NTE.dtype), v_NTE[:, :end]).to(sum_NT1.dtype) / sum_NT1
        parts.append(y_NTE.to(v_NTE.dtype))
        log_sums.append(peak_NT1 + sum_NT1.log())
    return _as_heads(torch.cat(parts, dim=1), q_BHTE), torch.cat(log_sums, dim=1)


def _attend_backward(
    q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, y_BHTE: Tensor, log_sum_NT1: Tensor, dy_BHTE: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q_NTE, k_NTE, v_NTE, y_NTE, dy_NTE = (
        t.reshape(-1, *t.shape[2:]) for t in (q_BHTE, k_BHTE, v_BHTE, y_BHTE, dy_BHTE)
    )
    wide = log_sum_NT1.dtype
    mean_NT1 = (y_NTE.to(wide) * dy_NTE.to(wide)).sum(-1, keepdim=True)
    dq, dk, dv = [], [], []
    for begin, end in _blocks(q_NTE.shape[1]):
        q_part, dy_part, k_part = q_NTE[:, begin:end], dy_NTE[:, begin:end], _first(k_NTE, end)
        weights_NTS = torch.exp(_logits(q_part, k_part, begin, scale) - log_sum_NT1[:, begin:end])
        d_weights_NTS = torch.bmm(dy_part, _first(v_NTE, end).transpose(1, 2)).to(wide)
        d_logits_NTS = (scale * weights_NTS * (d_weights_NTS - mean_NT1[:, begin:end])).to(q_NTE.dtype)
        dq.append(torch.bmm(d_logits_NTS, k_part))
        dk.append(torch.bmm(d_logits_NTS.transpose(1, 2), q_part))
        dv.append(torch.bmm(weights_NTS.to(v_NTE.dtype).transpose(1, 2), dy_part))
    return (
        _as_heads(torch.cat(dq, dim=1), q_BHTE),
        _as_heads(_summed(dk, wide), q_BHTE),
        _as_heads(_summed(dv, wide), q_BHTE),
    )


def _summed(parts: list[Tensor], wide: torch.dtype) -> Tensor:
    """The sum of what each block of queries gives to the keys that it sees, `[N, T, E]`, summed in `wide`: for each
    block of keys at once, so that the compiler makes one pass of it."""
    blocks = []
    for place, (begin, end) in enumerate(_blocks(parts[-1].shape[1])):
        first, *others = (part[:, begin:end].to(wide) for part in parts[place:])
        blocks.append(sum(others, start=first))
    return torch.cat(blocks, dim=1).to(parts[0].dtype)


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + BLOCK, length)) for begin in range(0, length, BLOCK)]


def _first(t_NTE: Tensor, end: int) -> Tensor:
    """The first `end` rows, in memory of their own: `bmm` would copy a transposed slice number by number."""
    return t_NTE[:, :end].contiguous()


def _logits(q_NTE: Tensor, k_NSE: Tensor, begin: int, scale: float) -> Tensor:
    """Scaled and masked, for queries that stand at `begin` and after; in float32 or wider."""
    logits_NTS = torch.bmm(q_NTE, k_NSE.transpose(1, 2))
    logits_NTS = scale * logits_NTS.to(torch.promote_types(logits_NTS.dtype, torch.float32))
    at_S = torch.arange(k_NSE.shape[1], device=k_NSE.device)
    return logits_NTS.masked_fill(at_S > at_S[begin:, None], -torch.inf)


def _as_heads(t_NTE: Tensor, like_BHTE: Tensor) -> Tensor:
    """`[B, H, T, E]` with the memory of `[B, T, H, E]`, which is what the projections before and after have."""
    return _empty_heads(like_BHTE).copy_(t_NTE.view(like_BHTE.shape))


def _empty_heads(like_BHTE: Tensor) -> Tensor:
    batch, heads, length, width = like_BHTE.shape
    return like_BHTE.new_empty(batch, length, heads, width).transpose(1, 2)


# Custom operators, so that all layers share one compilation.


@torch.library.custom_op("qurve::causal_attention", mutates_args=())
def _forward(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        found: tuple[Tensor, Tensor] = compiled(_attend)(q_BHTE, k_BHTE, v_BHTE, scale)
        return found


@torch.library.custom_op("qurve::causal_attention_backward", mutates_args=())
def _backward(
    q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, y_BHTE: Tensor, log_sum_NT1: Tensor, dy_BHTE: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        found: tuple[Tensor, Tensor, Tensor] = compiled(_attend_backward)(
            q_BHTE, k_BHTE, v_BHTE, y_BHTE, log_sum_NT1, dy_BHTE, scale
        )
        return found


@_forward.register_fake
def _(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q_BHTE.shape
    wide = torch.promote_types(q_BHTE.dtype, torch.float32)
    return _empty_heads(q_BHTE), q_BHTE.new_empty(batch * heads, length, 1, dtype=wide)


@_backward.register_fake
def _(q_BHTE: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_heads(q_BHTE), _empty_heads(q_BHTE), _empty_heads(q_BHTE)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_BHTE, k_BHTE, v_BHTE, ctx.scale = inputs
    ctx.save_for_backward(q_BHTE, k_BHTE, v_BHTE, *output)


def _gradients(ctx: Any, dy_BHTE: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(*ctx.saved_tensors, dy_BHTE, ctx.scale), None


_forward.register_autograd(_gradients, setup_context=_keep)
