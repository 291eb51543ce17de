"""Condition numbers: against Jacobians written out, known answers, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from qurve.analysis.conditioning import condition, condition_numbers, sequence_length
from qurve.errors import BadInput
from qurve.model.config import ModelConfig, Subspaces
from qurve.model.gpt import GPT
from qurve.model.positions import Rope
from qurve.model.residual import Skip
from qurve.projections import Bottleneck, MLPReuse
from qurve.zoo.hyper_connections import HyperConnections

D, T = 6, 4
IDS_T = torch.tensor([3, 1, 4, 1])


def build(**changes: Any) -> GPT:
    sizes: dict[str, Any] = {"n_layers": 2, "d_model": D, "n_heads": 2, "d_ff": 16, "context": 9, "vocab_size": 13}
    model = GPT(ModelConfig(**(sizes | changes)), seed=1)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.normal_(0, 0.7, generator=torch.Generator().manual_seed(seed))
    return model.eval()


def written_out(step: Any, x: Tensor) -> Tensor:
    """One output's gradient at a time."""
    jacobian = torch.autograd.functional.jacobian(step, x)
    return jacobian.reshape(x.numel(), x.numel())


def exact(matrix: Tensor) -> float:
    values = torch.linalg.svdvals(matrix)
    return (values[0] / values[-1]).item() if values[-1] > 1e-12 * values[0] else math.inf


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"query": Bottleneck(), "n_kv_heads": 1},
        {"query": MLPReuse()},
        {"residual": Skip(attention=False, norms="none"), "query": Bottleneck()},
        {"residual": Skip(norms="post"), "share_blocks": True, "norm": "rmsnorm"},
        {"attends": "prefix"},
    ],
    ids=["plain", "paper-mqa", "reuse", "no-skip", "post-shared", "prefix"],
)
def test_equals_jacobians_written_out(changes: dict[str, Any]) -> None:
    model = build(**changes)
    found = condition_numbers(model, IDS_T)
    model, inputs, streams = model.double(), list[Any](), list[Tensor]()
    prefix_B = torch.zeros(1, dtype=torch.long) if model.config.attends == "prefix" else None
    handles = [
        model.blocks[0].attention.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments)),
        model.blocks[-1].attention.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments)),
        model.blocks[-1].register_forward_pre_hook(lambda _, arguments: streams.append(arguments[0])),
    ]
    with torch.no_grad():
        model.hidden(IDS_T[None], prefix_B=prefix_B)
    for handle in handles:
        handle.remove()
    block, (read, view, hidden, _) = model.blocks[-1], inputs[-1]
    identity = torch.eye(T * D, dtype=torch.float64)
    alone = written_out(lambda n: block.attention((n,), view, hidden), read[0])

    def whole(s: Tensor) -> Tensor:
        n = block.attention_residual.read(s, block.attention_norm)
        return block.attention_residual.write(s, block.attention(n, view, hidden), block.attention_norm)

    attention = next(one for one in found if (one.layer, one.sublayer) == (1, "attention"))
    expected = [exact(j) for j in (alone, identity + alone, written_out(whole, streams[-1]))]
    assert [attention.without, attention.with_skip, attention.in_stream] == pytest.approx(expected, rel=1e-5)

    with torch.no_grad():
        stream = whole(streams[-1])
        (n,) = block.mlp_residual.read(stream, block.mlp_norm)
    alone = written_out(lambda n: block.mlp(n)[0], n)
    mlp = next(one for one in found if (one.layer, one.sublayer) == (1, "mlp"))
    assert [mlp.without, mlp.with_skip] == pytest.approx([exact(alone), exact(identity + alone)], rel=1e-5)
    assert [(one.layer, one.sublayer, one.tokens) for one in found] == [
        (layer, sublayer, T) for layer in (0, 1) for sublayer in ("attention", "mlp")
    ]


def test_what_writes_nothing_is_singular_alone_and_perfect_with_its_skip() -> None:
    model = build()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.output.weight.zero_()
            block.mlp.down.weight.zero_()
    for one in condition_numbers(model, IDS_T):
        assert (one.without, one.with_skip, one.in_stream) == (math.inf, 1, 1)


def test_behind_a_norm_nothing_has_a_finite_number_without_its_skip() -> None:
    attention, mlp = condition_numbers(build(residual=Skip(attention=False, mlp=False)), IDS_T)[:2]
    assert attention.in_stream == mlp.in_stream == math.inf
    assert math.isfinite(attention.without)
    attention, mlp = condition_numbers(build(residual=Skip(attention=False, mlp=False, norms="none")), IDS_T)[:2]
    assert (attention.in_stream, mlp.in_stream) == (attention.without, mlp.without)


def test_rotary_positions_and_further_tokens_count() -> None:
    model = build(positions=Rope(), d_head=4)
    short, long = (condition_numbers(model, ids)[0] for ids in (IDS_T, torch.arange(7)))
    assert (short.tokens, long.tokens) == (4, 7)
    assert short.without != long.without
    assert math.isfinite(long.with_skip)


def test_the_model_stays_as_it_was() -> None:
    model = build(dropout=0.3).train()
    first, second = (condition_numbers(model, IDS_T) for _ in range(2))
    assert first == second
    assert model.training
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in model.parameters())


def test_condition_of_known_matrices() -> None:
    assert condition(torch.diag(torch.tensor([5.0, -2.0, 0.5]))) == pytest.approx(10)
    assert condition(torch.zeros(2, 2)) == math.inf
    assert condition(torch.diag(torch.tensor([1.0, 1e-13], dtype=torch.float64))) == math.inf


def test_sequences_are_as_long_as_the_work_allows() -> None:
    assert [sequence_length(d, 64) for d in (16, 32, 128, 768, 4096)] == [64, 32, 8, 4, 4]
    assert sequence_length(768, 2) == 2


def test_what_has_no_such_numbers_is_refused() -> None:
    with pytest.raises(BadInput, match="'hyper' has no skip"):
        condition_numbers(build(residual=HyperConnections()), IDS_T)
    with pytest.raises(BadInput, match="several inputs"):
        condition_numbers(build(subspaces=Subspaces(q=1)), IDS_T)
