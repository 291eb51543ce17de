"""What the command line tells of a trained model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from commands import call, words
from qurve.cli.analyze.redundancy import _words
from qurve.data.loader import TokenData
from qurve.data.tokenizers import ready_made
from qurve.runfolder import RunFolder
from qurve.train.loop import train
from tiny import tiny

D, L = 32, 2


@pytest.fixture(scope="module")
def skipless(data: TokenData, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    residual = {"kind": "skip", "norms": "none", "attention": False, "mlp": False}
    return train(tiny(f"model.residual={json.dumps(residual)}"), tmp_path_factory.mktemp("skipless") / "run", data)


def test_of_a_usual_model_each_block_and_what_is_in_the_way(finished: RunFolder, data_folder: Path) -> None:
    done = call("analyze", "redundancy", finished.path, "--data", data_folder)
    assert done.code == 0
    told = words(done.out)
    assert "in the way" in told
    assert "blocks.0.attention_norm (and 4 more on its stream) is a LayerNorm" in told
    assert "nothing can be absorbed exactly" in told
    assert "forced: with every one the identity the logits change by" in told
    assert told.count("stays") == L


def test_of_a_skipless_one_what_is_saved(skipless: RunFolder, data_folder: Path, tmp_path: Path) -> None:
    options = ("--weight", "query", "--weight", "output", "--data", data_folder)
    done = call("analyze", "redundancy", skipless.path, *options, "--out", tmp_path / "found", "--json")
    assert json.loads((tmp_path / "found" / "redundancy.json").read_text()) == done.json
    assert [(v["layer"], v["weight"], v["outcome"]) for v in done.json["verdicts"]] == [
        (layer, weight, "identity") for layer in range(L) for weight in ("query", "output")
    ]
    parameters = done.json["parameters"]
    assert parameters["after"] - parameters["before"] == -2 * L * D * D
    assert done.json["exact"]["relative"] < 1e-9
    page = (tmp_path / "found" / "redundancy.html").read_text()
    assert '<figure id="conditions"' in page
    assert f"({-2 * L * D * D:+,})" in page
    assert [file.name for file in (tmp_path / "found").glob("*.svg")] == ["conditions.svg"]
    assert done.json["forced"] is None
    told = words(call("analyze", "redundancy", skipless.path, *options).out)
    assert f"({-2 * L * D * D:+,})" in told
    assert "identity 1,024" in told


def test_where_no_weight_is_linear_none_is_said_to_be_in_the_way() -> None:
    parameters = {"before": 9, "after": 9}
    tree = {"verdicts": [{"outcome": "none"}] * L, "exact": None, "forced": None, "parameters": parameters}
    assert _words(tree) == ["there is no linear weight to absorb"]
    tree["verdicts"].append({"outcome": "kept"})
    assert _words(tree) == ["nothing can be absorbed exactly"]


def test_what_cannot_be_is_refused(finished: RunFolder, tmp_path: Path) -> None:
    for arguments, said in (
        ([tmp_path], "is not a run folder"),
        ([finished.path, "--data", tmp_path], "is no prepared data"),
        ([finished.path, "--weight", "querry"], "invalid choice 'querry'"),
    ):
        refused = call("analyze", "redundancy", *arguments)
        assert refused.code == 2
        assert said in words(refused.err)


def test_an_exported_model_has_its_runs_verdicts(skipless: RunFolder, finished: RunFolder, tmp_path: Path) -> None:
    """A GPT-2 of transformers', and one of our class; conditions and counts are of the weights alone."""
    for run, to in ((finished, "stock"), (skipless, "hf")):
        folder = tmp_path / to
        assert call("export", run.path, "--to", to, "--out", folder).code == 0
        done = call("analyze", "redundancy", folder, "--weight", "query", "--weight", "output", "--json")
        assert done.code == 0, done.err
        own = call("analyze", "redundancy", run.path, "--weight", "query", "--weight", "output", "--json").json
        found = done.json
        assert found["run"] == str(folder)
        assert [(v["outcome"], v["saved"]) for v in found["verdicts"]] == [
            (v["outcome"], v["saved"]) for v in own["verdicts"]
        ]
        assert [v["condition"] for v in found["verdicts"]] == pytest.approx([v["condition"] for v in own["verdicts"]])
        if to == "hf":
            assert found["exact"]["relative"] < 1e-9
        else:
            assert found["forced"]["divergence"] > 1e-6


def llama(folder: Path, **changes: object) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    from qurve.hf.export import hub_tokenizer

    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"intermediate_size": 24, "vocab_size": 257, "max_position_embeddings": 32}
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).save_pretrained(folder)
    hub_tokenizer(ready_made("bytes"), 32).save_pretrained(folder)
    return folder


def test_of_somebody_elses_model(tmp_path: Path) -> None:
    done = call("analyze", "redundancy", llama(tmp_path / "model"), "--out", tmp_path / "found")
    assert done.code == 0, done.err
    assert "blocks.0.attention_norm (and 4 more on its stream) is an RMSNorm" in words(done.out)
    found = json.loads((tmp_path / "found" / "redundancy.json").read_text())
    assert [verdict["outcome"] for verdict in found["verdicts"]] == ["kept", "triangular"]
    assert found["tokens"] == 4 * 32
    assert found["exact"]["relative"] < 1e-9


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("mistral", "holds a 'mistral' model; qurve, gpt2 and llama can be imported"),
        ("gelu_new", "its activation is 'gelu_new', an approximation of GELU"),
        ("no tokenizer", "its tokenizer cannot be loaded"),
        ("another tokenizer", "it gives the id 122, and the vocabulary here has 90"),
        ("data", "is no run's folder; logits are compared on the embedded corpus"),
    ],
)
def test_a_folder_that_cannot_be_read_is_named(case: str, said: str, tmp_path: Path, data_folder: Path) -> None:
    changes: dict[str, dict[str, object]] = {
        "gelu_new": {"hidden_act": "gelu_new"},
        "another tokenizer": {"vocab_size": 90},
    }
    folder = llama(tmp_path / "model", **changes.get(case, {}))
    if case == "mistral":
        (folder / "config.json").write_text('{"model_type": "mistral"}')
    if case == "no tokenizer":
        for file in folder.glob("tokenizer*"):
            file.unlink()
    refused = call("analyze", "redundancy", folder, *(["--data", data_folder] if case == "data" else []))
    assert refused.code == 2
    assert said in words(refused.err)
