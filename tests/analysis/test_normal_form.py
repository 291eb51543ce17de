"""Exact reductions: the same logits from fewer parameters, as many as the functional dimension."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qurve.analysis.normal_form import Reduced, change_basis, reads, reduce, untied, writes
from qurve.analysis.symmetry import generic, hidden_states, jacobian, symmetries
from qurve.errors import BadInput
from qurve.model.config import LayerOverride, ModelConfig, Subspaces
from qurve.model.feed_forward import Gated, MixtureOfExperts
from qurve.model.gpt import GPT
from qurve.model.positions import NoPositions, Rope
from qurve.model.residual import Skip
from qurve.projections import Bottleneck, Identity
from qurve.runfolder import RunFolder
from qurve.zoo.hyper_connections import HyperConnections
from qurve.zoo.linear_attention import LinearAttention

D, V = 6, 7
BASE: dict[str, Any] = {
    "n_layers": 2,
    "d_model": D,
    "n_heads": 2,
    "d_ff": 7,
    "context": 5,
    "vocab_size": V,
    "tie_embeddings": False,
}
RMS: dict[str, Any] = {"norm": "rmsnorm"}
FREE: dict[str, Any] = {"residual": Skip(norms="none")}
SKIPLESS: dict[str, Any] = {"residual": Skip(attention=False, mlp=False)}
SKIPLESS_FREE: dict[str, Any] = {"residual": Skip(norms="none", attention=False, mlp=False)}
IDS_BT = torch.randint(V, (8, 5), generator=torch.Generator().manual_seed(1))
NOT_SPENT = {"shaping", "feed-forward units", "token table"}

MODELS = {
    "layernorm": {},
    "rmsnorm": RMS,
    "norm-free": FREE,
    "layernorm-skipless": SKIPLESS,
    "rmsnorm-skipless": RMS | SKIPLESS,
    "norm-free-skipless": SKIPLESS_FREE,
    "attention-skip-alone": {"residual": Skip(mlp=False)},
    "mlp-skip-alone": RMS | {"residual": Skip(attention=False)},
    "mqa": {"n_kv_heads": 1},
    "swiglu": RMS | {"mlp": Gated()},
    "wide-heads": SKIPLESS_FREE | {"d_head": 4},
    "without-positions": SKIPLESS | {"positions": NoPositions()},
    "shared": RMS | {"share_blocks": True},
    "shared-skipless": SKIPLESS_FREE | {"share_blocks": True},
    "soft-caps": RMS | {"attention_softcap": 2.0, "logit_softcap": 3.0},
}


def build(seed: int = 1, **changes: Any) -> GPT:
    return generic(ModelConfig(**{**BASE, **changes}), seed)


def parameters(model: GPT) -> int:
    return sum(p.numel() for p in model.parameters())


def assert_same_logits(model: GPT, other: GPT, condition: float = 1.0, ids_BT: Tensor = IDS_BT) -> None:
    with torch.no_grad():
        before, after = model.double()(ids_BT), other(ids_BT)
    assert (after - before).norm() < 1e-13 * condition * before.norm()


def left(model: GPT, reduced: Reduced) -> int:
    """Entries of the new model that have to be stored."""
    return parameters(reduced.model) - sum(int(given.sum()) for given in reduced.given.values())


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_logits_stay_and_every_symmetry_is_spent(changes: dict[str, Any]) -> None:
    model = build(**changes)
    reduced = reduce(model)
    assert_same_logits(model, reduced.model, reduced.condition)
    assert reduced.condition < 1e4
    counted = {s.name: s.dimension for s in symmetries(model.config) if s.name not in NOT_SPENT}
    assert reduced.spent == counted
    assert left(model, reduced) == parameters(model) - reduced.removed


@settings(max_examples=10)
@given(st.integers(0, 2**20), st.sampled_from([{}, RMS, FREE, SKIPLESS, SKIPLESS_FREE]))
def test_any_weights_will_do(seed: int, changes: dict[str, Any]) -> None:
    model = build(seed, **changes)
    reduced = reduce(model)
    assert_same_logits(model, reduced.model, reduced.condition)


@pytest.mark.parametrize("changes", [{}, RMS, FREE, SKIPLESS_FREE], ids=["layernorm", "rmsnorm", "free", "skipless"])
def test_each_parameter_that_is_left_counts(changes: dict[str, Any]) -> None:
    """The Jacobian in the entries that are left has full rank: no more can be removed. (Shapings keep a scale.)"""
    sizes = {"n_layers": 1, "d_model": 4, "d_ff": 5, "vocab_size": 5, "context": 4}
    model = build(**sizes, **changes)
    reduced = reduce(model)
    ids_BT = torch.randint(5, (32, 4), generator=torch.Generator().manual_seed(1))
    free = []
    for name, parameter in reduced.model.named_parameters():
        free.append(~reduced.given.get(name, torch.zeros_like(parameter, dtype=torch.bool)).flatten())
    jacobian_NP = jacobian(reduced.model, ids_BT)[:, torch.cat(free)]
    assert jacobian_NP.shape[1] == left(model, reduced)
    values = torch.linalg.svdvals(jacobian_NP / jacobian_NP.norm(dim=0))
    redundant = 2 if changes is SKIPLESS_FREE else 0
    kept, lost = values[: len(values) - redundant], values[len(values) - redundant :]
    assert kept[-1] > 1e-11 * kept[0]
    assert (lost < 1e-14 * kept[0]).all()


def test_blocks_of_the_hidden_states() -> None:
    """Norm-free: identities in the embedding, each feed-forward and the head. RMSNorm: triangles."""
    free = reduce(build(**SKIPLESS_FREE))
    eye = torch.eye(D, dtype=torch.float64)
    for name in ("token_embedding", "blocks.0.mlp.up", "blocks.1.mlp.up", "head"):
        assert torch.equal(free.model.get_parameter(f"{name}.weight")[:D], eye)
    assert torch.equal(free.model.get_parameter("blocks.0.mlp.down.weight")[:, :D], eye)
    assert free.spent["hidden states"] == 5 * D * D
    normed = reduce(build(**RMS, **SKIPLESS))
    for name in ("token_embedding", "blocks.0.mlp.up", "blocks.1.mlp.up", "head"):
        block = normed.model.get_parameter(f"{name}.weight")[:D]
        assert torch.equal(block, block.tril())
        assert (block.diagonal() != 0).all()
    assert normed.spent["hidden states"] == 5 * D * (D - 1) // 2
    assert reduce(build(**RMS)).spent["hidden states"] == D * (D - 1) // 2
    assert reduce(build(**FREE)).spent["hidden states"] == D * D


def test_heads_and_positions_are_spent_too() -> None:
    reduced = reduce(build())
    first = reduced.model.blocks[0].attention
    for projection in (first.key, first.value):
        for head_ED in projection.weight.view(2, 3, -1):
            assert torch.equal(head_ED[:, :3], torch.eye(3, dtype=torch.float64))
    assert not reduced.model.position_embedding.weight[0].any()


def test_a_layernorm_becomes_an_rmsnorm_of_one_channel_less() -> None:
    reduced = reduce(build())
    config = reduced.model.config
    assert (config.norm, config.d_model, config.head_width) == ("rmsnorm", D - 1, D // 2)
    assert config.norm_eps == pytest.approx(1e-5 * D / (D - 1))
    assert all((norm.weight == 1).all() for norm in (reduced.model.final_norm, reduced.model.blocks[0].mlp_norm))


def test_experts_and_rotations_are_carried_along() -> None:
    model = build(**RMS, mlp=MixtureOfExperts(experts=3, active=2))
    reduced = reduce(model)
    assert_same_logits(model, reduced.model)
    assert reduced.spent["hidden states"] == D * (D - 1) // 2
    rotary = build(**SKIPLESS_FREE, positions=Rope(), d_head=4)
    reduced = reduce(rotary)
    assert_same_logits(rotary, reduced.model, reduced.condition)
    assert "queries and keys" not in reduced.spent  # whose basis rotations hold
    assert reduced.spent["values and outputs"] == 2 * 2 * 16
    normed = build(**RMS, qk_norm=True)
    reduced = reduce(normed)
    assert_same_logits(normed, reduced.model)
    assert "queries and keys" not in reduced.spent


@pytest.mark.parametrize("changes", [FREE, RMS, SKIPLESS_FREE], ids=["free", "rmsnorm", "skipless"])
def test_one_state_alone_cannot_change_where_skips_tie_it(changes: dict[str, Any]) -> None:
    model = build(**changes)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.RMSNorm):
                module.weight.fill_(1.0)
    before = model(IDS_BT)
    g_DD = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))).Q
    change_basis(model, hidden_states(model.config)[0], g_DD)
    torch.testing.assert_close(model(IDS_BT), before)
    change_basis(model, [2], g_DD)
    changed = (model(IDS_BT) - before).norm() / before.norm()
    assert changed < 1e-12 if changes is SKIPLESS_FREE else changed > 0.1


def test_every_matrix_reads_and_writes_as_the_model_does() -> None:
    """Each state's readers and writers together are all parameters but norms."""
    model = build()
    read = [name for state in range(5) for name in reads(model, state)]
    written = [name for state in range(5) for name in writes(model, state)]
    assert sorted(read + written) == sorted(n for n, _ in model.named_parameters() if "norm" not in n)


def test_a_tied_head_is_refused_until_it_is_untied() -> None:
    for changes in ({}, FREE):  # norm-free, the head is scaled
        tied = build(**{**changes, "tie_embeddings": True})
        with pytest.raises(BadInput, match=r"untie it \(`untied`\) first"):
            reduce(tied)
        other = untied(tied)
        assert parameters(other) == parameters(tied) + V * D
        assert_same_logits(tied, other)
        reduced = reduce(other)
        assert_same_logits(tied, reduced.model, reduced.condition)
        with torch.no_grad():
            other.head.weight.zero_()
        assert tied.token_embedding.weight.any()
    with pytest.raises(ValueError, match="not tied"):
        untied(other)


def test_the_model_itself_stays_as_it_was() -> None:
    model = build().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert reduce(model).model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    model = build(**RMS, mlp=MixtureOfExperts(experts=2, active=1))
    model.loss(IDS_BT, IDS_BT).backward()
    reduce(model)


def test_a_trained_model_is_reduced_exactly(finished: RunFolder) -> None:
    model = untied(GPT.from_run(finished.path))
    ids_BT = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(1))
    reduced = reduce(model)
    assert_same_logits(model, reduced.model, reduced.condition, ids_BT)
    assert reduced.removed == sum(s.dimension for s in symmetries(model.config))
    assert left(model, reduced) == parameters(model) - reduced.removed


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"residual": HyperConnections()}, "model.residual = hyper mixes"),
        ({"residual": Skip(norms="post")}, "a post-norm's gain"),
        ({"bias": True}, "biases"),
        ({"subspaces": Subspaces(qk=2)}, "model.subspaces"),
        ({"query": Identity()}, "model.query = identity is not linear"),
        ({"query": Bottleneck()}, "model.query = bottleneck is not linear"),
        ({"overrides": (LayerOverride((1,), value=Identity()),)}, "model.value = identity is not linear"),
        ({"mixer": LinearAttention()}, "model.mixer = linear_attention"),
        ({"vocab_size": 5}, "narrower than model.d_model = 6"),
        ({"n_heads": 1}, "as wide as one head"),
        (RMS | {"d_head": 7}, "a head is wider than model.d_model = 6"),
    ],
)
def test_what_holds_the_basis_is_named(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        reduce(GPT(ModelConfig(**{**BASE, **changes})))


def test_singular_weights_are_refused() -> None:
    model = build(**FREE)
    with torch.no_grad():
        model.blocks[0].mlp.up.weight[1] = model.blocks[0].mlp.up.weight[0]
    with pytest.raises(BadInput, match=r"blocks\.0\.mlp\.up\.weight are singular"):
        reduce(model)
    model = build(**FREE)
    with torch.no_grad():
        model.blocks[1].attention.value.weight[3:] = 0
    with pytest.raises(BadInput, match="block 1's value are singular"):
        reduce(model)
