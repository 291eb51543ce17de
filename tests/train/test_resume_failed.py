"""Runs that diverge or fill the disk: what is kept, and how they go on."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from interrupted import (
    assert_same,
    assert_whole,
    numbers,
    refuse,
    smallest,
    snapshot,
    stop_after,
)
from qurve.data.loader import TokenData
from qurve.errors import Diverged, QurveError
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.train import checkpoint, loop
from qurve.train.config import RunConfig
from qurve.train.loop import train


def rising(monkeypatch: pytest.MonkeyPatch, from_step: int) -> None:
    """From a step on, the loss is ten times what it is."""
    windows = loop.training_windows
    loss = GPT.loss
    now = 0

    def training_windows(config: RunConfig, data: TokenData, update: int) -> Any:
        nonlocal now
        now = update + 1
        return windows(config, data, update)

    monkeypatch.setattr(loop, "training_windows", training_windows)
    monkeypatch.setattr(GPT, "loss", lambda *args: loss(*args) * (10 if now >= from_step else 1))


BOUND = ("train.loss_bound=20", "train.loss_bound_steps=3")


@pytest.mark.parametrize("stops", [(), (5,), (5, 6)])
def test_a_loss_above_its_bound_is_counted_across_stops(
    stops: Sequence[int], little: TokenData, undisturbed: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rising(monkeypatch, from_step=5)
    config = smallest(*BOUND, "train.checkpoint_every=1", "train.keep=1")
    run = RunFolder(tmp_path / "run")
    for step in stops:
        stop_after(step, run.path, little, config)
    with pytest.raises(Diverged, match=r"step 7: the loss was above 20\.0 for 3 steps in a row"):
        train(config, run.path, little, resume="auto")
    assert (run.status()["status"], run.last_step()) == ("diverged", 6)  # no update of step 7
    assert run.checkpoint_steps()[-2:] == [4, 6]  # the newest, and the last before the loss rose
    states = [json.loads((run.checkpoint(step) / "state.json").read_text()) for step in (4, 6)]
    assert [state["loss_above_bound"] for state in states] == [0, 2]
    assert numbers(run)[:5] == numbers(undisturbed)[:5]


def test_a_loss_that_falls_again_is_no_divergence(
    little: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows, loss, now = loop.training_windows, GPT.loss, [0]

    def training_windows(config: RunConfig, data: TokenData, update: int) -> Any:
        now[0] = update + 1
        return windows(config, data, update)

    monkeypatch.setattr(loop, "training_windows", training_windows)
    monkeypatch.setattr(GPT, "loss", lambda *args: loss(*args) * (10 if now[0] in (2, 3, 5, 6) else 1))
    run = train(smallest(*BOUND), tmp_path / "run", little)
    assert [line["step"] for line in run.train_lines() if line["loss"] > 20] == [2, 3, 5, 6]


def test_a_diverged_run_stays_diverged_unless_something_changes(
    little: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        rising(patch, from_step=3)
        with pytest.raises(Diverged):
            train(smallest(*BOUND), run.path, little)
    refuse(run, little, r"diverged \(step 5: .*\), and would again", *BOUND, kind=Diverged)
    other = RunFolder(tmp_path / "other")
    shutil.copytree(run.path, other.path, symlinks=True)
    train(smallest(*BOUND, "train.loss_bound=100"), run.path, little, resume="auto")
    train(smallest(*BOUND, "train.lr=0.005"), other.path, little, resume="auto", changed=["train.lr"])
    assert [folder.status()["status"] for folder in (run, other)] == ["finished", "finished"]


def full_disk(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("where", "what"),
    [
        (checkpoint, "save_file"),
        (checkpoint, "write_atomic"),
        (checkpoint, "write_manifest"),
        (checkpoint, "sync"),
        (RunFolder, "append"),
    ],
)
def test_a_disk_that_fills_up_leaves_the_checkpoint_before(
    where: Any,
    what: str,
    run: RunFolder,
    little: TokenData,
    undisturbed: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = snapshot(run.checkpoint(5))
    with monkeypatch.context() as patch:
        patch.setattr(where, what, full_disk)
        with pytest.raises(QurveError) as failure:
            train(smallest(), run.path, little, resume="auto")
    assert failure.value.exit_code == 1
    assert "the disk is full" in str(failure.value)
    assert "the newest checkpoint is of step 5. Make room, then go on with --resume auto" in str(failure.value)
    assert run.status()["status"] == "failed"
    assert snapshot(run.checkpoint(5)) == kept
    assert_whole(run)
    assert_same(train(smallest(), run.path, little, resume="auto"), undisturbed)


def test_a_full_disk_that_takes_no_status_either_still_says_what_went_wrong(
    run: RunFolder, little: TokenData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "append", full_disk)
    monkeypatch.setattr("qurve.runfolder.write_atomic", full_disk)
    monkeypatch.setattr(RunFolder, "go_on", lambda *args: None)
    with pytest.raises(QurveError, match=r"the disk is full .* of step 5"):
        train(smallest(), run.path, little, resume="auto")
