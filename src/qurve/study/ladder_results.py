"""What a ladder has measured: `ladder.json` read and written, and what its rungs say together.

The file holds every final loss, so that gains, fits and slopes follow from it alone; it holds those as well, for
whoever cites them, and they are never read back. Losses are in nats per token; gains are relative, of the log-loss, in
per cent.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from qurve.errors import BadInput
from qurve.runfolder import is_fact
from qurve.study.effects import Unknown, asked, costs, estimate, log_loss_gain, not_comparable, speeds_apart
from qurve.study.headline import reservations
from qurve.study.paired import holm, paired_interval, paired_p
from qurve.study.power import LEAST_SEEDS
from qurve.study.results import Arm, StudyResults, load
from qurve.study.scaling import (
    Equivalent,
    Estimate,
    Fit,
    Trend,
    equivalent,
    fit_power_law,
    trend,
)
from qurve.study.statistics import relative_gains
from qurve.study.study_json import count, damage_named, one_line, positive, read_plain

FILE = "ladder.json"
LEAST_RUNGS = 3
"""Below them a line goes through every rung, and nothing is left to test its slope with."""
FORMAT = 1
WAY_OUT = "restore it, or repeat the `qurve study ladder` that wrote it: it writes it anew, and keeps the runs"
MACHINE = ("platform", "cpu", "gpu", "cores", "threads", "torch", "precision", "compiled", "device", "commit")


@dataclass(frozen=True)
class RungArm:
    """One arm at one rung. `losses` are those of the seeds that finished; `doubt` says why they are no comparison."""

    name: str
    label: str
    non_embedding: int
    total: int
    flops_per_token: float
    losses: dict[int, float]
    unfinished: tuple[str, ...] = ()
    doubt: str | None = None
    tokens_per_s: float | None = None
    """Median over the seeds; training time alone."""
    peak_memory_bytes: int | None = None
    """The most that one process held, over the finished runs."""


@dataclass(frozen=True)
class RungResults:
    """One size with one length of training."""

    name: str
    n_layers: int
    d_model: int
    tokens_per_parameter: float
    tokens: int
    """Of each run's training."""
    epochs: float
    """How often the training data was gone through: beyond one, tokens are not new ones."""
    arms: dict[str, RungArm]
    machine: dict[str, Any]
    speeds_apart: float = 1.0
    """How many times as fast as its slowest seed an arm's fastest ran, at most: far from 1, the machine was busy."""
    doubts: tuple[str, ...] = ()
    """What speaks against its study's comparison, in sentences."""
    compared_before: int = 0
    """Arms beside the ladder's that were compared with this rung's baseline too, where its study knows of them."""
    looks: int = 0
    """Numbers of seeds at which its study declared a look."""


@dataclass(frozen=True)
class LadderResults:
    name: str
    title: str
    command: str
    baseline: str
    data_fingerprint: str
    rungs: tuple[RungResults, ...]
    not_begun: tuple[str, ...] = ()
    """Rungs of the ladder that have no run yet."""
    earlier_rungs: tuple[tuple[str, ...], ...] = ()
    """The sets of rungs that the ladder was run with before this one."""
    definition: dict[str, str] = field(default_factory=dict)
    """Copies of the file that it comes from, and of what that imports: path in the folder -> sha256."""

    @property
    def arms(self) -> dict[str, str]:
        """Labels by name, in the rungs' order, the baseline first."""
        found = {arm.name: arm.label for rung in self.rungs for arm in rung.arms.values()}
        return {self.baseline: found.pop(self.baseline, self.baseline), **found}


# ----------------------------------------------------------------------------------------------------- reading, writing


def measured(
    folder: Path, name: str, size: tuple[int, int], tokens_per_parameter: float, data_tokens: int
) -> RungResults:
    """A rung as its study's folder stands."""
    results = load(folder)
    base = results.baseline
    tokens = int(base.setting("train.steps")) * int(base.setting("train.tokens_per_step"))
    environments = [run.environment for run in results.runs if run.finished]
    machine = {key: environments[0][key] for key in MACHINE if key in environments[0]} if environments else {}
    memory = {cost.arm: cost.peak_memory_bytes for cost in costs(results)}
    arms = {arm.name: _rung_arm(results, arm, memory[arm.name]) for arm in results.arms}
    epochs, apart = tokens / data_tokens, speeds_apart(results)
    said, before, looks = tuple(reservations(results)), results.family - len(results.primary), len(results.looks)
    return RungResults(name, *size, tokens_per_parameter, tokens, epochs, arms, machine, apart, said, before, looks)


def _rung_arm(results: StudyResults, arm: Arm, memory: int | None) -> RungArm:
    losses = {seed: loss for seed, run in arm.runs.items() if (loss := run.final_loss) is not None}
    unfinished = tuple(f"seed {run.seed} {run.in_words}" for run in arm.unfinished)
    doubt = not_comparable(results, arm)
    sizes = arm.non_embedding, arm.total, arm.flops_per_token
    return RungArm(arm.name, arm.label, *sizes, losses, unfinished, doubt, arm.tokens_per_s, memory)


def to_json(results: LadderResults) -> str:
    """`ladder.json`: what was measured, what follows from it, and what speaks against it."""
    found = {"doubts": doubts(results), "findings": findings_json(results)}
    tree = {"format": FORMAT, **dataclasses.asdict(results), **found}
    return json.dumps(tree, indent=1) + "\n"


def load_ladder(place: Path) -> LadderResults:
    """Read a ladder's folder, or its `ladder.json` wherever that lies. Raises `BadInput` for what is none."""
    file = place / FILE if place.is_dir() else place
    if not file.is_file():
        raise BadInput(f"{place} is no ladder: it has no {FILE}; give the folder that `qurve study ladder` wrote")
    with damage_named(file, WAY_OUT):
        tree = read_plain(file.read_bytes())
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise BadInput(f"it is not a ladder of format {FORMAT}, which this version reads")
        rungs, baseline = tuple(_rung(item) for item in tree["rungs"]), str(tree["baseline"])
        if not rungs or not all(baseline in rung.arms for rung in rungs):
            raise BadInput(f"a rung lacks the baseline {baseline!r}")
        names = (one_line(tree["name"]), one_line(tree["title"]), str(tree["command"]))
        not_begun = tuple(one_line(rung) for rung in tree.get("not_begun", ()))
        earlier = tuple(tuple(one_line(rung) for rung in rungs) for rungs in tree.get("earlier_rungs", ()))
        copies = {one_line(path): one_line(sha) for path, sha in tree.get("definition", {}).items()}
        return LadderResults(*names, baseline, str(tree["data_fingerprint"]), rungs, not_begun, earlier, copies)


def _rung(item: dict[str, Any]) -> RungResults:
    name = one_line(item["name"])
    arms = {str(arm): _read_arm(str(arm), tree) for arm, tree in item["arms"].items()}
    machine = dict(item["machine"])
    if odd := [key for key, value in machine.items() if not is_fact(value)]:
        raise ValueError(f"{odd[0]} of the machine of {name} = {machine[odd[0]]!r:.40}")
    return RungResults(
        name=name,
        n_layers=count(item["n_layers"], f"n_layers of {name}"),
        d_model=count(item["d_model"], f"d_model of {name}"),
        tokens_per_parameter=positive(item["tokens_per_parameter"], f"tokens_per_parameter of {name}"),
        tokens=count(item["tokens"], f"tokens of {name}"),
        epochs=positive(item["epochs"], f"epochs of {name}"),
        arms=arms,
        machine=machine,
        speeds_apart=positive(item.get("speeds_apart", 1.0), f"speeds_apart of {name}"),
        doubts=tuple(one_line(doubt) for doubt in item.get("doubts", ())),
        compared_before=count(item.get("compared_before", 0), f"compared_before of {name}", 0),
        looks=count(item.get("looks", 0), f"looks of {name}", 0),
    )


def _read_arm(name: str, tree: dict[str, Any]) -> RungArm:
    speed, memory = tree.get("tokens_per_s"), tree.get("peak_memory_bytes")
    return RungArm(
        name=name,
        label=one_line(tree["label"]),
        non_embedding=count(tree["non_embedding"], f"non_embedding of {name}"),
        total=count(tree["total"], f"total of {name}"),
        flops_per_token=positive(tree["flops_per_token"], f"flops_per_token of {name}"),
        losses={int(seed): positive(loss, f"a loss of {name}") for seed, loss in tree["losses"].items()},
        unfinished=tuple(one_line(words) for words in tree["unfinished"]),
        doubt=None if tree["doubt"] is None else one_line(tree["doubt"]),
        tokens_per_s=None if speed is None else positive(speed, f"tokens_per_s of {name}"),
        peak_memory_bytes=None if memory is None else count(memory, f"peak_memory_bytes of {name}"),
    )


# ---------------------------------------------------------------------------------------------------------- at one rung


@dataclass(frozen=True)
class RungTest:
    """An arm against the baseline at one rung."""

    rung: str
    arm: str
    diff: float
    """Nats per token, mean over the seeds; negative is better."""
    low: float
    high: float
    p: float
    """Of the paired t test."""
    p_holm: float
    """Corrected for every arm at every rung of the ladder: whoever looks at all of them picks among all."""


def rung_tests(results: LadderResults) -> list[RungTest]:
    """Every arm that can be compared at a rung with three seeds or more; nothing of a ladder whose rungs are a choice.

    In the family are also the arms of rungs that are not begun, those that cannot be compared, and those that were
    compared with a rung's baseline before; declared looks share the 5 %.
    """
    arms = [arm for arm in results.arms if arm != results.baseline]
    found: list[tuple[RungResults, str, list[float]]] = []
    for rung in results.rungs if other_rungs(results) is None else ():
        for arm in arms:
            losses = asked(lambda rung=rung, arm=arm: paired(rung, [results.baseline, arm]))  # type: ignore[misc]
            if not isinstance(losses, Unknown) and len(losses[arm]) >= LEAST_SEEDS:
                pairs = zip(losses[arm], losses[results.baseline], strict=True)
                found.append((rung, arm, [loss - base for loss, base in pairs]))
    p_values = [paired_p(differences) for _, _, differences in found]
    others = (len(results.rungs) + len(results.not_begun)) * len(arms) - len(found)
    before = sum(rung.compared_before for rung in results.rungs)
    looks = max([1, *(rung.looks for rung in results.rungs)])
    adjusted = holm([*p_values, *[None] * (others + before)])
    return [
        RungTest(rung.name, arm, *paired_interval(differences), p, min(1.0, looks * p_holm))
        for (rung, arm, differences), p, p_holm in zip(found, p_values, adjusted, strict=False)
        if p_holm is not None
    ]


def paired(rung: RungResults, names: Sequence[str]) -> dict[str, list[float]]:
    """The losses of these arms for the seeds that all of them have finished. Raises `BadInput` where they are none, or
    an arm's are no comparison."""
    missing = [name for name in names if name not in rung.arms]
    if missing:
        raise BadInput(f"rung {rung.name} has no arm {missing[0]!r}")
    arms = [rung.arms[name] for name in names]
    for arm in arms:
        if arm.doubt is not None:
            raise BadInput(arm.doubt)
    seeds = [seed for seed in arms[0].losses if all(seed in arm.losses for arm in arms)]
    if not seeds:
        raise BadInput(f"rung {rung.name}: no seed is finished in {' and '.join(names)}")
    return {arm.name: [arm.losses[seed] for seed in seeds] for arm in arms}


def loss(rung: RungResults, arm: str) -> Estimate | Unknown:
    """The arm's mean loss at this rung, with its interval over the seeds."""
    return asked(lambda: estimate(paired(rung, [arm])[arm]))


def gain(results: LadderResults, rung: RungResults, arm: str) -> Estimate | Unknown:
    """The arm's relative gain over the baseline at this rung."""

    def found() -> Estimate:
        losses = paired(rung, [results.baseline, arm])
        return log_loss_gain(losses[arm], losses[results.baseline])

    return asked(found)


def equivalent_gain(
    results: LadderResults, rung: RungResults, arm: str, quantity: Literal["params", "flops"]
) -> Equivalent | Unknown:
    """What the arm's gain at this rung is worth in the baseline's size, by the rung of the next size.

    The next larger one, or for the largest the next smaller one, with as many tokens per parameter: the baseline grows
    in both, so `params` says how much larger it would have to be with its training longer alike, and `flops` counts
    the whole training.
    """

    def found() -> Equivalent:
        near = _next_size(results, rung)
        here = paired(rung, [results.baseline, arm])
        other = paired(near, [results.baseline])[results.baseline]
        if near.arms[results.baseline].losses.keys() != rung.arms[arm].losses.keys():
            raise BadInput(f"rung {near.name} has other seeds finished than {rung.name}")
        sizes = {
            place.name: {
                name: one.non_embedding if quantity == "params" else one.flops_per_token * place.tokens
                for name, one in place.arms.items()
            }
            for place in (rung, near)
        }
        size = sizes[rung.name][results.baseline]
        return equivalent(
            here[results.baseline],
            here[arm],
            {sizes[near.name][results.baseline] / size: other},
            own=sizes[rung.name][arm] / size,
        )

    return asked(found)


def _next_size(results: LadderResults, rung: RungResults) -> RungResults:
    alike = [r for r in results.rungs if r.tokens_per_parameter == rung.tokens_per_parameter]
    size = {r.name: r.arms[results.baseline].non_embedding for r in alike}
    larger = [r for r in alike if size[r.name] > size[rung.name]]
    smaller = [r for r in alike if size[r.name] < size[rung.name]]
    if larger:
        return min(larger, key=lambda r: size[r.name])
    if smaller:
        return max(smaller, key=lambda r: size[r.name])
    raise BadInput("the ladder has no other size with as many tokens per parameter")


# ------------------------------------------------------------------------------------------------------- along a series


@dataclass(frozen=True)
class Series:
    """Rungs that differ in one thing alone."""

    along: Literal["size", "length"]
    fixed: str
    """What they have in common, in words."""
    scale: dict[str, float]
    """Rung -> non-embedding parameters of the baseline, or tokens of training."""
    rungs: tuple[RungResults, ...]


def series(results: LadderResults) -> list[Series]:
    """Every series of two rungs or more: sizes at one number of tokens per parameter, lengths at one size."""
    found = []
    by_length: dict[float, list[RungResults]] = {}
    by_size: dict[tuple[int, int], list[RungResults]] = {}
    for rung in results.rungs:
        by_length.setdefault(rung.tokens_per_parameter, []).append(rung)
        by_size.setdefault((rung.n_layers, rung.d_model), []).append(rung)
    for length, rungs in by_length.items():
        scale = {rung.name: float(rung.arms[results.baseline].non_embedding) for rung in rungs}
        found.append(Series("size", f"{length:g} tokens per parameter", scale, tuple(rungs)))
    for (n_layers, d_model), rungs in by_size.items():
        scale = {rung.name: float(rung.tokens) for rung in rungs}
        found.append(Series("length", f"{n_layers} layers {d_model} wide", scale, tuple(rungs)))
    return [one for one in found if len(set(one.scale.values())) > 1]


def fit(one: Series, arm: str) -> Fit | Unknown:
    """How the arm's loss falls along the series. A rung that it has not finished makes it unknown."""
    return asked(lambda: fit_power_law({one.scale[rung.name]: paired(rung, [arm])[arm] for rung in one.rungs}))


def gain_trend(results: LadderResults, one: Series, arm: str) -> Trend | Unknown:
    """How the arm's gain changes along the series: a line over every seed's gain.

    A rung at which it cannot be compared makes it unknown: left out, the line would be of the rungs that suit. The
    slopes of all arms along one series are a family: whether one grows or shrinks is decided after Holm's correction,
    and where looks were declared, each may spend an equal part of the 5 %. A slope that is `undecided` has no p.
    """
    _, before, looks = family(results, one)
    trends = {other: _trend(results, one, other) for other in results.arms if other != results.baseline}
    p_values = [None if isinstance(found, Unknown) else found.p for found in trends.values()]
    adjusted = holm([*p_values, *[None] * before])
    found = trends[arm]
    if isinstance(found, Unknown):
        return found
    p = adjusted[list(trends).index(arm)]
    return dataclasses.replace(found, p_holm=None if p is None else min(1.0, looks * p))


def family(results: LadderResults, one: Series) -> tuple[int, int, int]:
    """What the slopes along the series are corrected for: the ladder's arms, those that were compared with a rung's
    baseline before, and the looks that a rung's study declared, one at least."""
    before = max(rung.compared_before for rung in one.rungs)
    return len(results.arms) - 1, before, max(1, *(rung.looks for rung in one.rungs))


def _trend(results: LadderResults, one: Series, arm: str) -> Trend | Unknown:
    def found() -> Trend:
        gains = {}
        for rung in one.rungs:
            losses = paired(rung, [results.baseline, arm])
            pairs = zip(losses[arm], losses[results.baseline], strict=True)
            gains[one.scale[rung.name]] = [relative_gains(loss, base)[0] for loss, base in pairs]
        line = trend(gains)
        return line if undecided(results, one, arm) is None else dataclasses.replace(line, p=None, p_holm=None)

    return asked(found)


def undecided(results: LadderResults, one: Series, arm: str) -> str | None:
    """Why a slope that is known decides nothing, in words; None where it may. Rungs that are to come could turn it, two
    lie on any line, and means of few seeds are no scatter to go by."""
    if (other := other_rungs(results)) is not None:
        return f"no verdict: it was run before with other rungs ({other})"
    if results.not_begun:
        return f"no verdict yet: {', '.join(results.not_begun)} not begun"
    if len(one.rungs) < LEAST_RUNGS:
        return f"no verdict: it takes {LEAST_RUNGS} rungs, and there are {len(one.rungs)}"
    seeds = {rung.name: len(paired(rung, [results.baseline, arm])[arm]) for rung in one.rungs}
    if few := [f"{n} at {rung}" for rung, n in seeds.items() if n < LEAST_SEEDS]:
        return f"no verdict: it takes {LEAST_SEEDS} seeds at each rung, and there are {', '.join(few)}"
    return None


def other_rungs(results: LadderResults) -> str | None:
    """The earlier sets of rungs that could have shown a slope, or ended in a choice among rungs, in words; None where
    there is none. A ladder that grows from fewer than `LEAST_RUNGS` had none to show."""
    now = {*(rung.name for rung in results.rungs), *results.not_begun}
    sets = [rungs for rungs in results.earlier_rungs if not set(rungs) <= now or len(rungs) >= LEAST_RUNGS]
    return "; ".join(", ".join(rungs) for rungs in sets) or None


def doubts(results: LadderResults) -> list[str]:
    """What a sceptical reader should know before believing the slopes, in sentences: the rungs' own doubts among them,
    each said once."""
    found = []
    if results.earlier_rungs:
        sets = "; ".join(", ".join(rungs) for rungs in results.earlier_rungs)
        found.append(
            f"This ladder was run before with other rungs ({sets}). Whoever adds or drops rungs after a look at the "
            "result can choose the slope."
        )
    rungs: dict[str, list[str]] = {}
    for rung in results.rungs:
        for doubt in rung.doubts:
            rungs.setdefault(doubt, []).append(rung.name)
    found += [f"Rung{'' if len(names) == 1 else 's'} {', '.join(names)}: {doubt}" for doubt, names in rungs.items()]
    return found


def findings_json(results: LadderResults) -> dict[str, Any]:
    """Gains, equivalents, fits and slopes as plain data."""
    others = [arm for arm in results.arms if arm != results.baseline]
    return {
        "gain_percent": {r.name: {arm: _plain(gain(results, r, arm)) for arm in others} for r in results.rungs},
        "tests": [dataclasses.asdict(test) for test in rung_tests(results)],
        "equivalent": {
            r.name: {
                arm: {quantity: _plain(equivalent_gain(results, r, arm, quantity)) for quantity in ("params", "flops")}
                for arm in others
            }
            for r in results.rungs
        },
        "series": [
            {
                "along": one.along,
                "fixed": one.fixed,
                "fits": {arm: _plain(fit(one, arm)) for arm in results.arms},
                "gain_slopes": {arm: _plain(gain_trend(results, one, arm)) for arm in others},
            }
            for one in series(results)
        ],
    }


def _plain(found: Any) -> Any:
    return dataclasses.asdict(found)
