"""The noise floor: how far losses vary from seed to seed when nothing else changes, and what pairing takes off it.

It is read from a study's folder, finished or not, or from the evidence file that a report leaves. Losses are in nats
per token.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qurve.errors import BadInput
from qurve.study.paired import deviation_interval
from qurve.study.results import Arm, StudyResults, load
from qurve.study.study_json import check_plain

Losses = Mapping[str, Mapping[int, float]]
"""Final losses of finished runs, on the split that the study reports on: arm -> seed -> loss."""


@dataclass(frozen=True)
class Deviation:
    """A standard deviation over seeds, with its 95 % chi-square interval."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class PairedNoise:
    """What is left of the noise when one arm is paired with the baseline."""

    arm: str
    differences: Deviation
    correlation: float | None
    """Of the two arms' losses over the seeds: what pairing bought. None where one of them does not vary."""


@dataclass(frozen=True)
class NoiseFloor:
    """`baseline` is of its losses over the seeds, unpaired; `differences` pools those of the arms.

    The arms share the baseline's runs, so the pooled interval counts the seeds of one arm, not those of all.
    """

    base_loss: float
    baseline: Deviation
    arms: tuple[PairedNoise, ...]
    differences: Deviation | None
    a_a: tuple[PairedNoise, ...] = ()
    """Of the A/A arms, which are the baseline from other weights: no part of the pool."""


def noise_floor(results: StudyResults) -> NoiseFloor | None:
    """The noise floor of a study's finished runs; None with fewer than two of the baseline's.

    Arms that did not see the baseline's batches are left out, and so are those with fewer than two seeds in common.
    """
    base = results.baseline

    def floor(arms: list[Arm]) -> NoiseFloor | None:
        paired = [arm for arm in arms if results.batches.difference_of(arm.name, base.name) is None]
        return floor_of({arm.name: final_losses(arm.runs) for arm in (base, *paired)}, base.name)

    found, twins = floor(results.primary), floor([arm for arm in results.others if arm.seed_offset])
    return None if found is None or twins is None else dataclasses.replace(found, a_a=twins.arms)


def final_losses(runs: Mapping[int, Any]) -> dict[int, float]:
    """seed -> final loss, of the runs that have finished."""
    return {seed: run.final_loss for seed, run in runs.items() if run.final_loss is not None}


def floor_of(losses: Losses, baseline: str) -> NoiseFloor | None:
    """The noise floor of bare losses, paired by seed with the arm `baseline`."""
    base = losses[baseline]
    if len(base) < 2:
        return None
    found = []
    for arm, own in losses.items():
        seeds = [seed for seed in own if seed in base]
        if arm != baseline and len(seeds) >= 2:
            pairs = [(own[seed], base[seed]) for seed in seeds]
            found.append(PairedNoise(arm, _deviation([a - b for a, b in pairs]), _correlation(pairs)))
    pooled = None
    if found:
        freedom = sum(one.differences.n - 1 for one in found)
        value = math.hypot(*(math.sqrt((one.differences.n - 1) / freedom) * one.differences.value for one in found))
        n = max(one.differences.n for one in found)
        pooled = Deviation(value, *deviation_interval(value, n), n)
    return NoiseFloor(statistics.fmean(base.values()), _deviation(list(base.values())), tuple(found), pooled)


def _deviation(values: list[float]) -> Deviation:
    value, n = statistics.stdev(values), len(values)
    return Deviation(value, *deviation_interval(value, n), n)


def _correlation(pairs: list[tuple[float, float]]) -> float | None:
    try:
        return statistics.correlation(*map(list, zip(*pairs, strict=True)))
    except (ValueError, OverflowError):  # a constant arm, or losses beyond all measure
        return None


# --------------------------------------------------------------------------------------------- from what was kept


@dataclass(frozen=True)
class Known:
    """What an earlier study teaches a later one: its noise, its speeds, and the configuration that both hold for."""

    source: str
    floor: NoiseFloor | None
    speeds: dict[str, float]
    """arm -> training tokens per second, the median over its seeds."""
    config: dict[str, Any]
    """The baseline's."""
    machine: str
    """The processor or GPU that the speeds are of."""
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """arm -> its configuration: what its speed is of."""


def known_from(path: str | os.PathLike[str]) -> Known:
    """What a study's folder, or its evidence file (`evidence.json`), knows. `BadInput` for anything else."""
    path = Path(path)
    if path.is_dir():
        return _known_results(load(path), str(path))
    if not path.exists():
        raise BadInput(f"{path} is not there; give a study's folder, or the evidence.json of its report")
    return known_evidence(path.read_bytes(), str(path))


def _known_results(results: StudyResults, source: str) -> Known:
    speeds = {arm.name: speed for arm in results.arms if (speed := arm.tokens_per_s) is not None}
    machine = _machine([run.environment for run in results.runs])
    configs = {arm.name: arm.config for arm in results.arms}
    return Known(source, noise_floor(results), speeds, results.baseline.config, machine, configs)


def known_evidence(content: bytes, source: str) -> Known:
    """What the content of an evidence file knows; `source` is what it is called."""
    try:
        tree = json.loads(content)
        check_plain(tree)
        baseline = next(row["arm"] for row in tree["rows"] if row["verdict"].startswith("the reference"))
        split = str(tree.get("split", "val"))
        losses: dict[str, dict[int, float]] = {row["arm"]: {} for row in tree["rows"]}
        for run in tree["runs"]:
            if run["status"] == "finished":
                loss = float(run[split][-1][1])
                if math.isfinite(loss):
                    losses[run["arm"]][int(run["seed"])] = loss
        rows = {row["arm"]: row.get("tokens_per_s") for row in tree["rows"]}
        speeds = {str(arm): float(speed) for arm, speed in rows.items() if speed is not None}
        machine = _machine([run["environment"] for run in tree["runs"]])
        configs = {str(arm): dict(config) for arm, config in tree["configs"].items()}
        return Known(source, floor_of(losses, baseline), speeds, configs[baseline], machine, configs)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, StopIteration, RecursionError) as error:
        raise BadInput(f"{source} is no study's evidence ({type(error).__name__}: {error})") from None


def _machine(environments: list[dict[str, Any]]) -> str:
    names = {str(environment.get("gpu") or environment.get("cpu") or "") for environment in environments}
    return ", ".join(sorted(names - {""}))
