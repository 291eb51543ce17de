"""The query's head in every way it can be run: first whether each is right, then how long each takes.

    python benchmarks/kernel.py [--rounds 9] [--out results/kernel-cpu.json]

Ways: the plain head (`reference`), `torch.compile` of it (`compiled`), and on a GPU the Triton kernel (`triton`). What
is timed is what follows the stem's product: forward without a graph, and forward with backward. No time is taken before
outputs and gradients are within twice torch's own error of float64. The ways take turns within a round, and ratios to
the plain head are taken within a round. Compilation is timed apart; `pays_after` is the number of training calls of one
shape that make up for it. Without a GPU this says so and times what the CPU has. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import Results, machine, ratios, seconds_of, spread, take_turns
from torch import Tensor

from qurve.ops.heads import Way, no_triton
from qurve.projections import Bottleneck, Dims
from qurve.projections.module import Projection

Shape = tuple[int, int, int]
"""Rows (tokens), width D, bottleneck width R."""

SHAPES: dict[str, list[Shape]] = {
    "cpu": [(1, 768, 384), (2048, 768, 384), (2048, 384, 192)],
    "cuda": [(1, 768, 384), (2048, 768, 384), (32_768, 768, 384), (16_384, 1024, 512)],
}
LEAST_SECONDS = 0.02
"""Calls are repeated until they take that long together."""


class Head:
    """The head of the paper's layer in one dtype, with inputs; `run` gives its output, `step` all gradients, too."""

    def __init__(self, device: str, shape: Shape, dtype: torch.dtype) -> None:
        rows, d, rank = shape
        generator = torch.Generator().manual_seed(0)
        self.module = Projection(Bottleneck(width=rank), Dims(d, d), device=device, dtype=dtype)
        with torch.no_grad():
            for p in self.module.parameters():
                noise = torch.randn(p.shape, generator=generator).to(p)
                p.copy_(noise * p.shape[-1] ** -0.5 if p.dim() > 1 else 1 + 0.3 * noise)
        self.x, self.upstream = (torch.randn(rows, d, generator=generator).to(device, dtype) for _ in "xu")
        with torch.no_grad():
            self.stem = F.linear(self.x, self.module.config.stem(self.module))
        self.leaves = [self.stem.requires_grad_(), self.x.requires_grad_()]
        self.leaves += [self.module.w2, self.module.post_gain]

    def in_float64(self) -> Head:
        """The very same numbers, for the truth."""
        other = object.__new__(Head)
        other.module = Projection(self.module.config, self.module.dims, device=self.x.device, dtype=torch.float64)
        other.module.load_state_dict(self.module.state_dict())
        other.stem, other.x = (t.detach().double().requires_grad_() for t in (self.stem, self.x))
        other.upstream = self.upstream.double()
        other.leaves = [other.stem, other.x, other.module.w2, other.module.post_gain]
        return other

    @torch.no_grad()
    def run(self, way: Way) -> Tensor:
        return self.module.head(way, self.stem, self.x)

    def step(self, way: Way) -> list[Tensor]:
        out = self.module.head(way, self.stem, self.x)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.upstream)]


def measure(device: str, shapes: Sequence[Shape], rounds: int = 9) -> list[dict[str, Any]]:
    """A row for every shape and dtype. Raises `AssertionError` where a way is wrong: nothing more is timed then."""
    ways: list[Way] = ["reference", "compiled"] + (["triton"] if device == "cuda" and not no_triton(device) else [])
    rows = []
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            torch._dynamo.reset()  # each shape is compiled anew, and after some torch would run the plain head
            head, first = Head(device, shape, dtype), {}
            for way in ways:
                first[way] = seconds_of(lambda head=head, way=way: (head.run(way), head.step(way)), 1, device)
            row = {"rows": shape[0], "d": shape[1], "r": shape[2], "dtype": str(dtype).removeprefix("torch.")}
            row |= {"errors": check(head, ways), "first_call_seconds": first}
            for what, call in (("forward", head.run), ("forward_backward", head.step)):
                row[what] = timed(call, ways, rounds, device)
            saved = (
                row["forward_backward"]["reference"]["us"]["median"]
                - row["forward_backward"]["compiled"]["us"]["median"]
            )
            row["pays_after"] = round(first["compiled"] / (1e-6 * saved)) if saved > 0 else None
            rows.append(row)
    return rows


def check(head: Head, ways: Sequence[Way]) -> dict[str, float]:
    """Each way's worst error as a share of torch's own from float64, over the output and all gradients; at most 2."""
    true, plain, found = head.in_float64().step("reference"), head.step("reference"), {}
    for way in ways:
        worst = 0.0
        for t, p, w in zip(true, plain, head.step(way), strict=True):
            # A rounding more is free: where torch's own error happens to be nothing, nobody can be twice as good.
            own = (p.double() - t).norm() + torch.finfo(w.dtype).eps * t.norm() / 2
            worst = max(worst, ((w.double() - t).norm() / own).item())
        assert worst <= 2, f"{way} is {worst:.3g} times as far from float64 as torch is, for {tuple(head.x.shape)}"
        found[way] = worst
    return found


def timed(call: Callable[[Way], object], ways: Sequence[Way], rounds: int, device: str) -> dict[str, Any]:
    """Microseconds of each way, and its time as a multiple of the plain head's."""
    times = max(3, int(LEAST_SECONDS / seconds_of(lambda: call("reference"), 3, device)))
    sides = {way: lambda way=way: 1e6 * seconds_of(lambda: call(way), times, device) for way in ways}
    found = take_turns(sides, rounds)
    return {
        way: {"us": spread(found[way]), "to_reference": spread(ratios(found[way], found["reference"]))} for way in ways
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        print("There is no GPU here: the kernel is not timed, and only the CPU's ways are.")
    head = {"benchmark": "kernel", "command": f"python benchmarks/kernel.py --rounds {options.rounds}"}
    results = Results(options.out, {**head, "device": device, "machine": machine(device)})
    print("   rows     D     R     dtype         way   forward us  (to plain)   with backward us  (to plain)   first s")
    began = time.perf_counter()
    for row in measure(device, SHAPES[device], options.rounds):
        results.add(row)
        for way, first in row["first_call_seconds"].items():
            cells = [(row[what][way]["us"]["median"], row[what][way]["to_reference"]["median"]) for what in TIMED]
            print(
                f"{row['rows']:7}  {row['d']:4}  {row['r']:4}  {row['dtype']:>8}  {way:>10}   {cells[0][0]:10.1f}  "
                f"{cells[0][1]:10.2f}   {cells[1][0]:16.1f}  {cells[1][1]:10.2f}   {first:7.2f}"
            )
    pays = [row["pays_after"] for row in results.rows if row["pays_after"]]
    results.conclude(
        "compiled_pays_after_calls", {"least": min(pays), "median": statistics.median(pays)} if pays else None
    )
    results.conclude("seconds", round(time.perf_counter() - began, 1))
    results.print_line()


TIMED = ("forward", "forward_backward")

if __name__ == "__main__":
    main()
