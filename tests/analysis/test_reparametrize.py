"""Equation 1: attention in another basis computes the same, and what does not commute is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qurve.analysis.reparametrize import WORST_ROUNDING, affine, reparametrize
from qurve.model.attention import Attention
from qurve.model.config import ModelConfig, Subspaces
from qurve.model.gpt import GPT
from qurve.model.positions import Rope, rotate, rotations
from qurve.model.residual import Skip
from qurve.projections import Bottleneck, Identity, Linear, Residual
from qurve.zoo.linear_attention import LinearAttention
from qurve.zoo.mlp_attention import MLPAttention
from qurve.zoo.primer import Primer
from qurve.zoo.projections import GatedOutput

D, T = 12, 7
BASE: dict[str, Any] = {"n_layers": 2, "d_model": D, "n_heads": 3, "d_ff": 10, "context": T, "vocab_size": 29}
EXACT = {"rtol": 0, "atol": 1e-10}


def build(**changes: Any) -> GPT:
    """In float64, with weights larger than at the start."""
    model = GPT(ModelConfig(**{**BASE, **changes}), seed=1).double().eval()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(seed))
    return model


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def attended(model: GPT, attention: Attention, x_BTD: Tensor, **limits: Tensor) -> Tensor:
    view = model.view(torch.zeros(len(x_BTD), T, dtype=torch.long), **limits)
    y_BTD: Tensor = attention((x_BTD,), view)
    return y_BTD


KINDS: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"n_heads": 6, "n_kv_heads": 2},
    "mqa": {"n_kv_heads": 1, "d_head": 6},
    "rope": {"positions": Rope(), "n_kv_heads": 1},
    "interleaved": {"positions": Rope("interleaved", scaling="llama3"), "qk_norm": True},
    "capped": {"attention_softcap": 2.0, "attention_scale": 0.7, "bias": True},
    "window": {"window": 3},
    "bidirectional": {"attends": "bidirectional"},
    "prefix": {"attends": "prefix"},
    "skipless": {"residual": Skip("none", False, False)},
    "anchored": {"query": Identity(), "key": Residual(), "bias": True},
    "primer": {"mixer": Primer()},
    "kernel": {"mixer": LinearAttention(), "positions": Rope()},
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5)
@given(seed=st.integers(0, 10**6), spread=st.floats(0.0, 2.0))
def test_output_is_the_same_in_any_basis(kind: str, seed: int, spread: float) -> None:
    model = build(**KINDS[kind])
    attention = model.blocks[0].attention
    theta_DD = drawn(D, D, seed=seed) @ torch.diag(torch.logspace(-spread / 2, spread / 2, D, dtype=torch.float64))
    x_BTD = drawn(2, T, D, seed=seed + 1)
    prefix = {"prefix_B": torch.tensor([2, 5])} if kind == "prefix" else {}
    changed, condition = reparametrize(attention, theta_DD)
    assert condition == pytest.approx(torch.linalg.cond(theta_DD).item())
    before = attended(model, attention, x_BTD, **prefix)
    off = (attended(model, changed, x_BTD @ theta_DD, **prefix) - before).abs().max()
    assert off < max(1e-10, 1e-13 * condition)  # nothing but rounding, which the condition number magnifies


@pytest.mark.parametrize("masks", ["padding", "documents"])
def test_any_mask_is_let_be(masks: str) -> None:
    model, x_BTD, theta_DD = build(positions=Rope()), drawn(2, T, D), drawn(D, D, seed=3)
    allowed_BTT = torch.rand(1, T, T, generator=torch.Generator().manual_seed(1)) < 0.5
    limits = {"padding_B": torch.tensor([0, 3])} if masks == "padding" else {"allowed_BTT": allowed_BTT}
    changed, _ = reparametrize(model.blocks[0].attention, theta_DD)
    before = attended(model, model.blocks[0].attention, x_BTD, **limits)
    torch.testing.assert_close(attended(model, changed, x_BTD @ theta_DD, **limits), before, **EXACT)


def test_the_query_becomes_the_identity_and_the_original_stays() -> None:
    model = build()
    attention = model.blocks[0].attention
    before = {name: p.clone() for name, p in attention.state_dict().items()}
    w_q_DD, _ = affine(attention.query)
    changed, _ = reparametrize(attention, w_q_DD)
    torch.testing.assert_close(changed.query.weight.detach(), torch.eye(D, dtype=torch.float64), **EXACT)
    assert all(torch.equal(p, before[name]) for name, p in attention.state_dict().items())
    assert torch.equal(changed.output.weight, attention.output.weight)


def test_a_known_condition_number_and_what_is_too_nearly_singular() -> None:
    model, scales_D = build(), torch.ones(D, dtype=torch.float64)
    scales_D[0] = 1e-6
    assert reparametrize(model.blocks[0].attention, torch.diag(scales_D)).condition == pytest.approx(1e6)
    for smallest in (WORST_ROUNDING * 1e-14, 0.0):
        scales_D[0] = smallest
        with pytest.raises(ValueError, match=r"theta is singular, or too nearly so: its condition number is"):
            reparametrize(model.blocks[0].attention, torch.diag(scales_D))
    scales_D[0] = 1e-6  # good enough in float64, not in float32
    with pytest.raises(ValueError, match=r"in float32 at most 8\.39e\+04 leaves"):
        reparametrize(model.float().blocks[0].attention, torch.diag(scales_D))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": Bottleneck()}, r"the query is 'bottleneck', which is not linear"),
        ({"key": Bottleneck()}, r"the key is 'bottleneck'"),
        ({"output": GatedOutput()}, r"the output projection, 'gated', reads the block's input too"),
        ({"mixer": MLPAttention()}, r"the mixer does not read its input through queries, keys and values alone"),
        ({"subspaces": Subspaces(q=2)}, r"the query reads channels of model\.subspaces"),
    ],
)
def test_what_reads_its_input_otherwise_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reparametrize(build(**changes).blocks[1].attention, drawn(D, D))


def test_a_wrapped_projection_is_refused() -> None:
    attention = build().blocks[0].attention
    attention.value.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(ValueError, match=r"the value is a Projection that somebody has wrapped, hooked or replaced"):
        reparametrize(attention, drawn(D, D))


@pytest.mark.parametrize(
    ("theta_DD", "message"),
    [(drawn(D, D - 1), r"\[12, 11\]"), (drawn(D - 1, D - 1), r"\[11, 11\]"), (drawn(D, D) / 0, "not finite")],
)
def test_what_is_no_change_of_basis_is_refused(theta_DD: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reparametrize(build().blocks[0].attention, theta_DD)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_between_a_query_and_its_key_rotations_let_pairwise_turns_pass_alone(layout: Any) -> None:
    """`(q A) . (k A^-T)`, rotated, is `q . k`, rotated, if A turns and scales pairs, and for others it is not: so the
    input of a block can take W_Q over under rotary positions, and W_K cannot."""
    rope, width = Rope(layout), 6
    rotation = rotations(rope, torch.arange(T)[None], width)
    q, k = drawn(1, 1, T, width), drawn(1, 1, T, width, seed=1)

    def logits(a_EE: Tensor) -> Tensor:
        turned = rotate(rope, q @ a_EE, rotation), rotate(rope, k @ torch.linalg.inv(a_EE).T, rotation)
        return turned[0] @ turned[1].transpose(-1, -2)

    pairs = [(2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + width // 2) for i in range(width // 2)]
    pairwise_EE = torch.zeros(width, width, dtype=torch.float64)
    for number, (a, b) in enumerate(pairs):
        turn, scale = torch.tensor(0.3 + number), 0.5 + number
        pairwise_EE[a, a] = pairwise_EE[b, b] = scale * turn.cos()
        pairwise_EE[a, b], pairwise_EE[b, a] = scale * turn.sin(), -scale * turn.sin()
    plain = logits(torch.eye(width, dtype=torch.float64))
    # cosines and sines are rounded to float32, so that a rotation is one to that precision; the turns still commute
    torch.testing.assert_close(logits(pairwise_EE), plain, **EXACT)
    assert (logits(drawn(width, width, seed=2)) - plain).abs().max() > 0.1


def test_linear_maps_are_written_as_matrices() -> None:
    x_TD = drawn(T, D)
    for kind in (Linear(), Identity(), Residual()):
        projection = kind.build(D, D, bias=True).double()
        for seed, parameter in enumerate(projection.parameters()):
            parameter.data.copy_(drawn(*parameter.shape, seed=seed))
        w_DO, b_O = affine(projection)
        found = x_TD @ w_DO + (0 if b_O is None else b_O)
        torch.testing.assert_close(found, projection(x_TD).detach(), **EXACT)
