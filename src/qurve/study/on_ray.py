"""Runs on a Ray cluster: one task a run, with its own share of CPUs and GPUs.

The machines share a file system: a run whose machine is lost continues on another one from its last checkpoint. Ray is
imported when a cluster is asked for, and not before.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from qurve.errors import BadInput, QurveError
from qurve.files import claimed
from qurve.study.jobs import Job, Outcome, make, resolved
from qurve.train.config import RunConfig

LAST_BREATH = 60.0
"""Seconds that the process of a lost machine may take to end and to let go of its run."""
OBJECT_STORE_BYTES = 2**27
"""Of a cluster that is started here; Ray would take a third of the memory. Nothing large goes through it."""


@dataclass(frozen=True)
class Cluster:
    """Which cluster, and what of it each run takes."""

    address: str = "auto"
    """`HOST:PORT`, or `auto`: the cluster that this machine belongs to, else one that is started on it."""
    cpus_per_run: int = 1
    """Also the run's threads, where the study does not give them."""
    gpus_per_run: float = 0.0

    def __post_init__(self) -> None:
        if self.cpus_per_run < 1:
            raise BadInput(f"--cpus-per-run {self.cpus_per_run}: it must be at least 1")
        if self.gpus_per_run < 0 or (self.gpus_per_run > 1 and self.gpus_per_run != int(self.gpus_per_run)):
            raise BadInput(f"--gpus-per-run {self.gpus_per_run:g}: a share of one GPU, or a whole number")

    @property
    def in_words(self) -> str:
        gpus = f" and {self.gpus_per_run:g} GPU{'s' * (self.gpus_per_run > 1)}" if self.gpus_per_run else ""
        return f"{self.cpus_per_run} CPU{'s' * (self.cpus_per_run > 1)}{gpus}"


class RayWorkers:
    """Tasks of a Ray cluster. Raises `BadInput` when there is no Ray, no cluster, or no machine large enough."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._ray = cluster, _import_ray()
        self._started = not self._ray.is_initialized()
        if self._started:
            _connect(self._ray, cluster)
        self._running: dict[Any, Job] = {}
        self.at_a_time = self._room()
        if not self.at_a_time:
            self.close()
            raise BadInput(f"no machine of the Ray cluster has {cluster.in_words}; a run would wait for ever")
        share = {"num_cpus": cluster.cpus_per_run, "num_gpus": cluster.gpus_per_run}
        # Ray would repeat a task on its own account, without a word: who counts the failures is `execute`.
        self._task = self._ray.remote(**share, max_retries=0)(_in_worker)

    def describe(self, threads: int) -> str:
        return (
            f"a Ray cluster, {self._cluster.in_words} and {threads} thread{'s' * (threads > 1)} each, "
            f"{self.at_a_time} at a time"
        )

    def resolved(self, configs: list[RunConfig], data_folder: str) -> list[RunConfig]:
        if not self._cluster.gpus_per_run and any(config.train.device.startswith("cuda") for config in configs):
            raise BadInput("a run on a GPU needs one from Ray: add --gpus-per-run 1, or a share such as 0.5")
        task = self._call(resolved, configs, self._cluster.cpus_per_run, data_folder)
        try:
            found: list[RunConfig] = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", error)
            if isinstance(cause, QurveError):
                raise cause from None
            reason = (str(cause).strip().splitlines() or [type(cause).__name__])[-1]
            raise QurveError(
                f"a machine of the Ray cluster cannot plan the study ({reason}); is the same qurve installed there?"
            ) from error
        return found

    @property
    def running(self) -> list[Job]:
        return list(self._running.values())

    def start(self, waiting: list[Job], data_folder: str) -> None:
        self.at_a_time = max(1, self._room())  # machines come and go; with none left, Ray waits for one
        while waiting and len(self._running) < self.at_a_time:
            job = waiting.pop(0)
            device = job.config.train.device
            self._running[self._call(_make_once_free, job, device, data_folder)] = job

    def ended(self, seconds: float) -> list[tuple[Job, Outcome]]:
        finished, _ = self._ray.wait(list(self._running), timeout=seconds)
        return [(self._running.pop(reference), self._outcome(reference)) for reference in finished]

    def stop(self) -> None:
        references = list(self._running)
        try:
            for reference in references:
                self._ray.cancel(reference)  # an interrupt in the worker, which a training takes as one
            self._ray.wait(references, num_returns=len(references))
        except KeyboardInterrupt:
            for reference in references:
                self._ray.cancel(reference, force=True)
            raise

    def close(self) -> None:
        if self._started:
            self._ray.shutdown()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._task.remote(sys.path, pickle.dumps((function, arguments)))

    def _outcome(self, reference: Any) -> Outcome:
        errors = self._ray.exceptions
        try:
            outcome: Outcome = self._ray.get(reference)
        except (errors.NodeDiedError, errors.LocalRayletDiedError):
            return Outcome("lost", "its machine is gone")
        except (errors.WorkerCrashedError, errors.OutOfMemoryError) as error:
            return Outcome("died", f"its process died ({str(error).splitlines()[0]})")
        except errors.TaskCancelledError:
            return Outcome("stopped", "cancelled")
        except errors.RayError as error:
            return Outcome("failed", (str(error).splitlines() or [type(error).__name__])[-1])
        return outcome

    def _room(self) -> int:
        """Runs that fit on the machines that are alive, were there no other work."""
        room = 0
        for node in self._ray.nodes():
            has = node["Resources"] if node["Alive"] else {}
            fits = int(has.get("CPU", 0) // self._cluster.cpus_per_run)
            if self._cluster.gpus_per_run:
                fits = min(fits, int(has.get("GPU", 0) / self._cluster.gpus_per_run + 1e-9))
            room += fits
        return room


def _in_worker(path: list[str], call: bytes) -> Any:
    """What can be imported where the study was started can be here, before a configuration needs it to be unpickled."""
    sys.path += [folder for folder in path if folder not in sys.path]
    function, arguments = pickle.loads(call)
    return function(*arguments)


def _make_once_free(job: Job, device: str, data_folder: str) -> Outcome:
    """In a worker: the process of a lost machine may still be about to end. It holds the run's lock until then."""
    deadline = time.monotonic() + LAST_BREATH
    while job.folder.exists() and time.monotonic() < deadline:
        try:
            with claimed(job.folder):
                break
        except BadInput:
            time.sleep(0.5)
    return make(job, device, data_folder)


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports home unless told not to
    try:
        import ray
    except ImportError:
        raise BadInput("Ray is not installed: pip install 'qurve[ray]'") from None
    return ray


def _connect(ray: Any, cluster: Cluster) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    on_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if cluster.address != "auto":
            _knock(cluster.address)
        ray.init(address=cluster.address, **quiet)
    except ConnectionError:
        if cluster.address != "auto":
            raise BadInput(f"no Ray cluster answers at {cluster.address} (see `ray status` on its head node)") from None
        _listen_on_loopback_only()
        from qurve.train.runtime import available_cores

        ray.init(
            address="local",
            num_cpus=available_cores(),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            **quiet,
        )
    finally:
        if on_main_thread:  # Ray takes SIGTERM for itself
            signal.signal(signal.SIGTERM, handler)


def _knock(address: str) -> None:
    """Raise `ConnectionError` at once where nobody listens: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise BadInput(f"--ray {address}: write auto, or the head node's HOST:PORT (6379 unless it was given another)")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(str(error)) from None


def _listen_on_loopback_only() -> None:
    """Whoever reaches a cluster's ports can run code on it, and Ray opens them to the network, save on macOS."""
    from ray._private import ray_constants

    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    with suppress(AttributeError):
        ray_constants.ENABLE_RAY_CLUSTER = False
