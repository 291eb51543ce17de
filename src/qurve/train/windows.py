"""Which windows of the data each update and each evaluation takes: functions of configuration, data and step alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qurve.data import order
from qurve.data.loader import TokenData, TokenSplit
from qurve.errors import BadInput
from qurve.train.config import RunConfig

Starts = npt.NDArray[np.int64]


def training_windows(config: RunConfig, data: TokenData, update: int) -> tuple[Starts, list[Starts]]:
    """Window starts of update `update` (from 0), `[sequences]`, and the same cut into micro-batches."""
    n_tokens, context, sequences = len(data.split("train")), config.model.context, config.sequences
    seed = config.train.seed if config.data.order_seed is None else config.data.order_seed
    if config.data.order == "paper":
        starts = order.paper_windows(n_tokens, update, context=context, sequences=sequences, seed=seed)
    else:
        starts = order.epoch_windows(n_tokens, update, context=context, sequences=sequences, seed=seed)
    return starts, np.split(starts, sequences // (config.train.micro_batch or sequences))


def evaluation_windows(config: RunConfig, data: TokenData, split: str, step: int) -> Starts:
    """Window starts of the evaluation after `step`: the same for every arm and seed."""
    context, count = config.model.context, config.eval.windows
    if config.data.order == "paper":
        sizes = len(data.split("train")), len(data.split("val"))
        return order.paper_eval_windows(*sizes, step // config.eval.every, split, context=context)[:count]
    return order.fixed_eval_windows(len(data.split(split)), context=context, count=count)


def check_windows(config: RunConfig, data: TokenData) -> None:
    """Raise `BadInput` now, not hours later, when some step or evaluation would have no windows."""
    for update in (0, config.train.updates - 1):
        training_windows(config, data, update)
    for split in config.eval.splits:
        if config.data.order == "paper" and split == "test":
            raise BadInput("eval.splits: the paper's evaluation tables cover train and val, not test")
        for step in (0, config.train.updates):
            evaluation_windows(config, data, split, step)


def batch(config: RunConfig, split: TokenSplit, starts: Starts) -> tuple[Tensor, Tensor]:
    """Inputs and targets `[N, T]` of the windows, on the run's device. `BadInput` for ids beyond the vocabulary."""
    inputs, targets = split.windows(starts, config.model.context)
    if (largest := max(inputs.max(), targets.max())) >= config.model.vocab_size:
        raise BadInput(
            f"the {split.name} split holds the id {largest}, and the vocabulary has {config.model.vocab_size}: "
            "the data is damaged; prepare it again"
        )
    return torch.from_numpy(inputs).to(config.train.device), torch.from_numpy(targets).to(config.train.device)
