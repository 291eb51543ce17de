"""The modules behind `qurve.zoo.primer`.

Legend: B batch, T new tokens, O channels of queries, keys and values together, P tokens before, S those and
the new ones, W width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qurve.model.attention import Attention
from qurve.model.cache import KeysValues
from qurve.model.config import ModelConfig
from qurve.model.view import View


class ProjectedKeysValues(KeysValues):
    """Keys and values, and the last projected tokens `[B, P, O]`, before their convolution."""

    def __init__(
        self, config: ModelConfig, batch: int, length: int, rows: tuple[int, int, int], **factory: Any
    ) -> None:
        super().__init__(config, batch, length, **factory)
        self.projected_BPO = torch.zeros(rows, **factory)


class PrimerAttention(Attention):
    """Attention over convolved queries, keys and values: `y_t = x_t + sum_j kernel_j x_(t-j)`, channel by channel.

    The kernel is what the convolution adds to the identity: it starts at zero, and weight decay draws it there.
    """

    def __init__(self, config: ModelConfig, layer: int, width: int) -> None:
        super().__init__(config, layer)
        channels = (config.n_heads + 2 * config.kv_heads) * config.head_width
        self.kernel_WO = nn.Parameter(torch.empty(width, channels))
        self.starts = {**self.starts, "kernel_WO": 0.0}

    def projected(
        self, inputs: tuple[Tensor, ...], view: View, hidden: Tensor | None, state: ProjectedKeysValues | None
    ) -> list[Tensor]:
        """Queries, keys and values `[B, T, O]`, convolved."""
        if view.allowed_BTT is not None:
            raise ValueError(
                "the mixer 'primer' mixes neighbours before attention, where allowed_BTT cannot separate them; "
                "use the mixer 'softmax'"
            )
        parts = super().projected(inputs, view, hidden, state)
        x_BTO = torch.cat(parts, dim=-1)
        if view.real_BT is not None:
            x_BTO = x_BTO * view.real_BT[..., None]
        width, length = self.kernel_WO.shape[0], x_BTO.shape[1]
        all_BSO = F.pad(x_BTO, (0, 0, width - 1, 0))
        if state is not None:
            all_BSO = torch.cat([state.projected_BPO.to(x_BTO.dtype), x_BTO], dim=1)
            state.projected_BPO.copy_(all_BSO[:, length:])
        shifted = [all_BSO[:, width - 1 - j :][:, :length] for j in range(width)]
        y_BTO = x_BTO + sum(kernel_O * past_BTO for kernel_O, past_BTO in zip(self.kernel_WO, shifted, strict=True))
        return list(y_BTO.to(x_BTO.dtype).split([part.shape[-1] for part in parts], dim=-1))
