"""Which windows of the data each update and each evaluation takes: functions of configuration, data and step alone."""

from __future__ import annotations

import hashlib
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qurve.data import order
from qurve.data.loader import TokenData, TokenSplit
from qurve.errors import BadInput
from qurve.train.config import RunConfig

Starts = npt.NDArray[np.int64]
Batch = tuple[Tensor, ...]
"""What the loss takes: inputs and targets `[N, T]`, and the prefixes' lengths `[N]` where there are any."""


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
            raise BadInput(
                "eval.splits: the paper's evaluation tables cover train and val, not test; leave it out, or take "
                "data.order=epochs"
            )
        for step in (0, config.train.updates):
            evaluation_windows(config, data, split, step)


def counted(config: RunConfig, starts: Starts, stream: str) -> int:
    """How many targets of the windows count in the loss, together. No data are read."""
    return config.train.objective.counted(len(starts), config.model.context, partial(_draw, stream, starts))


def batch(config: RunConfig, split: TokenSplit, starts: Starts, stream: str) -> Batch:
    """What the loss takes for the windows, on the run's device. `BadInput` for ids beyond the vocabulary.

    `stream` names the objective's random numbers: `training_stream` of the step, or the split that is evaluated.
    """
    inputs, targets = split.windows(starts, config.model.context)
    if (largest := max(inputs.max(), targets.max())) >= config.model.vocab_size:
        raise BadInput(
            f"the {split.name} split holds the id {largest}, and the vocabulary has {config.model.vocab_size}: "
            "the data is damaged; prepare it again"
        )
    prepared = config.train.objective.prepare(inputs, targets, config.model, partial(_draw, stream, starts))
    return tuple(_moved(torch.from_numpy(array), config.train.device) for array in prepared)


def _moved(tensor: Tensor, device: str) -> Tensor:
    """On `device`. To a GPU from pinned memory: from any other a copy first waits for all that the GPU has to do yet,
    and then the GPU for the next launch."""
    return tensor if device == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def training_stream(config: RunConfig, step: int) -> str:
    return f"{config.train.seed} {step}"


def _draw(stream: str, starts: Starts, words: int) -> npt.NDArray[np.uint64]:
    """`uint64[N, words]`, of the stream and each window alone: Philox' raw words, which are the same in every numpy."""
    drawn = np.empty((len(starts), words), dtype=np.uint64)
    for row, start in zip(drawn, starts.tolist(), strict=True):
        key = hashlib.sha256(f"objective {stream} {start}".encode()).digest()[:16]
        row[:] = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(words)
    return drawn
