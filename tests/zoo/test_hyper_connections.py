"""Hyper-connections against their formula in plain loops, against pre-norm at the start, and as a part of a model."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from qurve.accounting import count
from qurve.config import from_dict, to_dict
from qurve.errors import BadInput
from qurve.model.cache import Cache
from qurve.model.config import ModelConfig, Subspaces
from qurve.model.feed_forward import Gated, MixtureOfExperts
from qurve.model.gpt import GPT
from qurve.model.mixers import MixerConfig, Softmax
from qurve.model.positions import Rope
from qurve.model.residual_modules import Residual
from qurve.projections import Bottleneck
from qurve.projections.mlp_reuse import MLPReuse
from qurve.train.config import TrainConfig
from qurve.train.optim import build_optimizer
from qurve.zoo.hyper_connections import HyperConnections
from qurve.zoo.hyper_connections_modules import Manifold, sinkhorn

LENGTH, WIDTH = 13, 20
BASE = ModelConfig(n_layers=3, d_model=WIDTH, n_heads=5, d_ff=31, context=LENGTH, vocab_size=29)
SCHEMES = [
    HyperConnections(4, "static"),
    HyperConnections(3, "static", pathways=True),
    HyperConnections(3, "dynamic"),
    HyperConnections(4, "dynamic", pathways=True),
    HyperConnections(4, "manifold"),
    HyperConnections(2, "manifold", pathways=True),
]
OWN = ("read_weights", "write_weights", "mix_weights", "read_matrix", "write_matrix", "scales")
each = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.mode}-{s.streams}{'-qkv' * s.pathways}")


def tokens(batch: int = 2) -> Tensor:
    return torch.randint(29, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def with_scheme(scheme: HyperConnections, **changes: Any) -> ModelConfig:
    return dataclasses.replace(BASE, residual=scheme, **changes)


def shaken(model: nn.Module) -> Any:
    """The same module with its hyper-connections far from their start."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] in OWN:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


# --------------------------------------------------------------------------------------------------------- the formula


def weights_of_one_token(scheme: HyperConnections, m: Residual, h: Tensor, reads: int) -> tuple[Any, Any, Any]:
    """r `[R][N]`, w `[N]` and M `[N][N]` (to, from) of the streams `h` `[N, D]`, number by number."""
    n = len(h)
    p = {name: parameter.detach() for name, parameter in m.named_parameters()}
    r = [[p["read_weights"][i * n + j].item() for j in range(n)] for i in range(reads)]
    w = [p["write_weights"][i].item() for i in range(n)]
    mix = [[p["mix_weights"][to * n + of].item() for of in range(n)] for to in range(n)]
    if scheme.mode == "dynamic":
        mix_scale, write_scale = p["scales"].tolist()
        for j in range(n):
            normed = (h[j] - h[j].mean()) / math.sqrt(h[j].var(correction=0).item() + BASE.norm_eps)
            for i in range(reads):
                r[i][j] += mix_scale * math.tanh(float(p["read_matrix"][i] @ normed))
            w[j] += write_scale * math.tanh(float(p["write_matrix"][0] @ normed))
            for to in range(n):
                mix[to][j] += mix_scale * math.tanh(float(p["write_matrix"][1 + to] @ normed))
    if scheme.mode == "manifold":
        normed = h.flatten() / math.sqrt(h.square().mean().item() + BASE.norm_eps)
        read_scale, write_scale, mix_scale = p["scales"].tolist()
        from_read, from_write = p["read_matrix"] @ normed, p["write_matrix"] @ normed
        for j in range(n):
            for i in range(reads):
                r[i][j] = 1 / (1 + math.exp(-(r[i][j] + read_scale * float(from_read[i * n + j]))))
            w[j] = 2 / (1 + math.exp(-(w[j] + write_scale * float(from_write[j]))))
            for of in range(n):
                mix[j][of] = math.exp(mix[j][of] + mix_scale * float(from_write[n + j * n + of]))
        for _ in range(20):
            for of in range(n):
                total = sum(mix[to][of] for to in range(n))
                for to in range(n):
                    mix[to][of] /= total
            mix = [[x / sum(row) for x in row] for row in mix]
    return r, w, mix


@each
@pytest.mark.parametrize("sublayer", ["attention", "mlp"])
def test_each_number_is_as_the_papers_write_it(scheme: HyperConnections, sublayer: Any) -> None:
    n, reads = scheme.streams, 3 if scheme.pathways and sublayer == "attention" else 1
    model = shaken(GPT(with_scheme(scheme), seed=2)).double()
    module, norm = getattr(model.blocks[1], f"{sublayer}_residual"), model.blocks[1].attention_norm
    stream_BTND = torch.randn(2, 2, n, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    y_BTD = torch.randn(2, 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        inputs, after_BTND = module.read(stream_BTND, norm), module.write(stream_BTND, y_BTD, norm)
    assert len(inputs) == reads
    for b in range(2):
        for t in range(2):
            h = stream_BTND[b, t]
            r, w, mix = weights_of_one_token(scheme, module, h, reads)
            for i, x_BTD in enumerate(inputs):
                read = sum(r[i][j] * h[j] for j in range(n))
                assert_close(x_BTD[b, t], F.layer_norm(read, (WIDTH,), eps=BASE.norm_eps))
            for to in range(n):
                assert_close(after_BTND[b, t, to], sum(mix[to][j] * h[j] for j in range(n)) + w[to] * y_BTD[b, t])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 99), st.floats(0, 4))
def test_rows_and_columns_of_the_mix_sum_to_one(n: int, seed: int, spread: float) -> None:
    """Rows always; columns as far as the twenty steps have come, which is far for numbers like those of a model."""
    mix_NN = sinkhorn(spread * torch.rand(3, n, n, generator=torch.Generator().manual_seed(seed)).double())
    assert (mix_NN >= 0).all()
    assert_close(mix_NN.sum(-1), torch.ones(3, n).double())
    assert_close(mix_NN.sum(-2), torch.ones(3, n).double(), atol=1e-3, rtol=0)


def test_extreme_logits_stay_finite() -> None:
    logits_NN = torch.tensor([[0.0, 300.0, -300.0], [0.0, 400.0, 0.0], [-500.0, 1.0, -500.0]], requires_grad=True)
    mix_NN = sinkhorn(logits_NN)
    mix_NN[0, 0].backward()
    assert mix_NN.isfinite().all()
    assert logits_NN.grad is not None
    assert logits_NN.grad.isfinite().all()


def test_the_constrained_weights_of_a_model_are_within_their_bounds() -> None:
    model = shaken(GPT(with_scheme(HyperConnections(4, "manifold"))))
    h_BTND = torch.randn(2, 5, 4, WIDTH)
    for block in model.blocks:
        assert isinstance(block.mlp_residual, Manifold)
        read_BTRN = block.mlp_residual.reading(h_BTND)
        write_BTN, mix_BTNN = block.mlp_residual.writing(h_BTND)
        assert ((read_BTRN > 0) & (read_BTRN < 1)).all()
        assert ((write_BTN > 0) & (write_BTN < 2)).all()
        assert write_BTN.max() > 1
        assert_close(mix_BTNN.sum(-1), torch.ones(2, 5, 4))
        assert_close(mix_BTNN.sum(-2), torch.ones(2, 5, 4), atol=0.03, rtol=0)


# ----------------------------------------------------------------------------------------------------------- the start


@each
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_the_start_is_a_pre_norm_network(scheme: HyperConnections, norm: Any) -> None:
    config = with_scheme(scheme, norm=norm)
    with torch.no_grad():
        expected_BTV = GPT(dataclasses.replace(BASE, norm=norm), seed=3)(tokens())
        assert_close(GPT(config, seed=3)(tokens()), expected_BTV, atol=1e-6, rtol=0)


def test_consecutive_sublayers_read_different_streams_at_the_start() -> None:
    model = GPT(with_scheme(HyperConnections(3, "static")))
    sublayers = [m for block in model.blocks for m in (block.attention_residual, block.mlp_residual)]
    assert [int(m.read_weights.argmax()) for m in sublayers] == [0, 1, 2, 0, 1, 2]
    manifold = GPT(with_scheme(HyperConnections(3, "manifold"))).blocks[1].mlp_residual
    assert_close(manifold.reading(torch.zeros(1, 1, 3, WIDTH)).flatten(), torch.tensor([0.75, 0.125, 0.125]))


def test_the_start_has_values_when_it_is_built_without_memory() -> None:
    with torch.device("meta"):
        model = GPT(with_scheme(HyperConnections(3, "manifold")))
    for module in model.modules():
        for start in getattr(module, "starts", {}).values():
            assert not (isinstance(start, Tensor) and start.is_meta)


# ------------------------------------------------------------------------------------------------------- within a model


@each
def test_nothing_later_is_seen(scheme: HyperConnections) -> None:
    model, ids_BT = shaken(GPT(with_scheme(scheme), seed=1)).eval(), tokens()
    changed_BT = ids_BT.clone()
    changed_BT[:, 7:] = (changed_BT[:, 7:] + 1) % 29
    with torch.no_grad():
        assert torch.equal(model(ids_BT)[:, :7], model(changed_BT)[:, :7])
        assert not torch.equal(model(ids_BT)[:, 7:], model(changed_BT)[:, 7:])


@each
def test_one_token_at_a_time_is_the_whole_forward(scheme: HyperConnections) -> None:
    config, ids_BT = with_scheme(scheme, positions=Rope()), tokens()
    model, cache = shaken(GPT(config, seed=1)).eval(), Cache(config, 2)
    with torch.no_grad():
        parts = [model(part, cache) for part in (ids_BT[:, :3], *ids_BT[:, 3:].split(1, dim=1))]
        assert_close(torch.cat(parts, dim=1), model(ids_BT), atol=1e-5, rtol=0)


@each
def test_padding_at_the_left_changes_nothing(scheme: HyperConnections) -> None:
    model, ids_BT = shaken(GPT(with_scheme(scheme), seed=1)).eval(), tokens(1)
    padded_BT = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids_BT[:, :9]], dim=1)
    with torch.no_grad():
        found_BTV = model(padded_BT, padding_B=torch.tensor([4]))[:, 4:]
        assert_close(found_BTV, model(ids_BT[:, :9]), atol=1e-5, rtol=0)


@each
def test_it_is_counted_as_built(scheme: HyperConnections) -> None:
    config = with_scheme(scheme)
    with torch.device("meta"):
        model, ids_BT = GPT(config), torch.zeros(2, LENGTH, dtype=torch.long)
    assert count(config).total == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter:
        model(ids_BT)
    assert count(config).forward_flops_per_token * ids_BT.numel() == counter.get_total_flops()


def test_what_is_added_is_as_stated() -> None:
    """Four streams at width 20: the parameters of one attention and one feed-forward, worked out by hand."""
    at_start = count(BASE).total
    added = {
        (s.mode, s.pathways): (count(with_scheme(s)).total - at_start) // BASE.n_layers
        for mode in ("static", "dynamic", "manifold")
        for s in (HyperConnections(4, mode), HyperConnections(4, mode, True))  # type: ignore[arg-type]
    }
    assert added == {
        ("static", False): 2 * (4 + 4 + 16),
        ("static", True): 2 * (4 + 4 + 16) + 8,
        ("dynamic", False): 2 * (24 + 6 * 20 + 2),
        ("dynamic", True): 2 * (24 + 6 * 20 + 2) + 8 + 2 * 20,
        ("manifold", False): 2 * (24 + 24 * 80 + 3),
        ("manifold", True): 2 * (24 + 24 * 80 + 3) + 8 + 8 * 80,
    }


@each
def test_training_reaches_every_weight_and_lowers_the_loss(scheme: HyperConnections) -> None:
    """The scales and, where all streams are equal at first, the mix are reached from the second step on."""
    model, ids_BT = GPT(with_scheme(scheme), seed=1), tokens()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model.loss(ids_BT[:, :-1], ids_BT[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert idle == []
    assert not any(torch.equal(p, start[name]) for name, p in model.named_parameters())


def test_the_pathways_read_different_mixes_once_trained() -> None:
    config, ids_BT = with_scheme(HyperConnections(4, "static", True)), tokens()
    model = GPT(config, seed=1)
    x_q, x_k, x_v = model.blocks[1].attention_residual.read(torch.randn(1, 3, 4, WIDTH), nn.Identity())
    assert torch.equal(x_q, x_k)
    assert torch.equal(x_q, x_v)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model.loss(ids_BT, ids_BT).backward()
        optimizer.step()
    x_q, x_k, x_v = model.blocks[1].attention_residual.read(torch.randn(1, 3, 4, WIDTH), nn.Identity())
    for one, other in ((x_q, x_k), (x_k, x_v), (x_q, x_v)):
        assert not torch.allclose(one, other)


def test_each_pathway_goes_where_it_belongs() -> None:
    """With one stream's weight at zero in one pathway alone, only that projection's input changes."""
    model = GPT(with_scheme(HyperConnections(4, "static", True)), seed=1)
    block, seen = model.blocks[1], {}
    for name in ("query", "key", "value"):
        block.attention.get_submodule(name).register_forward_hook(
            lambda module, given, out, name=name: seen.__setitem__(name, given[0])
        )
    with torch.no_grad():
        block.attention_residual.read_weights.copy_(torch.eye(4)[1:].flatten())
        stream_BTND = torch.randn(1, LENGTH, 4, WIDTH)
        block(stream_BTND, model.view(tokens(1)))
        for number, name in enumerate(("query", "key", "value")):
            assert_close(seen[name], block.attention_norm(stream_BTND[:, :, number + 1]))


@pytest.mark.parametrize("mode", ["static", "dynamic", "manifold"])
def test_only_the_matrices_of_the_dynamic_part_decay(mode: Any) -> None:
    model = GPT(with_scheme(HyperConnections(4, mode)))
    names = {id(p): name.rpartition(".")[2] for name, p in model.named_parameters() if "_residual." in name}
    decayed, plain = (
        {names[id(p)] for p in g["params"] if id(p) in names}
        for g in build_optimizer(model, TrainConfig()).param_groups
    )
    assert decayed == (set() if mode == "static" else {"read_matrix", "write_matrix"})
    assert plain == {"read_weights", "write_weights", "mix_weights"} | (set() if mode == "static" else {"scales"})


@each
def test_half_precision_leaves_the_streams_alone(scheme: HyperConnections) -> None:
    model, ids_BT = shaken(GPT(with_scheme(scheme), seed=1)), tokens()
    block, norm = model.blocks[1], model.blocks[1].attention_norm
    stream_BTND = torch.randn(2, LENGTH, scheme.streams, WIDTH)
    y_BTD = torch.randn(2, LENGTH, WIDTH)
    expected = block.attention_residual.write(stream_BTND, y_BTD, norm)
    with torch.autocast("cpu", torch.bfloat16):
        found = block.attention_residual.write(stream_BTND, y_BTD, norm)
        hidden_BTD, _ = model.hidden(ids_BT)
        loss = model.loss(ids_BT, ids_BT)
    assert torch.equal(found, expected)
    assert hidden_BTD.dtype == torch.float32
    loss.backward()
    assert_close(loss, model.loss(ids_BT, ids_BT), atol=0.05, rtol=0)
    halved = model.to(torch.bfloat16)
    assert halved(ids_BT).dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", SCHEMES[1::2], ids=lambda s: s.mode)
def test_it_compiles_whole(scheme: HyperConnections) -> None:
    torch._dynamo.reset()
    model, ids_BT = shaken(GPT(with_scheme(scheme, n_layers=1), seed=1)), tokens()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(ids_BT), model(ids_BT))


@each
def test_its_configuration_comes_back_from_json(scheme: HyperConnections) -> None:
    config = with_scheme(scheme)
    again = from_dict(ModelConfig, json.loads(json.dumps(to_dict(config))))
    assert again == config
    model, other = shaken(GPT(config, seed=1)), GPT(again, seed=2)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(tokens()), other(tokens()))


@pytest.mark.parametrize(
    "changes",
    [
        {"query": Bottleneck(), "key": Bottleneck(), "norm": "rmsnorm", "bias": True},
        {"mlp": Gated(), "query": MLPReuse(sliced=True)},
        {
            "mlp": MixtureOfExperts(3, 2),
            "n_heads": 4,
            "n_kv_heads": 2,
            "d_head": 6,
            "positions": Rope(),
            "qk_norm": True,
        },
        {"subspaces": Subspaces(q=3, kv=2), "dropout": 0.1},
        {"share_blocks": True, "tie_embeddings": False},
    ],
    ids=["nonlinear", "reuse", "experts", "subspaces", "shared"],
)
@pytest.mark.parametrize("scheme", [HyperConnections(3, "dynamic", True), HyperConnections(2, "manifold", True)])
def test_it_goes_with_other_parts(scheme: HyperConnections, changes: dict[str, Any]) -> None:
    config, ids_BT = with_scheme(scheme, **changes), tokens()
    model, cache = shaken(GPT(config, seed=1)), Cache(config, 2)
    assert count(config).total == sum(p.numel() for p in model.parameters())
    model.loss(ids_BT, ids_BT).backward()
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        model.eval()
        parts = [model(part, cache) for part in (ids_BT[:, :5], *ids_BT[:, 5:].split(1, dim=1))]
        assert_close(torch.cat(parts, dim=1), model(ids_BT), atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_one_stream_is_refused() -> None:
    with pytest.raises(BadInput, match=r"streams = 1.* at least 2; .* use model.residual = skip"):
        HyperConnections(1)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(BadInput, match=r"mode = 'dynamik' .*'dynamic'"):
        HyperConnections(4, "dynamik")  # type: ignore[arg-type]


def test_pathways_need_queries_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MixerConfig, "registry", dict(MixerConfig.registry))

    @MixerConfig.register("keyless")
    @dataclasses.dataclass(frozen=True)
    class Keyless(Softmax):
        projections = ("value", "output")

    config = with_scheme(HyperConnections(4), mixer=Keyless())
    assert config.residual.pathways is False  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match=r"mixer = keyless has no query and no key .* leave pathways false"):
        with_scheme(HyperConnections(4, pathways=True), mixer=Keyless())
