"""Running a study: what is to be made, by whom, and what happens when a run breaks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qurve.data.loader import TokenData
from qurve.errors import BadInput, Busy, QurveError
from qurve.files import check_folders, claimed, write_atomic
from qurve.runfolder import RunFolder, Status
from qurve.study.definition import Study
from qurve.study.jobs import Job, Outcome, as_begun, is_made, jobs_of, scored, seen_before, trial_jobs
from qurve.study.local import LocalWorkers
from qurve.study.on_ray import Cluster, RayWorkers
from qurve.study.pool import check_pool, in_pool, link, look_again
from qurve.study.search import Score, Search, bound, planned, trials
from qurve.study.searched import evidence
from qurve.study.source import FOLDER as DEFINITION
from qurve.study.source import keep
from qurve.train.config import RunConfig

Say = Callable[[str], None]

SECONDS_BETWEEN_ESTIMATES = 20.0
SECONDS_BETWEEN_LOOKS = 5.0
"""At runs that another study is making."""
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
    pool: Path | None = None,
    definition: Path | None = None,
    say: Say = print,
) -> dict[str, str]:
    """Make every run of the study below `folder`; returns the name and reason of each run that failed.

    Of a study with a `Search`, its trials are made first (below `folder`/search). Then each arm is trained at its own
    best point, and each but the baseline at the baseline's best point as well. A trial that fails ends the call there:
    a choice among fewer points than the others had would be none.

    Finished (or diverged) runs of the same configuration are kept and unfinished ones continued from their last
    checkpoint, so that the same call continues a study that was cut short. A run that fails is tried again `retries`
    times, from its checkpoint, and stops no other. Raises `BadInput`, before anything is made, when a run's folder
    holds another configuration.

    Runs are made by `workers` processes of this machine, or on a Ray `cluster`, whose machines must see `folder` and
    the data at the same paths. With a `pool` they are made there and linked to, and what is there already is not made
    again (`qurve.study.pool`). The file that the study comes from, its `definition`, is kept in the folder.
    """
    if isinstance(study.search, Search):
        _check_splits(study)
    with _making(study, folder, data, workers, cluster, retries, pool, say) as making:
        making.check(study)
        making.claim()
        seen, file = seen_before(study, making.folder), making.folder / "study.json"
        if isinstance(study.search, Search):
            if not file.exists():
                write_atomic(file, study.to_json(command, seen))
            if definition is not None:
                keep(definition, making.folder)
            found, failed = making.searched(study, study.search)
            if failed:
                return failed
            study = study.settled(found)
        jobs = making.resolved(jobs_of(study, making.folder))
        is_open = [not is_made(job) for job in jobs]
        write_atomic(file, study.to_json(command, look_again(making.pool, study, jobs, seen)))
        if definition is not None:
            keep(definition, making.folder)
        return making.make(jobs, is_open)


def run_search(
    study: Study,
    folder: Path,
    data: TokenData,
    *,
    workers: int | None = None,
    retries: int = 1,
    pool: Path | None = None,
    say: Say = print,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Make the trials of the study's `Search` below `folder`/search, and no other run.

    Returns its evidence, and the name and reason of each run that failed; with one of these nothing is chosen.
    """
    if not isinstance(study.search, Search):
        raise BadInput(f"study {study.name} has no search to make")
    with _making(study, folder, data, workers, None, retries, pool, say) as making:
        making.check(study)
        making.claim()
        return making.searched(study, study.search)


@dataclass(frozen=True)
class Made:
    """What of a study is in a pool already."""

    study: Study
    """Settled, where its search is over."""
    trials: int
    """Runs of its search."""
    runs: dict[str, int]
    """Runs of each of its arms; empty while its search is not over, which decides what they are."""


def made_already(study: Study, data: TokenData, pool: Path) -> Made:
    """What `run_study` would find in the pool on this machine, with as many workers as it takes by itself.

    Makes nothing. Raises `BadInput` for what cannot be trained here.
    """
    search, scores = study.search, list[Score]()
    with _making(study, pool, data, None, None, 0, pool, lambda _: None) as making:
        while isinstance(search, Search) and (wanted := trials(search, study.configs, scores)):
            jobs = making.resolved(trial_jobs(study, wanted, pool))
            found = [score for pair in zip(wanted, jobs, strict=True) if (score := scored(*pair)) is not None]
            scores += found
            if len(found) < len(wanted):
                return Made(study, len(scores), {})
        if isinstance(search, Search):
            study = study.settled(evidence(search, study.configs, scores))
        jobs = making.resolved(jobs_of(study, pool))
        return Made(study, len(scores), Counter(job.arm.name for job in jobs if is_made(job)))


def _check_splits(study: Study) -> None:
    config = study.arms[0].config
    splits = config.eval.splits
    wanted = json.dumps([*splits, "test"] if "test" not in splits else splits, separators=(",", ":"))
    if config.data.order == "paper":
        raise BadInput(
            f"study {study.name}: its search chooses on val, so its arms are compared on test, for which the paper's "
            f"order has no evaluation table; take --set data.order=epochs --set 'eval.splits={wanted}'"
        )
    if "test" not in splits:
        raise BadInput(
            f"study {study.name}: its search chooses on val, so its arms are compared on test, which is not in "
            f"eval.splits; add it in the study, or with --set 'eval.splits={wanted}'"
        )


@contextlib.contextmanager
def _making(
    study: Study,
    folder: Path,
    data: TokenData,
    workers: int | None,
    cluster: Cluster | None,
    retries: int,
    pool: Path | None,
    say: Say,
) -> Iterator[_Making]:
    check_folders(folder, "runs", "search", DEFINITION)
    if pool is not None:
        check_pool(pool)
    n_runs = len(study.arms) * len(study.seeds)
    if isinstance(study.search, Search):
        n_runs = max(n_runs, len(trials(study.search, study.configs, ())))
    if cluster is None:
        data_folder = str(data.folder)
        place: Workers = LocalWorkers(study.arms[0].config.train.device, workers, n_runs)
    else:
        folder, data_folder = folder.absolute(), str(data.folder.absolute())
        pool = None if pool is None else pool.absolute()
        place = RayWorkers(cluster)
    with contextlib.ExitStack() as ending:
        ending.callback(place.close)
        yield _Making(folder, place, data_folder, retries, pool, say, ending, is_local=cluster is None)


@dataclass
class _Making:
    """What the runs of one study are made with."""

    folder: Path
    place: Workers
    data_folder: str
    retries: int
    pool: Path | None
    say: Say
    ending: contextlib.ExitStack
    is_local: bool

    def check(self, study: Study) -> None:
        """Raise `BadInput` for what cannot run here: the arms as they are, and the first trials of a search."""
        search = study.search
        first = trials(search, study.configs, ()) if isinstance(search, Search) else []
        self.resolved([*jobs_of(study, self.folder), *trial_jobs(study, first, self.folder)])

    def claim(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ending.enter_context(claimed(self.folder))

    def resolved(self, jobs: list[Job]) -> list[Job]:
        """The jobs with complete configurations, each at its place in the pool if there is one."""
        configs = self.place.resolved([job.config for job in jobs], self.data_folder) if jobs else []
        jobs = [
            as_begun(dataclasses.replace(job, config=config), job.config)
            for job, config in zip(jobs, configs, strict=True)
        ]
        return jobs if self.pool is None else [in_pool(job, self.pool) for job in jobs]

    def make(self, jobs: list[Job], is_open: list[bool], what: str = "", later: int = 0) -> dict[str, str]:
        """Make the open ones of the jobs. `later` counts the updates that are still to come after them."""
        open_jobs = [job for job, still in zip(jobs, is_open, strict=True) if still]
        for job in jobs:
            link(job)
        if kept := len(jobs) - len(open_jobs):
            hint = f" (remove {self.folder} to start afresh)" if self.pool is None else ""  # others need the pool's
            self.say(f"{what}{kept} of {len(jobs)} runs are made already and kept{hint}")
        if not open_jobs:
            return {}
        if begun := sum(RunFolder(job.folder).is_begun() for job in open_jobs):
            are = "was" if begun == 1 else "were"
            self.say(f"{what}{begun} that {are} begun will be continued from the last checkpoint")
        train = open_jobs[0].config.train
        if self.is_local:
            _mention_no_compiler(train.device, self.say)
        how = "compiled" if any(job.config.train.compile for job in open_jobs) else "eager: nothing is compiled"
        self.say(f"{what}{len(open_jobs)} runs on {self.place.describe(train.threads or 1)}, {how}")
        return _execute(open_jobs, self.place, self.data_folder, self.retries, self.say, later)

    def searched(self, study: Study, search: Search) -> tuple[dict[str, Any], dict[str, str]]:
        """The search's evidence, and its failures; trials that are made already are read and not made again."""
        first = sum(sum(runs.values()) for runs in planned(search, study.configs).values())
        finals = (2 * len(study.arms) - 1) * len(study.seeds)
        how_many = {"exactly": f"{first} runs"}.get(bound(search), f"{bound(search)} {first} runs")
        self.say(f"a search of {how_many}, then at most {finals} runs of the chosen points")
        finals *= study.arms[0].config.train.updates
        scores: list[Score] = []
        facts: dict[str, Any] = {}
        while wanted := trials(search, study.configs, scores):
            jobs = self.resolved(trial_jobs(study, wanted, self.folder))
            failed = self.make(jobs, [not is_made(job) for job in jobs], "search: ", finals)
            found = [scored(*pair) for pair in zip(wanted, jobs, strict=True)]
            scores += [score for score in found if score is not None]
            for job, score in zip(jobs, found, strict=True):
                if score is None:
                    failed.setdefault(job.name, "it was not made")
            facts = facts or _facts(jobs)
            if failed:
                return evidence(search, study.configs, scores, **facts), failed
        return evidence(search, study.configs, scores, **facts), {}


def _facts(jobs: list[Job]) -> dict[str, Any]:
    """What a search's losses hold for: the batches' size, the data and the machine."""
    config = jobs[0].config
    facts = {"tokens_per_step": config.train.tokens_per_step, "data_fingerprint": config.data.fingerprint}
    try:
        found = RunFolder(jobs[0].folder).environment()
    except QurveError:
        return facts
    keys = ("cpu", "cores", "torch", "precision", "threads", "compiled")
    return {**facts, "machine": {key: found[key] for key in keys if key in found}}


def _mention_no_compiler(device: str, say: Say) -> None:
    from qurve.train.runtime import compiler, no_compiler

    if device == "cpu" and compiler() is None:
        say(no_compiler())


def _execute(
    jobs: list[Job], workers: Workers, data_folder: str, retries: int, say: Say, later: int = 0
) -> dict[str, str]:
    """Hand the jobs out until each is made or has failed for good.

    A job that another study is at waits until the others are done. `later` counts updates that come after all of them,
    for the time left.
    """
    waiting, failed, done = list(jobs), dict[str, str](), 0
    elsewhere, waited_for = list[Job](), set[str]()
    pace: float | None = None
    again = {"failed": retries, "died": retries, "lost": MACHINES_LOST}
    broken: Counter[tuple[str, str]] = Counter()
    try:
        while waiting or workers.running or elsewhere:
            if not waiting and not workers.running:
                time.sleep(SECONDS_BETWEEN_LOOKS)
                waiting, elsewhere = elsewhere, []
            workers.start(waiting, data_folder)
            ended = workers.ended(SECONDS_BETWEEN_ESTIMATES)
            if not ended:
                say(estimate(workers.running, waiting + elsewhere, workers.at_a_time, later, pace))
            for job, outcome in ended:
                if outcome.kind == "busy":
                    if job.name not in waited_for:
                        say(f"{job.name}: {outcome.words}; it is looked at again when the others are done")
                    waited_for.add(job.name)
                    elsewhere.append(job)
                    continue
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
                if pace is None and outcome.kind == "made" and (pace := _pace(job)) is not None and done < len(jobs):
                    say(estimate(workers.running, waiting + elsewhere, workers.at_a_time, later, pace))
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
        if RunFolder(job.folder).status_file.exists():
            with claimed(job.folder):
                RunFolder(job.folder).mark_dead(status, why)
    except Busy:  # it has gone on already, in another study's hands
        return why
    except (QurveError, OSError) as error:
        return f"{why}; its folder is damaged: {error}"
    return why


def _pace(job: Job) -> float | None:
    """Seconds a step of a run that is made."""
    try:
        last = RunFolder(job.folder).train_lines()[-1]
    except (QurveError, OSError, IndexError):
        return None
    return float(last["seconds"]) / int(last["step"])


def estimate(running: list[Job], waiting: list[Job], at_a_time: int, later: int = 0, pace: float | None = None) -> str:
    """How far the running ones are, and the time left, from what their folders say.

    `later` counts updates that come after all of these; `pace`, seconds a step, is for while none has made a step.
    """
    words, seconds, steps = [], 0.0, 0
    left = later + sum(job.config.train.updates for job in waiting)
    for job in running:
        try:
            lines = RunFolder(job.folder).train_lines() if RunFolder(job.folder).metrics_file.exists() else []
        except (QurveError, OSError) as error:
            words.append(f"{job.name}: damaged: {error}")
            continue
        done, updates = (lines[-1]["step"] if lines else 0), job.config.train.updates
        words.append(f"{job.name}: step {done}/{updates}" + (f", loss {lines[-1]['loss']:.3f}" if lines else ""))
        seconds, steps, left = seconds + (lines[-1]["seconds"] if lines else 0), steps + done, left + updates - done
    pace = seconds / steps if steps else pace
    if pace is not None:
        words.append(f"about {pace * left / at_a_time:.0f} s left")
    return "; ".join(words)
