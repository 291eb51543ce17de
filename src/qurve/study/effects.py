"""What a difference in loss is worth: per byte, in training saved, in size of the baseline, and what it costs.

Each is taken per seed, arm against baseline, with its paired interval. What cannot be said is an `Unknown` with the
reason, never a guess. Nothing here trains or writes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from qurve.config import differences
from qurve.data.loader import MANIFEST, read_manifest
from qurve.errors import BadInput
from qurve.runfolder import RunFolder
from qurve.study.paired import paired_interval
from qurve.study.results import Arm, Run, StudyResults
from qurve.study.scaling import Equivalent, Estimate, equivalent, ratio_interval
from qurve.study.statistics import comparisons, refusal, relative_gains

T = TypeVar("T")
Curve = Sequence[tuple[int, float]]
"""(step, validation loss), ascending."""

STEADY = 1.25
"""An arm's fastest seed over its slowest: beyond it the machine was not quiet, and speeds say nothing of the arms."""


@dataclass(frozen=True)
class Unknown:
    """Why there is no number."""

    why: str


@dataclass(frozen=True)
class Saved:
    """What the arm had not yet spent when it reached the baseline's final loss; negative where it had spent more."""

    steps: Estimate
    percent_of_steps: Estimate
    """The steps, in per cent of the baseline's."""
    tokens: Estimate
    flops: Estimate
    """Training FLOPs, each side at its own cost a token."""
    seconds: Estimate | Unknown
    """Training time, each run at its own speed."""


@dataclass(frozen=True)
class Cost:
    """What an arm takes. Memory is the most that one of its processes held (see `peak_memory`), over its runs."""

    arm: str
    non_embedding: int
    total: int
    flops_per_token: float
    tokens_per_s: float | None
    peak_memory_bytes: int | None


@dataclass(frozen=True)
class Effect:
    """One arm against the baseline, over the seeds that both have finished. Gains are positive but for bits per byte,
    which is a difference of losses."""

    arm: str
    seeds: tuple[int, ...]
    dll_percent: Estimate | Unknown
    dppx_percent: Estimate | Unknown
    bits_per_byte: Estimate | Unknown
    """Arm minus baseline: below zero is a gain."""
    saved: Saved | Unknown
    parameters: Equivalent | Unknown
    """In non-embedding parameters."""
    compute: Equivalent | Unknown
    """In training FLOPs at the same number of tokens."""


def effects(results: StudyResults) -> list[Effect]:
    """The effect of every arm but the baseline."""
    sized = sized_baselines(results)
    noise = {pair.arm for pair in comparisons(results) if pair.outcome == "noise"} if sized else set()
    return [effect(results, arm, sized, noise) for arm in results.others]


def effect(results: StudyResults, arm: Arm, sized: Sequence[Arm], noise: Collection[str] = ()) -> Effect:
    """The effect of `arm` against the study's baseline; `sized` are its `sized_baselines`, and `noise` the names of the
    arms whose difference is not told from it."""
    reason = not_comparable(results, arm)
    seeds = shared_seeds(results, [arm]) if reason is None else ()
    if not seeds:
        unknown = Unknown(reason or "no seed is finished in both")
        return Effect(arm.name, (), unknown, unknown, unknown, unknown, unknown, unknown)
    base, ours = final_losses(results.baseline, seeds), final_losses(arm, seeds)
    mean = statistics.fmean(base)
    difference = estimate([loss - other for loss, other in zip(ours, base, strict=True)])
    return Effect(
        arm=arm.name,
        seeds=seeds,
        dll_percent=log_loss_gain(ours, base),
        dppx_percent=_falling(difference, lambda nats: relative_gains(mean + nats, mean)[1]),
        bits_per_byte=asked(lambda: _per_byte(results, difference)),
        saved=asked(lambda: saved(results, arm, seeds)),
        parameters=asked(lambda: equivalent_gain(results, arm, "params", sized, noise)),
        compute=asked(lambda: equivalent_gain(results, arm, "flops", sized, noise)),
    )


def costs(results: StudyResults) -> list[Cost]:
    """What every arm takes, the baseline among them."""
    return [
        Cost(
            arm=arm.name,
            non_embedding=arm.non_embedding,
            total=arm.total,
            flops_per_token=arm.flops_per_token,
            tokens_per_s=arm.tokens_per_s,
            peak_memory_bytes=max(_memories(arm), default=None),
        )
        for arm in results.arms
    ]


def _memories(arm: Arm) -> list[int]:
    found = (run.environment.get("peak_memory_bytes") for run in arm.finished)
    return [value for value in found if type(value) is int and value > 0]


def asked(question: Callable[[], T]) -> T | Unknown:
    try:
        return question()
    except BadInput as error:
        return Unknown(str(error))


# ------------------------------------------------------------------------------------------------------------- pairing


def shared_seeds(results: StudyResults, arms: Sequence[Arm]) -> tuple[int, ...]:
    """Seeds that the baseline and all of these arms have finished."""
    every = [results.baseline, *arms]
    return tuple(seed for seed in results.seeds if all(arm.runs[seed].final_loss is not None for arm in every))


def final_losses(arm: Arm, seeds: Sequence[int]) -> list[float]:
    """The losses that are compared; the seeds are finished ones."""
    found = [arm.runs[seed].final_loss for seed in seeds]
    return [loss for loss in found if loss is not None]


def estimate(values: Sequence[float]) -> Estimate:
    """Mean over the seeds, with its t interval from two on."""
    if len(values) < 2:
        return Estimate(values[0], None, None, 1)
    return Estimate(*paired_interval(values), len(values))


def not_comparable(results: StudyResults, arm: Arm) -> str | None:
    """Why no number of this arm means anything beside the baseline's: what takes its verdict, and nothing else."""
    return refusal(results, arm)


def _falling(x: Estimate, gain: Callable[[float], float]) -> Estimate:
    """The estimate on another scale, which falls as `x` rises: its ends change places."""
    low, high = (None if end is None else gain(end) for end in (x.high, x.low))
    return Estimate(gain(x.value), low, high, x.n)


def log_loss_gain(ours: Sequence[float], base: Sequence[float]) -> Estimate:
    """Relative gain of the mean losses, in per cent, with the interval of a ratio of means."""
    value = relative_gains(statistics.fmean(ours), statistics.fmean(base))[0]
    bounds = ratio_interval(np.asarray(ours), np.asarray(base)) if len(ours) > 1 else None
    if bounds is None:
        return Estimate(value, None, None, len(ours))
    return Estimate(value, 100 * (1 - bounds[1]), 100 * (1 - bounds[0]), len(ours))


# -------------------------------------------------------------------------------------------------------- bits per byte


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """A loss that tokenizers share: bits for each byte of the text."""
    return nats_per_token / math.log(2) / bytes_per_token


def bytes_per_token(results: StudyResults, split: str = "val") -> float:
    """Bytes of text a token of the split stands for, ends of text counted as tokens without any.

    Read from the manifest of the data that the runs were made on. Raises `BadInput` where it is not at hand, is of
    other data by now, or states no bytes (nanoGPT's files).
    """
    for run in results.runs:
        if run.finished:
            tree, _ = RunFolder(results.folder / "runs" / run.arm / f"seed-{run.seed}").config_json()
            data = tree.get("data")
            if isinstance(data, dict) and (results.folder / "data" / MANIFEST).is_file():  # wherever the study is now
                data = {**data, "path": str(results.folder / "data")}
            return _bytes_per_token(data, split)
    raise BadInput("no run is finished that would say which data it was made on")


def _bytes_per_token(data: object, split: str) -> float:
    path, fingerprint = (data.get(key) for key in ("path", "fingerprint")) if isinstance(data, dict) else (None, None)
    if not isinstance(path, str) or not (Path(path) / MANIFEST).is_file():
        raise BadInput(f"the manifest of the data is not at hand ({path}), which states the bytes of its text")
    manifest = read_manifest(Path(path))
    if manifest.get("fingerprint") != fingerprint:
        raise BadInput(f"{path} holds other data than the runs were made on")
    try:
        counts = manifest["splits"][split]
        return int(counts["bytes"]) / int(counts["tokens"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise BadInput(f"{Path(path) / MANIFEST} states no bytes of the {split} split") from None


def _per_byte(results: StudyResults, difference: Estimate) -> Estimate:
    scale = bits_per_byte(1.0, bytes_per_token(results, results.split))
    low, high = (None if end is None else scale * end for end in (difference.low, difference.high))
    return Estimate(scale * difference.value, low, high, difference.n)


# -------------------------------------------------------------------------------------------------------------- savings


def step_reaching(curve: Curve, target: float) -> float | None:
    """The step at which the curve first is at `target` or below, on a straight line between two evaluations.

    A loss that falls ever more slowly lies below such a line, so it errs against the arm. None when it never is.
    """
    if curve and curve[0][1] <= target:
        return float(curve[0][0])
    for (step, loss), (later, lower) in pairwise(curve):
        if lower <= target:
            return step + (later - step) * (loss - target) / (loss - lower)
    return None


def saved(results: StudyResults, arm: Arm, seeds: Sequence[int]) -> Saved:
    """What the arm saves to the baseline's last validation loss, of the same seed; means over all of `seeds`.

    Before its end a schedule that decays is not a finished one: its rate is still high, and a shorter schedule that had
    come down would be better there. So this understates what an arm saves that is better in the end, and it is no
    statement about shorter trainings; the ladder's full schedules of each length are (`qurve study ladder`).

    Raises `BadInput` when a seed never gets there: a mean over the others would flatter the arm.
    """
    base = results.baseline
    per_step = arm.setting("train.tokens_per_step"), base.setting("train.tokens_per_step")
    if not all(isinstance(tokens, int) for tokens in per_step):
        raise BadInput("the configurations do not say how many tokens a step has")
    steps, tokens, flops, seconds, shares = [], [], [], [], []
    for seed in seeds:
        last, target = base.runs[seed].val[-1]
        step = step_reaching(arm.runs[seed].val, target)
        if step is None:
            raise BadInput(f"seed {seed} never reaches the baseline's last validation loss")
        ours, theirs = step * per_step[0], last * per_step[1]
        steps.append(last - step)
        shares.append(100 * (last - step) / last)
        tokens.append(theirs - ours)
        flops.append(theirs * base.flops_per_token - ours * arm.flops_per_token)
        seconds.append(_seconds(base.runs[seed], theirs) - _seconds(arm.runs[seed], ours))
    return Saved(estimate(steps), estimate(shares), estimate(tokens), estimate(flops), _time(seconds, results))


def _time(seconds: list[float], results: StudyResults) -> Estimate | Unknown:
    if not all(map(math.isfinite, seconds)):
        return Unknown("the runs do not say how long they took")
    if (apart := speeds_apart(results)) > STEADY:
        return Unknown(f"one arm's seeds ran up to {apart:.1f} times apart in speed, so the machine was not quiet")
    return estimate(seconds)


def speeds_apart(results: StudyResults) -> float:
    """How many times as fast as its slowest seed an arm's fastest ran, for the arm where that is most; at least 1."""
    speeds = [[run.tokens_per_s for run in arm.finished if run.tokens_per_s] for arm in results.arms]
    return max((max(found) / min(found) for found in speeds if found), default=1.0)


def _seconds(run: Run, tokens: float) -> float:
    return tokens / run.tokens_per_s if run.tokens_per_s else math.nan


# ------------------------------------------------------------------------------------------------------ equivalent gain


def sized_baselines(results: StudyResults) -> list[Arm]:
    """Arms that are the baseline in another size: width, depth, heads and feed-forward may differ, and the training's
    settings (each size may have been tuned for itself)."""
    shape = {"d_ff", "d_model", "n_layers", "n_heads"}
    model = results.baseline.config.get("model", {})
    return [
        arm
        for arm in results.others
        if arm.non_embedding != results.baseline.non_embedding
        and set(differences(model, arm.config.get("model", {}))) <= shape
    ]


def equivalent_gain(
    results: StudyResults,
    arm: Arm,
    quantity: Literal["params", "flops"],
    sized: Sequence[Arm],
    noise: Collection[str] = (),
) -> Equivalent:
    """How much larger the baseline would have to be for the arm's loss, in non-embedding parameters or training FLOPs.

    Its rate is that of the study's baselines of another size (`sized`), over the seeds that they share with it; where
    two have one size (an MLP at two rates), the better one, which favours the baseline. All train on the same number of
    tokens. Raises `BadInput` as `scaling.equivalent` does, and where no other size is told from the baseline: all of
    them are among `noise`.
    """
    base = results.baseline
    size = {one.name: _size(one, quantity) / _size(base, quantity) for one in results.arms}
    others = [
        other
        for other in sized
        if other.name != arm.name and not other.unfinished and not_comparable(results, other) is None
    ]
    if not others and arm in sized:
        raise BadInput("it is itself the only baseline of another size here, which every other arm is measured by")
    best: dict[float, Arm] = {}
    for other in sorted(others, key=lambda one: one.final_loss or math.inf):
        best.setdefault(size[other.name], other)
    if best and all(other.name in noise for other in best.values()):
        raise BadInput(
            f"{' and '.join(other.label for other in best.values())}, of another size, cannot be told from the "
            "baseline: the rate to convert the gain with is not known; take more seeds, or a larger one"
        )
    seeds = shared_seeds(results, [arm, *best.values()])
    return equivalent(
        final_losses(base, seeds),
        final_losses(arm, seeds),
        {ratio: final_losses(other, seeds) for ratio, other in best.items() if ratio != 1},
        own=size[arm.name],
    )


def _size(arm: Arm, quantity: Literal["params", "flops"]) -> float:
    return arm.non_embedding if quantity == "params" else arm.flops_per_token
