"""Affine hulls: the paper's claim, the tighter bound and that it is attained, and what is measured on models."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from qurve.analysis import pathways
from qurve.analysis.hull import HullBound, helix, hilbert_curve, hull_bound, measure_hulls
from qurve.analysis.pathways import Block, visiting
from qurve.analysis.spectrum import affine_hull_dimension
from qurve.errors import BadInput
from qurve.model.cache import Cache
from qurve.model.config import LayerOverride, ModelConfig, Subspaces
from qurve.model.gpt import GPT
from qurve.model.residual import Skip
from qurve.projections import Bottleneck, Identity, Linear, MLPReuse, ProjectionConfig, Residual
from qurve.zoo.hyper_connections import HyperConnections
from qurve.zoo.linear_attention import LinearAttention
from qurve.zoo.mlp_attention import MLPAttention
from qurve.zoo.projections import NonlinearLoRA

D = 8


def model_config(query: ProjectionConfig, key: ProjectionConfig, value: ProjectionConfig, **more: Any) -> ModelConfig:
    sizes: dict[str, Any] = {"n_layers": 2, "d_model": D, "n_heads": 2, "d_ff": 16, "context": 16, "vocab_size": 61}
    return ModelConfig(query=query, key=key, value=value, **(sizes | more))


# ------------------------------------------------------------------------------------------------- the paper's claim


def exact_rank(rows: list[list[int]]) -> int:
    """Over the rationals."""
    left = [[Fraction(x) for x in row] for row in rows]
    rank = 0
    for column in range(len(rows[0])):
        pivot = next((row for row in left[rank:] if row[column]), None)
        if pivot is None:
            continue
        left.remove(pivot)
        left.insert(rank, pivot)
        for row in left[rank + 1 :]:
            factor = row[column] / pivot[column]
            row[:] = [a - factor * b for a, b in zip(row, pivot, strict=True)]
        rank += 1
    return rank


def exact_hull(points: list[list[int]]) -> int:
    return exact_rank([[a - b for a, b in zip(point, points[0], strict=True)] for point in points])


def product(matrix: list[list[int]], x: list[int]) -> list[int]:
    return [sum(a * b for a, b in zip(row, x, strict=True)) for row in matrix]


MAPS: dict[str, Callable[[list[int]], list[int]]] = {
    "identity": lambda x: x,
    "relu": lambda x: [max(a, 0) for a in x],
    "square": lambda x: [a * a for a in x],
    "conjunction": lambda x: [a * b for a, b in zip(x, x[1:] + x[:1], strict=True)],
    "constant": lambda x: [3 for _ in x],
}


@settings(max_examples=60)
@given(data=st.data(), d=st.integers(1, 3), bend=st.sampled_from(sorted(MAPS)))
def test_the_claim_of_the_appendix_holds_exactly_on_random_maps(data: st.DataObject, d: int, bend: str) -> None:
    """`dim aff S <= dim span(im f - f(0)) + rank [P; Q] <= 2 d`, and at most d where f is linear: in whole numbers, so
    that no tolerance decides it."""
    entry = st.integers(-3, 3)
    matrix = st.lists(st.lists(entry, min_size=d, max_size=d), min_size=d, max_size=d)
    a, b, p, q = (data.draw(matrix) for _ in range(4))
    xs = [[0] * d, *data.draw(st.lists(st.lists(entry, min_size=d, max_size=d), min_size=1, max_size=12))]
    f = [product(b, MAPS[bend](product(a, x))) for x in xs]
    linear = [product(p, x) + product(q, x) for x in xs]
    whole = exact_hull([left + right for left, right in zip(f, linear, strict=True)])
    assert whole <= exact_hull(f) + exact_rank(p + q) <= 2 * d
    if bend == "identity":
        assert whole <= d
    numeric = affine_hull_dimension([left + right for left, right in zip(f, linear, strict=True)])
    assert numeric == whole


# ------------------------------------------------------------------------------------------------------- the bounds


def outputs(config: ModelConfig, x_MD: Tensor, seed: int, layer: int = 1) -> list[Tensor]:
    """Queries, keys and values of random weights, far from linear, in float64."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for name in ("query", "key", "value"):
        kind, dims = config.projections(layer)[name]
        module = kind.build(dims.d_in, dims.d_out, bias=dims.bias, d_other=dims.d_other).double()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            other = torch.randn(len(x_MD), dims.d_other, generator=generator, dtype=torch.float64)
            found.append(module(x_MD, *([other] if dims.d_other else [])))
    return found


def inputs(norm: str, seed: int, points: int = 200) -> Tensor:
    x_MD = torch.randn(points, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gain_D = torch.linspace(0.5, 2, D, dtype=torch.float64)
    if norm == "layernorm":
        return torch.nn.functional.layer_norm(x_MD, (D,), gain_D, gain_D.flip(0))  # a bias moves the flat, no more
    return torch.nn.functional.rms_norm(x_MD, (D,), gain_D)


BENT, ON_LINEAR, ALONE = Bottleneck(), Bottleneck(anchor="linear"), Bottleneck(anchor="none")
CASES: list[tuple[str, dict[str, Any], int, int]] = [
    # (name, projections, dimension with an RMSNorm before, the paper's bound); with a LayerNorm one less, but at 3 D
    ("linear", {}, D, D),
    ("identity", {"query": Identity()}, D, D),
    ("linear-residual", {"query": Residual()}, D, D),
    ("paper", {"query": BENT}, D + D // 2, 2 * D),
    ("narrow", {"query": Bottleneck(width=1)}, D + 1, 2 * D),
    ("wide", {"query": Bottleneck(width=5 * D)}, 2 * D - 1, 2 * D),
    ("wide-rmsnorm", {"query": Bottleneck(width=5 * D, post_norm="rmsnorm")}, 2 * D, 2 * D),
    ("no-anchor", {"query": ALONE}, D + D // 2, 2 * D),
    ("keys", {"key": BENT}, D + D // 2, 2 * D),
    ("three-on-linear", {"query": ON_LINEAR, "key": ON_LINEAR, "value": ON_LINEAR}, D + 3 * D // 2, 3 * D),
    ("three-narrow", dict.fromkeys(("query", "key", "value"), Bottleneck(width=2)), D + 6, 3 * D),
    ("adapter", {"query": NonlinearLoRA(rank=3)}, D + 3, 2 * D),
    ("linear-adapter", {"query": NonlinearLoRA(rank=3, activation="identity")}, D, D),
    ("reuse", {"query": MLPReuse()}, 2 * D, 2 * D),
]


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize(("projections", "dimension", "paper"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_the_tighter_bound_is_attained_and_the_papers_is_above(
    projections: dict[str, ProjectionConfig], dimension: int, paper: int, norm: str
) -> None:
    three = dict.fromkeys(("query", "key", "value"), Linear()) | projections
    config = model_config(**three, norm=norm)
    bound = hull_bound(config, layer=1)
    dimension -= norm == "layernorm"
    assert bound == HullBound(ambient=3 * D, paper=paper, tight=dimension, flat=D - (norm == "layernorm"))
    qkv_MO = torch.cat(outputs(config, inputs(norm, seed=3), seed=4), dim=-1)
    assert affine_hull_dimension(qkv_MO) == dimension


def test_without_linear_terms_three_bottlenecks_have_their_columns_alone() -> None:
    config = model_config(ALONE, ALONE, ALONE, norm="rmsnorm")
    assert hull_bound(config, 1).tight == 3 * D // 2
    assert affine_hull_dimension(torch.cat(outputs(config, inputs("rmsnorm", 1), 2), dim=-1)) == 3 * D // 2


def test_a_bias_under_the_layer_norm_is_one_direction_more() -> None:
    config = model_config(BENT, Linear(), Linear(), norm="rmsnorm", bias=True)
    assert hull_bound(config, 1).tight == D + D // 2 + 1
    assert affine_hull_dimension(torch.cat(outputs(config, inputs("rmsnorm", 1), 2), dim=-1)) == D + D // 2 + 1


@settings(max_examples=50)
@given(
    kinds=st.lists(
        st.builds(
            Bottleneck,
            anchor=st.sampled_from(["identity", "linear", "none"]),
            width=st.integers(1, D + 2),
            activation=st.sampled_from(["gelu", "relu", "relu2", "silu", "identity"]),
            pre_norm=st.sampled_from(["rmsnorm", "layernorm", "none"]),
            post_norm=st.sampled_from(["rmsnorm", "layernorm", "none"]),
            norm_stage=st.sampled_from(["coupled", "separate"]),
        )
        | st.sampled_from([Linear(), Residual(), Identity(), NonlinearLoRA(rank=2)]),
        min_size=3,
        max_size=3,
    ),
    norm=st.sampled_from(["rmsnorm", "layernorm"]),
    bias=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_no_combination_leaves_its_bound(kinds: list[ProjectionConfig], norm: str, bias: bool, seed: int) -> None:
    config = model_config(*kinds, norm=norm, bias=bias)
    bound = hull_bound(config, 1)
    assert bound.flat <= bound.paper <= bound.ambient or not any(k.reach(d).linear for k, d in _qkv(config))
    assert bound.tight <= bound.paper
    qkv_MO = torch.cat(outputs(config, inputs(norm, seed), seed + 1), dim=-1)
    assert affine_hull_dimension(qkv_MO, 1e-6) <= bound.tight


@settings(max_examples=40)
@given(
    m=st.integers(2, 5),
    bent=st.integers(0, 4),
    affine=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_the_dimension_counts_what_is_not_affine(m: int, bent: int, affine: int, seed: int) -> None:
    """`m + r` less the directions of g that are affine functions of the input, however they are mixed with others."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x_MD = draw(80, m) @ draw(m, D) + draw(1, D)  # a flat of m dimensions, somewhere
    g_MR = torch.cat([torch.relu(x_MD @ draw(D, bent) + draw(1, bent)).square(), x_MD @ draw(D, affine) + 1], dim=-1)
    mixed_MR = g_MR @ torch.linalg.qr(draw(bent + affine, bent + affine)).Q
    assume(all(8 < (column > 0).sum() < 72 for column in g_MR.T[:bent]))  # each unit has seen both of its sides
    assert affine_hull_dimension(torch.cat([x_MD, mixed_MR], dim=-1)) == m + bent


def _qkv(config: ModelConfig) -> list[Any]:
    return [config.projections(1)[name] for name in ("query", "key", "value")]


@pytest.mark.parametrize(
    ("changes", "layer", "expected"),
    [
        ({"query": BENT, "n_kv_heads": 1}, 1, (2 * D, 2 * D, 3 * D // 2 - 1, D - 1)),  # keys and values of 4 each
        ({"query": BENT, "residual": Skip(norms="post")}, 0, (3 * D, 2 * D, 3 * D // 2, D)),  # reads embeddings
        ({"query": BENT, "residual": Skip(norms="post")}, 1, (3 * D, 2 * D, 3 * D // 2 - 1, D - 1)),
        ({"query": BENT, "residual": Skip(norms="none")}, 1, (3 * D, 2 * D, 3 * D // 2, D)),
        ({"subspaces": Subspaces(q=2, kv=1)}, 1, (3 * D, D + 3, D + 2, D + 2)),
        ({"subspaces": Subspaces(q=2, kv=1)}, 0, (3 * D, D, D - 1, D - 1)),
        ({"overrides": (LayerOverride((1,), query=BENT),)}, 0, (3 * D, D, D - 1, D - 1)),
        ({"overrides": (LayerOverride((1,), query=BENT),)}, 1, (3 * D, 2 * D, 3 * D // 2 - 1, D - 1)),
        ({"residual": HyperConnections(pathways=True)}, 1, (3 * D, 3 * D, 3 * (D - 1), 3 * (D - 1))),
        ({"mixer": MLPAttention()}, 1, (D, D, D - 1, D - 1)),  # values alone
        ({"query": MLPReuse()}, 0, (3 * D, D, D - 1, D - 1)),  # the first block's is linear
    ],
)
def test_bounds_of_other_models(changes: dict[str, Any], layer: int, expected: tuple[int, int, int, int]) -> None:
    config = model_config(**({"query": Linear(), "key": Linear(), "value": Linear()} | changes))
    assert hull_bound(config, layer) == HullBound(*expected)


# ------------------------------------------------------------------------------------------------- what is measured

IDS_BT = torch.randint(61, (24, 16), generator=torch.Generator().manual_seed(5))


def build(**changes: Any) -> GPT:
    """Weights large enough that activations bend."""
    model = GPT(model_config(**({"query": Linear(), "key": Linear(), "value": Linear()} | changes)), seed=1).eval()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.normal_(0, 0.7, generator=torch.Generator().manual_seed(seed))
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"query": BENT},
        {"query": BENT, "norm": "rmsnorm"},
        {"query": ON_LINEAR, "key": ON_LINEAR, "value": ON_LINEAR},
        {"query": BENT, "n_kv_heads": 1},
        {"query": BENT, "share_blocks": True},
        {"query": MLPReuse()},
        {"query": BENT, "attends": "prefix"},
        {"query": BENT, "mixer": LinearAttention()},
        {"subspaces": Subspaces(q=2, kv=1)},
    ],
    ids=["linear", "paper", "rmsnorm", "three", "mqa", "shared", "reuse", "prefix", "linear-attention", "subspaces"],
)
def test_models_attain_their_bound_in_every_block(changes: dict[str, Any]) -> None:
    model = build(**changes)
    hulls = measure_hulls(model, IDS_BT.split(5))
    assert [hull.layer for hull in hulls] == [0, 1]
    for hull in hulls:
        assert hull.qkv.rank() == hull.bound.tight
        assert hull.qkv.points == IDS_BT.numel()
        assert list(hull.pathways) == ["query", "key", "value"]
        if hull.bound.tight == hull.bound.flat:
            assert hull.bent == 0
        else:
            assert hull.bent > 1e-4


def test_a_freshly_drawn_layer_attains_its_bound_and_hardly_bends() -> None:
    """So that the rank alone says nothing of what training has made of the room."""
    model = GPT(model_config(BENT, Linear(), Linear()), seed=1)
    for hull in measure_hulls(model, [IDS_BT]):
        assert hull.qkv.rank() == hull.bound.tight
        assert 0 < hull.bent < 0.01


def test_the_identity_restores_the_rank_that_the_bottleneck_takes() -> None:
    for hull in measure_hulls(build(query=BENT, norm="rmsnorm"), [IDS_BT]):
        assert hull.f["query"].rank() == D // 2
        assert hull.pathways["query"].rank() == hull.input.rank() == D


def test_the_spectrum_is_that_of_all_activations_at_once() -> None:
    model, seen = build(query=BENT, n_kv_heads=1), list[Tensor]()
    handles = [
        model.blocks[1].attention.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0][0].double()))
    ]
    with torch.no_grad():
        model(IDS_BT)
    handles[0].remove()
    (x_BTD,), attention = seen, model.double().blocks[1].attention
    with torch.no_grad():
        parts = [attention.query(x_BTD), attention.key(x_BTD), attention.value(x_BTD)]
    hull = measure_hulls(model.float(), IDS_BT.split(7))[1]
    for found, part in (
        *zip(hull.pathways.values(), parts, strict=True),
        (hull.qkv, torch.cat(parts, dim=-1)),
        (hull.input, x_BTD),
        (hull.f["query"], 2 * parts[0] - x_BTD),
    ):
        x_MN = part.flatten(0, 1)
        expected = torch.linalg.svdvals(x_MN - x_MN.mean(0)) / len(x_MN) ** 0.5
        assert found.deviations == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5 * expected[0].item())
    squares = torch.tensor(hull.qkv.deviations).square()
    assert hull.bent == pytest.approx((squares[D - 1 :].sum() / squares.sum()).item())


@pytest.mark.parametrize("config", [ON_LINEAR, ALONE, Bottleneck(scale=0.3, start="exact")], ids=lambda c: c.anchor)
def test_f_is_what_is_added_to_the_anchor(config: Bottleneck) -> None:
    model, seen = build(query=config), dict[int, Block]()
    with visiting(model, lambda layer, block: seen.update({layer: block})), torch.no_grad():
        model(IDS_BT)
    for block in seen.values():
        query, x_MD = block["query"], block["query"].x_MD
        with torch.no_grad():
            rest_MO, f_MO = query(x_MD) / config.scale, query.f(x_MD)
        if config.anchor == "linear":
            rest_MO -= x_MD @ query.projection.weight.T
        elif config.anchor == "identity":
            rest_MO -= x_MD
        assert f_MO is not None
        assert torch.allclose(f_MO, rest_MO)
        assert block["key"].f(block["key"].x_MD) is None


def test_blocks_are_visited_and_forgotten() -> None:
    """Nothing of a pass outlives it, so that memory does not grow with the number of passes."""
    model, alive = build(query=BENT), list[Any]()
    before = model(IDS_BT[:2])
    with visiting(model, lambda layer, block: alive.append(weakref.ref(block["query"].x_MD))):
        after = model(IDS_BT[:2])
    assert len(alive) == 2
    assert [reference() for reference in alive] == [None, None]
    assert torch.equal(before, after)
    assert not any(block.attention._forward_pre_hooks for block in model.blocks)


def test_pathways_are_copies_run_as_specified() -> None:
    model, copies = build(query=BENT), list[Any]()
    model.blocks[0].attention.query.impl = "compiled"
    model.blocks[0].attention.register_forward_pre_hook(lambda module, _: setattr(module.query, "impl", "reference"))
    with visiting(model, lambda layer, block: copies.append(block["query"].projection)), torch.no_grad():
        model.hidden(IDS_BT)
    assert [(copy.impl, copy.w1.dtype, copy.w1.requires_grad) for copy in copies] == [
        ("reference", torch.float64, False)
    ] * 2


def test_measuring_leaves_the_model_as_it_was_and_runs_in_evaluation() -> None:
    model = build(query=BENT, dropout=0.5).train()
    first, second = (measure_hulls(model, [IDS_BT])[1].qkv.deviations for _ in range(2))
    assert first == second
    assert model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_mixer_without_queries_has_what_it_has() -> None:
    hull = measure_hulls(build(mixer=MLPAttention()), [IDS_BT])[0]
    assert list(hull.pathways) == ["value"]
    assert hull.qkv.rank() == D - 1


def test_too_few_tokens_and_caches_are_refused() -> None:
    model = build()
    with pytest.raises(BadInput, match=r"16 tokens span at most 15 dimensions.* have 24: take more tokens"):
        measure_hulls(model, [IDS_BT[:1]])
    with pytest.raises(BadInput, match="24 tokens span at most 23 dimensions"):
        measure_hulls(model, [IDS_BT[:3, :8]])
    with (
        pathways.visiting(model, lambda layer, block: None),
        torch.no_grad(),
        pytest.raises(ValueError, match="without a cache"),
    ):
        model(IDS_BT[:1], Cache(model.config, batch=1))


# --------------------------------------------------------------------------------------------------------------- curves


def test_a_helix_lies_in_no_plane() -> None:
    curve = helix(60)
    assert affine_hull_dimension(curve) == 3
    assert affine_hull_dimension(curve[:, :2]) == 2
    steps = (curve[1:] - curve[:-1]).norm(dim=-1)
    assert torch.allclose(steps, steps[0].expand_as(steps))  # it is one curve, evenly run through


@pytest.mark.parametrize(("order", "dimensions"), [(1, 2), (4, 2), (2, 3), (2, 4), (1, 6)])
def test_hilberts_curve_walks_through_every_cell_and_spans_the_space(order: int, dimensions: int) -> None:
    curve = hilbert_curve(order, dimensions)
    assert len(curve.unique(dim=0)) == len(curve) == 2 ** (order * dimensions)
    assert (curve.min(), curve.max()) == (0, 2**order - 1)
    assert ((curve[1:] - curve[:-1]).abs().sum(-1) == 1).all()  # each cell next to the one before
    assert affine_hull_dimension(curve) == dimensions


def test_hilberts_curve_stays_near_itself() -> None:
    """What tells it from a walk row by row: the first quarter fills a quarter of the square."""
    curve = hilbert_curve(3, 2)
    for quarter in curve.split(16):
        assert (quarter.max(0).values - quarter.min(0).values).tolist() == [3, 3]
