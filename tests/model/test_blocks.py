"""Every kind of block, in combination: causality, cached decoding, counts, gradients, learning."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from qurve.accounting import count
from qurve.errors import BadInput
from qurve.model.cache import Cache
from qurve.model.config import ModelConfig
from qurve.model.feed_forward import Dense, FeedForwardConfig, Gated, MixtureOfExperts
from qurve.model.gpt import GPT
from qurve.model.positions import Learned, NoPositions, PositionConfig, Rope
from qurve.projections import Bottleneck, ProjectionConfig

LENGTH = 13
POSITIONS: list[PositionConfig] = [Learned(), Rope(), Rope(layout="interleaved", scaling="llama3"), NoPositions()]
MLPS: list[FeedForwardConfig] = [Dense(), Dense("relu2"), Gated(), MixtureOfExperts(experts=3, active=2)]
HEADS = [{"n_heads": 3}, {"n_heads": 4, "n_kv_heads": 2, "d_head": 6}, {"n_heads": 3, "n_kv_heads": 1}]


def configs() -> list[ModelConfig]:
    """Each position with each feed-forward; heads, norms and the rest rotate through."""
    found = []
    for i, positions in enumerate(POSITIONS):
        for j, mlp in enumerate(MLPS):
            n = i + j
            heads = HEADS[n % 3]
            query: ProjectionConfig = Bottleneck(anchor="identity" if "d_head" not in heads else "none", width=5)
            found.append(
                ModelConfig(
                    n_layers=2,
                    d_model=18,
                    d_ff=31,
                    context=LENGTH,
                    vocab_size=29,
                    query=query,
                    mlp=mlp,
                    positions=positions,
                    norm="rmsnorm" if n % 2 else "layernorm",
                    qk_norm=i % 2 == 1,
                    window=4 if j == 1 else None,
                    logit_softcap=5.0 if n % 4 == 0 else None,
                    bias=n % 5 == 0,
                    **heads,
                )
            )
    return found


each = pytest.mark.parametrize("config", configs(), ids=lambda c: f"{c.positions.kind}-{c.mlp.kind}-{c.kv_heads}")


def tokens(batch: int = 2) -> torch.Tensor:
    return torch.randint(29, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


@each
def test_nothing_later_is_seen(config: ModelConfig) -> None:
    model, ids_BT = GPT(config, seed=1).eval(), tokens()
    changed_BT = ids_BT.clone()
    changed_BT[:, 7:] = (changed_BT[:, 7:] + 1) % 29
    with torch.no_grad():
        assert torch.equal(model(ids_BT)[:, :7], model(changed_BT)[:, :7])


@each
def test_one_token_at_a_time_is_the_whole_forward(config: ModelConfig) -> None:
    model, ids_BT = GPT(config, seed=1).eval(), tokens()
    cache = Cache(config, 2)
    with torch.no_grad():
        parts = [model(part, cache) for part in (ids_BT[:, :3], *ids_BT[:, 3:].split(1, dim=1))]
        assert_close(torch.cat(parts, dim=1), model(ids_BT), atol=1e-5, rtol=0)


@each
def test_it_is_counted_as_built(config: ModelConfig) -> None:
    sizes = {name: p.numel() for name, p in GPT(config).named_parameters()}
    outside = ("token_embedding.weight", "position_embedding.weight")
    found = count(config)
    assert found.total == sum(sizes.values())
    assert found.non_embedding == sum(n for name, n in sizes.items() if name not in outside)


@each
def test_a_few_steps_lower_the_loss(config: ModelConfig) -> None:
    model, ids_BT = GPT(config, seed=1), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model.loss(ids_BT[:, :-1], ids_BT[:, 1:])
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3


def test_a_window_hides_what_is_further_back() -> None:
    config = ModelConfig(
        n_layers=1, d_model=12, n_heads=2, d_ff=8, context=LENGTH, vocab_size=29, window=4, positions=NoPositions()
    )
    model, ids_BT = GPT(config, seed=1).eval(), tokens()
    changed_BT = ids_BT.clone()
    changed_BT[:, 5] = (changed_BT[:, 5] + 1) % 29
    with torch.no_grad():
        differs_T = (model(ids_BT) != model(changed_BT)).any(-1).any(0)
    assert differs_T.tolist() == [5 <= t < 9 for t in range(LENGTH)]


def test_softcap_bounds_the_logits() -> None:
    config = ModelConfig(n_layers=1, d_model=12, n_heads=2, d_ff=8, context=LENGTH, vocab_size=29, logit_softcap=0.01)
    assert GPT(config, seed=1)(tokens()).abs().max() <= 0.01


def test_experts_share_the_tokens_and_say_how() -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        n_layers=1, d_model=12, n_heads=2, d_ff=8, context=LENGTH, vocab_size=29, mlp=MixtureOfExperts(4, 2)
    )
    layer = GPT(config, seed=1).blocks[0].mlp
    x_BTD = torch.randn(2, LENGTH, 12)
    y_BTD, hidden = layer(x_BTD)
    assert hidden is None
    assert layer.usage_N.sum().item() == pytest.approx(1.0)
    assert layer.balance_loss.item() == pytest.approx(1.0, abs=0.1)  # nothing is preferred at the start
    probability_MN = layer.router(x_BTD.flatten(0, 1)).softmax(-1)
    weight_MK, chosen_MK = probability_MN.topk(2)
    for m in (0, 5, 25):
        token_D = x_BTD.flatten(0, 1)[m]
        parts = [w * layer.experts[n](token_D[None])[0][0] for w, n in zip(weight_MK[m], chosen_MK[m], strict=True)]
        assert_close(y_BTD.flatten(0, 1)[m], sum(parts) / weight_MK[m].sum())


def test_training_pays_for_unbalanced_experts_and_evaluation_does_not() -> None:
    def losses(balance: float) -> tuple[float, float]:
        mlp = MixtureOfExperts(3, 1, balance=balance)
        config = ModelConfig(n_layers=2, d_model=12, n_heads=2, d_ff=8, context=LENGTH, vocab_size=29, mlp=mlp)
        model, ids_BT = GPT(config, seed=1), tokens()
        training = model.loss(ids_BT, ids_BT).item()
        return training, model.eval().loss(ids_BT, ids_BT).item()

    free, paid = losses(0.0), losses(10.0)
    assert free[0] == free[1] == paid[1]
    assert paid[0] - free[0] == pytest.approx(10.0, rel=0.2)  # about 1 when nothing is preferred


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_kv_heads": 5}, r"n_kv_heads = 5 does not divide model\.n_heads = 12"),
        ({"d_head": 7, "positions": Rope()}, r"heads of width 7 cannot be rotated in pairs"),
        (
            {"d_head": 32, "query": Bottleneck()},
            r"model\.query: the identity anchor .* 768 -> 384; use anchor 'linear'",
        ),
        ({"logit_softcap": 0.0}, r"logit_softcap = 0\.0: it must be above zero"),
        ({"attention_scale": 0.0}, r"attention_scale = 0\.0: it must be above zero"),
        ({"window": 0}, r"model\.window = 0: it must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        ModelConfig(**changes)  # type: ignore[arg-type]


def test_more_active_experts_than_there_are_is_refused() -> None:
    with pytest.raises(BadInput, match=r"mlp\.active = 3: it must be between 1 and mlp\.experts = 2"):
        MixtureOfExperts(experts=2, active=3)
