"""One training on several processes: the same numbers as on one, whole tensors in and out, and an end for all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shared_training
from processes import environment, together
from qurve.errors import BadInput
from qurve.model.gpt import GPT
from qurve.train import distributed
from qurve.train.distributed import TORCHRUN, World, all_finite, fill, full, joined, launched, spread

PROGRAM = str(Path(shared_training.__file__))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_many_processes_train_like_one(size: int, tmp_path: Path) -> None:
    # DDP and FSDP2 in one start, which is what takes the time. Each process checks agreements, `fill`, `all_finite`,
    # bf16 and activation checkpointing by itself.
    for process in together(size, "-W", "error", PROGRAM, str(tmp_path / "found.json"), "ddp", "fsdp"):
        assert process.returncode == 0, process.stderr
    one = shared_training.train(None, World())[0]
    assert len(one["losses"]) == 20
    assert one["evaluations"][-1] < one["evaluations"][0]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == {"ddp", "fsdp"}
    for many in found.values():
        assert many["norms"] == pytest.approx(one["norms"], rel=1e-5)
        assert many["losses"] == pytest.approx(one["losses"], abs=1e-4)
        assert many["evaluations"] == pytest.approx(one["evaluations"], abs=1e-4)
        assert many["states"].keys() == one["states"].keys()
        for name, state in one["states"].items():
            torch.testing.assert_close(torch.tensor(many["states"][name]), torch.tensor(state), rtol=1e-3, atol=1e-4)


def test_activation_checkpointing_changes_nothing_on_one_process() -> None:
    shared_training.check_checkpointing(None, World())


def test_activation_checkpointing_computes_each_block_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = GPT(shared_training.MODEL), []
    original = model.blocks[1].forward
    monkeypatch.setattr(model.blocks[1], "forward", lambda *a: (calls.append(1), original(*a))[1])
    loss = spread(model, shared_training.settings(None, activation_checkpointing=True), World())
    shared_training.backward(loss, World(), 0)
    assert len(calls) == 2 * shared_training.SEQUENCES // shared_training.MICRO_BATCH
    with torch.no_grad():
        loss(*shared_training.windows(0))
    assert len(calls) == 2 * shared_training.SEQUENCES // shared_training.MICRO_BATCH + 1


def test_a_lone_process_is_its_own_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert not launched()
    with joined("cpu") as world:
        assert world == World(0, 1, 0, 1)
        assert world.main
        tensor = torch.ones(2)
        assert world.total(tensor) is tensor
        assert world.from_main(7) == 7
        world.wait()
    assert not all_finite(torch.tensor([1.0, float("nan")]))


def test_fill_refuses_another_shape_or_dtype() -> None:
    tensor = torch.zeros(2, 3)
    fill(tensor, torch.ones(2, 3))
    assert torch.equal(full(tensor), torch.ones(2, 3))
    for whole in (torch.ones(3), torch.ones(1), torch.ones(2, 3, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"\[2, 3\] of torch.float32 cannot be filled from"):
            fill(tensor, whole)


@pytest.mark.parametrize(("device", "message"), [("cuda:1", "say cuda"), ("cuda", "process 3 .* torch finds 2")])
def test_each_process_needs_a_gpu_of_its_own(device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert launched()
    with pytest.raises(BadInput, match=message), joined(device):
        pass


DYING = """
import os, sys, torch
from qurve.errors import Diverged
from qurve.train.distributed import joined
with joined("cpu") as world:
    for step in range(10**9):
        world.total(torch.ones(3))
        if step == 5 and world.rank == 1:
            if sys.argv[1] == "killed":
                os.kill(os.getpid(), 9)
            raise Diverged("the data ended")
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "raises"])
def test_a_process_that_dies_ends_the_job(end: str, tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    command: list[Any] = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = subprocess.run(
        [*command, tmp_path / "dying.py", end], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert job.returncode == 1
    assert ("exitcode  : -9" if end == "killed" else "Diverged: the data ended") in job.stderr
    # The other process saw the connection close, or was told to end before it could say so.
    assert "onnection" in job.stderr or "closing signal SIGTERM" in job.stderr


ENDING = """
import atexit, sys
from qurve.cli import main
class TornDown:
    def __del__(self, write=print):
        write("torn down")
kept = TornDown()
atexit.register(print, "at exit")
main(sys.argv[1:])
"""


@pytest.mark.parametrize(("command", "code"), [("presets", 0), ("nonsense", 2)])
def test_a_process_of_a_job_ends_without_the_teardown_in_which_gloo_aborts(command: str, code: int) -> None:
    """Here what the teardown would do is only visible; with gloo's threads alive it ends some processes with -6."""
    start = [sys.executable, "-c", ENDING, command]
    alone = subprocess.run(start, env=environment(), capture_output=True, text=True)
    assert "torn down" in alone.stdout  # so that the absence below says something
    (in_job,) = together(1, *start[1:])
    assert (in_job.returncode, in_job.stderr) == (code, alone.stderr)
    assert in_job.stdout == alone.stdout.replace("torn down\n", "")
    assert in_job.stdout.endswith("at exit\n")


def test_the_timeout_is_finite() -> None:
    assert 60 < distributed.TIMEOUT.total_seconds() <= 600
