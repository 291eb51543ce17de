"""The fair search: every arm is tried at the same points, or at the same number of them, and chosen on validation.

A study's `Search` says where to look, with which sampler, and what each arm may spend. `trials` says which runs are to
be made next, from the scores so far and nothing else: a search that was cut short goes on where it was, and no sampler
needs a training to be tested. What a search leaves in `study.json` is `qurve.study.searched`.

A point is a tuple of `(settings path, value)`. An axis `train.min_lr/train.lr` is a share: its values times the point's
`train.lr` are the point's `train.min_lr`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import operator
import random
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qurve import accounting
from qurve.config import apply_settings
from qurve.errors import BadInput, did_you_mean
from qurve.study.axes import Range as Range
from qurve.study.axes import Value, beyond, is_finite, is_number
from qurve.train.config import RunConfig

Point = tuple[tuple[str, Value], ...]
Configs = Mapping[str, RunConfig]
"""The arms' configurations by name, as they are without a point."""
Sampler = Literal["grid", "random", "halving", "optuna"]

MOST_POINTS = 1000
MOST_LETTERS = 100
"""Of a point's name, which becomes part of a folder's."""


@dataclass(frozen=True)
class Search:
    """Where each arm is tried, and what it may spend on it.

    `space` maps a settings path, or a share such as `train.min_lr/train.lr`, to its values or to a `Range`.

    - `grid`: every combination, for every arm. Where an arm's best point lies at an edge, the next geometric value is
      added there, up to `extensions` times and while the budget allows: for every arm, so that grids stay equal.
    - `random`: points drawn once, by `draw_seed`, and the same for every arm.
    - `halving`: `rungs` lengths of training, each `factor` times the one before, the last one the study's own. All
      points are trained at the first, the best `1 / factor` of them at the next. Each length is a whole schedule, its
      warm-up scaled along: no schedule is compared before its end.
    - `optuna`: each arm's points are proposed from its earlier ones (TPE); all arms get the same number.

    The budget is for each arm: `trials` points (in halving: at the first rung), each trained once with every seed of
    the search; or `flops` of training in all, of which an arm whose step costs less gets more points. A grid needs none
    unless it is to be extended only so far. Raises `BadInput` for a search that cannot be.
    """

    space: Mapping[str, Sequence[Value] | Range]
    sampler: Sampler = "grid"
    trials: int | None = None
    flops: float | None = None
    seeds: tuple[int, ...] = (101,)
    """Not the study's own: what is chosen with a seed looks better with it than it is."""
    extensions: int = 0
    rungs: int = 3
    factor: int = 3
    draw_seed: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        if not self.space:
            raise BadInput('a search needs a space, for example {"train.lr": (1e-3, 2e-3, 4e-3)}')
        for axis, values in self.space.items():
            path, _, of = axis.partition("/")
            if of and (of not in self.space or path in self.space):
                raise BadInput(f"search.space: {axis} is a share, so {of} must be an axis, and {path} none")
            if of and not all(is_number(v) for v in ((values.low,) if isinstance(values, Range) else values)):
                raise BadInput(f"search.space: the values of {axis} are numbers")
            if not isinstance(values, Range) and (not values or len(set(values)) < len(values)):
                raise BadInput(f"search.space: {axis} needs values, each once, not {list(values)}")
        if self.sampler == "grid" and (drawn := [a for a, v in self.space.items() if isinstance(v, Range)]):
            raise BadInput(f"search.space: a grid needs values, and {drawn[0]} has a range; or take another sampler")
        if self.sampler == "random" and not any(isinstance(v, Range) for v in self.space.values()):
            raise BadInput("search.space: a random search draws from at least one Range; or take the grid")
        if self.trials is not None and self.flops is not None:
            raise BadInput("a search's budget is in trials or in flops, not both")
        if self.trials is None and self.flops is None and self.sampler not in ("grid", "halving"):
            raise BadInput(f"a search by {self.sampler} needs a budget: trials or flops")
        for name, least in (("trials", 1), ("flops", 1), ("extensions", 0), ("rungs", 1), ("factor", 2)):
            if (value := getattr(self, name)) is not None and not value >= least:
                raise BadInput(f"search.{name} = {value}: it must be at least {least}")
        if self.trials is not None and self.trials > MOST_POINTS:
            raise BadInput(f"search.trials = {self.trials:,}: at most {MOST_POINTS:,} points are taken")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise BadInput(f"search.seeds must be different, from 0, and at least one, not {list(self.seeds)}")

    def _check_types(self) -> None:
        """What a Python file may get wrong, so that no later comparison stumbles over it."""
        if not isinstance(self.sampler, str) or self.sampler not in _SAMPLERS:
            raise BadInput(f"search.sampler = {self.sampler!r}{did_you_mean(str(self.sampler), _SAMPLERS)}")
        if not isinstance(self.space, Mapping):
            raise BadInput(f"search.space maps settings to their values, not {self.space!r}")
        for axis, values in self.space.items():
            if not isinstance(axis, str) or not isinstance(values, Range | list | tuple):
                raise BadInput(f"search.space: {axis} takes a tuple of values or a Range, not {values!r}")
            for value in () if isinstance(values, Range) else values:
                if not isinstance(value, Value) or (is_number(value) and not is_finite(value)):
                    raise BadInput(f"search.space: {value!r:.40} is no value of {axis}")
        for name in ("trials", "extensions", "rungs", "factor", "draw_seed"):
            if type(value := getattr(self, name)) is not int and not (name == "trials" and value is None):
                raise BadInput(f"search.{name} = {value!r}: it is a whole number")
        if self.flops is not None and not is_finite(self.flops):
            raise BadInput(f"search.flops = {self.flops!r:.40}: it is a finite number")
        if not isinstance(self.seeds, list | tuple) or any(type(seed) is not int for seed in self.seeds):
            raise BadInput(f"search.seeds are whole numbers, not {self.seeds!r}")

    @property
    def paths(self) -> tuple[str, ...]:
        """The settings that a point gives."""
        return tuple(axis.partition("/")[0] for axis in self.space)

    @property
    def first_point(self) -> Point:
        """Some point of the space: its first values, the lowest of ranges."""
        return self.point([values.low if isinstance(values, Range) else values[0] for values in self.space.values()])

    def point(self, values: Iterable[Value]) -> Point:
        """The settings of one value an axis, in the space's order."""
        given = dict(zip(self.space, values, strict=True))
        found: dict[str, Any] = {axis: value for axis, value in given.items() if "/" not in axis}
        for axis, value in given.items():
            path, _, of = axis.partition("/")
            if of:
                found[path] = found[of] * value
        return tuple((path, found[path]) for path in self.paths)


@dataclass(frozen=True)
class Trial:
    """One run of a search: an arm at a point, for so many steps (a whole schedule), with one seed."""

    arm: str
    point: Point
    steps: int
    seed: int


@dataclass(frozen=True)
class Score:
    """What came of a trial; `val_loss` is None where it did not finish."""

    trial: Trial
    val_loss: float | None
    status: str


# ------------------------------------------------------------------------------------------------------ configurations


def configured(config: RunConfig, point: Point, steps: int | None = None) -> RunConfig:
    """The configuration at a point; with `steps`, its whole schedule within so many.

    Raises `BadInput`, which names the setting, where the point does not fit.
    """
    try:
        config = apply_settings(config, [f"{path}={_text(value)}" for path, value in point])
    except BadInput as error:
        raise BadInput(str(error).replace("--set", "search.space:", 1)) from None
    train = config.train
    if train.min_lr > train.lr:
        raise BadInput(
            f"search.space: train.min_lr = {train.min_lr} is above the peak, train.lr = {train.lr}; search it as a "
            "share, train.min_lr/train.lr"
        )
    if steps is None or steps == train.steps:
        return config
    share = steps / train.steps

    def scaled(updates: int | None) -> int | None:
        return None if updates is None else max(1, round(updates * share))

    return dataclasses.replace(
        config,
        train=dataclasses.replace(
            train,
            steps=steps,
            warmup_steps=round(train.warmup_steps * share),
            horizon=scaled(train.horizon),
            decay_steps=scaled(train.decay_steps),
        ),
    )


def trial_config(config: RunConfig, trial: Trial) -> RunConfig:
    """What a trial trains: its arm at its point. It is evaluated on the validation split alone: no search sees test."""
    config = configured(config, trial.point, trial.steps)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, seed=trial.seed),
        eval=dataclasses.replace(config.eval, splits=("val",)),
    )


def trial_name(trial: Trial, config: RunConfig) -> str:
    """`baseline@lr=0.002+min_lr=0.0002`, and its steps where they are not the study's own. It becomes a folder."""
    name = f"{trial.arm}@{point_name(dict(trial.point))}"
    return name if trial.steps == config.train.steps else f"{name}+steps={trial.steps}"


def point_name(point: Mapping[str, Value]) -> str:
    """A point in short words that can be a folder's name."""
    parts = [
        f"{name}={f'{value:.6g}' if isinstance(value, float) else value}"
        for name, value in zip(short_names(list(point)), point.values(), strict=True)
    ]
    return "+".join(re.sub(r"[^A-Za-z0-9._=@+-]+", "-", part).strip("-") for part in parts)[:MOST_LETTERS]


def short_names(paths: Sequence[str]) -> list[str]:
    """The last part of each path, with as many of those before it as it takes to tell all of them apart."""
    for length in itertools.count(1):
        names = [".".join(path.split(".")[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("paths are different")


def _text(value: Value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# -------------------------------------------------------------------------------------------------------------- trials


def trials(search: Search, configs: Configs, scores: Sequence[Score]) -> list[Trial]:
    """The runs to be made next, given the scores so far; none when the search is over.

    Raises `BadInput` for a budget that does not pay for the space, and for points that do not fit an arm.
    """
    scored = {score.trial for score in scores}
    sampled = _SAMPLERS[search.sampler](search, configs, Losses(scores, search.seeds))
    wanted = (Trial(arm, *place, seed) for arm, places in sampled.items() for place in places for seed in search.seeds)
    return [trial for trial in dict.fromkeys(wanted) if trial not in scored]


def planned(search: Search, configs: Configs) -> dict[str, dict[int, int]]:
    """How many runs of how many updates each arm takes (updates -> runs): all rungs, and no extension; see `bound`."""
    found = {}
    for arm, config in configs.items():
        points = _points(search, config)
        if search.sampler == "halving":
            rungs = dict(zip(rung_steps(search, config), _survivors(search, points), strict=True))
        else:
            rungs = {config.train.updates: points}
        found[arm] = {updates: n * len(search.seeds) for updates, n in rungs.items()}
    return found


def bound(search: Search) -> Literal["exactly", "at least", "at most"]:
    """How many runs a search takes, against those that are `planned`.

    A grid may be extended. In halving a point that broke is trained no further, and Optuna may ask for one twice.
    """
    if search.sampler == "grid":
        return "at least" if search.extensions else "exactly"
    return "exactly" if search.sampler == "random" else "at most"


class Losses:
    """The mean validation loss of every arm, point and length that each seed has a score of."""

    def __init__(self, scores: Iterable[Score], seeds: Sequence[int]) -> None:
        found: dict[tuple[str, Point, int], dict[int, float | None]] = {}
        for score in scores:
            trial = score.trial
            found.setdefault((trial.arm, trial.point, trial.steps), {})[trial.seed] = score.val_loss
        self._means = {
            place: mean_or_none(list(losses.values())) for place, losses in found.items() if set(seeds) <= set(losses)
        }

    def has(self, arm: str, point: Point, steps: int) -> bool:
        return (arm, point, steps) in self._means

    def mean(self, arm: str, point: Point, steps: int) -> float | None:
        """None where it did not finish with every seed."""
        return self._means[arm, point, steps]

    def ranked(self, arm: str, points: Iterable[Point], steps: int) -> list[Point]:
        """Those of the points that finished with every seed, the lowest loss first, earlier points before later."""
        means = {point: mean for point in points if (mean := self._means.get((arm, point, steps))) is not None}
        return sorted(means, key=means.__getitem__)


Places = dict[str, list[tuple[Point, int]]]
"""What each arm is tried at: points, and for how many steps."""


def _grid(search: Search, configs: Configs, losses: Losses) -> Places:
    space = {axis: list(values) for axis, values in search.space.items() if not isinstance(values, Range)}
    for config in configs.values():
        _points(search, config)  # refuses a grid that the budget does not pay for
    most = min([MOST_POINTS, *(_budget(search, config) for config in configs.values())])
    for _ in range(search.extensions):
        points = list(_combinations(search, space))
        if not all(losses.has(arm, point, c.train.steps) for arm, c in configs.items() for point in points):
            break
        wider = _extended(search, space, configs, losses, most)
        if wider == space:
            break
        space = wider
    return {arm: [(p, config.train.steps) for p in _combinations(search, space)] for arm, config in configs.items()}


def _combinations(search: Search, space: Mapping[str, Sequence[Value]]) -> dict[Point, tuple[Value, ...]]:
    """Every point of a grid, and its value on each axis."""
    return {search.point(values): values for values in itertools.product(*space.values())}


def _extended(
    search: Search, space: dict[str, list[Value]], configs: Configs, losses: Losses, most: float
) -> dict[str, list[Value]]:
    """The grid, wider by one value wherever an arm's best point lies at an open edge, while it has at most so many."""
    points = _combinations(search, space)
    best = [points[ranked[0]] for arm, c in configs.items() if (ranked := losses.ranked(arm, points, c.train.steps))]
    for place, axis in enumerate(list(space)):
        for values in best:
            new = beyond(axis, space[axis], values[place])
            if new is None or new in space[axis]:
                continue
            wider = {**space, axis: [*space[axis], new]}
            if math.prod(map(len, wider.values())) <= most and _fits(search, {**space, axis: [new]}, configs):
                space = wider
    return space


def _fits(search: Search, space: Mapping[str, Sequence[Value]], configs: Configs) -> bool:
    try:
        for point, config in itertools.product(_combinations(search, space), configs.values()):
            configured(config, point)
    except BadInput:
        return False
    return True


def _random(search: Search, configs: Configs, losses: Losses) -> Places:
    n = {arm: _points(search, config) for arm, config in configs.items()}
    drawn = _drawn(search, max(n.values()))
    return {arm: [(point, config.train.steps) for point in drawn[: n[arm]]] for arm, config in configs.items()}


def _drawn(search: Search, n: int) -> list[Point]:
    """The first `n` different points of the search's own random numbers."""
    numbers, found = random.Random(search.draw_seed), dict[Point, None]()
    for _ in range(100 * n):
        values = [
            axis.at(share) if isinstance(axis, Range) else axis[int(share * len(axis))]
            for axis in search.space.values()
            for share in (numbers.random(),)
        ]
        found[search.point(values)] = None
        if len(found) == n:
            return list(found)
    raise BadInput(f"search.space: it has fewer than {n} different points")


def _halving(search: Search, configs: Configs, losses: Losses) -> Places:
    ranges = any(isinstance(values, Range) for values in search.space.values())
    wanted: Places = {}
    for arm, config in configs.items():
        n = _points(search, config)
        space = {axis: values for axis, values in search.space.items() if not isinstance(values, Range)}
        points = _drawn(search, n) if ranges else list(_combinations(search, space))[:n]
        wanted[arm] = []
        for steps, more in zip(rung_steps(search, config), [*_survivors(search, n)[1:], 0], strict=True):
            wanted[arm] += [(point, steps) for point in points]
            if not all(losses.has(arm, point, steps) for point in points):
                break
            points = losses.ranked(arm, points, steps)[:more]
    return wanted


def rung_steps(search: Search, config: RunConfig) -> list[int]:
    """The rungs' lengths, ascending; the last is the study's own."""
    train = config.train
    lengths = [round(train.steps / search.factor**rung) for rung in reversed(range(search.rungs))]
    if lengths[0] < 1 or len(set(lengths)) < len(lengths):
        raise BadInput(f"search.rungs = {search.rungs}: {train.steps} steps are too few for so many lengths")
    if train.updates < train.steps:
        raise BadInput("halving compares whole schedules, and train.stop_at ends them early; take train.steps alone")
    return lengths


def _survivors(search: Search, n: int) -> list[int]:
    """How many points each rung trains, of `n` at the first."""
    return list(itertools.accumulate(range(1, search.rungs), lambda m, _: -(-m // search.factor), initial=n))


def _optuna(search: Search, configs: Configs, losses: Losses) -> Places:
    from qurve.study.on_optuna import places

    return places(search, configs, losses, {arm: _points(search, config) for arm, config in configs.items()})


_SAMPLERS: dict[str, Callable[[Search, Configs, Losses], Places]] = {
    "grid": _grid,
    "random": _random,
    "halving": _halving,
    "optuna": _optuna,
}


def _points(search: Search, config: RunConfig) -> int:
    """How many points the arm of this configuration gets before any extension (in halving: at the first rung)."""
    budget, size = _budget(search, config), None
    if search.sampler == "grid" or not any(isinstance(values, Range) for values in search.space.values()):
        size = math.prod(len(values) for values in search.space.values() if not isinstance(values, Range))
    if budget < 1 or (search.sampler == "grid" and size is not None and budget < size):
        raise BadInput(
            f"the search's budget pays for {budget:g} points an arm, and its space has {size or 'more'}; "
            "take a larger budget, or fewer values"
        )
    is_bound = search.sampler in ("grid", "halving") and size is not None
    n = min(budget, size) if is_bound and size is not None else budget
    if n > MOST_POINTS:
        raise BadInput(f"the search would try more than {MOST_POINTS:,} points an arm; take fewer values, or a budget")
    return int(n)


def _budget(search: Search, config: RunConfig) -> float:
    """How many points the budget pays for, for an arm of this configuration."""
    if search.flops is None:
        return math.inf if search.trials is None else search.trials
    step = accounting.count(config.model).flops_per_token * config.train.tokens_per_step * len(search.seeds)
    if search.sampler != "halving":
        return search.flops // (step * config.train.updates)
    lengths, n = rung_steps(search, config), 0
    while n <= MOST_POINTS and step * sum(map(operator.mul, lengths, _survivors(search, n + 1))) <= search.flops:
        n += 1
    return n


def mean_or_none(losses: Sequence[float | None]) -> float | None:
    finite = [loss for loss in losses if loss is not None]
    return statistics.fmean(finite) if finite and len(finite) == len(losses) else None
