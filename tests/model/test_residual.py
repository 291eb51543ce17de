"""Topologies: which sum, which norm, written out for one block each; and weights shared across blocks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from qurve.accounting import count
from qurve.errors import BadInput
from qurve.model.cache import Cache
from qurve.model.config import LayerOverride, ModelConfig, Subspaces
from qurve.model.feed_forward import Gated, MixtureOfExperts
from qurve.model.gpt import GPT
from qurve.model.residual import Skip
from qurve.model.view import View
from qurve.projections import Bottleneck, Identity, Linear, MLPReuse
from qurve.train.config import TrainConfig
from qurve.train.optim import build_optimizer
from qurve.zoo.linear_attention import LinearAttention
from qurve.zoo.primer import Primer

TINY = ModelConfig(n_layers=2, d_model=12, n_heads=2, d_ff=20, context=11, vocab_size=17)


def tokens() -> Tensor:
    return torch.randint(17, (2, 11), generator=torch.Generator().manual_seed(1))


def build(**changes: Any) -> GPT:
    model = GPT(dataclasses.replace(TINY, **changes), seed=1).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
    return model


VIEW = View("causal", 0, 11, torch.device("cpu"))


@pytest.mark.parametrize("norms", ["pre", "post", "none"])
@pytest.mark.parametrize(("attention", "mlp"), [(True, True), (True, False), (False, True), (False, False)])
def test_each_topology_written_out(norms: str, attention: bool, mlp: bool) -> None:
    model = build(residual=Skip(norms, attention, mlp))  # type: ignore[arg-type]
    x = model.token_embedding(tokens()) + model.position_embedding.weight
    for block in model.blocks:
        for layer, norm, skip in (
            (lambda x, block=block: block.attention((x,), VIEW), block.attention_norm, attention),
            (lambda x, block=block: block.mlp(x)[0], block.mlp_norm, mlp),
        ):
            y = layer(norm(x) if norms == "pre" else x)
            y = x + y if skip else y
            x = norm(y) if norms == "post" else y
    if norms == "pre":
        x = model.final_norm(x)
    scale = 0.02 / math.sqrt(0.5) if norms == "none" else 1.0
    assert_close(model(tokens()), scale * x @ model.token_embedding.weight.T)
    assert any(isinstance(m, nn.LayerNorm) for m in model.modules()) == (norms != "none")


def test_attention_without_a_skip_begins_as_the_identity() -> None:
    """`A + I - C`: while queries are zero, each token gets its own value."""
    model = GPT(dataclasses.replace(TINY, residual=Skip("none", attention=False)), seed=1).double()
    layer = model.blocks[0].attention
    assert torch.equal(layer.shaping, torch.ones(6, dtype=torch.float64))
    with torch.no_grad():
        layer.query.weight.zero_()
    x_BTD = torch.randn(2, 11, 12, dtype=torch.float64)
    assert_close(layer((x_BTD,), VIEW), layer.output(layer.value(x_BTD)))
    with torch.no_grad():
        layer.shaping.copy_(torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0]))
        layer.query.weight.normal_()
    plain = build(n_layers=1).blocks[0].attention
    plain.load_state_dict({n: p for n, p in layer.state_dict().items() if n != "shaping"})
    assert_close(layer((x_BTD,), VIEW), plain((x_BTD,), VIEW))


def test_the_shaping_takes_no_weight_decay() -> None:
    model = GPT(dataclasses.replace(TINY, residual=Skip(attention=False)))
    decayed, plain = build_optimizer(model, TrainConfig()).param_groups
    shaping = {id(block.attention.shaping) for block in model.blocks}
    assert plain["weight_decay"] == 0.0
    assert shaping <= {id(p) for p in plain["params"]}
    assert not shaping & {id(p) for p in decayed["params"]}


def test_one_block_may_serve_as_all() -> None:
    shared = build(share_blocks=True, n_layers=3)
    apart = GPT(dataclasses.replace(TINY, n_layers=3)).double().eval()
    state = {n: p for n, p in shared.state_dict().items() if not n.startswith("blocks.")}
    for name, p in shared.state_dict().items():
        if name.startswith("blocks.0."):
            state |= {name.replace("blocks.0.", f"blocks.{layer}."): p for layer in range(3)}
    apart.load_state_dict(state)
    assert_close(shared(tokens()), apart(tokens()))
    one, three = count(dataclasses.replace(TINY, n_layers=1)), count(shared.config)
    assert one.non_embedding == three.non_embedding
    assert three.forward_flops_per_token == count(apart.config).forward_flops_per_token


def test_blocks_may_differ() -> None:
    override = LayerOverride((1,), query=Bottleneck(), mlp=Gated())
    model = build(n_layers=3, overrides=(override, LayerOverride((1, 2), key=Identity())))
    kinds = [(b.attention.query.config.kind, b.attention.key.config.kind, b.config.mlp.kind) for b in model.blocks]
    assert kinds == [
        ("linear", "linear", "dense"),
        ("bottleneck", "identity", "gated"),
        ("linear", "identity", "dense"),
    ]
    assert hasattr(model.blocks[1].mlp, "gate")


def test_a_block_after_an_exception_is_checked_too() -> None:
    experts = LayerOverride((3,), mlp=MixtureOfExperts(3, 1))
    with pytest.raises(BadInput, match="MLP reuse reads the hidden activations of the previous block"):
        dataclasses.replace(TINY, n_layers=5, query=MLPReuse(), overrides=(experts,))
    mended = (experts, LayerOverride((4,), query=Linear()))
    assert dataclasses.replace(TINY, n_layers=5, query=MLPReuse(), overrides=mended).at(4).query == Linear()


def test_each_block_decodes_with_the_state_of_its_own_mixer() -> None:
    mixers = (LayerOverride((0,), mixer=Primer()), LayerOverride((2,), mixer=LinearAttention()))
    model, ids_BT = build(n_layers=3, overrides=mixers), tokens()
    cache = Cache(model.config, 2, dtype=torch.float64)
    with torch.no_grad():
        parts = [model(part, cache) for part in ids_BT.split((3, 1, 1, 6), dim=1)]
        assert_close(torch.cat(parts, dim=1), model(ids_BT))


def test_reused_activations_are_the_previous_blocks() -> None:
    """`Q = (x + h W) / 2`, with `h = GELU(x W_up)` of the block before; the first block's query is its own choice."""
    model = build(query=MLPReuse(first=Bottleneck(width=3)))
    assert model.blocks[0].attention.query.config == Bottleneck(width=3)
    seen: list[tuple[Tensor, ...]] = []
    model.blocks[1].attention.register_forward_pre_hook(lambda module, args: seen.append((args[0][0], args[2])))
    ups: list[Tensor] = []
    model.blocks[0].mlp.up.register_forward_hook(lambda module, args, out: ups.append(out))
    model(tokens())
    (x_BTD, h_BTF), (up_BTF,) = seen[0], ups
    assert_close(h_BTF, nn.functional.gelu(up_BTF))
    query = model.blocks[1].attention.query
    assert_close(query(x_BTD, h_BTF), (x_BTD + h_BTF @ query.weight.T) / 2)
    sliced = build(query=MLPReuse(sliced=True)).blocks[1].attention.query
    assert_close(sliced(x_BTD, h_BTF), (x_BTD + h_BTF[..., :12] @ sliced.weight.T) / 2)


def test_reuse_costs_what_it_says() -> None:
    base = ModelConfig()
    full, sliced = (
        count(dataclasses.replace(base, query=MLPReuse(sliced=sliced))).non_embedding for sliced in (False, True)
    )
    assert full - count(base).non_embedding == 11 * 768 * (3072 - 768)
    assert sliced == count(base).non_embedding


def test_pathways_see_their_own_subspaces() -> None:
    subspaces = Subspaces(q=1, k=2, v=3, qk=4, qv=5, kv=6)
    model = build(n_layers=3, subspaces=subspaces)
    for layer, block in enumerate(model.blocks):
        widths = [getattr(block.attention, name).dims.d_in for name in ("query", "key", "value")]
        assert widths == ([12] * 3 if layer == 0 else [12 + 1 + 4 + 5, 12 + 2 + 4 + 6, 12 + 3 + 5 + 6])
        assert (block.subspaces is None) == (layer == 2)
    routed: list[Tensor] = []
    model.blocks[0].subspaces.register_forward_hook(lambda module, args, out: routed.append(out))
    inputs: list[tuple[Tensor, ...]] = []
    model.blocks[1].attention.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    model(tokens())
    q, k, v, qk, qv, kv = routed[0].split((1, 2, 3, 4, 5, 6), dim=-1)
    for found, parts in zip(inputs[0], ((q, qk, qv), (k, qk, kv), (v, qv, kv)), strict=True):
        assert_close(found[..., 12:], torch.cat(parts, dim=-1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": MLPReuse(), "share_blocks": True}, r"model\.share_blocks needs blocks that are all alike"),
        ({"overrides": (LayerOverride((2,), query=Identity()),)}, r"there is no layer 2; they are 0 to 1"),
        ({"overrides": (LayerOverride((0,), window=0),)}, r"window = 0: it must be at least 1"),
        ({"subspaces": Subspaces(q=4), "query": Bottleneck()}, r"model\.query: the identity anchor .* 16 -> 12"),
        ({"query": MLPReuse(sliced=True), "d_ff": 8}, r"takes the first 12 hidden .* has 8; use sliced = false"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(changes: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        dataclasses.replace(TINY, **changes)


def test_an_override_that_changes_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="changes nothing"):
        LayerOverride((0,))
    with pytest.raises(BadInput, match=r"subspaces\.qk = -1"):
        Subspaces(qk=-1)
    assert LayerOverride((0,), query=Linear()).changes == {"query": Linear()}
