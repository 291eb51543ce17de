"""Runs as folders for others, and back: the same logits, the same greedy tokens, or a refusal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from commands import ROOT, call, words
from qurve.data.loader import TokenData
from qurve.data.tokenizers import END_OF_TEXT, Tokenizer, ready_made, train_bpe
from qurve.errors import BadInput, QurveError
from qurve.generate import Sampling, generate, run_tokenizer
from qurve.hf import export as export_module
from qurve.hf.export import export, hub_tokenizer, import_folder, load_weights
from qurve.hf.modeling import STUB_TEXT, QurveForCausalLM
from qurve.hf.stock import from_stock, to_stock
from qurve.model.config import LayerOverride, ModelConfig
from qurve.model.feed_forward import Dense, Gated
from qurve.model.gpt import GPT
from qurve.model.positions import Rope
from qurve.model.residual import Skip
from qurve.projections import Bottleneck, Identity, Linear, Residual
from qurve.runfolder import RunFolder
from qurve.zoo.linear_attention import LinearAttention
from tiny import tiny

TEXTS = ["The people of the U.S. aren't  here:\n\n 1,234 naïve 東京 🙂", "a <|endoftext|> in a text", "", " "]


@pytest.fixture(scope="session")
def run(data: TokenData, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A trained run with the paper's query, and room for 50 tokens. Tests only read it."""
    from qurve.train.loop import train

    settings = ("model.context=64", "model.query=bottleneck", "train.micro_batch=2")
    return train(tiny(*settings), tmp_path_factory.mktemp("exported") / "paper", data)


@pytest.fixture(scope="session")
def exported(run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "hf"
    export(run.path, folder, "hf")
    return folder


PROMPT = list(b"The people of")


def greedy(model: GPT, tokenizer: Tokenizer | None = None) -> list[int]:
    sampling = Sampling(temperature=0)
    (made,) = generate(model, [PROMPT], tokenizer=tokenizer, sampling=sampling, max_new_tokens=50, stop_ids=[])
    return list(made.ids)


def theirs_greedy(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    made: Tensor = model.generate(ids, do_sample=False, max_new_tokens=50, min_new_tokens=0, eos_token_id=-1)
    return made[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------------ our class


def test_a_run_is_the_same_model_there(run: RunFolder, exported: Path) -> None:
    native, tokenizer = GPT.from_run(run.path), run_tokenizer(run.path)
    theirs, ids_BT = AutoModelForCausalLM.from_pretrained(exported), torch.arange(60).view(2, 30)
    with torch.no_grad():
        found, expected = theirs(ids_BT).logits, native(ids_BT)
    assert found.shape[-1] == theirs.config.vocab_size == 257  # and the 63 rows that only pad are gone
    assert_close(found, expected[..., :257], atol=1e-5, rtol=0)
    assert theirs_greedy(theirs) == greedy(native, tokenizer)
    hub = AutoTokenizer.from_pretrained(exported)
    assert (len(hub), hub.eos_token_id, hub.pad_token_id, hub.padding_side) == (257, 256, 256, "left")
    assert hub.model_max_length == 64
    assert theirs.generation_config.eos_token_id == theirs.generation_config.pad_token_id == 256
    text = theirs.generate(**hub(["The people", "Of"], return_tensors="pt", padding=True), max_new_tokens=3)
    assert len(hub.batch_decode(text)) == 2


def test_its_card_tells_of_the_run_and_of_no_machine(run: RunFolder, exported: Path) -> None:
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors", "modeling_qurve.py"}
    assert {file.name for file in exported.iterdir()} == names | {"tokenizer.json", "tokenizer_config.json"}
    card = (exported / "README.md").read_text()
    assert f"{run.eval_lines('val')[-1]['loss']:.4f} nats a token" in card
    assert "bottleneck" in card
    for file in exported.glob("*[!s]"):
        if file.suffix != ".safetensors":
            assert str(run.path.parent) not in file.read_text()


def test_its_code_is_ours_and_says_so_where_it_is_missing(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (exported / "modeling_qurve.py").read_text() == STUB_TEXT
    monkeypatch.setitem(sys.modules, "qurve.hf", None)
    with pytest.raises(ImportError, match=r"a model of the package qurve.*pip install 'qurve\[hf\]'"):
        exec(compile(STUB_TEXT, "modeling_qurve.py", "exec"), {})


def test_a_masked_models_mask_goes_along(data: TokenData, tmp_path: Path) -> None:
    from qurve.train.loop import train

    made = train(tiny("model.attends=bidirectional", "train.objective=mlm", "train.steps=1"), tmp_path / "mlm", data)
    moved = export(made.path, tmp_path / "hf", "hf")
    assert moved.rows == 258
    hub, theirs = AutoTokenizer.from_pretrained(tmp_path / "hf"), AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert hub.mask_token_id == 257
    ids_BT = torch.tensor([[5, 257, 9]])
    with torch.no_grad():
        expected = GPT.from_run(made.path)(torch.tensor([[5, 319, 9]]))
        assert_close(theirs(ids_BT).logits[..., :257], expected[..., :257], atol=1e-5, rtol=0)
    import_folder(tmp_path / "hf", tmp_path / "back")
    stated = [
        RunFolder(place).config_json()[0]["train"]["objective"]["kind"] for place in (made.path, tmp_path / "back")
    ]
    assert stated == ["mlm", "mlm"]


# ----------------------------------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("spec", ["bytes", "gpt2", "bpe:300"])
def test_tokenizers_give_the_same_ids_there(spec: str, tmp_path: Path) -> None:
    tokenizer = train_bpe(300, ["the people of the people " * 9, *TEXTS]) if ":" in spec else ready_made(spec)
    hub_tokenizer(tokenizer, 64).save_pretrained(tmp_path)
    hub = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(hub), hub.eos_token_id) == (tokenizer.n_ids, tokenizer.eot)
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert hub(text)["input_ids"] == ids.tolist()
        assert hub.decode(ids.tolist()) == text


# ---------------------------------------------------------------------------------------------------------------- stock

GPT2: dict[str, Any] = {"n_layers": 2, "d_model": 24, "n_heads": 3, "d_ff": 40, "context": 32, "vocab_size": 31}
LLAMA: dict[str, Any] = {**GPT2, "n_kv_heads": 1, "norm": "rmsnorm", "mlp": Gated(), "positions": Rope(theta=5e5)}
SAME = {
    "gpt2": ModelConfig(**GPT2),
    "scaled-untied-bias": ModelConfig(**GPT2, attention_scale=0.9, tie_embeddings=False, bias=True),
    "identity": ModelConfig(**GPT2, query=Identity(), attention_scale=0.1),
    "residual-relu2": ModelConfig(**GPT2, query=Residual(), key=Residual(0.7), bias=True, mlp=Dense("relu2")),
    "shared": ModelConfig(**GPT2, share_blocks=True, norm_eps=0.1),
    "llama": ModelConfig(**{**LLAMA, "mlp": Gated("gelu")}, norm_eps=0.1),
    "llama-bias": ModelConfig(**LLAMA, bias=True, tie_embeddings=False, attention_scale=0.2),
    "llama-identity": ModelConfig(**LLAMA, query=Identity()),
    "llama-wide": ModelConfig(**{**LLAMA, "d_head": 10, "positions": Rope(scaling="linear", factor=4)}),
    "llama-interleaved": ModelConfig(
        **{**LLAMA, "bias": True, "positions": Rope("interleaved", scaling="llama3", original_context=16)}
    ),
}


def moved(config: ModelConfig) -> GPT:
    """A model whose every parameter matters."""
    model, generator = GPT(config, seed=1).eval(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            spread = p.std(correction=0) if p.dim() > 1 else 0.0
            p.add_((3.0 * spread or 0.1) * torch.randn(p.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", SAME)
def test_a_stock_class_computes_the_same_and_comes_back(name: str) -> None:
    model, ids_BT = moved(SAME[name]), torch.arange(30).view(2, 15)
    stock = to_stock(model)
    assert type(stock).__name__ == ("LlamaForCausalLM" if "llama" in name else "GPT2LMHeadModel")
    back = from_stock(stock)
    assert isinstance(back.config.query, Linear)
    with torch.no_grad():
        expected = model(ids_BT)
        allowed = {"atol": 1e-5 * max(1.0, expected.abs().max().item()), "rtol": 0}
        assert_close(stock(ids_BT).logits, expected, **allowed)
        assert_close(back(ids_BT), expected, **allowed)


def test_dropout_goes_along() -> None:
    stock = to_stock(GPT(ModelConfig(**GPT2, dropout=0.3)))
    assert {stock.config.attn_pdrop, stock.config.embd_pdrop, stock.config.resid_pdrop} == {0.3}
    assert from_stock(stock).config.dropout == 0.3


def test_what_their_configurations_can_say_is_understood_or_refused() -> None:
    sizes = {
        "n_layer": 2,
        "n_embd": 24,
        "n_head": 3,
        "n_positions": 32,
        "vocab_size": 31,
        "activation_function": "gelu",
    }
    ends = {"bos_token_id": None, "eos_token_id": None}
    theirs, ids_BT = (
        GPT2LMHeadModel(GPT2Config(**sizes, **ends, scale_attn_weights=False)),
        torch.arange(30).view(2, 15),
    )
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    with torch.no_grad():
        assert_close(from_stock(theirs)(ids_BT), theirs.eval()(ids_BT).logits, atol=1e-4, rtol=0)
    by_layer = GPT2LMHeadModel(GPT2Config(**sizes, **ends, scale_attn_by_inverse_layer_idx=True))
    with pytest.raises(BadInput, match="has scale_attn_by_inverse_layer_idx, which ours does not know"):
        from_stock(by_layer)
    turned = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
    llama = to_stock(GPT(SAME["llama"]))
    llama.config.rope_parameters = turned
    with pytest.raises(BadInput, match="its rotations are of the kind 'yarn'"):
        from_stock(llama)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ModelConfig(**GPT2, query=Bottleneck()), "its query is 'bottleneck', which is not linear"),
        (ModelConfig(**GPT2, qk_norm=True), "normalises queries and keys"),
        (ModelConfig(**GPT2, window=4, logit_softcap=3.0), "within a window; it caps logits"),
        (ModelConfig(**GPT2, attends="bidirectional"), "attends bidirectional"),
        (ModelConfig(**GPT2, attention_softcap=3.0), "it caps logits"),
        (ModelConfig(**GPT2, mixer=LinearAttention()), "its mixer is 'linear_attention'"),
        (ModelConfig(**GPT2, overrides=(LayerOverride((1,), query=Identity()),)), "its blocks are not all alike"),
        (ModelConfig(**GPT2, residual=Skip("post")), "the places of its norms are others"),
        (ModelConfig(**GPT2, n_kv_heads=1), "and heads as in GPT-2"),
        (ModelConfig(**GPT2, norm="rmsnorm"), "with learned positions it needs layer norms"),
        (ModelConfig(**{**LLAMA, "mlp": Dense()}), "with rotary positions it needs RMS norms"),
    ],
)
def test_what_no_stock_class_is_is_refused(config: ModelConfig, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        to_stock(GPT(config))


@pytest.mark.parametrize("to", ["hf", "stock"])
@pytest.mark.parametrize("wrong", [1e-3, float("nan")])
def test_what_computes_something_else_is_not_handed_over(
    to: Any, wrong: float, finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever went wrong on the way: what was written is read back and asked."""
    name = {"hf": "as_hub_model", "stock": "to_stock"}[to]
    convert = getattr(export_module, name)

    def badly(model: GPT, **tokens: Any) -> Any:
        theirs = convert(model, **tokens)
        next(p for key, p in theirs.named_parameters() if "norm" in key or "ln_f" in key).data += wrong
        return theirs

    monkeypatch.setattr(export_module, name, badly)
    with pytest.raises(QurveError, match="does not compute what was read: logits differ by"):
        export(finished.path, tmp_path / "out", to)
    assert not list(tmp_path.iterdir())


def test_a_nonlinear_run_is_no_stock_model(run: RunFolder, tmp_path: Path) -> None:
    refused = call("export", run.path, "--to", "stock", "--out", tmp_path / "deep" / "stock")
    assert refused.code == 2
    assert "its query is 'bottleneck'" in words(refused.err)
    assert "Use --to hf" in words(refused.err)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("to", ["hf", "stock", "safetensors"])
def test_an_export_comes_back_as_a_run(
    to: Any, finished: RunFolder, run: RunFolder, data_folder: Path, tmp_path: Path
) -> None:
    source = finished if to == "stock" else run
    told = call("export", source.path, "--to", to, "--out", tmp_path / to, "--json").json
    assert told["tokenizer"] == "bytes"
    assert told["logits"] <= 1e-5
    assert call("import", tmp_path / to, "--out", tmp_path / "run").code == 0
    assert not list(tmp_path.glob(".*"))
    native, back = GPT.from_run(source.path), GPT.from_run(tmp_path / "run")
    with torch.no_grad():
        ids_BT = torch.arange(60).view(2, 30)
        assert_close(back(ids_BT), native(ids_BT)[..., :257], atol=1e-5, rtol=0)
    assert run_tokenizer(tmp_path / "run").spec == "bytes"
    plain = ("The", "--max-new-tokens", 8, "--temperature", 0, "--precision", "float32")
    assert call("generate", tmp_path / "run", *plain).out == call("generate", source.path, *plain).out
    for options in ([], ["--data", data_folder]):
        assert "was imported and has no data of its own" in words(call("eval", tmp_path / "run", *options).err)
    again = export(tmp_path / "run", tmp_path / "again", "safetensors")  # an imported one has no data
    assert (again.rows, load_weights(tmp_path / "again").config) == (257, back.config)


KIND = '{"model_type": "qurve", "qurve": {"format": 1, "depth": 3}}'


def stock_folder(folder: Path, **changes: Any) -> Path:
    settings = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": 30, **changes}
    GPT2LMHeadModel(GPT2Config(**settings, bos_token_id=None, eos_token_id=None)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("missing", "is not a folder"),
        ("empty", "error: {folder}/config.json cannot be read"),
        ("text", "not JSON"),
        ("unmarked", "what model is it?"),
        ("run", "is a run's folder already"),
        ("kind", "model: unknown field 'qurve.depth'"),
        ("mistral", "holds a 'mistral' model; qurve, gpt2 and llama can be imported"),
        ("gelu_new", "its activation is 'gelu_new', an approximation of GELU"),
        ("half", "its parameters are not this model's"),
        ("no-weights", "holds no whole model"),
        ("torn", "holds no whole model"),
    ],
)
def test_what_cannot_be_imported_is_named(case: str, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if case not in ("missing",):
        folder.mkdir()
    contents = {"text": "{", "unmarked": "{}", "run": "{}", "kind": KIND, "mistral": '{"model_type": "mistral"}'}
    if case == "run":
        (folder / "metrics.jsonl").touch()
    if case in contents:
        (folder / "config.json").write_text(contents[case])
    if case in ("gelu_new", "half", "no-weights", "torn"):
        stock_folder(folder, activation_function="gelu_new" if case == "gelu_new" else "gelu")
    weights = folder / "model.safetensors"
    if case == "half":
        tree = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**tree, "n_layer": 2}))
    if case == "no-weights":
        weights.unlink()
    if case == "torn":
        weights.write_bytes(weights.read_bytes()[:900])
    refused = call("import", folder, "--out", tmp_path / "run")
    assert refused.code == 2
    assert words(said.replace("{folder}", str(folder))) in words(refused.err)
    assert ("not JSON" in refused.err) == (case == "text")
    assert {entry.name for entry in tmp_path.iterdir()} <= {"model"}


def test_a_folder_in_use_is_refused(run: RunFolder, exported: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for arguments in (["export", run.path, "--to", "hf"], ["import", exported]):
        refused = call(*arguments, "--out", tmp_path)
        assert refused.code == 2
        assert "give another --out" in words(refused.err)
    refused = call("import", exported, "--out", tmp_path / "notes.txt" / "run")
    assert (refused.code, "notes.txt/run cannot be made (Not a directory)" in words(refused.err)) == (2, True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_into_the_empty_folder_where_one_is(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert call("import", exported, "--out", ".").code == 0
    assert (tmp_path / "here" / "config.json").is_file()


def test_data_that_has_moved_is_asked_for(run: RunFolder, tmp_path: Path, data_folder: Path) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["data"]["path"] = str(tmp_path / "gone")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="--data DIR"):
        export(tmp_path / "run", tmp_path / "hf", "hf")
    assert export(tmp_path / "run", tmp_path / "hf", "hf", data_folder).tokenizer == "bytes"


def test_a_stock_model_of_somebody_else_is_a_run_without_a_tokenizer(tmp_path: Path) -> None:
    moved = import_folder(stock_folder(tmp_path / "model", activation_function="gelu"), tmp_path / "run")
    assert (moved.kind, moved.tokenizer, moved.rows) == ("GPT2LMHeadModel", None, 30)
    with pytest.raises(BadInput, match="was imported without a tokenizer"):
        run_tokenizer(tmp_path / "run")
    assert GPT.from_run(tmp_path / "run").config.bias


def test_somebody_elses_byte_level_tokenizer_comes_along(tmp_path: Path) -> None:
    """One that ends a text by another id than its last, and that begins a text by it where it is asked to."""
    folder = stock_folder(tmp_path / "model", activation_function="gelu", vocab_size=257)
    tree = json.loads(ready_made("bytes").as_json())
    tree["model"]["vocab"] = {END_OF_TEXT: 0, **{s: i + 1 for s, i in tree["model"]["vocab"].items() if i < 256}}
    tree["added_tokens"][0]["id"] = 0
    end = {"id": END_OF_TEXT, "type_id": 0}
    pieces = [{"SpecialToken": end}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [0], "tokens": [END_OF_TEXT]}}
    tree["post_processor"] = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": tokens}
    (file := folder / "tokenizer.json").write_text(json.dumps(tree))
    assert import_folder(folder, tmp_path / "run").tokenizer == "bpe:257"
    own, theirs = run_tokenizer(tmp_path / "run"), PreTrainedTokenizerFast(tokenizer_file=str(file))
    assert own.eot == 0
    for text, ids in zip(TEXTS, own.encode_batch(TEXTS), strict=True):
        assert theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ids.tolist()
        assert own.decode(ids.tolist()) == text


def test_transformers_server_loads_what_is_its_own(
    exported: Path, finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ours where it is put there, as the guide has it."""
    import transformers
    from transformers.cli.serving.model_manager import ModelManager

    export(finished.path, tmp_path / "stock", "stock")
    manager = ModelManager(device="cpu", trust_remote_code=True)
    try:
        model, tokenizer = manager.load_model_and_processor(str(tmp_path / "stock"))
        assert (type(model).__name__, tokenizer("The")["input_ids"]) == ("GPT2LMHeadModel", list(b"The"))
        with pytest.raises(AttributeError, match="QurveForCausalLM"):
            manager.load_model_and_processor(str(exported))
        monkeypatch.setattr(transformers, "QurveForCausalLM", QurveForCausalLM, raising=False)
        model, _ = manager.load_model_and_processor(str(exported))
        assert type(model) is QurveForCausalLM
    finally:
        manager.shutdown()


# -------------------------------------------------------------------------------------------------------- a new process

ELSEWHERE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
kind, folder, ids, prompt = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=kind == "hf")
with torch.no_grad():
    logits = model(torch.tensor(ids)).logits
made = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=50, eos_token_id=-1)[0, len(prompt):]
print(json.dumps({"logits": logits.tolist(), "greedy": made.tolist(), "qurve": "qurve" in sys.modules}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["hf", "stock"])
def test_a_new_process_loads_it_offline(to: Any, run: RunFolder, data: TokenData, tmp_path: Path) -> None:
    source = run
    if to == "stock":
        from qurve.train.loop import train

        source = train(tiny("model.context=64", "train.micro_batch=2"), tmp_path / "run", data)
    export(source.path, tmp_path / to, to)
    ids = torch.arange(60).view(2, 30)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", ELSEWHERE, to, str(tmp_path / to), json.dumps(ids.tolist()), json.dumps(PROMPT)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    native = GPT.from_run(source.path)
    with torch.no_grad():
        assert_close(torch.tensor(found["logits"]), native(ids)[..., :257], atol=1e-5, rtol=0)
    assert found["greedy"] == greedy(native, run_tokenizer(source.path))
    assert found["qurve"] == (to == "hf")
