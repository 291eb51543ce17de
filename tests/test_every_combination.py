"""What every model must keep, whatever it is made of: every pair of options stands together in one of these.

A registered projection, mixer or residual scheme is covered as soon as it is registered (see `combinations`).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from combinations import LENGTH, VOCABULARY, accepted, config_of, covering_array, factors, pairs_of, words
from qurve.accounting import count
from qurve.accounting.routing import RoutingWithoutValues
from qurve.config import from_json, to_json
from qurve.model.cache import Cache
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT

ROWS, REFUSED = covering_array()
every_row = pytest.mark.parametrize("row", ROWS, ids=[f"{i}-{words(row)}" for i, row in enumerate(ROWS)])
PREFIX = torch.tensor([17, 5])
"""Of the two sequences, where the model attends so."""


@functools.cache
def model_of(row: tuple[str, ...]) -> GPT:
    """The model with every parameter moved away from its start, so that each one matters. Tests leave it as it is."""
    model, generator = GPT(config_of(row), seed=1), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            spread = p.std(correction=0) if p.dim() > 1 else 0.0
            p.add_((0.3 * spread or 0.1) * torch.randn(p.shape, generator=generator))
    return model.eval()


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Within 1e-5, of the largest logit where that is above one."""
    assert_close(found, expected, atol=1e-5 * max(1.0, expected.abs().max().item()), rtol=0)


def extra(config: ModelConfig, batch: int = 2) -> dict[str, Any]:
    return {"prefix_B": PREFIX[:batch]} if config.attends == "prefix" else {}


def test_every_pair_is_covered_or_refused() -> None:
    covered = set().union(*map(pairs_of, ROWS))
    options = [tuple(names) for names in factors().values()]
    usual = [names[0] for names in options]
    for (i, first), (j, second) in itertools.combinations(enumerate(options), 2):
        for a, b in itertools.product(first, second):
            if frozenset({(i, a), (j, b)}) not in covered:
                assert not accepted(tuple({i: a, j: b}.get(place, name) for place, name in enumerate(usual))), (a, b)
    assert len(ROWS) <= 150


@every_row
def test_nothing_later_is_seen(row: tuple[str, ...]) -> None:
    model, ids_BT, at = model_of(row), tokens(), 40
    changed_BT = ids_BT.clone()
    changed_BT[:, at:] = (changed_BT[:, at:] + 1) % VOCABULARY
    embedded: list[Tensor] = []
    hook = model.token_embedding.register_forward_hook(lambda *call: embedded.append(call[2]))
    before_BTV = model(ids_BT, **extra(model.config))
    hook.remove()
    (gradient_BTD,) = torch.autograd.grad(before_BTV[:, at - 1].square().sum(), embedded)
    with torch.no_grad():
        after_BTV = model(changed_BT, **extra(model.config))
    if model.config.attends == "bidirectional":
        assert not torch.isclose(before_BTV[:, at - 1], after_BTV[:, at - 1]).all()
        return
    assert_close(after_BTV[:, :at], before_BTV[:, :at], atol=1e-6, rtol=1e-6)
    assert not gradient_BTD[:, at:].any()
    assert gradient_BTD[:, at - 1].any()


@every_row
def test_one_token_at_a_time_is_the_whole_forward(row: tuple[str, ...]) -> None:
    """In a cache that has to grow, to 50 tokens and then to the context."""
    model, ids_BT = model_of(row), tokens()
    if model.config.attends == "bidirectional":
        with pytest.raises(ValueError, match="cannot be decoded"):
            Cache(model.config, 2)
        return
    cache = Cache(model.config, 2, 1)
    with torch.no_grad():
        parts = [model(ids_BT[:, :50], cache, **extra(model.config))]
        parts += [model(one_B1, cache) for one_B1 in ids_BT[:, 50:].split(1, dim=1)]
        assert_same(torch.cat(parts, dim=1), model(ids_BT, **extra(model.config)))


@every_row
def test_padding_at_the_left_changes_nothing(row: tuple[str, ...]) -> None:
    """Two sequences of mixed lengths together, and the shorter one alone; whole, and decoded."""
    model, (long_T, short_T), pad = model_of(row), tokens(), 9
    short_T = short_T[: LENGTH - pad]
    ids_BT = torch.stack([long_T, torch.cat([torch.zeros(pad, dtype=torch.long), short_T])])
    padding_B, is_prefix = torch.tensor([0, pad]), model.config.attends == "prefix"
    together = {"prefix_B": torch.tensor([17, pad + 5])} if is_prefix else {}
    alone = {"prefix_B": torch.tensor([5])} if is_prefix else {}
    with torch.no_grad():
        expected_TV = model(short_T[None], **alone)[0]
        found_BTV = model(ids_BT, padding_B=padding_B, **together)
        assert found_BTV.isfinite().all()
        assert_same(found_BTV[1, pad:], expected_TV)
        assert_same(found_BTV[:1], model(ids_BT[:1], **extra(model.config, 1)))
        if model.config.attends == "bidirectional":
            return
        cache = Cache(model.config, 2, padding_B=padding_B)
        parts = [model(ids_BT[:, :58], cache, **together)]
        parts += [model(one_B1, cache) for one_B1 in ids_BT[:, 58:60].split(1, dim=1)]
        cache.select(torch.tensor([1, 1]))  # the longer one has ended; the shorter goes on, twice
        assert (cache.filled, cache.padding_B) == (60 - pad, None)
        parts += [model(one_B1, cache) for one_B1 in ids_BT[[1, 1], 60:].split(1, dim=1)]
        decoded_BTV = torch.cat(parts, dim=1)
        assert_same(decoded_BTV[1, pad:], expected_TV)
        assert_same(decoded_BTV[0, 60:], expected_TV[60 - pad :])


@every_row
def test_a_few_steps_lower_the_loss(row: tuple[str, ...]) -> None:
    model, ids_BT = GPT(config_of(row), seed=1), tokens()
    more = extra(model.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        loss = model.loss(ids_BT[:, :-1], ids_BT[:, 1:], **more)
        loss.backward()
        missing = [name for name, p in model.named_parameters() if p.grad is None]
        assert missing == []
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.03


@every_row
def test_files_bring_it_back(row: tuple[str, ...]) -> None:
    model, ids_BT = model_of(row), tokens(1, 20)
    config = from_json(ModelConfig, to_json(model.config))
    assert config == model.config
    other = GPT(config, seed=5).eval()
    other.load_state_dict(load(save(model.state_dict())))
    with torch.no_grad():
        assert torch.equal(other(ids_BT, **extra(config, 1)), model(ids_BT, **extra(config, 1)))


@every_row
def test_it_is_counted_as_built(row: tuple[str, ...]) -> None:
    config = config_of(row)
    with torch.device("meta"):
        model, ids_BT = GPT(config), torch.zeros(2, LENGTH, dtype=torch.long)
        more = {"prefix_B": torch.zeros(2, dtype=torch.long)} if config.attends == "prefix" else {}
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    outside = ("token_embedding.weight", "position_embedding.weight", "head.weight")
    found = count(config)
    assert found.total == sum(sizes.values())
    assert found.non_embedding == sum(n for name, n in sizes.items() if name not in outside)
    with RoutingWithoutValues(), FlopCounterMode(display=False) as counter:
        model(ids_BT, **more)
    assert counter.get_total_flops() == 2 * LENGTH * found.forward_flops_per_token


@every_row
def test_compiles_without_a_graph_break(row: tuple[str, ...]) -> None:
    torch._dynamo.reset()
    model, ids_BT = model_of(row), tokens()
    if any(name == "moe" for name in row) or model.config.at(1).mlp.kind == "moe":
        pytest.skip("how many tokens an expert gets is data: a break by its nature")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert_close(compiled(ids_BT, **extra(model.config)), model(ids_BT, **extra(model.config)))


def by_need(rows: tuple[tuple[str, ...], ...]) -> list[Any]:
    """Rows that are really compiled: the three plainest in every test run, and in the long one as many as it takes to
    have every option in one of them. (All rows would take a quarter of an hour.)"""
    plainest = sorted(rows, key=lambda row: words(row).count(","))
    chosen, rest = plainest[:3], plainest[3:]
    while open_options := {option for row in rest for option in enumerate(row)} - {
        option for row in chosen for option in enumerate(row)
    }:
        chosen.append(max(rest, key=lambda row: len(open_options & set(enumerate(row)))))
    return [
        pytest.param(row, id=words(row), marks=() if place < 3 else pytest.mark.slow)
        for place, row in enumerate(chosen)
    ]


@pytest.mark.filterwarnings("default::UserWarning")  # of torch's tracer, on tensors that our code does not ask about
@pytest.mark.filterwarnings("default::DeprecationWarning")  # torch's own, as its compiler is imported
@pytest.mark.parametrize("row", by_need(ROWS))
def test_compiled_is_eager(row: tuple[str, ...]) -> None:
    torch._dynamo.reset()
    model, ids_BT = GPT(config_of(row), seed=1), tokens(2, 20)
    more = {"prefix_B": torch.tensor([7, 5])} if model.config.attends == "prefix" else {}
    results = []
    for function in (model.loss, torch.compile(model.loss, dynamic=False)):
        loss = function(ids_BT[:, :-1], ids_BT[:, 1:], **more)
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
        model.zero_grad()
    (loss, gradients), (found, compiled) = results
    assert_close(found, loss, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        assert (compiled[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6, name
