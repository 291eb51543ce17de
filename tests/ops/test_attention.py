"""Causal attention in blocks against torch's: output and every gradient, whatever the lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qurve.model.attention import attend, average
from qurve.ops import attention
from qurve.ops.attention import causal_attention
from qurve.projections.functional import wide


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", 8)
    monkeypatch.setattr(attention, "compiled", lambda function: function)


def tensors(length: int, dtype: torch.dtype, heads: int = 3, kv_heads: int = 3) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values as projections leave them (heads inside tokens), and the output's gradient."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, length, n, 4) for n in (heads, kv_heads, kv_heads, heads)]
    *qkv, dy = (torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes)
    return [t.requires_grad_() for t in qkv], dy


def with_gradients(attention_of: Any, qkv: list[Tensor], dy_BHTE: Tensor) -> list[Tensor]:
    y_BHTE = attention_of(*qkv)
    return [y_BHTE.detach(), *torch.autograd.grad(y_BHTE, qkv, dy_BHTE.to(y_BHTE.dtype))]


def ours(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor) -> Tensor:
    return causal_attention(q_BHTE, k_BHTE, v_BHTE, 0.3)


def torchs(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True, scale=0.3)


@pytest.mark.usefixtures("uncompiled")
@settings(max_examples=30)
@given(st.integers(1, 40))
def test_output_and_gradients_are_torchs(length: int) -> None:
    qkv, dy_BHTE = tensors(length, torch.float64)
    for a, b in zip(with_gradients(ours, qkv, dy_BHTE), with_gradients(torchs, qkv, dy_BHTE), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
        assert a.transpose(1, 2).is_contiguous()  # so that the projections beside it need no copies


def written_out(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor) -> Tensor:
    """As anybody would write it in this dtype: the products in it, the softmax in float32."""
    return average(0.3 * wide(q_BHTE @ k_BHTE.transpose(-1, -2)), v_BHTE, mask=(None, True))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_error_is_at_most_twice_that_of_the_written_out_attention(dtype: torch.dtype) -> None:
    """Against float64, from the same rounded inputs."""
    qkv, dy_BHTE = tensors(63, dtype)
    exact = with_gradients(torchs, [t.detach().double().requires_grad_() for t in qkv], dy_BHTE)
    for name, a, b, c in zip(
        "yqkv", with_gradients(ours, qkv, dy_BHTE), with_gradients(written_out, qkv, dy_BHTE), exact, strict=True
    ):
        ours_off, theirs_off = ((t.double() - c).abs().max().item() for t in (a, b))
        assert ours_off <= 2 * theirs_off + 1e-7, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what it imports to compile
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_model_attends_in_blocks_with_the_same_result(
    kv_heads: int, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, attend_in_blocks = [], attention._attend
    monkeypatch.setattr(attention, "_attend", lambda *args: called.append(1) or attend_in_blocks(*args))
    monkeypatch.setattr(attention, "compiled", lambda function: function)

    def attending(q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor) -> Tensor:
        return attend(q_BHTE, k_BGTE, v_BGTE, mask=(None, True), scale=0.3)

    qkv, dy_BHTE = tensors(150, torch.float32, 4, kv_heads)
    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        compiled = with_gradients(torch.compile(attending, dynamic=False), qkv, dy_BHTE)
        assert called
        eager = with_gradients(attending, qkv, dy_BHTE)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02 if autocast else 1e-4, atol=0.03 if autocast else 1e-5)
