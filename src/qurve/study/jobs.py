"""The runs that a study consists of: where each stands, what is made already, and the making of one."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal

from qurve.config import content_hash, from_dict, hashed_differences
from qurve.data.loader import TokenData
from qurve.errors import BadInput, Busy, Diverged, QurveError, Stopped
from qurve.runfolder import RunFolder
from qurve.study.definition import Arm, Study
from qurve.study.looks import Seen
from qurve.study.same_run import begun_runs, ended_by_another_bound, was_seen
from qurve.study.search import Score, Trial, trial_config, trial_name
from qurve.study.study_json import read_study
from qurve.train.config import RunConfig


@dataclasses.dataclass(frozen=True)
class Job:
    """One run that is to be made."""

    arm: Arm
    seed: int
    config: RunConfig
    folder: Path
    link: Path | None = None
    """Where the study finds it, when `folder` is a pool's."""

    @property
    def name(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a run. Plain words, not the exception itself: not every exception can cross to another process."""

    kind: Literal["made", "failed", "died", "lost", "busy", "stopped"]
    """`made`: finished or diverged, nothing is left to do. `died`: its process is gone; `lost`: so is the machine.
    `busy`: another process, of another study, is making it."""
    words: str


def run_path(folder: Path, arm: str, seed: int) -> Path:
    return folder / "runs" / arm / f"seed-{seed}"


def jobs_of(study: Study, folder: Path) -> list[Job]:
    return [
        Job(arm, seed, study.run_config(arm, seed), run_path(folder, arm.name, seed))
        for arm in study.arms
        if not study.is_out(arm)
        for seed in study.seeds
    ]


def trial_jobs(study: Study, trials: list[Trial], folder: Path) -> list[Job]:
    """The runs of a search, in the order of its trials, each below `folder`/search."""
    arms, found = {arm.name: arm for arm in study.arms}, []
    for trial in trials:
        arm = arms[trial.arm]
        name, config = trial_name(trial, arm.config), trial_config(arm.config, trial)
        path = run_path(folder / "search", name, trial.seed)
        found.append(Job(Arm(name, name, config), trial.seed, config, path))
    return found


def scored(trial: Trial, job: Job) -> Score | None:
    """What came of a trial that is made; None for one that is not, or cannot be read."""
    try:
        if not is_made(job):
            return None
        run = RunFolder(job.folder)
        status, losses = str(run.status()["status"]), run.eval_lines()
    except (QurveError, OSError):
        return None
    loss = losses[-1]["loss"] if status == "finished" and losses else None
    return Score(trial, loss if loss is not None and math.isfinite(loss) else None, status)


def resolved(configs: list[RunConfig], threads: int, data_folder: str) -> list[RunConfig]:
    """The configurations as the machine that this runs on completes them. `BadInput` for one that it cannot train."""
    from qurve.train.runtime import resolve
    from qurve.train.windows import check_windows

    data, found = TokenData.open(data_folder), []
    for config in configs:
        train = dataclasses.replace(config.train, threads=config.train.threads or threads)
        found.append(resolve(dataclasses.replace(config, train=train), data))
        check_windows(found[-1], data)
    return found


def as_begun(job: Job, wanted: RunConfig) -> Job:
    """With the threads that its run began with, where its arm leaves them open (`wanted`): a call with more runs, or a
    machine with more cores, divides these otherwise, and the study is the same."""
    run = RunFolder(job.folder)
    if wanted.train.threads is not None or not run.is_begun():
        return job
    try:
        threads = run.config_json()[0]["train"]["threads"]
    except (QurveError, OSError, KeyError, TypeError):  # `is_made` says what is wrong with it
        return job
    train = dataclasses.replace(job.config.train, threads=threads if type(threads) is int else job.config.train.threads)
    return dataclasses.replace(job, config=dataclasses.replace(job.config, train=train))


def is_made(job: Job) -> bool:
    """Whether the run stands finished or diverged already. Raises `BadInput` when its folder is another run's.

    A damaged one counts as not made: its training mends it from its checkpoint or says what is wrong, and the other
    runs go on.
    """
    run = RunFolder(job.folder)
    if not run.is_begun():
        run.refuse_foreign()
        return False
    try:
        tree, stored = run.config_json()
        tree.pop("format", None)
        there, state = from_dict(RunConfig, tree), run.status()
    except (QurveError, OSError):
        return False
    if stored != content_hash(there):  # it is not what was written there
        return False
    if changed := hashed_differences(there, job.config):
        listed = ", ".join(f"{key}: {old!r} there, {new!r} now" for key, (old, new) in list(changed.items())[:5])
        raise BadInput(f"{job.folder} holds a run of another configuration ({listed}); give another --out")
    if ended_by_another_bound(run, job.config):
        bounds = [f"{c.train.loss_bound} ({c.train.loss_bound_steps} steps)" for c in (there, job.config)]
        raise BadInput(
            f"{job.folder} holds a run that would have ended otherwise with this train.loss_bound: {bounds[0]} there, "
            f"{bounds[1]} now; give another --out"
        )
    enough = int(state["step"]) >= job.config.train.updates  # else it was made with an earlier stop
    return state["status"] == "diverged" or (state["status"] == "finished" and enough)


def seen_before(study: Study, folder: Path) -> Seen:
    """What the folder remembers of looks at this study. `BadInput` when it is another study's.

    Run folders without a `study.json` were looked at too: somebody has removed it.
    """
    file, names = folder / "study.json", {arm.name for arm in study.arms}
    begun = [(seed, run_path(folder, arm, seed)) for arm, seed in begun_runs(folder) if arm in names]
    shown = sorted({seed for seed, run in begun if was_seen(RunFolder(run))})
    if not file.exists():
        return Seen([shown] if shown and set(shown) != set(study.seeds) else [])
    before = read_study(file)
    name, seeds, baseline = before["name"], before["seeds"], before.get("baseline", study.baseline)
    arms_there = [arm["name"] for arm in before["arms"] if arm.get("matched") is None]  # matched ones are the search's
    if name != study.name or not set(arms_there) <= names:
        raise BadInput(f"{folder} holds the study {name!r} with the arms {', '.join(arms_there)}; give another --out")
    if baseline != study.baseline:
        raise BadInput(
            f"{folder} holds the study with the baseline {baseline}, and it is {study.baseline} now; give another --out"
        )
    if (declared := before.get("looks", [])) != list(study.looks):
        there, here = (", ".join(map(str, looks)) or "none" for looks in (declared, study.looks))
        raise BadInput(
            f"{folder} holds the study with other declared looks ({there} there, {here} now), and they are declared "
            "before the first run; give another --out"
        )
    earlier: list[list[int]] = before.get("earlier_seeds", [])
    is_look = set(seeds) != set(study.seeds) and set(seeds) & set(shown)  # where none has a loss, nothing was seen
    return Seen(
        [*earlier, seeds] if is_look else earlier,
        before.get("looked_in_pool", {}),
        before.get("compared_in_pool", {}),
    )


def make(job: Job, device: str, data_folder: str) -> Outcome:
    """Make one run, or the rest of one that was cut short. Called where it is to run; raises nothing but interrupts."""
    from qurve.train.loop import train

    try:
        if device.startswith("cuda:"):
            import torch

            torch.cuda.set_device(device)
        return Outcome("made", _summary(train(job.config, job.folder, TokenData.open(data_folder), resume="auto")))
    except Diverged as error:
        return Outcome("made", f"diverged ({error})")
    except Stopped as error:
        return Outcome("stopped", str(error))
    except Busy as error:
        return Outcome("busy", str(error))
    except Exception as error:  # reported, counted and carried to the exit code; the other runs go on
        return Outcome("failed", str(error) or type(error).__name__)


def _summary(run: RunFolder) -> str:
    losses, last, environment = run.eval_lines(), run.train_lines()[-1], run.environment()
    note = f"; eager: torch.compile failed ({environment['compile_error']})" if "compile_error" in environment else ""
    return (
        f"validation loss {losses[0]['loss']:.4f} -> {losses[-1]['loss']:.4f}, "
        f"{last['tokens'] / last['seconds']:,.0f} tokens/s{note}"
    )
