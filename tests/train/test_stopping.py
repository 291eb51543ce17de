"""A training that is asked to stop: the step is finished and saved, or left at once, and the handlers given back."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from interrupted import After, ask_to_stop, assert_same, assert_whole, smallest, snapshot, stop_after
from qurve import presets
from qurve.config import apply_settings
from qurve.data.loader import TokenData
from qurve.errors import BadInput, Stopped
from qurve.runfolder import RunFolder
from qurve.train import checkpoint
from qurve.train.config import RunConfig
from qurve.train.loop import train
from qurve.train.progress import LogLines, Progress, TerminalBar


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as in a terminal: a shell lets what it starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_leaves_at_once(
    first: signal.Signals, little: TokenData, undisturbed: RunFolder, tmp_path: Path
) -> None:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run = RunFolder(tmp_path / "run")

        def twice() -> None:
            signal.raise_signal(first)
            signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            train(smallest(), run.path, little, After(5, twice))
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (run.checkpoint_steps(), run.last_step()) == ([2, 4], 5)  # step 5 was not saved
    assert run.status()["status"] == "stopped"
    assert_whole(run)
    assert_same(train(smallest(), run.path, little, resume="auto"), undisturbed)


def test_a_second_signal_in_the_midst_of_the_save_leaves_the_checkpoint_before(
    little: TokenData, undisturbed: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = checkpoint.write_manifest

    def interrupted(folder: Path) -> None:
        manifest(folder)
        if "00000005" in folder.name:
            signal.raise_signal(signal.SIGINT)

    run = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_manifest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(smallest(), run.path, little, After(5, ask_to_stop))
    assert run.checkpoint_steps() == [2, 4]
    assert_whole(run)
    assert_same(train(smallest(), run.path, little, resume="auto"), undisturbed)


@pytest.mark.parametrize("speaks", [False, True])
def test_only_a_training_that_speaks_says_that_it_stops(
    speaks: bool, little: TokenData, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The workers of a study do not: the study itself says it, once."""
    progress = After(2, ask_to_stop)
    progress.speaks = speaks  # type: ignore[misc]
    with pytest.raises(Stopped):
        train(smallest(), tmp_path / "run", little, progress)
    said = capfd.readouterr().err
    assert said == ("\nstopping: the step is finished and saved first (Ctrl-C now stops at once)\n" if speaks else "")
    assert (Progress.speaks, LogLines.speaks, TerminalBar.speaks) == (False, True, True)


def test_signal_handlers_are_given_back(little: TokenData, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stop_after(1, tmp_path / "stopped", little)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    train(smallest("train.steps=1"), tmp_path / "whole", little)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_that_was_to_be_ignored_stays_ignored(
    little: TokenData, undisturbed: RunFolder, tmp_path: Path
) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert_same(train(smallest(), tmp_path / "run", little, After(5, ask_to_stop)), undisturbed)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_training_works_in_another_thread(little: TokenData, undisturbed: RunFolder, tmp_path: Path) -> None:
    thread = threading.Thread(target=train, args=(smallest(), tmp_path / "run", little))
    thread.start()
    thread.join()
    assert_same(RunFolder(tmp_path / "run"), undisturbed)


def test_a_run_that_was_stopped_before_its_first_step_begins_again(
    little: TokenData, undisturbed: RunFolder, tmp_path: Path
) -> None:
    class AtOnce(After):
        def evaluated(self, line: dict[str, Any]) -> None:
            ask_to_stop()

    run = RunFolder(tmp_path / "run")
    with pytest.raises(Stopped, match="stopped before the first step"):
        train(smallest(), run.path, little, AtOnce())
    assert (run.checkpoint_steps(), run.status()["status"]) == ([], "stopped")
    assert_same(train(smallest(), run.path, little, resume="auto"), undisturbed)


# ---------------------------------------------------------------------------------------------------------- the command

STEPS = 60


def smoke() -> RunConfig:
    return apply_settings(presets.get("smoke"), [f"train.steps={STEPS}", "model.dropout=0.1"])


@contextlib.contextmanager
def qurve_train(run: RunFolder, data: Path) -> Iterator[subprocess.Popen[str]]:
    """`qurve train smoke`, after its 10th step; killed at the end if it is still there."""
    command = [sys.executable, "-m", "qurve", "train", "smoke", "--steps", str(STEPS), "--set", "model.dropout=0.1"]
    command += ["--data", str(data), "--out", str(run.path), "--resume", "auto"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert any(text.startswith("step 10/") for text in process.stdout)
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_the_command_saves_and_says_that_it_was_stopped(
    sent: signal.Signals, data_folder: Path, data: TokenData, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    with qurve_train(run, data_folder) as process:
        process.send_signal(sent)
        _, said = process.communicate()
    assert process.returncode == 130
    step = run.last_step()
    assert 10 <= step < STEPS
    assert "stopping: the step is finished and saved first (Ctrl-C now stops at once)" in said
    assert f"stopped after step {step}, which is saved; --resume auto goes on from there" in said
    assert "Traceback" not in said
    assert (run.status()["status"], run.status()["step"], run.checkpoint_steps()) == ("stopped", step, [step])
    undisturbed = train(smoke(), tmp_path / "undisturbed", data)
    assert_same(train(smoke(), run.path, data, resume="auto"), undisturbed)


@pytest.mark.slow
def test_one_folder_one_process(data_folder: Path, data: TokenData, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    with qurve_train(run, data_folder) as process:
        process.send_signal(signal.SIGSTOP)  # it is there, and writes nothing
        while (before := snapshot(run.path)) != snapshot(run.path):
            pass
        second = subprocess.run(process.args, capture_output=True, text=True)
        assert second.returncode == 2
        assert f"another process is working on {run.path} (process {process.pid} on " in second.stderr
        with pytest.raises(BadInput, match=f"another process is working on .*process {process.pid} on"):
            train(smoke(), run.path, data, resume="auto")
        assert snapshot(run.path) == before
    assert (run.path / ".lock").exists()  # of a process that is gone
    train(smoke(), run.path, data, resume="auto")
    assert run.status()["status"] == "finished"
