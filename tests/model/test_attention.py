"""Attention: its scale, its mask, and the float32 shortcut over short sequences."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from qurve.model import attention
from qurve.model.attention import SHORT, HeadNorm, attend
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.model.view import View
from qurve.projections import Bottleneck, Identity, Linear, Residual

TINY = ModelConfig(n_layers=2, d_model=12, n_heads=3, d_ff=20, context=11, vocab_size=17)


def inputs(length: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(2, 3, length, 8).to(dtype) for _ in range(3)]


def causal(new: int, total: int) -> tuple[Any, bool]:
    """The mask of the last `new` of `total` tokens."""
    return View("causal", total - new, new, torch.device("cpu")).mask()


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    logits = scale * q @ k.transpose(-1, -2)
    allowed = torch.arange(k.shape[2]) <= torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
    weights = torch.exp(logits.masked_fill(~allowed, -torch.inf))
    return weights / weights.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("scale", [0.0625, 0.5])
@pytest.mark.parametrize("new", [1, 3, 7])
def test_attends_to_the_past(new: int, scale: float) -> None:
    q, k, v = inputs(7, torch.float64)
    q = q[:, :, -new:]
    expected = softmax_attention(q, k, v, scale)
    assert_close(attend(q, k, v, mask=causal(new, 7), scale=scale), expected)
    if new == 7:
        assert_close(attend(q, k, v, mask=(None, True), scale=scale), expected)


def test_mask_lets_each_new_token_see_itself_and_all_before() -> None:
    assert causal(2, 4)[0].tolist() == [[[[True, True, True, False], [True, True, True, True]]]]
    assert causal(1, 4) == (None, False)
    assert causal(4, 4) == (None, True)


@pytest.mark.parametrize("length", [SHORT, SHORT + 1], ids=["short", "long"])
def test_half_precision_is_close_and_short_sequences_are_closer(length: int) -> None:
    q, k, v = inputs(length, torch.bfloat16)
    exact = softmax_attention(q.double(), k.double(), v.double(), 0.35)
    found = attend(q, k, v, mask=(None, True), scale=0.35)
    error = ((found.double() - exact).norm() / exact.norm()).item()
    assert error < (1e-6 if length == SHORT else 0.02)
    assert found.dtype == (torch.float32 if length == SHORT else torch.bfloat16)


def test_short_and_long_paths_are_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids_BT = GPT(TINY).eval(), torch.randint(17, (2, 11))
    with torch.no_grad():
        exact = model(ids_BT)
        with torch.autocast("cpu", torch.bfloat16):
            short = model(ids_BT)
            monkeypatch.setattr(attention, "SHORT", 0)
            long = model(ids_BT)
    assert short.dtype == long.dtype == torch.bfloat16
    for found in (short, long):
        assert (found - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize(
    ("in_the_layer", "in_the_scale"),
    [
        (Bottleneck(scale=0.5), Bottleneck(scale=1.0)),
        (Residual(scale=0.5), Residual(scale=1.0)),
        (Bottleneck("linear", scale=0.5), Bottleneck("linear", scale=1.0)),
    ],
    ids=["paper", "residual", "linear-anchor"],
)
def test_the_half_may_stand_in_the_layer_or_in_the_scale(in_the_layer: Any, in_the_scale: Any) -> None:
    base = dataclasses.replace(TINY, query=in_the_layer)
    layer = GPT(base).double().eval()
    scale = GPT(dataclasses.replace(base, query=in_the_scale, attention_scale=base.scale / 2)).double().eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    scale.load_state_dict(layer.state_dict())
    ids_BT = torch.randint(17, (2, 11))
    assert_close(scale(ids_BT), layer(ids_BT), rtol=1e-12, atol=1e-13)
    neither = GPT(dataclasses.replace(base, query=in_the_scale)).double().eval()
    neither.load_state_dict(layer.state_dict())
    assert not torch.allclose(neither(ids_BT), layer(ids_BT))


def test_identity_query_needs_no_weight() -> None:
    """`W_Q = I` with a halved scale is a linear query whose weight is half the identity."""
    identity = GPT(dataclasses.replace(TINY, query=Identity(), attention_scale=TINY.scale / 2)).double()
    linear = GPT(dataclasses.replace(TINY, query=Linear())).double()
    halves = {f"blocks.{i}.attention.query.weight": torch.eye(12) / 2 for i in range(2)}
    linear.load_state_dict(identity.state_dict() | halves)
    ids_BT = torch.randint(17, (2, 11))
    assert_close(linear(ids_BT), identity(ids_BT))


def test_heads_are_normalised_in_float32_and_handed_on_in_their_dtype() -> None:
    norm, x = HeadNorm(8, 1e-5), torch.randn(2, 3, 5, 8)
    with torch.no_grad():
        norm.weight += torch.randn(8)
    assert_close(norm(x), torch.nn.functional.rms_norm(x, (8,), norm.weight, 1e-5))
    half = x.bfloat16()
    assert torch.equal(norm(half), norm(half.float()).bfloat16())
