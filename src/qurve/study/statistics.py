"""What a comparison may claim: differences paired by seed, their interval, and the verdict in words.

All arms of a seed see the same batches and share their initial weights, so the difference arm - baseline is taken
within each seed and its mean gets a t interval over the seeds. Losses are in nats per token; a negative difference is a
gain.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qurve.study.results import Arm, Run, StudyResults
from qurve.train.objective import loss_is_on

ROW_KEYS = (
    "arm",
    "seeds_n",
    "non_embedding",
    "flops_per_token",
    "val_loss",
    "diff",
    "diff_low",
    "diff_high",
    "dll_percent",
    "dppx_percent",
    "tokens_per_s",
    "verdict",
)

LARGEST_DIFFERENCE = 700.0
"""Nats per token: the exponential of more overflows."""

Outcome = Literal["lower", "higher", "noise", "none"]


@dataclass(frozen=True)
class Comparison:
    """One arm against the baseline, over the seeds that both have finished."""

    arm: str
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    diff: float | None
    low: float | None
    high: float | None
    dll_percent: float | None
    dppx_percent: float | None
    outcome: Outcome
    verdict: str

    @property
    def n(self) -> int:
        return len(self.seeds)


def paired_interval(differences: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Mean and two-sided t interval of paired differences (two at least), as `(mean, low, high)`."""
    from scipy.special import stdtrit

    n = len(differences)
    if n < 2:
        raise ValueError(f"an interval needs at least two differences, not {n}")
    mean = statistics.fmean(differences)
    half = float(stdtrit(n - 1, (1 + level) / 2)) * statistics.stdev(differences) / math.sqrt(n)
    return mean, mean - half, mean + half


def relative_gains(loss: float, base: float) -> tuple[float, float]:
    """`(dll_percent, dppx_percent)`: the relative gain in log-loss and in perplexity over `base`, in per cent."""
    return 100 * (base - loss) / base, -100 * math.expm1(min(loss - base, LARGEST_DIFFERENCE))


def compare(results: StudyResults, arm: Arm) -> Comparison:
    """Compare `arm` with the study's baseline."""
    base = results.baseline
    pairs = {
        seed: (loss, base_loss)
        for seed in results.seeds
        if (loss := arm.runs[seed].final_loss) is not None and (base_loss := base.runs[seed].final_loss) is not None
    }
    differences = tuple(loss - base_loss for loss, base_loss in pairs.values())
    diff = low = high = dll = dppx = None
    if pairs:
        diff = statistics.fmean(differences)
        dll, dppx = relative_gains(*(statistics.fmean(losses) for losses in zip(*pairs.values(), strict=True)))
    if len(pairs) >= 2:
        diff, low, high = paired_interval(differences)
    outcome, words = _verdict(results, arm, differences)
    return Comparison(arm.name, tuple(pairs), differences, diff, low, high, dll, dppx, outcome, words)


def _verdict(results: StudyResults, arm: Arm, differences: Sequence[float]) -> tuple[Outcome, str]:
    apart = results.batches.difference_of(arm.name, results.baseline.name)
    if apart is not None:
        return "none", f"no verdict: {apart}"
    if arm.config.get("eval") != results.baseline.config.get("eval"):
        return "none", "no verdict: it was evaluated on other windows than the baseline"
    ends = {run.val[-1][0] for run in (*arm.finished, *results.baseline.finished)}
    if len(ends) > 1:
        return "none", f"no verdict: the runs ended at different steps ({', '.join(f'{e:,}' for e in sorted(ends))})"
    unfinished = [*arm.unfinished, *results.baseline.unfinished]
    pending = [_which(run, arm) for run in unfinished if run.status in ("running", "missing")]
    broken = [_which(run, arm) for run in unfinished if run.status in ("diverged", "damaged")]
    left_out = [_which(run, arm) for run in unfinished if run.status in ("failed", "stopped")]
    if broken:  # what is left over are the seeds that survived: their mean flatters an arm that breaks
        return "none", f"no verdict: {', '.join(broken)}"
    if pending:  # looking early and stopping when it pleases would make the interval a lie
        return "none", f"no verdict yet: {', '.join([*pending, *left_out])}"
    outcome, words = _words(differences)
    return outcome, words + (f"; left out: {', '.join(left_out)}" if left_out else "")


def _which(run: Run, arm: Arm) -> str:
    status = "not run" if run.status == "missing" else run.status
    return f"seed {run.seed} {status}" + ("" if run.arm == arm.name else " (baseline)")


def _words(differences: Sequence[float]) -> tuple[Outcome, str]:
    n = len(differences)
    if n == 0:
        return "none", "no verdict: no seed is finished in both"
    if n == 1:
        return "none", "one seed: no verdict"
    if n == 2:
        return "none", "two seeds decide nothing"
    mean, low, high = paired_interval(differences)
    if low <= 0 <= high:
        return "noise", f"cannot be told apart from the noise ({n} seeds)"
    outcome: Outcome = "lower" if mean < 0 else "higher"
    near, far = sorted((abs(low), abs(high)))
    return outcome, (
        f"{outcome} loss than the baseline by {abs(mean):.4f} nats per token "
        f"(95 % interval {near:.4f} to {far:.4f}, {n} seeds)"
    )


def summary_rows(results: StudyResults) -> list[dict[str, Any]]:
    """One dict per arm with the keys `ROW_KEYS`; None where a number is not defined.

    `seeds_n` and `val_loss` are over the arm's finished seeds, the differences and gains over the seeds that it shares
    with the baseline.
    """
    return [_row(results, arm) for arm in results.arms]


def _row(results: StudyResults, arm: Arm) -> dict[str, Any]:
    is_baseline = arm.name == results.baseline.name
    pair = None if is_baseline else compare(results, arm)
    values = (
        arm.name,
        len(arm.finished),
        arm.non_embedding,
        arm.flops_per_token,
        arm.val_loss,
        pair and pair.diff,
        pair and pair.low,
        pair and pair.high,
        pair and pair.dll_percent,
        pair and pair.dppx_percent,
        arm.tokens_per_s,
        pair.verdict if pair else ", ".join(["the reference", *(_which(run, arm) for run in arm.unfinished)]),
    )
    return dict(zip(ROW_KEYS, values, strict=True))


def overall_verdict(results: StudyResults) -> str:
    """The study's verdict in a few sentences, with what it does not cover."""
    arms = results.others
    if not arms:
        return "There is no arm beside the baseline: nothing to compare."
    comparisons = [compare(results, arm) for arm in arms]
    labels: dict[str, list[str]] = {}
    for arm, pair in zip(arms, comparisons, strict=True):
        labels.setdefault(pair.verdict, []).append(arm.label)
    sentences = [f"{'; '.join(alike)}: {verdict}." for verdict, alike in labels.items()]
    return " ".join([*sentences, *scope(results, comparisons)])


def scope(results: StudyResults, comparisons: Sequence[Comparison]) -> list[str]:
    """What the verdicts do not cover, in sentences."""
    sentences = []
    if tokens := loss_is_on(results.baseline.setting("train.objective.kind")):
        sentences.append(f"Losses are on the {tokens} alone.")
    if any(pair.outcome != "none" for pair in comparisons):
        sentences.append(
            "This holds for this model size, this data and this training length; it says nothing of others."
        )
        if len(comparisons) > 1:
            sentences.append(
                f"The intervals are per arm, not corrected for comparing {len(comparisons)} arms with one baseline."
            )
    if results.search is None:
        sentences.append("The arms' learning rates were not tuned by a recorded search.")
    return sentences
