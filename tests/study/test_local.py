"""Runs on this machine: which worker takes which run, and what becomes of workers that end."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurve.study import local
from qurve.study.definition import Arm
from qurve.study.jobs import Job, Outcome
from qurve.study.local import LocalWorkers, next_job
from tiny import InProcess, tiny


def jobs_of(arms: dict[str, int]) -> list[Job]:
    config = tiny()
    return [
        Job(Arm(name, name, config), seed, config, Path(name) / str(seed))
        for name, n in arms.items()
        for seed in range(n)
    ]


def handed_out(jobs: list[Job], n_workers: int, ends: Iterator[int]) -> list[tuple[int, Job]]:
    """Play the executor: `ends` says, bit by bit, which of the busy workers are done next."""
    waiting, busy, last, order = list(jobs), {}, {}, []
    while waiting or busy:
        for worker in range(n_workers):
            if waiting and worker not in busy:
                job = next_job(waiting, last.get(worker), [j.arm.name for j in busy.values()])
                waiting.remove(job)
                busy[worker], last[worker] = job, job.arm.name
                order.append((worker, job))
        done = next(ends)
        for bit, worker in enumerate(sorted(busy)):
            if done >> bit & 1:
                busy.pop(worker)
    return order


@given(
    arms=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 4), min_size=1),
    n_workers=st.integers(1, 7),
    ends=st.lists(st.integers(0, 127).map(lambda bits: bits | 1), min_size=30, max_size=30),
)
def test_every_job_is_handed_out_once_and_a_worker_leaves_an_arm_only_when_none_is_left(
    arms: dict[str, int], n_workers: int, ends: list[int]
) -> None:
    jobs = jobs_of(arms)
    order = handed_out(jobs, n_workers, iter(ends))
    assert sorted(job.name for _, job in order) == sorted(job.name for job in jobs)
    own: dict[int, str] = {}
    for place, (worker, job) in enumerate(order):
        if own.get(worker, job.arm.name) != job.arm.name:
            assert own[worker] not in {later.arm.name for _, later in order[place:]}
        own[worker] = job.arm.name


def test_a_workers_own_arm_comes_before_one_that_nobody_is_at() -> None:
    waiting = jobs_of({"a": 1, "b": 1})
    assert next_job(waiting, "b", []).arm.name == "b"
    assert next_job(waiting, "b", ["b"]).arm.name == "b"
    assert next_job(waiting, "c", ["a"]).arm.name == "b"
    assert next_job(waiting, None, ["a", "b"]).arm.name == "a"


def test_workers_spread_over_the_arms() -> None:
    order = handed_out(jobs_of({"a": 3, "b": 3, "c": 3}), 3, iter([1] * 9))
    assert [job.arm.name for _, job in order[:3]] == ["a", "b", "c"]


def test_one_worker_takes_an_arms_seeds_in_succession() -> None:
    order = handed_out(jobs_of({"a": 2, "b": 2}), 1, iter([1] * 4))
    assert [job.name for _, job in order] == ["a, seed 0", "a, seed 1", "b, seed 0", "b, seed 1"]


def test_a_second_interrupt_kills_the_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[str] = []

    class Busy(InProcess):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            process = SimpleNamespace(terminate=lambda: told.append("end"), kill=lambda: told.append("end now"))
            self._processes = {1: process}

        def submit(self, function: Any, *args: Any) -> Future[Any]:
            return Future()

        def shutdown(self, **kwargs: Any) -> None:
            told.append("closed")

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "ProcessPoolExecutor", Busy)
    workers = LocalWorkers("cpu", 1, 1)
    workers.start([Job(Arm("a", "A", tiny()), 1, tiny(), tmp_path / "a")], "")
    monkeypatch.setattr(local, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        workers.stop()
    workers.close()
    assert told == ["end", "end now", "closed"]


def test_a_died_worker_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Dying(InProcess):
        made = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            Dying.made += 1

        def submit(self, function: Any, *args: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(BrokenProcessPool("gone"))
            return future

    monkeypatch.setattr(local, "ProcessPoolExecutor", Dying)
    workers = LocalWorkers("cpu", 1, 1)
    job = Job(Arm("a", "A", tiny()), 1, tiny(), tmp_path / "a")
    for count in (1, 2):
        waiting = [job]
        workers.start(waiting, "")
        assert (waiting, workers.running) == ([], [job])
        assert workers.ended(1) == [(job, Outcome("died", "its process died"))]
        assert (workers.running, Dying.made) == ([], count)


PARENT = """
import os, signal, sys
from qurve.study.local import new_pool

if __name__ == "__main__":
    pool = new_pool()
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(signal.pause)
    sys.stdin.read()
"""


def test_a_killed_parent_leaves_no_worker_behind(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            assert select.select([worker], [], [], 30)[0], "the worker lives on"
        finally:
            os.close(worker)
