"""The GPT against plain mathematics; causality, cached decoding, loss, and reading it from a run's folder."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close

import qurve
from leaves import places
from qurve.config import content_hash, to_json
from qurve.errors import BadInput
from qurve.files import write_manifest
from qurve.model.cache import Cache
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.projections import Bottleneck, Identity, ProjectionConfig, Residual
from qurve.runfolder import RunFolder
from qurve.train.checkpoint import save_checkpoint
from qurve.train.config import RunConfig
from qurve.train.distributed import ALONE
from qurve.train.optim import build_optimizer

TINY = ModelConfig(n_layers=2, d_model=12, n_heads=3, d_ff=20, context=11, vocab_size=17)
KINDS: dict[str, ProjectionConfig] = {kind: cls() for kind, cls in ProjectionConfig.registry.items()}
every_kind = pytest.mark.parametrize("projection", KINDS.values(), ids=KINDS)


def tiny(**changes: Any) -> GPT:
    """A float64 model in evaluation mode, every parameter moved so that each one matters."""
    model = GPT(dataclasses.replace(TINY, **changes)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def tokens(batch: int = 2, length: int = 11) -> Tensor:
    return torch.randint(TINY.vocab_size, (batch, length))


# ----------------------------------------------------------------------------------------------------- what it computes


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    y = norm.weight * centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + TINY.norm_eps)
    return y if norm.bias is None else y + norm.bias


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def matrix(module: nn.Module, x: Tensor) -> Tensor:
    y = x @ module.get_parameter("weight").T
    return y + module.get_parameter("bias") if "bias" in dict(module.named_parameters()) else y


def written_out(model: GPT, ids: Tensor, scale: float) -> Tensor:
    """The model once more for one sequence, head by head and token by token."""
    x = model.token_embedding.weight[ids] + model.position_embedding.weight[: len(ids)]
    for block in model.blocks:
        a, h = block.attention, layer_norm(x, block.attention_norm)
        q, k, v = (p(h) for p in (a.query, a.key, a.value))
        rows = []
        for t in range(len(ids)):
            heads = []
            for channels in torch.arange(TINY.d_model).chunk(TINY.n_heads):
                logits = scale * (k[: t + 1, channels] @ q[t, channels])
                weights = torch.exp(logits - logits.max())
                heads.append((weights / weights.sum()) @ v[: t + 1, channels])
            rows.append(torch.cat(heads))
        x = x + matrix(a.output, torch.stack(rows))
        x = x + matrix(block.mlp.down, gelu(matrix(block.mlp.up, layer_norm(x, block.mlp_norm))))
    head = model.token_embedding.weight if model.head is None else model.head.weight
    return layer_norm(x, model.final_norm) @ head.T


@pytest.mark.parametrize("scale", [None, 0.0625])
@pytest.mark.parametrize(
    "changes",
    [{}, {"query": Bottleneck()}, {"bias": True}, {"tie_embeddings": False, "query": Identity()}],
    ids=["baseline", "paper", "bias", "untied"],
)
def test_is_its_mathematics(changes: dict[str, Any], scale: float | None) -> None:
    model, ids_BT = tiny(attention_scale=scale, **changes), tokens()
    expected = torch.stack([written_out(model, ids, 1 / math.sqrt(4) if scale is None else scale) for ids in ids_BT])
    assert_close(model(ids_BT), expected, rtol=1e-10, atol=1e-11)


def test_loss_is_the_cross_entropy_of_the_logits() -> None:
    model, ids_BT, targets_BT = tiny(query=Bottleneck()), tokens(), tokens()
    logits_BTV = model(ids_BT)
    chosen_BT = logits_BTV.gather(-1, targets_BT[..., None])[..., 0]
    expected = (torch.log(torch.exp(logits_BTV).sum(-1)) - chosen_BT).mean()
    assert_close(model.loss(ids_BT, targets_BT).double(), expected, rtol=1e-6, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.float().loss(ids_BT, targets_BT).dtype == torch.float32
    half = model.bfloat16()
    expected = torch.nn.functional.cross_entropy(half(ids_BT).flatten(0, 1).double(), targets_BT.flatten())
    assert_close(half.loss(ids_BT, targets_BT), expected.float())


def test_untrained_model_guesses_evenly() -> None:
    model = GPT(dataclasses.replace(TINY, query=Bottleneck()))
    assert model.loss(tokens(), tokens()).item() == pytest.approx(math.log(TINY.vocab_size), rel=0.01)


def test_tied_head_is_the_embedding() -> None:
    tied, untied = GPT(TINY), GPT(dataclasses.replace(TINY, tie_embeddings=False))
    assert tied.head_weight is tied.token_embedding.weight
    assert untied.head_weight is not untied.token_embedding.weight
    assert set(dict(untied.named_parameters())) - set(dict(tied.named_parameters())) == {"head.weight"}
    assert not torch.equal(untied.head_weight, untied.token_embedding.weight)


def test_dropout_acts_in_training_alone() -> None:
    model, ids_BT = GPT(dataclasses.replace(TINY, dropout=0.5)), tokens()
    assert not torch.equal(model(ids_BT), model(ids_BT))
    model.eval()
    assert torch.equal(model(ids_BT), GPT(TINY).eval()(ids_BT))


@pytest.mark.parametrize("where", ["embedding", "attention weights", "attention", "mlp"])
def test_dropout_stands_in_its_four_places(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place drops on its own: with the others' rate set to nothing, the output still varies."""
    model, ids_BT = GPT(dataclasses.replace(TINY, dropout=0.5, n_layers=1)), tokens()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    block = model.blocks[0]
    kept = {"embedding": 1, "attention weights": 2, "attention": 3, "mlp": 4}
    seen = 0
    functional, attend = nn.functional.dropout, nn.functional.scaled_dot_product_attention

    def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
        nonlocal seen
        seen += 1
        assert rate == 0.5
        return functional(x, rate, training) if seen == {1: 1, 3: 2, 4: 3}.get(kept[where]) else x

    def attention(*args: Any, dropout_p: float, **kwargs: Any) -> Tensor:
        assert dropout_p == 0.5
        return attend(*args, dropout_p=dropout_p if where == "attention weights" else 0.0, **kwargs)

    monkeypatch.setattr(nn.functional, "dropout", dropout)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention)
    outputs = []
    for _ in range(2):
        seen = 0
        outputs.append(model(ids_BT))
        assert seen == 3
    assert block.training
    assert not torch.equal(*outputs)


# -------------------------------------------------------------------------------------------------- causality and cache


@every_kind
def test_the_future_does_not_reach_back(projection: ProjectionConfig) -> None:
    model, ids_BT = tiny(**dict.fromkeys(places(projection), projection)), tokens()
    logits_BTV = model(ids_BT)
    for t in range(1, 11):
        changed_BT = ids_BT.clone()
        changed_BT[:, t:] = (ids_BT[:, t:] + 1 + torch.randint(15, (2, 11 - t))) % TINY.vocab_size
        assert torch.equal(model(changed_BT)[:, :t], logits_BTV[:, :t])
        assert not torch.isclose(model(changed_BT)[:, t], logits_BTV[:, t]).all()


@every_kind
def test_gradients_stop_at_the_present(projection: ProjectionConfig) -> None:
    model = tiny(**{places(projection)[0]: projection})
    ids_BT = torch.arange(11)[None]  # each token once: its embedding's row is its place
    model(ids_BT)[:, 5].square().sum().backward()
    gradients = model.token_embedding.weight.grad, model.position_embedding.weight.grad
    assert gradients[1] is not None
    assert torch.equal(gradients[1][6:], torch.zeros(5, 12, dtype=torch.float64))
    assert (gradients[1][:6].abs().sum(-1) > 0).all()


@every_kind
@pytest.mark.parametrize("chunks", [(1,) * 11, (4, 3, 3, 1), (11,), (5, 1, 5)], ids=str)
def test_cached_decoding_is_the_full_forward(projection: ProjectionConfig, chunks: tuple[int, ...]) -> None:
    for some in (places(projection)[:1], places(projection)[1:2], places(projection)):
        model, ids_BT = tiny(**dict.fromkeys(some, projection)).float(), tokens()
        cache = Cache(model.config, batch=2)
        with torch.no_grad():
            expected = model(ids_BT)
            steps = [model(chunk_BT, cache) for chunk_BT in ids_BT.split(chunks, dim=1)]
        assert_close(torch.cat(steps, dim=1), expected, rtol=1e-5, atol=1e-5)
        assert cache.filled == 11


def test_cache_reads_nothing_that_it_did_not_write() -> None:
    model, ids_BT = tiny().float(), tokens()
    cache = Cache(model.config, batch=2)
    for state in cache.states:
        assert state.keys.shape == state.values.shape == (2, 3, 11, 4)
        state.keys.fill_(math.nan)
        state.values.fill_(math.nan)
    with torch.no_grad():
        for chunk_BT in ids_BT[:, :6].split((3, 1, 2), dim=1):
            assert model(chunk_BT, cache).isfinite().all()


@pytest.mark.parametrize("length", [6, 160], ids=["short", "long"])
@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_autocast_with_an_identity_anywhere(place: str, length: int) -> None:
    """`W = I` leaves its input's float32 beside the products' bf16; attention takes both, cached or not."""
    config = dataclasses.replace(TINY, context=160, **{place: Identity()})
    model, ids_BT = GPT(config).eval(), tokens(1, length)
    with torch.no_grad():
        expected = model(ids_BT)
        with torch.autocast("cpu", torch.bfloat16):
            found = model(ids_BT)
            cached = model(ids_BT, Cache(config, 1))
    for logits_BTV in (found, cached):
        assert logits_BTV.dtype == torch.bfloat16
        assert (logits_BTV - expected).norm() < 0.03 * expected.norm()


def test_too_long_a_sequence_is_refused() -> None:
    model = tiny()
    with pytest.raises(ValueError, match="12 tokens do not fit the model's context of 11"):
        model(tokens(length=12))
    cache = Cache(TINY, batch=2, dtype=torch.float64)
    model(tokens(length=8), cache)
    with pytest.raises(ValueError, match="12 tokens do not fit"):
        model(tokens(length=4), cache)
    assert cache.filled == 8


def test_compiles_without_a_graph_break() -> None:
    torch._dynamo.reset()
    model, ids_BT = tiny(query=Bottleneck()), tokens()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(ids_BT), model(ids_BT))
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(compiled(ids_BT), model(ids_BT))


# -------------------------------------------------------------------------------------------------- from a run's folder


@pytest.fixture
def trained(tmp_path: Path) -> tuple[GPT, RunFolder]:
    """A run's folder with two checkpoints; the later one is the model returned."""
    config = RunConfig(dataclasses.replace(TINY, query=Bottleneck(width=5), key=Residual(), dropout=0.1))
    run = RunFolder(tmp_path / "run")
    run.create(to_json(config), content_hash(config), {})
    for step, seed in ((9, 3), (10, 4)):
        model = GPT(config.model, seed=seed)
        save_checkpoint(run, step, model, build_optimizer(model, config.train), {}, ALONE)
    return model, run


def test_from_run_reads_the_newest_checkpoint(trained: tuple[GPT, RunFolder]) -> None:
    model, run = trained
    for folder in (run.path, str(run.path)):
        loaded = qurve.GPT.from_run(folder)
        assert loaded.config == model.config
        assert not loaded.training
        ids_BT = tokens()
        assert torch.equal(loaded(ids_BT), model.eval()(ids_BT))


def test_from_run_reads_the_checkpoint_of_a_step(trained: tuple[GPT, RunFolder]) -> None:
    model, run = trained
    earlier, ids_BT = GPT(model.config, seed=3).eval(), tokens()
    assert torch.equal(GPT.from_run(run.path, 9)(ids_BT), earlier(ids_BT))
    assert torch.equal(GPT.from_run(run.path, 10)(ids_BT), model.eval()(ids_BT))
    with pytest.raises(BadInput, match="has no checkpoint of step 8; there are: 9, 10"):
        GPT.from_run(run.path, 8)


def test_what_is_no_run_is_named(trained: tuple[GPT, RunFolder], tmp_path: Path) -> None:
    _, run = trained
    with pytest.raises(BadInput, match=r"nowhere is not a run folder: it has no config\.json"):
        GPT.from_run(tmp_path / "nowhere")
    file = run.checkpoint(10) / "model.safetensors"
    whole = file.read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:4], b""):
        file.write_bytes(broken)
        with pytest.raises(BadInput, match=r"step-00000010/model\.safetensors is damaged: it has \d+ bytes, not \d+"):
            GPT.from_run(run.path)
    file.unlink()
    with pytest.raises(BadInput, match=r"model\.safetensors is missing"):
        GPT.from_run(run.path)
    for checkpoint in run.checkpoints.iterdir():
        checkpoint.rename(run.path / checkpoint.name)
    with pytest.raises(BadInput, match=r"holds no checkpoint \(looked for .*checkpoints/step-\*\)"):
        GPT.from_run(run.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update({"blocks.0.attention.query.w1": torch.ones(5, 11)}), "size mismatch"),
        (lambda state: state.pop("final_norm.weight"), "Missing key.*final_norm"),
        (lambda state: state.update(extra=torch.ones(1)), "Unexpected key.*extra"),
    ],
    ids=["shape", "missing", "unexpected"],
)
def test_weights_of_another_model_are_refused(change: Any, message: str, trained: tuple[GPT, RunFolder]) -> None:
    file = trained[1].checkpoint(10) / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)
    (file.parent / "manifest.json").unlink()
    write_manifest(file.parent)
    with pytest.raises(BadInput, match=rf"(?s)model\.safetensors does not hold this run's model.*{message}"):
        GPT.from_run(trained[1].path)


def test_a_flipped_bit_is_refused(trained: tuple[GPT, RunFolder]) -> None:
    file = trained[1].checkpoint(10) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(BadInput, match=r"step-00000010/model\.safetensors is damaged: its sha256 is"):
        GPT.from_run(trained[1].path)


@pytest.mark.parametrize("size", ["n_layers", "d_ff", "context", "vocab_size"])
def test_sizes_that_the_file_does_not_bear_out_take_no_memory(size: str, trained: tuple[GPT, RunFolder]) -> None:
    run = trained[1]
    tree = json.loads(run.config_file.read_text())
    tree["model"][size] = 10**9
    run.config_file.write_text(json.dumps(tree))
    with pytest.raises(BadInput, match=r"(?s)does not hold this run's model: .*1000000000"):
        GPT.from_run(run.path)


def test_a_spoilt_configuration_is_refused(trained: tuple[GPT, RunFolder]) -> None:
    _, run = trained
    tree = json.loads(run.config_file.read_text())
    for spoil, message in (
        (lambda t: t["model"].update(n_layer=3), r"unknown field 'model\.n_layer'; did you mean 'n_layers'"),
        (lambda t: t["model"]["query"].update(width=0), "width = 0"),
        (lambda t: t.pop("model"), "model must be an object"),
    ):
        spoilt = json.loads(json.dumps(tree))
        spoil(spoilt)
        run.config_file.write_text(json.dumps(spoilt))
        with pytest.raises(BadInput, match=message):
            GPT.from_run(run.path)
