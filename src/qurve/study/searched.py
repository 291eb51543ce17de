"""What a search has found: the evidence that it leaves in a study's `study.json`, written and read here."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qurve.study.axes import Range, Value, beyond, is_finite, is_near_end, is_number, rounded
from qurve.study.search import Configs, Losses, Point, Score, Search, Trial, trials
from qurve.study.study_json import one_line


def evidence(search: Search, configs: Configs, scores: Sequence[Score], **facts: Any) -> dict[str, Any]:
    """What `study.json` keeps of a search: the space, every score and, when the search is over, each arm's choice.

    An arm's choice is the point of its lowest mean validation loss at the study's own length; a point that did not
    finish with every seed is out. `point` is None where that leaves none. `facts` are kept beside it.
    """
    losses, chosen = Losses(scores, search.seeds), {}
    if not trials(search, configs, scores):
        for arm, config in configs.items():
            steps = config.train.steps
            ranked = losses.ranked(arm, dict.fromkeys(s.trial.point for s in scores if s.trial.arm == arm), steps)
            best = (dict(ranked[0]), losses.mean(arm, ranked[0], steps)) if ranked else (None, None)
            chosen[arm] = dict(zip(("point", "val_loss"), best, strict=True))
    return {
        "sampler": search.sampler,
        "axes": list(search.space),
        "space": {
            axis: dataclasses.asdict(values) if isinstance(values, Range) else list(values)
            for axis, values in search.space.items()
        },
        "trials": search.trials,
        "flops": search.flops,
        "factor": search.factor if search.sampler == "halving" else None,
        "steps": next(iter(configs.values())).train.steps,
        **facts,
        "seeds": list(search.seeds),
        "chosen": chosen,
        "scores": [
            {
                "arm": score.trial.arm,
                "point": dict(score.trial.point),
                "steps": score.trial.steps,
                "seed": score.trial.seed,
                "val_loss": score.val_loss,
                "status": score.status,
            }
            for score in scores
        ],
    }


CAME_TO_AN_END = ("finished", "diverged")
"""Statuses of trials that say something of their point; one that failed says nothing."""


@dataclass(frozen=True)
class Chosen:
    """An arm's best point; None where none finished with every seed."""

    point: Point | None
    val_loss: float | None

    @property
    def lr(self) -> Any:
        return dict(self.point or ()).get("train.lr")

    @property
    def min_lr(self) -> Any:
        return dict(self.point or ()).get("train.min_lr")


@dataclass(frozen=True)
class Searched:
    """A search as a study's evidence tells it."""

    evidence: str
    """Where it is kept, if it was not made by the study itself."""
    sampler: str
    axes: tuple[str, ...]
    space: Mapping[str, tuple[Value, ...] | Range]
    """What each axis had to offer before any extension; none of a search that did not write it down."""
    trials: int | None
    """The budget of each arm, where it was one of points."""
    flops: float | None
    """The budget of each arm, where it was one of FLOPs."""
    factor: int | None
    """By which halving divides; None of a search that did not write it down."""
    tokens_per_step: int | None
    """What its trials trained with; None of a search that did not write it down."""
    data_fingerprint: str | None
    """Of the data that its trials saw; None of a search that did not write it down."""
    seeds: tuple[int, ...]
    steps: int | None
    chosen: dict[str, Chosen]
    scores: tuple[Score, ...]

    def points(self, arm: str) -> dict[Point, float | None]:
        """Point -> mean validation loss over the search's seeds at its full length; None where one did not finish."""
        losses, steps = Losses(self.scores, self.seeds), self.steps or 0
        tried = dict.fromkeys(s.trial.point for s in self.scores if s.trial.arm == arm)
        return {point: losses.mean(arm, point, steps) for point in tried if losses.has(arm, point, steps)}

    def margin(self, arm: str, axis: str) -> dict[Value, float | None]:
        """Value on the axis, ascending -> the lowest of the mean losses that `points` has there; None where none
        finished."""
        found: dict[Value, list[float]] = {}
        for point, loss in self.points(arm).items():
            found.setdefault(on(axis, point), []).extend([] if loss is None else [loss])
        return {value: min(found[value], default=None) for value in sorted(found, key=_ascending)}

    def grid(self, arm: str) -> dict[tuple[float, Any], float | None]:
        """(peak rate, floor) -> the lowest of the mean losses that `points` has there; None where none finished.

        Empty where the search was not over rates; the floor is None where it was not searched.
        """
        cells: dict[tuple[Any, Any], list[float | None]] = {}
        for point, loss in self.points(arm).items():
            given = dict(point)
            if "train.lr" in given:
                cells.setdefault((given["train.lr"], given.get("train.min_lr")), []).append(loss)
        return {
            place: min((loss for loss in losses if loss is not None), default=None)
            for place, losses in sorted(cells.items(), key=lambda cell: (cell[0][0], cell[0][1] or 0.0))
        }

    def tried(self, arm: str) -> set[tuple[Point, int, int]]:
        """Every point, number of steps and seed that the arm was tried with: what failed was no try of the arm."""
        return {
            (s.trial.point, s.trial.steps, s.trial.seed)
            for s in self.scores
            if s.trial.arm == arm and s.status in CAME_TO_AN_END
        }

    def failed(self, arm: str) -> int:
        """How many of the arm's trials came to no end."""
        return sum(score.trial.arm == arm and score.status not in CAME_TO_AN_END for score in self.scores)

    def offered(self, arm: str) -> Any:
        """What must be the same for every arm: the points, lengths and seeds that it was tried with before any choice
        among its own results. Of Optuna, which chooses from the second point on, how many they may be."""
        if self.sampler == "optuna":
            return self.trials, len(self.seeds)
        tried = self.tried(arm)
        if self.sampler == "halving":
            shortest = min((steps for _, steps, _ in tried), default=0)
            tried = {one for one in tried if one[1] == shortest}
        return {(frozenset(point), steps, seed) for point, steps, seed in tried}

    def halved_apart(self, arm: str) -> str | None:
        """Where the arm's halving was another one than its points at the shortest length call for: then its choice is
        from fewer, or from more, than the others'. None where nowhere, and of other samplers."""
        losses, tried = Losses(self.scores, self.seeds), self.tried(arm)
        if self.sampler != "halving" or not tried:
            return None
        lengths = sorted({*(steps for _, steps, _ in tried), *(() if self.steps is None else (self.steps,))})
        trained = {steps: {point for point, at, _ in tried if at == steps} for steps in lengths}
        wanted = [point for point in dict.fromkeys(s.trial.point for s in self.scores) if point in trained[lengths[0]]]
        more = len(wanted)
        for shorter, steps in itertools.pairwise(lengths):
            more = -(-more // self._factor(lengths))
            wanted = losses.ranked(arm, wanted, shorter)[:more]
            if trained[steps] != set(wanted):
                right = len(trained[steps] & set(wanted))
                best = f"of the {len(wanted)} points that were best at {shorter:,} steps"
                return f"{best} {right} went on to {steps:,}, and {len(trained[steps]) - right} others"
        return None

    def _factor(self, lengths: Sequence[int]) -> int:
        """Of a search that did not write it down: by its two shortest lengths."""
        if self.factor is not None or len(lengths) < 2:
            return self.factor or 2
        return max(2, round(lengths[1] / lengths[0]))

    def flops_apart(self, step_costs: Mapping[str, float]) -> str | None:
        """Why of these arms one did not have the same FLOPs as the others; None where each had all that it could pay
        for. `step_costs` are their training FLOPs of one step with every seed."""
        assert self.flops is not None
        lengths = sorted({steps for arm in step_costs for _, steps, _ in self.tried(arm)})
        tried = {arm: {point for point, steps, _ in self.tried(arm) if steps == lengths[0]} for arm in step_costs}
        factor = self._factor(lengths)

        def cost(arm: str, points: int) -> float:
            total = 0
            for steps in lengths:
                total += steps * points
                points = -(-points // factor)  # the best of them go on
            return step_costs[arm] * total

        most = max(map(len, tried.values()))
        for arm, points in tried.items():
            if cost(arm, len(points)) > self.flops * (1 + 1e-9):
                return f"the search of {arm} cost more than its {self.flops:.3g} FLOPs"
            if len(points) < most and cost(arm, len(points) + 1) <= self.flops:
                return f"the search of {arm} left FLOPs unspent that pay for another point"
        return None

    def edges(self, arm: str) -> list[tuple[str, float, float, float]]:
        """Axes on which the arm's choice lies at an open edge of what it could be: (axis, chosen, lowest, highest).

        Of values that were drawn, those ends are the range's: the outermost that happened to be drawn is no edge.
        """
        point, found = self.chosen[arm].point, list[tuple[str, float, float, float]]()
        for axis in self.axes if point is not None else ():
            offered, value = self.space.get(axis, ()), on(axis, point or ())
            if isinstance(offered, Range):
                if is_number(value) and is_near_end(axis, offered, float(value)):  # type: ignore[arg-type]
                    found.append((axis, float(value), offered.low, offered.high))  # type: ignore[arg-type]
                continue
            values = [*offered, *(on(axis, tried) for tried, _, _ in self.tried(arm))]
            if beyond(axis, values, value) is not None:
                numbers = [float(v) for v in values if is_number(v)]  # type: ignore[arg-type]
                found.append((axis, float(value), min(numbers), max(numbers)))  # type: ignore[arg-type]
        return found


def _ascending(value: Value) -> tuple[bool, float, str]:
    """Numbers by their size, then everything else by its name."""
    return (False, float(value), "") if is_number(value) else (True, 0.0, str(value))  # type: ignore[arg-type]


def on(axis: str, point: Point) -> Value:
    """A point's value on an axis; of a share, rounded so that one value is one number again."""
    path, _, of = axis.partition("/")
    given: dict[str, Any] = dict(point)
    return rounded(given[path] / given[of], 9) if of and given[of] else given[path]


def read_evidence(tree: dict[str, Any]) -> Searched:
    """The evidence of a search from its JSON tree. Raises what `damage_named` makes a message of for anything else."""
    steps = tree["steps"]
    if isinstance(steps, bool) or not isinstance(steps, int | None):
        raise ValueError(f"search.steps = {steps!r}")

    axes = tuple(one_line(axis) for axis in tree["axes"])

    def trial(item: dict[str, Any]) -> Trial:
        return Trial(
            str(item["arm"]), _point(item["point"], axes), int(item.get("steps", steps or 0)), int(item["seed"])
        )

    return Searched(
        evidence=one_line(tree.get("evidence", "")),
        sampler=one_line(tree.get("sampler", "grid")),
        axes=axes,
        space={axis: _offered(tree["space"][axis]) for axis in axes} if "space" in tree else {},
        trials=None if tree.get("trials") is None else int(tree["trials"]),
        flops=_finite(tree.get("flops")),
        factor=None if (factor := tree.get("factor")) is None else max(2, int(factor)),
        tokens_per_step=None if (tokens := tree.get("tokens_per_step")) is None else int(tokens),
        data_fingerprint=None if (data := tree.get("data_fingerprint")) is None else one_line(data),
        seeds=tuple(int(seed) for seed in tree["seeds"]),
        steps=steps,
        chosen={
            arm: Chosen(None if item["point"] is None else _point(item["point"], axes), _finite(item["val_loss"]))
            for arm, item in tree["chosen"].items()
        },
        scores=tuple(Score(trial(item), _finite(item["val_loss"]), str(item["status"])) for item in tree["scores"]),
    )


def _offered(tree: Any) -> tuple[Value, ...] | Range:
    if isinstance(tree, dict):
        low, high = _finite(tree["low"]), _finite(tree["high"])
        if low is None or high is None:
            raise ValueError(f"a range from {low} to {high}")
        return Range(low, high, bool(tree["log"]))
    if not isinstance(tree, list) or not all(isinstance(value, Value) for value in tree):
        raise ValueError(f"the values {tree!r} of an axis")
    return tuple(tree)


def _point(tree: dict[str, Any], axes: Sequence[str]) -> Point:
    for axis in axes:
        given = [tree[path] for path in axis.partition("/")[::2] if path]
        if len(given) == 2 and not all(map(is_number, given)):
            raise ValueError(f"{axis} of the point {tree!r}")
    for path, value in tree.items():
        is_rate = path in ("train.lr", "train.min_lr")
        if not isinstance(value, Value) or (is_rate and not is_number(value)):
            raise ValueError(f"{path} = {value!r} of a point")
        if is_number(value) and not is_finite(value):
            raise ValueError(f"{path} = {value!r} of a point")
    return tuple(tree.items())


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
