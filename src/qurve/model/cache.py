"""What decoding keeps, so that one more token does not repeat the ones before."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from qurve.model.config import ModelConfig


class State:
    """What decoding keeps for one block's mixer. Its attributes are tensors, each with the batch as its first axis."""

    per_token: ClassVar[tuple[str, ...]] = ()
    """Names of those that are `[B, G, T, E]`, with one place for each token; the others do not grow with the text."""

    def grow(self, length: int) -> None:
        """Make room for `length` tokens, at least as many as there is room for."""
        for name in self.per_token:
            old_BGTE: Tensor = getattr(self, name)
            setattr(self, name, F.pad(old_BGTE, (0, 0, 0, length - old_BGTE.shape[2])))

    def select(self, rows_K: Tensor, first: int) -> None:
        """Go on with these sequences, in this order, and without the `first` places of each."""
        for name, old in vars(self).items():
            chosen = old[rows_K]
            setattr(self, name, F.pad(chosen[:, :, first:], (0, 0, 0, first)) if name in self.per_token else chosen)


class KeysValues(State):
    """Keys and values of one block, `[B, G, T, E]` each, with room for `length` tokens."""

    per_token = ("keys", "values")

    def __init__(self, config: ModelConfig, batch: int, length: int, **factory: Any) -> None:
        shape = (batch, config.kv_heads, length, config.head_width)
        self.keys, self.values = torch.zeros(shape, **factory), torch.zeros(shape, **factory)

    def extend(self, start: int, k_BGTE: Tensor, v_BGTE: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values behind the first `start`; returns all so far, in the new ones' dtype."""
        end = start + k_BGTE.shape[2]
        self.keys[:, :, start:end] = k_BGTE
        self.values[:, :, start:end] = v_BGTE
        return self.keys[:, :, :end].to(k_BGTE.dtype), self.values[:, :, :end].to(v_BGTE.dtype)


class Cache:
    """The decoding state of every block's mixer, with room for `length` tokens at first (default: the context).

    The model writes to it during its forward pass, which is for `torch.no_grad()`, and has it grow where it is full.
    Sequences of mixed lengths are padded at their left: `padding_B` says by how many tokens each, and their positions
    count from the first real one.

        cache = Cache(model.config, batch=2, padding_B=torch.tensor([0, 3]))
        logits_BTV = model(prompts_BT, cache)          # then one token at a time: model(next_B1, cache)

    `filled` says how many tokens are in it, padding counted. Raises `ValueError` for a bidirectional model, and for
    padding that is not one number of at least 0 a sequence.
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
        self.context = config.context
        self.length = config.context if length is None else length
        self.padding_B = padding_B
        self.filled = 0
        configs = [config.at(layer) for layer in range(config.n_layers)]
        self.states: list[State] = [c.mixer.state(c, batch, self.length, device=device, dtype=dtype) for c in configs]

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in all. It doubles, up to the context: few copies, little spare."""
        if length > self.length:
            self.length = max(length, min(2 * self.length, self.context))
            for state in self.states:
                state.grow(self.length)

    def select(self, rows_K: Tensor) -> None:
        """Go on with the sequences of these rows `[K]`, in this order: some left out, say, or some several times.

        Padding that all of them have is taken away, so that `filled` becomes the length of the longest.
        """
        spare = 0
        if self.padding_B is not None:
            padding_K = self.padding_B[rows_K]
            spare = min(int(padding_K.min()), self.filled)
            self.padding_B = padding_K - spare if (padding_K > spare).any() else None
        for state in self.states:
            state.select(rows_K, spare)
        self.filled -= spare
