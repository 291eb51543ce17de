"""Likelihood tasks over a study: every finished run scored on the same items, and what the arms differ by.

`evaluation.json` in the study's folder keeps each run's answers, item by item, so that differences are paired. Two
intervals stand side by side and answer two questions. Over the **seeds**: would other trainings of both arms differ
so? A paired t interval on each seed's difference in accuracy, whose p, corrected by Holm over all arms and tasks of the
family, is the test. Over the **items**: would other items of the kind show it, the trained models as they are? A t
interval on each item's difference, mean over the seeds. The test is on the plain accuracy alone; the length-normalised
one is shown beside it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qurve.errors import BadInput
from qurve.files import MANIFEST, sha256_of, write_atomic
from qurve.runfolder import RunFolder
from qurve.study.effects import not_comparable
from qurve.study.paired import holm, paired_interval, paired_p
from qurve.study.power import LEAST_SEEDS
from qurve.study.provenance import folder_of
from qurve.study.results import Arm, StudyResults
from qurve.study.same_run import NAMED
from qurve.study.statistics import comparisons, level_of
from qurve.study.study_json import damage_named, number, one_line, read_plain
from qurve.study.tables import NONE, chance, plain, signed
from qurve.study.worth import Table

if TYPE_CHECKING:
    from qurve.evaluate import Task
    from qurve.train.config import Precision

FILE = "evaluation.json"
FORMAT = 1


@dataclass(frozen=True)
class Answers:
    """One run on one task."""

    sha256: str
    """Of the items."""
    chance: float | None
    correct: str
    """`1` and `0`, item by item."""
    correct_norm: str | None

    @property
    def accuracy(self) -> float:
        return self.correct.count("1") / len(self.correct)

    @property
    def accuracy_norm(self) -> float | None:
        return None if self.correct_norm is None else self.correct_norm.count("1") / len(self.correct_norm)


@dataclass(frozen=True)
class RunEvaluation:
    arm: str
    seed: int
    checkpoint: str
    """Name of the checkpoint and the sha256 of its manifest."""
    tasks: dict[str, Answers]


@dataclass(frozen=True)
class StudyEvaluation:
    precision: str
    runs: tuple[RunEvaluation, ...]
    reservations: tuple[str, ...] = ()
    """What is not shown of the answers, in sentences: said beside them, and not kept in the file."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names, in the order of their first evaluation."""
        return tuple(dict.fromkeys(name for run in self.runs for name in run.tasks))

    def answers(self, arm: str, seed: int, task: str) -> Answers | None:
        run = next((run for run in self.runs if (run.arm, run.seed) == (arm, seed)), None)
        return None if run is None else run.tasks.get(task)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "precision": self.precision, "runs": [dataclasses.asdict(run) for run in self.runs]}


# ---------------------------------------------------------------------------------------------------------- evaluating


def evaluate_study(
    results: StudyResults,
    tasks: Sequence[Task],
    *,
    data: str | os.PathLike[str] | None = None,
    device: str = "auto",
    precision: Precision = "float32",
    batch_size: int = 8,
    say: Callable[[str], None] = lambda _: None,
) -> StudyEvaluation:
    """Evaluate the last checkpoint of every finished run on the tasks, and keep it in the study's folder.

    Answers that are there already, of the same checkpoint, items and precision, are not asked for again; each run is
    kept when it is done, so that a call that was cut short is continued by the same call. Raises `BadInput` where no
    run is finished or one's last checkpoint is gone, and as `open_model` and `evaluate_task` do.
    """
    from qurve.evaluate import evaluate_task, open_model

    finished = [run for run in results.runs if run.finished]
    if not finished:
        raise BadInput(f"{results.folder}: no run is finished yet, so there is nothing to evaluate")
    before = load_evaluation(results)
    known = {} if before is None or before.precision != precision else {(r.arm, r.seed): r for r in before.runs}
    for place, run in enumerate(finished, 1):
        folder = folder_of(results, run)
        mark = _mark(RunFolder(folder).kept_checkpoint(run.step))
        old = known.get((run.arm, run.seed))
        kept = old.tasks if old is not None and old.checkpoint == mark else {}
        wanted = [task for task in tasks if task.name not in kept or kept[task.name].sha256 != task.sha256]
        if wanted:
            model = open_model(folder, data=data, device=device, precision=precision)
            for task in wanted:
                found = evaluate_task(model, task, batch_size=batch_size)
                norm = None if found.correct_norm is None else _bits(found.correct_norm)
                kept = {**kept, task.name: Answers(found.sha256, found.chance, _bits(found.correct), norm)}
        said = ", ".join(f"{task.name} {100 * kept[task.name].accuracy:.1f} %" for task in tasks)
        say(f"{place} of {len(finished)}: {run.arm}, seed {run.seed}: {said}")
        known[run.arm, run.seed] = RunEvaluation(run.arm, run.seed, mark, kept)
        if wanted:
            order = [known[one.arm, one.seed] for one in finished if (one.arm, one.seed) in known]
            write_atomic(results.folder / FILE, json.dumps(StudyEvaluation(precision, tuple(order)).to_json()) + "\n")
    return StudyEvaluation(precision, tuple(known[run.arm, run.seed] for run in finished))


def load_evaluation(results: StudyResults) -> StudyEvaluation | None:
    """What `evaluate_study` kept, or None. Raises `BadInput` for a file that is not what it wrote.

    Answers of another checkpoint than the one that a finished run ends with now are left out, and it is said so.
    """
    file = results.folder / FILE
    if not os.path.lexists(file):
        return None
    with damage_named(file, "remove it and evaluate the study again"):
        tree = read_plain(file.read_bytes())
        if tree["format"] != FORMAT:
            raise BadInput(f"format {tree['format']!r}, not {FORMAT}")
        runs = [
            RunEvaluation(
                str(run["arm"]),
                int(run["seed"]),
                str(run["checkpoint"]),
                {one_line(name): _read_answers(answers) for name, answers in run["tasks"].items()},
            )
            for run in tree["runs"]
        ]
        kept = StudyEvaluation(str(tree["precision"]), tuple(runs))
    return _of_now(results, kept)


def _of_now(results: StudyResults, evaluation: StudyEvaluation) -> StudyEvaluation:
    """The answers of the runs as they are now, and in words which were left out or cannot be told."""
    now = {(run.arm, run.seed): run for run in results.runs if run.finished}
    kept, other, gone = list[RunEvaluation](), list[str](), list[str]()
    for one in evaluation.runs:
        run, said = now.get((one.arm, one.seed)), f"{one.arm} seed {one.seed}"
        checkpoint = None if run is None else RunFolder(folder_of(results, run)).checkpoint(run.step)
        if checkpoint is None or one.checkpoint.partition(" ")[0] != checkpoint.name:
            other.append(said)
        elif not (checkpoint / MANIFEST).is_file():
            gone.append(said)
            kept.append(one)
        elif one.checkpoint != _mark(checkpoint):
            other.append(said)
        else:
            kept.append(one)
    reservations = [
        f"{words}: {', '.join(runs[:NAMED])}{f' and {len(runs) - NAMED} more' if len(runs) > NAMED else ''}."
        for runs, words in (
            (other, "Left out are answers of another checkpoint than a run ends with now; evaluate the study again"),
            (gone, "The checkpoints are gone, so that only the step says that these runs are those evaluated"),
        )
        if runs
    ]
    return StudyEvaluation(evaluation.precision, tuple(kept), tuple(reservations))


def _mark(checkpoint: Path) -> str:
    return f"{checkpoint.name} {sha256_of(checkpoint / MANIFEST)}"


def _read_answers(tree: dict[str, Any]) -> Answers:
    answers = Answers(**tree)
    if not isinstance(answers.sha256, str):
        raise BadInput(f"{answers.sha256!r} is no digest of the items")
    if answers.chance is not None:
        number(answers.chance, "chance", 0)
    for bits in (answers.correct, answers.correct_norm):
        is_row = isinstance(bits, str) and bits and not set(bits) - {"0", "1"} and len(bits) == len(answers.correct)
        if not is_row and (bits is not None or bits is answers.correct):
            raise BadInput("answers are no row of 0 and 1")
    return answers


def _bits(correct: Sequence[bool]) -> str:
    return "".join("01"[one] for one in correct)


# ----------------------------------------------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class TaskDifference:
    """One arm against the baseline on one task; shares, not per cent. None where a number is not defined."""

    task: str
    arm: str
    seeds: tuple[int, ...]
    items: int
    accuracy: float
    accuracy_norm: float | None
    """Both are means over the arm's evaluated seeds; the differences over those that the baseline has too."""
    diff: float | None
    low: float | None
    high: float | None
    """95 per cent, over the seeds."""
    low_items: float | None
    high_items: float | None
    """95 per cent, over the items."""
    diff_norm: float | None
    p: float | None
    p_holm: float | None
    why: str = ""
    """Why there is no test."""


def task_differences(results: StudyResults, evaluation: StudyEvaluation) -> list[TaskDifference]:
    """Every arm but the baseline on every task, task by task.

    The study's own arms are one family over all tasks, those at the baseline's point another; an A/A arm is of neither.
    """
    alone = [[arm] for arm in results.others if arm.seed_offset]
    matched = [arm for arm in results.matched if not arm.seed_offset]
    found: dict[tuple[str, str], TaskDifference] = {}
    for family in (results.primary, matched, *alone):
        pairs = [pair for task in evaluation.tasks for arm in family if (pair := _pair(results, evaluation, arm, task))]
        for pair, p_holm in zip(pairs, holm([pair.p for pair in pairs]), strict=True):
            found[pair.task, pair.arm] = dataclasses.replace(pair, p_holm=p_holm)
    return [found[task, arm.name] for task in evaluation.tasks for arm in results.others if (task, arm.name) in found]


def _pair(results: StudyResults, evaluation: StudyEvaluation, arm: Arm, task: str) -> TaskDifference | None:
    ours = {seed: one for seed in arm.runs if (one := evaluation.answers(arm.name, seed, task)) is not None}
    base_arm = results.baseline.name
    base = {seed: one for seed in ours if (one := evaluation.answers(base_arm, seed, task)) is not None}
    base = {seed: one for seed, one in base.items() if one.sha256 == ours[seed].sha256}
    if not ours:
        return None
    any_one = next(iter(ours.values()))
    per_seed = [ours[seed].accuracy - base[seed].accuracy for seed in base]
    norms = [
        mine - theirs
        for seed in base
        if (mine := ours[seed].accuracy_norm) is not None and (theirs := base[seed].accuracy_norm) is not None
    ]
    diff = low = high = low_items = high_items = p = None
    alike = len({one.sha256 for one in (*ours.values(), *base.values())}) == 1
    why = _refusal(results, arm, len(per_seed)) if alike else "its runs were evaluated on different items"
    if per_seed and alike and not_comparable(results, arm) is None:
        diff = statistics.fmean(per_seed)
        per_item = _per_item([ours[seed].correct for seed in base], [base[seed].correct for seed in base])
        if len(per_item) >= 2:
            _, low_items, high_items = paired_interval(per_item)
        if len(per_seed) >= 2:
            _, low, high = paired_interval(per_seed)
        p = None if why else paired_p(per_seed)
    return TaskDifference(
        task=task,
        arm=arm.name,
        seeds=tuple(base),
        items=len(any_one.correct),
        accuracy=statistics.fmean(one.accuracy for one in ours.values()),
        accuracy_norm=_mean([one.accuracy_norm for one in ours.values()]),
        diff=diff,
        low=low,
        high=high,
        low_items=low_items,
        high_items=high_items,
        diff_norm=statistics.fmean(norms) if norms and diff is not None else None,
        p=p,
        p_holm=None,
        why=why,
    )


def _refusal(results: StudyResults, arm: Arm, seeds: int) -> str:
    """Why no test may be made of an arm; empty where nothing speaks against one."""
    if (apart := not_comparable(results, arm)) is not None:
        return apart
    if seeds < LEAST_SEEDS:
        return f"{seeds} seed{'' if seeds == 1 else 's'} in both decide nothing"
    pair = next(pair for pair in comparisons(results) if pair.arm == arm.name)
    return pair.verdict if pair.p is None else ""


def _per_item(ours: Sequence[str], base: Sequence[str]) -> list[float]:
    """Each item's difference in correctness, mean over the seeds."""
    by_seed = [[int(a) - int(b) for a, b in zip(x, y, strict=True)] for x, y in zip(ours, base, strict=True)]
    return [statistics.fmean(item) for item in zip(*by_seed, strict=True)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


# ------------------------------------------------------------------------------------------------------------ in words


def evaluation_table(results: StudyResults, evaluation: StudyEvaluation) -> Table:
    """Accuracies in per cent, differences in points; the baseline's rows come first in each task."""
    differences = task_differences(results, evaluation)
    labels = {arm.name: arm.label for arm in results.arms}
    level = level_of(results)
    rows: list[list[str]] = []
    reasons: dict[str, list[str]] = {}
    for task in evaluation.tasks:
        base = [one for seed in results.baseline.runs if (one := evaluation.answers(results.baseline.name, seed, task))]
        if base:
            means = (statistics.fmean(one.accuracy for one in base), _mean([one.accuracy_norm for one in base]))
            rows.append([f"{task}: {results.baseline.label}", str(len(base)), *map(_percent, means), *(NONE,) * 4])
        for pair in (pair for pair in differences if pair.task == task):
            rows.append(
                [
                    f"{task}: {labels[pair.arm]}",
                    str(len(pair.seeds)),
                    _percent(pair.accuracy),
                    _percent(pair.accuracy_norm),
                    _points(pair.diff, pair.low, pair.high),
                    NONE if pair.low_items is None else f"{_point(pair.low_items)} to {_point(pair.high_items)}",
                    _point(pair.diff_norm),
                    chance(pair.p_holm) + ("" if pair.p_holm is None or pair.p_holm > level else " *"),
                ]
            )
            if pair.why:
                reasons.setdefault(pair.why, []).append(labels[pair.arm])
    guesses = {
        task: f"{task} {_percent(one.chance)}"
        for task in evaluation.tasks
        for run in evaluation.runs
        if (one := run.tasks.get(task)) is not None and one.chance is not None
    }
    guess = ", ".join(guesses.values())
    notes = [
        "Accuracy in per cent, differences to the baseline in points: more is better. Per byte: each choice's "
        "log-likelihood divided by its length. In brackets: the 95 % interval over the seeds, paired; over the items: "
        "how far the difference hangs on these items, the models as they are.",
        f"p: paired t test over the seeds after Holm for all arms and tasks of a family; * at most {level:.2g}.",
        f"Precision {evaluation.precision}.{f' A blind guess: {guess}.' if guess else ''}",
        *(f"No test for {', '.join(dict.fromkeys(arms))}: {why}." for why, arms in reasons.items()),
        *evaluation.reservations,
    ]
    head = ["task: arm", "n", "accuracy", "per byte", "difference", "over the items", "per byte, difference", "p Holm"]
    return Table("Accuracy on likelihood tasks", head, rows, notes)


def _percent(share: float | None) -> str:
    return plain(None if share is None else 100 * share, 1)


def _point(share: float | None) -> str:
    return signed(None if share is None else 100 * share, 1)


def _points(diff: float | None, low: float | None, high: float | None) -> str:
    return _point(diff) + ("" if low is None else f" [{_point(low)}, {_point(high)}]")


# ----------------------------------------------------------------------------------------------------- loss and errors


@dataclass(frozen=True)
class LossAndError:
    """Every evaluated run of a study on one task: arm -> (final loss, share of items that are wrong)."""

    task: str
    points: dict[str, tuple[tuple[float, float], ...]]

    @property
    def n(self) -> int:
        return sum(map(len, self.points.values()))

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's, over all runs; None for fewer than three, and where all losses or all errors are alike."""
        losses, errors = zip(*(point for points in self.points.values() for point in points), strict=True)
        if self.n < 3 or len(set(losses)) == 1 or len(set(errors)) == 1:
            return None
        return statistics.correlation(_ranks(losses), _ranks(errors))


def losses_and_errors(results: StudyResults, evaluation: StudyEvaluation) -> list[LossAndError]:
    """One for each task: does the loss say which run makes fewer errors?"""
    found = []
    for task in evaluation.tasks:
        points = {}
        for arm in (results.baseline, *results.others):
            mine = tuple(
                (run.final_loss, 1 - one.accuracy)
                for run in arm.finished
                if run.final_loss is not None and (one := evaluation.answers(arm.name, run.seed, task)) is not None
            )
            if mine:
                points[arm.name] = mine
        if points:
            found.append(LossAndError(task, points))
    return found


def _ranks(values: Sequence[float]) -> list[float]:
    """From 1; values that are alike share the mean of their ranks."""
    order = sorted(values)
    starts = [0, *(place for place, (a, b) in enumerate(pairwise(order), 1) if a != b), len(order)]
    rank = {order[begin]: (begin + 1 + end) / 2 for begin, end in pairwise(starts)}
    return [rank[value] for value in values]
