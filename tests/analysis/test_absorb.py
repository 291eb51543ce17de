"""Absorbed weights: the logits stay, the counts are those of the theory, and obstacles are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qurve.accounting import count
from qurve.analysis.absorb import absorb, absorb_queries, make_plan
from qurve.analysis.redundancy import difference
from qurve.config import to_dict
from qurve.data.loader import TokenData
from qurve.errors import BadInput
from qurve.generate.decoder import Decoder
from qurve.model.config import LayerOverride, ModelConfig, Subspaces
from qurve.model.feed_forward import Dense, Gated, MixtureOfExperts
from qurve.model.gpt import GPT
from qurve.model.positions import Learned, NoPositions, Rope
from qurve.model.residual import Skip
from qurve.projections import Bottleneck, Identity, Linear, Residual
from qurve.train.loop import train
from qurve.zoo.hyper_connections import HyperConnections
from qurve.zoo.primer import Primer
from tiny import tiny

L, D, T, V = 3, 8, 6, 19
BASE: dict[str, Any] = {"n_layers": L, "d_model": D, "n_heads": 2, "d_ff": 12, "context": T, "vocab_size": V}
IDS_BT = torch.randint(V, (3, T), generator=torch.Generator().manual_seed(1))
SKIPLESS, ATTENTION_SKIP, MLP_SKIP = Skip("none", False, False), Skip("none", True, False), Skip("none", False, True)
NORM_FREE = Skip("none")
WEIGHTS = ("query", "key", "value", "output")


def build(**changes: Any) -> GPT:
    """In float64, with weights larger than at the start and gains that differ."""
    model = GPT(ModelConfig(**{**BASE, **changes}), seed=1).double().eval()
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.4, generator=torch.Generator().manual_seed(seed))
    return model


def is_same(before: GPT, after: GPT) -> bool:
    return difference(before, after, IDS_BT).relative < 1e-10


def numbers(model: GPT) -> int:
    return sum(p.numel() for p in model.parameters())


def outcomes(model: GPT, weights: Any = ("query",), untie: bool = False) -> list[str]:
    return [verdict.outcome for verdict in make_plan(model, weights, untie).verdicts]


# ------------------------------------------------------------------------------------------------ where theorems hold


@pytest.mark.parametrize("residual", [SKIPLESS, ATTENTION_SKIP, MLP_SKIP], ids=["skipless", "attention", "mlp"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"positions": Rope(), "n_kv_heads": 1, "tie_embeddings": False},
        {"positions": NoPositions(), "qk_norm": True, "mlp": Dense("relu"), "window": 2},
        {"mixer": Primer(), "logit_softcap": 3.0},
        {"attends": "bidirectional", "attention_softcap": 2.0},
        {"overrides": (LayerOverride((1,), window=2, mlp=Dense("silu")),), "query": Residual()},
    ],
    ids=["learned", "rope-mqa", "qk-norm", "primer", "bidirectional", "overrides"],
)
def test_every_query_becomes_the_identity_without_both_skips(residual: Skip, changes: dict[str, Any]) -> None:
    model = build(residual=residual, **changes)
    found = absorb_queries(model)
    assert is_same(model, found.model)
    assert all(block.attention.query.config == Identity() for block in found.model.blocks)
    assert found.added == numbers(found.model) - numbers(model) == -L * D * D
    assert (found.model.head is None) == (model.head is None)  # the last state's own basis keeps the tie
    assert count(found.model.config).total == numbers(found.model)
    assert not found.model.training


@pytest.mark.parametrize("mlp", [Gated(), MixtureOfExperts(3, 2)], ids=["gated", "moe"])
def test_gates_routers_and_experts_follow(mlp: Any) -> None:
    model = build(residual=MLP_SKIP, mlp=mlp)
    assert is_same(model, absorb(model, ["query", "output"], "possible").model)
    assert is_same(model, absorb_queries(model).model)


@pytest.mark.parametrize("weight", ["query", "key", "value"])
def test_one_of_query_key_and_value_goes_with_the_output(weight: Any) -> None:
    """Graef's table: `2 d^2` a block, skipless and norm-free."""
    model = build(residual=SKIPLESS)
    found = absorb(model, [weight, "output"])
    assert is_same(model, found.model)
    assert found.added == -2 * L * D * D
    assert {getattr(found.model.config, name).kind for name in (weight, "output")} == {"identity"}


def test_keys_that_serve_several_queries_stay() -> None:
    model = build(residual=SKIPLESS, n_kv_heads=1)
    with pytest.raises(BadInput, match=r"blocks\.0\.attention\.key is no square matrix: it maps 8 channels to 4"):
        absorb(model, ["key"])
    assert outcomes(model, ["key", "query"]) == ["kept", "identity"] * L
    with pytest.raises(BadInput, match=r"blocks\.0\.attention leaves one basis, which blocks\.0\.attention\.query"):
        absorb(build(residual=SKIPLESS), ["query", "key"])


def test_shared_blocks_have_one_query_for_all() -> None:
    model = build(residual=NORM_FREE, share_blocks=True, tie_embeddings=False)
    found = absorb_queries(model)
    assert is_same(model, found.model)
    assert found.added == -D * D
    tied = build(residual=NORM_FREE, share_blocks=True)
    with pytest.raises(BadInput, match=r"token_embedding is the head too"):
        absorb_queries(tied)
    untied = absorb_queries(tied, untie=True)
    assert is_same(tied, untied.model)
    assert untied.added == V * D - D * D


def test_a_single_block_is_exact_and_one_of_several_is_with_both_skips() -> None:
    single = build(residual=NORM_FREE, n_layers=1, tie_embeddings=False)
    assert absorb_queries(single).added == -D * D
    assert is_same(single, absorb_queries(single).model)
    model = build(residual=NORM_FREE, tie_embeddings=False)
    found = absorb_queries(model, "possible")
    assert is_same(model, found.model)
    assert sorted(outcomes(model)) == ["identity", "kept", "kept"]
    conditions = {verdict.condition: verdict.outcome for verdict in found.plan.verdicts}
    assert conditions[min(conditions)] == "identity"  # the best conditioned


def test_a_tied_head_becomes_untied_on_request_alone() -> None:
    model = build(residual=NORM_FREE)
    found = absorb_queries(model, "possible")
    assert sorted(outcomes(model)) == ["kept", "kept", "triangular"]
    assert found.model.head is None
    untied = absorb_queries(model, "possible", untie=True)
    assert is_same(model, found.model)
    assert is_same(model, untied.model)
    assert untied.added == V * D - D * D > 0
    assert count(untied.model.config).total == numbers(untied.model)
    assert make_plan(build(), ["query"], untie=True).unties is False  # where it would be no help, it is not done


# ------------------------------------------------------------------------------------------------------------- norms


def test_under_rmsnorm_each_state_keeps_a_triangle() -> None:
    model = build(residual=Skip("pre", False, False), norm="rmsnorm", tie_embeddings=False)
    found = absorb(model, ["query", "output"], "possible")
    assert is_same(model, found.model)
    for block in found.model.blocks:
        assert torch.equal(block.attention.query.weight.T.triu(), block.attention.query.weight.T)
        assert torch.equal(block.attention.output.weight.T.tril(), block.attention.output.weight.T)
        assert (block.attention.query.weight.diagonal() >= 0).all()
        assert torch.equal(block.attention_norm.weight, torch.ones(D, dtype=torch.float64))
    assert {verdict.saved for verdict in found.plan.verdicts} == {D * (D - 1) // 2}
    assert found.added == 0
    with pytest.raises(BadInput, match=r"blocks\.0\.attention_norm is an RMSNorm: it lets orthogonal changes"):
        absorb_queries(model)


def test_under_rmsnorm_an_orthogonal_query_becomes_the_identity() -> None:
    model = build(residual=Skip("pre", True, False), norm="rmsnorm", tie_embeddings=False)
    for layer, block in enumerate(model.blocks):
        turn_DD = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64))[0]
        block.attention.query.weight.data = (turn_DD / block.attention_norm.weight[:, None]).T.detach()
        assert outcomes(model)[layer] == "identity"
    assert is_same(model, absorb_queries(model).model)
    model.blocks[0].attention.query.weight.data *= 1 + 1e-6  # nearly is not enough
    assert outcomes(model) == ["triangular", "identity", "identity"]


def test_a_gain_before_a_tied_head_stands_in_the_way_of_the_first_block_alone() -> None:
    model = build(residual=Skip("pre", False, False), norm="rmsnorm")
    assert outcomes(model) == ["kept", "triangular", "triangular"]
    assert is_same(model, absorb_queries(model, "possible").model)
    model.final_norm.weight.data.fill_(0.7)  # the same for all channels: nothing to fold
    assert outcomes(model) == ["triangular"] * 3
    assert is_same(model, absorb_queries(model, "possible").model)


def test_a_norm_after_the_sum_has_a_gain_that_shared_blocks_cannot_fold() -> None:
    """What the shared block reads has passed the norm in all blocks but the first."""
    changes: dict[str, Any] = {"norm": "rmsnorm", "share_blocks": True, "tie_embeddings": False}
    model = build(residual=Skip("post", False, False), **changes)
    assert outcomes(model) == ["kept"]
    assert "the shared block reads the embeddings too" in make_plan(model, ["query"]).verdicts[0].obstacles[1].why
    model.blocks[0].mlp_norm.weight.data.fill_(0.7)
    assert outcomes(model) == ["triangular"]
    assert is_same(model, absorb_queries(model, "possible").model)


def test_layernorm_and_two_skips_are_refused_with_what_stands_in_the_way() -> None:
    model = build()
    with pytest.raises(BadInput) as refused:
        absorb_queries(model)
    told = str(refused.value)
    assert "blocks.0.attention.query: blocks.0.attention_norm (and 6 more on its stream) is a LayerNorm" in told
    assert "token_embedding is the head too" in told
    conditions = [verdict.condition for verdict in make_plan(model, ["query"]).verdicts]
    assert conditions.index(min(conditions)) == 0
    assert "the skip over attention and mlp of block 0 leaves one basis, which blocks.0.attention.query takes" in told
    assert "So it is with 1 more" in told
    with pytest.raises(BadInput, match="forced"):
        absorb_queries(build(residual=HyperConnections()))
    unchanged = absorb_queries(model, "possible")
    assert is_same(model, unchanged.model)
    assert unchanged.added == 0


def test_forced_it_is_done_and_the_logits_are_others() -> None:
    model = build()
    found = absorb_queries(model, "forced")
    assert all(block.attention.query.config == Identity() for block in found.model.blocks)
    assert found.added == -L * D * D
    assert difference(model, found.model, IDS_BT).relative > 0.1
    exact = build(residual=SKIPLESS)
    assert is_same(exact, absorb_queries(exact, "forced").model)
    nothing = build(residual=HyperConnections())
    with pytest.raises(BadInput, match=r"model\.residual = hyper reads and writes several streams"):
        absorb_queries(nothing, "forced")


# ------------------------------------------------------------------------------------------------ obstacles of a weight


def test_what_is_no_linear_query_is_told_apart() -> None:
    mixed = build(residual=SKIPLESS, overrides=(LayerOverride((1,), query=Bottleneck()),))
    assert outcomes(mixed) == ["identity", "none", "identity"]
    assert is_same(mixed, absorb_queries(mixed).model)
    with pytest.raises(BadInput, match="no block has a linear query that is not the identity already"):
        absorb_queries(build(query=Identity()))
    reserved = build(residual=NORM_FREE, overrides=(LayerOverride((1,), query=Identity()),), tie_embeddings=False)
    assert outcomes(reserved) == ["kept", "none", "kept"]
    (obstacle,) = make_plan(reserved, ["query"]).verdicts[2].obstacles
    assert obstacle.why == "leaves one basis, which blocks.1.attention.query needs as it is"


@pytest.mark.parametrize(
    ("weights", "which", "message"),
    [
        ("query", "all", "weights = 'query': give a list of query, key, value, output, or some of them"),
        (["querry"], "all", r"weights = \['querry'\]"),
        ([], "all", r"weights = \[\]"),
        (["query"], "possibel", "which = 'possibel': it must be one of all, possible, forced"),
    ],
)
def test_what_is_asked_for_has_to_be_known(weights: Any, which: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        absorb(build(residual=SKIPLESS), weights, which)


def test_a_nearly_singular_query_stays() -> None:
    model = build(residual=SKIPLESS)
    model.blocks[1].attention.query.weight.data[:, 0] = 0.0
    assert outcomes(model) == ["identity", "kept", "identity"]
    assert is_same(model, absorb_queries(model, "possible").model)
    with pytest.raises(BadInput, match=r"blocks\.1\.attention\.query is singular, or too nearly so"):
        absorb_queries(model)


def test_a_bias_would_stay_behind_and_those_of_others_follow() -> None:
    model = build(residual=SKIPLESS, bias=True)
    with pytest.raises(BadInput, match=r"blocks\.0\.attention\.query\.bias is not zero, and the identity has none"):
        absorb_queries(model)
    for block in model.blocks:
        block.attention.query.bias.data.zero_()
        block.attention.output.bias.data.zero_()
    assert is_same(model, absorb(model, ["query", "output"]).model)


def test_an_output_that_is_not_linear_writes_in_one_basis() -> None:
    model = build(residual=MLP_SKIP, output=Bottleneck(), tie_embeddings=False)
    assert outcomes(model) == ["identity", "kept", "kept"]
    assert is_same(model, absorb_queries(model, "possible").model)
    (obstacle,) = make_plan(model, ["query"]).verdicts[1].obstacles
    assert (obstacle.where, obstacle.why) == ("blocks.0.attention.output", "is 'bottleneck', which is not linear")
    tied = build(residual=MLP_SKIP, output=Bottleneck())  # the last state cannot make up for the first
    assert outcomes(tied) == ["kept"] * L
    assert [obstacle.kind for obstacle in make_plan(tied, ["query"]).verdicts[0].obstacles] == ["tie"]


def test_channels_beside_the_stream_stand_in_the_way() -> None:
    model = build(residual=SKIPLESS, subspaces=Subspaces(qk=2))
    assert outcomes(model) == ["identity", "kept", "kept"]
    assert is_same(model, absorb_queries(model, "possible").model)


# ------------------------------------------------------------------------------------------------------- everything


@settings(max_examples=25)
@given(
    norms=st.sampled_from(["pre", "post", "none"]),
    skips=st.tuples(st.booleans(), st.booleans()),
    norm=st.sampled_from(["rmsnorm", "rmsnorm", "layernorm"]),
    kinds=st.fixed_dictionaries(
        {
            "tie_embeddings": st.booleans(),
            "share_blocks": st.booleans(),
            "positions": st.sampled_from([Learned(), Rope(), NoPositions()]),
            "n_kv_heads": st.sampled_from([1, 2]),
            "n_layers": st.sampled_from([1, 3]),
            "value": st.sampled_from([Linear(), Linear(), Residual(), Bottleneck(anchor="none")]),
        }
    ),
    weights=st.sets(st.sampled_from(WEIGHTS), min_size=1),
    untie=st.booleans(),
)
def test_what_a_plan_promises_holds(
    norms: Any, skips: tuple[bool, bool], norm: Any, kinds: dict[str, Any], weights: set[Any], untie: bool
) -> None:
    """Whatever is possible leaves the logits as they are; what cannot be is said to be in somebody's way."""
    if kinds["n_kv_heads"] == 1 and isinstance(kinds["value"], Residual):
        kinds = {**kinds, "value": Linear()}
    model = build(residual=Skip(norms, *skips), norm=norm, **kinds)
    chosen = [weight for weight in WEIGHTS if weight in weights]
    plan = make_plan(model, chosen, untie)
    if all(verdict.outcome == "none" for verdict in plan.verdicts):
        return
    found = absorb(model, chosen, "possible", untie)
    assert difference(model, found.model, IDS_BT).relative < 1e-9
    assert count(found.model.config).total == numbers(found.model)
    for verdict in plan.verdicts:
        assert bool(verdict.obstacles) == (verdict.outcome != "identity")
        is_identity = getattr(found.model.blocks[verdict.layer].attention, verdict.weight).config == Identity()
        assert is_identity == (verdict.outcome == "identity")
    if not any(verdict.outcome in ("kept", "triangular") for verdict in plan.verdicts):
        assert is_same(found.model, absorb(model, chosen, "all", untie).model)


def test_a_trained_model_decodes_the_same_with_fewer_weights(data: TokenData, tmp_path: Path) -> None:
    residual = {"kind": "skip", "norms": "none", "attention": False, "mlp": False}
    run = train(tiny(f"model.residual={json.dumps(residual)}"), tmp_path / "run", data)
    model = GPT.from_run(run.path)
    ids_BT = torch.from_numpy(data.split("val").windows([0, 99], 32)[0])
    before, after = model.double(), absorb(model.double(), ["query", "output"])
    found = difference(before, after.model, ids_BT)
    assert found.relative < 1e-9
    assert after.added == -2 * 2 * 32 * 32
    decoders = [Decoder(one.float(), 2, None, 32) for one in (before, after.model)]
    for part_BT in (ids_BT[:, :20], ids_BT[:, 20:21], ids_BT[:, 21:22]):
        logits_BV, absorbed_BV = (decoder.read(part_BT) for decoder in decoders)
        torch.testing.assert_close(absorbed_BV, logits_BV, rtol=0, atol=1e-3 * logits_BV.abs().max().item())
    assert to_dict(after.model.config)["query"] == {"kind": "identity"}
