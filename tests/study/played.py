"""Searches played through without a training: each trial's loss is taken from a function."""

from __future__ import annotations

import math
from collections.abc import Callable

from qurve.study.axes import Range
from qurve.study.search import Score, Search, Trial, trials
from qurve.train.config import RunConfig
from tiny import tiny

ALIKE = ("train.steps=90", "train.min_lr=0")
CONFIGS = {"baseline": tiny(*ALIKE), "wide": tiny("model.d_ff=96", *ALIKE)}
RATES = {"train.lr": (1e-3, 2e-3, 4e-3)}
DRAWN = {"train.lr": Range(1e-4, 1e-1), "train.weight_decay": Range(0, 0.2, log=False)}
Loss = Callable[[Trial], float | None]


def played(search: Search, loss: Loss, configs: dict[str, RunConfig] = CONFIGS) -> list[Score]:
    """The whole search, each trial's loss taken from a function; every round asks for something new."""
    scores: list[Score] = []
    while wanted := trials(search, configs, scores):
        assert not {score.trial for score in scores} & set(wanted)
        found = [(trial, loss(trial)) for trial in wanted]
        scores += [Score(trial, value, "diverged" if value is None else "finished") for trial, value in found]
    return scores


def best_at(**rates: float) -> Loss:
    """Losses that are lowest at an arm's own rate."""
    return lambda trial: 3 + abs(math.log(dict(trial.point)["train.lr"] / rates[trial.arm]))  # type: ignore[operator]
