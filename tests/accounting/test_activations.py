"""What autograd keeps for the backward pass: foretold without memory, and measured on the real model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from qurve.accounting import activation_bytes
from qurve.accounting.activations import saved_bytes
from qurve.model.config import LayerOverride, ModelConfig, Subspaces
from qurve.model.feed_forward import Gated, MixtureOfExperts
from qurve.model.gpt import GPT
from qurve.model.mixers import MixerConfig
from qurve.model.positions import Rope
from qurve.model.residual import ResidualConfig, Skip
from qurve.projections import Bottleneck, ProjectionConfig

SMALL = ModelConfig(n_layers=2, d_model=20, n_heads=4, d_ff=30, context=63, vocab_size=50)

CHANGES: list[dict[str, Any]] = [
    {"query": Bottleneck(), "key": Bottleneck(anchor="linear"), "bias": True},
    {"n_kv_heads": 2, "positions": Rope(), "d_head": 6, "qk_norm": True, "norm": "rmsnorm"},
    {"mlp": Gated(), "tie_embeddings": False, "logit_softcap": 4.0},
    {"mlp": MixtureOfExperts(experts=3, active=2)},
    {"overrides": (LayerOverride((1,), mlp=MixtureOfExperts(experts=5, active=1)),)},
    {"dropout": 0.1},
    {"window": 7},
    {"attends": "prefix"},
    {"attends": "bidirectional"},
    {"attention_softcap": 3.0},
    {"subspaces": Subspaces(q=2, kv=1)},
    {"share_blocks": True},
    {"residual": Skip("none", attention=False, mlp=False)},
    *({"query": kind()} for kind in ProjectionConfig.registry.values()),
    *({"mixer": kind()} for kind in MixerConfig.registry.values()),
    *({"residual": kind()} for kind in ResidualConfig.registry.values()),
]


def measured(config: ModelConfig, batch: int, length: int, precision: str = "float32") -> int:
    ids_BT = torch.randint(config.vocab_size, (batch, length))
    prefix = (torch.ones(batch, dtype=torch.long),) if config.attends == "prefix" else ()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        return saved_bytes(GPT(config).train(), ids_BT, ids_BT, *prefix)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_what_is_foretold_is_what_the_real_model_keeps(changes: dict[str, Any]) -> None:
    try:
        config = dataclasses.replace(SMALL, **changes)
    except ValueError:
        pytest.skip("refused")
    assert activation_bytes(config, 3, 13) == measured(config, 3, 13)


@pytest.mark.parametrize("mlp", [SMALL.mlp, MixtureOfExperts(experts=3, active=2)], ids=str)
def test_under_autocast_too(mlp: Any) -> None:
    config = dataclasses.replace(SMALL, query=Bottleneck(), mlp=mlp, context=200)
    foretold = activation_bytes(config, 2, 150, "bf16")
    assert foretold == measured(config, 2, 150, "bf16")
    assert foretold < activation_bytes(config, 2, 150)


def test_parts_that_can_be_counted_by_hand() -> None:
    """One token more costs the same everywhere; a class more, one number a token in float32 (the log-softmax)."""
    base, tokens = activation_bytes(SMALL, 2, 13), 2 * 13
    assert activation_bytes(SMALL, 4, 13) - base == pytest.approx(base, rel=0.35)  # stacked weights do not grow
    assert activation_bytes(SMALL, 6, 13) - activation_bytes(SMALL, 4, 13) == activation_bytes(SMALL, 4, 13) - base
    assert activation_bytes(dataclasses.replace(SMALL, vocab_size=51), 2, 13) - base == 4 * tokens


def test_a_tensor_saved_twice_counts_once_and_parameters_never() -> None:
    class Squares(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(5))

        def loss(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.weight  # keeps x (and the weight)
            return (y * y.view(5)).sum()  # keeps y, twice

    assert saved_bytes(Squares(), torch.ones(5)) == 2 * 5 * 4


def test_it_takes_no_memory() -> None:
    """More than any machine has: 4,096 sequences of the paper's model."""
    assert activation_bytes(ModelConfig(n_layers=1), 4096, 1024) > 2**37
