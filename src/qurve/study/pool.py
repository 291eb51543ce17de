"""One pool of runs for all studies: a folder with one run folder for each content hash.

    <pool>/<hash>/                           the run folder, see `qurve.runfolder`
    <pool>/looks.jsonl                       which arms were compared with which baseline, with which seeds
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
from qurve.study.power import LEAST_SEEDS
from qurve.study.same_run import ended_by_another_bound, serves_less

FORMAT = 1
LOOKS = "looks.jsonl"
"""Which comparisons were made in the pool, and with which seeds: a line for each study."""
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


def look_again(pool: Path, study: Study, jobs: Iterable[Job]) -> dict[str, list[list[int]]]:
    """Arm -> the sets of seeds with which earlier studies of this pool compared it with this baseline, where that was a
    look which this study did not declare. Notes this study's own, once; a study that comes again sees what it saw then.

    `jobs` are its runs with resolved configurations.
    """
    keys = {job.arm.name: _without_seed(job) for job in jobs if not job.arm.seed_offset}
    base = keys.pop(study.baseline, None)
    if base is None or not keys:
        return {}
    own = {"baseline": base, "arms": sorted(set(keys.values())), "seeds": list(study.seeds), "looks": list(study.looks)}
    file = pool / LOOKS
    lines = _lines(file)
    before = lines[: lines.index(own)] if own in lines else lines
    if own not in lines:
        pool.mkdir(parents=True, exist_ok=True)
        with open(file, "a", encoding="utf-8") as log:  # one write: two studies may come at once
            log.write(json.dumps(own) + "\n")
    found: dict[str, list[list[int]]] = {}
    for line in before:
        seeds, is_declared = line["seeds"], line["looks"] == own["looks"] and len(line["seeds"]) in study.looks
        is_harmless = set(seeds) <= set(study.seeds) and (len(seeds) < LEAST_SEEDS or is_declared)
        if line["baseline"] != base or is_harmless or set(seeds) == set(study.seeds):
            continue
        for arm, key in keys.items():
            if key in line["arms"] and seeds not in found.setdefault(arm, []):
                found[arm].append(seeds)
    return {arm: sets for arm, sets in found.items() if sets}


def _without_seed(job: Job) -> str:
    return content_hash(dataclasses.replace(job.config, train=dataclasses.replace(job.config.train, seed=0)))


def _lines(file: Path) -> list[dict[str, Any]]:
    """What was noted; a line that a killed process left torn is passed over."""
    found = []
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else ():
        try:
            line = json.loads(text)
            [list(line[key]) for key in ("arms", "seeds", "looks")]
            found.append({"baseline": line["baseline"], **line})
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return found


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
