"""A training that is asked to stop: the step is finished and saved, or left at once, and the handlers given back."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from interrupted import After, ask_to_stop, assert_same, assert_whole, smallest, stop_after
from qurve.data.loader import TokenData
from qurve.errors import Stopped
from qurve.runfolder import RunFolder
from qurve.train import checkpoint
from qurve.train.loop import train


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
    with pytest.raises(Stopped, match="stopped after step 0"):
        train(smallest(), run.path, little, AtOnce())
    assert (run.checkpoint_steps(), run.status()["status"]) == ([], "stopped")
    assert_same(train(smallest(), run.path, little, resume="auto"), undisturbed)
