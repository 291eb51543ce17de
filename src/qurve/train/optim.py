"""AdamW with weight decay on matrices and embeddings alone."""

from __future__ import annotations

import torch
from torch import nn

from qurve.train.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Fused AdamW over two groups; every trainable parameter is in exactly one of them."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.dim() >= 2]
    plain = [p for p in parameters if p.dim() < 2]
    if {id(p) for p in decayed + plain} != {id(p) for p in parameters} or len(decayed + plain) != len(parameters):
        raise AssertionError("the optimiser's groups do not cover every parameter exactly once")
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
