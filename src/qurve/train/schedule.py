"""The learning rate as a pure function of the update's index."""

from __future__ import annotations

import math

from qurve.train.config import TrainConfig


def learning_rate(config: TrainConfig, update: int) -> float:
    """Rate of update `update` (from 0): linear warm-up, then the schedule, then its floor."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    horizon = config.last_step
    if update >= horizon:
        return config.min_lr
    if config.schedule == "cosine":
        begin, shape = config.warmup_steps, _half_cosine
    else:
        decay = max(1, horizon // 5) if config.decay_steps is None else config.decay_steps
        begin, shape = max(config.warmup_steps, horizon - decay), _line
    progress = max(0.0, (update - begin) / (horizon - begin))
    rate = config.min_lr + shape(progress) * (config.lr - config.min_lr)
    return min(config.lr, rate)  # the sum's last bit can lie above the peak


def _half_cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def _line(progress: float) -> float:
    return 1 - progress
