"""The sections on where training holds: maps over rate and decay, published claims, spikes and attention logits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from qurve.errors import BadInput
from qurve.study.drawing import heatmap
from qurve.study.page.pieces import Numbers, in_table, picture
from qurve.study.results import StudyResults
from qurve.study.stability import (
    NOTE,
    SPIKE,
    SPIKE_WINDOW,
    WORSE,
    Cell,
    Ending,
    Judgement,
    Map,
    ending_of,
    endings_of,
    judgements,
    maps_of,
    scale_of,
)
from qurve.study.tables import NONE, plain, rate
from qurve.study.worth import Table

RULE = (
    f"stable: every seed finished, and at rates above the best one at most {WORSE:g} nats per token above the best "
    "loss; further above is a plateau, which is no divergence"
)


def maps_section(results: StudyResults) -> str | None:
    """A heat map of each architecture that has every rate at every decay, two of each at least."""
    maps = _maps(results)
    if not maps:
        return None
    pictures = [_picture(results, map_, f"map-{place}") for place, map_ in enumerate(maps.values(), 1)]
    return "".join(pictures) + in_table("stable-rates", _rates(maps))


def claims_section(results: StudyResults) -> str | None:
    """What was published of stability, and what we infer from it, beside this study's maps."""
    maps = _maps(results)
    if not maps:
        return None
    found = judgements(results, maps)
    head = ["architecture", "× baseline's rate", "decay", "claim", "where", "seen", "seeds", "steps", "why"]
    notes = [f"{NOTE} Scale: {scale_of(results)}. Rates are compared as multiples of the baseline's."]
    published = [_judged(one) for one in found if one.claim.standing != "our inference"]
    ours = [_judged(one) for one in found if one.claim.standing == "our inference"]
    inferred = (
        "Nobody published these: they are inferences from the above, and what is seen of them says nothing of it."
    )
    return in_table("claims", Table("What was published, and what is seen here", head, published, notes)) + in_table(
        "inferences", Table("What we infer from it, and what is seen here", head, ours, [inferred])
    )


def smoothness_section(results: StudyResults) -> str | None:
    """Spikes of the gradient norm and, where they were recorded, the largest attention logits, arm by arm."""
    rows = []
    for arm in results.arms:
        endings = [ending_of(results, arm, run) for run in arm.runs.values()]
        found = [one for one in endings if one.spikes is not None or one.max_logit is not None]
        if found:
            rows.append([arm.label, str(len(found)), *_smoothness(found)])
    if not rows:
        return None
    notes = [
        f"A spike is a step whose gradient norm exceeds {SPIKE:g} times the median of the {SPIKE_WINDOW} steps before "
        f"it; the first {SPIKE_WINDOW} steps are not judged. Largest logit: of any block at any evaluation and seed, "
        f"before the softmax; {NONE} where none was recorded (`--set eval.attention_logits=true`)."
    ]
    head = ["arm", "runs", "spikes a run, mean", "most in a run", "largest attention logit"]
    return in_table("smoothness", Table("How smoothly it trained", head, rows, notes))


def _smoothness(endings: Sequence[Ending]) -> list[str]:
    spikes = [one.spikes for one in endings if one.spikes is not None]
    logits = [one.max_logit for one in endings if one.max_logit is not None]
    return [
        plain(statistics.fmean(spikes), 1) if spikes else NONE,
        str(max(spikes)) if spikes else NONE,
        plain(max(logits, default=None), 2),
    ]


def _maps(results: StudyResults) -> dict[str, Map]:
    if not any("@" in arm.name and arm.matched is None for arm in results.arms):
        return {}
    try:
        maps = maps_of(endings_of(results))
    except BadInput:  # the names mean something else in this study
        return {}
    return {name: map_ for name, map_ in maps.items() if _is_grid(map_)}


def _is_grid(map_: Map) -> bool:
    return min(len(map_.rates), len(map_.decays)) >= 2 and len(map_.cells) == len(map_.rates) * len(map_.decays)


def _picture(results: StudyResults, map_: Map, name: str) -> str:
    label = _label(results, map_.arm)
    values = [[_value(map_.cells[lr, decay]) for lr in map_.rates] for decay in map_.decays]
    best = map_.best
    marks = [] if best is None else [(map_.decays.index(best.weight_decay), map_.rates.index(best.lr))]
    rows, columns = [rate(decay) for decay in map_.decays], [rate(lr) for lr in map_.rates]
    return picture(
        name,
        lambda width: heatmap(
            values,
            rows,
            columns,
            row_axis="weight decay",
            column_axis="peak learning rate",
            digits=3 if width > 5 else 2,
            marks=marks,
            width=width,
        ),
        alt=f"{label}: final loss over peak learning rate and weight decay; the table below has the numbers",
        caption=f"{label}: mean final loss ({results.split_in_words}, nats per token); the darker, the lower. Ringed: "
        "the lowest. Hatched, with a cross: some seed diverged. Empty: not run to an end.",
        numbers=Numbers(
            f"{label}: loss, spikes a run, largest attention logit",
            ["decay", *(f"rate {column}" for column in columns)],
            [
                [row, *(_cell(map_, map_.cells[lr, decay]) for lr in map_.rates)]
                for row, decay in zip(rows, map_.decays, strict=True)
            ],
        ),
    )


def _label(results: StudyResults, name: str) -> str:
    """The architecture's: what the labels of its arms have in common before a comma, or its name."""
    labels = {arm.label.partition(", rate")[0] for arm in results.arms if arm.name.partition("@")[0] == name}
    return labels.pop() if len(labels) == 1 else name


def _value(cell: Cell) -> float | None:
    if cell.diverged:
        return None
    return math.nan if cell.loss is None else cell.loss


def _cell(map_: Map, cell: Cell) -> str:
    state = map_.state(cell.lr, cell.weight_decay) or "not run to an end"
    said = [plain(cell.loss, 4), state] if cell.loss is not None else [state]
    if cell.diverged:
        said = [f"{len(cell.diverged_after)} of {len(cell.endings)} diverged"]
    if cell.spikes is not None:
        said.append(f"spikes {cell.spikes:.1f}")
    if cell.max_logit is not None:
        said.append(f"logit {cell.max_logit:.1f}")
    return ", ".join(said)


def _rates(maps: dict[str, Map]) -> Table:
    rows = []
    for name, map_ in maps.items():
        for decay in map_.decays:
            largest = [map_.largest_stable(decay), map_.largest_finished(decay)]
            words = [
                ("none" if lr is None else rate(lr)) + (" (the largest tried)" if lr == map_.rates[-1] else "")
                for lr in largest
            ]
            rows.append([name, rate(decay), *words, plain(map_.sensitivity(decay), 4)])
    notes = [
        f"By the rule: {RULE}. Sensitivity: mean over the rates tried of min(L, L at the start) − min L, in nats per "
        "token; compare it over the same rates alone (Wortsman et al., arXiv 2309.14322)."
    ]
    head = ["architecture", "decay", "largest stable rate", "largest without divergence", "sensitivity to the rate"]
    return Table("Largest stable rates and sensitivities", head, rows, notes)


def _judged(one: Judgement) -> list[str]:
    claim = one.claim
    disputed = " (the sources do not agree)" if claim.standing == "disputed" else ""
    return [
        claim.arm,
        f"{claim.multiple:.3g}",
        rate(claim.weight_decay),
        f"{claim.says_in_words}: {claim.text}",
        claim.source,
        one.verdict + disputed,
        str(one.seeds),
        NONE if one.steps is None else f"{one.steps:,}",
        one.why,
    ]
