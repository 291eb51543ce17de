"""What checkpoints cost a training, at their default interval: after every evaluation.

    python benchmarks/checkpoint_cost.py [--preset small/res-gelu] [--intervals 4]

Trains the preset (one thread, as a run of a study with two workers has) and times each save, pruning, flushing to the
disk and the sha256 of its manifest included, against the steps and the evaluation between two saves. Apart from that it
saves the paper's 124-million-parameter model with its optimiser, alone. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from qurve import presets
from qurve.data.loader import TokenData
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.train import loop
from qurve.train.checkpoint import save_checkpoint
from qurve.train.config import TrainConfig
from qurve.train.data import open_data
from qurve.train.distributed import ALONE
from qurve.train.optim import build_optimizer
from qurve.train.progress import Progress


class Clock(Progress):
    """Notes when each save began and ended, and when training did."""

    def __init__(self) -> None:
        self.saves: list[float] = []
        self.began = self.ended = 0.0

    def start(self, updates: int, log_every: int, done: int) -> None:
        self.began = time.perf_counter()

    def finish(self) -> None:
        self.ended = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small/res-gelu")
    parser.add_argument("--intervals", type=int, default=6, help="evaluations, and so saves")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="a folder of the disk to measure")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = {"run": _run(options, Path(folder)), "paper": _save_papers_model(Path(folder))}
    run, paper = found["run"], found["paper"]
    print(f"{options.preset}: {run['bytes'] / 1e6:.1f} MB a checkpoint, {run['save_seconds']:.3f} s (median of")
    print(f"{len(run['saves'])}), every {run['steps_between']} steps: {100 * run['share']:.2f} % of the training time")
    print(f"paper/res-gelu-best: {paper['bytes'] / 1e6:,.0f} MB, {paper['save_seconds']:.2f} s")
    print(json.dumps({"benchmark": "checkpoint_cost", "preset": options.preset, "torch": torch.__version__, **found}))


def _run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = presets.get(options.preset)
    steps = config.eval.every * options.intervals
    training = dataclasses.replace(config.train, threads=options.threads, stop_at=steps, device="cpu")
    clock = Clock()
    _time_saves(clock)
    run = loop.train(dataclasses.replace(config, train=training), folder / "run", _data(config, folder), clock)
    whole = clock.ended - clock.began
    return {
        "steps_between": config.eval.every,
        "saves": clock.saves,
        "save_seconds": statistics.median(clock.saves),
        "training_seconds": whole,
        "share": sum(clock.saves) / (whole - sum(clock.saves)),
        "bytes": _size(run.latest_checkpoint()),
        "threads": options.threads,
    }


def _time_saves(clock: Clock) -> None:
    save, prune = loop.save_checkpoint, loop.prune

    def timed_save(*arguments: Any) -> None:
        clock.saves.append(-time.perf_counter())
        save(*arguments)

    def timed_prune(*arguments: Any) -> None:
        prune(*arguments)
        clock.saves[-1] += time.perf_counter()

    loop.save_checkpoint, loop.prune = timed_save, timed_prune


def _data(config: Any, folder: Path) -> TokenData:
    return open_data(config.data, folder / "data")


def _save_papers_model(folder: Path) -> dict[str, Any]:
    model = GPT(presets.get("paper/res-gelu-best").model)
    optimizer = build_optimizer(model, TrainConfig(device="cpu"))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    run = RunFolder(folder / "paper")
    run.create("{}", "", {})
    seconds = []
    for step in (1, 2, 3):
        started = time.perf_counter()
        save_checkpoint(run, step, model, optimizer, {"loss_above_bound": 0, "val_loss": None}, ALONE)
        seconds.append(time.perf_counter() - started)
    return {"saves": seconds, "save_seconds": statistics.median(seconds), "bytes": _size(run.latest_checkpoint())}


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


if __name__ == "__main__":
    main()
