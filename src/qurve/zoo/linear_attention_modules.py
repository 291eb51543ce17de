"""The modules behind `qurve.zoo.linear_attention`.

Legend: B batch, T new tokens, H query heads, G key/value heads, N queries of one key head, E head width (of features
and values).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qurve.model.attention import Attention
from qurve.model.cache import State
from qurve.model.config import ModelConfig
from qurve.model.view import View
from qurve.projections.functional import wide
from qurve.zoo.linear_attention import FeatureMap, LinearAttention

EPS = 1e-6
"""Added to the denominator, which a token has at zero when its features (relu's, say) meet none of the keys'."""


class Sums(State):
    """Over all tokens so far: `psi(k) v^T`, `[B, G, E, E]`, and `psi(k)`, `[B, G, E]`; in float32 or wider."""

    def __init__(self, config: ModelConfig, batch: int, *, dtype: torch.dtype | None = None, **factory: Any) -> None:
        dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        shape = (batch, config.kv_heads, config.head_width)
        self.keys_values = torch.zeros(*shape, config.head_width, dtype=dtype, **factory)
        self.keys = torch.zeros(shape, dtype=dtype, **factory)


def features(kind: FeatureMap, x: Tensor) -> Tensor:
    """At least zero everywhere, of the same shape, in float32 or wider."""
    if kind == "elu":
        return F.elu(wide(x)) + 1
    return F.relu(wide(x)) if kind == "relu" else wide(x).softmax(-1)


class FeatureAttention(Attention):
    """Attention with weights `phi(q) psi(k)`, divided by their sum."""

    def __init__(self, config: ModelConfig, layer: int, kind: LinearAttention) -> None:
        super().__init__(config, layer)
        self.kind = kind

    def mixed(self, inputs: tuple[Tensor, ...], view: View, hidden: Tensor | None, state: Sums | None) -> Tensor:
        if view.allowed_BTT is not None:
            raise ValueError("linear attention sums over tokens unmasked by allowed_BTT; use the mixer 'softmax'")
        q_BHTE, k_BGTE, v_BGTE = (self.heads(t) for t in self.projected(inputs, view, hidden, state))
        q_BHTE = features(self.kind.query_map, self.query_norm(q_BHTE))
        k_BGTE = features(self.kind.key_map, self.key_norm(k_BGTE))
        if view.real_BT is not None:
            k_BGTE = k_BGTE * view.real_BT[:, None, :, None]

        causal = view.attends != "bidirectional"
        sum_BGTE = k_BGTE.cumsum(2) if causal else k_BGTE.sum(2, keepdim=True)
        if state is not None:
            sum_BGTE = sum_BGTE + state.keys[:, :, None]
        denominator_BGNT1 = (self.grouped(q_BHTE) * sum_BGTE[:, :, None]).sum(-1, keepdim=True)

        q_BGNTE = self.grouped(self.rotated(q_BHTE, view)).to(v_BGTE.dtype)
        turned_BGTE = self.rotated(k_BGTE, view).to(v_BGTE.dtype)
        if causal:
            weight_BGNTT = (q_BGNTE @ turned_BGTE[:, :, None].transpose(-1, -2)).tril()
            numerator_BGNTE = weight_BGNTT @ v_BGTE[:, :, None]
        else:
            numerator_BGNTE = q_BGNTE @ (turned_BGTE.transpose(-1, -2) @ v_BGTE)[:, :, None]
        if state is not None:
            numerator_BGNTE = numerator_BGNTE + q_BGNTE @ state.keys_values[:, :, None].to(q_BGNTE.dtype)
            state.keys_values += turned_BGTE.transpose(-1, -2) @ v_BGTE
            state.keys += k_BGTE.sum(2)
        y_BHTE: Tensor = (numerator_BGNTE / (denominator_BGNT1 + EPS)).flatten(1, 2)
        return y_BHTE.to(v_BGTE.dtype)

    def grouped(self, q_BHTE: Tensor) -> Tensor:
        """`[B, H, T, E]` -> `[B, G, N, T, E]`: the queries by the key head that they share."""
        return q_BHTE.reshape(len(q_BHTE), self.config.kv_heads, -1, *q_BHTE.shape[2:])
