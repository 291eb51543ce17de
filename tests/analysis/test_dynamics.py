"""Measures of a block: known answers, formulas written out token by token, and a model that stays as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qurve.analysis import attention_logits, dynamics
from qurve.analysis.dynamics import (
    DEAD,
    dead_share,
    logits_and_entropy,
    mean_jacobian,
    recording,
    spectral_norm,
    stable_rank,
)
from qurve.model.cache import Cache
from qurve.model.config import LayerOverride, ModelConfig
from qurve.model.feed_forward import Dense, MixtureOfExperts
from qurve.model.gpt import GPT
from qurve.model.view import View
from qurve.projections import Bottleneck, Identity, Linear, ProjectionConfig, Residual
from qurve.projections.mlp_reuse import MLPReuse
from qurve.zoo.linear_attention import LinearAttention
from qurve.zoo.mlp_attention import MLPAttention
from qurve.zoo.projections import NonlinearLoRA

D, T, E = 16, 9, 4
BASE: dict[str, Any] = {"n_layers": 2, "d_model": D, "n_heads": 4, "d_ff": 8, "context": T, "vocab_size": 29}
IDS_BT = torch.randint(29, (3, T), generator=torch.Generator().manual_seed(1))


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def build(**changes: Any) -> GPT:
    model = GPT(ModelConfig(**{**BASE, **changes}), seed=1).double().eval()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):  # larger than at the start, and no gain is one
            parameter.copy_(0.7 * seeded(*parameter.shape, seed=seed))
    return model


@torch.no_grad()
def recorded(model: GPT) -> dict[str, list[float | None]]:
    with recording(model) as found:
        model(IDS_BT)
    return found.by_measure()


# -------------------------------------------------------------------------------------------------------------- ranks


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**31), st.sampled_from([1e-6, 1.0, 1e6]))
def test_norms_and_ranks_of_any_matrix(rows: int, columns: int, seed: int, size: float) -> None:
    weight = size * seeded(rows, columns, seed=seed)
    exact = torch.linalg.matrix_norm(weight, 2).item()
    bound = min(rows, columns) ** (1 / 2 ** (dynamics.SQUARINGS + 2))
    assert exact * (1 - 1e-9) <= spectral_norm(weight).item() <= exact * bound * (1 + 1e-9)
    assert 1 - 5e-3 <= stable_rank(weight).item() <= min(rows, columns) + 1e-9


def test_known_ranks() -> None:
    assert stable_rank(torch.outer(seeded(5), seeded(7))).item() == pytest.approx(1, rel=1e-9)
    assert stable_rank(3 * torch.eye(8)).item() == pytest.approx(8, rel=2.1e-3)
    assert stable_rank(torch.diag(torch.tensor([2.0, 1.0, 1.0]))).item() == pytest.approx(1.5, rel=1e-6)
    assert stable_rank(1e-3 * torch.eye(8, dtype=torch.bfloat16)).item() == pytest.approx(8, rel=2.1e-3)


# ---------------------------------------------------------------------------------------------------------- Jacobians

KINDS: tuple[ProjectionConfig, ...] = (
    Linear(),
    Residual(),
    Bottleneck(),
    Bottleneck(anchor="linear", norm_stage="separate", pre_norm="layernorm"),
    Bottleneck(anchor="none", activation="relu2", width=5),
    NonlinearLoRA(rank=3),
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.kind}-{getattr(kind, 'anchor', '')}")
def test_the_mean_jacobian_is_the_mean_of_each_tokens(kind: ProjectionConfig) -> None:
    projection, x_ND = kind.build(D, D).double(), seeded(7, D)
    with torch.no_grad():
        for seed, parameter in enumerate(projection.parameters()):
            parameter.copy_(0.7 * seeded(*parameter.shape, seed=seed))
    each = [torch.autograd.functional.jacobian(projection, x_D) for x_D in x_ND]
    with torch.no_grad():
        found = mean_jacobian(projection, x_ND)
    assert not found.requires_grad
    assert torch.allclose(found, torch.stack(each).mean(0), rtol=1e-10, atol=1e-12)


def test_of_linear_projections_it_is_the_weight() -> None:
    linear = Linear().build(D, 3 * D).double()
    assert torch.allclose(mean_jacobian(linear, seeded(4, D)), linear.weight, atol=1e-14)
    assert torch.allclose(mean_jacobian(Identity().build(D, D), seeded(4, D)), torch.eye(D, dtype=torch.float64))


def test_what_is_read_besides_the_input_is_held() -> None:
    reuse = MLPReuse().build(D, D, d_other=5).double()
    assert torch.allclose(mean_jacobian(reuse, seeded(4, D), seeded(4, 5)), torch.eye(D, dtype=torch.float64) / 2)


# ---------------------------------------------------------------------------------------------------------- attention


def causal() -> View:
    return View("causal", 0, T, torch.device("cpu"))


def test_entropy_of_equal_and_of_sharp_logits() -> None:
    q_BHTE, k_BHTE = torch.zeros(2, 3, T, E), torch.ones(2, 3, T, E)
    largest, entropy = logits_and_entropy(q_BHTE, k_BHTE, causal(), None, 1.0)
    assert largest.item() == 0
    assert entropy.item() == pytest.approx(sum(math.log(t) for t in range(1, T + 1)) / T, rel=1e-6)
    sharp = torch.eye(T).expand(2, 3, T, T)  # each token sees itself, and nothing else comes near
    assert logits_and_entropy(sharp, sharp, causal(), None, 200.0)[1].item() == 0


@pytest.mark.parametrize(
    "changes",
    [{}, {"n_kv_heads": 2, "window": 3}, {"attention_softcap": 0.8}, {"attends": "bidirectional"}],
    ids=["mha", "gqa-window", "cap", "all"],
)
@pytest.mark.parametrize("numbers", [1, 2**24])
def test_entropy_written_out(changes: dict[str, Any], numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, met = build(**changes), []
    mixes = type(model.blocks[0].attention).mix
    for block in model.blocks:
        attention = block.attention
        attention.mix = lambda *a, attention=attention: met.append(a) or mixes(attention, *a)
    monkeypatch.setattr(attention_logits, "MOST_NUMBERS", numbers)
    found, config = recorded(model), model.config
    for layer, (q_BHTE, k_BGTE, _, view, _) in enumerate(met):
        k_BHTE = k_BGTE.repeat_interleave(config.n_heads // config.kv_heads, dim=1)
        logits = config.scale * q_BHTE @ k_BHTE.transpose(-1, -2)
        mask, is_causal = view.mask(config.window)
        visible = torch.ones(T, T, dtype=torch.bool).tril() if is_causal else mask
        visible = torch.ones(T, T, dtype=torch.bool) if visible is None else visible
        assert found["attention.max_logit"][layer] == pytest.approx(
            logits[visible.expand_as(logits)].abs().max().item()
        )
        if (cap := config.attention_softcap) is not None:
            logits = cap * torch.tanh(logits / cap)
        weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        entropy = torch.distributions.Categorical(weights, validate_args=False).entropy().mean().item()
        assert found["attention.entropy"][layer] == pytest.approx(entropy, rel=1e-6)


def test_padding_has_no_entropy() -> None:
    model, padding_B = build(), torch.tensor([0, 3, 8])
    with recording(model) as found, torch.no_grad():
        model(IDS_BT, padding_B=padding_B)
    total, rows = 0.0, 0
    for ids_T, padding in zip(IDS_BT, padding_B.tolist(), strict=True):
        with recording(model) as alone, torch.no_grad():
            model(ids_T[None, padding:])
        total += (T - padding) * alone.by_measure()["attention.entropy"][0]
        rows += T - padding
    assert found.by_measure()["attention.entropy"][0] == pytest.approx(total / rows, rel=1e-6)


# ------------------------------------------------------------------------------------------------------------- a model


def test_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's layer, block by block: every number of its queries again, from what attention is given."""
    monkeypatch.setattr(dynamics, "JACOBIAN_SPACING", 1)
    model, inputs = build(query=Bottleneck()), list[Tensor]()
    handles = [b.attention.register_forward_pre_hook(lambda _, a: inputs.append(a[0][0])) for b in model.blocks]
    found = recorded(model)
    for handle in handles:
        handle.remove()
    for layer, (block, x_BTD) in enumerate(zip(model.blocks, inputs, strict=True)):
        query, x_ND = block.attention.query, x_BTD.flatten(0, 1)
        n_ND = torch.nn.functional.rms_norm(x_ND, (D,), query.pre_gain, 1e-5)
        h_NR = torch.nn.functional.gelu(n_ND @ query.w1.T)
        f_ND = torch.nn.functional.layer_norm(h_NR @ query.w2.T, (D,), query.post_gain, None, 1e-5)
        jacobian = torch.stack([torch.autograd.functional.jacobian(query, x_D) for x_D in x_ND]).mean(0)
        expected = {
            "query.f_to_x": (f_ND.norm(dim=1) / x_ND.norm(dim=1)).mean(),
            "query.cosine": ((f_ND * x_ND).sum(1) / f_ND.norm(dim=1) / x_ND.norm(dim=1)).mean(),
            "query.dead_units": (h_NR.abs() <= DEAD).all(0).double().mean(),
            "query.norm": jacobian.norm(),
            "query.stable_rank": (jacobian.norm() / torch.linalg.matrix_norm(jacobian, 2)) ** 2,
            "key.norm": block.attention.key.weight.norm(),
            "query.w2.norm": query.w2.norm(),
        }
        for measure, value in expected.items():
            assert found[measure][layer] == pytest.approx(value.item(), rel=1e-3), measure
    assert all(0 <= value < 1 for value in found["query.dead_units"])


def test_a_unit_that_no_token_reaches_is_dead() -> None:
    model = build(query=Bottleneck(), mlp=Dense("relu2"), bias=True)
    with torch.no_grad():
        model.blocks[1].attention.query.b1[:3] = -100.0
        model.blocks[0].mlp.up.bias[:] = -100.0
    before, found = recorded(build(query=Bottleneck(), mlp=Dense("relu2"), bias=True)), recorded(model)
    assert found["mlp.dead_units"][0] == 1
    assert found["query.dead_units"][1] >= before["query.dead_units"][1] + 1 / 8
    assert found["query.dead_units"][1] < 1


def test_a_unit_is_dead_that_stays_near_zero_on_either_side_and_at_every_token() -> None:
    h_NF = torch.tensor([[0.0, -0.1, DEAD, 0.0], [-DEAD, -0.1, 0.0, 0.0], [0.0, -0.1, 0.0, 2 * DEAD]])
    assert dead_share(h_NF) == 0.5


def test_a_jacobian_is_averaged_over_tokens_from_all_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamics, "JACOBIAN_TOKENS", 4)
    monkeypatch.setattr(dynamics, "JACOBIAN_SPACING", 2)
    model, inputs = build(query=Bottleneck(), n_layers=1), list[Tensor]()
    handle = model.blocks[0].attention.register_forward_pre_hook(lambda _, a: inputs.append(a[0][0].flatten(0, 1)))
    found = recorded(model)
    handle.remove()
    taken = mean_jacobian(model.blocks[0].attention.query, inputs[0][[0, 6, 12, 18]])  # of 27
    assert found["query.norm"] == pytest.approx([taken.norm().item()], rel=1e-5)


LINEAR = {f"{name}.{what}" for name in ("query", "key", "value") for what in ("norm", "stable_rank")}
ATTENTION = {"attention.entropy", "attention.max_logit"}


@pytest.mark.parametrize(
    ("changes", "more", "less"),
    [
        ({}, set(), set()),
        ({"query": Identity()}, set(), set()),
        (
            {"query": Residual()},
            {"query.weight.norm", "query.weight.stable_rank", "query.f_to_x", "query.cosine"},
            set(),
        ),
        ({"mixer": LinearAttention()}, set(), ATTENTION),
        ({"mixer": MLPAttention()}, set(), ATTENTION | {m for m in LINEAR if not m.startswith("value")}),
        ({"mlp": MixtureOfExperts(2, 1)}, set(), {"mlp.dead_units"}),
    ],
    ids=["linear", "identity", "residual", "linear-attention", "mlp-attention", "experts"],
)
def test_what_there_is_to_measure(changes: dict[str, Any], more: set[str], less: set[str]) -> None:
    found = recorded(build(**changes))
    assert found.keys() == (LINEAR | ATTENTION | {"mlp.dead_units"} | more) - less
    assert all(None not in values and len(values) == 2 for values in found.values())


def test_blocks_that_differ_and_blocks_that_are_shared() -> None:
    found = recorded(build(overrides=(LayerOverride((1,), mixer=LinearAttention()),)))
    assert found["attention.entropy"][0] > 0
    assert found["attention.entropy"][1] is None
    shared = recorded(build(share_blocks=True, query=Bottleneck()))
    assert shared["key.norm"][0] == shared["key.norm"][1]
    assert shared["query.f_to_x"][0] != shared["query.f_to_x"][1]


def test_what_is_not_finite_is_left_out() -> None:
    model = build()
    with torch.no_grad():
        model.blocks[1].attention.key.weight[0, 0] = torch.nan
    found = recorded(model)
    assert found["key.norm"][0] is not None
    assert found["key.norm"][1] is None


def test_in_half_precision_projections_are_measured_in_single() -> None:
    model = build(query=Bottleneck()).float()
    whole = recorded(model)
    with torch.autocast("cpu", torch.bfloat16):
        half = recorded(model)
    for measure in ("query.norm", "query.f_to_x", "query.cosine"):
        assert half[measure][0] == pytest.approx(whole[measure][0], rel=1e-5)  # the first block's input is no product


def test_the_model_stays_as_it_was() -> None:
    model = build(dropout=0.2, query=Bottleneck()).train()
    torch.manual_seed(1)
    before = model(IDS_BT)
    torch.manual_seed(1)
    with recording(model):
        assert torch.equal(before, model(IDS_BT))
    with pytest.raises(ValueError, match="without a cache"), recording(model), torch.no_grad():
        model(IDS_BT, Cache(model.config, batch=3, dtype=torch.float64))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
