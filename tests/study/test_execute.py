"""Runs of a study: which are made, where, in what order, and what happens when one breaks."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qurve.config import content_hash
from qurve.data.loader import TokenData
from qurve.errors import BadInput
from qurve.files import LOCK, claimed, sha256_of
from qurve.runfolder import RunFolder
from qurve.study import execute, local
from qurve.study.definition import Arm, Study
from qurve.study.doubts import doubts
from qurve.study.execute import run_study
from qurve.study.jobs import Job, run_path
from qurve.study.results import load
from qurve.train import runtime
from tiny import InProcess, tiny


def make_study(*settings: str, seeds: tuple[int, ...] = (1, 2)) -> Study:
    arms = (
        Arm("baseline", "Baseline", tiny(*settings)),
        Arm("wide", "Wide", tiny("model.d_ff=96", *settings)),
        Arm("res-gelu", "Res. GELU", tiny("model.query=bottleneck", *settings)),
    )
    return Study("tiny", "A tiny study", arms, seeds)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


really_execute = execute._execute


class Executed:
    """What `run_study` would have handed to its workers."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.devices: list[str] = []

    def __call__(self, jobs: list[Job], workers: Any, data: str, retries: int, say: Any, later: int) -> dict[str, str]:
        self.jobs, self.devices = jobs, workers.devices
        return {}


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Executed:
    catching = Executed()
    monkeypatch.setattr(execute, "_execute", catching)
    return catching


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "ProcessPoolExecutor", InProcess)


def run(study: Study, folder: Path, data: TokenData, **more: Any) -> tuple[dict[str, str], list[str]]:
    said: list[str] = []
    failed = run_study(study, folder, data, command="qurve compare", say=said.append, **more)
    return failed, said


# ------------------------------------------------------------------------------------------------------ what is planned


@pytest.mark.parametrize(
    ("cores", "workers", "n_devices", "threads"),
    [(2, None, 2, 1), (16, None, 6, 2), (16, 4, 4, 4), (3, 2, 2, 1), (2, 1, 1, 2), (1, 4, 4, 1)],
)
def test_cores_are_divided_among_the_workers(
    cores: int,
    workers: int | None,
    n_devices: int,
    threads: int,
    executed: Executed,
    data: TokenData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "available_cores", lambda: cores)
    _, said = run(make_study("train.threads=none"), tmp_path / "study", data, workers=workers)
    assert executed.devices == ["cpu"] * n_devices
    assert {job.config.train.threads for job in executed.jobs} == {threads}
    assert n_devices * threads <= max(cores, n_devices)
    assert any(f"6 runs on {n_devices} worker" in text and f"{threads} thread" in text for text in said)


def test_threads_that_the_study_gives_stay(executed: Executed, data: TokenData, tmp_path: Path) -> None:
    run(make_study("train.threads=1"), tmp_path / "study", data, workers=1)
    assert {job.config.train.threads for job in executed.jobs} == {1}


def test_each_run_has_its_seed_its_folder_and_a_resolved_configuration(
    executed: Executed, data: TokenData, tmp_path: Path
) -> None:
    run(make_study(), tmp_path / "study", data)
    assert len(executed.jobs) == 6
    for job in executed.jobs:
        assert job.config.train.seed == job.seed
        assert job.folder == tmp_path / "study" / "runs" / job.arm.name / f"seed-{job.seed}"
        assert job.config.data.fingerprint == data.fingerprint
    assert len({content_hash(job.config) for job in executed.jobs}) == 6
    assert json.loads((tmp_path / "study" / "study.json").read_text())["command"] == "qurve compare"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("train.tokens_per_step=100",), "tokens_per_step"),
        (("model.vocab_size=256",), r"model\.vocab_size=320"),
        (("train.micro_batch=3",), "does not divide the step's 4 sequences"),
    ],
)
def test_a_study_that_cannot_run_is_refused_before_anything_is_made(
    settings: tuple[str, ...], message: str, executed: Executed, data: TokenData, tmp_path: Path
) -> None:
    good = make_study()
    last = dataclasses.replace(good.arms[-1], config=tiny(*settings))
    with pytest.raises(BadInput, match=message):
        run(dataclasses.replace(good, arms=(*good.arms[:-1], last)), tmp_path / "study", data)
    assert not (tmp_path / "study").exists()


def test_a_missing_compiler_is_announced_once(
    executed: Executed, data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    _, said = run(make_study("train.compile=true"), tmp_path / "compiled", data)
    assert len([text for text in said if "no C++ compiler found" in text]) == 1
    _, said = run(make_study(), tmp_path / "eager", data)
    assert len([text for text in said if "no C++ compiler found" in text]) == 1  # an eager study says it, too


# ------------------------------------------------------------------------------------------------- what is made already


@pytest.fixture
def made(in_process: None, data: TokenData, tmp_path: Path) -> Path:
    folder = tmp_path / "study"
    failed, _ = run(make_study("train.steps=2"), folder, data, workers=2)
    assert failed == {}
    return folder


def test_batches_are_the_same_in_every_arm_and_others_for_every_seed(made: Path) -> None:
    shas = {
        (arm, seed): [line["batch_sha"] for line in RunFolder(run_path(made, arm, seed)).train_lines()]
        for arm in ("baseline", "wide", "res-gelu")
        for seed in (1, 2)
    }
    for seed in (1, 2):
        assert shas["baseline", seed] == shas["wide", seed] == shas["res-gelu", seed]
    assert not set(shas["baseline", 1]) & set(shas["baseline", 2])


def test_finished_and_diverged_runs_are_kept(made: Path, executed: Executed, data: TokenData) -> None:
    RunFolder(run_path(made, "wide", 2)).set_status("diverged", step=1, why="planted")
    before = snapshot(made / "runs")
    failed, said = run(make_study("train.steps=2"), made, data, workers=2)
    assert failed == {}
    assert executed.jobs == []
    assert any("6 of 6 runs are made already and kept" in text for text in said)
    assert snapshot(made / "runs") == before


def test_new_seeds_and_arms_are_added(made: Path, executed: Executed, data: TokenData) -> None:
    run(make_study("train.steps=2", seeds=(1, 2, 3)), made, data, workers=2)
    assert [job.name for job in executed.jobs] == ["baseline, seed 3", "wide, seed 3", "res-gelu, seed 3"]


@pytest.mark.parametrize("status", ["running", "failed", "stopped"])
def test_an_unfinished_run_is_continued_to_the_same_end(
    status: Any, made: Path, in_process: None, data: TokenData
) -> None:
    run_folder = RunFolder(run_path(made, "wide", 2))
    before = [(line["step"], line["loss"]) for line in run_folder.metrics()]
    shutil.rmtree(run_folder.checkpoint(2))
    run_folder.set_status(status, step=1)
    failed, said = run(make_study("train.steps=2", "train.checkpoint_every=1"), made, data, workers=2)
    assert failed == {}
    assert any("1 that was begun will be continued" in text for text in said)
    assert run_folder.status()["status"] == "finished"
    assert [(line["step"], line["loss"]) for line in run_folder.metrics()] == before
    assert not list(run_folder.path.parent.glob("*unfinished*"))


def test_a_run_that_stopped_early_on_request_is_not_made_when_more_is_asked_for(
    in_process: None, executed: Executed, data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(execute, "_execute", really_execute)
        run(make_study("train.stop_at=2", seeds=(1,)), tmp_path, data, workers=1)
    run(make_study("train.stop_at=2", seeds=(1,)), tmp_path, data, workers=1)
    assert executed.jobs == []
    run(make_study(seeds=(1,)), tmp_path, data, workers=1)
    assert len(executed.jobs) == 3


def test_another_configuration_is_refused_with_what_changed_and_nothing_touched(
    made: Path, executed: Executed, data: TokenData
) -> None:
    RunFolder(run_path(made, "baseline", 1)).set_status("failed", step=1)
    before = snapshot(made)
    with pytest.raises(BadInput, match=r"another configuration \(train\.lr: 0\.01 there, 0\.02 now\); give another"):
        run(make_study("train.steps=2", "train.lr=0.02"), made, data, workers=2)
    assert snapshot(made) == before


def test_what_changes_no_number_is_no_other_configuration(made: Path, executed: Executed, data: TokenData) -> None:
    run(make_study("train.steps=2", "train.log_every=1", "train.checkpoint_every=1"), made, data, workers=2)
    assert executed.jobs == []


def test_a_strange_folder_in_a_runs_place_is_refused(data: TokenData, executed: Executed, tmp_path: Path) -> None:
    place = run_path(tmp_path, "wide", 1)
    place.mkdir(parents=True)
    (place / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match=r"holds notes\.txt and no run"):
        run(make_study(), tmp_path, data)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["notes.txt"]


# -------------------------------------------------------------------------------------------------- when it breaks


def test_a_diverging_run_is_told_and_stops_no_other(in_process: None, data: TokenData, tmp_path: Path) -> None:
    good = make_study("train.steps=60", seeds=(1,))
    wild = tiny("train.steps=60", "train.lr=1e6", "train.warmup_steps=0")
    study = dataclasses.replace(good, arms=(good.arms[0], Arm("wild", "Wild", wild), good.arms[2]))
    failed, said = run(study, tmp_path / "study", data, workers=1)
    assert failed == {}
    assert any("wild, seed 1: diverged (step" in text for text in said)
    statuses = {arm.name: RunFolder(run_path(tmp_path / "study", arm.name, 1)).status()["status"] for arm in study.arms}
    assert statuses == {"baseline": "finished", "wild": "diverged", "res-gelu": "finished"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("status.json", ""),
        ("status.json", "{}"),
        ("config.json", "{"),
        ("config.json", "{}"),
        ("config.json", '{"train": 5}'),
        ("environment.json", "[]"),
        ("metrics.jsonl", "[1]\n"),
    ],
)
def test_a_run_found_damaged_fails_and_the_others_are_made(
    name: str, content: str, made: Path, data: TokenData
) -> None:
    damaged, missing = run_path(made, "baseline", 1), run_path(made, "wide", 2)
    RunFolder(damaged).set_status("failed", step=1)
    (damaged / name).write_text(content)
    shutil.rmtree(missing)
    kept = snapshot(run_path(made, "res-gelu", 1))
    failed, _ = run(make_study("train.steps=2"), made, data, workers=1)
    assert list(failed) == ["baseline, seed 1"]
    assert str(damaged) in failed["baseline, seed 1"]
    assert RunFolder(missing).status()["status"] == "finished"
    assert snapshot(run_path(made, "res-gelu", 1)) == kept
    assert sum(run.finished for run in load(made).runs) == 5


def test_estimate_says_how_far_the_running_ones_are(made: Path) -> None:
    configs = [tiny("train.steps=2"), tiny("train.steps=10")]
    running = [Job(Arm("wide", "Wide", c), 2, c, run_path(made, "wide", 2)) for c in configs[:1]]
    waiting = [Job(Arm("wide", "Wide", c), 3, c, run_path(made, "wide", 3)) for c in configs[1:]]
    last = RunFolder(running[0].folder).train_lines()[-1]
    text = execute.estimate(running, waiting, 1)
    assert text.startswith(f"wide, seed 2: step 2/2, loss {last['loss']:.3f}; about ")
    assert text.endswith(f"about {last['seconds'] / 2 * 10:.0f} s left")
    assert execute.estimate(waiting, [], 1) == "wide, seed 3: step 0/10"


def test_two_processes_never_work_on_one_study(executed: Executed, data: TokenData, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    with claimed(folder), pytest.raises(BadInput, match=f"another process is working on {folder}"):
        run(make_study(), folder, data)
    assert not [path for path in folder.iterdir() if path.name != LOCK]
    run(make_study(), folder, data)
    assert executed.jobs


def test_another_studys_folder_is_refused_and_left_as_it_is(
    executed: Executed, data: TokenData, tmp_path: Path
) -> None:
    folder = tmp_path / "study"
    run(make_study(), folder, data)
    before = (folder / "study.json").read_bytes()
    renamed = dataclasses.replace(make_study(), name="another")
    fewer = dataclasses.replace(make_study(), arms=make_study().arms[:2])
    for study in (renamed, fewer):
        with pytest.raises(BadInput, match="holds the study 'tiny' with the arms baseline, wide, res-gelu"):
            run(study, folder, data)
    assert (folder / "study.json").read_bytes() == before


@pytest.fixture
def every_run_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each had come to a loss."""
    shown = [(arm.name, seed) for arm in make_study().arms for seed in range(10)]
    monkeypatch.setattr("qurve.study.jobs.begun_runs", lambda folder: shown if (folder / "study.json").exists() else [])
    monkeypatch.setattr("qurve.study.jobs.was_seen", lambda run: True)


def test_seeds_of_which_no_run_came_to_a_loss_are_no_look(executed: Executed, data: TokenData, tmp_path: Path) -> None:
    """Of a call that was interrupted at once, or had the wrong seeds."""
    folder = tmp_path / "study"
    for seeds in ((1, 2, 3, 7), (1, 2, 3)):
        run(make_study(seeds=seeds), folder, data)
    assert load(folder).earlier_seeds == ()


@pytest.mark.usefixtures("every_run_was_seen")
def test_looks_with_other_seeds_are_remembered_and_said(executed: Executed, data: TokenData, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    for seeds in ((1, 2), (1, 2), (1, 2, 3), (1, 2, 3)):
        run(make_study(seeds=seeds), folder, data)
    results = load(folder)
    assert results.earlier_seeds == ((1, 2),)
    assert any("run before with other seeds (1, 2)" in doubt for doubt in doubts(results))


@pytest.mark.usefixtures("every_run_was_seen")
def test_other_looks_than_were_declared_are_refused(executed: Executed, data: TokenData, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    declared = dataclasses.replace(make_study(seeds=(1, 2, 3)), looks=(3, 5))
    run(declared, folder, data)
    before = (folder / "study.json").read_bytes()
    for looks, words in (((3,), "3, 5 there, 3 now"), ((), "3, 5 there, none now")):
        with pytest.raises(BadInput, match=rf"other declared looks \({words}\).*give another --out"):
            run(dataclasses.replace(declared, looks=looks), folder, data)
    assert (folder / "study.json").read_bytes() == before
    run(dataclasses.replace(declared, seeds=(1, 2, 3, 4, 5)), folder, data)
    assert (load(folder).looks, load(folder).earlier_seeds) == ((3, 5), ((1, 2, 3),))


KILLED = """
import multiprocessing, os, signal, sys, threading, time
from pathlib import Path
from qurve.data.loader import TokenData
from qurve.runfolder import RunFolder
from qurve.study.definition import Arm, Study
from qurve.study.execute import run_study
from qurve.study.jobs import run_path
from tiny import tiny

def kill_once(run):
    while not (run.is_begun() and run.last_step() > 15):
        time.sleep(0.01)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGKILL)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    config = tiny("train.steps=80", "train.checkpoint_every=5")
    study = Study("tiny", "Tiny", (Arm("baseline", "Baseline", config),), seeds=(1,))
    threading.Thread(target=kill_once, args=[RunFolder(run_path(folder, "baseline", 1))], daemon=True).start()
    failed = run_study(study, folder, TokenData.open(sys.argv[2]), command="", workers=1, retries=int(sys.argv[3]))
    sys.exit(len(failed))
"""


@pytest.mark.slow
def test_a_run_whose_process_is_killed_is_continued_to_the_same_numbers(
    in_process: None, data: TokenData, data_folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, script, tmp_path / "killed", data_folder, "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its process died; it will be continued from its last checkpoint (1 of 1)" in done.stdout
    study = Study("tiny", "Tiny", (Arm("baseline", "Baseline", tiny("train.steps=80")),), seeds=(1,))
    run(study, tmp_path / "quiet", data, workers=1)
    killed, quiet = (RunFolder(run_path(tmp_path / name, "baseline", 1)) for name in ("killed", "quiet"))
    assert len(killed.environment()["resumed"]) == 1
    lines = [[{**line, "seconds": 0} for line in each.metrics()] for each in (killed, quiet)]
    assert lines[0] == lines[1]
    for name in ("model", "optimizer"):
        file = f"{name}.safetensors"
        assert sha256_of(killed.checkpoint(80) / file) == sha256_of(quiet.checkpoint(80) / file)


INTERRUPTED = """
import sys
from pathlib import Path
from qurve.data.loader import TokenData
from qurve.study.definition import Arm, Study
from qurve.study.execute import run_study
from tiny import tiny

if __name__ == "__main__":
    config = tiny("train.steps=1000000")
    study = Study("tiny", "Tiny", (Arm("baseline", "Baseline", config),), seeds=(1, 2))
    run_study(study, Path(sys.argv[1]), TokenData.open(sys.argv[2]), command="", workers=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["the parent alone", "the whole terminal"])
def test_an_interrupted_study_has_its_run_save_and_goes_on_from_there(
    how: str, data_folder: Path, tmp_path: Path
) -> None:
    """A scheduler's signal reaches the parent alone, the terminal's Ctrl-C its group: both times once is once."""
    script, run_folder = tmp_path / "parent.py", RunFolder(run_path(tmp_path / "study", "baseline", 1))
    script.write_text(INTERRUPTED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, script, tmp_path / "study", data_folder]
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        try:
            while not run_folder.metrics_file.exists() or run_folder.last_step() < 3:
                assert parent.poll() is None
            if how == "the parent alone":
                parent.send_signal(signal.SIGINT)
            else:
                os.killpg(parent.pid, signal.SIGINT)
            _, told = parent.communicate(timeout=60)
            assert "KeyboardInterrupt" in told
            assert "stopping" not in told  # the study says it, on its own output
        finally:
            parent.kill()
    state = run_folder.status()
    assert state["status"] == "stopped"
    assert state["step"] == run_folder.last_step() == run_folder.checkpoint_steps()[-1]
    assert not run_path(tmp_path / "study", "baseline", 2).exists()
    assert not list((tmp_path / "study").rglob(LOCK))
