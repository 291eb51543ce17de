"""The control that takes as long as an arm: the baseline with a wider feed-forward, by the time of steps measured here.

    wide, how_near = match_time(arm.model, baseline)       # a model and a RunConfig

Parameters and FLOPs are solved for (`qurve.accounting.match`); time cannot be. What is found holds for this machine, as
busy as it is, and comes out a little differently each time: measure once, and write the width down.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from qurve.errors import BadInput
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.projections.module import set_impl
from qurve.train.config import RunConfig
from qurve.train.distributed import ALONE, gradient_norm, spread
from qurve.train.optim import build_optimizer
from qurve.train.runtime import (
    autocast,
    available_cores,
    check_heads,
    compiler,
    describe,
    machine_settings,
    modest_micro_batch,
    resolve_device,
    resolve_precision,
)

ARM = 0
"""In the place of a width: no feed-forward is so narrow."""
ROUNDS = 15
"""In each, every model makes one step; who begins rotates. Ratios are taken within a round."""
WIDER = 1.5
"""How much wider than the baseline's the second width is that the time's slope is taken from."""
TRIES = 4
"""Widths that are measured after those two."""
TOLERANCE = 0.02
"""Relative, of the median: nothing farther off is called matched. Time is not known better than that."""


@dataclass(frozen=True)
class TimeMatch:
    """How near a control's step comes to an arm's. `str()` says it in a sentence."""

    ratio: float
    """The control's step time over the arm's: median over the rounds, and its quartiles."""
    low: float
    high: float
    seconds: float
    """The arm's step, median."""
    rounds: int
    d_ff: tuple[int, int]
    """The feed-forward's width before and after."""
    machine: str

    def __str__(self) -> str:
        before, after = self.d_ff
        return (
            f"a step takes {self.ratio:.3f} times the arm's {1e3 * self.seconds:.3g} ms (quartiles {self.low:.3f} to "
            f"{self.high:.3f}, {self.rounds} steps of each in turn on {self.machine}), by d_ff {after:,} in place of "
            f"{before:,}"
        )


def match_time(arm: ModelConfig, baseline: RunConfig, *, rounds: int = ROUNDS) -> tuple[ModelConfig, TimeMatch]:
    """The baseline's model with the `d_ff` whose step takes as long as the arm's, both trained as `baseline` says.

    Whole steps of random tokens: forward, backward, clipping, optimiser; compiled where `baseline` says so. Raises
    `BadInput` where no width that was tried comes within 2 %, or the time does not grow with the width (steps that are
    too short, a machine that is too busy).
    """
    before = baseline.model.d_ff
    tried = _beside(arm, baseline, (before, round(WIDER * before)), rounds)
    for _ in range(TRIES):
        width = _next(tried, before)
        tried |= _beside(arm, baseline, (width,), rounds)
        if abs(tried[width].ratio - 1) <= TOLERANCE:
            return dataclasses.replace(baseline.model, d_ff=width), tried[width]
    nearest = min(tried.values(), key=lambda one: abs(one.ratio - 1))
    raise BadInput(
        f"no model.d_ff was found whose step takes as long within {100 * TOLERANCE:g} %; the nearest: {nearest}. "
        "Measure on a quiet machine, or more rounds"
    )


def _beside(arm: ModelConfig, baseline: RunConfig, widths: Sequence[int], rounds: int) -> dict[int, TimeMatch]:
    """The baseline at these widths, measured in turn with the arm."""
    controls = {width: dataclasses.replace(baseline.model, d_ff=width) for width in widths}
    seconds = take_turns({ARM: arm, **controls}, baseline, rounds)
    found = {}
    for width in widths:
        ratios = [own / of_arm for own, of_arm in zip(seconds[width], seconds[ARM], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else 3 * ratios
        places = (baseline.model.d_ff, width)
        found[width] = TimeMatch(middle, low, high, statistics.median(seconds[ARM]), rounds, places, _machine(baseline))
    return found


def _next(tried: Mapping[int, TimeMatch], before: int) -> int:
    """From the width that comes nearest, along the slope of all of them, to where the arm's time is."""
    slope = statistics.linear_regression(list(tried), [one.ratio for one in tried.values()]).slope
    if slope <= 0:
        raise BadInput(
            f"a step does not take longer with a wider feed-forward here ({before:,} to {max(tried):,}): it is too "
            "short, or the machine too busy, to match by time"
        )
    nearest = min(tried, key=lambda width: abs(tried[width].ratio - 1))
    width = nearest + round((1 - tried[nearest].ratio) / slope)
    if width < 1:
        raise BadInput("the baseline takes longer than the arm with hardly any d_ff; take a smaller baseline")
    return width


# ----------------------------------------------------------------------------------------------------------- measuring


def take_turns(models: Mapping[int, ModelConfig], config: RunConfig, rounds: int) -> dict[int, list[float]]:
    """Seconds of a training step of each model, round by round, after two that do not count; all trained as `config`
    says."""
    config = _resolved(config)
    names, seconds = list(models), dict[int, list[float]]()
    with machine_settings(config):
        steps = {name: _step(model, config) for name, model in models.items()}
        for name in names:
            steps[name](), steps[name]()
            seconds[name] = []
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds[name].append(steps[name]())
    return seconds


def _step(model_config: ModelConfig, config: RunConfig) -> Callable[[], float]:
    """A training step on random tokens, which returns the seconds that it took."""
    train, size = config.train, config.train.micro_batch or 1
    model = GPT(model_config, seed=train.seed).to(train.device)
    set_impl(model, train.head_impl)
    loss_of: Callable[..., torch.Tensor] = spread(model, train, ALONE)
    optimizer = build_optimizer(model, train)
    if train.compile:
        loss_of = torch.compile(loss_of, dynamic=False)
    draw = np.random.default_rng(0)
    ids_NT = draw.integers(0, model_config.vocab_size - 1, (size, model_config.context + 1))
    prepared = train.objective.prepare(
        ids_NT[:, :-1].copy(),
        ids_NT[:, 1:].copy(),
        model_config,
        lambda words: draw.integers(0, 2**63, (size, words), dtype=np.uint64),
    )
    given, parts = [torch.from_numpy(array).to(train.device) for array in prepared], config.sequences // size

    def step() -> float:
        _synchronise(train.device)
        began = time.perf_counter()
        for _ in range(parts):
            with autocast(config):
                loss = loss_of(*given) / parts
            torch.autograd.backward(loss)
        norm = gradient_norm(model)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), train.grad_clip or math.inf, norm)
        optimizer.step()
        optimizer.zero_grad()
        _synchronise(train.device)
        return time.perf_counter() - began

    return step


def _synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _resolved(config: RunConfig) -> RunConfig:
    """What a run of `config` alone would have here, without its data."""
    train, device = config.train, resolve_device(config.train.device)
    kind = device.partition(":")[0]
    check_heads(config, kind)
    train = dataclasses.replace(
        train,
        device=device,
        precision=resolve_precision(train.precision, kind),
        compile=train.compile and (kind == "cuda" or compiler() is not None),
        threads=train.threads or available_cores(),
        micro_batch=train.micro_batch or modest_micro_batch(config, kind, config.sequences),
    )
    return dataclasses.replace(config, train=train)


def _machine(config: RunConfig) -> str:
    found = describe(_resolved(config))
    if found["gpu"]:
        return str(found["gpu"])
    return f"{found['cpu']}, {found['threads']} thread{'' if found['threads'] == 1 else 's'}"
