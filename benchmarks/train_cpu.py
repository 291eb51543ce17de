"""Training throughput on the CPU: our linear and nonlinear queries, and nanoGPT's model, in one process.

    python benchmarks/train_cpu.py --peer PATH_TO_A_NANOGPT_CHECKOUT

Each side trains as its own trainer does on a CPU: nanoGPT compiled, in float32, with the optimiser that it configures;
ours compiled, in bf16 where the processor multiplies it, deterministic. The sides take turns, in an order that rotates
from round to round; the ratios are taken within a round. Compilation and warm-up come before the first round. First the
two models are given the same weights, and must give the same loss. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import nanogpt
import torch
from torch import Tensor

from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.projections import Bottleneck, Linear
from qurve.train.config import RunConfig, TrainConfig
from qurve.train.optim import build_optimizer
from qurve.train.runtime import autocast, available_cores, compiler, machine_settings, resolve_precision

Step = Callable[[], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="checkout of nanoGPT; without it only our own two are compared")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="steps of each side in a round")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    options = parser.parse_args()
    if not options.eager and compiler() is None:
        raise SystemExit("no C++ compiler is found, so nothing can be compiled; install one, or add --eager")

    model = ModelConfig(
        n_layers=options.layers,
        d_model=options.width,
        n_heads=options.heads,
        d_ff=4 * options.width,
        context=options.context,
        vocab_size=options.vocab,
    )
    training = TrainConfig(device="cpu", precision=resolve_precision("auto", "cpu"), threads=options.threads)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, min(options.vocab, 50257), (options.batch, options.context + 1), generator=generator)
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    peer = nanogpt.load(options.peer) if options.peer else None
    checked = nanogpt.same_loss(peer, model, batch) if peer else None
    with machine_settings(RunConfig(model, train=training)):
        sides = {
            "linear": _ours(dataclasses.replace(model, query=Linear()), training, batch, options.eager),
            "nonlinear": _ours(dataclasses.replace(model, query=Bottleneck()), training, batch, options.eager),
        }
        if peer:
            sides["nanogpt"] = _theirs(peer, model, batch, options.eager)
        compile_seconds = {name: _warm(step) for name, step in sides.items()}
        speeds = _race(sides, options.rounds, options.steps, batch[0].numel())

    def ratio(a: str, b: str) -> list[float]:
        return [x / y for x, y in zip(speeds[a], speeds[b], strict=True)]

    ratios = {"ratio_nonlinear_to_linear": ratio("nonlinear", "linear")}
    if peer:
        ratios["ratio_to_nanogpt"] = ratio("linear", "nanogpt")
        ratios["ratio_nonlinear_to_nanogpt"] = ratio("nonlinear", "nanogpt")
    for name, values in speeds.items():
        print(f"{name:>28}  {_spread(values, '9,.0f')} tokens/s   first step {compile_seconds[name]:5.1f} s")
    for name, values in ratios.items():
        print(f"{name:>28}  {_spread(values, '9.3f')}")
    shape = vars(options) | {"peer": options.peer is not None, "precision": training.precision}
    print(
        json.dumps(
            {
                "benchmark": "train_cpu",
                **{name: statistics.median(values) for name, values in ratios.items()},
                "tokens_per_s": {name: statistics.median(values) for name, values in speeds.items()},
                "rounds": {**speeds, **ratios},
                "compile_seconds": compile_seconds,
                "loss_difference": checked,
                "shape": shape,
                "torch": torch.__version__,
            }
        )
    )


def _race(sides: dict[str, Step], rounds: int, steps: int, tokens: int) -> dict[str, list[float]]:
    """Tokens/s of every side in every round; who goes first rotates."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            started = time.perf_counter()
            for _ in range(steps):
                sides[name]()
            speeds[name].append(steps * tokens / (time.perf_counter() - started))
    return speeds


def _warm(step: Step) -> float:
    started = time.perf_counter()
    step()
    first = time.perf_counter() - started
    step()
    return first


def _ours(model_config: ModelConfig, training: TrainConfig, batch: tuple[Tensor, Tensor], eager: bool) -> Step:
    model = GPT(model_config)
    optimizer = build_optimizer(model, training)
    loss_of = model.loss if eager else torch.compile(model.loss)
    config = RunConfig(model_config, train=training)

    def step() -> float:
        with autocast(config):
            loss = loss_of(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _theirs(peer: ModuleType, config: ModelConfig, batch: tuple[Tensor, Tensor], eager: bool) -> Step:
    model = nanogpt.build(peer, config)
    optimizer = nanogpt.optimizer(model, "cpu")
    forward = model if eager else torch.compile(model)

    def step() -> float:
        _, loss = forward(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def _spread(values: list[float], form: str) -> str:
    return f"median {statistics.median(values):{form}}   min {min(values):{form}}   max {max(values):{form}}"


if __name__ == "__main__":
    main()
