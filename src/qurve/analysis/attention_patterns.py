"""Do two models attend alike? Their attention weights on the same text, head by head.

Each token's weights are a distribution over the tokens that it may look at. Two of them differ by the Jensen-Shannon
divergence, here in bits: `H((p + p') / 2) - (H(p) + H(p')) / 2`, 0 where they are equal, 1 where they share no token.
A head's divergence is the mean over the tokens.

Heads of two trainings have no common order, so within each block they are matched one to one with the least divergence
in total. Two seeds of one architecture are far from alike either: their divergence is the yardstick for that between
two architectures, with the same matching on both sides.

Legend: B batch, T tokens, S those that they look at, H heads, G key/value heads, E head width, N windows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qurve.analysis.attention_logits import has_logits
from qurve.analysis.mechanism import Window, evaluating, run
from qurve.model.attention import Attention
from qurve.model.gpt import GPT
from qurve.projections.functional import wide


@dataclass(frozen=True)
class BlockPatterns:
    """One block of two models. Divergences and entropies in bits, means over all tokens of all windows."""

    layer: int
    partners: tuple[int, ...]
    """For each head of the first model the head of the second that it is matched with."""
    divergence: tuple[float, ...]
    """Of each head of the first model from its partner."""
    by_window: tuple[float, ...]
    """The same, mean over the heads, for each window."""
    entropy: tuple[float, ...]
    """Of each head of the first model."""
    partner_entropy: tuple[float, ...]


def compare_attention(model: GPT, other: GPT, windows: Sequence[Window]) -> list[BlockPatterns]:
    """Divergence of every block's heads, in evaluation. Raises `ValueError` as `check_comparable` does."""
    check_comparable(model, other)
    found: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in range(model.config.n_layers)]
    for window in windows:
        for rows, weight_BHTS, other_BHTS in zip(found, weights(model, window), weights(other, window), strict=True):
            rows.append((_divergences(weight_BHTS, other_BHTS), _entropy(weight_BHTS), _entropy(other_BHTS)))
    return [_matched(layer, *map(torch.stack, zip(*rows, strict=True))) for layer, rows in enumerate(found)]


def check_comparable(model: GPT, other: GPT) -> None:
    """Raise `ValueError` for models whose blocks, heads, tokens or windows are not as many, or without a softmax of
    `q . k`."""
    for what in ("n_layers", "n_heads", "vocab_size", "context", "attends"):
        ours, theirs = getattr(model.config, what), getattr(other.config, what)
        if ours != theirs:
            raise ValueError(f"the models cannot be compared head by head: model.{what} is {ours} here, {theirs} there")
    if not all(has_logits(block.get_submodule("attention")) for m in (model, other) for block in m.blocks):
        raise ValueError("attention patterns are a softmax of q . k: model.mixer has to be 'softmax' or 'primer'")


def weights(model: GPT, window: Window) -> Iterator[Tensor]:
    """Attention weights `[1, H, T, S]` of each block on one window, one block at a time, in float32 or wider.

    They are what the softmax gives, before what a block without a skip over attention makes of them. Queries and keys
    are computed a second time.
    """
    calls: list[tuple[Attention, tuple[Any, ...]]] = []
    mixers = [block.get_submodule("attention") for block in model.blocks]
    handles = [
        mixer.register_forward_pre_hook(lambda module, inputs: calls.append((module, inputs))) for mixer in mixers
    ]
    try:
        with evaluating(model):
            run(model, window)
    finally:
        for handle in handles:
            handle.remove()
    return itertools.starmap(_weights, calls)


@torch.no_grad()
def _weights(attention: Attention, arguments: tuple[Any, ...]) -> Tensor:
    config, (inputs, view, hidden, _) = attention.config, arguments
    q_BHTE, k_BGTE, _ = attention.enter(inputs, view, hidden, None)
    k_BHTE = k_BGTE.repeat_interleave(config.n_heads // config.kv_heads, dim=1)
    logits_BHTS = config.scale * wide(q_BHTE) @ wide(k_BHTE).transpose(-1, -2)
    if (cap := config.attention_softcap) is not None:
        logits_BHTS = cap * torch.tanh(logits_BHTS / cap)
    visible, is_causal = view.mask(config.window)
    if is_causal:
        visible = torch.ones(logits_BHTS.shape[-2:], dtype=torch.bool, device=logits_BHTS.device).tril()
    if visible is not None:
        logits_BHTS = logits_BHTS.masked_fill(~visible, -torch.inf)
    return logits_BHTS.softmax(-1)


def _bits(weight_HTS: Tensor) -> Tensor:
    """Entropy of each row, `[…, T]`."""
    nats_HT: Tensor = torch.special.entr(weight_HTS).sum(-1)
    return nats_HT / math.log(2)


def _entropy(weight_BHTS: Tensor) -> Tensor:
    return _bits(weight_BHTS[0]).mean(-1).double().cpu()


def _divergences(weight_BHTS: Tensor, other_BHTS: Tensor) -> Tensor:
    """Of every head from every other model's head, `[H, H]`."""
    other_HTS = other_BHTS[0].to(weight_BHTS.device)
    own_HT, other_HT = _bits(weight_BHTS[0]), _bits(other_HTS)
    rows = [
        (_bits((weight_TS + other_HTS) / 2) - (own_T + other_HT) / 2).mean(-1)
        for weight_TS, own_T in zip(weight_BHTS[0], own_HT, strict=True)
    ]
    return torch.stack(rows).double().cpu()


def _matched(layer: int, divergence_NHH: Tensor, entropy_NH: Tensor, other_NH: Tensor) -> BlockPatterns:
    from scipy.optimize import linear_sum_assignment

    heads, partners = linear_sum_assignment(divergence_NHH.mean(0).numpy())
    matched_NH = divergence_NHH[:, heads, partners]
    return BlockPatterns(
        layer,
        tuple(partners.tolist()),
        tuple(matched_NH.mean(0).tolist()),
        tuple(matched_NH.mean(1).tolist()),
        tuple(entropy_NH.mean(0).tolist()),
        tuple(other_NH.mean(0)[partners].tolist()),
    )
