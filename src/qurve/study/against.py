"""Two studies side by side: the same arms, seed by seed, where data, order and evaluation were equal.

What is not equal is refused, with the reason: its difference would be one of the measurement. What is compared is
judged by the rules of a study (`qurve.study.statistics`): the paired t test, corrected by Holm for all arms that both
studies have, at 5 % divided by the number of declared looks; no verdict where a run broke or is missing in either
study, or after a look that was not declared.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qurve.config import differences
from qurve.errors import BadInput
from qurve.study.continued import PLACE
from qurve.study.paired import holm, paired_interval, paired_p
from qurve.study.provenance import provenance
from qurve.study.results import Arm, Run, StudyResults
from qurve.study.settings import setting_in_words
from qurve.study.statistics import Outcome, Unfinished, refusal_of_looks, refusal_of_runs, verdict_on, which

MEASUREMENT = ("data.", "eval.", "model.context", "model.vocab_size", "model.attends", "train.objective")
"""What two arms must have alike for their losses to be on one scale."""
AT_THE_END = ("eval.every", "eval.attention_logits")
"""What says only how often, and what else, is measured: the last loss is the same."""
NO_MATTER = ("data.path", "data.fingerprint", "train.seed")
"""Where the data lay; what was read of it is compared by the runs' own fingerprints and batches."""


@dataclass(frozen=True)
class Pairing:
    """One arm in two studies; `diff` is here minus there, so that negative is a gain."""

    arm: str
    label: str
    seeds: tuple[int, ...]
    here: float | None
    there: float | None
    diff: float | None
    low: float | None
    high: float | None
    """Ends of the arm's own 95 % interval."""
    p: float | None
    """Of the paired t test; None where there can be no verdict."""
    p_holm: float | None
    """The same, corrected for all arms that both studies have: what the verdict rests on."""
    outcome: Outcome
    in_words: str
    refused: str | None
    """Why the two are not compared; None where they are."""
    changed: dict[str, tuple[Any, Any]]
    """The settings in which the arm differs, as `path -> (there, here)`."""
    changed_in_words: dict[str, tuple[str, str]]


def against(results: StudyResults, other: StudyResults) -> list[Pairing]:
    """Every arm that both studies have, by name.

    Raises `BadInput` where there is none, or where none can be compared: it says why.
    """
    shared = [(arm, there) for arm in results.arms for there in other.arms if arm.name == there.name]
    if not shared:
        raise BadInput(
            f"{results.folder} and {other.folder} have no arm in common (arms here: "
            f"{', '.join(arm.name for arm in results.arms)}; there: {', '.join(arm.name for arm in other.arms)})"
        )
    data = [set(provenance(study).data) for study in (results, other)]
    splits = [study.split_in_words for study in (results, other)]

    def looked(arm: Arm, there: Arm) -> str:
        return " and ".join(
            f"{refusal} ({where})"
            for study, one, where in ((results, arm, "here"), (other, there, "there"))
            if (refusal := refusal_of_looks(study, one)) is not None
        )

    found = [_pair(arm, there, data, splits, looked(arm, there)) for arm, there in shared]
    if all(pair.refused is not None for pair in found):
        reasons = "; ".join(dict.fromkeys(f"{pair.arm}: {pair.refused}" for pair in found))
        raise BadInput(f"{results.folder} cannot be compared with {other.folder}: {reasons}")
    return _judged(found, shared, max(len(results.looks), len(other.looks)))


def against_lines(other: StudyResults, pairs: Sequence[Pairing]) -> list[str]:
    """What is said of each arm beside itself in the other study, with the settings that differ; for a terminal."""
    found = []
    for pair in pairs:
        changes = "; ".join(f"{path} {there} → {here}" for path, (there, here) in pair.changed_in_words.items())
        found.append(f"Against {other.name}, {pair.label}: {pair.in_words}{changes and f' ({changes})'}.")
    return found


def _pair(arm: Arm, there: Arm, data: list[set[str]], splits: list[str], looked: str) -> Pairing:
    """The numbers of a comparison; its words are those of a refusal, or empty yet."""
    changed = {p: pair for p, pair in differences(there.config, arm.config).items() if p not in NO_MATTER}
    words = {path: (setting_in_words(there.config, path), setting_in_words(arm.config, path)) for path in changed}
    runs = {seed: (arm.runs[seed], there.runs[seed]) for seed in arm.runs if seed in there.runs}
    runs = {seed: pair for seed, pair in runs.items() if all(run.finished for run in pair)}
    refused = _unequal(changed, list(runs.values()), data, _unfinished(arm, there))
    if splits[0] != splits[1]:
        refused = f"its loss is on the {splits[0]} split here and on the {splits[1]} split there"
    bare = Pairing(
        arm.name, arm.label, (), arm.final_loss, there.final_loss, *(None,) * 5, "none", "", refused, changed, words
    )
    if refused is not None:
        return dataclasses.replace(bare, in_words=f"not compared: {refused}")
    losses = [(_loss(ours), _loss(theirs)) for ours, theirs in runs.values()]
    diffs = [a - b for a, b in losses]
    here, before = (statistics.fmean(column) for column in zip(*losses, strict=True))
    diff, low, high = (*paired_interval(diffs),) if len(diffs) > 1 else (diffs[0], None, None)
    refusal = refusal_of_runs(_unfinished(arm, there)) or looked
    p = paired_p(diffs) if len(diffs) > 1 and not refusal else None
    numbers: dict[str, Any] = {"here": here, "there": before, "diff": diff, "low": low, "high": high, "p": p}
    return dataclasses.replace(bare, seeds=tuple(runs), in_words=refusal, **numbers)


def _judged(pairs: list[Pairing], shared: list[tuple[Arm, Arm]], looks: int) -> list[Pairing]:
    """The verdicts: all arms are one family of tests. One without a p counts as one of it all the same."""
    found = []
    for pair, (arm, there), p_holm in zip(pairs, shared, holm([pair.p for pair in pairs]), strict=True):
        outcome, words = pair.outcome, pair.in_words
        if not words:
            diffs = [_loss(arm.runs[seed]) - _loss(there.runs[seed]) for seed in pair.seeds]
            outcome, words = verdict_on(diffs, p_holm, looks, len(pairs), "here than there")
            if not any(diffs):
                words = f"the same loss ({len(diffs)} seed{'' if len(diffs) == 1 else 's'})"
            words += _made_elsewhere([arm.runs[seed] for seed in pair.seeds], [there.runs[seed] for seed in pair.seeds])
        if pair.refused is None and (alone := sorted(arm.runs.keys() ^ there.runs.keys())):
            words += f"; in one of the two alone: seed{'' if len(alone) == 1 else 's'} {', '.join(map(str, alone))}"
        found.append(dataclasses.replace(pair, p_holm=p_holm, outcome=outcome, in_words=words))
    return found


def _made_elsewhere(here: list[Run], there: list[Run]) -> str:
    """In what the runs' places differ: then the difference is not the arm's alone."""
    found = []
    for key in PLACE:
        values = [
            sorted({json.dumps(part.environment[key]) for run in runs for part in run.parts if key in part.environment})
            for runs in (here, there)
        ]
        if all(values) and values[0] != values[1]:
            found.append(f"{key} {' and '.join(values[0])} here and {' and '.join(values[1])} there")
    return f"; not made alike: {', '.join(found)}" if found else ""


def _loss(run: Run) -> float:
    assert run.final_loss is not None  # it has finished
    return run.final_loss


def _unfinished(arm: Arm, there: Arm) -> list[Unfinished]:
    return [(run, which(run, where)) for of, where in ((arm, "here"), (there, "there")) for run in of.unfinished]


def _unequal(
    changed: dict[str, Any], runs: list[tuple[Run, Run]], data: list[set[str]], unfinished: list[Unfinished]
) -> str | None:
    for path, (there, here) in changed.items():
        if path.startswith(MEASUREMENT) and path not in AT_THE_END:
            return f"{path} is {here!r} here and {there!r} there"
    if all(data) and data[0] != data[1]:
        return "the data are others"
    if not runs:
        states = ", ".join(words for _, words in unfinished)
        return "no seed is finished in both" + (f": {states}" if states else "")
    for ours, theirs in runs:
        if ours.val[-1][0] != theirs.val[-1][0]:
            ends = f"{ours.val[-1][0]:,} here and {theirs.val[-1][0]:,} there"
            return f"they were last evaluated at different steps ({ends})"
        if not ours.batch_digests or not theirs.batch_digests:
            return f"seed {ours.seed} has no record of its batches"
        steps = sorted(ours.batch_digests.keys() | theirs.batch_digests.keys())
        for step in steps:
            if ours.batch_digests.get(step) != theirs.batch_digests.get(step):
                return f"seed {ours.seed} did not see the same batch at step {step:,}"
    return None
