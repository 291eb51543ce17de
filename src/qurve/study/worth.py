"""What the report says of effects, costs, noise and power: tables and sentences, for the page and for Markdown alike.

The numbers are those of `effects`, `noise` and `power`; here they become words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qurve.study.effects import STEADY, Cost, Effect, Saved, Unknown, costs, effects, speeds_apart
from qurve.study.noise import Deviation, noise_floor
from qurve.study.power import LEAST_SEEDS, MOST_SEEDS, POWER, detectable, seeds_needed
from qurve.study.results import Arm, StudyResults
from qurve.study.scaling import Equivalent, Estimate
from qurve.study.statistics import level_of
from qurve.study.tables import NONE, plain, signed, signed_change, with_interval

EFFECTS_ASKED = (0.002, 0.005, 0.01)
"""Shares of the baseline's loss for which the seeds needed are said."""

MEANINGS = {
    "bits per byte": "Bits per byte are a difference: below zero is a gain.",
    "worth in parameters": "Worth in parameters, in FLOPs: how much larger the baseline would have to be for the same "
    "loss, by its own fall with size between the sizes in this study; beyond its own: the same, less what the arm "
    "itself is larger by.",
}
"""Of columns of the gains."""

Say = Callable[[Effect], str | Unknown]


@dataclass(frozen=True)
class Table:
    """Cells in words; the first of each row names it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def gains_table(results: StudyResults) -> Table | None:
    """Every arm's gain in each unit; None without another arm."""

    def worth(of: Callable[[Effect], Equivalent | Unknown], part: str) -> Say:
        return lambda one: found if isinstance(found := of(one), Unknown) else _percent(getattr(found, part), 1)

    columns: dict[str, Say] = {
        "ΔLL": lambda one: _percent(one.dll_percent, 2),
        "ΔPPX": lambda one: _percent(one.dppx_percent, 2),
        "bits per byte": lambda one: _estimate(one.bits_per_byte, lambda x: signed(x, 4)),
        "worth in parameters": worth(lambda one: one.parameters, "percent"),
        "beyond its own": worth(lambda one: one.parameters, "net_percent"),
        "worth in FLOPs": worth(lambda one: one.compute, "percent"),
        "beyond its FLOPs": worth(lambda one: one.compute, "net_percent"),
    }
    notes = [
        f"Means over the seeds shared with the baseline, on the {results.split_in_words} split, with 95 % intervals."
    ]
    return _of_effects(results, "Gains in useful units", columns, notes, MEANINGS)


def savings_table(results: StudyResults) -> Table | None:
    """What every arm has saved when it reaches the baseline's last validation loss."""

    def part(say: Callable[[Saved], str | Unknown]) -> Say:
        return lambda one: one.saved if isinstance(one.saved, Unknown) else say(one.saved)

    columns: dict[str, Say] = {
        "steps": part(lambda saved: with_interval(saved.steps, lambda x: signed(x, 0))),
        "of the steps": part(lambda saved: _percent(saved.percent_of_steps, 1)),
        "tokens": part(lambda saved: with_interval(saved.tokens, lambda x: signed(x, 0))),
        "FLOPs": part(lambda saved: with_interval(saved.flops, lambda x: f"{x:+.2e}".replace("-", "−", 1))),
        "time": part(lambda saved: _estimate(saved.seconds, lambda x: signed(x, 0), " s")),
    }
    notes = [
        "When the arm reaches the baseline's last validation loss, seed by seed. A schedule as short as that would "
        "have brought the rate down by then, so this understates the better arm."
    ]
    return _of_effects(results, "Training saved", columns, notes, {})


def _of_effects(
    results: StudyResults, title: str, columns: dict[str, Say], notes: list[str], meanings: dict[str, str]
) -> Table | None:
    """A row for each arm, without the arms and the columns that would have nothing but dashes; the notes name those,
    say every reason, and what the columns that are left mean."""
    if not results.others:
        return None
    rows, reasons = [], dict[str, dict[str, None]]()
    for arm, one in zip(results.others, effects(results), strict=True):
        cells = []
        for said in (say(one) for say in columns.values()):
            cells.append(NONE if isinstance(said, Unknown) else said)
            if isinstance(said, Unknown):
                reasons.setdefault(said.why, {})[arm.label] = None
        rows.append([arm.label, str(len(one.seeds)), *cells])
    every = len(results.others)
    unknown = [
        f"{NONE} {'every arm' if len(arms) == every else '; '.join(arms)}: {why}." for why, arms in reasons.items()
    ]
    known = [row for row in rows if any(cell != NONE for cell in row[2:])]
    kept = [name for place, name in enumerate(columns, 2) if any(row[place] != NONE for row in known)]
    if not known:
        return Table(title, [], [], [f"Not one number is known ({', '.join(columns)}).", *unknown])
    notes = [*notes, *(words for name, words in meanings.items() if name in kept)]
    if out := [name for name in columns if name not in kept]:
        notes = [*notes, f"Known of no arm: {', '.join(out)}."]
    if len(known) < every:
        notes = [*notes, f"Left out: {every - len(known)} of {every} arms, of which nothing is known."]
    head = ["arm", "n", *kept]
    places = [0, 1, *(place for place, name in enumerate(columns, 2) if name in kept)]
    return Table(title, head, [[row[place] for place in places] for row in known], [*notes, *unknown])


def costs_table(results: StudyResults) -> Table:
    """What every arm takes, with its change against the baseline."""
    found = {cost.arm: cost for cost in costs(results)}
    base, apart = found[results.baseline.name], speeds_apart(results)
    rows = [_cost(arm, found[arm.name], base, apart <= STEADY) for arm in results.arms if arm.matched is None]
    head = ["arm", "N.E. parameters", "all parameters", "MFLOPs per token", "tokens/s", "peak memory"]
    notes = [
        "In brackets: against the baseline. Tokens/s: median over the seeds, training alone; peak memory: the most "
        "that one process held, over the seeds. Both are of the machine that the runs were made on, busy or not."
    ]
    if apart > STEADY:
        notes.append(f"One arm's seeds ran up to {apart:.1f} times apart in speed: no arm's speed is compared.")
    return Table("What it costs", head, rows, notes)


def _cost(arm: Arm, cost: Cost, base: Cost, steady: bool) -> list[str]:
    def beside(value: float | None, reference: float | None, text: str) -> str:
        if value is None or not reference or cost is base:
            return text
        return f"{text} ({signed_change(100 * (value / reference - 1))})"

    memory = NONE if cost.peak_memory_bytes is None else f"{cost.peak_memory_bytes / 2**20:,.0f} MiB"
    return [
        arm.label,
        beside(cost.non_embedding, base.non_embedding, f"{cost.non_embedding:,}"),
        beside(cost.total, base.total, f"{cost.total:,}"),
        beside(cost.flops_per_token, base.flops_per_token, f"{cost.flops_per_token / 1e6:,.2f}"),
        beside(cost.tokens_per_s, base.tokens_per_s if steady else None, plain(cost.tokens_per_s, 0)),
        beside(cost.peak_memory_bytes, base.peak_memory_bytes, memory),
    ]


def noise_table(results: StudyResults) -> Table | None:
    """The noise floor, and what so many seeds could see; None with fewer than two finished seeds of the baseline."""
    floor = noise_floor(results)
    if floor is None:
        return None
    labels = {arm.name: arm.label for arm in results.arms}

    def row(label: str, spread: Deviation, correlation: float | None) -> list[str]:
        share = f"{100 * spread.value / floor.base_loss:.2f} %"
        return [
            label,
            str(spread.n),
            with_interval(spread, lambda x: plain(x, 4)),
            share,
            signed(correlation, 2).removeprefix("+"),
        ]

    rows = [row(f"{results.baseline.label}: its losses", floor.baseline, None)]
    rows += [
        row(f"{labels[one.arm]}, the baseline from other weights: differences", one.differences, one.correlation)
        for one in floor.a_a
    ]
    rows += [row(f"{labels[one.arm]}: differences", one.differences, one.correlation) for one in floor.arms]
    if floor.differences is not None and len(floor.arms) + len(floor.a_a) > 1:
        rows.append(row("all differences, pooled", floor.differences, None))
    notes = [
        "Standard deviation over the seeds in nats per token, with its 95 % interval, and as a share of the baseline's "
        "loss. Correlation: of the arm's losses with the baseline's over the seeds; the higher, the more noise pairing "
        "by seed takes off."
    ]
    head = ["what varies", "n", "deviation", "of the loss", "correlation"]
    return Table("Noise floor and power", head, rows, [*notes, *_power(results)])


def _power(results: StudyResults) -> list[str]:
    floor, arms = noise_floor(results), max(1, results.family)
    if floor is None or floor.differences is None or floor.differences.value == 0:
        return []
    said = []
    if (found := detectable(results)) is not None:
        said.append(
            f"Minimum detectable effect with {floor.differences.n} seeds and {100 * POWER:.0f} % power: {found[0]:.4f} "
            f"nats per token, {found[1]:.2f} % of the baseline's loss."
        )
    needed = []
    for share in EFFECTS_ASKED:
        n = seeds_needed(share * floor.base_loss, floor.differences.value, level=level_of(results), arms=arms)
        needed.append(f"{100 * share:g} % takes {f'more than {MOST_SEEDS:,} seeds' if n is None else f'{n} seeds'}")
    few = " The deviation is known from few seeds, so take these for orders of size."
    return [*said, f"By this noise, to see {'; '.join(needed)}.{few if floor.differences.n < 2 * LEAST_SEEDS else ''}"]


def _percent(found: Estimate | Unknown, digits: int) -> str | Unknown:
    return _estimate(found, lambda x: signed(x, digits), " %")


def _estimate(found: Estimate | Unknown, write: Callable[[float], str], unit: str = "") -> str | Unknown:
    return found if isinstance(found, Unknown) else with_interval(found, write, unit)
