"""The chunked loss against the plain one: value and every gradient, at every way to divide tokens into chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.ops import cross_entropy
from qurve.ops.cross_entropy import linear_cross_entropy, plain

Problem = tuple[Tensor, Tensor, Tensor]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "HELD", 0)
    monkeypatch.setattr(cross_entropy, "CHUNK", 4)
    monkeypatch.setattr(cross_entropy, "GROUP", 12)


def problem(tokens: int, dtype: torch.dtype, ignored: float = 0.2, width: int = 5, vocab: int = 23) -> Problem:
    generator = torch.Generator().manual_seed(tokens)
    hidden_ND = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(vocab, width, generator=generator).to(dtype).requires_grad_()
    targets_N = torch.randint(0, vocab, (tokens,), generator=generator)
    targets_N[torch.rand(tokens, generator=generator) < ignored] = -100
    targets_N[0] = 3  # one counts, or the mean is of nothing
    return hidden_ND, weight_VD, targets_N


LOSSES = (linear_cross_entropy, plain)


def with_gradients(loss_of: Any, given: Problem, softcap: float | None) -> list[Tensor]:
    hidden_ND, weight_VD, targets_N = given
    loss = loss_of(hidden_ND, weight_VD, targets_N, softcap)
    return [loss.detach(), *torch.autograd.grad(-2 * loss, (hidden_ND, weight_VD))]


@pytest.mark.usefixtures("small_chunks")
@settings(max_examples=60)
@given(st.integers(1, 40), st.sampled_from([None, 0.7, 30.0]), st.sampled_from([0.0, 0.2, 0.9]))
def test_value_and_gradients_are_the_plain_ones(tokens: int, softcap: float | None, ignored: float) -> None:
    given = problem(tokens, torch.float64, ignored)
    for ours, theirs in zip(
        with_gradients(linear_cross_entropy, given, softcap), with_gradients(plain, given, softcap), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_error_is_at_most_twice_the_plain_ones(dtype: torch.dtype) -> None:
    """Against float64, from the same rounded inputs. One group: several round as several micro-batches would."""
    given = problem(12, dtype)
    exact = with_gradients(plain, tuple(t.detach().double().requires_grad_() for t in given[:2]) + given[2:], None)
    ours, theirs = (with_gradients(loss_of, given, None) for loss_of in (linear_cross_entropy, plain))
    for name, a, b, c in zip(("loss", "hidden", "weight"), ours, theirs, exact, strict=True):
        ours_off, theirs_off = ((t.double() - c).abs().max().item() for t in (a, b))
        assert ours_off <= 2 * theirs_off + torch.finfo(torch.float32).eps * c.abs().max(), name


@pytest.mark.usefixtures("small_chunks")
def test_under_autocast_products_are_in_its_dtype_and_the_weight_gets_a_float32_gradient() -> None:
    hidden_ND, weight_VD, targets_N = problem(30, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden_ND, weight_VD, targets_N, None)
    rounded = (hidden_ND.bfloat16(), weight_VD.bfloat16(), targets_N)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, linear_cross_entropy(*rounded, None))
    loss.backward()
    assert weight_VD.grad is not None
    assert weight_VD.grad.dtype == torch.float32


@pytest.mark.usefixtures("small_chunks")
def test_the_operator_takes_its_dtype_from_its_inputs_alone() -> None:
    hidden_ND, weight_VD, targets_N = problem(30, torch.float32)
    arguments = (hidden_ND.detach(), weight_VD.detach(), targets_N, 0.7, True, False)
    plainly = cross_entropy._chunked(*arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = cross_entropy._chunked(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(inside, plainly, strict=True))


@pytest.mark.usefixtures("small_chunks")
def test_never_more_than_a_groups_logits_exist_and_without_gradient_a_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    softmax = cross_entropy._softmax

    def watched(logits_NV: Tensor, *rest: Any) -> Tensor:
        rows.append(logits_NV.untyped_storage().nbytes() // (logits_NV.element_size() * logits_NV.shape[1]))
        return softmax(logits_NV, *rest)

    monkeypatch.setattr(cross_entropy, "_softmax", watched)
    given = problem(31, torch.float32)
    linear_cross_entropy(*given, None)
    assert set(rows) == {12}
    rows.clear()
    with torch.no_grad():
        loss = linear_cross_entropy(*given, None)
    assert set(rows) == {4}
    torch.testing.assert_close(loss, plain(*given, None).detach())


@pytest.mark.usefixtures("small_chunks")
def test_second_derivatives_are_refused_not_wrong() -> None:
    hidden_ND, *others = problem(20, torch.float32)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(linear_cross_entropy(hidden_ND, *others, None), hidden_ND, create_graph=True)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("target", [-5, 23])
def test_a_target_that_is_no_id_is_refused(target: int) -> None:
    hidden_ND, weight_VD, targets_N = problem(20, torch.float32)
    targets_N[7] = target
    with pytest.raises(IndexError):
        linear_cross_entropy(hidden_ND, weight_VD, targets_N, None)


def test_few_logits_take_the_plain_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(10, torch.float32)
    monkeypatch.setattr(cross_entropy, "_softmax", None)  # what the chunks would need
    assert torch.equal(linear_cross_entropy(*given, None), plain(*given, None))
    monkeypatch.setattr(cross_entropy, "HELD", 10 * 23)
    assert torch.equal(linear_cross_entropy(*given, None), plain(*given, None))
    monkeypatch.setattr(cross_entropy, "HELD", 10 * 23 - 1)
    with pytest.raises(TypeError, match="not callable"):
        linear_cross_entropy(*given, None)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("trained", [0, 1], ids=["hidden", "weight"])
def test_one_of_the_two_may_be_trained_alone(trained: int) -> None:
    given = problem(30, torch.float64)
    given[1 - trained].requires_grad_(False)
    ours, theirs = (torch.autograd.grad(loss_of(*given, None), given[trained]) for loss_of in LOSSES)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("tied", [True, False])
def test_a_models_loss_and_gradients_do_not_depend_on_it(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(n_layers=1, d_model=12, n_heads=2, d_ff=24, context=16, vocab_size=40, tie_embeddings=tied)
    generator = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(0, 40, (2, 3, 16), generator=generator)

    def gradients() -> dict[str, Tensor]:
        model = GPT(config)
        loss = model.loss(ids, targets)
        loss.backward()
        return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}

    chunked = gradients()
    monkeypatch.setattr(cross_entropy, "HELD", 10**9)
    whole = gradients()
    assert chunked.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(chunked[name], value, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what it imports to compile
@pytest.mark.usefixtures("small_chunks")
def test_compiled_it_is_the_same() -> None:
    compiled = torch.compile(linear_cross_entropy, dynamic=False)
    for softcap in (None, 0.7):
        given = problem(37, torch.float32)
        for ours, theirs in zip(
            with_gradients(compiled, given, softcap), with_gradients(plain, given, softcap), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
