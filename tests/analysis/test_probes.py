"""Probes on a query that was built by hand to compute a conjunction, or to turn a concept up, and on ones that cannot.

The planted model has one block, whose tokens say two things, `a` and `b`, along two channels each; other channels are
random, so that nothing else of the vocabulary can be read off. Its `f` is one ReLU unit with biases and no norms.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import pytest
import torch

from qurve.analysis.mechanism import Window
from qurve.analysis.probes import (
    Conjunction,
    conjunctions,
    labels,
    random_concepts,
    randomized,
    reweighting,
    text_concepts,
)
from qurve.model.config import LayerOverride, ModelConfig
from qurve.model.gpt import GPT
from qurve.projections import Bottleneck, Linear, ProjectionConfig, Residual

D, T, V = 16, 32, 512
GENERATOR = torch.Generator().manual_seed(5)
A_V, B_V = torch.arange(V) % 2 == 0, torch.arange(V) % 4 < 2  # each with and without the other equally often
CONCEPTS = {"a": A_V, "b": B_V}
A_PLACE, B_PLACE = slice(0, 2), slice(2, 4)
UNIT = Bottleneck(activation="relu", width=1, pre_norm="none", post_norm="none")


def planted(query: ProjectionConfig = UNIT) -> GPT:
    config = ModelConfig(
        n_layers=1, d_model=D, n_heads=2, d_ff=8, context=T, vocab_size=V, query=query, bias=True, norm="layernorm"
    )
    model = GPT(config, seed=1).eval()
    with torch.no_grad():
        sign = torch.tensor([1.0, -1.0])
        emb_VD = torch.nn.functional.normalize(torch.randn(V, D, generator=GENERATOR), dim=-1) * math.sqrt(D)
        emb_VD[:, A_PLACE] = (2.0 * A_V - 1)[:, None] * sign
        emb_VD[:, B_PLACE] = (2.0 * B_V - 1)[:, None] * sign
        model.token_embedding.weight.copy_(emb_VD)
        model.position_embedding.weight.zero_()
    return model


def set_unit(model: GPT, on_a: float, on_b: float, bias: float, out_D: torch.Tensor) -> None:
    """`f(x) = relu(on_a a + on_b b + bias) out`, where `a` and `b` are about 1 or -1."""
    query = model.blocks[0].attention.query
    with torch.no_grad():
        query.w1.zero_()
        query.w1[0, A_PLACE] = on_a * torch.tensor([0.5, -0.5])
        query.w1[0, B_PLACE] = on_b * torch.tensor([0.5, -0.5])
        query.b1.fill_(bias)
        query.w2.copy_(out_D[:, None])
        query.b2.zero_()


def text(seed: int) -> list[Window]:
    """Every id once."""
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(seed)).view(-1, 1, T)
    return [(row, row) for row in ids]


FIT_ON, WINDOWS = text(seed=1), text(seed=2)


def the_pair(found: list[Conjunction]) -> Conjunction:
    return next(one for one in found if one.pair == ("now a", "now b"))


# ------------------------------------------------------------------------------------------------------------- concepts


def test_concepts_of_text() -> None:
    found = text_concepts([b" the", b"A", b",", b"o", b"\xe2\x82", b"Ni"])
    assert {name: table.tolist() for name, table in found.items()} == {
        "opens a word": [True, False, False, False, False, False],
        "capital": [False, True, False, False, False, True],
        "mark": [False, False, True, False, True, False],
        "ends on a vowel": [True, True, False, True, False, True],
        "several letters": [True, False, False, False, False, False],
    }


def test_labels_of_a_token_of_the_one_before_and_of_earlier_ones() -> None:
    ids_BT = torch.tensor([[0, 1, 1, 2, 0], [2, 2, 2, 0, 1]])
    found = labels({"odd": torch.tensor([False, True, False])}, ids_BT)
    assert {name: t.int().tolist() for name, t in found.items()} == {
        "now odd": [[0, 1, 1, 0, 0], [0, 0, 0, 0, 1]],
        "before odd": [[0, 0, 1, 1, 0], [0, 0, 0, 0, 0]],
        "came up before": [[0, 0, 1, 0, 1], [0, 1, 1, 0, 0]],
    }
    assert not labels({"zero": torch.tensor([True, False, False])}, ids_BT)["before zero"][:, 0].any()


def test_random_halves() -> None:
    found = random_concepts(10, 3, seed=1)
    assert [table.sum().item() for table in found.values()] == [5, 5, 5]
    assert all(torch.equal(a, b) for a, b in zip(found.values(), random_concepts(10, 3, seed=1).values(), strict=True))
    assert len({tuple(table.tolist()) for table in found.values()}) == 3


# --------------------------------------------------------------------------------------------------------- conjunctions


def test_a_planted_conjunction_is_in_the_query_and_not_in_its_input() -> None:
    model = planted()
    set_unit(model, 4.0, 4.0, -2.0, 10 * torch.nn.functional.normalize(torch.randn(D, generator=GENERATOR), dim=0))
    one = the_pair(conjunctions(model, CONCEPTS, FIT_ON, WINDOWS, seeds=(0, 1)))
    assert one.x < 0.1
    assert one.q > 0.9
    assert max(one.q_random) < 0.3
    assert len(one.q_random) == 2
    assert one.q_shuffled < 0.05
    assert fmean(one.by_window) == pytest.approx(one.q - one.x)
    assert len(one.by_window) == len(WINDOWS)


def test_a_linear_query_holds_what_its_input_does() -> None:
    """An invertible map of the input: every probe scores the same."""
    for one in conjunctions(planted(Residual()), CONCEPTS, FIT_ON, WINDOWS, seeds=(0,)):
        assert one.q == pytest.approx(one.x, abs=1e-4)
        assert one.q_random == pytest.approx((one.x,), abs=1e-4)


def test_the_score_by_hand() -> None:
    """Of the input: a table of `y` by token, regressed on the block's input with torch's own least squares."""
    model = planted()
    set_unit(model, 1.0, -1.0, 0.5, torch.ones(D))
    ids, tested = (torch.cat([window[0].flatten() for window in part]) for part in (FIT_ON, WINDOWS))
    with torch.no_grad():
        x_VD = model.blocks[0].attention_norm(model.token_embedding.weight).double()
    one_V1 = torch.ones(V, 1, dtype=torch.float64)
    ab_V3 = torch.cat([A_V[:, None], B_V[:, None], one_V1], dim=1).double()
    y_V = (A_V & B_V).double()
    y_V = y_V - ab_V3 @ torch.linalg.lstsq(ab_V3[ids], y_V[ids, None]).solution[:, 0]
    x_VD1 = torch.cat([x_VD, one_V1], dim=1)
    solution = torch.linalg.lstsq(x_VD1[ids], y_V[ids, None], driver="gelsd", rcond=1e-5).solution  # float32's zeros
    fitted_V = x_VD1 @ solution[:, 0]
    expected = 1 - ((y_V - fitted_V)[tested].square().sum() / (y_V[tested] - y_V[ids].mean()).square().sum()).item()
    assert the_pair(conjunctions(model, CONCEPTS, FIT_ON, WINDOWS, seeds=())).x == pytest.approx(expected, abs=1e-4)


def test_pairs_that_decide_each_other_and_rare_concepts_are_left_out() -> None:
    rare = torch.arange(V) == 3
    concepts = {"a": A_V, "not a": ~A_V, "never": rare}
    pairs = {one.pair for one in conjunctions(planted(Residual()), concepts, FIT_ON, WINDOWS, seeds=())}
    assert ("now a", "now not a") not in pairs
    assert ("now a", "before a") in pairs
    assert not any("never" in name for pair in pairs for name in pair)
    with pytest.raises(ValueError, match="no two of the concepts"):
        conjunctions(planted(Residual()), {"never": rare}, FIT_ON, WINDOWS, seeds=())


def test_models_without_an_f_and_too_little_text_are_refused() -> None:
    with pytest.raises(ValueError, match="no block's query is an anchor plus an f"):
        conjunctions(planted(Linear()), CONCEPTS, FIT_ON, WINDOWS)
    wide = GPT(ModelConfig(n_layers=1, d_model=64, n_heads=2, d_ff=8, context=T, vocab_size=V, query=Residual()))
    with pytest.raises(ValueError, match="fit a linear map of 64 channels"):
        conjunctions(wide, CONCEPTS, FIT_ON[:1], WINDOWS, seeds=())


def test_random_matrices_keep_the_singular_values_and_the_anchor() -> None:
    query = planted(Bottleneck(anchor="linear")).blocks[0].attention.query
    other = randomized(query, 1)
    for name in ("w1", "w2"):
        before, after = (torch.linalg.svdvals(getattr(q, name).detach()) for q in (query, other))
        assert torch.allclose(before, after, atol=1e-5)
        assert (getattr(other, name) - getattr(query, name)).norm() > 0.5 * getattr(query, name).norm()
    for name, side in (("w1", 2), ("w2", 0)):  # the spaces that f reads and writes are others
        before, after = (torch.linalg.svd(getattr(q, name).detach(), full_matrices=False)[side] for q in (query, other))
        before, after = (basis.T @ basis if side else basis @ basis.T for basis in (before, after))
        assert (after - before).norm() > 0.5
    assert torch.equal(other.weight, query.weight)
    assert torch.equal(randomized(query, 1).w1, other.w1)
    assert not torch.equal(randomized(query, 2).w1, other.w1)
    linear = planted(Residual()).blocks[0].attention.query
    assert not torch.allclose(randomized(linear, 1).weight, linear.weight)


# --------------------------------------------------------------------------------------------------------- reweighting


def by_hand(model: GPT, judged: list[Window]) -> tuple[float, float]:
    """`spread` and `turned` for "now a": the unit's derivative is 1 where it is on, and 0 elsewhere."""
    tokens = torch.cat([window[0].flatten() for window in judged])
    query = model.blocks[0].attention.query
    with torch.no_grad():
        x_VD = model.blocks[0].attention_norm(model.token_embedding.weight).double()
        c_D, w_D, out_D = x_VD[A_V].mean(0) - x_VD[~A_V].mean(0), query.w1[0].double(), query.w2[:, 0].double()
        on_V1 = (x_VD @ w_D + query.b1.item() > 0).double()[:, None]
    answers_VD = (c_D + on_V1 * (w_D @ c_D) * out_D) / 2
    mean_D, answers_ND = answers_VD.mean(0), answers_VD[tokens]
    gain_N = answers_ND @ mean_D / mean_D.square().sum()
    rest_ND = answers_ND - gain_N[:, None] * mean_D
    return gain_N.std().item(), (rest_ND.square().sum() / answers_ND.square().sum()).item()


def test_a_concept_that_another_one_turns_up() -> None:
    """The unit answers to `a` where `b` holds, and writes along `a`: twice the gain with `b`."""
    model, out_D = planted(), torch.zeros(D)
    out_D[A_PLACE] = torch.tensor([1.0, -1.0])
    set_unit(model, 1.0, 20.0, 0.0, out_D)
    one = next(r for r in reweighting(model, CONCEPTS, FIT_ON, WINDOWS, seeds=(0, 1)) if r.concept == "now a")
    assert (one.spread, one.turned) == pytest.approx(by_hand(model, WINDOWS), rel=1e-4)
    assert one.spread == pytest.approx(1 / 3, rel=0.05)  # half of the tokens at 1, half at 2, divided by the mean
    assert one.turned < 0.02
    assert one.by_concepts > 0.95
    assert len(one.random_matrices) == len(one.random_directions) == 2


def test_concepts_are_judged_on_text_that_they_were_not_fitted_on() -> None:
    """A map that was fitted on the same tokens would never be worse than their mean."""
    found = reweighting(planted(Bottleneck()), CONCEPTS, FIT_ON[:1], WINDOWS[:1], seeds=())
    assert min(one.by_concepts for one in found) < 0


def test_an_answer_elsewhere_is_a_turn() -> None:
    model, out_D = planted(), torch.zeros(D)
    out_D[10] = 3.0
    set_unit(model, 1.0, 20.0, 0.0, out_D)
    one = next(r for r in reweighting(model, CONCEPTS, FIT_ON, WINDOWS[:2], seeds=()) if r.concept == "now a")
    assert (one.spread, one.turned) == pytest.approx(by_hand(model, WINDOWS[:2]), rel=1e-4)
    assert one.turned > 0.1


def test_linear_queries_answer_alike_for_every_token() -> None:
    for one in reweighting(planted(Residual()), CONCEPTS, FIT_ON, WINDOWS, seeds=(0,)):
        for spread in (one.spread, *one.random_matrices, *one.random_directions):
            assert spread == pytest.approx(0.0, abs=1e-5)
        assert one.turned == pytest.approx(0.0, abs=1e-9)


def test_only_blocks_with_an_f_and_concepts_that_are_common_are_measured() -> None:
    config = ModelConfig(
        n_layers=2,
        d_model=D,
        n_heads=2,
        d_ff=8,
        context=T,
        vocab_size=V,
        query=Bottleneck(),
        overrides=(LayerOverride((0,), query=Linear()),),
    )
    model = GPT(config, seed=1).train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    arguments: Any = (model, CONCEPTS | {"never": torch.zeros(V, dtype=torch.bool)}, FIT_ON, WINDOWS)
    found = reweighting(*arguments, seeds=(0,))
    assert {one.layer for one in found} == {1} == {one.layer for one in conjunctions(*arguments, seeds=(0,))}
    assert {one.concept for one in found} == {"now a", "now b", "before a", "before b"}
    assert found == reweighting(*arguments, seeds=(0,))
    assert model.training
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
