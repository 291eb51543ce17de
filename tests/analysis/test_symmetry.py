"""The counts of symmetries against the Jacobian's rank, and against what is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qurve import presets
from qurve.analysis import symmetry
from qurve.analysis.symmetry import functional_dimension, generic, hidden_states, jacobian, symmetries
from qurve.errors import BadInput
from qurve.model.config import LayerOverride, ModelConfig, Subspaces
from qurve.model.feed_forward import Dense, Gated, MixtureOfExperts
from qurve.model.positions import NoPositions, Rope
from qurve.model.residual import Skip
from qurve.projections import Bottleneck, Identity
from qurve.zoo.linear_attention import LinearAttention

BASE: dict[str, Any] = {
    "n_layers": 1,
    "d_model": 4,
    "n_heads": 2,
    "d_ff": 5,
    "context": 4,
    "vocab_size": 5,
    "tie_embeddings": False,
}
RMS: dict[str, Any] = {"norm": "rmsnorm"}
FREE: dict[str, Any] = {"residual": Skip(norms="none")}
# Without skips each norm all but forgets the scale of its state: its eps, which does not, is made large.
SKIPLESS: dict[str, Any] = {"residual": Skip(attention=False, mlp=False), "norm_eps": 0.1}
SKIPLESS_FREE: dict[str, Any] = {"residual": Skip(norms="none", attention=False, mlp=False)}
TIED: dict[str, Any] = {"tie_embeddings": True}
NO_POSITIONS: dict[str, Any] = {"positions": NoPositions()}
IDENTITY: dict[str, Any] = {"query": Identity()}
# With a small eps the paper's layer is all but invariant to the scale of the norm before it, and its rank less clear.
PAPER: dict[str, Any] = {"query": Bottleneck(eps=0.1), "norm_eps": 0.1}
TWO: dict[str, Any] = {"n_layers": 2}
WIDE: dict[str, Any] = {"d_model": 6, "d_ff": 7, "vocab_size": 7}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**BASE, **changes})


def dimension(**changes: Any) -> int:
    return sum(found.dimension for found in symmetries(config(**changes)))


def check(changes: dict[str, Any], clear: float = 1e4) -> None:
    """The measured redundancy is what is counted."""
    model = generic(config(**changes), seed=1)
    found = functional_dimension(model, batch(model))
    assert found.gap > clear
    assert found.redundancy == dimension(**changes)


def batch(model: Any, times: float = 2.0) -> torch.Tensor:
    """Random sequences with so many times as many logits as there are parameters."""
    parameters, c = sum(p.numel() for p in model.parameters()), model.config
    sequences = int(times * parameters / (c.context * c.vocab_size)) + 1
    return torch.randint(c.vocab_size, (sequences, c.context), generator=torch.Generator().manual_seed(1))


QUICK = {
    "layernorm": {},
    "rmsnorm": RMS,
    "norm-free": FREE,
    "layernorm-skipless": SKIPLESS,
    "rmsnorm-skipless": RMS | SKIPLESS,
    "norm-free-skipless": SKIPLESS_FREE,
    "tied": TIED,
    "norm-free-tied": FREE | TIED,
    "norm-free-skipless-tied": SKIPLESS_FREE | TIED,
    "layernorm-identity": IDENTITY,
    "rmsnorm-identity": RMS | IDENTITY,
    "norm-free-identity": FREE | IDENTITY,
    "layernorm-papers": PAPER,
    "rmsnorm-papers": RMS | PAPER,
    "mqa": {"n_kv_heads": 1},
    "one-head": {"n_heads": 1},
    "heads-wider-than-the-model": RMS | {"d_head": 5},
    "wide-head-of-two-queries": RMS | {"d_head": 5, "n_kv_heads": 1},
    "rotary-wide-heads": RMS | {"d_head": 6, "positions": Rope(theta=3.0)},
    "reglu": RMS | {"mlp": Gated("relu")},
    "layernorm-swiglu": {"mlp": Gated()},
}
SLOW = {
    "attention-skip-alone": RMS | TWO | {"residual": Skip(mlp=False), "norm_eps": 0.1},
    "mlp-skip-alone": RMS | TWO | {"residual": Skip(attention=False), "norm_eps": 0.1},
    "norm-free-attention-skip-alone": TWO | {"residual": Skip(norms="none", mlp=False)},
    "norm-free-mlp-skip-alone": TWO | {"residual": Skip(norms="none", attention=False)},
    "two-layernorm": TWO,
    "two-rmsnorm": RMS | TWO,
    "two-norm-free": FREE | TWO,
    "two-layernorm-skipless": SKIPLESS | TWO,
    "two-rmsnorm-skipless": RMS | SKIPLESS | TWO,
    "two-norm-free-skipless": SKIPLESS_FREE | TWO,
    "rmsnorm-tied": RMS | TIED | TWO,
    "rmsnorm-skipless-tied": RMS | SKIPLESS | TIED,
    "layernorm-skipless-tied": SKIPLESS | TIED | TWO,
    "layernorm-skipless-tied-wide": SKIPLESS | TIED | WIDE,
    "layernorm-tied-wide": TIED | WIDE,
    "layernorm-tied-half-skipless": TIED | TWO | {"residual": Skip(attention=False), "norm_eps": 0.1},
    "tied-without-positions": TIED | NO_POSITIONS,
    "two-layernorm-identity": IDENTITY | TWO,
    "two-norm-free-identity": FREE | IDENTITY | TWO,
    "norm-free-skipless-identity": SKIPLESS_FREE | IDENTITY | TWO,
    "norm-free-tied-identity": FREE | TIED | IDENTITY | TWO,
    "norm-free-skipless-tied-identity": SKIPLESS_FREE | TIED | IDENTITY | TWO,
    "rmsnorm-skipless-identity": RMS | SKIPLESS | IDENTITY | TWO,
    "layernorm-skipless-identity": SKIPLESS | IDENTITY | TWO,
    "wide-heads-identity": IDENTITY | {"d_model": 8, "d_ff": 8, "vocab_size": 8},
    "one-identity-of-two": RMS | TWO | {"overrides": (LayerOverride((1,), query=Identity()),)},
    "one-papers-of-two": RMS | TWO | {"overrides": (LayerOverride((1,), query=Bottleneck(eps=0.1)),), "norm_eps": 0.1},
    "tied-papers": TIED | PAPER | TWO,
    "norm-free-papers": FREE | PAPER | TWO,
    "skipless-papers": SKIPLESS | PAPER | TWO,
    "mqa-norm-free-identity": {"n_kv_heads": 1} | FREE | IDENTITY | TWO,
    "mqa-rmsnorm-identity": {"n_kv_heads": 1} | RMS | IDENTITY | TWO,
    "mqa-layernorm-identity": {"n_kv_heads": 1} | IDENTITY | TWO,
    "relu2": RMS | TWO | {"mlp": Dense("relu2")},
    "swiglu": RMS | TWO | {"mlp": Gated()},
    "wide-attention": RMS | {"d_head": 3},
    "rmsnorm-without-positions": RMS | NO_POSITIONS,
    "rmsnorm-table": RMS | SKIPLESS | NO_POSITIONS,
    "layernorm-table": SKIPLESS | NO_POSITIONS,
    "rmsnorm-table-identity": RMS | SKIPLESS | NO_POSITIONS | IDENTITY,
    "layernorm-table-identity": SKIPLESS | NO_POSITIONS | IDENTITY,
    "rmsnorm-table-mqa-identity": RMS | SKIPLESS | NO_POSITIONS | IDENTITY | {"n_kv_heads": 1},
    "layernorm-table-mqa-identity": SKIPLESS | NO_POSITIONS | IDENTITY | {"n_kv_heads": 1},
    "shared": RMS | TWO | {"share_blocks": True},
    "shared-skipless": RMS | SKIPLESS | TWO | {"share_blocks": True},
    "shared-norm-free-skipless": SKIPLESS_FREE | {"n_layers": 3, "share_blocks": True},
}


@pytest.mark.parametrize("changes", QUICK.values(), ids=QUICK.keys())
def test_counted_symmetries_are_the_redundancy(changes: dict[str, Any]) -> None:
    check(changes)


@pytest.mark.slow
@pytest.mark.parametrize("changes", SLOW.values(), ids=SLOW.keys())
def test_counted_symmetries_are_the_redundancy_of_more_models(changes: dict[str, Any]) -> None:
    check(changes)


def test_rotary_positions_leave_each_pair_a_turn_and_a_scale() -> None:
    check(RMS | {"positions": Rope(theta=3.0), "d_head": 4})
    assert dimension(**RMS, positions=Rope(), d_head=4) == dimension(**RMS, **NO_POSITIONS, d_head=4) - 2 * (16 - 4)


NANOGPT: dict[str, Any] = {"d_model": 8, "n_heads": 4, "d_ff": 32, "context": 8, "vocab_size": 8}


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_counts_of_nanogpt_as_published(layers: int) -> None:
    """Karbevski's table of nanoGPT: d = 8, four heads of two, vocabulary and context of 8, untied, N layers, L = 2 N.

    Skipless, ours has 12 shaping weights a layer more, four of them redundant.
    """
    n, blocks, small = layers, 2 * layers, {**NANOGPT, "n_layers": layers}
    assert dimension(**small) == 144 * n + 60
    assert dimension(**small, **SKIPLESS) == 144 * n + 60 + 21 * blocks + 4 * n
    assert dimension(**small, **FREE) == 32 * n + 72
    assert dimension(**small, **SKIPLESS_FREE) == 32 * n + 72 + 64 * blocks + 4 * n


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, FREE, SKIPLESS, SKIPLESS_FREE], ids=["pre", "free", "skipless", "both"])
def test_rank_of_nanogpt_as_published(changes: dict[str, Any]) -> None:
    check(NANOGPT | changes)


def test_each_missing_skip_frees_one_basis() -> None:
    """`L` skips remove `L D^2` dimensions, or under RMSNorm `L D (D - 1) / 2`, and under LayerNorm that of `D - 1`."""
    big = {"n_layers": 12, "d_model": 768, "n_heads": 12, "d_ff": 3072, "context": 1024, "vocab_size": 50304}
    for changes, basis in ((FREE, 768 * 768), (RMS, 768 * 767 // 2), ({}, 767 * 766 // 2)):
        skips = changes.get("residual", Skip())
        none = Skip(norms=skips.norms, attention=False, mlp=False)
        with_skips, without = dimension(**big, **changes), dimension(**big, **{**changes, "residual": none})
        assert without - with_skips == 24 * basis + 12 * 12  # and the shapings
        one = {found.name: found.dimension for found in symmetries(config(**big, **changes))}["hidden states"]
        assert one == basis
    assert [len(hidden_states(config(**big, **c))) for c in ({}, SKIPLESS)] == [1, 25]


def test_hidden_states_share_what_joins_them() -> None:
    two = {"n_layers": 2}
    assert hidden_states(config(**two)) == [[0, 1, 2, 3, 4]]
    assert hidden_states(config(**two, residual=Skip(attention=False))) == [[0], [1, 2], [3, 4]]
    assert hidden_states(config(**two, residual=Skip(mlp=False))) == [[0, 1], [2, 3], [4]]
    assert hidden_states(config(**two, **SKIPLESS)) == [[0], [1], [2], [3], [4]]
    assert hidden_states(config(**two, **SKIPLESS, share_blocks=True)) == [[0, 2, 4], [1, 3]]
    assert hidden_states(config(**SKIPLESS, share_blocks=True)) == [[0], [1], [2]]


def test_what_the_identity_costs_in_a_residual_network() -> None:
    """`W_Q = I` takes `L D^2` parameters away, but only one D^2 of them was a basis: the rest were heads' or free."""
    layers, d, heads = 3, 8, 2
    sizes = {"n_layers": layers, "d_model": d, "n_heads": heads, "d_ff": 8, "vocab_size": 8}
    e = d // heads
    spared = dimension(**sizes, **FREE) - dimension(**sizes, **FREE, **IDENTITY)
    assert spared == d * d + (layers - 1) * heads * e * e
    single = {**sizes, "n_layers": 1}
    assert dimension(**single, **FREE) - dimension(**single, **FREE, **IDENTITY) == d * d  # exact: nothing is lost
    skipless = dimension(**sizes, **SKIPLESS_FREE) - dimension(**sizes, **SKIPLESS_FREE, **IDENTITY)
    assert skipless == layers * d * d  # and again


def test_the_papers_layer_leaves_queries_and_keys_no_basis() -> None:
    arms = (presets.get(f"paper/{arm}").model for arm in ("baseline", "res-gelu-best"))
    names = [{found.name for found in symmetries(arm)} for arm in arms]
    assert names[0] - names[1] == {"queries and keys"}
    assert names[1] - names[0] == {"query bottleneck"}


def test_rounding_is_no_rank() -> None:
    values = torch.tensor([1.0, 0.5, 1e-3, 1e-13, 1e-17, 0.0], dtype=torch.float64)
    place, gap = symmetry._rank(values)
    assert (place, gap) == (3, pytest.approx(1e10))
    assert symmetry._rank(values[:3])[0] == 3


def test_what_is_too_little_or_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = generic(config())
    parameters = sum(p.numel() for p in model.parameters())
    least = -(-parameters // 20)
    with pytest.raises(ValueError, match=f"give at least {least} sequences"):
        jacobian(model, batch(model)[: least - 1])
    monkeypatch.setattr(symmetry, "MOST_ENTRIES", 20 * least * parameters - 1)
    with pytest.raises(ValueError, match="too large"):
        jacobian(model, batch(model)[:least])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"bias": True}, "model.bias"),
        ({"qk_norm": True}, "model.qk_norm"),
        ({"residual": Skip(norms="post")}, "model.residual"),
        ({"subspaces": Subspaces(qk=2)}, "model.subspaces"),
        ({"mixer": LinearAttention()}, "model.mixer = linear_attention"),
        ({"mlp": MixtureOfExperts()}, "model.mlp = moe"),
        ({"mlp": Dense("identity")}, "the activation identity"),
        ({"value": Identity()}, "not all linear"),
        ({"query": Bottleneck(activation="relu")}, "neither linear, nor the identity"),
        ({"query": Identity(), "positions": Rope()}, "rotary"),
        ({"query": Identity(), "n_heads": 1}, "one head"),
        ({"query": Bottleneck(), "n_heads": 1}, "of one head, or of one unit"),
        ({"query": Bottleneck(width=1)}, "of one head, or of one unit"),
        ({"query": Bottleneck(), **SKIPLESS, **NO_POSITIONS}, "token table"),
        ({"vocab_size": 3}, "narrower than model.d_model = 4"),
        ({"window": 2}, "fewer than three tokens"),
        (TWO | {"overrides": (LayerOverride((1,), mlp=MixtureOfExperts()),)}, "model.mlp = moe"),
    ],
)
def test_what_nobody_has_counted_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        symmetries(config(**changes))
