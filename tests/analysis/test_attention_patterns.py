"""Attention weights and their divergence: against torch's own attention, and on heads whose partners are known."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qurve.analysis.attention_patterns import _bits, _divergences, compare_attention, weights
from qurve.analysis.mechanism import Window, evaluating, run
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.model.positions import Rope
from qurve.projections import Bottleneck
from qurve.zoo.linear_attention import LinearAttention

T, E = 7, 4
BASE: dict[str, Any] = {"n_layers": 2, "d_model": 12, "n_heads": 3, "d_ff": 8, "context": T, "vocab_size": 29}


def build(seed: int = 0, **changes: Any) -> GPT:
    model = GPT(ModelConfig(**{**BASE, **changes}), seed=1).double().eval()
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            parameter.normal_(0, 0.7, generator=torch.Generator().manual_seed(100 * seed + place))
    return model


def text(windows: int) -> list[Window]:
    ids = torch.randint(29, (windows, T + 1), generator=torch.Generator().manual_seed(3))
    return [(row[None, :-1], row[None, 1:]) for row in ids]


WINDOWS = text(4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"query": Bottleneck(), "n_kv_heads": 1},
        {"positions": Rope(), "qk_norm": True},
        {"window": 3},
        {"attends": "bidirectional"},
        {"attention_softcap": 0.5, "attention_scale": 0.7},
    ],
    ids=["plain", "nonlinear-mqa", "rope-qk-norm", "window", "bidirectional", "scale-cap"],
)
def test_weights_are_those_that_attention_takes(changes: dict[str, Any]) -> None:
    """Times the values they give what the model's own attention gives."""
    model = build(**changes)
    calls: list[tuple[Any, Any]] = []
    handles = [
        block.attention.register_forward_pre_hook(lambda m, inputs: calls.append((m, inputs))) for block in model.blocks
    ]
    with evaluating(model):
        run(model, WINDOWS[0])
    for handle in handles:
        handle.remove()
    for (attention, (inputs, view, hidden, state)), weight_BHTS in zip(calls, weights(model, WINDOWS[0]), strict=True):
        _, _, v_BGTE = attention.enter(inputs, view, hidden, state)
        v_BHTE = v_BGTE.repeat_interleave(3 // v_BGTE.shape[1], dim=1)
        assert torch.allclose(weight_BHTS @ v_BHTE, attention.mixed(inputs, view, hidden, state))
        assert torch.allclose(weight_BHTS.sum(-1), torch.ones(1, 3, T, dtype=torch.float64))


def test_a_model_is_not_far_from_itself_whatever_the_order_of_its_heads() -> None:
    model, other = build(), build()
    order = [2, 0, 1]
    with torch.no_grad():
        for name in ("query", "key", "value"):
            weight = getattr(other.blocks[1].attention, name).weight
            weight.copy_(weight.view(3, E, -1)[order].flatten(0, 1))
        output = other.blocks[1].attention.output.weight
        output.copy_(output.view(-1, 3, E)[:, order].flatten(1))
    first, second = compare_attention(model, other, WINDOWS)
    assert first.partners == (0, 1, 2)
    assert second.partners == (1, 2, 0)  # where head 0, 1, 2 went
    for block in (first, second):
        assert block.divergence == pytest.approx((0, 0, 0), abs=1e-12)
        assert block.entropy == pytest.approx(block.partner_entropy)


def entropy(p: list[float]) -> float:
    return -sum(i * math.log2(i) for i in p if i > 0)


def divergence(p: list[float], q: list[float]) -> float:
    return entropy([(i + j) / 2 for i, j in zip(p, q, strict=True)]) - (entropy(p) + entropy(q)) / 2


def test_divergence_and_entropy_by_hand() -> None:
    model, other = build(seed=1), build(seed=2, query=Bottleneck())
    ours, theirs = ([[w[0].tolist() for w in weights(m, one)] for one in WINDOWS] for m in (model, other))
    for layer, block in enumerate(compare_attention(model, other, WINDOWS)):
        for head, partner in enumerate(block.partners):
            p = [row for window in ours for row in window[layer][head]]
            q = [row for window in theirs for row in window[layer][partner]]
            assert block.entropy[head] == pytest.approx(fmean(map(entropy, p)))
            assert block.partner_entropy[head] == pytest.approx(fmean(map(entropy, q)))
            assert block.divergence[head] == pytest.approx(fmean(map(divergence, p, q)))
        assert len(block.by_window) == len(WINDOWS)
        assert fmean(block.by_window) == pytest.approx(fmean(block.divergence))
        assert sorted(block.partners) == [0, 1, 2]


def test_queries_of_zero_attend_uniformly() -> None:
    model = build()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.query.weight.zero_()
    uniform = sum(math.log2(t + 1) for t in range(T)) / T
    for block in compare_attention(model, build(), WINDOWS):
        assert block.entropy == pytest.approx((uniform,) * 3)
        assert max(block.partner_entropy) < uniform


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.integers(0, 999), st.floats(0.1, 30))
def test_divergences_are_symmetric_and_between_zero_and_one_bit(tokens: int, seed: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = (sharpness * torch.randn(1, 2, 3, tokens, generator=generator, dtype=torch.float64) for _ in "ab")
    a, b = a.softmax(-1), b.softmax(-1)
    found = _divergences(a, b)
    assert torch.allclose(found, _divergences(b, a).T)
    assert found.min() >= 0
    assert found.max() <= 1
    assert torch.allclose(_divergences(a, a).diagonal(), torch.zeros(2, dtype=torch.float64), atol=1e-12)


def test_heads_that_share_no_token_are_one_bit_apart() -> None:
    a, b = torch.eye(4).view(1, 1, 4, 4), torch.eye(4).flip(0).view(1, 1, 4, 4)
    assert _divergences(a, b).item() == 1.0
    assert _bits(torch.full((4,), 0.25)).item() == 2.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 4}, r"model\.n_heads is 3 here, 4 there"),
        ({"n_layers": 3}, r"model\.n_layers is 2 here, 3 there"),
        ({"vocab_size": 30}, r"model\.vocab_size is 29 here, 30 there"),
        ({"context": 6}, r"model\.context is 7 here, 6 there"),
        ({"attends": "bidirectional"}, r"model\.attends is causal here, bidirectional there"),
        ({"mixer": LinearAttention()}, "attention patterns are a softmax"),
    ],
)
def test_what_cannot_be_compared_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare_attention(build(), build(**changes), WINDOWS)


def test_shared_blocks_are_compared_pass_by_pass_and_models_stay() -> None:
    model = build(share_blocks=True, dropout=0.2).train()
    found = compare_attention(model, build(), WINDOWS)
    assert [block.layer for block in found] == [0, 1]
    assert found[0].entropy != pytest.approx(found[1].entropy)
    assert model.training
    assert not any(block.attention._forward_pre_hooks for block in model.blocks)
