"""Causal attention in blocks against torch's: output and every gradient, whatever the lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qurve.model import attention as models_attention
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


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nothing_is_in_autocasts_dtype_but_what_was_given_in_it(dtype: torch.dtype) -> None:
    """Neither forward nor backward: whoever calls it has cast what is to be cast."""
    qkv, dy_BHTE = tensors(20, dtype)
    plainly = with_gradients(ours, qkv, dy_BHTE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = with_gradients(ours, qkv, dy_BHTE)
    for a, b in zip(inside, plainly, strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_wide(dtype: torch.dtype) -> None:
    """Of numbers that every dtype holds, so that nothing else is rounded: a normaliser as float32 has it, and no
    gradient for queries whose keys are alike, as what is added to all logits changes nothing."""
    (q_BHTE, k_BHTE, v_BHTE), dy_BHTE = (torch.zeros(2, 3, 20, 4, dtype=dtype) for _ in "qkv"), torch.zeros(2, 3, 20, 4)
    q_BHTE[..., 0] = 1
    k_BHTE[..., 0] = torch.randn(2, 3, 20).to(dtype)
    logits_NTT = (0.3 * k_BHTE[..., 0].double()).view(6, 1, 20).masked_fill(torch.ones(20, 20).triu(1) > 0, -torch.inf)
    normaliser_NT1 = attention._forward(q_BHTE, k_BHTE, v_BHTE, 0.3)[1]
    torch.testing.assert_close(normaliser_NT1.double(), logits_NTT.logsumexp(-1, keepdim=True), rtol=0, atol=1e-6)

    alike_BHTE = torch.ones(2, 3, 20, 4, dtype=dtype, requires_grad=True)
    v_BHTE = torch.randint(24, 33, v_BHTE.shape).to(dtype)
    dy_BHTE[:, :, [0, 1, 3, 7]] = 1  # the queries that see 2**n keys
    y_BHTE = causal_attention(alike_BHTE, alike_BHTE.detach(), v_BHTE, 1.0)
    (dq_BHTE,) = torch.autograd.grad(y_BHTE, alike_BHTE, dy_BHTE.to(dtype))
    torch.testing.assert_close(dq_BHTE, torch.zeros_like(dq_BHTE), rtol=0, atol=1e-4)


LONG: dict[str, Any] = {"heads": 4, "kv_heads": 2, "length": 20, "mask": (None, True)}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("changes", "in_blocks"),
    [
        ({}, True),
        ({"kv_heads": 4}, True),
        ({"kv_heads": 1}, True),
        ({"length": 17}, True),
        ({"length": 16}, False),
        ({"compiling": False}, False),
        ({"dropout": 0.5}, False),
        ({"softcap": 3.0}, False),
        ({"mask": (torch.ones(20, 20).tril() > 0, False)}, False),
    ],
    ids=["grouped", "apart", "one", "long", "short", "eager", "dropout", "softcap", "mask"],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_which_attention_is_in_blocks_and_it_is_the_same(
    changes: dict[str, Any], in_blocks: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a compiled model would, without the compiler."""
    options = {**LONG, "compiling": True, **changes}
    shape = {name: options.pop(name) for name in ("length", "heads", "kv_heads")}
    calls: list[torch.dtype] = []
    compiling = options.pop("compiling")

    def counted(q_BHTE: Tensor, *others: Any) -> Tensor:
        calls.append(q_BHTE.dtype)
        return causal_attention(q_BHTE, *others)

    def attending(*qkv: Tensor) -> Tensor:
        torch.manual_seed(0)  # for dropout
        return attend(*qkv, scale=0.3, **options)

    monkeypatch.setattr(models_attention, "SHORT", 16)
    monkeypatch.setattr(models_attention, "causal_attention", counted)
    qkv, dy_BHTE = tensors(dtype=torch.float32, **shape)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        with monkeypatch.context() as inside:
            inside.setattr(torch.compiler, "is_compiling", lambda: compiling)
            found = with_gradients(attending, qkv, dy_BHTE)
        assert calls == [torch.bfloat16 if autocast else torch.float32] * in_blocks
        expected = with_gradients(attending, qkv, dy_BHTE)
    assert len(calls) == in_blocks
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02 if autocast else 1e-4, atol=0.03 if autocast else 1e-5)


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
