"""The modules behind `qurve.model.feed_forward`.

Legend: B batch, T tokens, D model width, F hidden width, N experts, K experts that a token goes to, M tokens of one
expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qurve.model.config import ModelConfig
from qurve.model.feed_forward import Dense, Gated, MixtureOfExperts
from qurve.projections import Linear
from qurve.projections.functional import activate, wide
from qurve.projections.module import project


class DenseFeedForward(nn.Module):
    """`a(x W_up) W_down`. Returns its output and the hidden activations, which the next block may read."""

    def __init__(self, config: ModelConfig, kind: Dense) -> None:
        super().__init__()
        self.kind, self.dropout = kind, config.dropout
        self.up = Linear().build(config.d_model, config.d_ff, bias=config.bias)
        self.down = Linear().build(config.d_ff, config.d_model, bias=config.bias)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        h_BTF = activate(self.kind.activation, self.up(x_BTD))
        return F.dropout(self.down(h_BTF), self.dropout, self.training), h_BTF


class GatedFeedForward(nn.Module):
    """`(a(x W_gate) * x W_up) W_down`. Returns its output and the gated hidden activations."""

    together = ("gate", "up")

    def __init__(self, config: ModelConfig, kind: Gated | MixtureOfExperts) -> None:
        super().__init__()
        self.kind, self.dropout = kind, config.dropout
        self.gate = Linear().build(config.d_model, config.d_ff, bias=config.bias)
        self.up = Linear().build(config.d_model, config.d_ff, bias=config.bias)
        self.down = Linear().build(config.d_ff, config.d_model, bias=config.bias)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        gate_BTF, up_BTF = project([self.gate, self.up], x_BTD)
        h_BTF = activate(self.kind.activation, gate_BTF) * up_BTF
        return F.dropout(self.down(h_BTF), self.dropout, self.training), h_BTF


class ExpertFeedForward(nn.Module):
    """A router and its experts: `[B, T, D]` to the same. After a forward pass in training, `balance_loss` and `usage_N`
    tell of its choices."""

    def __init__(self, config: ModelConfig, kind: MixtureOfExperts) -> None:
        super().__init__()
        self.kind = kind
        self.router = Linear().build(config.d_model, kind.experts)
        self.experts = nn.ModuleList(GatedFeedForward(config, kind) for _ in range(kind.experts))

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, None]:
        x_MD = x_BTD.flatten(0, -2)
        probability_MN = wide(self.router(x_MD)).softmax(-1)
        weight_MK, chosen_MK = probability_MN.topk(self.kind.active, dim=-1)
        weight_MK = (weight_MK / weight_MK.sum(-1, keepdim=True)).to(x_MD.dtype)
        usage_N = torch.bincount(chosen_MK.flatten(), minlength=self.kind.experts).float() / chosen_MK.numel()
        self.usage_N = usage_N.detach()
        self.balance_loss = self.kind.experts * (usage_N * probability_MN.mean(0)).sum()
        out_MD = torch.zeros_like(x_MD)
        for number, expert in enumerate(self.experts):
            # Also with no tokens: its gradient is zero then, not missing, and every update is of the same weights.
            token_M, place_M = torch.where(chosen_MK == number)
            part_MD = expert(x_MD[token_M])[0] * weight_MK[token_M, place_M, None]
            out_MD = out_MD.index_add(0, token_M, part_MD.to(out_MD.dtype))
        return out_MD.view(x_BTD.shape), None
