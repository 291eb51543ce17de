"""Does the cost of a training step grow as its work grows? Tokens/s against sequence length, batch, width and depth.

    python benchmarks/scaling_cpu.py --axis T --out results/scaling-cpu.json [--compiled]

One size is varied at a time around L6 D384 T256 B8 (heads of 64, hidden width 4 D), with the paper's query and a small
vocabulary, so that the blocks are what is measured. A step is what the trainer makes of one micro-batch: loss,
backward, clipping, AdamW. Each point takes turns with the base point, who goes first alternates, and times are taken in
units of the base's within a round, so that a machine that slows down meanwhile does not show. FLOPs are those of
`qurve.accounting`, with attention unmasked.

For each axis: the exponent of seconds against FLOPs (least squares over logarithms), and the largest step between
neighbours, the factor in seconds over the factor in FLOPs: a cliff would show as one far above 1. Prints a table, then
one JSON line; with --out the file grows point by point, and a run that was cut goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import Results, machine, ratios, spread, take_turns

from qurve.accounting import count
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.projections import Bottleneck
from qurve.train.config import RunConfig, TrainConfig
from qurve.train.optim import build_optimizer
from qurve.train.runtime import autocast, available_cores, compiler, machine_settings, resolve_precision

HEAD_WIDTH = 64


@dataclasses.dataclass(frozen=True)
class Point:
    L: int = 6
    D: int = 384
    T: int = 256
    B: int = 8

    def model(self, vocab: int) -> ModelConfig:
        return ModelConfig(
            n_layers=self.L,
            d_model=self.D,
            n_heads=self.D // HEAD_WIDTH,
            d_ff=4 * self.D,
            context=self.T,
            vocab_size=vocab,
            query=Bottleneck(),
        )

    def flops(self, vocab: int) -> int:
        """Of a step."""
        return self.B * self.T * count(self.model(vocab)).flops_per_token


BASE = Point()
AXES = {
    "T": (64, 128, 256, 512, 1024),
    "B": (1, 2, 4, 8, 16, 32),
    "D": (128, 192, 256, 384, 512, 768),
    "L": (1, 2, 4, 6, 8, 12),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", nargs="*", choices=AXES, default=list(AXES))
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--compiled", action="store_true", help="with torch.compile, half a minute a point")
    parser.add_argument("--out", type=Path, help="the JSON file that the points are added to")
    options = parser.parse_args()
    if options.compiled and compiler() is None:
        raise SystemExit("no C++ compiler is found, so nothing can be compiled; install one, or leave out --compiled")

    training = TrainConfig(device="cpu", precision=resolve_precision("auto", "cpu"), threads=options.threads)
    head = {"benchmark": "scaling_cpu", "command": "python benchmarks/scaling_cpu.py"}
    head |= {"base": dataclasses.asdict(BASE), "vocab": options.vocab, "rounds": options.rounds}
    head |= {"precision": training.precision, "threads": options.threads, "machine": machine("cpu")}
    results = Results(options.out, head)
    how = "compiled" if options.compiled else "eager"
    torch._dynamo.config.recompile_limit = 64  # all points share one function, and each is compiled for its own shape
    with machine_settings(RunConfig(train=training)):
        base = step(BASE, options.vocab, training, options.compiled)
        warm(base)
        for axis in options.axis:
            print(f"{axis:>5}     tokens/s       ms    times the base's: seconds   FLOPs")
            for size in AXES[axis]:
                key = {"axis": axis, "size": size, "how": how}
                row = results.find(**key) or results.add(key | measure(axis, size, base, options, training))
                print(
                    f"{size:5}  {row['tokens_per_s']['median']:11,.0f}  {row['ms']['median']:7,.0f}"
                    f"  {row['seconds_of_base']['median']:26.3f}  {row['flops'] / BASE.flops(options.vocab):6.3f}",
                    flush=True,
                )
            found = summarise([row for row in results.rows if (row["axis"], row["how"]) == (axis, how)])
            results.conclude(f"{axis} {how}", found)
            print(f"       seconds grow as FLOPs to the power of {found['exponent']:.3f}; the largest step is")
            print(f"       {found['largest_step']:.3f} times what FLOPs say, from {axis} = {found['step_at']}")
    results.print_line()


def measure(
    axis: str, size: int, base: Callable[[], float], options: argparse.Namespace, training: TrainConfig
) -> dict[str, Any]:
    point = dataclasses.replace(BASE, **{axis: size})
    own = step(point, options.vocab, training, options.compiled)
    first = warm(own)
    seconds = take_turns({"own": own, "base": base}, options.rounds)
    return {
        "tokens_per_s": spread([point.B * point.T / s for s in seconds["own"]]),
        "ms": spread([1e3 * s for s in seconds["own"]]),
        "seconds_of_base": spread(ratios(seconds["own"], seconds["base"])),
        "flops": point.flops(options.vocab),
        "first_step_s": round(first, 2),
    }


def step(point: Point, vocab: int, training: TrainConfig, compiled: bool) -> Callable[[], float]:
    """A step of training at this point; it returns its seconds."""
    config = RunConfig(point.model(vocab), train=training)
    model = GPT(config.model)
    optimizer = build_optimizer(model, training)
    loss_of = torch.compile(model.loss, dynamic=False) if compiled else model.loss
    ids = torch.randint(0, vocab, (point.B, point.T + 1), generator=torch.Generator().manual_seed(0))
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def made() -> float:
        began = time.perf_counter()
        with autocast(config):
            loss = loss_of(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        return time.perf_counter() - began

    return made


def warm(made: Callable[[], float]) -> float:
    """Two steps, before any is timed; seconds of the first, compilation included."""
    first = made()
    made()
    return first


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The exponent over an axis, and its largest step between neighbours, in seconds over that in FLOPs."""
    rows = sorted(rows, key=lambda row: row["size"])
    seconds = [row["seconds_of_base"]["median"] for row in rows]
    flops = [row["flops"] for row in rows]
    exponent = np.polyfit([math.log(f) for f in flops], [math.log(s) for s in seconds], 1)[0]
    steps = [(s1 / s0) / (f1 / f0) for (s0, s1), (f0, f1) in zip(pairwise(seconds), pairwise(flops), strict=True)]
    at = max(range(len(steps)), key=steps.__getitem__)
    between = f"{rows[at]['size']} to {rows[at + 1]['size']}"
    return {"exponent": round(float(exponent), 4), "largest_step": round(steps[at], 4), "step_at": between}


if __name__ == "__main__":
    main()
