"""The rules that choose a token, each against plain loops over a list."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from qurve.errors import BadInput, QurveError
from qurve.generate.sampling import LIKELY, Sampling, draw, keep_min_p, keep_top_k, keep_top_p, penalized

# Quarters, so that equal logits are common; the zeros test the penalty's two sides.
logits_of = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=1, max_size=12)
shares = st.sampled_from([0.05, 0.3, 0.5, 0.77, 0.9, 0.99, 1.0])


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def kept(logits_BV: torch.Tensor) -> list[int]:
    return logits_BV[0].isfinite().nonzero()[:, 0].tolist()


def plain_top_k(logits: list[float], k: int) -> list[int]:
    bound = sorted(logits, reverse=True)[min(k, len(logits)) - 1]
    return [i for i, logit in enumerate(logits) if logit >= bound]


def plain_top_p(logits: list[float], p: float) -> list[int]:
    chances, total = softmax(logits), 0.0
    for i in sorted(range(len(logits)), key=lambda i: -logits[i]):
        total += chances[i]
        if total >= p:
            return [j for j, logit in enumerate(logits) if logit >= logits[i]]
    return list(range(len(logits)))


def on_the_border(logits: list[float], p: float) -> bool:
    """Whether rounding decides what `plain_top_p` keeps."""
    totals = itertools.accumulate(sorted(softmax(logits), reverse=True))
    return any(abs(total - p) < 1e-5 for total in totals)


@given(logits_of, st.integers(1, 15))
def test_top_k(logits: list[float], k: int) -> None:
    assert kept(keep_top_k(torch.tensor([logits]), k)) == plain_top_k(logits, k)


@given(logits_of, st.sampled_from([0.05, 0.3, 0.5, 0.77, 0.9, 0.99]))
def test_top_p(logits: list[float], p: float) -> None:
    assume(not on_the_border(logits, p))
    assert kept(keep_top_p(torch.tensor([logits]), p)) == plain_top_p(logits, p)


@given(logits_of, shares)
def test_min_p(logits: list[float], p: float) -> None:
    chances = softmax(logits)
    assume(all(abs(chance - p * max(chances)) > 1e-6 or chance == max(chances) for chance in chances))
    expected = [i for i, chance in enumerate(chances) if chance >= p * max(chances)]
    assert kept(keep_min_p(torch.tensor([logits]), p)) == expected


@given(st.data(), logits_of, st.sampled_from([0.5, 1.0, 1.3, 4.0]))
def test_repetition_penalty(data: st.DataObject, logits: list[float], penalty: float) -> None:
    seen = data.draw(st.lists(st.booleans(), min_size=len(logits), max_size=len(logits)))
    expected = []
    for logit, was_seen in zip(logits, seen, strict=True):
        expected.append(logit if not was_seen else logit / penalty if logit > 0 else logit * penalty)
    found = penalized(torch.tensor([logits]), torch.tensor([seen]), penalty)[0].tolist()
    assert found == pytest.approx(expected)


@given(logits_of, st.floats(0, 1, exclude_max=True))
def test_a_draw_takes_each_token_in_its_share_of_the_unit_interval(logits: list[float], uniform: float) -> None:
    chances, below = softmax(logits), 0.0
    for expected, chance in enumerate(chances):
        below += chance
        assume(abs(below - uniform) > 1e-5 or expected == len(chances) - 1)
        if uniform < below:
            break
    p_BV = torch.tensor([logits]).softmax(-1)
    assert draw(p_BV, torch.tensor([uniform], dtype=torch.float64)).tolist() == [expected]


@given(
    st.data(),
    logits_of,
    st.sampled_from([0.3, 1.0, 2.5]),
    st.none() | st.integers(1, 9),
    st.none() | shares,
    st.none() | st.sampled_from([0.0, 0.06, 0.33]),
)
def test_the_rules_act_in_the_order_that_is_stated(
    data: st.DataObject,
    logits: list[float],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
) -> None:
    seen = data.draw(st.lists(st.booleans(), min_size=len(logits), max_size=len(logits)))
    left = [
        (logit if not was else logit / 1.5 if logit > 0 else logit * 1.5) / temperature
        for logit, was in zip(logits, seen, strict=True)
    ]
    ids = list(range(len(left)))

    def keep(places: list[int]) -> None:
        ids[:], left[:] = [ids[i] for i in places], [left[i] for i in places]

    if top_k is not None:
        keep(plain_top_k(left, top_k))
    if top_p is not None and top_p < 1:
        assume(not on_the_border(left, top_p))
        keep(plain_top_p(left, top_p))
    if min_p is not None:
        chances = softmax(left)
        assume(all(abs(chance - min_p * max(chances)) > 1e-6 for chance in chances))
        keep([i for i, chance in enumerate(chances) if chance >= min_p * max(chances)])
    expected = dict(zip(ids, softmax(left), strict=True))
    penalized_BV = penalized(torch.tensor([logits]), torch.tensor([seen]), 1.5)
    found = Sampling(1.5, temperature, top_k, top_p, min_p).probabilities(penalized_BV)[0].tolist()
    assert found == pytest.approx([expected.get(i, 0.0) for i in range(len(logits))], abs=2e-6)


def test_temperature_zero_is_the_likeliest_after_the_penalty() -> None:
    logits_BV = torch.tensor([[1.0, 3.0, 2.0], [0.5, -1.0, -0.2]])
    greedy, none = Sampling(temperature=0, top_k=1), [torch.Generator()] * 2
    assert greedy.choose(logits_BV, None, none) == [1, 0]
    seen_BV = torch.tensor([[False, True, False], [True, False, False]])
    assert Sampling(2.0, temperature=0).choose(logits_BV, seen_BV, none) == [2, 0]
    assert Sampling(9.0, temperature=0).choose(-logits_BV, ~seen_BV, none) == [1, 1]


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e30])
def test_no_temperature_makes_a_probability_that_is_none(temperature: float) -> None:
    p_BV = Sampling(temperature=temperature).probabilities(torch.tensor([[3e4, 1.0, -3e4]]))
    assert p_BV.sum().item() == pytest.approx(1)
    assert p_BV.isfinite().all()


@pytest.mark.parametrize("spread", [0.0, 1e-4, 3.0])
def test_top_p_of_a_large_vocabulary_needs_more_than_the_likely_ones(spread: float) -> None:
    """Flat, nearly flat, and with more than enough among those that are sorted first; both in one batch as well."""
    generator = torch.Generator().manual_seed(1)
    flat_BV = spread * torch.randn(1, 2 * LIKELY[-1], generator=generator)
    peaked_BV = flat_BV.clone()
    peaked_BV[0, 7] += 20
    for p in (0.2, 0.9):  # between two totals; further out, rounding decides
        expected = [plain_top_p(logits_BV[0].tolist(), p) for logits_BV in (flat_BV, peaked_BV)]
        together_BV = keep_top_p(torch.cat([flat_BV, peaked_BV]), p)
        assert [kept(row_V[None]) for row_V in together_BV] == expected
        assert kept(keep_top_p(peaked_BV, p)) == expected[1]
        assert 1 <= len(expected[1]) < LIKELY[0]


def test_a_draw_never_takes_what_cannot_be() -> None:
    p_BV = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).repeat(4, 1)
    uniform_B = torch.tensor([0.0, 0.4999999, 0.5, math.nextafter(1, 0)], dtype=torch.float64)
    assert draw(p_BV, uniform_B).tolist() == [1, 1, 3, 3]


def test_draws_have_the_frequencies_of_the_distribution() -> None:
    chance, logits_BV = torch.Generator().manual_seed(3), torch.tensor([[0.0, 1.0, 2.0]])
    counts = Counter(Sampling().choose(logits_BV, None, [chance])[0] for _ in range(2000))
    for token, p in enumerate(softmax([0.0, 1.0, 2.0])):
        assert abs(counts[token] - 2000 * p) < 5 * math.sqrt(2000 * p * (1 - p))


def test_a_sequence_draws_from_its_own_stream_whatever_is_beside_it() -> None:
    logits_BV = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))

    def chances() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in (5, 6, 7)]

    together = Sampling(top_p=0.8).choose(logits_BV, None, chances())
    alone = [
        Sampling(top_p=0.8).choose(row_V[None], None, [chance])[0]
        for row_V, chance in zip(logits_BV, chances(), strict=True)
    ]
    assert together == alone


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_told_of(bad: float) -> None:
    for sampling in (Sampling(), Sampling(temperature=0)):
        with pytest.raises(QurveError, match="logits are not finite"):
            sampling.choose(torch.tensor([[0.0, bad]]), None, [torch.Generator()])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -0.1, "temperature = -0.1: it must be 0, or 1e-30 to 1e30"),
        ("temperature", math.nan, "temperature = nan"),
        ("repetition_penalty", 0.0, "repetition_penalty = 0.0: it must be 1e-30 to 1e30"),
        ("repetition_penalty", math.inf, "repetition_penalty = inf"),
        ("temperature", 1e-46, "temperature = 1e-46: it must be 0, or 1e-30 to 1e30"),
        ("temperature", float("nan"), "temperature = nan: it must be 0, or 1e-30 to 1e30"),
        ("repetition_penalty", 1e-40, "repetition_penalty = 1e-40: it must be 1e-30 to 1e30"),
        ("top_k", 2.5, "top_k = 2.5: it must be a whole number, at least 1"),
        ("seed", -1, "seed = -1: it must be a whole number, at least 0"),
        ("top_k", 0, "top_k = 0: it must be a whole number, at least 1"),
        ("top_p", 0.0, "top_p = 0.0: it must be above 0 and at most 1"),
        ("top_p", 1.1, "top_p = 1.1"),
        ("top_p", math.nan, "top_p = nan"),
        ("min_p", -0.1, "min_p = -0.1: it must be at least 0 and at most 1"),
        ("min_p", 1.5, "min_p = 1.5"),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: float, message: str) -> None:
    with pytest.raises(BadInput, match=message.replace(".", r"\.")):
        Sampling(**{name: value})
