"""Counts against the design's figures, the built module, and torch's own FLOP counter."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from qurve import presets
from qurve.accounting import count, state_bytes
from qurve.accounting.routing import RoutingWithoutValues
from qurve.errors import BadInput
from qurve.model.cache import Cache
from qurve.model.config import LayerOverride, ModelConfig, Subspaces
from qurve.model.feed_forward import Gated, MixtureOfExperts
from qurve.model.feed_forward_modules import ExpertFeedForward
from qurve.model.gpt import GPT
from qurve.model.mixers import MixerConfig
from qurve.model.positions import NoPositions, Rope
from qurve.model.residual import ResidualConfig, Skip
from qurve.projections import Bottleneck, Identity, ProjectionConfig, Residual

GPT3_SMALL = ModelConfig()
"""12 layers, 12 heads, d 768: the defaults."""


def on_meta(config: ModelConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def parameters(model: GPT) -> tuple[int, int]:
    """Non-embedding and total, of the built module."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    outside = ("token_embedding.weight", "position_embedding.weight", "head.weight")
    return sum(n for name, n in sizes.items() if name not in outside), sum(sizes.values())


@pytest.mark.parametrize(
    ("changes", "non_embedding"),
    [
        ({}, 84_953_856),
        ({"query": Bottleneck()}, 84_953_856 + 18_432),
        ({"d_ff": 3648}, 95_570_688),
        ({"query": Identity(), "d_ff": 3456}, 84_953_856),
        ({"query": Residual()}, 84_953_856),
        ({"context": 7}, 84_953_856),
        ({"vocab_size": 7}, 84_953_856),
        ({"tie_embeddings": False}, 84_953_856),
    ],
    ids=["baseline", "paper", "mlp-4.75", "identity-mlp-4.5", "residual", "context", "vocabulary", "untied"],
)
def test_known_sizes(changes: dict[str, Any], non_embedding: int) -> None:
    assert count(dataclasses.replace(GPT3_SMALL, **changes)).non_embedding == non_embedding


def test_known_totals() -> None:
    embeddings, positions = 50_304 * 768, 1024 * 768
    assert count(GPT3_SMALL).total == 84_953_856 + embeddings + positions
    assert count(dataclasses.replace(GPT3_SMALL, tie_embeddings=False)).total == 84_953_856 + 2 * embeddings + positions


def test_the_papers_layer_costs_next_to_nothing() -> None:
    baseline, paper = count(GPT3_SMALL), count(dataclasses.replace(GPT3_SMALL, query=Bottleneck()))
    assert f"{100 * (paper.non_embedding / baseline.non_embedding - 1):.4f}" == "0.0217"
    assert paper.flops_per_token == baseline.flops_per_token  # the products are as large; norms are not counted
    wide = count(dataclasses.replace(GPT3_SMALL, d_ff=3648))
    assert f"{100 * (wide.non_embedding / baseline.non_embedding - 1):.2f}" == "12.50"


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_is_counted_as_built(name: str) -> None:
    config = presets.get(name).model
    found = count(config)
    assert (found.non_embedding, found.total) == parameters(on_meta(config))


ODDITIES: list[dict[str, Any]] = [
    {"query": Bottleneck(anchor="linear")},
    {"d_head": 6, "n_heads": 4, "n_kv_heads": 2},
    {"n_heads": 4, "n_kv_heads": 1},
    {"positions": Rope(), "d_head": 4},
    {"positions": NoPositions()},
    {"norm": "rmsnorm", "qk_norm": True},
    {"bias": True},
    {"bias": True, "norm": "rmsnorm"},
    {"tie_embeddings": False},
    {"mlp": Gated()},
    {"mlp": MixtureOfExperts(experts=3, active=2)},
    {"window": 3},
    {"attends": "prefix"},
    {"attention_softcap": 5.0, "logit_softcap": 5.0},
    {"subspaces": Subspaces(q=1, qk=2, kv=3)},
    {"overrides": (LayerOverride((1,), query=Residual(), mlp=Gated(), window=2),)},
    {"overrides": (LayerOverride((0, 2), key=Bottleneck(anchor="linear"), mlp=MixtureOfExperts(2, 1)),)},
    {"share_blocks": True},
    *({name: kind()} for name in ("query", "key", "value", "output") for kind in ProjectionConfig.registry.values()),
    *({"mixer": kind()} for kind in MixerConfig.registry.values()),
    *({"residual": kind()} for kind in ResidualConfig.registry.values()),
    *(
        {"residual": Skip(*choice)}
        for choice in itertools.product(("pre", "post", "none"), (True, False), (True, False))
    ),
]
"""Every option that has a cost, and every kind that is registered."""


@st.composite
def model_configs(draw: st.DrawFn) -> ModelConfig:
    """A small model with several of the oddities, of those that may be together."""
    config = ModelConfig(
        n_layers=draw(st.integers(1, 3)),
        d_model=4 * draw(st.integers(1, 4)),
        n_heads=draw(st.sampled_from([1, 2, 4])),
        d_ff=draw(st.integers(1, 20)),
        context=draw(st.integers(1, 12)),
        vocab_size=draw(st.integers(1, 30)),
    )
    for changes in draw(st.lists(st.sampled_from(ODDITIES), max_size=6)):
        with contextlib.suppress(ValueError):
            config = dataclasses.replace(config, **changes)
    return config


def counted_flops(config: ModelConfig, *, backward: bool = False, batch: int = 2) -> float:
    """torch's own count for one full context, per token. (On the meta device it sees the attention.)"""
    model, ids_BT = on_meta(config), torch.zeros(batch, config.context, dtype=torch.long, device="meta")
    prefix_B = torch.ones(batch, dtype=torch.long, device="meta") if config.attends == "prefix" else None
    with RoutingWithoutValues(), FlopCounterMode(display=False) as counter:
        logits_BTV = model(ids_BT, prefix_B=prefix_B)
        if backward:
            logits_BTV.sum().backward()
    return counter.get_total_flops() / ids_BT.numel()


def with_a_cache(config: ModelConfig, held: int, new: int) -> float:
    """torch's count, per token, of `new` tokens that follow `held`."""
    model, cache = on_meta(config), Cache(config, 2, device="meta")
    prefix_B = torch.ones(2, dtype=torch.long, device="meta") if config.attends == "prefix" else None
    with RoutingWithoutValues():
        for length, counter in ((held, contextlib.nullcontext()), (new, FlopCounterMode(display=False))):
            if length:
                ids_BT, start = torch.zeros(2, length, dtype=torch.long, device="meta"), cache.filled
                with counter:
                    model(ids_BT, cache, prefix_B=None if start else prefix_B)
    return counter.get_total_flops() / (2 * new)


def assert_parameters_are_as_built(config: ModelConfig) -> None:
    found, model, idle = count(config), on_meta(config), 0
    assert (found.non_embedding, found.total) == parameters(model)
    for module in model.modules():
        if isinstance(module, ExpertFeedForward):
            idle += sum(p.numel() for expert in module.experts[module.kind.active :] for p in expert.parameters())
    assert found.active == found.non_embedding - idle


@settings(max_examples=50)
@given(model_configs())
def test_any_model_is_counted_as_built(config: ModelConfig) -> None:
    assert_parameters_are_as_built(config)


@pytest.mark.parametrize("name", ["paper/baseline", "paper/res-gelu-best", "paper/identity-mlp-4.5", "smoke"])
def test_flops_are_torchs(name: str) -> None:
    config = dataclasses.replace(presets.get(name).model, n_layers=2)
    assert counted_flops(config) == count(config).forward_flops_per_token


@settings(max_examples=25)
@given(model_configs())
def test_forward_flops_are_torchs_for_any_model(config: ModelConfig) -> None:
    assert counted_flops(config) == count(config).forward_flops_per_token


@settings(max_examples=15)
@given(model_configs(), st.data())
def test_flops_of_a_prompt_and_of_the_next_token_are_torchs(config: ModelConfig, data: st.DataObject) -> None:
    assume(config.context > 1)
    length, found = data.draw(st.integers(1, config.context - 1)), count(config)
    assert with_a_cache(config, 0, length) == found.prefill_flops(length)
    assert with_a_cache(config, length, 1) == found.decode_flops(length)


def test_experts_really_cost_so_much_whatever_the_router_chooses() -> None:
    """The counts above stand on made-up routings; here is a true one, on the CPU."""
    mlp = MixtureOfExperts(experts=4, active=2)
    config = ModelConfig(n_layers=2, d_model=12, n_heads=2, d_ff=8, context=13, vocab_size=29, mlp=mlp)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        GPT(config)(torch.randint(29, (3, 13)))
    assert counter.get_total_flops() == 3 * 13 * count(config).forward_flops_per_token


def test_flops_are_six_n_and_the_attention() -> None:
    """`6 N + 12 L D T`, where N are the matrices' parameters, the head among them, and no table look-up."""
    found = count(dataclasses.replace(GPT3_SMALL, query=Bottleneck()))
    matrices = 12 * 12 * 768 * 768 + 50_304 * 768
    assert found.flops_per_token == 6 * matrices + 12 * 12 * 768 * 1024


SMALL = ModelConfig(n_layers=3, d_model=24, n_heads=4, d_ff=40, context=8, vocab_size=32)


@pytest.mark.parametrize("changes", ODDITIES, ids=str)
def test_every_option_is_counted_forward_backward_and_decoding(changes: dict[str, Any]) -> None:
    try:
        config = dataclasses.replace(SMALL, **changes)
    except ValueError:
        pytest.skip("refused")
    assert_parameters_are_as_built(config)
    found = count(config)
    assert counted_flops(config) == found.forward_flops_per_token
    assert counted_flops(config, backward=True) == found.forward_flops_per_token + found.backward_flops_per_token
    assert found.flops_per_token == found.forward_flops_per_token + found.backward_flops_per_token
    assert with_a_cache(config, 0, 5) == found.prefill_flops(5)
    assert with_a_cache(config, 5, 1) == found.decode_flops(5)
    assert with_a_cache(config, 0, 1) == found.decode_flops(0)


# ------------------------------------------------------------------------------------------------------ decoding state


def tensors_in(state: object) -> list[torch.Tensor]:
    """All that a mixer's state holds, however deep."""
    if isinstance(state, torch.Tensor):
        return [state]
    parts = state if isinstance(state, list | tuple) else getattr(state, "__dict__", {}).values()
    return [tensor for part in parts for tensor in tensors_in(part)]


@given(model_configs(), st.integers(1, 3), st.sampled_from([torch.float32, torch.bfloat16]))
def test_decoding_state_is_as_large_as_the_caches_tensors(config: ModelConfig, batch: int, dtype: torch.dtype) -> None:
    length = min(7, config.context)
    cache = Cache(config, batch, length, device="meta", dtype=dtype)
    held = sum(tensor.nbytes for tensor in tensors_in(cache.states))
    assert held == state_bytes(config, batch, length, dtype.itemsize)


def test_what_a_bidirectional_model_would_need_for_decoding_is_not_answered() -> None:
    config = dataclasses.replace(SMALL, attends="bidirectional")
    for ask in (count(config).prefill_flops, count(config).decode_flops, lambda n: state_bytes(config, 1, n)):
        with pytest.raises(BadInput, match="bidirectional"):
            ask(1)
    assert counted_flops(config, backward=True) == count(config).flops_per_token


@pytest.mark.parametrize("length", [-1, 0, 9])
def test_flops_are_those_of_a_context_that_there_is(length: int) -> None:
    with pytest.raises(BadInput, match=r"takes 1 to 8"):
        count(SMALL).prefill_flops(length)
    with pytest.raises(BadInput, match=r"takes 1 to 8"):
        count(SMALL).decode_flops(length - 1)
