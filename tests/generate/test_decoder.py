"""The decoder against the model's own forward pass, for everything that a model can be made of."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from combinations import Row, config_of, covering_array, words
from qurve.generate import decoder as decoding
from qurve.generate.decoder import Decoder, is_as_built, pieces
from qurve.model.config import LayerOverride, ModelConfig
from qurve.model.feed_forward import Dense, Gated
from qurve.model.gpt import GPT
from qurve.model.positions import Rope
from qurve.projections import Bottleneck, Linear, MLPReuse
from qurve.projections.module import Projection
from qurve.projections.prepared import matrix
from qurve.zoo.linear_attention import LinearAttention

ROWS = [row for row in covering_array()[0] if config_of(row).attends != "bidirectional"]
every_row = pytest.mark.parametrize("row", ROWS, ids=[f"{i}-{words(row)}" for i, row in enumerate(ROWS)])
SMALL: dict[str, Any] = {"n_layers": 3, "d_model": 24, "n_heads": 2, "d_ff": 40, "context": 48, "vocab_size": 31}


def moved(config: ModelConfig) -> GPT:
    """A model whose every parameter matters."""
    model, generator = GPT(config, seed=1).eval(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            spread = p.std(correction=0) if p.dim() > 1 else 0.0
            p.add_((0.3 * spread or 0.1) * torch.randn(p.shape, generator=generator))
    return model


def tokens(config: ModelConfig, batch: int, length: int) -> Tensor:
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(3))


def read(decoder: Decoder, ids_BT: Tensor, *chunks: int) -> Tensor:
    """What the decoder says at the end of each chunk `[B, chunks, V]`."""
    return torch.stack([decoder.read(part) for part in ids_BT.split(chunks, dim=1)], dim=1)


@torch.no_grad()
def whole(model: GPT, ids_BT: Tensor, prefix: int, **padding: Tensor) -> Tensor:
    """The model's own logits of every token; a model that attends to a prefix has `prefix` tokens of it."""
    limits = {"prefix_B": torch.full((len(ids_BT),), prefix)} if model.config.attends == "prefix" else {}
    return model(ids_BT, **limits, **padding).float()


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Within 1e-5, of the largest logit where that is above one."""
    assert_close(found, expected, atol=1e-5 * max(1.0, expected.abs().max().item()), rtol=0)


@every_row
def test_it_says_what_the_whole_forward_says(row: Row) -> None:
    """A prompt in chunks, single tokens, and room that has to grow again and again; the batch is padded."""
    model = moved(config_of(row))
    ids_BT, padding_B = tokens(model.config, 2, 40), torch.tensor([0, 7])
    before = {name: p.clone() for name, p in model.state_dict().items()}
    decoder = Decoder(model, 2, padding_B, room=3)
    chunks = (17, 1, 12, 1, 1, 8)
    found_BCV = read(decoder, ids_BT, *chunks)
    ends = torch.tensor(chunks).cumsum(0) - 1
    assert_same(found_BCV, whole(model, ids_BT, 17, padding_B=padding_B)[:, ends])
    assert decoder.filled == 40
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


@pytest.mark.filterwarnings("default:Mismatch dtype:UserWarning")  # torch's, where norms stand after narrow sums
@every_row
def test_half_precision_errs_no_more_than_the_models_own(row: Row) -> None:
    model = moved(config_of(row))
    ids_BT = tokens(model.config, 2, 24)
    exact = whole(copy.deepcopy(model).double(), ids_BT, 22)[:, 21:]
    with torch.autocast("cpu", torch.bfloat16):
        own = whole(model, ids_BT, 22)[:, 21:]
    found = read(Decoder(model, 2, None, 24, torch.bfloat16), ids_BT, 22, 1, 1)
    assert (found - exact).norm() <= 2 * (own - exact).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("query", [Linear(), Bottleneck()], ids=["linear", "paper"])
def test_the_usual_models_are_prepared(query: Any, batch: int, dtype: torch.dtype) -> None:
    """No fold, cast or stacking of a weight is left for the single token."""
    model = moved(ModelConfig(**SMALL, query=query))
    decoder = Decoder(model, batch, None, 8, dtype)
    ids_BT = tokens(model.config, batch, 8)
    decoder.read(ids_BT)
    with torch.profiler.profile(record_shapes=True) as profile:
        decoder.read(ids_BT[:, :1])
    small = 3 * SMALL["d_model"] * batch  # the largest activation that may be cast or joined
    for event in profile.events():
        if event.name in ("aten::cat", "aten::_to_copy", "aten::clone"):
            sizes = [torch.Size(shape).numel() for shape in event.input_shapes if shape]
            assert all(size <= max(small, SMALL["d_ff"] * batch, 9 * 24 * batch) for size in sizes), event.name
    assert decoder.model is not model


def test_what_needs_no_change_is_shared() -> None:
    model = moved(ModelConfig(**SMALL))
    ready = Decoder(model, 1, None, 8).model
    for name in ("token_embedding.weight", "blocks.0.mlp.up.weight", "blocks.2.attention.output.weight"):
        assert ready.get_parameter(name).data_ptr() == model.get_parameter(name).data_ptr()
    assert ready.head_weight.data_ptr() == model.head_weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize(("batch", "compiles"), [(1, False), (1, True), (3, False)], ids=["1", "compiled", "3"])
def test_all_matrices_are_packed_or_none(
    batch: int, dtype: torch.dtype, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_compiled", lambda part, kind: part)
    model = GPT(ModelConfig(**SMALL, query=Bottleneck(), tie_embeddings=False)).eval()
    ready = Decoder(model, batch, None, 8, dtype, compile=compiles).model
    attentions = [block.attention for block in ready.blocks]
    matrices = [ready.head_weight, *(attention.query.stacked for attention in attentions)]
    matrices += [weight for attention in attentions for weight in (attention.query.w2, attention.output.weight)]
    matrices += [part.weight for block in ready.blocks for part in (block.mlp.up, block.mlp.down)]
    packed = matrix(torch.ones(2, 2), dtype, pack=True).is_mkldnn  # as far as this processor likes such a dtype
    wanted = packed and not compiles and (batch, dtype) != (1, torch.float32)
    assert [(weight.is_mkldnn, weight.dtype) for weight in matrices] == [(wanted, dtype)] * len(matrices)


def test_each_matrix_is_held_once_in_the_decoders_dtype() -> None:
    model = GPT(ModelConfig(**SMALL)).eval()
    ready = Decoder(model, 3, None, 8, torch.bfloat16).model
    held = [*ready.parameters(), *(part.stacked for part in ready.modules() if isinstance(part, Projection))]
    narrow = [weight for weight in held if weight is not None and weight.dtype == torch.bfloat16]
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    assert sum(weight.numel() for weight in narrow) == sum(p.numel() for p in [*matrices, model.head_weight])


class Louder(nn.Module):
    """A wrapper, as an adapter is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x_BTD: Tensor, *other: Tensor) -> Tensor:
        return 200 * self.inner(x_BTD, *other)


def wrap(model: GPT) -> None:
    model.blocks[1].attention.query = Louder(model.blocks[1].attention.query)


def hook(model: GPT) -> None:
    model.blocks[0].mlp.up.register_forward_hook(lambda module, inputs, output: output.flip(-1))


def hook_a_norm(model: GPT) -> None:
    model.blocks[2].mlp_norm.register_forward_pre_hook(lambda module, inputs: (inputs[0].flip(-1),))


def patch(model: GPT) -> None:
    attention = model.blocks[0].attention
    attention.forward = lambda *inputs: 20 * type(attention).forward(attention, *inputs)


def parametrise(model: GPT) -> None:
    class Negative(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return -weight

    nn.utils.parametrize.register_parametrization(model.blocks[1].attention.output, "weight", Negative())


def replace_a_module(model: GPT) -> None:
    class Shifted(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.3

    model.final_norm = Shifted(SMALL["d_model"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("change", [wrap, hook, hook_a_norm, patch, parametrise, replace_a_module])
def test_what_somebody_has_changed_acts(change: Any, dtype: torch.dtype) -> None:
    model = moved(ModelConfig(**SMALL, query=Bottleneck()))
    ids_BT = tokens(model.config, 1, 20)
    as_built = whole(model, ids_BT, 0)
    change(model)
    assert not is_as_built(model)
    expected = whole(model, ids_BT, 0)
    assert (expected - as_built).abs().max() > 0.03
    found = read(Decoder(model, 1, None, 20, dtype), ids_BT, 18, 1, 1)
    if dtype == torch.float32:
        assert_same(found, expected[:, 17:])
    else:
        assert (found - expected[:, 17:]).abs().max() < 0.3 * (expected - as_built).abs().max()


@pytest.mark.parametrize("change", [lambda m: m.double(), lambda m: m.bfloat16()], ids=["float64", "bf16"])
def test_a_model_of_another_dtype_keeps_it(change: Any) -> None:
    model = change(moved(ModelConfig(**SMALL, query=Bottleneck())))
    ids_BT = tokens(model.config, 2, 12)
    decoder = Decoder(model, 2, None, 12)
    assert decoder.dtype == model.head_weight.dtype
    tolerance = 1e-5 if decoder.dtype == torch.float64 else 0.1
    assert_close(read(decoder, ids_BT, 10, 1, 1), whole(model, ids_BT, 0)[:, 9:], atol=tolerance, rtol=0)


def test_it_refuses_what_cannot_be() -> None:
    config = ModelConfig(**SMALL)
    model = GPT(config).eval()
    decoder = Decoder(model, 2, None, 4)
    with pytest.raises(ValueError, match=r"it needs \[2, 1 or more\]"):
        decoder.read(torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"it needs \[2, 1 or more\]"):
        decoder.read(torch.zeros(2, 0, dtype=torch.long))
    decoder.read(torch.zeros(2, 48, dtype=torch.long))
    with pytest.raises(ValueError, match="context of 48"):
        decoder.read(torch.zeros(2, 1, dtype=torch.long))
    assert decoder.filled == 48
    with pytest.raises(ValueError, match="at least 1 token"):
        Decoder(model, 2, None, 0)
    with pytest.raises(ValueError, match=r"model\.eval"):
        Decoder(GPT(ModelConfig(**SMALL, dropout=0.1)), 2, None, 4)
    with pytest.raises(ValueError, match=r"one sequence at a time, not for 2"):
        Decoder(model, 2, None, 4, compile=True)
    with pytest.raises(ValueError, match=r"compile: .*softmax attention"):
        Decoder(GPT(ModelConfig(**SMALL, mixer=LinearAttention())).eval(), 1, None, 4, compile=True)
    wrap(model)
    with pytest.raises(ValueError, match=r"compile: .*as it was built"):
        Decoder(model, 1, None, 4, compile=True)
    with pytest.raises(ValueError, match="cannot be decoded"):
        Decoder(GPT(ModelConfig(**SMALL, attends="bidirectional")), 2, None, 4)


# ------------------------------------------------------------------------------------------------------------- compiled

SPLIT: dict[str, dict[str, Any]] = {
    "linear": {},
    "paper": {"query": Bottleneck()},
    "mixed": {
        "query": MLPReuse(),
        "positions": Rope(),
        "mlp": Gated(),
        "n_kv_heads": 1,
        "qk_norm": True,
        "norm": "rmsnorm",
        "bias": True,
        "attention_softcap": 5.0,
        "logit_softcap": 5.0,
        "tie_embeddings": False,
        "overrides": (LayerOverride((1,), key=Bottleneck("linear"), mlp=Dense("relu2"), window=5),),
    },
    "shared": {"share_blocks": True, "mlp": Dense("relu")},
}


@pytest.mark.parametrize("name", SPLIT)
def test_pieces_between_mixings_are_the_forward_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled here: the pieces alone."""
    monkeypatch.setattr(decoding, "_compiled", lambda part, kind: part)
    model = moved(ModelConfig(**SMALL, **SPLIT[name]))
    ids_BT = tokens(model.config, 1, 20)
    decoder = Decoder(model, 1, None, 4, compile=True)
    assert decoder.compiles
    assert_same(read(decoder, ids_BT, *[1] * 10, 5, *[1] * 5)[:, -5:], whole(model, ids_BT, 0)[:, -5:])


def test_pieces_share_code_where_blocks_are_alike_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_compiled", lambda part, kind: (part.__name__, kind))
    models = {name: GPT(ModelConfig(**SMALL, **changes)) for name, changes in SPLIT.items()}
    kinds = {name: pieces(model, 1, torch.float32) for name, model in models.items()}
    assert {name: len(set(found)) for name, found in kinds.items()} == {
        "linear": 3,
        "paper": 3,
        "mixed": 4,
        "shared": 3,
    }
    others = [GPT(ModelConfig(**SMALL, mlp=Dense("relu"))), GPT(ModelConfig(**{**SMALL, "d_ff": 41}))]
    others += [GPT(ModelConfig(**SMALL)).bfloat16(), GPT(ModelConfig(**SMALL)).to("meta"), GPT(ModelConfig(**SMALL))]
    others[-1].final_norm = nn.LayerNorm(SMALL["d_model"], eps=0.1)
    others.append(GPT(ModelConfig(**SMALL)))
    for block in others[-1].blocks:  # compiled code holds strides
        block.attention_norm.weight = nn.Parameter(torch.ones(2 * SMALL["d_model"])[::2])
    found = [*kinds.values(), *(pieces(model, 1, torch.float32) for model in others)]
    found += [pieces(models["linear"], 2, torch.float32), pieces(models["linear"], 1, torch.bfloat16)]
    with monkeypatch.context() as threads:
        threads.setattr(torch, "get_num_threads", lambda: 97)
        found.append(pieces(models["linear"], 1, torch.float32))
    assert all(len(set(ways)) == len(found) for ways in zip(*((one[0], one[1], one[-1]) for one in found), strict=True))
    assert kinds["linear"] == pieces(GPT(ModelConfig(**SMALL), seed=7), 1, torch.float32)


def test_with_another_number_of_sequences_the_pieces_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_compiled", lambda part, kind: (part.__name__, kind))
    monkeypatch.setattr(Decoder, "_one", lambda decoder, ids_B1: None)
    model = GPT(ModelConfig(**SMALL)).eval()
    for compiles in (True, False):
        decoder = Decoder(model, 1, None, 4, compile=compiles)
        for rows in ([0], [0, 0], [1, 0, 1]):
            decoder.select(torch.tensor(rows))
            assert decoder.pieces == (pieces(decoder.model, len(rows), torch.float32) if compiles else [])


@pytest.mark.slow
@pytest.mark.filterwarnings("default::DeprecationWarning")  # torch's own, as its compiler is imported
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", ["linear", "paper", "mixed"])
def test_compiled_is_eager(name: str, dtype: torch.dtype) -> None:
    model = moved(ModelConfig(**SMALL, **SPLIT[name]))
    ids_BT = tokens(model.config, 1, 20)
    found, expected = (read(Decoder(model, 1, None, 4, dtype, compile=c), ids_BT, 9, *[1] * 11) for c in (True, False))
    if dtype == torch.float32:
        assert_same(found, expected)
    else:
        exact = whole(model, ids_BT, 0)[:, 8:]
        assert (found - exact).norm() <= 2 * (expected - exact).norm()
