"""The price of each choice of the nonlinear query: forward, backward and decoding, beside the linear query.

    python benchmarks/prices.py --width 768 --tokens 1024 --batch 2 --precision bf16 --out results/prices-cpu.json

What is timed is a block's queries, keys and values together, as `project` makes them: one matrix product over all
stems, then the heads. Decoding is one token of one sequence, the stems stacked and their gains folded beforehand.
bf16 is autocast over float32 weights in training, and bf16 weights in decoding. Each choice takes turns with the linear
query, who goes first alternates, and ratios are taken within a round; compilation and warm-up come before.

Before it is timed, each choice is held against its plain forward in float64: outputs and every gradient of the fused
path, eager or compiled, may be off by twice what the plain path is in the same precision. Prints a table, then one JSON
line; with --out the file grows row by row, and a run that was cut goes on.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import Results, machine, ratios, spread, take_turns
from torch import Tensor, nn

from qurve.projections import Bottleneck, Linear, ProjectionConfig
from qurve.projections.module import project
from qurve.train.config import RunConfig, TrainConfig
from qurve.train.runtime import available_cores, compiler, machine_settings

Outputs = Callable[[Tensor], list[Tensor]]
Make = Callable[[Outputs], Outputs]
"""`torch.compile`, or nothing."""

PARTS = ("forward", "backward", "decode")
DECODE_CALLS = 50
FLOOR = {"float32": 1e-6, "bf16": 1e-3}
"""Errors below this share of the norm are rounding, whatever the plain path's own."""


def choices(width: int) -> dict[str, ProjectionConfig]:
    """One change at a time from the paper's layer."""
    return {
        "the paper's": Bottleneck(),
        "relu": Bottleneck(activation="relu"),
        "relu2": Bottleneck(activation="relu2"),
        "silu": Bottleneck(activation="silu"),
        "no activation": Bottleneck(activation="identity"),
        "no pre-norm": Bottleneck(pre_norm="none"),
        "no post-norm": Bottleneck(post_norm="none"),
        "no norms": Bottleneck(pre_norm="none", post_norm="none"),
        "layernorm before": Bottleneck(pre_norm="layernorm"),
        "rmsnorm after": Bottleneck(post_norm="rmsnorm"),
        "norms around all": Bottleneck(norm_stage="separate"),
        "R = D/8": Bottleneck(width=width // 8),
        "R = D/4": Bottleneck(width=width // 4),
        "R = D": Bottleneck(width=width),
        "linear anchor": Bottleneck(anchor="linear"),
        "no anchor": Bottleneck(anchor="none"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of one sequence")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--precision", choices=list(FLOOR), default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--out", type=Path, help="the JSON file that the rows are added to")
    options = parser.parse_args()
    if not options.eager and compiler() is None:
        raise SystemExit("no C++ compiler is found, so nothing can be compiled; install one, or add --eager")

    head = {"benchmark": "prices", "command": "python benchmarks/prices.py", "rounds": options.rounds}
    results = Results(options.out, head | {"threads": options.threads, "machine": machine("cpu")})
    shape = {name: getattr(options, name) for name in ("width", "tokens", "batch", "precision")}
    print(f"{'as many times the linear query':>45}: {'  '.join(f'{part:>8}' for part in PARTS)}")
    with machine_settings(RunConfig(train=TrainConfig(device="cpu", threads=options.threads))):
        for name, kind in choices(options.width).items():
            for how in ("eager",) if options.eager else ("eager", "compiled"):
                key = {"choice": name, "how": how, **shape}
                row = results.find(**key) or results.add(key | price(kind, options, compiled=how == "compiled"))
                found = [row["ratio"][part] for part in PARTS]
                medians = "  ".join(f"{part['median']:8.3f}" for part in found)
                quartiles = "  ".join(f"{part['low']:.3f} to {part['high']:.3f}" for part in found)
                print(f"{name:>30}  {how:>12}   {medians}   quartiles {quartiles}", flush=True)
    results.print_line()


def price(kind: ProjectionConfig, options: argparse.Namespace, *, compiled: bool) -> dict[str, Any]:
    """A row: milliseconds of both sides, and the ratios within a round."""
    torch.compiler.reset()  # what is compiled is limited by the function, and all choices share their functions
    torch.manual_seed(0)
    x_BTD = torch.randn(options.batch, options.tokens, options.width)
    make: Make = partial(torch.compile, dynamic=False) if compiled else lambda outputs: outputs
    blocks = {
        name: nn.ModuleList(k.build(options.width, options.width) for k in (query, Linear(), Linear()))
        for name, query in (("linear", Linear()), ("nonlinear", kind))
    }
    sides = {name: training(block, x_BTD, options.precision, make) for name, block in blocks.items()}
    steps = {name: decoding(block, x_BTD[:1, :1], options.precision, make) for name, block in blocks.items()}
    began = time.perf_counter()
    for first in (*sides.values(), *steps.values()):
        first()
    first_calls = time.perf_counter() - began
    errors = check(blocks["nonlinear"], x_BTD, options.precision, make)

    take_turns(sides, 2)  # warms up
    trained, decoded = take_turns(sides, options.rounds), take_turns(steps, options.rounds)
    seconds = {
        name: dict(zip(PARTS, (*zip(*trained[name], strict=True), decoded[name]), strict=True)) for name in blocks
    }
    return {
        "ms": {n: {part: spread([1e3 * s for s in parts[part]]) for part in PARTS} for n, parts in seconds.items()},
        "ratio": {p: spread(ratios(seconds["nonlinear"][p], seconds["linear"][p])) for p in PARTS},
        "first_calls_s": round(first_calls, 2),
        "largest_error": errors,
    }


# ------------------------------------------------------------------------------------------------------- the two sides


def training(block: nn.ModuleList, x_BTD: Tensor, precision: str, make: Make) -> Callable[[], tuple[float, float]]:
    """Seconds of one forward and of one backward pass."""
    outputs = make(partial(project, list(block)))
    x_BTD = x_BTD.clone().requires_grad_()
    wanted = [x_BTD, *block.parameters()]
    given = [torch.randn_like(x_BTD, dtype=y.dtype) for y in forward(outputs, x_BTD, precision)]

    def passes() -> tuple[float, float]:
        began = time.perf_counter()
        ys = forward(outputs, x_BTD, precision)
        between = time.perf_counter()
        torch.autograd.grad(ys, wanted, given)
        return between - began, time.perf_counter() - between

    return passes


def forward(outputs: Outputs, x_BTD: Tensor, precision: str) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        return outputs(x_BTD)


def decoding(block: nn.ModuleList, x_11D: Tensor, precision: str, make: Make) -> Callable[[], float]:
    """Seconds of one token: weights in the compute dtype, stems stacked once."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    parts = [p.to(dtype) for p in copy.deepcopy(block)]
    x_11D = x_11D.to(dtype)
    with torch.no_grad():
        weight_SD = torch.cat([p.config.stem(p) for p in parts])
    rows = [p.config.stem_rows(p.dims) for p in parts]

    def outputs(x: Tensor) -> list[Tensor]:
        stems = torch.split(F.linear(x, weight_SD), rows, dim=-1)
        return [p.config.head(p, stem, x) for p, stem in zip(parts, stems, strict=True)]

    made = make(outputs)

    @torch.inference_mode()
    def tokens() -> float:
        began = time.perf_counter()
        for _ in range(DECODE_CALLS):
            made(x_11D)
        return (time.perf_counter() - began) / DECODE_CALLS

    return tokens


# --------------------------------------------------------------------------------------------------------- correctness


def check(block: nn.ModuleList, x_BTD: Tensor, precision: str, make: Make) -> dict[str, float]:
    """The largest errors of the plain and the fused path against float64, over all outputs and gradients.

    Raises `SystemExit` where the fused path is off by more than twice as much as the plain one.
    """
    given_BTD = torch.randn_like(x_BTD)

    def found(parts: nn.ModuleList, outputs: Outputs, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        ys = forward(outputs, x, precision if x.dtype == torch.float32 else "float64")
        return [y.detach() for y in ys] + list(
            torch.autograd.grad(ys, [x, *parts.parameters()], [given_BTD.to(y.dtype) for y in ys])
        )

    exact_block = copy.deepcopy(block).double()
    exact = found(exact_block, lambda x: [p(x) for p in exact_block], x_BTD.double())
    plain = found(block, lambda x: [p(x) for p in block], x_BTD)
    fused = found(block, make(partial(project, list(block))), x_BTD)
    names = ["queries", "keys", "values", "x", *(name for name, _ in block.named_parameters())]
    worst = {"plain": 0.0, "fused": 0.0}
    for name, right, *others in zip(names, exact, plain, fused, strict=True):
        errors = dict(zip(worst, (_error(other, right) for other in others), strict=True))
        if errors["fused"] > max(2 * errors["plain"], FLOOR[precision]):
            raise SystemExit(
                f"{name}: the fused path is off by {errors['fused']:.3g}, the plain by {errors['plain']:.3g}"
            )
        worst = {path: max(worst[path], errors[path]) for path in worst}
    return {path: float(f"{error:.3g}") for path, error in worst.items()}


def _error(found: Tensor, right: Tensor) -> float:
    """By norm: at a kink of ReLU one rounding flips a whole entry of the gradient."""
    return ((found - right).norm() / right.norm()).item()


if __name__ == "__main__":
    main()
