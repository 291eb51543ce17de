"""Counts against the design's figures, the built module, and torch's own FLOP counter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from leaves import places
from qurve import presets
from qurve.accounting import Count, count
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.projections import Bottleneck, Identity, ProjectionConfig, Residual

GPT3_SMALL = ModelConfig()
"""12 layers, 12 heads, d 768: the defaults."""


KINDS = [kind() for kind in ProjectionConfig.registry.values()]
QUERIES = [kind for kind in KINDS if "query" in places(kind)]


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


@st.composite
def model_configs(draw: st.DrawFn) -> ModelConfig:
    head_width, n_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    bottlenecks = st.builds(
        Bottleneck,
        anchor=st.sampled_from(["identity", "linear", "none"]),
        width=st.integers(1, 9),
        pre_norm=st.sampled_from(["rmsnorm", "layernorm", "none"]),
        post_norm=st.sampled_from(["rmsnorm", "layernorm", "none"]),
        norm_stage=st.sampled_from(["coupled", "separate"]),
    )
    projection = st.sampled_from(QUERIES) | bottlenecks
    output = st.sampled_from([kind for kind in KINDS if kind.also_reads != "mlp_hidden"]) | bottlenecks
    assume(n_heads * head_width > 1)  # half of one is no bottleneck
    return ModelConfig(
        n_layers=draw(st.integers(1, 3)),
        d_model=n_heads * head_width,
        n_heads=n_heads,
        d_ff=draw(st.integers(1, 20)),
        context=draw(st.integers(1, 12)),
        vocab_size=draw(st.integers(1, 30)),
        query=draw(projection),
        key=draw(projection),
        value=draw(projection),
        output=draw(output),
        bias=draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
    )


def counted_flops(config: ModelConfig, *, backward: bool) -> float:
    """torch's own count for one full context, per token. (On the meta device it sees the attention.)"""
    model, ids_BT = on_meta(config), torch.zeros(2, config.context, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        logits_BTV = model(ids_BT)
        if backward:
            logits_BTV.sum().backward()
    return counter.get_total_flops() / (2 * config.context)


@given(model_configs())
def test_any_model_is_counted_as_built(config: ModelConfig) -> None:
    found = count(config)
    assert (found.non_embedding, found.total) == parameters(on_meta(config))


@pytest.mark.parametrize("name", ["paper/baseline", "paper/res-gelu-best", "paper/identity-mlp-4.5", "smoke"])
def test_flops_are_torchs(name: str) -> None:
    config = dataclasses.replace(presets.get(name).model, n_layers=2)
    assert counted_flops(config, backward=False) == count(config).forward_flops_per_token


@settings(max_examples=40)
@given(model_configs())
def test_forward_flops_are_torchs_for_any_model(config: ModelConfig) -> None:
    assert counted_flops(config, backward=False) == count(config).forward_flops_per_token


@given(model_configs())
def test_flops_are_six_n_and_the_attention(config: ModelConfig) -> None:
    """`6 N + 12 L D T`, where N are the matrices' parameters, the head among them, and no table look-up."""
    model, context = on_meta(config), config.context
    tables = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    tables += context * config.d_model
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2) - tables
    expected = 6 * matrices + 12 * config.n_layers * config.d_model * context
    assert count(config).flops_per_token == expected


@pytest.mark.parametrize("query", [Bottleneck("linear"), *QUERIES], ids=str)
def test_backward_costs_twice_the_forward(query: ProjectionConfig) -> None:
    config = ModelConfig(n_layers=2, d_model=24, n_heads=3, d_ff=40, context=8, vocab_size=32, query=query)
    found = count(config)
    assert found.flops_per_token == 3 * found.forward_flops_per_token
    assert counted_flops(config, backward=True) == found.flops_per_token


def test_fields() -> None:
    assert [field.name for field in dataclasses.fields(Count)] == [
        "non_embedding",
        "total",
        "forward_flops_per_token",
        "flops_per_token",
    ]
