"""Other papers' projections in a model: sizes, starts, and what every projection has to keep there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from qurve.accounting import count
from qurve.config import from_json, to_json
from qurve.errors import BadInput
from qurve.model.cache import Cache
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.model.positions import Rope
from qurve.projections import Bottleneck, Dims, Linear
from qurve.zoo.projections import GatedOutput, NonlinearLoRA, mlp_projection

D, T = 20, 13
BASE: dict[str, Any] = {
    "n_layers": 2, "d_model": D, "n_heads": 2, "d_ff": 31, "context": T, "vocab_size": 29, "positions": Rope()
}  # fmt: skip
MODELS = {
    "gate": {"output": GatedOutput()},
    "gate beside our query": {"output": GatedOutput(), "query": Bottleneck()},
    "gate, narrow heads": {"output": GatedOutput(), "d_head": 6, "n_kv_heads": 1, "bias": True},
    "adapters": {"query": NonlinearLoRA(), "value": NonlinearLoRA(rank=3)},
    "MLPs": dict.fromkeys(("query", "key", "value"), mlp_projection(D)) | {"bias": True},
    "separate norms": {"query": Bottleneck(norm_stage="separate")},
    "exact start": {"query": Bottleneck("linear", start="exact")},
    "output": {"output": Bottleneck()},
    "all three": {"query": Bottleneck(), "key": Bottleneck("linear"), "value": Bottleneck("linear")},
}
each = pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)


def build(changes: dict[str, Any], **more: Any) -> GPT:
    """A model with every parameter moved away from its start, so that each one matters."""
    model = GPT(ModelConfig(**{**BASE, **changes, **more}), seed=1).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model


def tokens(batch: int = 2) -> torch.Tensor:
    return torch.randint(29, (batch, T), generator=torch.Generator().manual_seed(1))


@each
@torch.no_grad()
def test_nothing_later_is_seen_and_decoding_is_the_whole_forward(changes: dict[str, Any]) -> None:
    model, ids_BT = build(changes), tokens()
    logits_BTV = model(ids_BT)
    changed_BT = ids_BT.clone()
    changed_BT[:, 7:] = (changed_BT[:, 7:] + 1) % 29
    assert torch.equal(model(changed_BT)[:, :7], logits_BTV[:, :7])
    cache = Cache(model.config, 2)
    parts = [model(part, cache) for part in (ids_BT[:, :3], *ids_BT[:, 3:].split(1, dim=1))]
    assert_close(torch.cat(parts, dim=1), logits_BTV, atol=1e-5, rtol=0)


@each
@torch.no_grad()
def test_padding_at_the_left_changes_nothing(changes: dict[str, Any]) -> None:
    model, ids_BT = build(changes), tokens()
    padded_BT = torch.cat([ids_BT[:, :4].flip(0), ids_BT[:, :9]], dim=1)
    found = model(padded_BT, padding_B=torch.tensor([4, 4]))[:, 4:]
    assert_close(found, model(ids_BT[:, :9]), atol=1e-5, rtol=0)


@each
def test_it_learns_and_is_counted(changes: dict[str, Any]) -> None:
    config, ids_BT = ModelConfig(**{**BASE, **changes}), tokens()
    assert from_json(ModelConfig, to_json(config)) == config
    model = GPT(config, seed=1)
    assert count(config).total == sum(p.numel() for p in model.parameters())
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(6):
        loss = model.loss(ids_BT[:, :-1], ids_BT[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("changes", [MODELS["gate beside our query"], MODELS["adapters"]], ids=["gate", "adapters"])
def test_a_model_compiles_without_a_graph_break(changes: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model = build(changes, n_layers=1)
    assert_close(torch.compile(model, fullgraph=True, backend="eager")(tokens()), model(tokens()))


@pytest.mark.parametrize(
    ("kind", "more", "with_biases"),
    [
        (GatedOutput(), D * D, D * D + D),
        (NonlinearLoRA(rank=3), 3 * 2 * D, 3 * 2 * D),
        (mlp_projection(D), 3 * D * D, 3 * D * D + 2 * D),
    ],
    ids=str,
)
def test_sizes_are_as_stated(kind: Any, more: int, with_biases: int) -> None:
    for bias, expected in ((False, more), (True, with_biases)):
        linear = Linear().num_params(Dims(D, D, bias))
        assert kind.num_params(Dims(D, D, bias, D if kind.also_reads else 0)) - linear == expected


def test_gates_start_around_one_half() -> None:
    gated, plain = GPT(ModelConfig(**BASE, output=GatedOutput()), seed=1), GPT(ModelConfig(**BASE), seed=1)
    x_BTD, y_BTD = torch.randn(2, T, D), torch.randn(2, T, D)
    found, expected = gated.blocks[0].attention.output(y_BTD, x_BTD), plain.blocks[0].attention.output(y_BTD)
    assert_close(found, expected / 2, atol=0.1 * expected.std().item(), rtol=0)


def test_a_gate_reads_the_blocks_normalised_input() -> None:
    model, seen = build({"output": GatedOutput()}), []
    block = model.blocks[1]
    block.attention_norm.register_forward_hook(lambda _m, _i, out: seen.append(out))
    block.attention.output.register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[1]))
    model(tokens())
    assert torch.equal(*seen)


def test_a_gate_is_for_outputs_alone() -> None:
    with pytest.raises(BadInput, match=r"model\.query: 'gated' has no place here; it is for model\.output"):
        ModelConfig(query=GatedOutput())


def test_adapters_start_as_the_linear_projection() -> None:
    adapted, plain = (GPT(ModelConfig(**BASE, query=q), seed=1) for q in (NonlinearLoRA(), Linear()))
    assert_close(adapted(tokens()), plain(tokens()))
    with pytest.raises(ValueError, match="rank = 0: the adapter needs at least one unit"):
        NonlinearLoRA(rank=0)
