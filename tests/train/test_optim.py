from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from qurve import presets
from qurve.model.gpt import GPT
from qurve.train.config import TrainConfig
from qurve.train.optim import build_optimizer


def tiny_model(preset: str, **changes: Any) -> GPT:
    """The preset's architecture, small."""
    config = presets.get(preset).model
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 2, "context": 8, "vocab_size": 32}
    return GPT(dataclasses.replace(config, **sizes, d_ff=16 * config.d_ff // config.d_model, **changes))


def groups(model: nn.Module, config: TrainConfig | None = None) -> dict[str, float]:
    """Name of each parameter -> its decay. Fails when one is in two groups."""
    optimizer = build_optimizer(model, config or TrainConfig(weight_decay=0.3))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    grouped = [(names[id(p)], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]]
    assert len(dict(grouped)) == len(grouped)
    return dict(grouped)


@pytest.mark.parametrize("preset", [name for name in presets.names() if not name.startswith("zoo/")])
@pytest.mark.parametrize("bias", [False, True])
def test_decay_covers_matrices_and_embeddings_and_nothing_else(preset: str, bias: bool) -> None:
    model = tiny_model(preset, bias=bias)
    ends = ("gain", "bias", ".b1", ".b2")
    vectors = {name for name, _ in model.named_parameters() if name.endswith(ends) or "norm" in name}
    expected = {name: 0.0 if name in vectors else 0.3 for name, _ in model.named_parameters()}
    assert groups(model) == expected
    assert {expected[name] for name in expected if "embedding" in name} == {0.3}
    assert expected["final_norm.weight"] == expected["blocks.0.attention_norm.weight"] == 0.0


def test_gains_of_the_nonlinear_query_are_not_decayed_and_its_matrices_are() -> None:
    decay = {name.rpartition(".")[2]: value for name, value in groups(tiny_model("smoke")).items() if ".query." in name}
    assert decay == {"w1": 0.3, "w2": 0.3, "pre_gain": 0.0, "post_gain": 0.0}


def test_frozen_parameters_are_left_alone() -> None:
    model = tiny_model("paper/baseline")
    model.token_embedding.weight.requires_grad_(False)
    assert "token_embedding.weight" not in groups(model)


def test_one_update_is_adamw_with_decoupled_decay() -> None:
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(2.0)
    optimizer = build_optimizer(model, TrainConfig(lr=0.1, min_lr=0.0, weight_decay=0.5, beta1=0.8, beta2=0.9))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    optimizer.step()
    # the first update's moments, corrected, are the gradient and its square: a step of lr against its sign
    assert model.weight.flatten().tolist() == pytest.approx([2 * (1 - 0.1 * 0.5) - 0.1] * 2)
    assert model.bias.tolist() == pytest.approx([1.9] * 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -1.0)
    optimizer.step()
    first, second = (0.8 * 0.2 * 3 - 0.2) / (1 - 0.8**2), (0.9 * 0.1 * 9 + 0.1) / (1 - 0.9**2)
    assert model.bias.tolist() == pytest.approx([1.9 - 0.1 * first / second**0.5] * 2)
