"""Masks and positions: who sees whom, written out cell by cell, and what the model makes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from qurve.model.attention import SHORT
from qurve.model.cache import Cache
from qurve.model.config import LayerOverride, ModelConfig
from qurve.model.gpt import GPT
from qurve.model.positions import NoPositions, Rope
from qurve.model.view import View
from qurve.zoo.mlp_attention import MLPAttention

TINY = ModelConfig(n_layers=2, d_model=12, n_heads=2, d_ff=20, context=11, vocab_size=17)


def tokens(batch: int = 2, length: int = 11) -> torch.Tensor:
    return torch.randint(17, (batch, length), generator=torch.Generator().manual_seed(1))


def build(**changes: Any) -> GPT:
    model = GPT(dataclasses.replace(TINY, **changes), seed=1).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
    return model


@given(
    st.sampled_from(["causal", "bidirectional", "prefix"]),
    st.integers(0, 3),
    st.integers(1, 6),
    st.none() | st.integers(1, 7),
    st.none() | st.lists(st.integers(0, 9), min_size=2, max_size=2),
    st.lists(st.integers(0, 9), min_size=2, max_size=2),
    st.none() | st.integers(0, 1000),
)
def test_mask_cell_by_cell(
    attends: Any,
    start: int,
    length: int,
    window: int | None,
    padding: list[int] | None,
    prefix: list[int],
    seed: int | None,
) -> None:
    start = start if attends == "causal" else 0
    total = start + length
    allowed_BTT = None
    if seed is not None and start == 0:
        allowed_BTT = torch.rand(2, length, length, generator=torch.Generator().manual_seed(seed)) < 0.7
    given_prefix = torch.tensor(prefix) if attends == "prefix" else None
    view = View(
        attends,
        start,
        length,
        torch.device("cpu"),
        None if padding is None else torch.tensor(padding),
        given_prefix,
        allowed_BTT,
    )
    mask, is_causal = view.mask(window)
    for b in range(2):
        for t in range(start, total):
            row = []
            for s in range(total):
                sees = s <= t if attends != "bidirectional" else True
                sees = sees and (window is None or abs(t - s) < window)
                if attends == "prefix":
                    sees = sees or (t < prefix[b] and s < prefix[b])
                if padding is not None:
                    sees = (sees and s >= padding[b]) or s == t
                if allowed_BTT is not None:
                    sees = sees and bool(allowed_BTT[b, t, s])
                row.append(sees)
            if not any(row):
                row[t] = True  # a token that may see nothing sees itself
            if mask is None:
                found = [s <= t or not is_causal for s in range(total)]
            else:
                assert not is_causal
                found = mask.expand(2, 1, length, total)[b, 0, t - start].tolist()
            assert found == row, (b, t)


def test_a_token_sees_within_its_prefix_and_back_beyond_it() -> None:
    model, ids_BT = build(attends="prefix"), tokens()
    prefix_B = torch.tensor([6, 3])
    with torch.no_grad():
        before = model(ids_BT, prefix_B=prefix_B)
        for changed in range(11):
            other_BT = ids_BT.clone()
            other_BT[:, changed] = (other_BT[:, changed] + 1) % 17
            moved_BT = (model(other_BT, prefix_B=prefix_B) != before).any(-1)
            for b, prefix in enumerate(prefix_B.tolist()):
                expected = [changed <= t or (changed < prefix and t < prefix) for t in range(11)]
                assert moved_BT[b].tolist() == expected


def test_documents_side_by_side_are_documents_apart() -> None:
    """An arbitrary mask: with relative positions, two documents in one sequence know nothing of each other."""
    for positions in (NoPositions(), Rope()):
        for attends in ("causal", "bidirectional"):
            model, ids_BT = build(positions=positions, attends=attends), tokens()
            document_T = torch.tensor([0] * 4 + [1] * 7)
            allowed_BTT = (document_T[:, None] == document_T)[None]
            with torch.no_grad():
                together = model(ids_BT, allowed_BTT=allowed_BTT)
                apart = torch.cat([model(ids_BT[:, :4]), model(ids_BT[:, 4:])], dim=1)
            assert_close(together, apart, rtol=1e-4, atol=1e-6)  # angles are of float32


@pytest.mark.parametrize("changes", [{}, {"attention_softcap": 10.0}, {"mixer": MLPAttention(), "n_heads": 3}])
def test_a_token_that_may_see_nothing_sees_itself(changes: Any) -> None:
    model, ids_BT = build(**changes), tokens()
    allowed_BTT = torch.ones(1, 11, 11, dtype=torch.bool)
    allowed_BTT[0, 4] = False
    only_itself_BTT = allowed_BTT.clone()
    only_itself_BTT[0, 4, 4] = True
    with torch.no_grad():
        found = model(ids_BT, allowed_BTT=allowed_BTT)
        assert found.isfinite().all()
        assert torch.equal(found, model(ids_BT, allowed_BTT=only_itself_BTT))


def test_a_bidirectional_model_is_the_causal_one_seen_from_its_last_token() -> None:
    causal, both = build(n_layers=1), build(n_layers=1, attends="bidirectional")
    both.load_state_dict(causal.state_dict())
    ids_BT = tokens()
    with torch.no_grad():
        assert_close(both(ids_BT)[:, -1], causal(ids_BT)[:, -1])
        assert not torch.isclose(both(ids_BT)[:, 0], causal(ids_BT)[:, 0]).any()


def test_softcap_of_the_attention_is_written_out_and_gentle_when_large() -> None:
    plain, capped = build(), build(attention_softcap=1e4)
    ids_BT = tokens()
    with torch.no_grad():
        assert_close(capped(ids_BT), plain(ids_BT), rtol=1e-6, atol=1e-8)
        assert not torch.isclose(build(attention_softcap=0.1)(ids_BT), plain(ids_BT)).all()
    # A cap of nearly nothing makes all logits alike: attention takes the mean of what it sees.
    layer = build(n_layers=1, attention_softcap=1e-9, attends="bidirectional").blocks[0].attention
    x_BTD = torch.randn(2, 11, 12, dtype=torch.float64)
    view = View("bidirectional", 0, 11, x_BTD.device)
    assert_close(layer((x_BTD,), view), layer.output(layer.value(x_BTD).mean(1, keepdim=True).expand(-1, 11, -1)))


def test_windows_may_differ_by_block() -> None:
    config = dataclasses.replace(TINY, overrides=(LayerOverride((1,), window=1),), positions=NoPositions())
    model = build(overrides=config.overrides, positions=NoPositions())
    assert [block.config.window for block in model.blocks] == [None, 1]
    one = build(n_layers=1, positions=NoPositions(), window=1)
    ids_BT = tokens()
    changed_BT = ids_BT.clone()
    changed_BT[:, 2] = (changed_BT[:, 2] + 1) % 17
    with torch.no_grad():
        assert (one(ids_BT) != one(changed_BT)).any(-1)[0].tolist() == [t == 2 for t in range(11)]


def test_a_poisoned_cache_of_padded_sequences_stays_clean() -> None:
    model, ids_BT = build(), tokens()
    cache = Cache(model.config, 2, padding_B=torch.tensor([4, 0]), dtype=torch.float64)
    for state in cache.states:
        state.keys.fill_(torch.nan)
        state.values.fill_(torch.nan)
    with torch.no_grad():
        for part in ids_BT.split((5, 1, 1, 4), dim=1):
            assert model(part, cache).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "call", "message"),
    [
        ({}, {"prefix_B": torch.tensor([1, 1])}, r"prefix_B has no place here: it is for model\.attends = prefix"),
        ({"attends": "prefix"}, {}, r"prefix_B is needed here"),
        ({}, {"padding_B": torch.tensor([3])}, r"padding_B has the shape \[1\]; it needs one number a sequence, 2"),
        ({"attends": "prefix"}, {"prefix_B": torch.tensor([7])}, r"prefix_B has the shape \[1\]"),
        ({}, {"allowed_BTT": torch.ones(1, 11, 11)}, r"is \[1, 11, 11\] of torch\.float32; it is of torch\.bool"),
        ({}, {"allowed_BTT": torch.ones(3, 11, 11, dtype=torch.bool)}, r"one for each sequence or one for all"),
        ({}, {"allowed_BTT": torch.ones(1, 3, 3, dtype=torch.bool)}, r"needs the shape \[B or 1, 11, 11\]"),
    ],
)
def test_what_does_not_fit_is_refused(changes: Any, call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**changes)(tokens(), **call)


def test_the_cache_refuses_what_cannot_be_decoded() -> None:
    with pytest.raises(ValueError, match="bidirectional model sees the tokens to come"):
        Cache(dataclasses.replace(TINY, attends="bidirectional"), 2)
    with pytest.raises(ValueError, match=r"padding_B has the shape \[3\]; it needs one number a sequence, 2"):
        Cache(TINY, 2, padding_B=torch.zeros(3))
    with pytest.raises(ValueError, match=r"padding_B = \[0, -1\]: it must be at least 0"):
        Cache(TINY, 2, padding_B=torch.tensor([0, -1]))
    prefix = build(attends="prefix")
    with pytest.raises(ValueError, match="a prefix of 7 tokens has to be in one call, and this one has 5"):
        prefix(tokens(length=5), Cache(prefix.config, 2, dtype=torch.float64), prefix_B=torch.tensor([7, 2]))
    model = build()
    with pytest.raises(ValueError, match="give padding_B to the cache"):
        model(tokens(), Cache(TINY, 2, dtype=torch.float64), padding_B=torch.zeros(2))


@pytest.mark.parametrize("changes", [{}, {"attention_softcap": 9.0}, {"mixer": MLPAttention(hidden=3)}], ids=str)
@pytest.mark.parametrize(("weights", "cached"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_cache_may_have_another_dtype_than_the_model(changes: Any, weights: torch.dtype, cached: torch.dtype) -> None:
    """Also beyond the length up to which the CPU attends in float32 anyway."""
    config = dataclasses.replace(TINY, context=SHORT + 20, **changes)
    model, ids_BT = GPT(config, seed=1).to(weights).eval(), tokens(length=SHORT + 20)
    cache = Cache(config, 2, dtype=cached)
    with torch.no_grad():
        found = torch.cat([model(part, cache) for part in ids_BT.split((SHORT + 10, 1, 9), dim=1)], dim=1)
        assert_close(found, model(ids_BT), atol=0.02, rtol=0.02)
