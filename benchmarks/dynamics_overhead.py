"""What measuring dynamics (`train.dynamics_every`) costs a training, on a CPU or a GPU.

    python benchmarks/dynamics_overhead.py [--preset small/res-gelu] [--set PATH=VALUE …] [--rounds 5] [--out FILE]

Two sides take turns, who goes first changing from round to round: the preset trained for some steps with a measurement
at the first step and every so many, and without. What the one takes longer, divided by its measurements, is what one
costs; at every 100 steps its share of the training time is a hundredth of that in steps. Evaluation, checkpoints and
compilation are outside of the clock. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import Results, command, machine, ratios, spread, synchronise, take_turns

from qurve import presets
from qurve.config import apply_settings
from qurve.data.loader import TokenData
from qurve.train import loop
from qurve.train.config import RunConfig
from qurve.train.data import open_data
from qurve.train.progress import Progress

MEANT = 100
"""Steps between measurements that the share is told for."""


class Clock(Progress):
    """When the first step began and the last one ended."""

    def __init__(self, device: str) -> None:
        self.device, self.ended = device, 0.0

    def evaluated(self, line: dict[str, Any]) -> None:
        """The one before the first step; that after the last one comes too late to count."""
        self.began = time.perf_counter() if line["step"] == 0 else self.began

    def updated(self, line: dict[str, Any]) -> None:
        synchronise(self.device)
        self.ended = time.perf_counter()


def measurements(steps: int, every: int) -> int:
    """How often so many steps are measured."""
    return len({1, *range(every, steps + 1, every)})


def shares(with_: list[float], without: list[float], steps: int, every: int) -> list[float]:
    """Round by round: what one measurement takes, as a share of the time of `MEANT` steps without."""
    count = measurements(steps, every)
    return [(ratio - 1) * steps / count / MEANT for ratio in ratios(with_, without)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small/res-gelu")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="PATH=VALUE")
    parser.add_argument("--data", type=Path, help="a prepared folder; the embedded corpus otherwise")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    fixed = [f"train.device={options.device}", f"train.stop_at={options.steps}", "eval.every=1000000", "eval.windows=1"]
    config = apply_settings(presets.get(options.preset), [*options.settings, *fixed])
    found = Results(
        options.out, {"benchmark": "dynamics_overhead", "command": command(), "machine": machine(options.device)}
    )
    with tempfile.TemporaryDirectory() as folder:
        data = TokenData.open(options.data) if options.data else open_data(config.data, Path(folder) / "data")
        sides = {
            name: lambda every=every: _seconds(config, every, Path(folder), data)
            for name, every in (("with", options.every), ("without", None))
        }
        _seconds(config, options.every, Path(folder), data)  # what is loaded and laid out once
        turns = take_turns(sides, options.rounds)
    for with_, without in zip(turns["with"], turns["without"], strict=True):
        found.add({"with": with_, "without": without})
    found.conclude("step_seconds", spread([seconds / options.steps for seconds in turns["without"]]))
    found.conclude("measurements", measurements(options.steps, options.every))
    found.conclude("ratio", spread(ratios(turns["with"], turns["without"])))
    found.conclude("share_at_every_100", spread(shares(turns["with"], turns["without"], options.steps, options.every)))
    print(f"{options.preset}, {options.steps} steps, {found.summary['measurements']} of them measured")
    for what, name, factor in (
        ("seconds a step", "step_seconds", 1.0),
        ("with / without", "ratio", 1.0),
        (f"per cent of the time at every {MEANT} steps", "share_at_every_100", 100.0),
    ):
        low, middle, high = (factor * found.summary[name][key] for key in ("low", "median", "high"))
        print(f"  {what:42} {middle:8.4f}   ({low:.4f} to {high:.4f})")
    found.print_line()


def _seconds(config: RunConfig, every: int | None, folder: Path, data: TokenData) -> float:
    clock = Clock(config.train.device)
    measured = apply_settings(config, [f"train.dynamics_every={every or 'none'}"])
    with tempfile.TemporaryDirectory(dir=folder) as out:
        loop.train(measured, Path(out) / "run", data, clock)
    return clock.ended - clock.began


if __name__ == "__main__":
    main()
