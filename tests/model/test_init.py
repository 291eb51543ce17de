"""Initial weights: their sizes, and that arms of one seed share what they have in common."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from leaves import places
from qurve.model.config import ModelConfig, Subspaces
from qurve.model.feed_forward import Dense, FeedForwardConfig, Gated, MixtureOfExperts
from qurve.model.gpt import GPT
from qurve.model.init import initialize, stream_seed
from qurve.model.residual import Skip
from qurve.projections import Bottleneck, MLPReuse, ProjectionConfig, Residual
from qurve.projections.base import Moments
from qurve.projections.functional import SECOND_MOMENT
from qurve.projections.module import Projection
from qurve.zoo.projections import GatedOutput, NonlinearLoRA, mlp_projection

SMALL = ModelConfig(n_layers=3, d_model=48, n_heads=3, d_ff=192, context=40, vocab_size=120)
ARMS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "mlp-4.75": {"d_ff": 228},
    "res-gelu": {"query": Bottleneck()},
    "residual": {"query": Residual()},
    "untied": {"tie_embeddings": False},
    "bias": {"bias": True, "query": Bottleneck("linear", pre_norm="layernorm")},
    "keys and values": {"key": Bottleneck("linear"), "value": Bottleneck("linear")},
    "all three": {"query": Bottleneck(), "key": Bottleneck("linear"), "value": Bottleneck("linear")},
    "output": {"output": Bottleneck("linear")},
    "gate": {"output": GatedOutput(), "query": Bottleneck()},
    "adapters": {"query": NonlinearLoRA(), "value": NonlinearLoRA()},
    "reuse": {"query": MLPReuse()},
    "experts": {"mlp": MixtureOfExperts(3, 2)},
}
TOPOLOGIES: dict[str, Skip] = {
    "pre": Skip(),
    "post": Skip("post"),
    "norm-free": Skip("none"),
    "skipless": Skip("none", attention=False, mlp=False),
    "attention skip alone": Skip(mlp=False),
    "MLP skip alone": Skip(attention=False),
}
MLPS: list[FeedForwardConfig] = [Dense("relu"), Dense("relu2"), Gated(), MixtureOfExperts(3, 2)]


def weights(seed: int = 1, **changes: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in GPT(dataclasses.replace(SMALL, **changes), seed).named_parameters()}


# ---------------------------------------------------------------------------------------------------------------- audit


def audited() -> Iterator[Any]:
    """Every projection wherever it may stand, and every feed-forward, in every topology."""
    kinds = [kind() for kind in ProjectionConfig.registry.values()]
    kinds += [Bottleneck("linear", start="exact"), Bottleneck("linear", norm_stage="separate"), mlp_projection(48)]
    parts: list[dict[str, Any]] = [{place: kind} for kind in kinds for place in stands_in(kind)]
    parts += [{"mlp": mlp} for mlp in MLPS]
    parts += [{"bias": True, "tie_embeddings": False, "value": Bottleneck(pre_norm="layernorm")}]
    parts += [{"qk_norm": True, "norm": "rmsnorm", "subspaces": Subspaces(q=40, kv=40)}]
    for name, residual in TOPOLOGIES.items():
        for part in parts:
            mlp = part.get("mlp", Dense())
            if not (residual.norms == "none" and not residual.mlp and mlp.quadratic):
                yield pytest.param({"residual": residual, **part}, id=f"{name}, {part}")


def stands_in(kind: ProjectionConfig) -> list[str]:
    """Where a kind is tried: as a query, which never carries the signal, as a value and as an output, which do."""
    found = [place for place in places(kind) if place != "key"]
    return found if kind.also_reads else [*found, "output"]


def documented(config: ModelConfig, prefix: str, module: torch.nn.Module, name: str) -> tuple[str, float]:
    """How a parameter starts, by the rules that `initialize` and the kinds state: a constant, or a deviation."""
    if not isinstance(module, Projection):
        if isinstance(module, torch.nn.Embedding):  # two of them make one signal
            return "normal", math.sqrt(0.5) if config.residual.norm_place == "none" else 0.02
        if isinstance(module, torch.nn.Linear):
            return "normal", 0.02
        return "constant", 0.0 if name == "bias" else 1.0
    kind, dims = module.config, module.dims
    init = kind.parameters(dims)[name].init
    if init == "zeros":
        return "constant", 0.0
    how, size = ("normal", 0.02) if init == "normal" else ("constant", 1.0)
    part = prefix.split(".")[-1]
    assert isinstance(config.residual, Skip)
    if config.residual.attention if part in ("query", "key", "value", "output") else config.residual.mlp:
        writes = "post_gain" if getattr(kind, "post_norm", "none") != "none" else "w2"
        matrix = name == "weight" and getattr(kind, "norm_stage", "coupled") == "coupled"
        smaller = part in ("output", "down") and (matrix or name == writes)
        return how, size / math.sqrt(2 * config.n_layers) if smaller else size
    hidden = SECOND_MOMENT[config.mlp.activation] / getattr(config.mlp, "active", 1)
    if kind.kind == "linear" and part not in ("query", "key", "router"):
        return how, 1 / math.sqrt(dims.d_in * (hidden if part in ("down", "subspaces") else 1.0))
    if part in ("value", "output"):  # the contract's test measures what these give
        return how, kind.preserving(dims, Moments(1.0, hidden)).get(name, size)
    return how, size


@pytest.mark.parametrize("changes", list(audited()))
def test_every_tensor_starts_as_documented_natively_and_from_the_meta_device(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(SMALL, **changes)
    model = GPT(config, seed=1)
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(prefix, recurse=False):
            how, size = (
                ("constant", 1.0)
                if name.endswith("_norm.weight")
                else documented(config, prefix, module, name.rpartition(".")[2])
            )
            if how == "constant":
                assert torch.equal(p, torch.full_like(p, size)), name
            else:
                assert p.std().item() == pytest.approx(size, rel=5 / math.sqrt(2 * p.numel())), name
                assert abs(p.mean().item()) < 5 * size / math.sqrt(p.numel()), name
    with torch.device("meta"):
        other = GPT(config, seed=1)
    other.to_empty(device="cpu")
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(torch.nan)
    initialize(other, config, 1)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


# ---------------------------------------------------------------------------------------------------- the signal's size


def block_sizes(config: ModelConfig) -> list[float]:
    """Standard deviation of each block's output for random tokens."""
    model, sizes = GPT(config, seed=1).eval(), list[float]()
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _inputs, outputs: sizes.append(outputs[0].std().item()))
    with torch.no_grad():
        model(torch.randint(300, (4, 64), generator=torch.Generator().manual_seed(0)))
    return sizes


DEEP = ModelConfig(n_layers=8, d_model=64, n_heads=4, d_ff=256, context=64, vocab_size=300)


@pytest.mark.parametrize("residual", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_eight_blocks_keep_the_signals_size(residual: Skip) -> None:
    sizes = block_sizes(dataclasses.replace(DEEP, residual=residual))
    assert max(sizes) < 2 * min(sizes)
    if residual != Skip():  # where the embeddings' own size, 0.03, still shows
        assert all(0.5 < size < 2 for size in sizes)


NONLINEAR = [
    *(Bottleneck(), Bottleneck("linear"), Bottleneck("none"), Bottleneck("linear", start="exact")),
    *(Bottleneck(norm_stage="separate"), Bottleneck(scale=0.8), Residual(), NonlinearLoRA(), GatedOutput()),
]


@pytest.mark.parametrize("topology", ["skipless", "MLP skip alone"])
@pytest.mark.parametrize("kind", NONLINEAR, ids=str)
def test_nonlinear_projections_keep_it_where_no_skip_does(kind: ProjectionConfig, topology: str) -> None:
    for place in stands_in(kind):
        sizes = block_sizes(dataclasses.replace(DEEP, residual=TOPOLOGIES[topology], **{place: kind}))
        assert all(0.5 < size < 2 for size in sizes), place


@pytest.mark.parametrize("mlp", MLPS, ids=str)
def test_feed_forwards_keep_it_where_no_skip_does(mlp: FeedForwardConfig) -> None:
    sizes = block_sizes(dataclasses.replace(DEEP, residual=TOPOLOGIES["attention skip alone"], mlp=mlp))
    assert all(0.5 < size < 2 for size in sizes)


def test_a_nonlinear_output_joins_the_residual_stream_as_small_as_a_linear_one() -> None:
    gain = "blocks.1.attention.output.post_gain"
    assert torch.equal(weights(output=Bottleneck())[gain], torch.full((48,), 1 / math.sqrt(6)))
    assert torch.equal(weights(output=Bottleneck(start="exact"))[gain], torch.zeros(48))
    without = weights(output=Bottleneck("linear", post_norm="none"))
    for name in ("w2", "weight"):
        std = without[f"blocks.1.attention.output.{name}"].std().item()
        assert std == pytest.approx(0.02 / math.sqrt(6), rel=0.08)


def test_without_skips_and_norms_its_gain_makes_up_for_the_scale() -> None:
    gains = {
        kind.anchor: weights(residual=TOPOLOGIES["skipless"], output=kind)["blocks.1.attention.output.post_gain"]
        for kind in (Bottleneck(), Bottleneck("linear"), Bottleneck("none"))
    }
    # (x + f) / 2 has mean square 1 where f has 3; where both are free, 2 each; where f is alone, 4.
    for anchor, square in {"identity": 3.0, "linear": 2.0, "none": 4.0}.items():
        torch.testing.assert_close(gains[anchor], torch.full((48,), math.sqrt(square)))


def test_every_experts_last_matrix_starts_small() -> None:
    downs = [p for name, p in weights(mlp=MixtureOfExperts(4, 2)).items() if name.endswith("down.weight")]
    assert len(downs) == 12
    assert all(p.std().item() == pytest.approx(0.02 / math.sqrt(6), rel=0.05) for p in downs)


# -------------------------------------------------------------------------------------------------------------- sharing


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "baseline"])
def test_arms_share_what_has_one_name_and_shape(arm: str) -> None:
    baseline, other = weights(), weights(**ARMS[arm])
    shared = [name for name in baseline if name in other and baseline[name].shape == other[name].shape]
    assert len(shared) >= 19 - 3 * (arm == "experts")
    assert {"token_embedding.weight", "blocks.2.attention_norm.weight"} <= set(shared)
    assert any(name.startswith("blocks.2.attention.") for name in shared)
    for name in shared:
        assert torch.equal(baseline[name], other[name]), name


def test_no_two_tensors_are_alike() -> None:
    matrices = [p for p in weights(bias=True, query=Bottleneck(width=48)).values() if p.dim() == 2]
    firsts = {p.flatten()[0].item() for p in matrices}
    assert len(firsts) == len(matrices)


def test_seeds_differ_and_repeat() -> None:
    one, again, two = weights(1), weights(1), weights(2)
    for name, p in one.items():
        assert torch.equal(p, again[name])
        assert torch.equal(p, two[name]) == (p.dim() == 1), name


def test_global_random_state_plays_no_part() -> None:
    torch.manual_seed(1)
    one = weights(1)
    torch.manual_seed(2)
    for name, p in weights(1).items():
        assert torch.equal(p, one[name])


def test_one_more_layer_shifts_nobody() -> None:
    three, four = weights(n_layers=3), weights(n_layers=4)
    assert three.keys() < four.keys()
    for name, p in three.items():
        if name.endswith(("attention.output.weight", "mlp.down.weight")):
            torch.testing.assert_close(four[name] * math.sqrt(8), p * math.sqrt(6))
        else:
            assert torch.equal(four[name], p), name


def test_built_without_memory() -> None:
    with torch.device("meta"):
        assert {p.device.type for p in GPT(SMALL).parameters()} == {"meta"}


def test_streams_are_apart() -> None:
    names = [f"{kind}/{i}" for kind in ("init", "order", "dropout") for i in range(50)]
    seeds = {stream_seed(seed, name) for seed in range(20) for name in names}
    assert len(seeds) == 20 * len(names)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stream_seed(1, "init/x") == 8097644697428626074  # for ever: a seed of an old run means the same weights


def test_a_scale_of_next_to_nothing_can_be_started_with() -> None:
    value = Bottleneck(scale=1e-200)
    model = GPT(dataclasses.replace(SMALL, value=value, residual=Skip(attention=False)))
    assert all(p.isfinite().all() for p in model.parameters())
