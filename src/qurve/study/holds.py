"""What the report says of where training holds: maps over rate and decay, claims, spikes and attention logits.

Tables in words, for the page and for Markdown alike. The numbers are those of `stability`.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence

from qurve.errors import BadInput
from qurve.study.claims import NOTE, Judgement, Verdict, judgements, scale_of
from qurve.study.results import StudyResults
from qurve.study.stability import (
    SPIKE,
    SPIKE_WINDOW,
    WORSE,
    Cell,
    Ending,
    Map,
    architecture,
    ending_of,
    endings_of,
    maps_of,
)
from qurve.study.tables import NONE, plain, rate
from qurve.study.worth import Table

Maps = Mapping[str, Map]

HOLD, FAIL, NEITHER = "Hold here", "Fail here", "Neither"
STABLE, UNSOUND, NOT_RUN = "Not tested, stable so far", "Not tested, a plateau or worse so far", "Not run"
FOUND: Mapping[str, tuple[Verdict, ...]] = {
    HOLD: ("holds here", "seen here"),
    FAIL: ("does not hold here (diverged)", "not seen here"),
    NEITHER: ("plateau here", "learned nothing here"),
    STABLE: ("not tested at its length: stable so far",),
    UNSOUND: (
        "not tested at its length: a plateau so far",
        "not tested at its length: learned nothing so far",
    ),
    NOT_RUN: ("not run",),
}
"""What a headline says of claims, and the verdicts that are said so."""

DIVERGED: tuple[Verdict, ...] = ("seen here", "does not hold here (diverged)")

RULE = (
    f"Stable: every seed finished, at most {WORSE:g} nats per token above the best loss, or slower at a rate below the "
    "best one at its decay; else a plateau, which is no divergence, or nothing learned, where a seed finished no lower "
    "than it started"
)


def has_maps(results: StudyResults) -> bool:
    """Whether the study is one of maps: some architecture has every rate at every decay, two of each at least."""
    if not any(arm.matched is None and "@" in arm.name for arm in results.arms):
        return False
    points: dict[str, list[tuple[object, object]]] = {}
    for arm in results.arms:
        point = arm.setting("train.lr"), arm.setting("train.weight_decay")
        points.setdefault(architecture(arm.name), []).append(point)
    return any(_is_whole(found) for found in points.values())


def grids(results: StudyResults) -> Maps:
    """A map of each architecture that has every rate at every decay, two of each at least, in the study's order."""
    if not has_maps(results):
        return {}
    try:
        maps = maps_of(endings_of(results))
    except BadInput:  # the names mean something else in this study
        return {}
    return {name: map_ for name, map_ in maps.items() if _is_whole(map_.cells)}


def _is_whole(points: Collection[tuple[object, object]]) -> bool:
    rates, decays = ({point[place] for point in points} for place in (0, 1))
    return min(len(rates), len(decays)) >= 2 and len(set(points)) == len(rates) * len(decays)


def said_of_maps(results: StudyResults, maps: Maps) -> tuple[str, list[str]]:
    """What the maps show of the published claims in one sentence, and in a few more which they are, how far up each
    architecture is stable, and for what all this holds."""
    found = [
        one
        for one in judgements(results, dict(maps))
        if one.claim.arm in maps and one.claim.standing != "our inference"
    ]
    said = {words: [one for one in found if one.verdict in verdicts] for words, verdicts in FOUND.items()}
    counts = {words: len(those) for words, those in said.items()}
    untested = sum(counts[words] for words in (STABLE, UNSOUND, NOT_RUN))
    lead = (
        f"Of {len(found)} published claims of stability {_many(counts[HOLD], 'holds', 'hold')} here, "
        f"{_many(counts[FAIL], 'fails', 'fail')}, {_many(counts[NEITHER], 'is', 'are')} neither (a plateau, or nothing "
        f"learned), and {_many(untested, 'is', 'are')} not tested at the length claimed."
        if found
        else "No published claim is of an architecture that is mapped here."
    )
    sentences = [
        f"{words}: {'; '.join(_claim(results, one) for one in those)}." for words, those in said.items() if those
    ]
    if sentences:
        sentences[0] += " Rates are multiples of the baseline's."
    largest = "; ".join(f"{label_of(results, name)} {_span(map_)}" for name, map_ in maps.items())
    sentences.append(f"Largest rate up to which every one tried is stable, over the decays: {largest}.")
    sentences.append(_diverged(results, maps))
    seeds = (
        f"one seed a point, so that each is seen once, and the bound of {WORSE:g} nats decides on one number"
        if len(results.seeds) == 1
        else f"{len(results.seeds)} seeds a point"
    )
    return lead, [*sentences, f"At {scale_of(results)}; {seeds}."]


def _many(count: int, one: str, more: str) -> str:
    return f"{count or 'none'} {more if count > 1 else one}"


def _claim(results: StudyResults, one: Judgement) -> str:
    claim = one.claim
    says = "stable" if claim.says == "stable" else "diverging"
    disputed = " (the sources do not agree)" if claim.standing == "disputed" else ""
    place = f"{claim.multiple:.3g} ×, decay {rate(claim.weight_decay)}"
    share = f" ({one.why})" if one.seeds > 1 and one.verdict in DIVERGED else ""  # one seed of ten is not all of them
    return f"{label_of(results, claim.arm)} {says} at {place}{disputed}{share}"


def _span(map_: Map) -> str:
    """The largest stable rate at the decay where it is smallest, and where it is largest."""
    found = [map_.stable_up_to(decay) for decay in map_.decays]
    low, high = (pick(found, key=lambda lr: lr or 0.0) for pick in (min, max))
    ends = ["none" if lr is None else rate(lr) for lr in (low, high)]
    return ends[0] if low == high else " to ".join(ends)


def _diverged(results: StudyResults, maps: Maps) -> str:
    largest = max(map_.rates[-1] for map_ in maps.values())
    counts = {
        name: sum(cell.diverged > 0 or cell.learned_nothing for cell in map_.cells.values())
        for name, map_ in maps.items()
    }
    if not any(counts.values()):
        return f"Nothing diverged, up to the largest rate tried, {rate(largest)}."
    return (
        "Points where a seed diverged, or finished no lower than it started: "
        + "; ".join(f"{label_of(results, name)} {count} of {len(maps[name].cells)}" for name, count in counts.items())
        + "."
    )


def label_of(results: StudyResults, name: str) -> str:
    """The architecture's: what the labels of its arms have in common before a comma, or its name."""
    labels = {arm.label.partition(", rate")[0] for arm in results.arms if architecture(arm.name) == name}
    return labels.pop() if len(labels) == 1 else name


def map_table(results: StudyResults, map_: Map) -> Table:
    """A map as a table: a row for each decay, a column for each rate."""
    return Table(
        f"{label_of(results, map_.arm)}: loss, spikes a run, largest attention logit",
        ["decay", *(f"rate {rate(lr)}" for lr in map_.rates)],
        [[rate(decay), *(_cell(map_, map_.cells[lr, decay]) for lr in map_.rates)] for decay in map_.decays],
    )


def _cell(map_: Map, cell: Cell) -> str:
    state: str = map_.state(cell.lr, cell.weight_decay) or "not run to an end"
    said = [plain(cell.loss, 4), state] if cell.loss is not None else [state]
    if cell.diverged:
        said = [f"{len(cell.diverged_after)} of {len(cell.endings)} diverged"]
    if cell.spikes is not None:
        said.append(f"spikes {cell.spikes:.1f}")
    if cell.max_logit is not None:
        said.append(f"logit {cell.max_logit:.1f}")
    return ", ".join(said)


def rates_table(results: StudyResults, maps: Maps) -> Table:
    """How far up training holds in each map, and how much the rate matters."""
    rows = []
    for name, map_ in maps.items():
        for decay in map_.decays:
            largest = [map_.stable_up_to(decay), map_.trained_up_to(decay)]
            words = [
                ("none" if lr is None else rate(lr)) + (" (the largest tried)" if lr == map_.rates[-1] else "")
                for lr in largest
            ]
            if beyond := map_.stable_beyond(decay):
                words[0] += f"; beyond a gap {', '.join(map(rate, beyond))}"
            rows.append([label_of(results, name), rate(decay), *words, plain(map_.sensitivity(decay), 4)])
    notes = [
        f"{RULE}. Up to: every rate tried up to this one. Beyond a gap: stable although a lower rate is not. "
        "Sensitivity: mean over the rates tried of min(L, L at the start) − min L, in nats per token; compare it over "
        "the same rates alone (Wortsman et al., arXiv 2309.14322)."
    ]
    head = ["architecture", "decay", "stable up to", "without divergence up to", "sensitivity to the rate"]
    return Table("Up to which rate it is stable, and sensitivities", head, rows, notes)


def claims_tables(results: StudyResults, maps: Maps) -> list[Table]:
    """What was published of stability, and what we infer from it, beside this study's maps."""
    found = judgements(results, dict(maps))
    head = ["architecture", "× baseline's rate", "decay", "claim", "seen", "seeds", "steps", "why"]
    notes = [f"{NOTE} Scale: {scale_of(results)}. Rates are compared as multiples of the baseline's."]
    published = [_judged(results, one) for one in found if one.claim.standing != "our inference"]
    ours = [_judged(results, one) for one in found if one.claim.standing == "our inference"]
    inferred = (
        "Nobody published these: they are inferences from the above, and whatever is seen of them says nothing of the "
        "paper."
    )
    return [
        Table("What was published, and what is seen here", head, published, notes),
        Table("What we infer from it, and what is seen here", head, ours, [inferred]),
    ]


def _judged(results: StudyResults, one: Judgement) -> list[str]:
    claim = one.claim
    disputed = " (the sources do not agree)" if claim.standing == "disputed" else ""
    return [
        label_of(results, claim.arm),
        f"{claim.multiple:.3g}",
        rate(claim.weight_decay),
        f"{claim.says_in_words}: {claim.text} ({claim.source})",
        one.verdict + disputed,
        str(one.seeds),
        NONE if one.steps is None else f"{one.steps:,}",
        one.why,
    ]


def smoothness_table(results: StudyResults) -> Table | None:
    """Spikes of the gradient norm and, where they were recorded, the largest attention logits, arm by arm."""
    rows = []
    for arm in results.arms:
        endings = [ending_of(arm, run) for run in arm.runs.values()]
        found = [one for one in endings if one.spikes is not None or one.max_logit is not None]
        if found:
            rows.append([arm.label, str(len(found)), *_smoothness(found)])
    if not rows:
        return None
    notes = [
        f"A spike is a step whose gradient norm exceeds {SPIKE:g} times the median of the {SPIKE_WINDOW} steps before "
        f"it; the first {SPIKE_WINDOW} steps are not judged. Largest logit: of any block at any evaluation and seed, "
        f"before the softmax; {NONE} where none was recorded (--set eval.attention_logits=true)."
    ]
    head = ["arm", "runs", "spikes a run, mean", "most in a run", "largest attention logit"]
    return Table("How smoothly it trained", head, rows, notes)


def _smoothness(endings: Sequence[Ending]) -> list[str]:
    spikes = [one.spikes for one in endings if one.spikes is not None]
    logits = [one.max_logit for one in endings if one.max_logit is not None]
    return [
        plain(statistics.fmean(spikes), 1) if spikes else NONE,
        str(max(spikes)) if spikes else NONE,
        plain(max(logits, default=None), 2),
    ]
