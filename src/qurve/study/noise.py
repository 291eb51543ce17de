"""The noise floor: how far losses vary from seed to seed when nothing else changes, and what pairing takes off it.

It is read from a study's folder, finished or not, or from the evidence file that a report leaves. Losses are in nats
per token.
"""

from __future__ import annotations

import copy
import math
import os
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qurve.errors import BadInput
from qurve.study.paired import deviation_interval
from qurve.study.results import StudyResults, load
from qurve.study.study_json import damage_named, positive, read_plain

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
    """`baseline` is of its losses over the seeds, unpaired; `differences` pools those of the arms and of the A/A arms.

    The arms share the baseline's runs, so the pooled interval counts the seeds of one arm, not those of all.
    """

    base_loss: float
    baseline: Deviation
    arms: tuple[PairedNoise, ...]
    differences: Deviation | None
    a_a: tuple[PairedNoise, ...] = ()
    """Of the A/A arms, which are the baseline from other weights: whatever they differ by is noise."""


def noise_floor(results: StudyResults) -> NoiseFloor | None:
    """The noise floor of a study's finished runs; None with fewer than two of the baseline's.

    Arms that did not see the baseline's batches are left out, and so are those with fewer than two seeds in common.
    Those at the baseline's point are out too: they are the same architectures once more, at a point that may not suit
    them, and it is the study's own comparison whose noise is asked for.
    """
    base, a_a = results.baseline, [arm for arm in results.others if arm.seed_offset]
    paired = [arm for arm in (*results.primary, *a_a) if results.batches.difference_of(arm.name, base.name) is None]
    losses = {arm.name: final_losses(arm.runs) for arm in (base, *paired)}
    return floor_of(losses, base.name, [arm.name for arm in a_a])


def final_losses(runs: Mapping[int, Any]) -> dict[int, float]:
    """seed -> final loss, of the runs that have finished."""
    return {seed: run.final_loss for seed, run in runs.items() if run.final_loss is not None}


def floor_of(losses: Losses, baseline: str, a_a: Collection[str] = ()) -> NoiseFloor | None:
    """The noise floor of bare losses, paired by seed with the arm `baseline`; `a_a` names the A/A arms among them."""
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
    arms, twins = (tuple(one for one in found if (one.arm in a_a) == is_twin) for is_twin in (False, True))
    return NoiseFloor(statistics.fmean(base.values()), _deviation(list(base.values())), arms, pooled, twins)


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
    """What a study's folder, or its evidence file, knows: `evidence.json`, or a compact one as `results/` has them.

    Raises `BadInput` for anything else.
    """
    path = Path(path)
    if path.is_dir():
        return _known_results(load(path), str(path))
    if not path.exists():
        raise BadInput(f"{path} is not there; give {WANTED}")
    with damage_named(path, f"give {WANTED}"):
        content = path.read_bytes()
    return known_evidence(content, str(path))


WANTED = "a study's folder, or the evidence.json of its report"


def _known_results(results: StudyResults, source: str) -> Known:
    speeds = {arm.name: speed for arm in results.arms if (speed := arm.tokens_per_s) is not None}
    machine = _machine([run.environment for run in results.runs])
    configs = {arm.name: arm.config for arm in results.arms}
    return Known(source, noise_floor(results), speeds, results.baseline.config, machine, configs)


def known_evidence(content: bytes, source: str) -> Known:
    """What the content of an evidence file knows; `source` is what it is called."""
    with damage_named(source, f"give {WANTED}", "is no study's evidence"):
        tree = read_plain(content)
        if isinstance(tree, dict) and "rungs" in tree:
            raise BadInput("it is a ladder's, and each of its rungs a study")
        if not isinstance(tree, dict) or "rows" not in tree or not ("runs" in tree or "arms" in tree):
            raise BadInput("it has no rows with runs or arms")
        read = _of_runs if "runs" in tree else _of_arms
        baseline, a_a, losses, configs, environments = read(tree)
        rows = {str(row["arm"]): row.get("tokens_per_s") for row in tree["rows"]}
        speeds = {arm: positive(speed, f"tokens_per_s of {arm}") for arm, speed in rows.items() if speed is not None}
        floor = floor_of(losses, baseline, a_a)
        return Known(source, floor, speeds, configs[baseline], _machine(environments), configs)


_Read = tuple[str, list[str], dict[str, dict[int, float]], dict[str, dict[str, Any]], list[dict[str, Any]]]
"""The baseline, the A/A arms, losses by arm and seed, configurations by arm, and environments."""


def _of_runs(tree: dict[str, Any]) -> _Read:
    """From `evidence.json`, which has every run."""
    rows = [row["arm"] for row in tree["rows"] if row["verdict"].startswith("the reference")]
    if not rows:
        raise BadInput("none of its rows is the reference")
    split = str(tree.get("split", "val"))
    a_a, matched = ([str(arm) for arm in tree.get(key, ())] for key in ("a_a", "matched"))
    losses: dict[str, dict[int, float]] = {row["arm"]: {} for row in tree["rows"]}
    for run in tree["runs"]:
        if run["status"] == "finished" and run["arm"] not in matched and math.isfinite(loss := run[split][-1][1]):
            losses[run["arm"]][int(run["seed"])] = positive(loss, f"a loss of {run['arm']}")
    configs = {str(arm): dict(config) for arm, config in tree["configs"].items()}
    return rows[0], a_a, losses, configs, [run["environment"] for run in tree["runs"]]


def _of_arms(tree: dict[str, Any]) -> _Read:
    """From compact evidence, which has the arms' last losses, and what each changes in the baseline's configuration.

    One that changes nothing is an A/A arm, and `ARM@BASELINE` stands at the baseline's point (`Study.settled`).
    """
    baseline, config = str(tree["baseline"]), dict(tree["origin"]["config"])
    arms = {str(arm["arm"]): arm for arm in tree["arms"]}
    losses = {
        name: {
            int(seed): positive(loss, f"a loss of {name}")
            for seed, loss in arm["final_loss"].items()
            if loss is not None
        }
        for name, arm in arms.items()
        if not name.endswith(f"@{baseline}")
    }
    configs = {name: _changed(config, arm["changes"]) for name, arm in arms.items()}
    a_a = [name for name, arm in arms.items() if name != baseline and not arm["changes"]]
    machines = [tree["machine"].get(key) for key in ("gpu", "cpu")]  # lists, where the runs were not made alike
    gpus, cpus = (found if isinstance(found, list) else [found] for found in machines)
    return baseline, a_a, losses, configs, [{"gpu": gpu, "cpu": cpu} for gpu in gpus for cpu in cpus]


def _changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A configuration's tree with other leaves; one of another kind may keep some that this has not."""
    tree = copy.deepcopy(config)
    for path, value in changes.items():
        *nodes, leaf = path.split(".")
        node = tree
        for name in nodes:
            node = node.setdefault(name, {})
        node[leaf] = value
    return tree


def _machine(environments: list[dict[str, Any]]) -> str:
    names = {str(environment.get("gpu") or environment.get("cpu") or "") for environment in environments}
    return ", ".join(sorted(names - {""}))
