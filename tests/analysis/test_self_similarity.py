"""The `x . x'` term: against cases worked out by hand, and where it is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qurve.analysis.self_similarity import self_similarity
from qurve.model.config import LayerOverride, ModelConfig
from qurve.model.gpt import GPT
from qurve.model.positions import Rope
from qurve.projections import Bottleneck, Identity, Linear, Residual

D, T = 12, 9
BASE: dict[str, Any] = {"n_layers": 2, "d_model": D, "n_heads": 3, "d_ff": 8, "context": T, "vocab_size": 29}
IDS_BT = torch.randint(29, (4, T), generator=torch.Generator().manual_seed(1))


def build(**changes: Any) -> GPT:
    return GPT(ModelConfig(**{**BASE, **changes}), seed=1)


@pytest.mark.parametrize("positions", [{}, {"positions": Rope()}], ids=["learned", "rope"])
def test_without_weights_the_term_is_all_there_is(positions: dict[str, Any]) -> None:
    found = self_similarity(build(query=Identity(), key=Identity(), **positions), IDS_BT)
    assert [(s.layer, s.head) for s in found] == [(layer, head) for layer in range(2) for head in range(3)]
    for one in found:
        assert one.share == pytest.approx(1.0, abs=1e-6)
        assert one.correlation == pytest.approx(1.0, abs=1e-6)


def test_by_hand() -> None:
    """One block, its queries `(x + x W) / 2` and keys `x`: every number again, head by head, without the model."""
    model = build(n_layers=1, query=Residual(), key=Identity(), attention_scale=0.7)
    block = model.blocks[0]
    with torch.no_grad():
        block.attention.query.weight.normal_(0, 0.4, generator=torch.Generator().manual_seed(3))
        x_BTD = block.attention_norm(model.token_embedding(IDS_BT) + model.position_embedding(torch.arange(T)))
    for one in self_similarity(model, IDS_BT):
        channels = slice(4 * one.head, 4 * one.head + 4)
        logits, term, weights = [], [], []
        for x_TD in x_BTD.double():
            q_TD = (x_TD + x_TD @ block.attention.query.weight.double().T) / 2
            for t in range(T):
                row = [0.7 * (q_TD[t, channels] @ x_TD[s, channels]).item() for s in range(t + 1)]
                logits += row
                term += [0.7 * 0.5 * (x_TD[t, channels] @ x_TD[s, channels]).item() for s in range(t + 1)]
                weights.append(torch.tensor(row).softmax(-1)[-1].item())
        (variance, covariance), (_, of_term) = torch.cov(torch.tensor([logits, term])).tolist()
        assert one.share == pytest.approx(covariance / variance, rel=1e-4)
        assert one.correlation == pytest.approx(covariance / (variance * of_term) ** 0.5, rel=1e-4)
        assert one.self_weight == pytest.approx(sum(weights) / len(weights), rel=1e-4)
        assert 0.1 < one.share < 0.9


def test_windows_and_soft_caps_count() -> None:
    anchored: dict[str, Any] = {"query": Bottleneck(), "key": Bottleneck()}
    plain, near, capped = (
        self_similarity(build(**anchored, **changes), IDS_BT)[0]
        for changes in ({}, {"window": 1}, {"attention_softcap": 1e-3})
    )
    assert near.self_weight == pytest.approx(1.0)
    uniform = sum(1 / (t + 1) for t in range(T)) / T
    assert capped.self_weight == pytest.approx(uniform, rel=1e-2)
    assert plain.self_weight > 1.1 * uniform  # the bias towards oneself
    assert capped.share == plain.share  # of the logits before the cap


def test_only_blocks_with_both_anchors_are_measured() -> None:
    override = LayerOverride((0,), key=Linear())
    found = self_similarity(build(query=Bottleneck(), key=Bottleneck(), overrides=(override,)), IDS_BT)
    assert {one.layer for one in found} == {1}


def test_shared_blocks_are_measured_at_every_pass() -> None:
    found = self_similarity(build(query=Identity(), key=Residual(), share_blocks=True), IDS_BT)
    assert [one.layer for one in found] == [0, 0, 0, 1, 1, 1]


def test_the_model_stays_as_it_was() -> None:
    model = build(query=Identity(), key=Identity(), dropout=0.1)
    before = torch.get_rng_state()
    assert self_similarity(model, IDS_BT) == self_similarity(model, IDS_BT)
    assert model.training
    assert not model.blocks[0].attention._forward_pre_hooks
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": Bottleneck()}, "no block has an identity anchor in both queries and keys"),
        ({"key": Residual()}, "no block has an identity anchor in both"),
        ({"query": Bottleneck(norm_stage="separate"), "key": Identity()}, r"norm stage coupled"),
        ({"query": Identity(), "key": Identity(), "qk_norm": True}, r"model\.qk_norm rescales"),
    ],
)
def test_models_without_the_term_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        self_similarity(build(**changes), IDS_BT)
