"""Runs on this machine: worker processes, the cores divided among them, or one GPU each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from qurve.errors import EXIT_FAILED, EXIT_INTERRUPTED
from qurve.study.jobs import Job, Outcome, make, resolved
from qurve.train.config import RunConfig


class LocalWorkers:
    """One process a device. A worker stays with its arm while that has runs left: it compiles once."""

    def __init__(self, device: str, count: int | None, runs: int) -> None:
        """`count` workers on the CPU; None takes one a core, and no more than there are `runs`."""
        from qurve.train.runtime import available_cores, resolve_device

        cores = available_cores()
        self.devices = _devices(resolve_device(device), count or min(cores, runs))
        self.at_a_time = len(self.devices)
        self.threads = max(1, cores // self.at_a_time)
        self._pools: dict[int, ProcessPoolExecutor] = {}
        self._last_arm: dict[int, str] = {}
        self._running: dict[Future[Outcome], tuple[int, Job]] = {}

    def resolved(self, configs: list[RunConfig], data_folder: str) -> list[RunConfig]:
        return resolved(configs, self.threads, data_folder)

    def describe(self, threads: int) -> str:
        return f"{self.at_a_time} worker{'s' * (self.at_a_time > 1)}, {threads} thread{'s' * (threads > 1)} each"

    @property
    def running(self) -> list[Job]:
        return [job for _, job in self._running.values()]

    def start(self, waiting: list[Job], data_folder: str) -> None:
        for worker, device in enumerate(self.devices):
            if waiting and worker not in {w for w, _ in self._running.values()}:
                job = next_job(waiting, self._last_arm.get(worker), [job.arm.name for job in self.running])
                waiting.remove(job)
                self._last_arm[worker] = job.arm.name
                if worker not in self._pools:
                    self._pools[worker] = new_pool()
                self._running[self._pools[worker].submit(make, job, device, data_folder)] = (worker, job)

    def ended(self, seconds: float) -> list[tuple[Job, Outcome]]:
        found = []
        for future in wait(self._running, timeout=seconds, return_when=FIRST_COMPLETED).done:
            worker, job = self._running.pop(future)
            error = future.exception()
            if isinstance(error, BrokenProcessPool):
                self._pools.pop(worker).shutdown()
                found.append((job, Outcome("died", "its process died")))
            elif error is not None:  # told to stop outside of the training
                found.append((job, Outcome("stopped", str(error) or type(error).__name__)))
            else:
                found.append((job, future.result()))
        return found

    def stop(self) -> None:
        busy = [self._pools[worker] for worker, _ in self._running.values()]
        processes = [process for pool in busy for process in list((pool._processes or {}).values())]
        try:
            for process in processes:
                process.terminate()
            wait(self._running)
        except KeyboardInterrupt:
            for process in processes:
                process.kill()
            raise

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)


def new_pool() -> ProcessPoolExecutor:
    """One worker process."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_obey_parent)


def next_job(waiting: list[Job], own: str | None, others: list[str]) -> Job:
    """The worker's own arm first, then an arm that nobody is at, then whatever is next."""
    for wanted in (lambda arm: arm == own, lambda arm: arm not in others, lambda arm: True):
        for job in waiting:
            if wanted(job.arm.name):
                return job
    raise AssertionError("no job is waiting")


def _devices(device: str, workers: int) -> list[str]:
    """The device of each worker: the CPU shared by all, or one GPU each."""
    if device == "cpu":
        return ["cpu"] * workers
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] if device == "cuda" else [device]


def _obey_parent() -> None:
    """In a worker: stop when the parent says so, and end when it is gone.

    A session of its own keeps the terminal's Ctrl-C away: beside the parent's, it would be the second signal to stop.
    """
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_INTERRUPTED))  # a training takes it over while it lasts

    def wait_for_its_end() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(EXIT_FAILED)

    threading.Thread(target=wait_for_its_end, daemon=True).start()
