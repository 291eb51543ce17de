"""Training throughput and memory on the CPU: our linear and nonlinear queries, nanoGPT's model and the authors'.

    python benchmarks/train_cpu.py --peer NANOGPT_CHECKOUT --authors AUTHORS_CHECKOUT [--out FILE]

Each side trains as its own trainer does on a CPU: theirs compiled, in float32, with the optimiser that they configure;
ours compiled, in bf16 where the processor multiplies it, deterministic. Every side has a process of its own, so that no
setting of one reaches another and memory can be told apart; they take turns, in an order that rotates from round to
round, and ratios are taken within a round. So is the processor's matrix peak. Compilation and warm-up come before the
first round. First, each peer's model and ours are given the same weights, and must give the same loss. Prints a table,
then one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch
from measuring import command, machine, ratios
from torch import Tensor

from qurve.files import write_atomic
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.projections import Bottleneck, Linear
from qurve.train.config import RunConfig, TrainConfig
from qurve.train.optim import build_optimizer
from qurve.train.runtime import autocast, available_cores, compiler, machine_settings, resolve_precision

Step = Callable[[], float]
Batch = tuple[Tensor, Tensor]

SHAPE = {"layers": 6, "width": 384, "heads": 6, "context": 256, "batch": 8, "vocab": 50304}

FIRST_LOSSES = 0.2
"""Nats by which the first losses of models with weights of their own may differ."""
PAIRS = {
    "ratio_nonlinear_to_linear": ("nonlinear", "linear"),
    "ratio_to_nanogpt": ("linear", "nanogpt"),
    "ratio_nonlinear_to_nanogpt": ("nonlinear", "nanogpt"),
    "ratio_nonlinear_to_authors": ("nonlinear", "authors"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="checkout of nanoGPT")
    parser.add_argument("--authors", type=Path, help="checkout of the paper's authors; its nonlinear query is trained")
    add_shape(parser)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="steps of each side in a round")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--out", type=Path, help="write the JSON there, too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    if not options.eager and compiler() is None:
        raise SystemExit("no C++ compiler is found, so nothing can be compiled; install one, or add --eager")

    config, batch = shape_of(options), batch_of(options)
    names = ["linear", "nonlinear"]
    checked = {}
    for name, checkout in (("nanogpt", options.peer), ("authors", options.authors)):
        if checkout:
            names.append(name)
            checked[name] = peers.same_loss(peers.load(checkout, name), peer_config(name, config), batch)
    with contextlib.ExitStack() as ending:
        workers = {name: ending.enter_context(started(name)) for name in names}
        warm = {name: tell(worker, "warm") for name, worker in workers.items()}
        losses = {name: [answer["loss"]] for name, answer in warm.items()}
        torch.set_num_threads(options.threads)
        found: dict[str, list[float]] = {name: [] for name in [*names, "matrix_peak"]}
        for turn in range(options.rounds):
            at = turn % len(names)
            for name in names[at:] + names[:at]:
                answer = tell(workers[name], "steps")
                found[name].append(answer["tokens_per_s"])
                losses[name].append(answer["loss"])
            found["matrix_peak"].append(matrix_peak(options.width))
        memory = {name: tell(worker, "memory")["bytes"] for name, worker in workers.items()}

    check_losses(losses)
    compared = {key: ratios(found[a], found[b]) for key, (a, b) in PAIRS.items() if a in names and b in names}
    work_per_token = flops_per_token(config)
    shares = {
        f"share_of_peak_{name}": [work_per_token * share for share in ratios(found[name], found["matrix_peak"])]
        for name in ("linear", "nonlinear")
    }
    report = {
        "benchmark": "train_cpu",
        "command": command(options.peer, options.authors),
        **{key: statistics.median(values) for key, values in (compared | shares).items()},
        "tokens_per_s": {name: statistics.median(found[name]) for name in names},
        "peak_memory_bytes": memory,
        **{f"memory_ratio_to_{peer}": memory["linear"] / memory[peer] for peer in checked},
        "matrix_peak_flops": statistics.median(found["matrix_peak"]),
        "flops_per_token": work_per_token,
        "rounds": found | compared | shares,
        "compile_seconds": {name: first["seconds"] for name, first in warm.items()},
        "loss_difference": checked,
        "losses": losses,
        "shape": {name: getattr(options, name) for name in (*SHAPE, "steps", "threads", "eager")}
        | {"precision": resolve_precision("auto", "cpu")},
        **machine("cpu"),
    }
    for name in names:
        first = f"first step {warm[name]['seconds']:5.1f} s   peak memory {memory[name] / 1e9:5.2f} GB"
        print(f"{name:>28}  {in_words(found[name], '9,.0f')} tokens/s   {first}")
    for name, values in (compared | shares).items():
        print(f"{name:>28}  {in_words(values, '9.3f')}")
    print(json.dumps(report))
    if options.out:
        write_atomic(options.out, json.dumps(report, indent=1) + "\n")


def check_losses(losses: dict[str, list[float]]) -> None:
    """Raise `SystemExit` unless the steps that were timed, bf16 and compiled as they were, began alike and learned."""
    first = [values[0] for values in losses.values()]
    if not max(first) - min(first) < FIRST_LOSSES:
        raise SystemExit(f"the sides do not begin alike: {losses}")
    for name, values in losses.items():
        if not values[-1] < values[0]:
            raise SystemExit(f"{name} does not learn: its loss went from {values[0]:.3f} to {values[-1]:.3f}")


# --------------------------------------------------------------------------------------------- a process for each side


@contextlib.contextmanager
def started(name: str) -> Any:
    """This script as the worker of one side, asked line by line."""
    process = subprocess.Popen(
        [sys.executable, *sys.argv, "--worker", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def tell(worker: subprocess.Popen[str], word: str) -> Any:
    """What the worker answers to one word. `SystemExit` when it is gone; what it had to say stands above."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(word + "\n")
    worker.stdin.flush()
    if not (line := worker.stdout.readline()):
        raise SystemExit(f"a side ended at {word!r}")
    return json.loads(line)


def work(options: argparse.Namespace) -> None:
    """Answer `warm`, `steps` and `memory` for one side, until nobody asks any more."""
    config, batch, name = shape_of(options), batch_of(options), options.worker
    training = TrainConfig(device="cpu", precision=resolve_precision("auto", "cpu"), threads=options.threads)
    ours = name in ("linear", "nonlinear")
    torch.set_num_threads(options.threads)
    with machine_settings(RunConfig(config, train=training)) if ours else contextlib.nullcontext():
        if ours:
            query = Linear() if name == "linear" else Bottleneck()
            step = our_step(dataclasses.replace(config, query=query), training, batch, options.eager)
        else:
            checkout = options.peer if name == "nanogpt" else options.authors
            step = their_step(peers.load(checkout, name), peer_config(name, config), batch, options.eager)
        for word in map(str.strip, sys.stdin):
            began = time.perf_counter()
            if word == "memory":
                answer = {"bytes": peak_memory()}
            elif word == "warm":
                loss = step()
                answer = {"seconds": time.perf_counter() - began, "loss": loss}
                step()
                forget_peak_memory()
            else:
                for _ in range(options.steps):
                    loss = step()
                speed = options.steps * batch[0].numel() / (time.perf_counter() - began)
                answer = {"tokens_per_s": speed, "loss": loss}
            print(json.dumps(answer), flush=True)


def forget_peak_memory() -> None:
    """So that what compiling took does not count."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Bytes resident at most, since the last call of `forget_peak_memory`."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


# ------------------------------------------------------------------------------------------------------------ the sides


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Flags for `shape_of` and `batch_of`."""
    for name, default in SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=default)


def shape_of(options: argparse.Namespace) -> ModelConfig:
    return ModelConfig(
        n_layers=options.layers,
        d_model=options.width,
        n_heads=options.heads,
        d_ff=4 * options.width,
        context=options.context,
        vocab_size=options.vocab,
    )


def peer_config(name: str, config: ModelConfig) -> ModelConfig:
    return config if name == "nanogpt" else dataclasses.replace(config, query=Bottleneck())


def batch_of(options: argparse.Namespace) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, min(options.vocab, 50257), (options.batch, options.context + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def our_step(model_config: ModelConfig, training: TrainConfig, batch: Batch, eager: bool) -> Step:
    model = GPT(model_config)
    optimizer = build_optimizer(model, training)
    loss_of = model.loss if eager else torch.compile(model.loss, dynamic=False)
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


def their_step(peer: peers.Peer, config: ModelConfig, batch: Batch, eager: bool) -> Step:
    model = peers.build(peer, config)
    optimizer = peers.optimizer(model, "cpu")
    forward = model if eager else torch.compile(model)

    def step() -> float:
        _, loss = forward(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return step


# -------------------------------------------------------------------------------------------------------- the processor


def matrix_peak(width: int, rows: int = 2048, seconds: float = 0.5) -> float:
    """The most FLOP/s of a product of the model's shapes or a square one, in the compute dtype."""
    dtype = torch.bfloat16 if resolve_precision("auto", "cpu") == "bf16" else torch.float32
    best = 0.0
    shapes = [(rows, width, 3 * width), (rows, width, 4 * width), (1024, 1024, 1024), (2048, 2048, 2048)]
    for n, inner, outputs in shapes:
        x, weight = torch.randn(n, inner).to(dtype), torch.randn(outputs, inner).to(dtype)
        end = time.perf_counter() + seconds / len(shapes)
        while (began := time.perf_counter()) < end:
            torch.nn.functional.linear(x, weight)
            best = max(best, 2 * n * inner * outputs / (time.perf_counter() - began))
    return best


def flops_per_token(config: ModelConfig) -> float:
    """`6 N + 12 L D T`, N without the position embedding: what is counted for a share of the peak."""
    model = GPT(config)
    count = sum(p.numel() for name, p in model.named_parameters() if "position" not in name)
    return 6 * count + 12 * config.n_layers * config.d_model * config.context


def in_words(values: list[float], form: str) -> str:
    return f"median {statistics.median(values):{form}}   min {min(values):{form}}   max {max(values):{form}}"


if __name__ == "__main__":
    main()
