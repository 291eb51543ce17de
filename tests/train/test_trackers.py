"""Mirrors tell what `metrics.jsonl` tells, and nothing that happens to them reaches the training."""

from __future__ import annotations

import errno
import json
import random
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qurve.data.loader import TokenData
from qurve.runfolder import RunFolder
from qurve.train import trackers
from qurve.train.loop import train
from qurve.train.progress import Progress
from qurve.train.trackers import Mirror, scalars
from tiny import tiny

Lines = list[dict[str, Any]]
Charts = dict[str, dict[int, float]]
"""Tag -> step -> value."""


def update(step: int, loss: float = 5.5) -> dict[str, Any]:
    line = {"step": step, "loss": loss, "lr": 6e-4, "grad_norm": 1.5, "tokens": 128 * step, "seconds": 0.25 * step}
    return {**line, "batch_sha": "0a1b"}


def charts_of(lines: Lines) -> Charts:
    charts: Charts = {}
    for line in lines:
        for tag, value in scalars(line).items():
            charts.setdefault(tag, {})[line["step"]] = value
    return charts


def shown_by_tensorboard(run: RunFolder) -> Charts:
    """What TensorBoard shows of the folder; fails when a chart has a step twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    charts: Charts = {}
    for tag in read.Tags()["scalars"]:
        events = read.Scalars(tag)
        charts[tag] = {event.step: event.value for event in events}
        assert len(charts[tag]) == len(events)
    return charts


def as_float32(charts: Charts) -> Charts:
    """TensorBoard's charts are in single precision."""
    return {tag: {step: float(np.float32(value)) for step, value in chart.items()} for tag, chart in charts.items()}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "arm" / "seed-1")
    folder.path.mkdir(parents=True)
    return folder


@pytest.fixture
def notes() -> list[str]:
    return []


def open_mirror(run: RunFolder, notes: list[str], *names: str, first_step: int = 0) -> Mirror:
    return Mirror.open(names, run, tiny(), first_step, notes.append)


# -------------------------------------------------------------------------------------------------------- what is told


def test_names_of_the_charts() -> None:
    assert scalars(update(4)) == {
        "train/loss": 5.5,
        "train/lr": 6e-4,
        "train/grad_norm": 1.5,
        "train/tokens": 512,
        "train/seconds": 1.0,
        "train/tokens_per_s": 512.0,
    }
    assert scalars({"step": 4, "split": "val", "loss": 5.0, "tokens": 96}) == {"val/loss": 5.0}
    assert scalars({"step": 4, "split": "test", "loss": 5.0, "tokens": 96}) == {"test/loss": 5.0}


def test_evaluation_on_the_training_split_has_a_chart_of_its_own() -> None:
    evaluated = scalars({"step": 4, "split": "train", "loss": 5.0, "tokens": 96})
    assert list(evaluated.values()) == [5.0]
    assert not evaluated.keys() & scalars(update(4)).keys()


def test_update_too_fast_for_the_clock() -> None:
    assert "train/tokens_per_s" not in scalars({**update(1), "seconds": 0.0})


# --------------------------------------------------------------------------------------------------------- TensorBoard


def test_tensorboard_shows_the_metrics(run: RunFolder, finished: RunFolder, notes: list[str]) -> None:
    lines = list(finished.metrics())
    mirror = open_mirror(run, notes, "tensorboard")
    for line in lines:
        mirror.log(line)
    mirror.close("finished")
    assert shown_by_tensorboard(run) == as_float32(charts_of(lines))
    assert notes == []
    assert sorted(path.name for path in run.path.iterdir()) == ["tensorboard"]


def test_tensorboard_forgets_what_a_resumed_run_does_again(run: RunFolder, notes: list[str]) -> None:
    """The first process is killed after step 5, with a checkpoint of step 2 to continue from."""
    first = [update(1), update(2), {"step": 2, "split": "val", "loss": 5.0, "tokens": 96}, *map(update, (3, 4, 5))]
    again = [update(3, loss=4.0), update(4, loss=3.0)]
    killed = open_mirror(run, notes, "tensorboard")
    for line in first:
        killed.log(line)
    assert shown_by_tensorboard(run) == as_float32(charts_of(first))  # before any `close`
    resumed = open_mirror(run, notes, "tensorboard", first_step=3)
    for line in again:
        resumed.log(line)
    assert shown_by_tensorboard(run) == as_float32(charts_of([*first[:3], *again]))
    resumed.close("finished")
    killed.close("failed")
    assert notes == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
def test_tensorboard_on_a_full_disk(run: RunFolder, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    mirror = open_mirror(run, notes, "tensorboard")
    mirror.log(update(1))
    (thread,) = (thread for thread in threading.enumerate() if type(thread).__name__ == "_AsyncWriterThread")
    monkeypatch.setattr(RecordWriter, "write", raises(OSError(errno.ENOSPC, "No space left on device")))
    for step in range(2, 40):
        mirror.log(update(step))
    mirror.close("finished")
    thread.join()  # it raises, too, and should do so before the test is over
    (note,) = notes
    assert "tensorboard" in note
    assert "No space left on device" in note


# --------------------------------------------------------------------------------------------------- Weights & Biases


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package, offline, without anybody's key or settings, and without the errors it reports to its makers."""
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_DIR", "WANDB_RUN_ID", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    import wandb

    yield wandb
    wandb.teardown()


def offline_folders(run: RunFolder) -> list[Path]:
    return sorted(path for path in (run.path / "wandb").glob("offline-run-*") if path.is_dir())


def records(log: Path) -> Iterator[Any]:
    """The records of an offline log: LevelDB's format, in blocks of 32 KiB after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole = log.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or a record's last part
            yield Record.FromString(whole)
            whole = b""


def told_wandb(folder: Path) -> tuple[Charts, dict[str, Any]]:
    """The charts and the configuration in one offline folder."""
    (log,) = folder.glob("*.wandb")
    charts: Charts = {}
    config: dict[str, Any] = {}
    for record in records(log):
        items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for tag in items.keys() - {"_step", "_runtime", "_timestamp"}:
            charts.setdefault(tag, {})[record.history.step.num] = items[tag]
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    return charts, config


@pytest.mark.slow
def test_wandb_offline_holds_the_metrics(run: RunFolder, finished: RunFolder, notes: list[str], wandb: Any) -> None:
    lines = list(finished.metrics())
    mirror = open_mirror(run, notes, "wandb")
    for line in lines:
        mirror.log(line)
    mirror.close("finished")
    assert notes == []
    wandb.teardown()  # its process may write the last of it a moment after `finish`
    assert sorted(path.name for path in run.path.iterdir()) == ["wandb"]
    (folder,) = offline_folders(run)
    charts, config = told_wandb(folder)
    assert charts == charts_of(lines)
    assert config["train"]["steps"] == 4


@pytest.mark.slow
def test_wandb_resumes_as_the_same_run(run: RunFolder, notes: list[str], wandb: Any, tmp_path: Path) -> None:
    def identity(of: RunFolder, first_step: int) -> str:
        mirror = open_mirror(of, notes, "wandb", first_step=first_step)
        mirror.log(update(max(1, first_step)))
        mirror.close("stopped")
        (log,) = offline_folders(of)[-1].glob("run-*.wandb")
        return log.stem.removeprefix("run-")

    first = identity(run, 0)
    moved = RunFolder(run.path.rename(tmp_path / "elsewhere"))
    assert identity(moved, 3) == first
    assert len(offline_folders(moved)) == 2
    run.path.mkdir()
    assert identity(run, 0) != first
    assert notes == []


@pytest.mark.slow
def test_wandb_holds_two_runs_of_one_process_apart(
    run: RunFolder, notes: list[str], wandb: Any, tmp_path: Path
) -> None:
    other = RunFolder(tmp_path / "other")
    other.path.mkdir()
    mirrors = [open_mirror(folder, notes, "wandb") for folder in (run, other)]
    for loss, mirror in enumerate(mirrors):
        mirror.log(update(1, loss=loss))
    for mirror in mirrors:
        mirror.close("finished")
    wandb.teardown()
    assert notes == []
    for loss, folder in enumerate((run, other)):
        charts, _ = told_wandb(offline_folders(folder)[0])
        assert charts["train/loss"] == {1: loss}


def test_wandb_without_a_key_asks_nobody(
    run: RunFolder, notes: list[str], wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    mirror = open_mirror(run, notes, "wandb")
    mirror.log(update(1))
    mirror.close("finished")
    (note,) = notes
    assert "wandb login" in note
    assert "WANDB_MODE=offline" in note


# ------------------------------------------------------------------------------------------------------------- failures


def raises(error: BaseException) -> Any:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail


class Recorder:
    """A tracker that works."""

    def __init__(self, *args: object) -> None:
        self.told: list[Any] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.told.append((step, values))

    def close(self, status: str) -> None:
        self.told.append(status)


def with_failing(monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException) -> None:
    """Put a tracker that fails in `method` in TensorBoard's place, and one that works in the other's."""
    failing = type("Failing", (Recorder,), {method: raises(error)})
    monkeypatch.setattr(trackers, "TRACKERS", {"tensorboard": failing, "wandb": Recorder})


@pytest.mark.parametrize("error", [RuntimeError("broken\nin many words"), OSError(28, "No space left"), KeyError()])
@pytest.mark.parametrize("method", ["__init__", "log", "close"])
def test_failure_is_one_note(
    run: RunFolder, notes: list[str], monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    with_failing(monkeypatch, method, error)
    mirror = open_mirror(run, notes, "tensorboard", "wandb")
    (works,) = (tracker for tracker in mirror._trackers.values() if type(tracker) is Recorder)
    for step in (1, 2, 3):
        mirror.log(update(step))
    mirror.close("finished")
    assert works.told == [*((step, scalars(update(step))) for step in (1, 2, 3)), "finished"]
    (note,) = notes
    mirror.close("failed")
    assert (works.told[-1], notes) == ("finished", [note])
    assert "tensorboard" in note
    assert type(error).__name__ in note
    assert str(error).partition("\n")[0] in note
    assert "\n" not in note


def test_tracker_that_can_neither_log_nor_close(
    run: RunFolder, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_failing(monkeypatch, "log", RuntimeError("first"))
    trackers.TRACKERS["tensorboard"].close = raises(RuntimeError("second"))  # type: ignore[method-assign]
    mirror = open_mirror(run, notes, "tensorboard")
    mirror.log(update(1))
    mirror.log(update(2))
    mirror.close("finished")
    assert len(notes) == 1
    assert "first" in notes[0]


def test_failed_tracker_gives_its_files_back(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with_failing(monkeypatch, "log", RuntimeError())
    mirror = open_mirror(run, [], "tensorboard")
    tracker = mirror._trackers["tensorboard"]
    mirror.log(update(1))
    assert isinstance(tracker, Recorder)
    assert tracker.told == ["failed"]


@pytest.mark.parametrize("method", ["__init__", "log", "close"])
def test_ctrl_c_is_no_failure_of_a_tracker(
    run: RunFolder, notes: list[str], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def all_of_it() -> None:
        mirror = open_mirror(run, notes, "tensorboard")
        mirror.log(update(1))
        mirror.close("finished")

    with_failing(monkeypatch, method, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        all_of_it()
    assert notes == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_missing_package_is_named_with_the_way_out(
    run: RunFolder, notes: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in [m for m in sys.modules if m.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    mirror = open_mirror(run, notes, name)
    mirror.log(update(1))
    mirror.close("finished")
    (note,) = notes
    assert name in note
    assert "pip install 'qurve[track]'" in note
    assert list(run.path.iterdir()) == []


def test_no_tracker_costs_nothing(run: RunFolder, notes: list[str]) -> None:
    mirror = open_mirror(run, notes)
    mirror.log(update(1))
    mirror.close("finished")
    assert notes == []
    assert list(run.path.iterdir()) == []


@pytest.mark.parametrize("name", ["tensorboard", pytest.param("wandb", marks=pytest.mark.slow)])
def test_random_numbers_stay_as_they_were(run: RunFolder, notes: list[str], wandb: Any, name: str) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    mirror = open_mirror(run, notes, name)
    mirror.log(update(1))
    mirror.close("finished")
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert notes == []


# ------------------------------------------------------------------------------------------------------ with a training


class Notes(Progress):
    """Keeps what a training says."""

    def __init__(self, notes: list[str]) -> None:
        self.note = notes.append  # type: ignore[method-assign]


def without_seconds(run: RunFolder) -> Lines:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in run.metrics()]


def test_training_is_mirrored_across_a_resume(tmp_path: Path, data: TokenData, finished: RunFolder) -> None:
    setting = 'train.trackers=["tensorboard"]'
    train(tiny(setting, "train.stop_at=2"), tmp_path / "run", data)
    run = train(tiny(setting), tmp_path / "run", data, resume="auto")
    assert shown_by_tensorboard(run) == as_float32(charts_of(list(run.metrics())))
    assert without_seconds(run) == without_seconds(finished)


@pytest.mark.parametrize("method", ["__init__", "log", "close"])
def test_training_goes_on_without_a_tracker_that_fails(
    tmp_path: Path,
    data: TokenData,
    finished: RunFolder,
    notes: list[str],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    with_failing(monkeypatch, method, RuntimeError("broken"))
    run = train(tiny('train.trackers=["tensorboard"]'), tmp_path / "run", data, Notes(notes))
    assert run.status()["status"] == "finished"
    assert without_seconds(run) == without_seconds(finished)
    assert len([note for note in notes if "broken" in note]) == 1
