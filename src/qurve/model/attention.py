"""Causal self-attention over projections of any kind.

Legend: B batch, T new tokens, S all tokens (cached and new), D model width, H query heads, G key/value heads, E head
width.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qurve.model.cache import KVCache
from qurve.model.config import ModelConfig
from qurve.model.positions import Rope, rotate
from qurve.projections import Linear
from qurve.projections.functional import wide
from qurve.projections.module import project

Rotation = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Multi-head attention: `softmax(scale * q k^T + causal) v`, then the output projection."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        query, key, value = (
            projection.build(dims.d_in, dims.d_out, bias=dims.bias)
            for projection, dims in zip(config.qkv, config.qkv_dims, strict=True)
        )
        self.query, self.key, self.value = query, key, value
        self.output = Linear().build(config.n_heads * config.head_width, config.d_model, bias=config.bias)
        norms = [nn.RMSNorm(config.head_width, config.norm_eps) if config.qk_norm else nn.Identity() for _ in "qk"]
        self.query_norm, self.key_norm = norms

    def forward(self, x_BTD: Tensor, rotation: Rotation | None = None, cache: KVCache | None = None) -> Tensor:
        config, (batch, length, _) = self.config, x_BTD.shape
        q_BHTE, k_BGSE, v_BGSE = (
            t.view(batch, length, -1, config.head_width).transpose(1, 2)
            for t in project([self.query, self.key, self.value], x_BTD)
        )
        q_BHTE, k_BGSE = self.query_norm(q_BHTE), self.key_norm(k_BGSE)
        if rotation is not None and isinstance(config.positions, Rope):
            q_BHTE, k_BGSE = (rotate(config.positions, t, rotation) for t in (q_BHTE, k_BGSE))
        if cache is not None:
            k_BGSE, v_BGSE = cache.extend(self.layer, k_BGSE, v_BGSE)
        mask_TS = None
        if cache is not None or config.window is not None:
            mask_TS = causal_mask(length, k_BGSE.shape[2], x_BTD.device, config.window)
        dropout = config.dropout if self.training else 0.0
        y_BHTE = attend(q_BHTE, k_BGSE, v_BGSE, mask_TS, config.scale, dropout)
        y_BTD = self.output(y_BHTE.transpose(1, 2).flatten(2))
        return F.dropout(y_BTD, config.dropout, self.training)


SHORT = 128
"""Up to this many tokens torch's CPU attention is about twice as fast in float32 as in bf16 (forward and backward)."""


def attend(
    q_BHTE: Tensor, k_BGSE: Tensor, v_BGSE: Tensor, mask_TS: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """`softmax(scale * q k^T + mask) v`, `[B, H, T, E]`; without a mask, T = S and each token looks back."""
    attention = partial(
        F.scaled_dot_product_attention,
        attn_mask=mask_TS,
        is_causal=mask_TS is None,
        scale=scale,
        dropout_p=dropout,
        enable_gqa=q_BHTE.shape[1] != k_BGSE.shape[1],
    )
    if q_BHTE.device.type == "cpu" and k_BGSE.shape[2] <= SHORT:
        with torch.autocast("cpu", enabled=False):
            return attention(wide(q_BHTE), wide(k_BGSE), wide(v_BGSE))
    return attention(q_BHTE, k_BGSE, v_BGSE)  # autocast gives all three one dtype


def causal_mask(new: int, total: int, device: torch.device, window: int | None = None) -> Tensor:
    """`[new, total]`, true where one of the last `new` tokens may look: back, and no further than its window."""
    mask = torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)
    return mask if window is None else mask.triu(total - new - window + 1)
