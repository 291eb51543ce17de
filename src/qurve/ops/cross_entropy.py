"""Head and cross-entropy together, on the CPU, without ever holding all logits.

A chunk of tokens at a time: its logits while they are in the cache, the softmax, and from it at once the gradient with
respect to the logits, in the same memory. So exponentials are taken once and not again in the backward pass, which has
nothing left to do but to scale. `plain` is the specification.

Legend: N tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qurve.ops import compiled as compiled_once

HELD = 2**25
"""Logits up to this many are held: below it the plain loss is as fast."""
CHUNK, GROUP = 256, 1024
"""Tokens whose logits are made at once (50,304 ids in bf16: 26 MB, about a level-3 cache), and tokens for one product
of the weight's gradient, which is slow for few. No more than a group's logits exist at any time."""


def linear_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None) -> Tensor:
    """Mean of `-log softmax(hidden W^T)[target]` in nats, float32 or wider; targets of -100 do not count.

    Products in autocast's dtype where it is on, softmax in float32. Up to rounding the same as `plain`. Gradients of
    logits that were not held can be taken once: a graph of them is refused with `RuntimeError`.
    """
    if hidden_ND.device.type != "cpu" or len(hidden_ND) * len(weight_VD) <= HELD:
        return plain(hidden_ND, weight_VD, targets_N, softcap)
    if torch.is_autocast_enabled("cpu"):
        hidden_ND, weight_VD = (t.to(torch.get_autocast_dtype("cpu")) for t in (hidden_ND, weight_VD))
    with_gradient = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    compiled = torch.compiler.is_compiling()
    loss: Tensor = _chunked(hidden_ND, weight_VD, targets_N, softcap or 0.0, with_gradient, compiled)[0]
    return loss


def plain(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None) -> Tensor:
    """The same, all logits at once."""
    return F.cross_entropy(capped(F.linear(hidden_ND, weight_VD), softcap), targets_N)


def capped(logits_NV: Tensor, softcap: float | None) -> Tensor:
    """`softcap * tanh(logits / softcap)`, in float32 or wider; None caps nothing."""
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return logits_NV if softcap is None else softcap * torch.tanh(logits_NV / softcap)


@torch.library.custom_op("qurve::linear_cross_entropy", mutates_args=())
def _chunked(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float, with_gradient: bool, compiled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and its gradients with respect to hidden and weight (empty, where not asked for)."""
    if ((targets_N != -100) & ((targets_N < 0) | (targets_N >= len(weight_VD)))).any():
        raise IndexError(f"a target is neither -100 nor one of the {len(weight_VD)} ids from 0")
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    share = 1 / (targets_N != -100).sum().to(wide)
    loss = torch.zeros((), dtype=wide)
    d_hidden_ND, d_weight_VD = (_gradient(t, with_gradient) for t in (hidden_ND, weight_VD))
    room = GROUP if with_gradient else CHUNK
    logits_NV = hidden_ND.new_empty(min(room, len(hidden_ND)), len(weight_VD))
    softmax = compiled_once(_softmax, dynamic=True) if compiled else _softmax
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for begin in range(0, len(hidden_ND), room):
            group_ND = hidden_ND[begin : begin + room]
            for at in range(0, len(group_ND), CHUNK):
                part_ND, chunk = group_ND[at : at + CHUNK], slice(begin + at, begin + min(at + CHUNK, len(group_ND)))
                part_NV = logits_NV[at : at + len(part_ND)]
                torch.mm(part_ND, weight_VD.t(), out=part_NV)
                loss += softmax(part_NV, targets_N[chunk], share, softcap, with_gradient)
                if with_gradient:
                    torch.mm(part_NV, weight_VD, out=d_hidden_ND[chunk])
            if with_gradient:
                more_VD = logits_NV[: len(group_ND)].t() @ group_ND
                if begin:  # a sum of two is rounded once, as any product; one of more is kept in float32
                    more_VD = (d_weight_VD if len(hidden_ND) <= 2 * room else d_weight_VD.to(wide)).add_(more_VD)
                d_weight_VD = more_VD
    return loss, d_hidden_ND, d_weight_VD.to(weight_VD.dtype)


def _gradient(t: Tensor, wanted: bool) -> Tensor:
    return t.new_empty(t.shape if wanted else (0,))


def _softmax(logits_NV: Tensor, targets_N: Tensor, share: Tensor, softcap: float, with_gradient: bool) -> Tensor:
    """The sum of `share` of each token's loss; its gradient, where asked for, is written over the logits."""
    capped_NV = capped(logits_NV, softcap or None)
    peak_N1 = capped_NV.amax(-1, keepdim=True)
    log_sum_N1 = peak_N1 + torch.exp(capped_NV - peak_N1).sum(-1, keepdim=True).log()
    counts_N1 = (targets_N != -100)[:, None]
    target_N1 = targets_N.clamp(min=0)[:, None]
    losses_N1 = torch.where(counts_N1, log_sum_N1 - capped_NV.gather(1, target_N1), 0.0)
    if with_gradient:
        is_target_NV = torch.arange(logits_NV.shape[1], device=logits_NV.device) == target_N1
        gradient_NV = torch.exp(capped_NV - log_sum_N1) - is_target_NV.to(capped_NV.dtype)
        if softcap:
            gradient_NV = gradient_NV * (1 - (capped_NV / softcap).square())
        logits_NV.copy_(torch.where(counts_N1, share * gradient_NV, 0.0))
    return share * losses_N1.sum()


@_chunked.register_fake
def _(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float, with_gradient: bool, compiled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    loss = hidden_ND.new_empty((), dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
    return loss, _gradient(hidden_ND, with_gradient), _gradient(weight_VD, with_gradient)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def _scale(ctx: Any, d_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("this loss has no second derivatives: raise ops.cross_entropy.HELD, or take `plain` for it")
    d_hidden_ND, d_weight_VD = ctx.saved_tensors
    return d_loss * d_hidden_ND, d_loss * d_weight_VD, None, None, None, None


_chunked.register_autograd(_scale, setup_context=_keep)
