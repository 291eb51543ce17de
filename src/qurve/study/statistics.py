"""What a comparison may claim: differences paired by seed, their interval, and the verdict in words.

An A/A arm (the baseline once more, from other weights) is no arm to be claimed of: it is judged alone, by `a_a`, and is
no part of the family.

All arms of a seed see the same batches and share their initial weights, so the difference arm - baseline is taken
within each seed. Losses are in nats per token; a negative difference is a gain.

The one rule: **an arm is called lower or higher when its paired t test's p, corrected by Holm for all arms of the
study beside the baseline, is at most 5 %** (divided by the number of declared looks, where there are any). The interval
that is shown is the arm's own 95 % t interval, and is called so: it may leave out zero where the corrected test finds
nothing, and the words then say it. The exact sign-flip test stands beside both and decides nothing.

The arms that a search trains at the baseline's best point too (`ARM@BASELINE`) answer a second question, whether the
gain is one of tuning. They are a family of their own: Holm corrects them among themselves, and they take nothing from
the first comparison, best against best, which alone makes the study's verdict.

Seeds that are added after a look are either declared or forbidden. A study that declares `looks`, numbers of seeds, is
judged at these alone, and each may spend an equal part of the 5 % (Bonferroni). Without, or elsewhere, there is no
verdict once other seeds could have ended in one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from qurve.config import differences as config_differences
from qurve.errors import BadInput
from qurve.study.doubts import UNTUNED, doubts, search_apart
from qurve.study.looks import undeclared
from qurve.study.paired import (
    MOST_FLIPPED,
    holm,
    paired_interval,
    paired_p,
    sign_flip_p,
    smallest_sign_flip_p,
)
from qurve.study.power import LEAST_SEEDS, LEVEL, POWER, detectable
from qurve.study.results import Arm, Run, StudyResults
from qurve.train.objective import loss_is_on

ROW_KEYS = (
    "arm",
    "seeds_n",
    "non_embedding",
    "flops_per_token",
    "val_loss",
    "split",
    "final_loss",
    "diff",
    "diff_low",
    "diff_high",
    "p",
    "p_holm",
    "p_signflip",
    "p_signflip_least",
    "dll_percent",
    "dppx_percent",
    "tokens_per_s",
    "verdict",
)

MOST_NAMED = 12
"""Arms that a sentence names."""

LARGEST_DIFFERENCE = 700.0
"""Nats per token: the exponential of more overflows."""

SEED_FIELDS = ("train.seed", "data.order_seed")
"""In which alone an A/A arm may differ from the baseline."""

PENDING = ("running", "missing", "failed", "stopped")
"""What the same command makes, or makes again: without them the seeds that are left would be a choice."""

Outcome = Literal["lower", "higher", "noise", "none"]


@dataclass(frozen=True)
class Comparison:
    """One arm against the baseline, over the seeds that both have finished.

    What takes the verdict (`refusal`) takes every number but the seeds' differences with it: while runs are missing,
    where one broke, after a look that was not declared. There is a p of each kind where there are two seeds.
    """

    arm: str
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    diff: float | None
    low: float | None
    high: float | None
    """Ends of the arm's own 95 % interval."""
    p: float | None
    """Of the paired t test."""
    p_holm: float | None
    """The same, corrected for all arms of its family: what the verdict rests on."""
    p_signflip: float | None
    """Of the exact sign-flip test, for up to `MOST_FLIPPED` seeds."""
    dll_percent: float | None
    dppx_percent: float | None
    outcome: Outcome
    verdict: str

    @property
    def n(self) -> int:
        return len(self.seeds)


def relative_gains(loss: float, base: float) -> tuple[float, float]:
    """`(dll_percent, dppx_percent)`: the relative gain in log-loss and in perplexity over `base`, in per cent."""
    return 100 * (base - loss) / base, -100 * math.expm1(min(loss - base, LARGEST_DIFFERENCE))


def level_of(results: StudyResults) -> float:
    """What the arms together may risk at this look: 5 %, divided by the number of declared looks."""
    return LEVEL / max(1, len(results.looks))


def undeclared_looks(results: StudyResults) -> list[tuple[int, ...]]:
    """Earlier sets of seeds that could have ended in a claim, or in a choice among seeds, and were not declared."""
    return undeclared(results.earlier_seeds, results.seeds, results.looks)


def comparisons(results: StudyResults) -> list[Comparison]:
    """Every arm beside the baseline, compared with it, in the study's order.

    The study's own arms are one family of tests, those at the baseline's point another; an A/A arm is of neither. An
    arm without a p counts as one of its family all the same, and so do arms that other studies compared with the same
    baseline (`qurve.study.looks`).
    """
    families = {"own": results.primary, "matched": [arm for arm in results.matched if not arm.seed_offset]}
    found = {pair.arm: pair for family, arms in families.items() for pair in _family(results, family, arms)}
    return [a_a(results, arm) if arm.seed_offset else found[arm.name] for arm in results.others]


def _family(results: StudyResults, family: str, arms: Sequence[Arm]) -> list[Comparison]:
    pairs, before = (
        [_paired(results, arm, refusal(results, arm)) for arm in arms],
        results.compared_before.get(family, 0),
    )
    adjusted = holm([*(pair.p for pair in pairs), *[None] * before])[: len(pairs)]
    of = f"arms, {before} of them compared with it before" if before else "arms"
    return [
        _judged(results, arm, pair, p_holm, len(pairs) + before, of=of)
        for arm, pair, p_holm in zip(arms, pairs, adjusted, strict=True)
    ]


def compare(results: StudyResults, arm: Arm) -> Comparison:
    """Compare `arm` with the study's baseline. The other arms matter too: its family is tested together.

    The baseline, compared with itself, is noise and no part of the family.
    """
    if arm.name == results.baseline.name:
        pair = _paired(results, arm, refusal(results, arm))
        return _judged(results, arm, pair, pair.p, 1)
    return next(pair for pair in comparisons(results) if pair.arm == arm.name)


def a_a(results: StudyResults, arm: Arm) -> Comparison:
    """The A/A test: what the referee says of `arm`, which is the baseline's configuration under other seeds.

    Whatever it finds is noise: a claim is a false alarm, as one such test in twenty gives. It is judged alone, and need
    not have seen the baseline's batches. Raises `BadInput` for an arm that differs from the baseline in more.
    """
    apart = [path for path in config_differences(results.baseline.config, arm.config) if path not in SEED_FIELDS]
    if apart or arm.name == results.baseline.name:
        what = f"it differs from the baseline in {', '.join(apart)}" if apart else "it is the baseline itself"
        raise BadInput(f"{arm.name} is no A/A arm: {what}; give the baseline's configuration under other seeds")
    pair = _paired(results, arm, refusal(results, arm, other_batches=True))
    pair = _judged(results, arm, pair, pair.p, 1)
    if is_alarm(pair):
        return pair if pair.outcome in ("noise", "none") else replace(pair, verdict=f"a false alarm: {pair.verdict}")
    return replace(pair, verdict=f"{pair.verdict}, as an A/A arm should be") if pair.outcome == "noise" else pair


def is_alarm(pair: Comparison) -> bool:
    """Whether an A/A arm's difference looks real: by the test, or by its own 95 % interval, which leaves out zero."""
    if pair.low is None or pair.high is None or pair.n < LEAST_SEEDS:
        return False
    return pair.outcome in ("lower", "higher") or not pair.low <= 0 <= pair.high


def _paired(results: StudyResults, arm: Arm, refused: str | None) -> Comparison:
    """The numbers of a comparison, whose verdict is empty yet; or why it has neither."""
    base = results.baseline
    pairs = {
        seed: (loss, base_loss)
        for seed in results.seeds
        if (loss := arm.runs[seed].final_loss) is not None and (base_loss := base.runs[seed].final_loss) is not None
    }
    differences = tuple(loss - base_loss for loss, base_loss in pairs.values())
    diff = low = high = p = p_signflip = dll = dppx = None
    if refused is not None:
        return Comparison(arm.name, tuple(pairs), differences, *(None,) * 8, "none", refused)
    if pairs:
        diff = statistics.fmean(differences)
        dll, dppx = relative_gains(*(statistics.fmean(losses) for losses in zip(*pairs.values(), strict=True)))
    if len(pairs) >= 2:
        diff, low, high = paired_interval(differences)
        p = paired_p(differences)
        p_signflip = sign_flip_p(differences) if len(pairs) <= MOST_FLIPPED else None
    seeds = tuple(pairs)
    return Comparison(arm.name, seeds, differences, diff, low, high, p, None, p_signflip, dll, dppx, "none", "")


def rows_between(results: StudyResults, pairs: Sequence[tuple[Arm, Arm]]) -> list[dict[str, Any]]:
    """The row of each pair's second arm against its first, with the keys `ROW_KEYS`: all of them one family of tests.

    For questions that a study asks beside that of its baseline; Holm corrects for as many differences as are given.
    """
    studies = [replace(results, baseline=before, arms=(before, after)) for before, after in pairs]
    found = [_paired(one, after, refusal(one, after)) for one, (_, after) in zip(studies, pairs, strict=True)]
    adjusted = holm([pair.p for pair in found])
    rows = []
    for one, (before, after), pair, p_holm in zip(studies, pairs, found, adjusted, strict=True):
        judged = _judged(one, after, pair, p_holm, len(pairs), of="differences", than=before.label)
        rows.append(_row(one, after, judged))
    return rows


def _judged(
    results: StudyResults,
    arm: Arm,
    pair: Comparison,
    p_holm: float | None,
    arms: int,
    *,
    of: str = "arms",
    than: str = "the baseline",
) -> Comparison:
    if pair.verdict:
        return pair
    pair = replace(pair, p_holm=p_holm)
    outcome, words = verdict_on(pair.differences, p_holm, len(results.looks), arms, f"than {than}", of)
    return replace(pair, outcome=outcome, verdict=words)


def _unfinished(results: StudyResults, arm: Arm) -> list[Unfinished]:
    own, base = arm.unfinished, [] if arm is results.baseline else results.baseline.unfinished
    return [*((run, which(run)) for run in own), *((run, which(run, "baseline")) for run in base)]


def refusal(results: StudyResults, arm: Arm, *, other_batches: bool = False) -> str | None:
    """Why there can be no verdict on the arm, whatever its numbers say; None when nothing speaks against one.

    It decides for everything that is said of the arm beside the baseline: difference, interval, p and worth.
    """
    if len({run.fingerprint for run in (*arm.runs.values(), *results.baseline.runs.values()) if run.fingerprint}) > 1:
        return "no verdict: its runs and the baseline's were made from different data"
    apart = results.batches.difference_of(arm.name, results.baseline.name)
    if apart is not None and not other_batches:
        return f"no verdict: {apart}"
    if arm.config.get("eval") != results.baseline.config.get("eval"):
        return "no verdict: it was evaluated on other windows than the baseline"
    if (searched := search_apart(results, arm)) is not None:
        return f"no verdict: {searched}"
    ends = {run.reported[-1][0] for run in (*arm.finished, *results.baseline.finished)}
    if len(ends) > 1:
        return f"no verdict: the runs ended at different steps ({', '.join(f'{e:,}' for e in sorted(ends))})"
    return refusal_of_runs(_unfinished(results, arm)) or refusal_of_looks(results, arm)


Unfinished = tuple[Run, str]
"""A run that has not finished, and what it is called in a verdict."""


def which(run: Run, where: str = "") -> str:
    """`seed 2 diverged (there)`"""
    status = "not run" if run.status == "missing" else run.status
    return f"seed {run.seed} {status}" + (f" ({where})" if where else "")


def refusal_of_runs(unfinished: Sequence[Unfinished]) -> str | None:
    """Why these runs allow no verdict, in words; None where they do."""
    pending = [words for run, words in unfinished if run.status in PENDING]
    broken = [words for run, words in unfinished if run.status in ("diverged", "damaged")]
    if broken:  # what is left over are the seeds that survived: their mean flatters an arm that breaks
        return f"no verdict: {', '.join(broken)}"
    if pending:  # looking early and stopping when it pleases would make the interval a lie
        return f"no verdict yet: {', '.join(pending)}"
    return None


def refusal_of_looks(results: StudyResults, arm: Arm) -> str | None:
    """Why a look at the arm with the seeds that the study has allows no verdict, in words; None where it does."""
    if results.looks and len(results.seeds) not in results.looks:
        declared = ", ".join(map(str, results.looks))
        return f"no verdict: a look at {len(results.seeds)} seeds was not declared (declared: {declared})"
    if looks := undeclared_looks(results):
        seeds = "; ".join(", ".join(map(str, seeds)) for seeds in looks)
        return f"no verdict: it was run before with other seeds ({seeds}), and no look at them was declared"
    if pooled := results.looked_in_pool.get(arm.name):
        seeds = "; ".join(", ".join(map(str, seeds)) for seeds in pooled)
        return f"no verdict: another study of its pool looked at it with other seeds ({seeds}), undeclared"
    return None


def verdict_on(
    differences: Sequence[float], p: float | None, looks: int, arms: int, than: str, of: str = "arms"
) -> tuple[Outcome, str]:
    """The verdict on differences with this final p, among so many arms and declared looks (0: none).

    `than` says what the loss is lower or higher than, and `of` what Holm corrects for.
    """
    n = len(differences)
    if n == 0:
        return "none", "no verdict: no seed is finished in both"
    if n == 1:
        return "none", "one seed: no verdict"
    if n < LEAST_SEEDS or p is None:
        return "none", "two seeds decide nothing"
    mean, low, high = paired_interval(differences)
    after = "p < 0.0001" if p < 1e-4 else f"p = {p:.4f}"
    after += f" after Holm for {arms} {of}" if arms > 1 else ""
    level = LEVEL / max(1, looks)
    if p > level:
        words = f"cannot be told apart from the noise ({n} seeds)"
        if low > 0 or high < 0:
            words += f": its own 95 % interval leaves out zero, but {after}"
            words += f", and each of {looks} declared looks may spend {level:.4f}" if looks > 1 else ""
        return "noise", words
    outcome: Outcome = "lower" if mean < 0 else "higher"
    near, far = sorted((abs(low), abs(high)))
    return outcome, (
        f"{outcome} loss {than} by {abs(mean):.4f} nats per token "
        f"(95 % interval {near:.4f} to {far:.4f}, {n} seeds, {after})"
    )


def summary_rows(results: StudyResults) -> list[dict[str, Any]]:
    """One dict per arm with the keys `ROW_KEYS`; None where a number is not defined.

    `seeds_n`, `val_loss` and `final_loss` are over the arm's finished seeds, the differences and gains over the seeds
    that it shares with the baseline. `final_loss`, the differences and all that follows are on `split`; only a study
    whose search chose on the validation split reports on another.
    """
    pairs = {pair.arm: pair for pair in comparisons(results)}
    return [_row(results, arm, pairs.get(arm.name)) for arm in results.arms]


def _row(results: StudyResults, arm: Arm, pair: Comparison | None) -> dict[str, Any]:
    values = (
        arm.name,
        len(arm.finished),
        arm.non_embedding,
        arm.flops_per_token,
        arm.val_loss,
        results.split,
        arm.final_loss,
        pair and pair.diff,
        pair and pair.low,
        pair and pair.high,
        pair and pair.p,
        pair and pair.p_holm,
        pair and pair.p_signflip,
        None if pair is None or pair.p_signflip is None else smallest_sign_flip_p(pair.n),
        pair and pair.dll_percent,
        pair and pair.dppx_percent,
        arm.tokens_per_s,
        pair.verdict if pair else ", ".join(["the reference", *(which(run) for run in arm.unfinished)]),
    )
    return dict(zip(ROW_KEYS, values, strict=True))


def overall_verdict(results: StudyResults) -> str:
    """The study's verdict in a few sentences, with what it does not cover."""
    if not results.others:
        return "There is no arm beside the baseline: nothing to compare."
    pairs = comparisons(results)
    sentences = [*verdicts(results, pairs), *scope(results, pairs)]
    if results.search is None and results.primary:
        sentences.append("The arms' learning rates were not tuned by a recorded search.")
    if beside := len([doubt for doubt in doubts(results) if doubt != UNTUNED]):
        sentences.append(f"Doubts to be read before it is believed: {beside}.")
    return " ".join(sentences)


def verdicts(results: StudyResults, pairs: Sequence[Comparison]) -> list[str]:
    """The verdict on every arm in sentences; arms of which the same is said are named together, many only counted."""
    alarming = {pair.arm for pair in pairs if is_alarm(pair)}
    twins = [arm for arm in results.others if arm.seed_offset]
    first = [arm for arm in twins if arm.name in alarming]  # whoever reads one sentence reads this one
    sentences = _in_sentences([*first, *results.primary, *(arm for arm in twins if arm not in first)], pairs)
    if results.matched:
        sentences += [
            "At the baseline's best point, a family of tests of its own:",
            *_in_sentences(results.matched, pairs),
        ]
    return sentences


def _in_sentences(arms: Sequence[Arm], pairs: Sequence[Comparison]) -> list[str]:
    said = {pair.arm: pair.verdict for pair in pairs}
    labels: dict[str, list[str]] = {}
    for arm in arms:
        labels.setdefault(said[arm.name], []).append(arm.label)
    return [
        f"{'; '.join(alike) if len(alike) <= MOST_NAMED else f'{len(alike)} arms'}: {verdict}."
        for verdict, alike in labels.items()
    ]


def scope(results: StudyResults, pairs: Sequence[Comparison]) -> list[str]:
    """What the verdicts do not cover, in sentences."""
    sentences = []
    if results.split == "test":
        sentences.append("Losses are on the test split; the search chose on the validation split.")
    if tokens := loss_is_on(results.baseline.setting("train.objective.kind")):
        sentences.append(f"Losses are on the {tokens} alone.")
    judged = [pair for pair in pairs if pair.outcome != "none"]
    if judged:
        sentences.append(
            "This holds for this model size, this data and this training length; it says nothing of others."
        )
        if results.family > 1:
            sentences.append(
                f"The intervals are per arm, not corrected for comparing {results.family} arms with one baseline; the "
                "verdicts are (Holm, 5 % for all of them together"
                f"{', and as much for those at the point of the baseline' if results.matched else ''})."
            )
        if results.looks:
            sentences.append(
                f"Looks were declared at {', '.join(map(str, results.looks))} seeds; each is judged at "
                f"{100 * level_of(results):.3g} %."
            )
        if found := detectable(results):
            nats, percent = found
            sentences.append(
                f"By the noise that was found, a difference of {nats:.4f} nats per token ({percent:.2f} %) would be "
                f"seen with {100 * POWER:.0f} % power."
            )
        reach = ", ".join(f"{smallest_sign_flip_p(n):.3g} with {n} seeds" for n in sorted({p.n for p in judged}))
        sentences.append(f"The sign-flip test beside them can reach no p below {reach}.")
    return sentences
