"""What decoding keeps, so that one more token does not repeat the ones before."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qurve.model.config import ModelConfig


class KeysValues:
    """Keys and values of one block, `[B, G, T, E]` each, with room for `length` tokens."""

    def __init__(self, config: ModelConfig, batch: int, length: int, **factory: Any) -> None:
        shape = (batch, config.kv_heads, length, config.head_width)
        self.keys, self.values = torch.zeros(shape, **factory), torch.zeros(shape, **factory)

    def extend(self, start: int, k_BGTE: Tensor, v_BGTE: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values behind the first `start`; returns all so far, in the new ones' dtype."""
        end = start + k_BGTE.shape[2]
        self.keys[:, :, start:end] = k_BGTE
        self.values[:, :, start:end] = v_BGTE
        return self.keys[:, :, :end].to(k_BGTE.dtype), self.values[:, :, :end].to(v_BGTE.dtype)

    def grow(self, length: int) -> None:
        """Make room for `length` tokens, more than now; what was written stays."""
        self.keys, self.values = lengthened(self.keys, length), lengthened(self.values, length)


def lengthened(t_BGTE: Tensor, length: int) -> Tensor:
    """The same with zeros behind it, `length` tokens long."""
    return F.pad(t_BGTE, (0, 0, 0, length - t_BGTE.shape[2]))


class Cache:
    """The decoding state of every block's mixer, static in size: room for `length` tokens (default: the context).

    The model writes to it during its forward pass, which is for `torch.no_grad()`. Sequences of mixed lengths are
    padded at their left: `padding_B` says by how many tokens each, and their positions count from the first real one.

        cache = Cache(model.config, batch=2, padding_B=torch.tensor([0, 3]))
        logits_BTV = model(prompts_BT, cache)          # then one token at a time: model(next_B1, cache)
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        length: int | None = None,
        *,
        padding_B: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if config.attends == "bidirectional":
            raise ValueError("a bidirectional model sees the tokens to come: it cannot be decoded one token at a time")
        if padding_B is not None and padding_B.shape != (batch,):
            raise ValueError(
                f"padding_B has the shape {list(padding_B.shape)}; it needs one number a sequence, {batch}"
            )
        if padding_B is not None and not padding_B.is_meta and (padding_B < 0).any():
            raise ValueError(f"padding_B = {padding_B.tolist()}: it must be at least 0")
        self.length = config.context if length is None else length
        self.padding_B = padding_B
        self.filled = 0
        configs = [config.at(layer) for layer in range(config.n_layers)]
        self.states = [c.mixer.state(c, batch, self.length, device=device, dtype=dtype) for c in configs]

    def grow(self, length: int) -> None:
        """Make room for `length` tokens, more than now; what was written stays."""
        for state in self.states:
            state.grow(length)
        self.length = length
