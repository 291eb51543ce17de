"""The cache: how it grows, and how it goes on with some of its sequences. (What is decoded with it: other tests.)"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from qurve.model.cache import Cache
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.model.mixers import MixerConfig

TINY = ModelConfig(n_layers=2, d_model=12, n_heads=3, d_ff=20, context=20, vocab_size=17)
each = pytest.mark.parametrize("kind", MixerConfig.registry)


def model_of(kind: str) -> GPT:
    return GPT(dataclasses.replace(TINY, mixer=MixerConfig.registry[kind]()), seed=1).eval()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(17, (batch, length), generator=torch.Generator().manual_seed(1))


def room(state: Any) -> set[int]:
    return {getattr(state, name).shape[2] for name in state.per_token}


@each
def test_it_doubles_up_to_the_context_and_keeps_what_it_holds(kind: str) -> None:
    model, ids_BT = model_of(kind), tokens(2, 20)
    cache, lengths, parts = Cache(model.config, 2, 3), [], []
    with torch.no_grad():
        for part_BT in ids_BT.split((3, 1, 1, 4, 1, 1, 9), dim=1):
            parts.append(model(part_BT, cache))
            lengths.append(cache.length)
            assert all(room(state) <= {cache.length} for state in cache.states)
        assert_close(torch.cat(parts, dim=1), model(ids_BT), atol=1e-5, rtol=0)
    assert lengths == [3, 6, 6, 12, 12, 12, 20]


@each
def test_it_grows_at_once_to_what_is_needed(kind: str) -> None:
    cache = Cache(model_of(kind).config, 2, 3)
    cache.reserve(11)
    assert cache.length == 11
    assert all(room(state) <= {11} for state in cache.states)


@each
def test_a_growing_cache_keeps_its_dtype(kind: str) -> None:
    cache = Cache(model_of(kind).config, 1, 2, dtype=torch.bfloat16)
    before = [{name: t.dtype for name, t in vars(state).items()} for state in cache.states]
    cache.reserve(7)
    cache.select(torch.tensor([0, 0]))
    assert [{name: t.dtype for name, t in vars(state).items()} for state in cache.states] == before


@each
def test_selected_sequences_go_on_as_if_they_had_been_alone(kind: str) -> None:
    model, ids_BT, padding = model_of(kind), tokens(3, 12), (0, 2, 5)
    cache = Cache(model.config, 3, 12, padding_B=torch.tensor(padding))
    alone = [model(ids_BT[row : row + 1, pad:]) for row, pad in enumerate(padding)]
    with torch.no_grad():
        model(ids_BT[:, :7], cache)
        cache.select(torch.tensor([2, 1, 2]))
        assert cache.filled == 5
        assert cache.padding_B is not None
        assert cache.padding_B.tolist() == [3, 0, 3]
        found_BTV = model(ids_BT[[2, 1, 2], 7:10], cache)
        for place, row in enumerate((2, 1, 2)):
            assert_close(found_BTV[place], alone[row][0, 7 - padding[row] : 10 - padding[row]], atol=1e-5, rtol=0)
        cache.select(torch.tensor([0]))
        assert (cache.filled, cache.padding_B) == (5, None)
        found_BTV = model(ids_BT[[2], 10:], cache)
        assert_close(found_BTV[0], alone[2][0, 5:], atol=1e-5, rtol=0)


def test_padding_that_is_not_read_yet_stays() -> None:
    model = model_of("softmax")
    cache = Cache(model.config, 2, padding_B=torch.tensor([6, 4]))
    with torch.no_grad():
        model(tokens(2, 3), cache)
    cache.select(torch.tensor([0, 1]))
    assert (cache.filled, cache.padding_B.tolist() if cache.padding_B is not None else None) == (0, [3, 1])
