"""Causal self-attention over projections of any kind.

Legend: B batch, T new tokens, S all tokens (cached and new), D model width, H heads, E head width.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qurve.model.cache import KVCache
from qurve.model.config import ModelConfig
from qurve.projections import Linear
from qurve.projections.functional import wide
from qurve.projections.module import project


class Attention(nn.Module):
    """Multi-head attention: `softmax(scale * q k^T + causal) v`, then the output projection."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        dims = config.qkv_dims
        self.n_heads, self.scale, self.layer = config.n_heads, config.scale, layer
        self.query = config.query.build(*dims[:2], bias=dims.bias)
        self.key = config.key.build(*dims[:2], bias=dims.bias)
        self.value = config.value.build(*dims[:2], bias=dims.bias)
        self.output = Linear().build(config.d_model, config.d_model, bias=config.bias)
        self.dropout = config.dropout

    def forward(self, x_BTD: Tensor, cache: KVCache | None = None) -> Tensor:
        batch, length, width = x_BTD.shape
        q_BTD, k_BTD, v_BTD = project([self.query, self.key, self.value], x_BTD)
        q_BHTE, k_BHSE, v_BHSE = (
            t.view(batch, length, self.n_heads, -1).transpose(1, 2) for t in (q_BTD, k_BTD, v_BTD)
        )
        mask_TS = None
        if cache is not None:
            k_BHSE, v_BHSE = cache.extend(self.layer, k_BHSE, v_BHSE)
            mask_TS = causal_mask(length, k_BHSE.shape[2], x_BTD.device)
        y_BHTE = attend(q_BHTE, k_BHSE, v_BHSE, mask_TS, self.scale, self.dropout if self.training else 0.0)
        y_BTD = self.output(y_BHTE.transpose(1, 2).reshape(batch, length, width))
        return F.dropout(y_BTD, self.dropout, self.training)


SHORT = 128
"""Up to this many tokens torch's CPU attention is about twice as fast in float32 as in bf16 (forward and backward)."""


def attend(
    q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, mask_TS: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """`softmax(scale * q k^T + causal) v`, `[B, H, T, E]`; without a mask, T = S and each token looks back."""
    attention = partial(
        F.scaled_dot_product_attention, attn_mask=mask_TS, is_causal=mask_TS is None, scale=scale, dropout_p=dropout
    )
    if q_BHTE.device.type == "cpu" and k_BHSE.shape[2] <= SHORT:
        with torch.autocast("cpu", enabled=False):
            return attention(wide(q_BHTE), wide(k_BHSE), wide(v_BHSE))
    return attention(q_BHTE, k_BHSE, v_BHSE)  # autocast gives all three one dtype


def causal_mask(new: int, total: int, device: torch.device) -> Tensor:
    """`[new, total]`, true where one of the last `new` tokens may look."""
    return torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)
