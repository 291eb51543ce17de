"""Reading tokens into a cache: what a text costs is one pass over its prompt, then one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from qurve.model.cache import Cache
from qurve.model.gpt import GPT


class Decoder:
    """The model, and what it has read of `batch` sequences. The model given is not changed.

    `padding_B`: tokens of padding at the left of each sequence. `room`: tokens to make room for at first. `dtype`: of
    the matrix products; None takes the weights' own. Of a model with `attends = prefix`, the first read is the prefix.
    """

    def __init__(
        self, model: GPT, batch: int, padding_B: Tensor | None, room: int, dtype: torch.dtype | None = None
    ) -> None:
        weight = model.head_weight
        self.model = model
        self.autocast = torch.autocast(weight.device.type, dtype, enabled=dtype not in (None, weight.dtype))
        self.cache = Cache(
            model.config, batch, room, padding_B=padding_B, device=weight.device, dtype=dtype or weight.dtype
        )

    @property
    def filled(self) -> int:
        """Tokens read so far, padding counted."""
        return self.cache.filled

    @torch.inference_mode()
    def read(self, ids_BT: Tensor) -> Tensor:
        """Read on; the logits after the last token, `[B, V]` in float32."""
        prefix_B = None
        if self.model.config.attends == "prefix" and not self.filled:
            prefix_B = torch.full((len(ids_BT),), ids_BT.shape[1], device=ids_BT.device)
        with self.autocast:
            hidden_BTD, _ = self.model.hidden(ids_BT, self.cache, prefix_B=prefix_B)
            return self.model.logits(hidden_BTD[:, -1]).float()

    @torch.inference_mode()
    def select(self, rows_K: Tensor) -> None:
        """Go on with these sequences, in this order: some left out, or some several times (see `Cache.select`)."""
        self.cache.select(rows_K)
