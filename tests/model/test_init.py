"""Initial weights: their sizes, and that arms of one seed share what they have in common."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.model.init import stream_seed
from qurve.projections import Bottleneck, Residual

SMALL = ModelConfig(n_layers=3, d_model=48, n_heads=3, d_ff=192, context=40, vocab_size=120)
ARMS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "mlp-4.75": {"d_ff": 228},
    "res-gelu": {"query": Bottleneck()},
    "residual": {"query": Residual()},
    "untied": {"tie_embeddings": False},
    "bias": {"bias": True, "query": Bottleneck("linear", pre_norm="layernorm")},
}


def weights(seed: int = 1, **changes: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in GPT(dataclasses.replace(SMALL, **changes), seed).named_parameters()}


@pytest.mark.parametrize("changes", ARMS.values(), ids=ARMS)
def test_sizes(changes: dict[str, Any]) -> None:
    for name, p in weights(**changes).items():
        if p.dim() == 2:
            std = 0.02
            if name.endswith(("attention.output.weight", "mlp.down.weight")):
                std = 0.02 / math.sqrt(2 * 3)
            assert p.std().item() == pytest.approx(std, rel=0.08), name
            assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel()), name
        else:
            is_bias = name.endswith((".bias", "_bias", ".b1", ".b2"))
            assert torch.equal(p, torch.zeros_like(p) if is_bias else torch.ones_like(p)), name


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "baseline"])
def test_arms_share_what_has_one_name_and_shape(arm: str) -> None:
    baseline, other = weights(), weights(**ARMS[arm])
    shared = [name for name in baseline if name in other and baseline[name].shape == other[name].shape]
    assert len(shared) >= 19
    assert "token_embedding.weight" in shared
    assert "blocks.2.attention.key.weight" in shared
    for name in shared:
        assert torch.equal(baseline[name], other[name]), name


def test_no_two_tensors_are_alike() -> None:
    matrices = [p for p in weights(bias=True, query=Bottleneck(width=48)).values() if p.dim() == 2]
    firsts = {p.flatten()[0].item() for p in matrices}
    assert len(firsts) == len(matrices)


def test_seeds_differ_and_repeat() -> None:
    one, again, two = weights(1), weights(1), weights(2)
    for name, p in one.items():
        assert torch.equal(p, again[name])
        assert torch.equal(p, two[name]) == (p.dim() == 1), name


def test_global_random_state_plays_no_part() -> None:
    torch.manual_seed(1)
    one = weights(1)
    torch.manual_seed(2)
    for name, p in weights(1).items():
        assert torch.equal(p, one[name])


def test_one_more_layer_shifts_nobody() -> None:
    three, four = weights(n_layers=3), weights(n_layers=4)
    assert three.keys() < four.keys()
    for name, p in three.items():
        if name.endswith(("attention.output.weight", "mlp.down.weight")):
            torch.testing.assert_close(four[name] * math.sqrt(8), p * math.sqrt(6))
        else:
            assert torch.equal(four[name], p), name


def test_built_without_memory() -> None:
    with torch.device("meta"):
        assert {p.device.type for p in GPT(SMALL).parameters()} == {"meta"}


def test_streams_are_apart() -> None:
    names = [f"{kind}/{i}" for kind in ("init", "order", "dropout") for i in range(50)]
    seeds = {stream_seed(seed, name) for seed in range(20) for name in names}
    assert len(seeds) == 20 * len(names)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stream_seed(1, "init/x") == 8097644697428626074  # for ever: a seed of an old run means the same weights
