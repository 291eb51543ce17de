"""Differences and violations: against numbers worked out by hand, and zero where nothing is in the way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from qurve.analysis.absorb import Plan, forced
from qurve.analysis.redundancy import difference, hidden_states, redundancy, violations
from qurve.analysis.reparametrize import Basis, affine
from qurve.errors import BadInput
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.model.residual import Skip
from qurve.projections import Bottleneck
from qurve.zoo.hyper_connections import HyperConnections

L, D, T, V = 2, 8, 6, 19
BASE: dict[str, Any] = {"n_layers": L, "d_model": D, "n_heads": 2, "d_ff": 12, "context": T, "vocab_size": V}
IDS_BT = torch.randint(V, (3, T), generator=torch.Generator().manual_seed(1))
EXACT = {"rtol": 0, "atol": 1e-12}


def build(**changes: Any) -> GPT:
    model = GPT(ModelConfig(**{**BASE, **changes}), seed=1).double().eval()
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.4, generator=torch.Generator().manual_seed(seed))
    return model


def apart(got: Tensor, wanted: Tensor) -> float:
    return ((got - wanted).norm() / wanted.norm()).item()


def test_difference_by_hand() -> None:
    before, after = build(tie_embeddings=False), build(tie_embeddings=False)
    assert difference(before, after, IDS_BT).largest == 0
    with torch.no_grad():
        after.head.weight *= 1.5
        logits_BTV = before(IDS_BT)
    found = difference(before, after.train(), IDS_BT)
    assert after.training
    assert found.largest == pytest.approx(0.5 * logits_BTV.abs().max().item())
    assert difference(after, before, IDS_BT).largest == found.largest
    assert found.relative == pytest.approx(0.5)
    p_BTV, q_BTV = logits_BTV.softmax(-1), (1.5 * logits_BTV).softmax(-1)
    rows = zip(p_BTV.flatten(0, 1).tolist(), q_BTV.flatten(0, 1).tolist(), strict=True)
    divergences = [sum(p * math.log(p / q) for p, q in zip(*row, strict=True)) for row in rows]
    assert found.divergence == pytest.approx(sum(divergences) / len(divergences))


@pytest.mark.parametrize("norms", ["pre", "post", "none"])
@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
def test_the_last_state_is_what_the_head_reads(norms: Any, share: bool) -> None:
    model = build(residual=Skip(norms), share_blocks=share)
    states = hidden_states(model, IDS_BT)
    assert len(states) == 2 * L + 1
    torch.testing.assert_close(model.logits(model.collapsed(states[-1][1])), model(IDS_BT), **EXACT)
    summed_BTD, x_BTD = states[1]
    assert torch.equal(summed_BTD, x_BTD) == (norms != "post")
    if norms == "post":
        torch.testing.assert_close(model.blocks[0].attention_norm(summed_BTD), x_BTD, **EXACT)


def test_violations_by_hand() -> None:
    """One block, both skips, LayerNorm: the query's basis meets three norms and the tie, and no skip that it is not
    carried by."""
    model = build(n_layers=1)
    block = model.blocks[0]
    w_DD, _ = affine(block.attention.query)
    with torch.no_grad():
        theta_DD = block.attention_norm.weight[:, None] * w_DD
        found = violations(model, forced(model, ["query"]), IDS_BT)
        assert [(v.kind, v.where) for v in found] == [
            ("norm", "blocks.0.attention_norm"),
            ("norm", "blocks.0.mlp_norm"),
            ("norm", "final_norm"),
            ("tie", "token_embedding"),
        ]
        x_BTD = model.token_embedding(IDS_BT) + model.position_embedding.weight
        plain = torch.nn.functional.layer_norm
        assert found[0].size == pytest.approx(
            apart(plain(x_BTD @ theta_DD, (D,), eps=1e-5), plain(x_BTD, (D,), eps=1e-5) @ theta_DD)
        )
        last_BD = model.final_norm(hidden_states(model, IDS_BT)[-1][1])[:, -1]
        table_VD = model.token_embedding.weight
        assert found[3].size == pytest.approx(apart(last_BD @ theta_DD @ theta_DD.T @ table_VD.T, last_BD @ table_VD.T))


def test_a_skip_that_carries_another_basis_by_hand() -> None:
    model = build(residual=Skip("none"), tie_embeddings=False)
    bases = [Basis(torch.eye(D, dtype=torch.float64) * scale, 1.0) for scale in (2.0, 2.0, 3.0)]
    plan = Plan((), (*bases, None, None), False)
    found = violations(model, plan, IDS_BT)
    assert [v.where for v in found] == ["the skip over mlp of block 0", "the skip over attention of block 1"]
    assert [v.size for v in found] == pytest.approx([1 / 3, 2])  # 2 x for 3 x, 3 x for x


def test_a_norm_after_the_sum_by_hand() -> None:
    model = build(residual=Skip("post", False, True), norm="rmsnorm", n_layers=1, tie_embeddings=False)
    scale_DD = torch.diag(torch.linspace(0.5, 1.5, D, dtype=torch.float64))
    found = violations(model, Plan((), (None, *[Basis(scale_DD, 3.0)] * 2), False), IDS_BT)
    norm, (summed_BTD, x_BTD) = model.blocks[0].attention_norm, hidden_states(model, IDS_BT)[1]
    assert (found[0].kind, found[0].where) == ("norm", "blocks.0.attention_norm")
    # the skip over the feed-forward carries its gain on: it is not folded away
    assert found[0].size == pytest.approx(apart(norm(summed_BTD @ scale_DD), x_BTD @ scale_DD))


def test_what_lets_a_basis_pass_is_left_out() -> None:
    q_DD = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64))[0]
    model = build(norm="rmsnorm", tie_embeddings=False)
    assert violations(model, Plan((), (Basis(q_DD, 1.0),) * (2 * L + 1), False), IDS_BT) == []
    for scale in (1.01, 1 + 1e-5):
        tilted = Basis(q_DD * scale, 1.0)
        assert {v.kind for v in violations(model, Plan((), (tilted,) * (2 * L + 1), False), IDS_BT)} == {"norm"}


@pytest.mark.parametrize(
    ("changes", "exact", "in_the_way"),
    [
        ({"residual": Skip("none", True, False)}, True, set()),
        ({"residual": Skip("none")}, True, {"skip", "tie"}),
        ({"residual": Skip("pre", False, False), "norm": "rmsnorm"}, True, {"norm"}),
        ({"norm": "rmsnorm"}, False, {"norm", "skip", "tie"}),
        ({"residual": Skip("post")}, False, {"norm", "skip", "tie"}),
    ],
    ids=["attention-skip", "norm-free", "rmsnorm-skipless", "rmsnorm", "post-layernorm"],
)
def test_a_model_in_short(changes: dict[str, Any], exact: bool, in_the_way: set[str]) -> None:
    model, told = build(**changes), list[str]()
    found = redundancy(model, IDS_BT, progress=told.append)
    assert (found.exact is not None) == exact
    assert ("logits with all that can be absorbed" in told) == exact
    assert ("each norm, skip and tie" in told) == bool(in_the_way)
    assert not exact or found.exact.relative < 1e-10
    assert (found.forced is not None) == bool(in_the_way)
    assert {violation.kind for violation in found.violations} == in_the_way
    if found.forced is not None:
        assert found.forced.relative > 0.05
    assert found.added == (-L * D * D if not in_the_way else 0)


def test_a_prefix_and_no_linear_query() -> None:
    found = redundancy(
        build(residual=Skip("none", False, False), attends="prefix"), IDS_BT, prefix_B=torch.full((3,), 2)
    )
    assert found.exact.relative < 1e-10
    nothing = redundancy(build(query=Bottleneck()), IDS_BT)
    assert (nothing.exact, nothing.forced, nothing.violations) == (None, None, ())
    streams = redundancy(build(residual=HyperConnections()), IDS_BT)
    assert (streams.exact, streams.forced) == (None, None)
    with pytest.raises(BadInput, match=r"model\.residual = hyper"):
        hidden_states(build(residual=HyperConnections()), IDS_BT)
