"""What stands on top of a report: one verdict in words, and one number with its interval."""

from __future__ import annotations

from dataclasses import dataclass

from qurve.study.results import Arm, StudyResults
from qurve.study.statistics import Comparison, comparisons


@dataclass(frozen=True)
class Headline:
    words: str
    arm: Arm | None
    pair: Comparison | None
    """None where several arms have no verdict: no single number stands for them."""
    caveat: str
    """That the arm was picked among several, where it was; else empty."""


def headline(results: StudyResults) -> Headline | None:
    """Of the arm with the lowest difference among the study's own that have a verdict; None where the baseline is
    alone."""
    found = {pair.arm: pair for pair in comparisons(results)}
    pairs = [(arm, found[arm.name]) for arm in results.primary]
    if not pairs:
        return None
    decided = [(pair.diff, i) for i, (_, pair) in enumerate(pairs) if pair.outcome != "none" and pair.diff is not None]
    if not decided and len(pairs) > 1:
        return Headline("No verdict on any arm; each says why.", None, None, "")
    arm, pair = pairs[min(decided)[1] if decided else 0]
    caveat = (
        f"The lowest of {len(decided)} arms: the verdict is corrected for {len(pairs)} (Holm), its interval is not."
    )
    return Headline(f"{arm.label}: {pair.verdict}.", arm, pair, caveat if len(decided) > 1 else "")
