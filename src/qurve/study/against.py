"""Two studies side by side: the same arms, seed by seed, where data, order and evaluation were equal.

What is not equal is refused, with the reason: its difference would be one of the measurement.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from qurve.config import differences
from qurve.errors import BadInput
from qurve.study.paired import paired_interval
from qurve.study.provenance import provenance
from qurve.study.results import Arm, Run, StudyResults

MEASUREMENT = ("data.", "eval.", "model.context", "model.vocab_size", "model.attends", "train.objective")
"""What two arms must have alike for their losses to be on one scale."""
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
    refused: str | None
    """Why the two are not compared; None where they are."""
    changed: dict[str, tuple[Any, Any]]
    """The settings in which the arm differs, as `path -> (there, here)`."""

    @property
    def in_words(self) -> str:
        if self.refused is not None:
            return f"not compared: {self.refused}"
        n = len(self.seeds)
        if self.diff == 0 and self.low in (None, 0):
            return f"the same loss ({_seeds(n)})"
        if self.low is None or self.high is None:
            return f"{_seeds(n)}: no verdict"
        if self.low <= 0 <= self.high:
            return f"cannot be told apart from the noise ({_seeds(n)})"
        return f"{'lower' if self.high < 0 else 'higher'} loss here ({_seeds(n)})"


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
    found = [_pair(arm, there, data, splits) for arm, there in shared]
    if all(pair.refused is not None for pair in found):
        reasons = "; ".join(dict.fromkeys(f"{pair.arm}: {pair.refused}" for pair in found))
        raise BadInput(f"{results.folder} cannot be compared with {other.folder}: {reasons}")
    return found


def _pair(arm: Arm, there: Arm, data: list[set[str]], splits: list[str]) -> Pairing:
    changed = {p: pair for p, pair in differences(there.config, arm.config).items() if p not in NO_MATTER}
    seeds = [seed for seed in arm.runs if seed in there.runs]
    runs = [(arm.runs[seed], there.runs[seed]) for seed in seeds]
    runs = [(ours, theirs) for ours, theirs in runs if ours.finished and theirs.finished]
    refused = _unequal(changed, runs, data)
    if splits[0] != splits[1]:
        refused = f"its loss is on the {splits[0]} split here and on the {splits[1]} split there"
    if refused is not None:
        return Pairing(arm.name, arm.label, (), arm.final_loss, there.final_loss, None, None, None, refused, changed)
    losses = [
        (a, b) for ours, theirs in runs if (a := ours.final_loss) is not None and (b := theirs.final_loss) is not None
    ]
    diffs = [a - b for a, b in losses]
    diff, low, high = (*paired_interval(diffs),) if len(diffs) > 2 else (statistics.fmean(diffs), None, None)
    here, before = (statistics.fmean(column) for column in zip(*losses, strict=True))
    compared = tuple(ours.seed for ours, _ in runs)
    return Pairing(arm.name, arm.label, compared, here, before, diff, low, high, None, changed)


def _unequal(changed: dict[str, Any], runs: list[tuple[Run, Run]], data: list[set[str]]) -> str | None:
    for path, (there, here) in changed.items():
        if path.startswith(MEASUREMENT):
            return f"{path} is {here!r} here and {there!r} there"
    if all(data) and data[0] != data[1]:
        return "the data are others"
    if not runs:
        return "no seed is finished in both"
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


def _seeds(n: int) -> str:
    return f"{n} seed{'' if n == 1 else 's'}"
