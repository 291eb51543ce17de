"""The price of each choice of the nonlinear query: forward, backward and decoding, beside the linear query.

    python benchmarks/prices.py --width 768 --tokens 1024 --batch 2 --precision bf16 --out results/prices-cpu.json

What is timed is a block's queries, keys and values together, as `project` makes them: one matrix product over all
stems, then the heads. Decoding is one token of one sequence, with weights prepared as the decoder prepares them. bf16
is autocast over float32 weights in training, and bf16 weights in decoding. In each round every choice takes its
turn with the linear query at its side; who goes first alternates, and ratios are taken within such a pair. Compilation
and warm-up come before.

Before it is timed, each choice is held against its plain forward in float64: outputs and every gradient of the fused
path, eager or compiled, may be off by twice what the plain path is in the same precision. Prints a table, then one JSON
line; --out adds to a file what it lacks.
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
from measuring import Results, machine, ratios, spread
from torch import Tensor, nn

from qurve.generate.decoder import ONE_ROW
from qurve.projections import Bottleneck, Linear, ProjectionConfig
from qurve.projections.module import project
from qurve.projections.prepared import prepare
from qurve.train.config import RunConfig, TrainConfig
from qurve.train.runtime import available_cores, compiler, machine_settings

Outputs = Callable[[Tensor], list[Tensor]]

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
    print(f"{'as many times the linear query':>45}: {'  '.join(f'{part:>8}' for part in PARTS)}")
    torch._dynamo.config.recompile_limit = 64  # all choices share their functions
    with machine_settings(RunConfig(train=TrainConfig(device="cpu", threads=options.threads))):
        for how in ("eager",) if options.eager else ("eager", "compiled"):
            key = {name: getattr(options, name) for name in ("width", "tokens", "batch", "precision")} | {"how": how}
            if results.find(**key) is None:
                for row in price(choices(options.width), options, compiled=how == "compiled"):
                    results.add(key | row)
            for row in results.rows:
                if key.items() <= row.items():
                    found = [row["ratio"][part] for part in PARTS]
                    medians = "  ".join(f"{part['median']:8.3f}" for part in found)
                    quartiles = "  ".join(f"{part['low']:.3f} to {part['high']:.3f}" for part in found)
                    print(f"{row['choice']:>30}  {how:>12}   {medians}   quartiles {quartiles}", flush=True)
    results.print_line()


def price(kinds: dict[str, ProjectionConfig], options: argparse.Namespace, *, compiled: bool) -> list[dict[str, Any]]:
    """A row for each kind: milliseconds of both sides, and the ratios within a pair."""
    torch.manual_seed(0)
    x_BTD = torch.randn(options.batch, options.tokens, options.width)
    passes, rows = {}, {}
    for name, kind in {"linear": Linear(), **kinds}.items():
        block = nn.ModuleList(k.build(options.width, options.width) for k in (kind, Linear(), Linear()))
        outputs: Outputs = partial(project, list(block))
        if compiled:
            outputs = torch.compile(outputs, dynamic=False)
        began = time.perf_counter()
        train = training(block, outputs, x_BTD, options.precision)
        decode = decoding(block, x_BTD, options.precision, compiled)
        passes[name] = partial(_pass, train, decode)
        passes[name]()
        first = time.perf_counter() - began
        rows[name] = {"choice": name, "first_calls_s": round(first, 2)}
        rows[name]["largest_error"] = check(block, outputs, x_BTD, options.precision)

    pairs: dict[str, list[dict[str, tuple[float, ...]]]] = {name: [] for name in kinds}
    for turn in range(options.rounds):
        for name in list(kinds):
            order = ("linear", name) if turn % 2 else (name, "linear")
            pairs[name].append({side: passes[side]() for side in order})
    for name, found in pairs.items():
        ms = {side: [[1e3 * s for s in pair[side]] for pair in found] for side in ("linear", name)}
        by_part = {side: dict(zip(PARTS, zip(*values, strict=True), strict=True)) for side, values in ms.items()}
        rows[name]["ms"] = {part: spread(by_part[name][part]) for part in PARTS}
        rows[name]["linear_ms"] = {part: spread(by_part["linear"][part]) for part in PARTS}
        rows[name]["ratio"] = {part: spread(ratios(by_part[name][part], by_part["linear"][part])) for part in PARTS}
    return [rows[name] for name in kinds]


def _pass(train: Callable[[], tuple[float, float]], decode: Callable[[], float]) -> tuple[float, float, float]:
    """Seconds of a forward and a backward pass and of a decoded token, each after one that does not count."""
    train()
    return *train(), decode()


# ------------------------------------------------------------------------------------------------------- the two sides


def training(
    block: nn.ModuleList, outputs: Outputs, x_BTD: Tensor, precision: str
) -> Callable[[], tuple[float, float]]:
    """Seconds of one forward and of one backward pass."""
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


def decoding(block: nn.ModuleList, x_BTD: Tensor, precision: str, compiled: bool) -> Callable[[], float]:
    """Seconds of one token, as a `Decoder` makes queries, keys and values."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    parts, x_11D = prepare(list(block), dtype), x_BTD[:1, :1]
    made: Outputs = partial(project, parts)
    if compiled:
        made = torch.compile(made, dynamic=False, options=ONE_ROW)

    @torch.inference_mode()
    def tokens() -> float:
        made(x_11D)
        began = time.perf_counter()
        for _ in range(DECODE_CALLS):
            made(x_11D)
        return (time.perf_counter() - began) / DECODE_CALLS

    return tokens


# --------------------------------------------------------------------------------------------------------- correctness


def check(block: nn.ModuleList, outputs: Outputs, x_BTD: Tensor, precision: str) -> dict[str, float]:
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
    fused = found(block, outputs, x_BTD)
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
