"""A dry run of a study: what it will take, and how many seeds the effect in question needs. Nothing is created."""

from __future__ import annotations

import contextlib
from importlib import resources
from typing import TYPE_CHECKING, Any

from qurve import accounting
from qurve.config import from_dict, hashed_differences
from qurve.errors import BadInput
from qurve.study.definition import Arm, Study, defined, load_study
from qurve.study.noise import Known, known_evidence
from qurve.study.pace import Pace, pace_of
from qurve.study.power import LEVEL, POWER, minimum_detectable, seeds_needed
from qurve.study.search import Search, bound, planned
from qurve.train.config import RunConfig

if TYPE_CHECKING:
    from rich.console import Group

    from qurve.study.execute import Made
    from qurve.study.ladder import Ladder

MOST_NAMED = 5
"""Settings in which a study differs from the one that its noise is taken from, before the rest is only counted."""


def built_in_knowledge(study: str) -> Known | None:
    """What the committed evidence knows of a built-in study; None where there is none."""
    if study != "small":
        return None
    content = resources.files("qurve").joinpath("small-compare.json").read_bytes()
    return known_evidence(content, "results/small-compare.json")


def parse_effect(text: str) -> float:
    """`0.2%`, of the baseline's loss, as the fraction 0.002. Raises `BadInput` for anything else."""
    number, sign, rest = text.partition("%")
    try:
        value = float(number) / 100
    except ValueError:
        value = 0.0
    if not sign or rest.strip() or not 0 < value < 1:
        raise BadInput(f"--effect {text!r}: write it in per cent of the baseline's loss, between 0% and 100%, as 0.2%")
    return value


def make_plan(
    wanted: Study,
    effect: float,
    known: Known | None,
    made: Made | None = None,
    pace: Pace | None = None,
    call: str | None = None,
) -> dict[str, Any]:
    """Runs, tokens, FLOPs and hours of a study, arm by arm, and the seeds that `effect` needs.

    `effect` is a fraction of the baseline's loss. Hours are an estimate, one run after the other: at the speed of the
    same model where `pace` has it (by default that of `known`), else by FLOPs (`by_flops`); None without either.
    Whatever hangs on the noise is None where that is not known. `made` is what a pool holds of the study; without one
    `made` and `hours_left` are None. `call` is what `qurve compare` is given for the study, by default its name.

    The `search` takes so many runs, or at least or at most so many (its `bound`); `matched`, its arms at the baseline's
    point, so many at most; None of a study that has no search to make, or whose search is over in the pool.
    """
    study = wanted if made is None else made.study
    baseline = next(arm for arm in study.arms if arm.name == study.baseline)
    apart = {} if known is None else _apart(known, baseline.config)
    if pace is None and known is not None:
        pace = pace_of(known)
    arms = [
        {
            "arm": arm.name,
            "label": arm.label,
            "non_embedding": (cost := accounting.count(arm.config.model)).non_embedding,
            "flops_per_token": cost.flops_per_token,
            **_amount(arm, {arm.config.train.updates: len(study.seeds)}, pace),
            "made": None if made is None else made.runs.get(arm.name, 0),
        }
        for arm in study.arms
        if not study.is_out(arm)
    ]
    search, tried, matched = wanted.search, None, None
    if isinstance(search, Search):
        runs = planned(search, wanted.configs)
        tried = _sum([_amount(arm, runs[arm.name], pace) for arm in wanted.arms if arm.name in runs])
        tried |= {"bound": bound(search), "extensions": search.extensions}
        is_over = not isinstance(study.search, Search)
        tried["made"] = None if made is None else tried["runs"] if is_over else min(made.trials, tried["runs"])
        more = [arm for arm in study.arms if arm is not baseline and not arm.seed_offset]
        if more and not is_over:
            seeds = {baseline.config.train.updates: len(study.seeds)}
            matched = {**_sum([_amount(arm, seeds, pace) for arm in more]), "made": None if made is None else 0}
    rows = [row for row in (tried, *arms, matched) if row is not None]
    total, left = _sum(rows), None
    if made is not None and total["hours"] is not None:
        left = sum(row["hours"] * (1 - row["made"] / row["runs"]) for row in rows)
    return {
        "study": study.name,
        "call": study.name if call is None else call,
        "seeds": len(study.seeds),
        "looks": list(study.looks),
        "tested": _tested(study),
        "search": tried,
        "arms": arms,
        "matched": matched,
        **total,
        "made": None if made is None else sum(row["made"] for row in rows),
        "hours_left": left,
        **_paced(pace),
        "source": None if known is None else known.source,
        "other_settings": [f"{path} {there!r} there, {here!r} here" for path, (there, here) in apart.items()],
        "effect_percent": 100 * effect,
        **_seeds(study, effect, known),
    }


def plan_ladder(ladder: Ladder, pace: Pace | None) -> dict[str, Any]:
    """Runs, tokens, FLOPs and hours of a ladder, rung by rung: what `make_plan` says of each rung's study."""
    kept = ("runs", "tokens", "flops", "hours", "by_flops", "seeds")
    rungs = []
    for rung in ladder.rungs:
        plan = make_plan(rung.study, 0.01, None, pace=pace)
        bounds = {} if plan["search"] is None else {"bound": plan["search"]["bound"]}
        rungs.append({"rung": rung.name, "arms": len(plan["arms"]), **{key: plan[key] for key in kept}, **bounds})
    return {"ladder": ladder.name, "title": ladder.title, "rungs": rungs, **_sum(rungs), **_paced(pace)}


def load_planned(name: str) -> Study | Ladder:
    """A study as `load_study` has it, or the ladder that a Python file exposes instead. Raises `BadInput`."""
    from qurve.study.ladder import Ladder

    try:
        return load_study(name)
    except BadInput:
        if name.endswith(".py"):
            with contextlib.suppress(BadInput):
                return defined(name, Ladder, {})
        raise


def _amount(arm: Arm, runs: dict[int, int], pace: Pace | None) -> dict[str, Any]:
    """What runs of an arm take, given how many there are of each number of updates."""
    tokens = sum(updates * n for updates, n in runs.items()) * arm.config.train.tokens_per_step
    seconds, timed = (None, False) if pace is None else pace.seconds(arm.config.model, tokens)
    return {
        "runs": sum(runs.values()),
        "tokens": tokens,
        "flops": tokens * accounting.count(arm.config.model).flops_per_token,
        "hours": None if seconds is None else seconds / 3600,
        "by_flops": seconds is not None and not timed,
    }


def _sum(rows: list[dict[str, Any]]) -> dict[str, Any]:
    hours = [row["hours"] for row in rows]
    total = {key: sum(row[key] for row in rows) for key in ("runs", "tokens", "flops")}
    return {**total, "hours": None if None in hours else sum(hours), "by_flops": any(row["by_flops"] for row in rows)}


def _paced(pace: Pace | None) -> dict[str, Any]:
    """Where the hours are from."""
    if pace is None:
        return dict.fromkeys(("machine", "timed_by", "flops_per_s", "of_flops"))
    found = {"machine": pace.machine, "timed_by": pace.source}
    return found | {"flops_per_s": pace.flops_per_s, "of_flops": pace.of_flops}


def _apart(known: Known, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """What the two baselines' configurations differ in."""
    tree = {key: value for key, value in known.config.items() if key != "format"}
    try:
        there = from_dict(RunConfig, tree)
    except BadInput as error:
        raise BadInput(f"{known.source}: the baseline's configuration is none that is known here: {error}") from None
    found = hashed_differences(there, config)
    return {path: values for path, values in found.items() if path not in ("train.seed", "data.fingerprint")}


def _seeds(study: Study, effect: float, known: Known | None) -> dict[str, Any]:
    """What the noise says. `seeds_needed_low` and `…_high` are at the ends of the interval of its deviation."""
    floor = known.floor if known is not None else None
    keys = ("sd_of_differences", "noise_seeds", "effect_nats", "seeds_needed", "seeds_needed_low", "seeds_needed_high")
    if floor is None or floor.differences is None or floor.differences.value == 0:
        return dict.fromkeys((*keys, "detectable_percent"))
    spread, nats = floor.differences, effect * floor.base_loss
    arms, level = max(1, _tested(study)), _level(len(study.looks))
    needed = [seeds_needed(nats, sd, level=level, arms=arms) for sd in (spread.value, spread.low, spread.high)]
    least = minimum_detectable(len(study.seeds), spread.value, level=level, arms=arms)
    found = (spread.value, spread.n, nats, *needed)
    return dict(zip(keys, found, strict=True)) | {
        "detectable_percent": None if least is None else 100 * least / floor.base_loss
    }


def _tested(study: Study) -> int:
    """How many arms are judged together."""
    return sum(arm.name != study.baseline and not arm.seed_offset and arm.matched is None for arm in study.arms)


def _level(looks: int) -> float:
    return LEVEL / max(1, looks)


def plan_sentences(plan: dict[str, Any]) -> list[str]:
    """What the plan says of time and seeds, for people."""
    said = hours_sentences(plan)
    if plan["search"] is not None:
        said += _search_sentences(plan["search"])
    if plan["made"] is not None:
        left = "" if plan["hours_left"] is None else f" (about {plan['hours_left']:,.2f} hours)"
        runs, made = plan["runs"], plan["made"]
        said.append(f"{made:,} of {runs:,} runs are in the pool, {runs - made:,} are left{left}.")
    if plan["sd_of_differences"] is None:
        return [
            *said,
            "No noise figure is known, so nothing can be said of the seeds that it needs. Make a few first "
            f"(qurve compare {plan['call']} --seeds 3 --out DIR) and name that folder with --from DIR.",
        ]
    if plan["other_settings"]:
        named = plan["other_settings"][:MOST_NAMED]
        more = len(plan["other_settings"]) - len(named)
        said.append(
            f"The noise is that of other settings ({'; '.join(named)}{f'; and {more} more' if more else ''}): "
            "take it with care."
        )
    said.append(
        f"Paired differences vary by {plan['sd_of_differences']:.4f} nats per token from seed to seed "
        f"({plan['source']}, {plan['noise_seeds']} seeds)."
    )
    low, high = _number(plan["seeds_needed_low"]), _number(plan["seeds_needed_high"])
    said.append(
        f"To see {plan['effect_percent']:.3g} % ({plan['effect_nats']:.4f} nats per token) with {100 * POWER:.0f} % "
        f"power you need n = {_number(plan['seeds_needed'])} seeds; so few seeds know the noise only so well that it "
        f"may be {low} to {high}."
    )
    if plan["detectable_percent"] is not None:
        said.append(f"Its {plan['seeds']} seeds see {plan['detectable_percent']:.3g} % and more.")
    else:
        said.append(f"Its {plan['seeds']} seeds give no verdict: it takes three.")
    level, looks = f"{100 * _level(len(plan['looks'])):.3g} %", ", ".join(map(str, plan["looks"]))
    if plan["tested"] > 1:
        said.append(f"That is with {plan['tested']} arms judged together, at {level} in all.")
    if looks:
        said.append(f"Each look (declared at {looks} seeds) is judged at {level}.")
    return said


def hours_sentences(plan: dict[str, Any]) -> list[str]:
    """What the hours of a study's or a ladder's plan are, and how far to trust them."""
    if plan["hours"] is None:
        return ["Nothing is known of hours."]
    said = f"An estimate: one run after the other takes about {hours_in_words(plan['hours'])}"
    if plan["timed_by"] is not None:
        said += f", at the speeds of {plan['timed_by']} ({plan['machine']})"
    if not plan["by_flops"]:
        return [f"{said}."]
    rate = f"{plan['flops_per_s']:.3g} FLOP/s, {plan['of_flops']}"
    if plan["timed_by"] is None:
        return [f"{said}, by FLOPs at {rate}. It may be half or twice as much; name a study that was made with --from."]
    return [f"{said}; ~ where a model was not timed: by its FLOPs at {rate}. Another size may reach another rate."]


def hours_in_words(hours: float) -> str:
    return f"{hours:,.2f} hours" if hours < 48 else f"{hours / 24:,.0f} days"


def _hours(row: dict[str, Any]) -> str:
    if row["hours"] is None:
        return "–"
    return ("~" if row["by_flops"] else "") + (f"{row['hours']:,.2f}" if row["hours"] < 1e5 else f"{row['hours']:.3g}")


def _tokens(row: dict[str, Any]) -> str:
    return f"{row['tokens']:.4g}" if row["tokens"] >= 1e9 else f"{row['tokens']:,}"


def ladder_plan_table(plan: dict[str, Any]) -> Group:
    """A ladder's plan as the terminal shows it: one row per rung, their sum, then the sentences."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("rung", overflow="fold")
    for name in ("arms", "seeds", "runs", "tokens", "FLOPs", "hours"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in (*plan["rungs"], {**plan, "rung": "all", "arms": "", "seeds": ""}):
        figures = str(row["arms"]), str(row["seeds"]), f"{row['runs']:,}", _tokens(row), f"{row['flops']:.3g}"
        table.add_row(*map(Text, (row["rung"], *figures, _hours(row))))
    noise = "Seeds for an effect are planned of one rung: as a study of its own, by qurve study plan."
    return Group(table, *(Text(sentence) for sentence in (*hours_sentences(plan), noise)))


def _search_sentences(search: dict[str, Any]) -> list[str]:
    times = search["extensions"]
    return {
        "exactly": [],
        "at least": [
            "Its search takes so many runs without extensions of its grid, which come on top, up to "
            f"{times} time{'' if times == 1 else 's'} a value on an axis, for every arm."
        ],
        "at most": ["Its search takes so many runs at most: a point that breaks, or is asked for twice, saves some."],
    }[search["bound"]]


def _search_label(search: dict[str, Any]) -> str:
    return "the search" + ("" if search["bound"] == "exactly" else f" ({search['bound']})")


def _number(seeds: int | None) -> str:
    return "more than 100,000" if seeds is None else f"{seeds:,}"


def plan_table(plan: dict[str, Any]) -> Group:
    """The plan as the terminal shows it: one row per arm, their sum, then the sentences."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("arm", overflow="fold")
    pooled = plan["made"] is not None
    for name in ("N.E.\nparams", "runs", *(["made"] if pooled else []), "tokens", "FLOPs", "hours"):
        table.add_column(name, justify="right", no_wrap=True)
    search, matched = plan["search"], plan["matched"]
    rows = [
        *([] if search is None else [{**search, "label": _search_label(search)}]),
        *plan["arms"],
        *([] if matched is None else [{**matched, "label": "at the baseline's point (at most)"}]),
        {**plan, "label": "all"},
    ]
    for arm in rows:
        cells = (
            arm["label"],
            f"{arm['non_embedding']:,}" if "non_embedding" in arm else "",
            f"{arm['runs']:,}",
            *([f"{arm['made']:,}"] if pooled else []),
            _tokens(arm),
            f"{arm['flops']:.3g}",
            _hours(arm),
        )
        table.add_row(*map(Text, cells))
    return Group(table, *(Text(sentence) for sentence in plan_sentences(plan)))
