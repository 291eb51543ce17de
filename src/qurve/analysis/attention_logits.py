"""How large attention's logits become: their growth comes before some divergences (arXiv 2302.05442, 2309.14322).

Recorded is the largest `|scale * q . k|` over the pairs of a token and one that it may look at: queries and keys as
they meet, with positions and QK-norm, before any soft-cap and the softmax.

Legend: B batch, T tokens, t tokens of one part of them, S those that they look at, E head width, G key/value heads, R
queries that share one, H = G R.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qurve.model.attention import Attention
from qurve.model.gpt import GPT
from qurve.model.view import View
from qurve.projections.functional import wide

MOST_NUMBERS = 2**24
"""Logits that exist at a time, 64 MiB: queries are taken in parts."""


class LargestLogits:
    """What was recorded so far, by block."""

    def __init__(self, layers: int) -> None:
        self._found: list[Tensor | None] = [None] * layers

    def see(self, layer: int, largest: Tensor) -> None:
        before = self._found[layer]
        self._found[layer] = largest if before is None else torch.maximum(before, largest)

    def by_layer(self) -> list[float | None]:
        """The largest logit of each block; None where nothing ran, or where the mixer has no such logits.

        Waits for the device, once a block.
        """
        return [None if largest is None else largest.item() for largest in self._found]


@contextlib.contextmanager
def recording(model: GPT) -> Iterator[LargestLogits]:
    """Record the largest logit of each block in every forward pass of the `with` block.

        with recording(model) as largest, torch.no_grad():
            model(ids_BT)
        largest.by_layer()  # [3.1, 2.7, …]

    Exact, in float32 (or wider) whatever the dtype that queries and keys come in, and in parts, so that memory does not
    grow with the square of the context. Outputs stay as they are; hooks are set on this model's modules alone and gone
    afterwards. Queries and keys are computed a second time. Only mixers that are softmax attention but for their
    projections (`softmax`, `primer`) have such logits; the blocks of others give None. Padding does not count. Call
    the plain model: a compiled one passes hooks by. Raises `ValueError` in a forward pass with a cache, whose earlier
    keys are not seen here.
    """
    largest, handles = LargestLogits(model.config.n_layers), []
    passes = [range(model.config.n_layers)] if model.config.share_blocks else [[i] for i in range(len(model.blocks))]
    for layers, block in zip(passes, model.blocks, strict=True):
        mixer = block.get_submodule("attention")
        if has_logits(mixer):
            seen = partial(_see, largest, itertools.cycle(layers))
            handles.append(mixer.register_forward_pre_hook(seen))
    try:
        yield largest
    finally:
        for handle in handles:
            handle.remove()


def has_logits(mixer: nn.Module) -> bool:
    """Whether a mixer weighs by a softmax of `scale * q . k`."""
    if not isinstance(mixer, Attention):
        return False
    return all(getattr(type(mixer), name) is getattr(Attention, name) for name in ("mixed", "enter", "mix"))


@torch.no_grad()
def _see(largest: LargestLogits, layers: Iterator[int], attention: Attention, arguments: tuple[Any, ...]) -> None:
    inputs, view, hidden, state = arguments
    if state is not None:
        raise ValueError("attention logits are recorded of whole sequences: call the model without a cache")
    q_BHTE, k_BGTE, _ = attention.enter(inputs, view, hidden, None)
    found = largest_logit(q_BHTE, k_BGTE, view, attention.config.window, attention.config.scale)
    largest.see(next(layers), found)


def largest_logit(q_BHTE: Tensor, k_BGTE: Tensor, view: View, window: int | None, scale: float) -> Tensor:
    """The largest `|scale * q . k|` over the visible pairs, a scalar on the device; not finite where a logit is not."""
    largest: Tensor = wide(q_BHTE).new_zeros(())
    for logits_BGRtS, visible in visible_logits(q_BHTE, k_BGTE, view, window, scale):
        if visible is not None:
            logits_BGRtS = logits_BGRtS.masked_fill(~visible, 0.0)
        largest = torch.maximum(largest, logits_BGRtS.abs().amax())
    return largest


def visible_logits(
    q_BHTE: Tensor, k_BGTE: Tensor, view: View, window: int | None, scale: float
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """`scale * q . k` in float32 or wider, in parts of the queries `[B, G, R, t, S]`, each with what is true for the
    pairs that are visible (None: all are). Padding sees nothing."""
    batch, heads, length, width = q_BHTE.shape
    q_BGRTE = wide(q_BHTE).reshape(batch, k_BGTE.shape[1], -1, length, width)
    k_BG1ET = wide(k_BGTE).transpose(-1, -2)[:, :, None]
    mask, is_causal = view.mask(window)
    real_BT, at_T = view.real_BT, torch.arange(length, device=q_BHTE.device)
    size = max(1, MOST_NUMBERS // (batch * heads * length))
    for begin in range(0, length, size):
        end = min(begin + size, length)
        seen = end if is_causal else length
        with torch.autocast(q_BHTE.device.type, enabled=False):
            logits_BGRtS = scale * (q_BGRTE[..., begin:end, :] @ k_BG1ET[..., :seen])
        visible = at_T[begin:end, None] >= at_T[:seen] if is_causal else None
        if mask is not None:
            visible = mask[:, :, None, begin:end]
            if real_BT is not None:  # padding sees itself, and that is nothing that anybody attends to
                visible = visible & real_BT[:, None, None, begin:end, None]
        yield logits_BGRtS, visible
