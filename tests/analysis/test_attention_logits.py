"""The largest attention logit: against every pair written out, and harmless to the model."""

from __future__ import annotations

import cmath
import math
from typing import Any

import pytest
import torch
from torch import nn

from qurve.analysis import attention_logits
from qurve.analysis.attention_logits import recording
from qurve.model.attention import Attention
from qurve.model.cache import Cache
from qurve.model.config import LayerOverride, ModelConfig
from qurve.model.gpt import GPT
from qurve.model.positions import Rope
from qurve.projections import Bottleneck
from qurve.zoo.linear_attention import LinearAttention
from qurve.zoo.primer import Primer

D, T, E = 16, 9, 4
BASE: dict[str, Any] = {"n_layers": 2, "d_model": D, "n_heads": 4, "d_ff": 8, "context": T, "vocab_size": 29}
IDS_BT = torch.randint(29, (3, T), generator=torch.Generator().manual_seed(1))


def build(**changes: Any) -> GPT:
    model = GPT(ModelConfig(**{**BASE, **changes}), seed=1).eval()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):  # larger than at the start, and no gain is one
            parameter.normal_(0, 0.7, generator=torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def recorded(model: GPT, **masks: Any) -> list[float | None]:
    with recording(model) as largest:
        model(IDS_BT, **masks)
    return largest.by_layer()


@torch.no_grad()
def written_out(model: GPT, sees: Any, **masks: Any) -> list[float]:
    """Each pair of tokens by itself, in Python's float64; `sees(b, t, s)` says which pairs count."""
    config, inputs = model.config, list[torch.Tensor]()

    def remember(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        inputs.append(arguments[0][0])

    handles = [block.attention.register_forward_pre_hook(remember) for block in model.blocks]
    model(IDS_BT, **masks)
    for handle in handles:
        handle.remove()
    found = []
    for layer, x_BTD in enumerate(inputs):
        attention = model.blocks[layer % len(model.blocks)].attention
        q_BTHE, k_BTGE = (p(x_BTD).unflatten(-1, (-1, E)) for p in (attention.query, attention.key))
        largest = 0.0
        for b in range(len(IDS_BT)):
            for h in range(config.n_heads):
                g = h * config.kv_heads // config.n_heads
                q = [as_they_meet(config, attention.query_norm, q_BTHE[b, t, h].tolist(), t) for t in range(T)]
                k = [as_they_meet(config, attention.key_norm, k_BTGE[b, t, g].tolist(), t) for t in range(T)]
                pairs = [(t, s) for t in range(T) for s in range(T) if sees(b, t, s)]
                dots = [abs(sum(i * j for i, j in zip(q[t], k[s], strict=True))) for t, s in pairs]
                largest = max(largest, max(dots, default=0.0) * config.scale)
        found.append(largest)
    return found


def as_they_meet(config: ModelConfig, norm: nn.Module, e: list[float], position: int) -> list[float]:
    if config.qk_norm:
        root = math.sqrt(sum(i * i for i in e) / E + config.norm_eps)
        e = [i / root * gain for i, gain in zip(e, norm.weight.tolist(), strict=True)]
    if isinstance(config.positions, Rope):
        half, theta = E // 2, config.positions.theta
        turned = [complex(e[i], e[i + half]) * cmath.exp(1j * position * theta ** (-2 * i / E)) for i in range(half)]
        e = [z.real for z in turned] + [z.imag for z in turned]
    return e


def causal(b: int, t: int, s: int) -> bool:
    return s <= t


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_kv_heads": 2},
        {"n_kv_heads": 1, "positions": Rope()},
        {"qk_norm": True, "positions": Rope()},
        {"query": Bottleneck()},
        {"query": Bottleneck(), "key": Bottleneck(anchor="linear"), "n_kv_heads": 2, "qk_norm": True},
        {"attention_scale": 0.3, "attention_softcap": 1.5},  # told before the cap
        {"share_blocks": True},
    ],
    ids=["mha", "gqa", "mqa-rope", "qk-norm-rope", "nonlinear", "nonlinear-qk", "scale-cap", "shared"],
)
def test_equals_every_pair_written_out(changes: dict[str, Any]) -> None:
    model = build(**changes)
    assert recorded(model) == pytest.approx(written_out(model, causal), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "sees"),
    [
        ({"window": 2}, lambda b, t, s: t - 2 < s <= t),
        ({"attends": "bidirectional"}, lambda b, t, s: True),
        ({"attends": "bidirectional", "window": 3}, lambda b, t, s: abs(t - s) < 3),
    ],
    ids=["window", "bidirectional", "bidirectional-window"],
)
def test_only_visible_pairs_count(changes: dict[str, Any], sees: Any) -> None:
    model = build(**changes)
    everything, visible = (written_out(model, which) for which in (lambda b, t, s: True, sees))
    assert recorded(model) == pytest.approx(visible, rel=1e-5)
    assert "window" not in changes or visible != everything


def test_prefixes_padding_and_further_limits_are_kept_to() -> None:
    prefix_B, padding_B = torch.tensor([1, 4, 9]), torch.tensor([0, 3, 7])
    model = build(attends="prefix")
    found = recorded(model, prefix_B=prefix_B)
    assert found == pytest.approx(
        written_out(model, lambda b, t, s: s <= t or max(s, t) < prefix_B[b], prefix_B=prefix_B), rel=1e-5
    )
    model = build(positions=Rope())  # turned by the same angle as each other, wherever counting starts
    sees = lambda b, t, s: padding_B[b] <= s <= t  # noqa: E731
    assert recorded(model, padding_B=padding_B) == pytest.approx(
        written_out(model, sees, padding_B=padding_B), rel=1e-5
    )
    allowed_BTT = torch.zeros(1, T, T, dtype=torch.bool)  # then each token sees itself alone
    assert recorded(model, allowed_BTT=allowed_BTT) == pytest.approx(
        written_out(model, lambda b, t, s: s == t, allowed_BTT=allowed_BTT), rel=1e-5
    )


@pytest.mark.parametrize("changes", [{}, {"window": 3}, {"attends": "bidirectional"}], ids=["causal", "window", "all"])
@pytest.mark.parametrize("numbers", [1, 3 * 4 * T * 2])
def test_parts_find_the_same(changes: dict[str, Any], numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(**changes)
    whole = recorded(model)
    monkeypatch.setattr(attention_logits, "MOST_NUMBERS", numbers)
    assert recorded(model) == pytest.approx(whole, rel=1e-6)


def test_the_largest_of_several_passes_stays() -> None:
    model = build()
    with recording(model) as largest, torch.no_grad():
        assert largest.by_layer() == [None, None]
        each = []
        for row in IDS_BT:
            model(row[None])
            each.append(recorded_of(model, row))
    assert largest.by_layer() == pytest.approx([max(one) for one in zip(*each, strict=True)])


@torch.no_grad()
def recorded_of(model: GPT, row: torch.Tensor) -> list[float | None]:
    with recording(model) as largest:
        model(row[None])
    return largest.by_layer()


def test_in_half_precision_products_are_not_rounded() -> None:
    """Queries and keys are those of the forward pass, in bf16; their product is a float32 one."""
    model, met = build(n_layers=1), list[tuple[torch.Tensor, ...]]()
    attention, mix = model.blocks[0].attention, Attention.mix
    attention.mix = lambda *a: met.append(a[:2]) or mix(attention, *a)  # type: ignore[method-assign]
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = recorded(model)
    ((q_BHTE, k_BHTE),) = met
    assert q_BHTE.dtype == torch.bfloat16
    logits = model.config.scale * q_BHTE.double() @ k_BHTE.double().transpose(-1, -2)
    assert found == pytest.approx(logits.tril().abs().max().item(), rel=1e-6)


def test_blocks_without_such_logits_give_none() -> None:
    linear, primer = build(mixer=LinearAttention()), build(mixer=Primer())
    assert recorded(linear) == [None, None]
    assert all(logit > 0 for logit in recorded(primer))
    first, second = recorded(build(overrides=(LayerOverride((1,), mixer=LinearAttention()),)))
    assert first > 0
    assert second is None


def test_a_cache_is_refused() -> None:
    model = build()
    with recording(model), torch.no_grad(), pytest.raises(ValueError, match="without a cache"):
        model(IDS_BT, Cache(model.config, batch=3))


def test_the_model_stays_as_it_was() -> None:
    model = build(dropout=0.2).train()
    torch.manual_seed(1)
    before = model(IDS_BT)
    torch.manual_seed(1)
    with recording(model):
        assert torch.equal(before, model(IDS_BT))
    with pytest.raises(ValueError, match="do not fit"), recording(model):
        model(IDS_BT.repeat(1, 2))
    assert before.requires_grad
    assert model.training
    assert not any(block.attention._forward_pre_hooks for block in model.blocks)
