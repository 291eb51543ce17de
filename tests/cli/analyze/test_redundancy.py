"""What the command line tells of a trained model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import call, words
from qurve.data.loader import TokenData
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


def test_what_cannot_be_is_refused(finished: RunFolder, tmp_path: Path) -> None:
    for arguments, said in (
        ([tmp_path], "is not a run folder"),
        ([finished.path, "--data", tmp_path], "is no prepared data"),
        ([finished.path, "--weight", "querry"], "invalid choice 'querry'"),
    ):
        refused = call("analyze", "redundancy", *arguments)
        assert refused.code == 2
        assert said in words(refused.err)
