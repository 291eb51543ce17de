"""Running a study on this machine: worker processes, the cores divided among them, one run at a time each."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import multiprocessing
import multiprocessing.context
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from qurve.config import content_hash, differences, from_dict
from qurve.data.loader import TokenData
from qurve.errors import EXIT_FAILED, BadInput, Diverged
from qurve.files import write_atomic
from qurve.runfolder import RunFolder
from qurve.study.definition import Arm, Study
from qurve.train.config import RunConfig

Say = Callable[[str], None]

SECONDS_BETWEEN_ESTIMATES = 20.0


@dataclasses.dataclass(frozen=True)
class Job:
    """One run that is to be made."""

    arm: Arm
    seed: int
    config: RunConfig
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"


def run_study(
    study: Study, folder: Path, data: TokenData, *, command: str, workers: int | None = None, say: Say = print
) -> dict[str, str]:
    """Make every run of the study below `folder`; returns the name and reason of each run that failed.

    Finished (or diverged) runs of the same configuration are kept, so that the same call continues a study that was cut
    short; an unfinished one is moved aside and made anew. A run that fails stops no other. Raises `BadInput`, before
    anything is made, when a run's folder holds another configuration.
    """
    from qurve.train.runtime import available_cores, compiler, no_compiler, resolve, resolve_device
    from qurve.train.windows import check_windows

    jobs = [
        Job(arm, seed, study.run_config(arm, seed), run_path(folder, arm.name, seed))
        for arm in study.arms
        for seed in study.seeds
    ]
    devices = _devices(resolve_device(jobs[0].config.train.device), workers or min(available_cores(), len(jobs)))
    threads = jobs[0].config.train.threads or max(1, available_cores() // len(devices))
    planned = []
    for job in jobs:
        train = dataclasses.replace(job.config.train, threads=threads)
        config = resolve(dataclasses.replace(job.config, train=train), data)
        check_windows(config, data)
        planned.append(dataclasses.replace(job, config=config))
    with _claimed(folder):
        kept = {job.folder for job in planned if _is_made(job)}
        open_jobs = [job for job in planned if job.folder not in kept]

        write_atomic(folder / "study.json", study.to_json(command, earlier_seeds(study, folder)))
        for job in open_jobs:
            _move_aside(job.folder, say)
        if kept:
            say(f"{len(kept)} of {len(planned)} runs are made already and kept (remove {folder} to start afresh)")
        if not open_jobs:
            return {}
        if devices[0] == "cpu" and compiler() is None:
            say(no_compiler())
        on = f"{len(devices)} worker{'s' * (len(devices) > 1)}, {threads} thread{'s' * (threads > 1)} each"
        how = "compiled" if any(job.config.train.compile for job in planned) else "eager: nothing is compiled"
        say(f"{len(open_jobs)} runs on {on}, {how}")
        return _execute(open_jobs, devices, str(data.folder), say)


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Keep other processes from working on this study's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"another process is working on {folder}; wait for it, or give another --out") from None
        yield
    finally:
        os.close(handle)


def earlier_seeds(study: Study, folder: Path) -> list[list[int]]:
    """The sets of seeds that this study was made with before, in this folder. `BadInput` when it is another study's."""
    file = folder / "study.json"
    if not file.exists():
        return []
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
        name, arms, seeds = before["name"], [arm["name"] for arm in before["arms"]], list(before["seeds"])
        earlier = list(before.get("earlier_seeds", ()))
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise BadInput(f"{file} is damaged ({type(error).__name__}: {error}); give another --out") from None
    if name != study.name or not set(arms) <= {arm.name for arm in study.arms}:
        raise BadInput(f"{folder} holds the study {name!r} with the arms {', '.join(arms)}; give another --out")
    return earlier if seeds == list(study.seeds) else [*earlier, seeds]


def run_path(folder: Path, arm: str, seed: int) -> Path:
    return folder / "runs" / arm / f"seed-{seed}"


def _devices(device: str, workers: int) -> list[str]:
    """The device of each worker: the CPU shared by all, or one GPU each."""
    if device == "cpu":
        return ["cpu"] * workers
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] if device == "cuda" else [device]


def _is_made(job: Job) -> bool:
    """Whether the run stands finished or diverged already. Raises `BadInput` when its folder is another run's."""
    run = RunFolder(job.folder)
    if not run.config_file.exists():
        if job.folder.exists() and any(job.folder.iterdir()):
            raise BadInput(f"{job.folder} holds something that is not a run; give another --out")
        return False
    tree, stored = run.config_json()
    if stored != content_hash(job.config):
        tree.pop("format", None)
        changed = differences(from_dict(RunConfig, tree), job.config)
        listed = ", ".join(f"{key}: {old!r} there, {new!r} now" for key, (old, new) in list(changed.items())[:5])
        raise BadInput(f"{job.folder} holds a run of another configuration ({listed}); give another --out")
    return run.status()["status"] in ("finished", "diverged")


def _move_aside(folder: Path, say: Say) -> None:
    if folder.exists() and any(folder.iterdir()):
        aside = next(
            p for n in range(1, 1_000_000) if not (p := folder.with_name(f"{folder.name}.unfinished-{n}")).exists()
        )
        os.replace(folder, aside)
        say(f"an unfinished run was moved to {aside}")


def _execute(jobs: list[Job], devices: list[str], data: str, say: Say) -> dict[str, str]:
    """Hand the jobs to one process a device. A worker stays with its arm while that has runs left: it compiles once."""
    context = multiprocessing.get_context("spawn")
    waiting, failed, done = list(jobs), {}, 0
    pools = [_worker(context) for _ in devices]
    last_arm: dict[int, str] = {}
    running: dict[Future[str], tuple[int, Job]] = {}
    try:
        while waiting or running:
            for worker in range(len(pools)):
                if waiting and worker not in {w for w, _ in running.values()}:
                    job = _next_job(waiting, last_arm.get(worker), [j.arm.name for _, j in running.values()])
                    waiting.remove(job)
                    last_arm[worker] = job.arm.name
                    running[pools[worker].submit(_make, job, devices[worker], data)] = (worker, job)
            finished = wait(running, timeout=SECONDS_BETWEEN_ESTIMATES, return_when=FIRST_COMPLETED).done
            if not finished:
                say(_estimate([job for _, job in running.values()], waiting, len(pools)))
            for future in finished:
                worker, job = running.pop(future)
                done += 1
                try:
                    outcome = future.result()
                except Exception as error:  # reported, counted and carried to the exit code; the other runs go on
                    outcome = f"FAILED: {error or type(error).__name__}"
                    failed[job.name] = str(error) or type(error).__name__
                    if isinstance(error, BrokenProcessPool):
                        pools[worker] = _worker(context)
                        RunFolder(job.folder).mark_dead("failed", "its process died")
                say(f"[{done}/{len(jobs)}] {job.name}: {outcome}")
    finally:
        for pool in pools:
            for process in list((pool._processes or {}).values()) if running else []:
                process.terminate()
            pool.shutdown(cancel_futures=True)
        for _, job in running.values():  # only when this was cut short
            RunFolder(job.folder).mark_dead("stopped", "interrupted")
    return failed


def _worker(context: multiprocessing.context.SpawnContext) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=context, initializer=_obey_parent)


def _obey_parent() -> None:
    """In a worker: stop when the parent says so (Ctrl-C is the parent's affair), and end when it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def wait_for_its_end() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(EXIT_FAILED)

    threading.Thread(target=wait_for_its_end, daemon=True).start()


def _estimate(running: list[Job], waiting: list[Job], workers: int) -> str:
    """How far the running ones are, and the time left, from what their folders say."""
    words, seconds, steps = [], 0.0, 0
    left = sum(job.config.train.updates for job in waiting)
    for job in running:
        lines = RunFolder(job.folder).train_lines() if RunFolder(job.folder).metrics_file.exists() else []
        done, updates = (lines[-1]["step"] if lines else 0), job.config.train.updates
        words.append(f"{job.name}: step {done}/{updates}" + (f", loss {lines[-1]['loss']:.3f}" if lines else ""))
        seconds, steps, left = seconds + (lines[-1]["seconds"] if lines else 0), steps + done, left + updates - done
    return "; ".join(words) + (f"; about {seconds / steps * left / workers:.0f} s left" if steps else "")


def _next_job(waiting: list[Job], own: str | None, others: list[str]) -> Job:
    """The worker's own arm first, then an arm that nobody is at, then whatever is next."""
    for wanted in (lambda arm: arm == own, lambda arm: arm not in others, lambda arm: True):
        for job in waiting:
            if wanted(job.arm.name):
                return job
    raise AssertionError("no job is waiting")


def _make(job: Job, device: str, data: str) -> str:
    """In a worker: make one run; returns its outcome in words."""
    from qurve.train.loop import train

    if device != "cpu":
        import torch

        torch.cuda.set_device(device)
    try:
        run = train(job.config, job.folder, TokenData.open(data))
    except Diverged as error:
        return f"diverged ({error})"
    losses, last, environment = run.eval_lines(), run.train_lines()[-1], run.environment()
    note = f"; eager: torch.compile failed ({environment['compile_error']})" if "compile_error" in environment else ""
    return (
        f"validation loss {losses[0]['loss']:.4f} -> {losses[-1]['loss']:.4f}, "
        f"{last['tokens'] / last['seconds']:,.0f} tokens/s{note}"
    )
