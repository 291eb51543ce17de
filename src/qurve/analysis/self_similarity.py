"""How much of attention is similarity of the input with itself.

Where queries and keys both have an identity anchor, `q = s_q (x + f(x))` and `k = s_k (x + g(x))`, their product holds
a term without parameters:

    q_h . k'_h = s_q s_k x_h . x'_h  +  terms with f, g          (h: the channels of head h, rotated where q and k are)

which draws tokens to those like themselves, first of all to themselves. Source: arXiv 2603.13381, section 1 (the
`X X^T` term).

Legend: B batch, T tokens, H heads, E head width, N visible pairs (of all sequences).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qurve.model.attention import Attention
from qurve.model.gpt import GPT
from qurve.model.positions import Rope, rotate
from qurve.model.view import View


@dataclass(frozen=True)
class SelfSimilarity:
    """One head. Variances and covariances are over all visible pairs of a token and one that it may look at."""

    layer: int
    head: int
    share: float
    """`Cov(term, logits) / Var(logits)`: the term's part of the logits' variance, where the parts of all terms add up
    to 1; it can be negative or above 1 where they cancel."""
    correlation: float
    """Of the term with the logits, -1 to 1."""
    self_weight: float
    """Mean attention weight of a token on itself."""


@torch.no_grad()
def self_similarity(model: GPT, ids_BT: Tensor) -> list[SelfSimilarity]:
    """What the term makes up, per block and head, in evaluation on `ids_BT`; logits before their softmax and soft-cap.

    Blocks where queries or keys have no identity anchor are left out. Raises `ValueError` where none has both, where
    QK-norm rescales each token's query and key (the term is no summand then), and for other mixers than softmax
    attention.
    """
    config, found = model.config, list[SelfSimilarity]()
    if config.qk_norm:
        raise ValueError("model.qk_norm rescales every query and key, so that their product has no x . x' term")
    layers = [layer for layer in range(config.n_layers) if _scale(model, layer)]
    if not layers:
        raise ValueError(
            "no block has an identity anchor in both queries and keys, so there is no x . x' term; make model.query "
            "and model.key 'identity', 'residual', 'mlp_reuse' or a 'bottleneck' (anchor identity, norm stage coupled)"
        )
    calls: list[tuple[Attention, tuple[Any, ...]]] = []

    def remember(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(module, Attention)
        calls.append((module, arguments))

    attentions = [module for name, module in model.named_modules() if name.endswith(".attention")]
    if not all(type(attention) is Attention for attention in attentions):
        raise ValueError("the x . x' term is defined for softmax attention alone: model.mixer has to be 'softmax'")
    handles = [attention.register_forward_pre_hook(remember) for attention in attentions]
    was_training = model.training
    try:
        model.eval()(ids_BT)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    for layer in layers:
        attention, (inputs, view, hidden, _) = calls[layer]
        found += _measure(layer, _scale(model, layer), attention, inputs, view, hidden)
    return found


def _scale(model: GPT, layer: int) -> float:
    """What multiplies `x . x'` in the logits of block `layer`; 0 where the term is none."""
    projections = model.config.projections(layer)
    if not {"query", "key"} <= projections.keys():
        return 0.0
    return model.config.scale * projections["query"][0].identity_term * projections["key"][0].identity_term


def _measure(
    layer: int, scale: float, attention: Attention, inputs: tuple[Tensor, ...], view: View, hidden: Tensor | None
) -> list[SelfSimilarity]:
    config = attention.config
    q_BTO, k_BTO, _ = attention.projected(inputs, view, hidden, None)
    x_q_BTD, x_k_BTD = (inputs[0], inputs[0]) if len(inputs) == 1 else inputs[:2]

    def heads(t_BTO: Tensor) -> Tensor:
        t_BHTE = attention.heads(t_BTO).float()
        if view.rotation is not None and isinstance(config.positions, Rope):
            return rotate(config.positions, t_BHTE, view.rotation)
        return t_BHTE

    logits_BHTT = config.scale * heads(q_BTO) @ heads(k_BTO).transpose(-1, -2)
    term_BHTT = scale * heads(x_q_BTD) @ heads(x_k_BTD).transpose(-1, -2)
    visible, is_causal = view.mask(config.window)
    visible_BTT = torch.ones_like(logits_BHTT[:, 0], dtype=torch.bool)
    if is_causal:
        visible_BTT = visible_BTT.tril()
    elif visible is not None:
        visible_BTT = visible.expand(len(visible_BTT), -1, -1, -1)[:, 0]
    capped_BHTT = logits_BHTT
    if (cap := config.attention_softcap) is not None:
        capped_BHTT = cap * torch.tanh(logits_BHTT / cap)
    weight_BHTT = capped_BHTT.masked_fill(~visible_BTT[:, None], -torch.inf).softmax(-1)
    self_weight_H = weight_BHTT.diagonal(dim1=-2, dim2=-1).mean((0, 2))

    logits_HN, term_HN = (t.transpose(0, 1)[:, visible_BTT].double() for t in (logits_BHTT, term_BHTT))
    logits_HN, term_HN = (t - t.mean(-1, keepdim=True) for t in (logits_HN, term_HN))
    covariance_H = (logits_HN * term_HN).mean(-1)
    variance_H, term_variance_H = logits_HN.square().mean(-1), term_HN.square().mean(-1)
    share_H, correlation_H = covariance_H / variance_H, covariance_H / (variance_H * term_variance_H).sqrt()
    rows = zip(share_H.tolist(), correlation_H.tolist(), self_weight_H.tolist(), strict=True)
    return [SelfSimilarity(layer, head, *row) for head, row in enumerate(rows)]
