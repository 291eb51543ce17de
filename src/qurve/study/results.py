"""Read a study's folder: its arms, its runs as far as they have come, and what shows that they are comparable.

    study.json                   title, arms (configuration, parameters, the paper's printed values), seeds, search
    runs/<arm>/seed-<n>/         one run folder each, see `qurve.runfolder`

Nothing here trains or writes. Losses are in nats per token. A run counts as finished only when its status says so and
its last validation loss is finite; whatever else has happened to it is carried in words and never enters a mean.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from qurve.config import LARGEST
from qurve.errors import BadInput, QurveError, did_you_mean
from qurve.runfolder import RunFolder
from qurve.study.dynamics import Measures, measures_of
from qurve.study.searched import Searched, read_evidence
from qurve.study.study_json import check_plain, one_line, read_study


@dataclass(frozen=True)
class Run:
    """One training of one arm with one seed. `status` is the run folder's, `missing` where there is no run yet, or
    `damaged` where it cannot be read."""

    arm: str
    seed: int
    status: str
    why: str
    train: tuple[tuple[int, float], ...]
    """(step, training loss), ascending; losses that are not finite are left out."""
    val: tuple[tuple[int, float], ...]
    """(step, validation loss), ascending; losses that are not finite are left out."""
    batch_digests: dict[int, str]
    """step -> `batch_sha`"""
    tokens_per_s: float | None
    step: int
    """Updates done, as far as the metrics tell."""
    environment: dict[str, Any]
    test: tuple[tuple[int, float], ...] = ()
    """(step, loss on the test split), as `val`."""
    split: str = "val"
    """The split that the study reports on."""
    dynamics: tuple[tuple[int, Measures], ...] = ()
    """(step, measure -> its value in each block), ascending, of the steps at which they were recorded."""

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def val_loss(self) -> float | None:
        """The last validation loss of a finished run, else None: never the last finite value of one that broke."""
        return self.val[-1][1] if self.finished else None

    @property
    def final_loss(self) -> float | None:
        """The last loss of a finished run on the split that the study reports on, else None."""
        return (self.test if self.split == "test" else self.val)[-1][1] if self.finished else None

    @property
    def in_words(self) -> str:
        if self.status == "running":
            return f"running (step {self.step:,})"
        if self.status in ("diverged", "failed", "stopped"):
            return f"{self.status} (after step {self.step:,}{': ' + self.why if self.why else ''})"
        if self.status == "damaged":
            return f"damaged ({self.why})"
        return "not run" if self.status == "missing" else self.status


@dataclass(frozen=True)
class Arm:
    name: str
    label: str
    config: dict[str, Any]
    non_embedding: int
    total: int
    flops_per_token: float
    paper: dict[str, str] | None
    match: str | None
    """How near it comes to what it is matched with, in words, if it was solved for."""
    runs: dict[int, Run]
    matched: str | None = None
    """The arm whose architecture this is, trained at the baseline's best point instead of its own."""
    seed_offset: int = 0
    """Not 0 for an A/A arm: the baseline once more, on the same batches, with other weights."""

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs.values() if run.finished]

    @property
    def unfinished(self) -> list[Run]:
        return [run for run in self.runs.values() if not run.finished]

    @property
    def diverged(self) -> int:
        """Number of seeds that diverged."""
        return sum(run.status == "diverged" for run in self.runs.values())

    @property
    def val_loss(self) -> float | None:
        """Mean over the finished seeds."""
        losses = [loss for run in self.finished if (loss := run.val_loss) is not None]
        return statistics.fmean(losses) if losses else None

    @property
    def final_loss(self) -> float | None:
        """Mean over the finished seeds, on the split that the study reports on."""
        losses = [loss for run in self.finished if (loss := run.final_loss) is not None]
        return statistics.fmean(losses) if losses else None

    @property
    def tokens_per_s(self) -> float | None:
        """Median over the seeds; training time alone."""
        speeds = [run.tokens_per_s for run in self.runs.values() if run.tokens_per_s is not None]
        return statistics.median(speeds) if speeds else None

    def setting(self, path: str) -> Any:
        """A leaf of the configuration (`train.lr`), or None where there is none."""
        node: Any = self.config
        for name in path.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        return node


@dataclass(frozen=True)
class StudyResults:
    folder: Path
    name: str
    title: str
    command: str
    baseline: Arm
    arms: tuple[Arm, ...]
    """All arms in the study's order, the baseline among them."""
    seeds: tuple[int, ...]
    search: Searched | None
    earlier_seeds: tuple[tuple[int, ...], ...] = ()
    """The sets of seeds that the study was run with before this one."""
    looks: tuple[int, ...] = ()
    """The numbers of seeds at which a look at the result was declared before the first run."""
    split: str = "val"
    """What the arms are compared on: `test` where a search chose on `val` and the runs were evaluated on both."""

    @property
    def others(self) -> list[Arm]:
        return [arm for arm in self.arms if arm.name != self.baseline.name]

    @property
    def primary(self) -> list[Arm]:
        """The arms that a claim may be made of: the study's own beside the baseline, after a search each at its own
        best point, but for A/A arms."""
        return [arm for arm in self.others if arm.matched is None and not arm.seed_offset]

    @property
    def matched(self) -> list[Arm]:
        """The same architectures at the baseline's best point."""
        return [arm for arm in self.others if arm.matched is not None]

    @property
    def split_in_words(self) -> str:
        return {"val": "validation", "test": "test"}[self.split]

    @property
    def runs(self) -> list[Run]:
        return [run for arm in self.arms for run in arm.runs.values()]

    @property
    def best(self) -> Arm | None:
        """The arm of the lowest mean loss among the study's own whose every seed has finished."""
        own = [arm for arm in self.arms if arm.matched is None and not arm.seed_offset]
        whole = [(loss, i) for i, arm in enumerate(own) if not arm.unfinished and (loss := arm.final_loss) is not None]
        return own[min(whole)[1]] if whole else None

    @cached_property
    def batches(self) -> BatchProof:
        return identical_batches(self)


# ------------------------------------------------------------------------------------------------------------- loading


def load(folder: str | os.PathLike[str]) -> StudyResults:
    """Read a study's folder as it stands, finished or not. Raises `BadInput` when it is not one."""
    folder = Path(folder)
    source = folder / "study.json"
    if not source.exists():
        raise BadInput(
            f"{folder} is not a study folder: it has no study.json; give the folder that `qurve compare` wrote"
        )
    tree = read_study(source)
    try:
        seeds = tuple(tree["seeds"])
        search = None if tree.get("search") is None else read_evidence(tree["search"])
        split = "test" if search is not None and all(_is_tested(item) for item in tree["arms"]) else "val"
        arms = tuple(_arm(folder, item, seeds, split, search) for item in tree["arms"])
        names = [arm.name for arm in arms]
        if tree["baseline"] not in names:
            raise BadInput(
                f"{source}: the baseline {tree['baseline']!r} is no arm{did_you_mean(str(tree['baseline']), names)}"
            )
        return StudyResults(
            folder=folder,
            name=one_line(tree["name"]),
            title=one_line(tree["title"]),
            command=str(tree["command"]),
            baseline=arms[names.index(tree["baseline"])],
            arms=arms,
            seeds=seeds,
            search=search,
            earlier_seeds=tuple(tuple(seeds) for seeds in tree.get("earlier_seeds", ())),
            looks=tuple(tree.get("looks", ())),
            split=split,
        )
    except KeyError as error:
        raise BadInput(f"{source}: the field {error} is missing") from None
    except BadInput:
        raise
    except (TypeError, AttributeError, ValueError, OverflowError) as error:
        raise BadInput(f"{source} is damaged: a field has the wrong type ({error})") from None


def _is_tested(arm: dict[str, Any]) -> bool:
    return "test" in arm["config"].get("eval", {}).get("splits", ())


def _arm(folder: Path, item: dict[str, Any], seeds: Iterable[int], split: str, search: Searched | None) -> Arm:
    name = item["name"]
    chosen = None if search is None else search.chosen.get(name)
    if chosen is not None and chosen.point is None:
        why = "not one point of its search was finished with every seed"
        runs = {seed: Run(name, seed, "diverged", why, (), (), {}, None, 0, {}) for seed in seeds}
    else:
        runs = {seed: _run(folder / "runs" / name / f"seed-{seed}", name, seed, split) for seed in seeds}
    paper = item.get("paper")
    arm = Arm(
        name=name,
        label=one_line(item.get("label") or name),
        config=dict(item["config"]),
        non_embedding=_positive(item["non_embedding"]),
        total=_positive(item["total"]),
        flops_per_token=float(item["flops_per_token"]),
        paper=None if paper is None else {key: one_line(value) for key, value in paper.items() if value is not None},
        match=None if item.get("match") is None else one_line(item["match"]),
        runs=runs,
        matched=None if item.get("matched") is None else one_line(item["matched"]),
        seed_offset=item.get("seed_offset", 0),
    )
    for path in ("train.lr", "train.min_lr", "train.weight_decay", "train.steps"):
        if (value := arm.setting(path)) is not None:
            _number(value, f"{path} of {name}", (int, float))
    return arm


def _run(path: Path, arm: str, seed: int, split: str) -> Run:
    try:
        return _found(RunFolder(path), arm, seed, split)
    except (QurveError, OSError, TypeError, AttributeError, KeyError, ValueError, OverflowError) as error:
        return Run(arm, seed, "damaged", one_line(error), (), (), {}, None, 0, {})  # the other runs are as they are


def _found(run: RunFolder, arm: str, seed: int, split: str) -> Run:
    if not run.status_file.exists():  # written last when a run starts
        return Run(arm, seed, "missing", "", (), (), {}, None, 0, {})
    state, environment = run.status(), run.environment()
    check_plain(environment)
    lines = list(run.metrics())
    train = {int(line["step"]): line for line in lines if "split" not in line}  # of a resumed step the last line counts
    val, test = ({int(line["step"]): line for line in lines if line.get("split") == s} for s in ("val", "test"))
    status, why = one_line(state.get("status")), one_line(state.get("why", ""))
    for measured, what in ((val, "validation"), (test, "test"))[: 1 if split == "val" else 2]:
        if status == "finished":
            last = measured[max(measured)].get("loss") if measured else None
            if last is None:
                status, why = "failed", f"finished without a {what} loss"
            elif not math.isfinite(last):
                status, why = "diverged", f"its last {what} loss is not finite"
    newest = train[max(train)] if train else {}
    seconds = newest.get("seconds") or 0
    return Run(
        arm=arm,
        seed=seed,
        status=status,
        why=why,
        train=_losses(train),
        val=_losses(val),
        batch_digests={
            step: _digest(line["batch_sha"]) for step, line in sorted(train.items()) if line.get("batch_sha")
        },
        tokens_per_s=newest["tokens"] / seconds if seconds > 0 else None,
        step=max(train, default=int(state.get("step") or 0)),
        environment=environment,
        test=_losses(test),
        split=split,
        dynamics=measures_of(train),
    )


def _losses(lines: dict[int, dict[str, Any]]) -> tuple[tuple[int, float], ...]:
    pairs = ((step, line.get("loss")) for step, line in sorted(lines.items()))
    return tuple((step, float(loss)) for step, loss in pairs if loss is not None and math.isfinite(loss))


def _digest(text: Any) -> str:
    if not isinstance(text, str) or not text.isascii():
        raise ValueError(f"{text!r} is no digest")
    return text


def _number(value: Any, what: str, kind: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
        raise ValueError(f"{what} = {value!r}")
    return value


def _positive(value: Any) -> int:
    if not 1 <= int(value) <= LARGEST:
        raise ValueError(f"{value!r} parameters")
    return int(value)


# ------------------------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True)
class SeedBatches:
    """What the runs of one seed saw. `difference` says where two of them part, None where they never do."""

    seed: int
    arms: tuple[str, ...]
    steps: int
    """Training lines compared: those up to where the shortest of the runs has come."""
    digest: str
    """sha256 over the compared lines' batch digests; empty where nothing could be compared."""
    difference: str | None
    differing: frozenset[str]
    """Arms that part from the baseline (or from the first arm that has a run)."""


@dataclass(frozen=True)
class BatchProof:
    seeds: tuple[SeedBatches, ...]
    arms: int
    """How many arms the study has."""

    @property
    def identical(self) -> bool:
        """Every seed has at least two runs to compare, and they agree at every step."""
        return bool(self.seeds) and all(seed.steps > 0 and seed.difference is None for seed in self.seeds)

    @property
    def complete(self) -> bool:
        """Identical, and no arm's run is missing for any seed."""
        return self.identical and all(len(seed.arms) == self.arms for seed in self.seeds)

    @property
    def differences(self) -> list[str]:
        return [seed.difference for seed in self.seeds if seed.difference is not None]

    def difference_of(self, arm: str, baseline: str) -> str | None:
        """Why `arm` cannot be paired with `baseline`; None when nothing speaks against it."""
        for seed in self.seeds:
            if arm in seed.differing or (baseline in seed.differing and arm in seed.arms):
                return seed.difference
        return None


def identical_batches(results: StudyResults) -> BatchProof:
    """For every seed: did all arms train on the same windows of the same data, at every step?

    A step that one run recorded and another passed over is a difference too: it was not shown to be the same.
    """
    return BatchProof(tuple(_seed_batches(results, seed) for seed in results.seeds), len(results.arms))


def _seed_batches(results: StudyResults, seed: int) -> SeedBatches:
    order = [results.baseline, *results.others]
    runs = [run for arm in order if (run := arm.runs[seed]).train or run.batch_digests]
    names = tuple(run.arm for run in runs)
    if len(runs) < 2:
        return SeedBatches(seed, names, 0, "", None, frozenset())
    reference, found, differing = runs[0], None, set()
    for run in runs[1:]:
        step = _first_difference(reference, run)
        if step is not None:
            differing.add(run.arm)
            found = found or f"seed {seed}: {reference.arm} and {run.arm} did not see the same batch at step {step:,}"
    last = min(run.step for run in runs)
    shared = [digest for step, digest in reference.batch_digests.items() if step <= last]
    digest = hashlib.sha256("\n".join(shared).encode()).hexdigest()
    return SeedBatches(seed, names, len(shared), digest, found, frozenset(differing))


def _first_difference(a: Run, b: Run) -> int | None:
    last = min(a.step, b.step)
    recorded = {step for run in (a, b) for step, _ in run.train} | set(a.batch_digests) | set(b.batch_digests)
    for step in sorted(step for step in recorded if step <= last):
        digest = a.batch_digests.get(step)
        if digest is None or digest != b.batch_digests.get(step):
            return step
    return None


# ------------------------------------------------------------------------------------------------- what speaks against


def doubts(results: StudyResults) -> list[str]:
    """Everything in the folder that a sceptical reader should know before believing the comparison, in sentences."""
    found = [f"{difference}. The runs are not paired; no verdict." for difference in results.batches.differences]
    for arm in results.arms:
        if arm.unfinished:
            found.append(f"{arm.label}: {'; '.join(f'seed {run.seed} {run.in_words}' for run in arm.unfinished)}.")
    if results.earlier_seeds:
        looks = "; ".join(", ".join(map(str, seeds)) for seeds in results.earlier_seeds)
        found.append(
            f"This study was run before with other seeds ({looks}). Whoever adds or drops seeds after a look at the "
            "result gets intervals that are too narrow."
        )
    ends = sorted({run.val[-1][0] for run in results.runs if run.finished})
    if len(ends) > 1:
        found.append(f"The finished runs were last evaluated at different steps: {', '.join(f'{e:,}' for e in ends)}.")
    for steps, stop_at in sorted(
        {(arm.setting("train.steps"), arm.setting("train.stop_at")) for arm in results.arms}, key=str
    ):
        if isinstance(steps, int) and isinstance(stop_at, int) and stop_at < steps:
            found.append(
                f"Runs were stopped at step {stop_at:,} of a schedule of {steps:,}: the rate had not come down."
            )
    for key in ("cpu", "device", "torch", "precision", "compiled", "commit", "threads"):
        values = {json.dumps(run.environment[key]) for run in results.runs if key in run.environment}
        if len(values) > 1:
            found.append(f"The runs differ in {key}: {', '.join(sorted(values))}.")
    return found + search_doubts(results)


def search_doubts(results: StudyResults) -> list[str]:
    """What a sceptical reader should know of the search that the arms' settings come from."""
    search = results.search
    if search is None:
        return ["No learning-rate search is recorded: each arm ran at the rate that its configuration gives."]
    found, arms = [], [arm for arm in results.arms if arm.matched is None and not arm.seed_offset]
    if search.flops is not None:
        found.append(f"Each arm's search had the same FLOPs ({search.flops:.3g}), not the same number of points.")
    elif any(a != b for a, b in pairwise(search.offered(arm.name) for arm in arms)):
        found.append("The arms were not searched over the same grid and seeds.")
    for arm in arms:
        chosen, points = search.chosen.get(arm.name), search.points(arm.name)
        if chosen is None:
            found.append(f"{arm.label}: the search has chosen no rate for it.")
            continue
        if chosen.point is None:
            found.append(f"{arm.label}: no point of its search was finished with every seed, so it was not trained.")
            continue
        finite = {frozenset(point): loss for point, loss in points.items() if loss is not None}
        if finite and finite.get(frozenset(chosen.point), math.inf) > min(finite.values()):
            found.append(f"{arm.label}: the chosen point is not the one of the lowest loss in its search.")
        for axis, value, low, high in search.edges(arm.name):
            found.append(
                f"{arm.label}: the chosen {'peak rate' if axis == 'train.lr' else axis} {value:g} is at the edge of "
                f"its grid ({low:g} to {high:g}); a better one may lie outside."
            )
        if search.steps is not None and arm.setting("train.steps") not in (None, search.steps):
            found.append(
                f"{arm.label}: trained for {arm.setting('train.steps'):,} steps, though its rate was searched at "
                f"{search.steps:,}."
            )
        for path, wanted in chosen.point:
            used = arm.setting(path)
            if used is not None and not _is_close(used, wanted):
                found.append(
                    f"{arm.label}: trained at {path} = {_short(used)}, though the search chose {_short(wanted)}."
                )
    return found


def _is_close(a: Any, b: Any) -> bool:
    numbers = all(isinstance(value, int | float) for value in (a, b))
    return math.isclose(a, b, rel_tol=1e-9) if numbers else a == b


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
