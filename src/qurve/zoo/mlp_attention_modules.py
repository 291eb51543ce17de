"""The modules behind `qurve.zoo.mlp_attention`.

Legend: B batch, T new tokens, S all tokens (cached and new), D model width, H heads, G value heads, E head width, F
hidden width of a head's MLP, C columns: positions of the context.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qurve.model.attention import Attention, average
from qurve.model.cache import State
from qurve.model.config import ModelConfig
from qurve.model.view import View
from qurve.projections.functional import wide
from qurve.projections.module import project


class Values(State):
    """Values of one block, `[B, G, T, E]`, with room for `length` tokens."""

    per_token = ("values",)

    def __init__(self, config: ModelConfig, batch: int, length: int, **factory: Any) -> None:
        self.values = torch.zeros(batch, config.kv_heads, length, config.head_width, **factory)

    def extend(self, start: int, v_BGTE: Tensor) -> Tensor:
        """Write the new values behind the first `start`; returns all so far."""
        end = start + v_BGTE.shape[2]
        self.values[:, :, start:end] = v_BGTE
        return self.values[:, :, :end].to(v_BGTE.dtype)


class PositionAttention(Attention):
    """Attention whose logits are an MLP of the token that looks, one column for each position."""

    def __init__(self, config: ModelConfig, layer: int, hidden: int) -> None:
        super().__init__(config, layer)
        self.hidden = nn.Linear(config.d_model, config.n_heads * hidden, bias=config.bias)
        self.columns_HCF = nn.Parameter(torch.empty(config.n_heads, config.context, hidden))

    def mixed(self, inputs: tuple[Tensor, ...], view: View, hidden: Tensor | None, state: Values | None) -> Tensor:
        config = self.config
        v_BGTE = v_BGSE = self.heads(project([self.value], inputs[-1], hidden)[0])
        if state is not None:
            v_BGSE = state.extend(view.start, v_BGTE)
        logits_BHTS = self.logits(inputs[0][..., : config.d_model], view)
        if (cap := config.attention_softcap) is not None:
            logits_BHTS = cap * torch.tanh(logits_BHTS / cap)
        mask = view.mask(config.window)
        y_BHTE = average(logits_BHTS, v_BGSE, mask=mask, dropout=config.dropout if self.training else 0.0)
        if config.residual.attention_skip:
            return y_BHTE
        return self.shaped(y_BHTE, v_BGTE, average(torch.zeros_like(logits_BHTS), v_BGSE, mask=mask))

    def logits(self, x_BTD: Tensor, view: View) -> Tensor:
        """`relu(x W_1) W_2`, `[B, H, T, S]` in float32 or wider: the columns of the positions so far."""
        hidden_BHTF = self.hidden(x_BTD).relu().unflatten(-1, (self.config.n_heads, -1)).transpose(1, 2)
        columns = view.start + view.length
        logits_BHTC = wide(hidden_BHTF @ self.columns_HCF[:, :columns].transpose(-1, -2))
        if view.padding_B is None:
            return logits_BHTC
        to_S = torch.arange(columns, device=x_BTD.device)
        column_BS = (to_S - view.padding_B[:, None]).clamp(min=0)
        return logits_BHTC.gather(-1, column_BS[:, None, None].expand_as(logits_BHTC))
