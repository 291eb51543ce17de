"""The bases of heads: what may be changed, what depends on it and what does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from qurve.analysis.gauges import (
    Pair,
    asymmetry,
    balance,
    change_heads,
    charge,
    factors,
    head_norms,
    logit_asymmetry,
)
from qurve.analysis.symmetry import generic
from qurve.model.attention import Attention
from qurve.model.config import LayerOverride, ModelConfig
from qurve.model.gpt import GPT
from qurve.model.positions import Rope
from qurve.model.residual import Skip
from qurve.projections import Bottleneck, Identity, Residual
from qurve.zoo.linear_attention import LinearAttention
from qurve.zoo.primer import Primer

D, E, T, V = 12, 3, 6, 11
BASE: dict[str, Any] = {"n_layers": 2, "d_model": D, "n_heads": 4, "d_ff": 8, "context": T, "vocab_size": V}
IDS_BT = torch.randint(V, (3, T), generator=torch.Generator().manual_seed(1))
PAIRS: tuple[Pair, Pair] = ("logits", "values")
GROUPS = {"mha": 4, "gqa": 2, "mqa": 1}


def build(seed: int = 1, **changes: Any) -> GPT:
    return generic(ModelConfig(**{**BASE, **changes}), seed)


def drawn(groups: int, seed: int = 3, e: int = E) -> Tensor:
    return torch.randn(groups, e, e, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def orthogonal(groups: int) -> Tensor:
    return torch.linalg.qr(drawn(groups)).Q


def attention(model: GPT, layer: int = 0) -> Attention:
    found = model.get_submodule(f"blocks.{layer}.attention")
    assert isinstance(found, Attention)
    return found


def changed(model: GPT, pair: Pair, a_GEE: Tensor) -> GPT:
    model = copy.deepcopy(model)
    change_heads(attention(model), pair, a_GEE)
    return model


def loss(model: GPT) -> Tensor:
    return model.loss(IDS_BT[:, :-1], IDS_BT[:, 1:])


@torch.enable_grad()
def gradients(model: GPT) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss(model), parameters), strict=True))


def far_apart(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() > 1e-3 * b.norm())


@settings(max_examples=12)
@given(st.sampled_from(sorted(GROUPS.values())), st.sampled_from(PAIRS), st.booleans(), st.integers(0, 2**20))
def test_a_change_of_a_heads_basis_changes_no_logit(groups: int, pair: Pair, bias: bool, seed: int) -> None:
    model = build(seed, n_layers=1, n_kv_heads=groups, bias=bias)
    other = changed(model, pair, drawn(groups, seed))
    torch.testing.assert_close(other(IDS_BT), model(IDS_BT), rtol=1e-9, atol=1e-9)
    for before, after in zip(factors(attention(model), pair), factors(attention(other), pair), strict=True):
        assert far_apart(after, before)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_the_product_stays(groups: int, pair: Pair) -> None:
    model = build(n_kv_heads=groups)
    products = [
        near_GNE @ far_GNE.mT
        for near_GNE, far_GNE in (factors(attention(m), pair) for m in (model, changed(model, pair, drawn(groups))))
    ]
    torch.testing.assert_close(*products)


def test_factors_by_hand() -> None:
    """`near far^T` is `W_Q W_K^T` of each query head below the others of its group, and `(W_V W_O)^T` likewise."""
    first = attention(build(n_kv_heads=2))
    near_GNE, far_GNE = factors(first, "logits")
    for head in range(4):
        q_DE, k_DE = (w[E * h : E * h + E].T for w, h in ((first.query.weight, head), (first.key.weight, head // 2)))
        rows = slice(D * (head % 2), D * (head % 2) + D)
        torch.testing.assert_close(near_GNE[head // 2, rows] @ far_GNE[head // 2].T, q_DE @ k_DE.T)
    near_GNE, far_GNE = factors(first, "values")
    for head in range(4):
        v_DE, o_ED = first.value.weight[E * (head // 2) :][:E].T, first.output.weight[:, E * head : E * head + E].T
        rows = slice(D * (head % 2), D * (head % 2) + D)
        torch.testing.assert_close(near_GNE[head // 2] @ far_GNE[head // 2, rows].T, v_DE @ o_ED)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotary_positions_take_turned_and_scaled_pairs_alone(layout: Any) -> None:
    model = build(positions=Rope(layout=layout), d_head=4, n_kv_heads=2)
    turns_GEE = torch.zeros(2, 4, 4, dtype=torch.float64)
    for i, j in [(0, 2), (1, 3)] if layout == "half" else [(0, 1), (2, 3)]:
        real, imaginary = torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        turns_GEE[:, i, i], turns_GEE[:, j, j], turns_GEE[:, i, j], turns_GEE[:, j, i] = (
            real,
            real,
            imaginary,
            -imaginary,
        )
    torch.testing.assert_close(changed(model, "logits", turns_GEE)(IDS_BT), model(IDS_BT), rtol=1e-9, atol=1e-9)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="rotary positions"):
        change_heads(attention(model), "logits", drawn(2, e=4))
    with pytest.raises(ValueError, match="rotary positions"):
        change_heads(attention(model), "logits", turns_GEE + 1e-6 * drawn(2, e=4))  # nearly is not enough
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    change_heads(attention(model), "values", drawn(2, e=4))  # values are not rotated
    torch.testing.assert_close(model(IDS_BT), changed(model, "logits", turns_GEE)(IDS_BT), rtol=1e-9, atol=1e-9)
    balance(attention(model), "logits")
    assert charge(attention(model), "logits").abs().max() > 1e-3  # a scale for each pair is all there is
    scale_GEE = torch.eye(4, dtype=torch.float64).repeat(2, 1, 1) * 1.01
    norms = [n.near**2 + n.far**2 for n in head_norms(attention(model), "logits")]
    for a_GEE in (scale_GEE, 1 / scale_GEE.where(scale_GEE > 0, torch.inf)):
        off = head_norms(attention(changed(model, "logits", a_GEE)), "logits")
        assert all(n.near**2 + n.far**2 > least for n, least in zip(off, norms, strict=True))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_balance_is_the_least_that_norms_can_be(groups: int, pair: Pair) -> None:
    model = changed(build(n_kv_heads=groups), pair, drawn(groups))
    before = head_norms(attention(model), pair)
    balanced = copy.deepcopy(model)
    balance(attention(balanced), pair)
    torch.testing.assert_close(balanced(IDS_BT), model(IDS_BT), rtol=1e-9, atol=1e-9)
    assert charge(attention(balanced), pair).abs().max() < 1e-9
    near_GNE, far_GNE = factors(attention(model), pair)
    for head, (old, new) in enumerate(zip(before, head_norms(attention(balanced), pair), strict=True)):
        nuclear = torch.linalg.matrix_norm(near_GNE[head] @ far_GNE[head].T, "nuc").item()
        assert old.nuclear == pytest.approx(nuclear)
        assert new.nuclear == pytest.approx(nuclear)
        assert (new.near**2 + new.far**2) / 2 == pytest.approx(nuclear)
        assert old.excess > 1.01
        assert new.excess == pytest.approx(1)


@pytest.mark.parametrize("pair", PAIRS)
def test_gradients_know_of_the_freedom(pair: Pair) -> None:
    """`near^T dL/dnear = (dL/dfar)^T far` at every point, so that gradient flow keeps `near^T near - far^T far`."""
    model = build(n_kv_heads=2)
    first, found = attention(model), gradients(model)
    shadow = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in shadow.named_parameters():
            parameter.copy_(found[name])
    for (near, far), (d_near, d_far) in [(factors(first, pair), factors(attention(shadow), pair))]:
        assert d_near.norm() > 1e-3
        torch.testing.assert_close(near.mT @ d_near, d_far.mT @ far, rtol=1e-9, atol=1e-12)

    def drift(rate: float) -> float:
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for name, parameter in moved.named_parameters():
                parameter -= rate * found[name]
        return (charge(attention(moved), pair) - charge(first, pair)).norm().item()

    assert drift(0.02) == pytest.approx(4 * drift(0.01), rel=1e-6)


@pytest.mark.parametrize("pair", PAIRS)
def test_what_training_sees_and_what_it_does_not(pair: Pair) -> None:
    """Loss and other weights' gradients stay; those of the factors change against them, and so do all norms."""
    model = build()
    a_GEE = drawn(4)
    other = changed(model, pair, a_GEE)
    assert loss(other).item() == pytest.approx(loss(model).item(), rel=1e-12)
    before, after = gradients(model), gradients(other)
    near, far = (
        f"blocks.0.attention.{n}.weight" for n in (("query", "key") if pair == "logits" else ("value", "output"))
    )
    for name in before:
        if name not in (near, far):
            torch.testing.assert_close(after[name], before[name], rtol=1e-8, atol=1e-10)
    # W -> W A makes dL/dW -> dL/dW A^-T; weights are [out, in]
    inverse_GEE = torch.linalg.inv(a_GEE)
    torch.testing.assert_close(
        after[near].view(4, E, D), inverse_GEE @ before[near].view(4, E, D), rtol=1e-8, atol=1e-10
    )
    assert far_apart(after[near].norm(), before[near].norm())


def sgd(gradient: Tensor) -> Tensor:
    return gradient


def adam(gradient: Tensor) -> Tensor:
    """Its first step."""
    return gradient / (gradient.abs() + 1e-8)


@torch.no_grad()
def stepped(model: GPT, step: Callable[[Tensor], Tensor]) -> Tensor:
    model, found = copy.deepcopy(model), gradients(model)
    for name, parameter in model.named_parameters():
        parameter -= 0.05 * step(found[name])
    return model(IDS_BT)


@pytest.mark.parametrize("pair", PAIRS)
def test_orthogonal_changes_matter_to_adam_and_not_to_sgd(pair: Pair) -> None:
    model = build()
    turned, skewed = changed(model, pair, orthogonal(4)), changed(model, pair, drawn(4))
    torch.testing.assert_close(stepped(turned, sgd), stepped(model, sgd), rtol=1e-8, atol=1e-9)
    assert far_apart(stepped(skewed, sgd), stepped(model, sgd))
    assert far_apart(stepped(turned, adam), stepped(model, adam))


@pytest.mark.parametrize("bias", [False, True])
def test_equal_queries_and_keys_make_symmetric_logits(bias: bool) -> None:
    model = build(bias=bias)
    first = attention(model)
    first.key.load_state_dict(first.query.state_dict())
    by_weights, by_logits = asymmetry(model), logit_asymmetry(model, IDS_BT)
    assert by_weights[0] == pytest.approx([0] * 4, abs=1e-12)
    assert by_logits[0] == pytest.approx([0] * 4, abs=1e-12)
    assert min(by_weights[1] + by_logits[1]) > 0.01


def test_asymmetry_by_hand() -> None:
    """From the matrices written out, behind the norm: its gain in them, and no mean."""
    model = build(n_kv_heads=2)
    block = model.blocks[1]
    gain_D, z_DD = block.attention_norm.weight, torch.eye(D, dtype=torch.float64) - 1 / D
    for head, share in enumerate(asymmetry(model)[1]):
        q_ED, k_ED = block.attention.query.weight[E * head :][:E], block.attention.key.weight[E * (head // 2) :][:E]
        m_DD = z_DD @ torch.diag(gain_D) @ q_ED.T @ k_ED @ torch.diag(gain_D) @ z_DD
        assert share == pytest.approx(((m_DD - m_DD.T).norm() ** 2 / (2 * m_DD).norm() ** 2).item())


def test_asymmetry_does_not_depend_on_any_basis() -> None:
    model = build(norm="rmsnorm")
    before = asymmetry(model)
    other = changed(model, "logits", drawn(4))
    with torch.no_grad():  # the gain against what reads it
        norm, first = other.blocks[0].attention_norm, attention(other)
        for projection in (first.query, first.key, first.value):
            projection.weight /= 2.5
        norm.weight *= 2.5
    torch.testing.assert_close(other(IDS_BT), model(IDS_BT))
    assert asymmetry(other)[0] == pytest.approx(before[0])


def test_asymmetry_goes_from_nought_to_one() -> None:
    model = build(n_heads=1, n_layers=1, residual=Skip(norms="none"))
    first = attention(model)
    with torch.no_grad():
        generator_DD = torch.randn(D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        first.query.weight.copy_(torch.eye(D))
        first.key.weight.copy_(generator_DD - generator_DD.T)
    assert asymmetry(model)[0] == pytest.approx([1])
    assert logit_asymmetry(model, IDS_BT)[0] == pytest.approx([1])
    wide = build(d_model=96, d_ff=8, n_heads=4)  # weights that know nothing of each other
    assert all(share == pytest.approx(0.5, abs=0.05) for shares in asymmetry(wide) for share in shares)


def test_anchored_queries_have_a_weight_where_they_are_linear() -> None:
    model = build(query=Identity(), key=Residual(), n_layers=1)
    first = attention(model)
    plain = build(n_layers=1)
    with torch.no_grad():
        attention(plain).query.weight.copy_(torch.eye(D))
        attention(plain).key.weight.copy_((torch.eye(D) + first.key.weight) / 2)
        plain.blocks[0].attention_norm.weight.copy_(model.blocks[0].attention_norm.weight)
    assert asymmetry(model)[0] == pytest.approx(asymmetry(plain)[0])


@pytest.mark.parametrize("groups", [1, 2])
def test_logit_asymmetry_by_hand(groups: int) -> None:
    model = build(query=Bottleneck(), n_layers=1, n_kv_heads=groups, qk_norm=True)
    assert asymmetry(model) == [None]
    block = model.blocks[0]
    x_BTD = block.attention_norm(model.token_embedding(IDS_BT) + model.position_embedding(torch.arange(T)))
    k_BTGE = block.attention.key_norm(block.attention.key(x_BTD).unflatten(-1, (groups, E)))
    for head, share in enumerate(logit_asymmetry(model, IDS_BT)[0]):
        q_BTE = block.attention.query_norm(block.attention.query(x_BTD)[..., E * head : E * head + E])
        s_BTT = q_BTE @ k_BTGE[:, :, head * groups // 4].mT
        assert share == pytest.approx(((s_BTT - s_BTT.mT).square().sum() / (2 * s_BTT).square().sum()).item())


def test_blocks_without_logits_give_none() -> None:
    mixed = build(overrides=(LayerOverride((1,), mixer=LinearAttention()),), query=Identity())
    assert [shares is None for shares in asymmetry(mixed)] == [False, True]
    assert [shares is None for shares in logit_asymmetry(mixed, IDS_BT)] == [False, True]
    mixed = build(mixer=Primer())  # whose queries and keys are mixed with their neighbours before they meet
    assert asymmetry(mixed) == [None, None]
    assert None not in logit_asymmetry(mixed, IDS_BT)
    shared = build(share_blocks=True, n_layers=3)
    assert len(logit_asymmetry(shared, IDS_BT)) == 3
    assert logit_asymmetry(shared, IDS_BT)[0] != logit_asymmetry(shared, IDS_BT)[1]
    prefix = build(attends="prefix")
    few, many = (logit_asymmetry(prefix, IDS_BT, prefix_B=torch.full((3,), length)) for length in (0, T))
    assert few[0] == many[0]  # before anything has been attended to
    assert few[1] != many[1]
    assert not any(block.attention._forward_pre_hooks for block in prefix.blocks)


def test_what_has_no_basis_is_refused() -> None:
    for changes, pair, why in (
        ({"query": Bottleneck()}, "logits", "the query is no plain linear"),
        ({"value": Identity()}, "values", "the value is no plain linear"),
        ({"qk_norm": True}, "logits", "model.qk_norm"),
    ):
        model = build(**changes)
        with pytest.raises(ValueError, match=why):
            change_heads(attention(model), pair, drawn(4))
    with pytest.raises(ValueError, match="Primer"):
        change_heads(build(mixer=Primer()).blocks[0].attention, "logits", drawn(4))
    model = build()
    with pytest.raises(ValueError, match=r"\[2, 3, 3\]; it has to be \[4, 3, 3\]"):
        change_heads(attention(model), "logits", drawn(2))
    with pytest.raises(ValueError, match="singular"):
        change_heads(attention(model), "logits", torch.zeros(4, E, E))
    with torch.no_grad():
        attention(model).key.weight[:E] = 1.0
    with pytest.raises(ValueError, match="no balance"):
        balance(attention(model), "logits")
    attention(model).query.register_forward_hook(lambda module, arguments, out: out)
    with pytest.raises(ValueError, match="no plain linear"):
        change_heads(attention(model), "logits", drawn(4))


def test_half_precision_weights_keep_their_dtype() -> None:
    model = build().float()
    before = model(IDS_BT)
    change_heads(attention(model), "logits", drawn(4))
    assert attention(model).query.weight.dtype == torch.float32
    assert isinstance(attention(model).query.weight, nn.Parameter)
    torch.testing.assert_close(model(IDS_BT), before, rtol=1e-3, atol=1e-3)
