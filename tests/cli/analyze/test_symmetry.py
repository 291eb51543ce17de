"""What the command says of a run's symmetries and heads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from commands import words
from qurve.analysis.gauges import asymmetry, head_norms
from qurve.analysis.symmetry import symmetries
from qurve.cli.analyze.symmetry import symmetry
from qurve.data.loader import TokenData
from qurve.errors import BadInput
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.train.loop import train
from tiny import tiny


def test_figures_are_those_of_the_library(
    finished: RunFolder, data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert symmetry(finished.path, data=data_folder, out=tmp_path / "found", as_json=True) == 0
    tree = json.loads(capsys.readouterr().out)
    model = GPT.from_run(finished.path)
    counted = symmetries(model.config)
    assert tree["parameters"] == sum(p.numel() for p in model.parameters())
    assert {row["name"]: row["dimension"] for row in tree["symmetries"]} == {s.name: s.dimension for s in counted}
    assert tree["redundancy"] == sum(s.dimension for s in counted)
    assert [block["asymmetry"] for block in tree["blocks"]] == asymmetry(model)
    for layer, block in enumerate(tree["blocks"]):
        assert all(0 < share < 1 for share in block["logit_asymmetry"])
        norms = head_norms(model.get_submodule(f"blocks.{layer}.attention"), "values")
        assert [(head["near"], head["excess"]) for head in block["values"]] == [(n.near, n.excess) for n in norms]
    assert json.loads((tmp_path / "found" / "symmetry.json").read_text()) == tree
    page = (tmp_path / "found" / "symmetry.html").read_text()
    assert f"{tree['redundancy']:,} of {tree['parameters']:,} parameters change nothing" in page
    assert "queries and keys" in page
    assert {file.name for file in (tmp_path / "found").glob("*.svg")} == {"asymmetry.svg", "excess.svg"}


def test_a_table_for_people(finished: RunFolder, data_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert symmetry(finished.path, data=data_folder) == 0
    told = words(capsys.readouterr().out)
    total = sum(s.dimension for s in symmetries(GPT.from_run(finished.path).config))
    assert f"{total:,} of " in told
    assert "queries and keys 1,024" in told  # two blocks, two heads, sixteen channels


def test_nonlinear_queries_have_logits_alone_and_what_is_not_counted_says_so(
    data: TokenData, data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny("model.query=bottleneck", "model.bias=true", "model.share_blocks=true", "train.steps=1")
    run = train(config, tmp_path / "run", data)
    assert symmetry(run.path, data=data_folder, as_json=True) == 0
    tree = json.loads(capsys.readouterr().out)
    assert "symmetries" not in tree
    assert "model.bias" in tree["why_not_counted"]
    assert [block["block"] for block in tree["blocks"]] == [0, 1]
    for block in tree["blocks"]:
        assert (block["asymmetry"], block["logits"]) == (None, None)
        assert len(block["logit_asymmetry"]) == len(block["values"]) == 2
    assert symmetry(run.path, data=data_folder) == 0
    assert "model.bias" in capsys.readouterr().out


def test_a_head_without_weights_is_shown(
    finished: RunFolder, data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    from qurve.files import write_manifest

    shutil.copytree(finished.path, tmp_path / "run")
    checkpoint = RunFolder(tmp_path / "run").latest_checkpoint()
    state = load_file(checkpoint / "model.safetensors")
    for name in ("query", "value"):
        state[f"blocks.0.attention.{name}.weight"].zero_()
    save_file(state, checkpoint / "model.safetensors")
    write_manifest(checkpoint)
    assert symmetry(tmp_path / "run", data=data_folder) == 0
    assert symmetry(tmp_path / "run", data=data_folder, as_json=True) == 0
    block = json.loads(capsys.readouterr().out.splitlines()[-1])["blocks"][0]
    assert (block["asymmetry"], block["logit_asymmetry"]) == ([0, 0], [0, 0])
    assert [head["excess"] for head in block["values"]] == [None, None]


def test_other_data_is_refused(finished: RunFolder, little: TokenData, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not the data that"):
        symmetry(finished.path, data=little.folder)
    moved = tmp_path / "run"
    shutil.copytree(finished.path, moved)
    config = json.loads((moved / "config.json").read_text())
    config["data"]["path"] = str(tmp_path / "gone")
    (moved / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"--data DIR"):
        symmetry(moved)
