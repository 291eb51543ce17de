"""Read a study's folder: its arms, its runs as far as they have come, and what shows that they are comparable.

    study.json                   title, arms (configuration, parameters, the paper's printed values), seeds, search
    runs/<arm>/seed-<n>/         one run folder each, see `qurve.runfolder`

Nothing here trains or writes. Losses are in nats per token. A run counts as finished only when its status says so and
its last loss is finite, when it has made all its arm's updates and has the batch of each, and when its folder holds the
run that `study.json` means; whatever else has happened to it is carried in words and never enters a mean.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from qurve.errors import BadInput, QurveError, did_you_mean
from qurve.runfolder import RunFolder
from qurve.study.batches import BatchProof, identical_batches
from qurve.study.continued import Part, check_settings, parts_of
from qurve.study.dynamics import Measures, measures_of
from qurve.study.same_run import begun_runs, check_run, was_seen
from qurve.study.searched import Searched, read_evidence
from qurve.study.study_json import (
    RESTORE,
    check_plain,
    count,
    damage_named,
    no_study,
    number,
    one_line,
    positive,
    read_study,
    updates_of,
)

AGAIN = "remove its folder to have it made again"


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
    grad_norms: tuple[float, ...] = ()
    """Step by step, before clipping."""
    max_logit: float | None = None
    """The largest attention logit of any block at any evaluation; None where none was measured."""
    dynamics: tuple[tuple[int, Measures], ...] = ()
    """(step, measure -> its value in each block), ascending, of the steps at which they were recorded."""
    fingerprint: str = ""
    """Of the data that it was trained and evaluated on; empty where the run does not say."""

    @property
    def parts(self) -> list[Part]:
        """One, but for a run that was stopped and continued."""
        return parts_of(self.environment)

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def val_loss(self) -> float | None:
        """The last validation loss of a finished run, else None: never the last finite value of one that broke."""
        return self.val[-1][1] if self.finished else None

    @property
    def reported(self) -> tuple[tuple[int, float], ...]:
        """(step, loss) on the split that the study reports on."""
        return self.test if self.split == "test" else self.val

    @property
    def final_loss(self) -> float | None:
        """The last loss of a finished run on the split that the study reports on, else None."""
        return self.reported[-1][1] if self.finished else None

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
    looked_in_pool: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """Arm -> the other sets of seeds with which an earlier study of its pool compared it with this baseline."""
    compared_before: Mapping[str, int] = field(default_factory=dict)
    """Family of tests (`qurve.study.looks.FAMILIES`) -> arms beside this study's that were compared with its baseline
    too, in its pool or in run folders that `study.json` does not name: Holm counts them."""
    strays: tuple[str, ...] = ()
    """Run folders of other arms, or of seeds that the study is not known to have had: `arm/seed-3`."""
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
    def family(self) -> int:
        """Arms that the first comparison's verdicts are corrected for, and those of other studies among them."""
        return len(self.primary) + self.compared_before.get("own", 0)

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
    if not os.path.lexists(source):
        raise BadInput(no_study(folder))
    tree = read_study(source)
    with damage_named(source, RESTORE):
        seeds = tuple(tree["seeds"])
        search = None if tree.get("search") is None else read_evidence(tree["search"])
        split = "test" if search is not None and all(_is_tested(item) for item in tree["arms"]) else "val"
        arms = tuple(_arm(folder, item, seeds, split, search) for item in tree["arms"])
        names = [arm.name for arm in arms]
        if (base := tree["baseline"]) not in names:
            raise BadInput(f"the baseline {base!r} is no arm{did_you_mean(str(base), names)}")
        earlier = tuple(tuple(seeds) for seeds in tree.get("earlier_seeds", ()))
        strays, dropped, gone = _strays(folder, names, {*seeds, *(seed for one in earlier for seed in one)})
        if dropped:
            earlier = (*earlier, tuple(sorted({*seeds, *dropped})))
        matched = {f"{name}@{base}" for name in names} & gone
        beside = {family: len(hashes) for family, hashes in tree.get("compared_in_pool", {}).items()}
        for family, of in (("own", gone - matched), ("matched", matched)):
            beside[family] = beside.get(family, 0) + len(of)
        return StudyResults(
            folder=folder,
            name=one_line(tree["name"]),
            title=one_line(tree["title"]),
            command=str(tree["command"]),
            baseline=arms[names.index(base)],
            arms=arms,
            seeds=seeds,
            search=search,
            earlier_seeds=earlier,
            looked_in_pool={arm: tuple(map(tuple, of)) for arm, of in tree.get("looked_in_pool", {}).items()},
            compared_before=beside,
            strays=strays,
            looks=tuple(tree.get("looks", ())),
            split=split,
        )


def _strays(folder: Path, names: Collection[str], seeds: set[int]) -> tuple[tuple[str, ...], set[int], set[str]]:
    """The run folders of other arms and seeds than these, these seeds, and these arms."""
    others = [(arm, seed) for arm, seed in begun_runs(folder) if arm not in names or seed not in seeds]
    found = [(arm, seed) for arm, seed in others if was_seen(RunFolder(folder / "runs" / arm / f"seed-{seed}"))]
    dropped = {seed for arm, seed in found if arm in names}
    return tuple(f"{arm}/seed-{seed}" for arm, seed in found), dropped, {arm for arm, _ in found} - set(names)


def _is_tested(arm: dict[str, Any]) -> bool:
    return "test" in arm["config"].get("eval", {}).get("splits", ())


def _arm(folder: Path, item: dict[str, Any], seeds: Iterable[int], split: str, search: Searched | None) -> Arm:
    name = item["name"]
    chosen = None if search is None else search.chosen.get(name)
    if chosen is not None and chosen.point is None:
        why = "not one point of its search was finished with every seed"
        runs = {seed: Run(name, seed, "diverged", why, (), (), {}, None, 0, {}) for seed in seeds}
    else:
        runs = {seed: _run(folder, item, seed, split) for seed in seeds}
    paper = item.get("paper")
    arm = Arm(
        name=name,
        label=one_line(item.get("label") or name),
        config=dict(item["config"]),
        non_embedding=count(item["non_embedding"], f"non_embedding of {name}"),
        total=count(item["total"], f"total of {name}"),
        flops_per_token=positive(item["flops_per_token"], f"flops_per_token of {name}"),
        paper=None if paper is None else {key: one_line(value) for key, value in paper.items() if value is not None},
        match=None if item.get("match") is None else one_line(item["match"]),
        runs=runs,
        matched=None if item.get("matched") is None else one_line(item["matched"]),
        seed_offset=item.get("seed_offset", 0),
    )
    for path in ("train.lr", "train.weight_decay", "train.min_lr"):
        if (value := arm.setting(path)) is not None or path != "train.min_lr":
            number(value, f"{path} of {name}")
    for path in ("train.steps", "train.tokens_per_step"):
        count(arm.setting(path), f"{path} of {name}")
    return arm


def _run(folder: Path, item: dict[str, Any], seed: int, split: str) -> Run:
    name, place = item["name"], Path("runs", item["name"], f"seed-{seed}")
    try:
        run = RunFolder(folder / place)
        if run.is_begun():
            try:
                check_run(run, item["config"], seed, item.get("seed_offset", 0))
            except BadInput as error:
                raise BadInput(f"{place}: {error}") from None
        return _found(run, name, seed, split, item["config"])
    except (QurveError, OSError, TypeError, AttributeError, KeyError, ValueError, OverflowError) as error:
        return Run(name, seed, "damaged", one_line(error), (), (), {}, None, 0, {})  # the other runs are as they are


def _found(run: RunFolder, arm: str, seed: int, split: str, config: dict[str, Any]) -> Run:
    if not run.status_file.exists():
        return Run(arm, seed, "missing", "", (), (), {}, None, 0, {})
    state, environment = run.status(), run.environment()
    if not run.is_begun():  # its configuration is written last when a run starts
        if state["status"] != "running":
            raise BadInput("its config.json is missing")
        return Run(arm, seed, "missing", "", (), (), {}, None, 0, {})
    check_plain(environment)
    check_settings(parts_of(environment), config)
    lines = list(run.metrics())
    train = {int(line["step"]): line for line in lines if "split" not in line}  # of a resumed step the last line counts
    val, test = ({int(line["step"]): line for line in lines if line.get("split") == s} for s in ("val", "test"))
    status, why = one_line(state.get("status")), one_line(state.get("why", ""))
    if status == "finished":
        _check_steps(train, int(state["step"]), updates_of(config))
    for measured, what in ((val, "validation"), (test, "test"))[: 1 if split == "val" else 2]:
        if status == "finished":
            _check_end(measured, what, int(state["step"]))
            if not math.isfinite(last := measured[max(measured)]["loss"]):
                status, why = "diverged", f"its last {what} loss is not finite"
            else:
                positive(last, f"its last {what} loss")  # gains are relative to it
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
        tokens_per_s=positive(newest["tokens"] / seconds, "its tokens per second") if seconds > 0 else None,
        step=max(train, default=int(state.get("step") or 0)),
        environment=environment,
        test=_losses(test),
        split=split,
        grad_norms=tuple(line["grad_norm"] for _, line in sorted(train.items())),
        max_logit=max(
            (number(one, "a logit") for line in lines for one in line.get("max_logit", ()) if one is not None),
            default=None,
        ),
        dynamics=measures_of(train),
        fingerprint=str(run.config_json()[0].get("data", {}).get("fingerprint") or ""),
    )


def _check_steps(train: dict[int, dict[str, Any]], step: int, updates: int | None) -> None:
    """Raise `ValueError` unless a finished run has made all its arm's updates and has the batch of each: what was not
    recorded is not shown to be the same as another arm's."""
    if updates is not None and step != updates:
        raise ValueError(f"finished after step {step:,}, and its arm makes {updates:,}; {AGAIN}")
    if (last := max(train, default=0)) > step:
        raise ValueError(f"finished after step {step:,}, and has a training line of step {last:,}; {AGAIN}")
    for place in range(1, step + 1):
        if not train.get(place, {}).get("batch_sha"):
            raise ValueError(f"finished after step {step:,} without a record of its batch at step {place:,}; {AGAIN}")


def _check_end(measured: dict[int, Any], what: str, step: int) -> None:
    """Raise `ValueError` unless the last evaluation is the one after the last update: a line that was lost would leave
    an earlier, higher loss in the place of the final one."""
    if not measured:
        raise ValueError(f"finished without a {what} loss; {AGAIN}")
    if max(measured) != step:
        raise ValueError(
            f"finished after step {step:,}, and its last {what} loss is of step {max(measured):,}; {AGAIN}"
        )


def _losses(lines: dict[int, dict[str, Any]]) -> tuple[tuple[int, float], ...]:
    pairs = ((step, line["loss"]) for step, line in sorted(lines.items()))
    return tuple((step, number(loss, "a loss")) for step, loss in pairs if math.isfinite(loss))


def _digest(text: Any) -> str:
    if not isinstance(text, str) or not text.isascii():
        raise ValueError(f"{text!r} is no digest")
    return text
