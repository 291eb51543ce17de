"""Interventions on `f`: against models whose weights say the same, and harmless to the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qurve.analysis.mechanism import (
    Window,
    anchor_of,
    evaluating,
    f_of,
    fit,
    interventions,
    linear_share,
    queries_with_f,
    query_of,
    replacing,
    run,
    window_losses,
)
from qurve.model.config import LayerOverride, ModelConfig
from qurve.model.gpt import GPT
from qurve.projections import Bottleneck, Identity, Linear, MLPReuse, ProjectionConfig, Residual

D, T = 12, 10
BASE: dict[str, Any] = {"n_layers": 3, "d_model": D, "n_heads": 3, "d_ff": 8, "context": T, "vocab_size": 29}


def build(query: ProjectionConfig, **changes: Any) -> GPT:
    model = GPT(ModelConfig(**{**BASE, "query": query, **changes}), seed=1).double().eval()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):  # larger than at the start, and no gain is one
            parameter.normal_(0, 0.7, generator=torch.Generator().manual_seed(seed))
    return model


def text(windows: int, seed: int) -> list[Window]:
    ids = torch.randint(29, (windows, T + 1), generator=torch.Generator().manual_seed(seed))
    return [(row[None, :-1], row[None, 1:]) for row in ids]


FIT_ON, WINDOWS = text(6, seed=1), text(3, seed=2)


@torch.no_grad()
def losses(model: GPT) -> list[float]:
    return [model.loss(*window).item() for window in WINDOWS]


def intervened(model: GPT, name: str, layers: tuple[int, ...]) -> list[float]:
    found = {(one.name, one.layers): one for one in interventions(model, fit(model, FIT_ON))}
    return window_losses(model, WINDOWS, found[name, layers].replace)


def changed(model: GPT, change: Callable[[Any], None]) -> GPT:
    other = copy.deepcopy(model)
    with torch.no_grad():
        change(other.blocks)
    return other


# ------------------------------------------------------------------------------------------------------------ the parts


@pytest.mark.parametrize(
    ("query", "bias", "anchor"),
    [
        (Bottleneck(), False, lambda p, x: x),
        (Bottleneck(anchor="linear", scale=0.7), True, lambda p, x: x @ p.weight.T + p.bias),
        (Bottleneck(anchor="none", post_norm="none"), False, lambda p, x: torch.zeros_like(x)),
        (Residual(scale=0.3), True, lambda p, x: x),
    ],
    ids=["paper", "linear-anchor", "no-anchor", "residual"],
)
def test_a_query_is_its_anchor_and_f(query: ProjectionConfig, bias: bool, anchor: Callable[..., torch.Tensor]) -> None:
    module = build(query, bias=bias).blocks[1].attention.query
    x_BTD = torch.randn(2, 5, D, dtype=torch.float64)
    assert torch.allclose(query_of(module, x_BTD, f_of(module, (x_BTD,))), module(x_BTD))
    assert torch.allclose(anchor_of(module, x_BTD), anchor(module, x_BTD))
    without = query_of(module, x_BTD, torch.zeros_like(x_BTD))
    assert torch.allclose(without, query.scale * anchor(module, x_BTD))  # type: ignore[attr-defined]


def test_f_is_the_papers_formula() -> None:
    module = build(Bottleneck()).blocks[0].attention.query
    x_BTD = torch.randn(2, 5, D, dtype=torch.float64)
    normed = x_BTD / (x_BTD.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.pre_gain
    hidden = torch.nn.functional.gelu(normed @ module.w1.T) @ module.w2.T
    expected = torch.nn.functional.layer_norm(hidden, (D,), eps=1e-5) * module.post_gain
    assert torch.allclose(f_of(module, (x_BTD,)), expected)


@pytest.mark.parametrize(
    "query", [Linear(), Identity(), Bottleneck(norm_stage="separate"), Bottleneck(scale=0.0)], ids=lambda q: q.kind
)
def test_models_without_an_f_are_refused(query: ProjectionConfig) -> None:
    with pytest.raises(ValueError, match="no block's query is an anchor plus an f"):
        queries_with_f(build(query))


def test_blocks_without_an_f_are_passed_over() -> None:
    model = build(Bottleneck(), overrides=(LayerOverride((1,), query=Linear()),))
    assert list(queries_with_f(model)) == [0, 2]
    assert list(queries_with_f(build(MLPReuse()))) == [1, 2]  # the first has no block before it


# -------------------------------------------------------------------------------------------------------- interventions


def test_zero_is_a_layer_norm_without_gain() -> None:
    model = build(Bottleneck())

    def silence(blocks: Any, *layers: int) -> None:
        for layer in layers:
            blocks[layer].attention.query.post_gain.zero_()

    alone = losses(changed(model, lambda blocks: silence(blocks, 1)))
    assert intervened(model, "zero", (1,)) == pytest.approx(alone)
    everywhere = losses(changed(model, lambda blocks: silence(blocks, 0, 1, 2)))
    assert intervened(model, "zero", (0, 1, 2)) == pytest.approx(everywhere)
    assert alone != pytest.approx(everywhere, rel=1e-4)


def test_a_swap_exchanges_the_queries() -> None:
    model = build(Bottleneck())

    def exchange(blocks: Any) -> None:
        first, second = blocks[1].attention, blocks[2].attention
        first.query, second.query = second.query, first.query

    def rotate(blocks: Any) -> None:
        queries = [block.attention.query for block in blocks]
        for block, query in zip(blocks, queries[1:] + queries[:1], strict=True):
            block.attention.query = query

    assert intervened(model, "swap", (1, 2)) == pytest.approx(losses(changed(model, exchange)))
    assert intervened(model, "rotate", (0, 1, 2)) == pytest.approx(losses(changed(model, rotate)))
    assert losses(model) != pytest.approx(losses(changed(model, exchange)), rel=1e-4)


def test_only_queries_of_one_shape_are_swapped() -> None:
    names = lambda model: {one.name for one in interventions(model, fit(model, FIT_ON))}  # noqa: E731
    every = {"zero", "mean", "other text", "linear"}
    assert names(build(Bottleneck())) == every | {"swap", "rotate"}
    assert names(build(Bottleneck(), overrides=(LayerOverride((1,), query=Bottleneck(width=3)),))) == every
    assert names(build(Bottleneck(), share_blocks=True)) == every
    alone = build(Bottleneck(), n_layers=1)
    assert len(interventions(alone, fit(alone, FIT_ON))) == 4


def seen(model: GPT, windows: list[Window]) -> dict[int, list[tuple[torch.Tensor, torch.Tensor]]]:
    found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    with evaluating(model), replacing(model, lambda i, inputs, f: found.setdefault(i, []).append((inputs[0], f))):
        for window in windows:
            run(model, window)
    return found


def test_mean_and_other_text_are_of_the_other_windows() -> None:
    model = build(Bottleneck())
    f_by_layer = {layer: torch.cat([f for _, f in pairs]) for layer, pairs in seen(model, FIT_ON).items()}
    mean = window_losses(
        model, WINDOWS, lambda i, inputs, f: f_by_layer[i].mean((0, 1)).expand_as(f) if i == 2 else None
    )
    assert intervened(model, "mean", (2,)) == pytest.approx(mean)
    other = window_losses(model, WINDOWS, lambda i, inputs, f: f_by_layer[i][:1])
    assert intervened(model, "other text", (0, 1, 2)) == pytest.approx(other)
    assert mean != pytest.approx(losses(model), rel=1e-4)


def test_a_linear_f_is_all_linear_and_can_be_replaced() -> None:
    model = build(Residual())
    assert linear_share(model, fit(model, FIT_ON), WINDOWS) == pytest.approx({0: 1.0, 1: 1.0, 2: 1.0})
    assert intervened(model, "linear", (0, 1, 2)) == pytest.approx(losses(model), rel=1e-8)
    assert intervened(model, "mean", (0, 1, 2)) != pytest.approx(losses(model), rel=1e-4)


def test_the_linear_share_by_hand() -> None:
    model = build(Bottleneck())
    (x_NTD, f_NTD), (x, f) = (
        tuple(torch.cat(both) for both in zip(*seen(model, windows)[1], strict=True)) for windows in (FIT_ON, WINDOWS)
    )
    with_one = lambda t: torch.cat([t.flatten(0, 1), torch.ones(t.shape[0] * T, 1)], dim=1)  # noqa: E731
    solution = torch.linalg.lstsq(with_one(x_NTD), f_NTD.flatten(0, 1), driver="gelsd").solution
    rest, around = f.flatten(0, 1) - with_one(x) @ solution, f - f_NTD.mean((0, 1))
    expected = 1 - (rest.square().sum() / around.square().sum()).item()
    assert linear_share(model, fit(model, FIT_ON), WINDOWS)[1] == pytest.approx(expected, abs=1e-6)
    assert expected < 0.9


def test_shared_blocks_are_told_apart_by_their_pass() -> None:
    model = build(Bottleneck(), share_blocks=True)
    layers: list[int] = []
    window_losses(model, WINDOWS, lambda layer, inputs, f: layers.append(layer))
    assert layers == [0, 1, 2] * 3
    fitted = fit(model, FIT_ON)
    assert not torch.allclose(fitted.linear[0].mean_O, fitted.linear[1].mean_O)


def test_reuse_of_the_mlp_reads_its_own_second_source() -> None:
    model = build(MLPReuse())

    def exchange(blocks: Any) -> None:
        blocks[1].attention.query, blocks[2].attention.query = blocks[2].attention.query, blocks[1].attention.query

    assert intervened(model, "swap", (1, 2)) == pytest.approx(losses(changed(model, exchange)))


def test_windows_with_a_prefix_are_taken_with_it() -> None:
    model = build(Bottleneck(), attends="prefix")
    windows = [(*window, torch.tensor([length])) for length, window in zip((0, 4, T), WINDOWS, strict=True)]
    reads: list[torch.Tensor] = []
    unchanged = window_losses(model, windows, lambda layer, inputs, f: reads.append(inputs[0]))
    with torch.no_grad():
        assert unchanged == pytest.approx([model.loss(*window).item() for window in windows])
    again: list[torch.Tensor] = []
    with evaluating(model), replacing(model, lambda layer, inputs, f: again.append(inputs[0])):
        for window in windows:
            run(model, window)
    assert all(torch.equal(a, b) for a, b in zip(reads, again, strict=True))


def test_the_model_stays_as_it_was() -> None:
    model = build(Bottleneck(), dropout=0.3).train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    expected = losses(copy.deepcopy(model).eval())
    fitted = fit(model, FIT_ON)
    for one in interventions(model, fitted):
        window_losses(model, WINDOWS, one.replace)

    def fail(*arguments: Any) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        window_losses(model, WINDOWS, fail)
    assert model.training
    assert window_losses(model, WINDOWS) == expected
    assert not any(block.attention.query._forward_hooks for block in model.blocks)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
