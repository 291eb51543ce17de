"""A plain static key/value cache, so that decoding one token does not repeat the ones before."""

from __future__ import annotations

import torch
from torch import Tensor

from qurve.model.config import ModelConfig


class KVCache:
    """Keys and values of every layer, `[L, B, G, T, E]` each, with room for `length` tokens (default: the context).

    The model writes to it during its forward pass and advances `filled`. `2 * L * G * E * length * B` numbers in all.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        length: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.length = config.context if length is None else length
        shape = (config.n_layers, batch, config.kv_heads, self.length, config.head_width)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.filled = 0

    def extend(self, layer: int, k_BGTE: Tensor, v_BGTE: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values behind the filled ones; returns all so far."""
        end = self.filled + k_BGTE.shape[2]
        if end > self.length:
            raise ValueError(f"the cache has room for {self.length} tokens; {end} are needed")
        self.keys[layer, :, :, self.filled : end] = k_BGTE
        self.values[layer, :, :, self.filled : end] = v_BGTE
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, tokens: int) -> None:
        self.filled += tokens
