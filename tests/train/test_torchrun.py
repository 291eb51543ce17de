"""`torchrun … -m qurve train`, as the guide has it: restarts, deaths, two machines (on the loopback interface)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import environment
from qurve.files import check_manifest
from qurve.runfolder import RunFolder

pytestmark = pytest.mark.slow

LIMIT = 240.0
"""Seconds after which a job counts as hanging."""

TRAIN = (
    *("-m", "qurve", "train", "smoke", "--resume", "auto", "--steps", "60", "--checkpoint-every", "5"),
    *("--set", "train.micro_batch=4", "--set", "eval.every=100", "--set", "model.dropout=0.1"),
    *("--set", "train.lr=5e-4"),  # at the preset's rate, rounding grows to a hundredth within thirty steps
)


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def standalone(out: Path, data: Path, mode: str, *arguments: str) -> subprocess.Popen[str]:
    job = ("--out", str(out), "--data", str(data), "--parallel", mode)
    return torchrun("--standalone", "--nproc-per-node", "2", *arguments, *TRAIN, *job)


def end(job: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        out, _ = job.communicate(timeout=LIMIT)
    finally:
        job.kill()
    return job.returncode, out


def wait_until(true: Callable[[], bool], job: subprocess.Popen[str]) -> None:
    begun = time.monotonic()
    while not true():
        assert job.poll() is None, end(job)[1]
        assert time.monotonic() - begun < LIMIT
        time.sleep(0.05)


def workers(job: subprocess.Popen[str]) -> list[int]:
    """Process ids of torchrun's children, in the order of their ranks."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    return sorted(int(pid) for pid in children)


@pytest.fixture(scope="module")
def alone(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    out = tmp_path_factory.mktemp("alone") / "run"
    command = [sys.executable, *TRAIN, "--out", str(out), "--data", str(data_folder)]
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    return RunFolder(out)


def assert_same_run(run: RunFolder, alone: RunFolder) -> None:
    ours, theirs = run.train_lines(), alone.train_lines()
    for key in ("step", "batch_sha"):
        assert [line[key] for line in ours] == [line[key] for line in theirs]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], abs=1e-4)
    assert run.status()["status"] == "finished"


@pytest.mark.parametrize(("mode", "victim"), [("ddp", 0), ("fsdp", 1)])
def test_a_killed_process_is_replaced_and_the_run_goes_on(
    mode: str, victim: int, data_folder: Path, alone: RunFolder, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    job = standalone(run.path, data_folder, mode, "--max-restarts", "1")
    wait_until(lambda: len(run.checkpoint_steps()) > 1, job)
    os.kill(workers(job)[victim], signal.SIGKILL)
    code, out = end(job)
    assert code == 0, out
    assert_same_run(run, alone)
    assert len(run.environment()["resumed"]) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_job_that_loses_a_process_or_is_stopped_ends_as_a_whole_and_can_be_continued(
    number: signal.Signals, data_folder: Path, alone: RunFolder, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    job = standalone(run.path, data_folder, "ddp")
    wait_until(lambda: len(run.checkpoint_steps()) > 1, job)
    os.kill(workers(job)[1] if number == signal.SIGKILL else job.pid, number)
    code, out = end(job)
    assert code != 0, out
    assert run.status()["status"] == ("failed" if number == signal.SIGKILL else "stopped")
    check_manifest(run.latest_checkpoint(), "model.safetensors", "optimizer.safetensors", "state.json")
    if number == signal.SIGTERM:
        assert run.checkpoint_steps()[-1] == run.last_step()
    code, out = end(standalone(run.path, data_folder, "fsdp"))
    assert code == 0, out
    assert_same_run(run, alone)


def test_two_machines_make_the_run_of_one(data_folder: Path, alone: RunFolder, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "two", "--local-addr", "127.0.0.1")
    out = ("--out", str(tmp_path / "run"), "--data", str(data_folder), "--parallel", "fsdp")
    jobs = [torchrun("--nnodes", "2", "--nproc-per-node", "1", *meeting, *TRAIN, *out) for _ in range(2)]
    for code, told in [end(job) for job in jobs]:
        assert code == 0, told
    assert_same_run(RunFolder(tmp_path / "run"), alone)


def test_a_refusal_ends_the_job_and_changes_nothing(alone: RunFolder, data_folder: Path) -> None:
    before = {path: path.read_bytes() for path in alone.path.rglob("*") if path.is_file()}
    out_and_data = ("--out", str(alone.path), "--data", str(data_folder))
    job = torchrun("--standalone", "--nproc-per-node", "2", *TRAIN, *out_and_data)
    code, out = end(job)
    assert code != 0
    assert "2 processes were started for one run; add --parallel ddp or --parallel fsdp" in out
    assert {path: path.read_bytes() for path in alone.path.rglob("*") if path.is_file()} == before
