"""One pool of runs for all studies: a folder with one run folder for each content hash.

    <pool>/<hash>/                           the run folder, see `qurve.runfolder`
    <pool>/looks.jsonl                       what was compared with what, with which seeds, see `qurve.study.looks`
    <study>/runs/<arm>/seed-<n>              a relative link to it

A run whose configuration is in the pool is not made again, whichever study made it. The hash is that of the resolved
configuration: of the data, the threads and the device too. Two studies may work on one pool at once: a run folder's
lock lets one of them make a run, and the other comes back to it when its own are made.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qurve.config import content_hash
from qurve.errors import BadInput, QurveError
from qurve.files import check_folders, write_atomic
from qurve.runfolder import RunFolder
from qurve.study.definition import Study
from qurve.study.jobs import Job
from qurve.study.looks import FILE as LOOKS
from qurve.study.looks import Seen, note, seen_in_pool
from qurve.study.same_run import ended_by_another_bound, serves_less
from qurve.train.config import EvalConfig, RunConfig

FORMAT = 1
LOCAL = ("cpu", "cores", "device", "gpu", "platform", "precision", "processes", "python", "qurve", "threads", "torch")
"""What is kept of a run's environment: what its numbers and its speed may depend on."""


def check_pool(pool: Path) -> None:
    """Raise `BadInput` for what cannot be a pool."""
    check_folders(pool, option="--pool")
    if (pool / LOOKS).is_dir():
        raise BadInput(f"{pool / LOOKS} is a folder; remove it, or give another --pool")


def in_pool(job: Job, pool: Path) -> Job:
    """The job, to be made in the pool. `job.config` must be resolved. Touches nothing.

    One whose folder holds a run of the study's own already stays there, and so does one whose link leads to another
    run: whoever looks at what is there refuses it. The study makes for itself what the pool has under another bound of
    the loss that would have ended otherwise, stopped at another step, or with less recorded: none is part of the hash.
    """
    place = pool / content_hash(job.config)
    there = RunFolder(place)
    if not job.folder.is_symlink() and (ended_by_another_bound(there, job.config) or serves_less(there, job.config)):
        return job
    if os.path.lexists(job.folder) and not (job.folder.is_symlink() and _leads_to(job.folder, place)):
        return job
    return dataclasses.replace(job, folder=place, link=job.folder)


def _leads_to(link: Path, place: Path) -> bool:
    target = link.resolve()
    return target == place.resolve() or not target.exists()


def link(job: Job) -> None:
    """Make the job's place in the pool, and the study's link to it. Nothing to do for a job outside of the pool."""
    if job.link is None:
        return
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        job.link.parent.mkdir(parents=True, exist_ok=True)
        if job.link.is_symlink() and job.link.resolve() != job.folder.resolve():
            job.link.unlink()
        if not job.link.is_symlink():
            job.link.symlink_to(os.path.relpath(job.folder.resolve(), job.link.parent.resolve()))
    except OSError as error:
        raise BadInput(f"{job.link} cannot be linked to {job.folder} ({error.strerror}); give another --pool") from None


# --------------------------------------------------------------------------------------------------------------- looks


def look_again(pool: Path | None, study: Study, jobs: Iterable[Job], before: Seen) -> Seen:
    """What the study remembers, and what the pool knows of looks before it, where there is one; notes this study's.

    `jobs` are its runs with resolved configurations. An A/A arm is compared with nobody.
    """
    jobs = list(jobs)
    keys = {job.arm.name: _key(job) for job in jobs if not job.arm.seed_offset}
    base = keys.pop(study.baseline, None)
    if base is None or not keys:
        return before
    measured = next(job.config.eval for job in jobs if job.arm.name == study.baseline)
    matched = {keys[arm.name] for arm in study.arms if arm.matched is not None and arm.name in keys}
    own = {
        "baseline": base,
        "arms": sorted(set(keys.values())),
        "matched": sorted(matched),
        "evaluation": content_hash(RunConfig(eval=measured)),
        "seeds": list(study.seeds),
        "looks": list(study.looks),
        "runs": sorted(content_hash(job.config) for job in jobs),
    }
    sets, beside = ({}, {}) if pool is None else seen_in_pool(note(pool, own), own)
    mine = {"own": set(keys.values()) - matched, "matched": matched}
    return dataclasses.replace(
        before,
        in_pool={**before.in_pool, **{arm: sets[key] for arm, key in keys.items() if key in sets}},
        beside={
            family: sorted({*before.beside.get(family, ()), *beside.get(family, ())} - mine[family]) for family in mine
        },
    )


def _key(job: Job) -> str:
    """A comparison's side, whatever its seed, where it is made, and how often and on what it is evaluated: the same
    trainings are the same arms."""
    train = dataclasses.replace(
        job.config.train,
        seed=0,
        device="auto",
        precision="auto",
        compile=True,
        head_impl="auto",
        threads=None,
        micro_batch=None,
    )
    return content_hash(dataclasses.replace(job.config, train=train, eval=EvalConfig()))


# ------------------------------------------------------------------------------------------------------------ evidence


def write_evidence(runs: Iterable[Path], folder: Path) -> int:
    """Write `<hash>.json` into `folder` for each of the run folders that has finished or diverged; returns how many.

    A damaged or unfinished one is passed over.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for path in sorted(runs):
        try:
            tree = run_evidence(RunFolder(path))
        except (QurveError, OSError, ValueError, KeyError, TypeError):
            continue
        if tree["status"] in ("finished", "diverged"):
            write_atomic(folder / f"{tree['hash']}.json", json.dumps(tree, indent=1) + "\n")
            count += 1
    return count


def run_evidence(run: RunFolder) -> dict[str, Any]:
    """A run in short, without a path of this machine: configuration, losses by evaluation, and what shows its health.

    `losses` maps a split to `[step, loss]` pairs, `final` to its last loss (None of a run that did not finish).
    `max_logit` is the largest attention logit of any evaluation that recorded them, else None. `diverged_at` is the
    number of updates that were made before it diverged.
    """
    config, stored = run.config_json()
    config["data"] = {**config["data"], "path": None}
    state, environment = run.status(), run.environment()
    train: dict[int, dict[str, Any]] = {}
    losses: dict[str, dict[int, float]] = {}
    logits: list[float] = []
    for line in run.metrics():
        if "split" in line:
            losses.setdefault(line["split"], {})[line["step"]] = line["loss"]
            logits += [value for value in line.get("max_logit") or () if value is not None]
        else:
            train[line["step"]] = line
    norms = [line["grad_norm"] for line in train.values() if math.isfinite(line["grad_norm"])]
    newest = train[max(train)] if train else {"tokens": 0, "seconds": 0.0}
    finished = state["status"] == "finished"
    return {
        "format": FORMAT,
        "hash": stored,
        "config": config,
        "status": state["status"],
        "steps": max(train, default=0),
        "diverged_at": state["step"] if state["status"] == "diverged" else None,
        "losses": {split: sorted(found.items()) for split, found in losses.items()},
        "final": {split: found[max(found)] if finished else None for split, found in losses.items()},
        "train_loss": newest.get("loss") if finished else None,
        "max_logit": max(logits, default=None),
        "grad_norm": {"largest": max(norms, default=None), "median": statistics.median(norms) if norms else None},
        "tokens_per_s": newest["tokens"] / newest["seconds"] if newest["seconds"] else None,
        "environment": {key: environment[key] for key in LOCAL if key in environment},
    }
