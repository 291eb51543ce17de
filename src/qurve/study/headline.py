"""What stands on top of a report: a false alarm where there is one, then one verdict in words, and one number with its
interval; of a study of maps, what they show."""

from __future__ import annotations

from dataclasses import dataclass

from qurve.study.doubts import UNTUNED, doubts
from qurve.study.holds import grids, said_of_maps
from qurve.study.results import Arm, StudyResults
from qurve.study.stability import architecture
from qurve.study.statistics import Comparison, comparisons, is_alarm
from qurve.study.tables import signed


@dataclass(frozen=True)
class Headline:
    words: str
    arm: Arm | None
    pair: Comparison | None
    """None where several arms have no verdict: no single number stands for them."""
    caveat: str
    """That the arm was picked among several, where it was; else empty."""
    more: tuple[str, ...] = ()
    """Sentences that go on where the words end."""


def headline(results: StudyResults) -> Headline | None:
    """Of the arm with the lowest difference among the study's own that have a verdict, those that are told to be lower
    before others; of a study of maps, what they show of where training holds. None where the baseline is alone."""
    if maps := grids(results):
        words, more = said_of_maps(results, maps)
        return Headline(words, None, None, "", tuple(more))
    found = {pair.arm: pair for pair in comparisons(results)}
    pairs = [(arm, found[arm.name]) for arm in results.primary]
    if not pairs:
        return None
    decided = [
        (pair.outcome != "lower", pair.diff, i)
        for i, (_, pair) in enumerate(pairs)
        if pair.outcome != "none" and pair.diff is not None
    ]
    if not decided and len(pairs) > 1:
        return Headline("No verdict on any arm; each says why.", None, None, "")
    arm, pair = pairs[min(decided)[2] if decided else 0]
    told = " that is told" if any(diff < pair.diff for _, diff, _ in decided if pair.diff is not None) else ""
    corrected = f"the verdict is corrected for {results.family} (Holm), its interval is not."
    caveat = f"The lowest{told} of {len(decided)} arms: {corrected}"
    return Headline(f"{arm.label}: {pair.verdict}.", arm, pair, caveat if len(decided) > 1 else "")


def reservations(results: StudyResults) -> list[str]:
    """What a sceptical reader should know first: the doubts, without that of untuned rates where the rates of every arm
    are mapped or nothing but A/A arms is compared."""
    mapped = grids(results)
    is_tunable = any(architecture(arm.name) not in mapped for arm in results.primary)
    return [doubt for doubt in doubts(results) if doubt != UNTUNED or is_tunable]


def alarms(results: StudyResults) -> list[str]:
    """What an A/A arm's difference that looks real says of all the others, in words: a warning before any verdict."""
    found, pairs = [], {pair.arm: pair for pair in comparisons(results)}
    for arm in results.others:
        pair = pairs[arm.name]
        if not arm.seed_offset or not is_alarm(pair) or pair.diff is None:
            continue
        interval = f"{signed(pair.low, 4)} to {signed(pair.high, 4)}"
        how = (
            "which this study's own test takes for real"
            if pair.outcome in ("lower", "higher")
            else "whose interval leaves out zero, though no claim is made of it"
        )
        no_larger = [
            other.label
            for other in results.primary
            if (diff := pairs[other.name].diff) is not None and abs(diff) <= abs(pair.diff)
        ]
        found.append(
            f"False alarm: {arm.label} is the baseline's own configuration from other weights, and differs from it by "
            f"{signed(pair.diff, 4)} nats per token (95 % interval {interval}, {pair.n} seeds), {how}. Chance does so "
            "in one A/A test of twenty; else something other than the arms makes differences here, so that none can be "
            "believed before more seeds clear this up."
            + (f" No larger than this one: {', '.join(no_larger)}." if no_larger else "")
        )
    return found
