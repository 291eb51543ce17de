"""What every command that looks into a trained model refuses, and that numbers that are none stand as null."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qurve.cli.analyze import mechanism as analyze_mechanism
from qurve.cli.analyze.geometry import geometry
from qurve.cli.analyze.mechanism import mechanism
from qurve.cli.analyze.redundancy import redundancy
from qurve.cli.analyze.symmetry import symmetry
from qurve.data.loader import TokenData
from qurve.errors import BadInput
from qurve.files import remove, write_manifest
from qurve.runfolder import RunFolder
from qurve.train.loop import train
from tiny import tiny

COMMANDS: tuple[Callable[..., int], ...] = (redundancy, symmetry, geometry, mechanism)


def with_weights(run: RunFolder, to: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> RunFolder:
    """A copy whose newest checkpoint has other weights."""
    shutil.copytree(run.path, to)
    checkpoint = RunFolder(to).latest_checkpoint()
    state = load_file(checkpoint / "model.safetensors")
    change(state)
    save_file(state, checkpoint / "model.safetensors")
    write_manifest(checkpoint)
    return RunFolder(to)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_a_file_in_the_place_of_a_folder_is_refused_first(command: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(BadInput, match=r"file is a file; give another --out"):
            command(tmp_path / "nothing", out=out)
    with pytest.raises(BadInput, match=r"file (is not a run folder|holds no checkpoint)"):
        command(tmp_path / "file")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_weights_that_are_not_finite_are_named(
    command: Callable[..., int], finished: RunFolder, data_folder: Path, tmp_path: Path
) -> None:
    name = "blocks.1.attention.key.weight"
    run = with_weights(finished, tmp_path / "run", lambda state: state[name][3].fill_(torch.nan))
    with pytest.raises(BadInput, match=rf"run: its {name} is not finite"):
        command(run.path, data=data_folder, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def exact(data: TokenData, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Its `f` is zero at the start."""
    config = tiny('model.query={"kind":"bottleneck","start":"exact"}', f"data.path={data.folder}", "train.lr=0.05")
    return train(config, tmp_path_factory.mktemp("exact") / "run", data)


def document(capsys: pytest.CaptureFixture[str], run: RunFolder) -> Any:
    assert mechanism(run.path, windows=2, as_json=True) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyze_mechanism, "SEEDS", (0,))
    monkeypatch.setattr(analyze_mechanism, "RANDOM_CONCEPTS", 0)


def test_an_f_that_is_zero_at_the_start_has_no_linear_share_there(
    exact: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = document(capsys, exact)["linear_share"]
    assert [share["untrained"] for share in shares] == [None, None]
    assert all(0 < share["r2"] <= 1 for share in shares)
    assert mechanism(exact.path, windows=2) == 0
    assert "(–)" in capsys.readouterr().out


def test_keys_without_weights_have_no_degree_and_no_turn(
    exact: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = with_weights(exact, tmp_path / "run", lambda state: state["blocks.0.attention.key.weight"].zero_())
    found = document(capsys, run)
    key = next(row for row in found["matrices"] if (row["layer"], row["name"]) == (0, "key.weight"))
    assert [key[name] for name in ("rms", "effective_rate", "radial_cosine")] == [0, None, None]
    assert [degree["together"] is None for degree in found["degrees"]] == [True, False]


def test_a_query_of_zero_is_singular_and_stays(
    finished: RunFolder, data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = with_weights(finished, tmp_path / "run", lambda state: state["blocks.0.attention.query.weight"].zero_())
    assert redundancy(run.path, data=data_folder, out=tmp_path / "out", as_json=True) == 0
    verdict = json.loads(capsys.readouterr().out)["verdicts"][0]
    assert (verdict["condition"], verdict["outcome"]) == (None, "kept")
    assert any("its condition number is inf" in obstacle["why"] for obstacle in verdict["obstacles"])


def test_the_step_is_the_checkpoints(exact: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was killed has metrics of later steps."""
    shutil.copytree(exact.path, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    remove(run.latest_checkpoint())
    assert (run.checkpoint_steps(), run.last_step()) == ([2], 4)
    assert document(capsys, run)["step"] == 2
