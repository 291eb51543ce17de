"""Running a study: what is to be made, by whom, and what happens when a run breaks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from qurve.data.loader import TokenData
from qurve.errors import QurveError
from qurve.files import claimed, write_atomic
from qurve.runfolder import RunFolder, Status
from qurve.study.definition import Study
from qurve.study.jobs import Job, Outcome, earlier_seeds, is_made, jobs_of
from qurve.study.local import LocalWorkers
from qurve.study.on_ray import Cluster, RayWorkers
from qurve.train.config import RunConfig

Say = Callable[[str], None]

SECONDS_BETWEEN_ESTIMATES = 20.0
MACHINES_LOST = 5
"""How often a run may lose its machine before it counts as failed: it is no fault of the run, so it is no retry."""


class Workers(Protocol):
    """Where runs are made: processes of this machine, or a Ray cluster."""

    at_a_time: int
    """Runs made at the same time, as far as it is known."""

    def describe(self, threads: int) -> str: ...

    def resolved(self, configs: list[RunConfig], data_folder: str) -> list[RunConfig]:
        """The configurations as the machines that do the work complete them."""

    @property
    def running(self) -> list[Job]: ...

    def start(self, waiting: list[Job], data_folder: str) -> None:
        """Take from `waiting` what there is room for."""

    def ended(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """Runs that have ended, waiting for the first of them at most so long."""

    def stop(self) -> None:
        """Have running trainings finish their step, save and end; an interrupt while that lasts ends them at once."""

    def close(self) -> None:
        """Let go of the processes, or of the cluster."""


def run_study(
    study: Study,
    folder: Path,
    data: TokenData,
    *,
    command: str,
    workers: int | None = None,
    cluster: Cluster | None = None,
    retries: int = 1,
    say: Say = print,
) -> dict[str, str]:
    """Make every run of the study below `folder`; returns the name and reason of each run that failed.

    Finished (or diverged) runs of the same configuration are kept and unfinished ones continued from their last
    checkpoint, so that the same call continues a study that was cut short. A run that fails is tried again `retries`
    times, from its checkpoint, and stops no other. Raises `BadInput`, before anything is made, when a run's folder
    holds another configuration.

    Runs are made by `workers` processes of this machine, or on a Ray `cluster`, whose machines must see `folder` and
    the data at the same paths.
    """
    with contextlib.ExitStack() as ending:
        if cluster is None:
            jobs, data_folder = jobs_of(study, folder), str(data.folder)
            place: Workers = LocalWorkers(jobs[0].config.train.device, workers, len(jobs))
        else:
            jobs, data_folder = jobs_of(study, folder.absolute()), str(data.folder.absolute())
            place = RayWorkers(cluster)
        ending.callback(place.close)
        configs = place.resolved([job.config for job in jobs], data_folder)
        jobs = [dataclasses.replace(job, config=config) for job, config in zip(jobs, configs, strict=True)]
        folder.mkdir(parents=True, exist_ok=True)
        ending.enter_context(claimed(folder))
        open_jobs = [job for job in jobs if not is_made(job)]

        write_atomic(folder / "study.json", study.to_json(command, earlier_seeds(study, folder)))
        if kept := len(jobs) - len(open_jobs):
            say(f"{kept} of {len(jobs)} runs are made already and kept (remove {folder} to start afresh)")
        if not open_jobs:
            return {}
        if begun := sum(RunFolder(job.folder).is_begun() for job in open_jobs):
            say(f"{begun} that {'was' if begun == 1 else 'were'} begun will be continued from the last checkpoint")
        train = configs[0].train
        if cluster is None:
            _mention_no_compiler(train.device, say)
        how = "compiled" if any(config.train.compile for config in configs) else "eager: nothing is compiled"
        say(f"{len(open_jobs)} runs on {place.describe(train.threads or 1)}, {how}")
        return _execute(open_jobs, place, data_folder, retries, say)


def _mention_no_compiler(device: str, say: Say) -> None:
    from qurve.train.runtime import compiler, no_compiler

    if device == "cpu" and compiler() is None:
        say(no_compiler())


def _execute(jobs: list[Job], workers: Workers, data_folder: str, retries: int, say: Say) -> dict[str, str]:
    """Hand the jobs out until each is made or has failed for good."""
    waiting, failed, done = list(jobs), {}, 0
    again = {"failed": retries, "died": retries, "lost": MACHINES_LOST}
    broken: Counter[tuple[str, str]] = Counter()
    try:
        while waiting or workers.running:
            workers.start(waiting, data_folder)
            ended = workers.ended(SECONDS_BETWEEN_ESTIMATES)
            if not ended:
                say(estimate(workers.running, waiting, workers.at_a_time))
            for job, outcome in ended:
                if outcome.kind in ("died", "lost"):
                    outcome = dataclasses.replace(outcome, words=_mark_dead(job, "failed", outcome.words))
                broken[job.name, outcome.kind] += 1
                times, most = broken[job.name, outcome.kind], again.get(outcome.kind, 0)
                if times <= most:
                    waiting.append(job)
                    next_try = f"it will be continued from its last checkpoint ({times} of {most})"
                    say(f"{job.name}: {outcome.words}; {next_try}")
                    continue
                done += 1
                if outcome.kind != "made":
                    failed[job.name] = outcome.words
                marked = {"made": "", "stopped": "STOPPED: "}.get(outcome.kind, "FAILED: ")
                say(f"[{done}/{len(jobs)}] {job.name}: {marked}{outcome.words}")
    finally:
        if cut_short := workers.running:
            say("stopping: running trainings finish their step and save (interrupt again to end them at once)")
            try:
                workers.stop()
            finally:
                for job in cut_short:
                    _mark_dead(job, "stopped", "interrupted")
                say("stopped; the same command goes on from here")
    return failed


def _mark_dead(job: Job, status: Status, why: str) -> str:
    """Note in the run's folder what became of it. Returns that, and what is wrong with a folder that cannot tell.

    The damage is this run's alone: it may be mended by its next try, and no other run waits for that.
    """
    try:
        RunFolder(job.folder).mark_dead(status, why)
    except (QurveError, OSError) as error:
        return f"{why}; its folder is damaged: {error}"
    return why


def estimate(running: list[Job], waiting: list[Job], at_a_time: int) -> str:
    """How far the running ones are, and the time left, from what their folders say."""
    words, seconds, steps = [], 0.0, 0
    left = sum(job.config.train.updates for job in waiting)
    for job in running:
        try:
            lines = RunFolder(job.folder).train_lines() if RunFolder(job.folder).metrics_file.exists() else []
        except (QurveError, OSError) as error:
            words.append(f"{job.name}: damaged: {error}")
            continue
        done, updates = (lines[-1]["step"] if lines else 0), job.config.train.updates
        words.append(f"{job.name}: step {done}/{updates}" + (f", loss {lines[-1]['loss']:.3f}" if lines else ""))
        seconds, steps, left = seconds + (lines[-1]["seconds"] if lines else 0), steps + done, left + updates - done
    return "; ".join(words) + (f"; about {seconds / steps * left / at_a_time:.0f} s left" if steps else "")
