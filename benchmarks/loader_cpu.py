"""How fast a training's batches come, against how fast it trains: tokens/s in both orders, from a cold disk and warm.

    python benchmarks/loader_cpu.py [--rate TOKENS_PER_S]

A step's batches are made as the trainer makes them: the order names the windows, which are cut into micro-batches, read
from the shards, checked and moved on by one for the targets. Data are random ids in nanoGPT's form. Cold: before each
round the file leaves the system's cache. Warm: it has just been read. First, the windows must be the file's. The rate
is that of our fastest training in `results/train-cpu.json`. Prints a table, then one JSON line. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measuring import machine, spread

from qurve.data.loader import TokenData
from qurve.model.config import ModelConfig
from qurve.train.config import DataConfig, RunConfig, TrainConfig
from qurve.train.windows import batch, counted, training_stream, training_windows

RESULTS = Path(__file__).parents[1] / "results"
N_IDS = 50257
SHAPES = {
    "T256 B8": {"context": 256, "tokens_per_step": 2048, "micro_batch": 8, "steps": 240},
    "T1024 B480": {"context": 1024, "tokens_per_step": 491_520, "micro_batch": 2, "steps": 2},
}
"""That of the training benchmark, and the paper's step in the micro-batches that a CPU takes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, help="tokens/s of the training to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=512, help="size of the data")
    parser.add_argument("--folder", type=Path, help="a folder of the disk to read from")
    options = parser.parse_args()
    rate = options.rate or training_rate(json.loads((RESULTS / "train-cpu.json").read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        tokens = _write(Path(folder), options.megabytes * 500_000)
        rows = [
            {"shape": name, "order": order, "disk": disk, **measure(Path(folder), tokens, shape, order, disk, options)}
            for name, shape in SHAPES.items()
            for order in ("epochs", "paper")
            for disk in ("cold", "warm")
        ]
    print(f"     shape   order  disk      tokens/s   quartiles                  of {rate:,.0f} tokens/s in training")
    for row in rows:
        row["ratio_to_training"] = round(row["tokens_per_s"]["median"] / rate, 1)
        speed = row["tokens_per_s"]
        print(
            f"{row['shape']:>10}  {row['order']:>6}  {row['disk']:>4}  {speed['median']:12,.0f}"
            f"   {speed['low']:,.0f} to {speed['high']:,.0f}   {row['ratio_to_training']:,.0f} x"
        )
    print(
        json.dumps(
            {
                "benchmark": "loader_cpu",
                "command": "python benchmarks/loader_cpu.py" + (f" --rate {rate:g}" if options.rate else ""),
                "machine": machine("cpu"),
                "training_rate": rate,
                "ratio_to_training": min(row["ratio_to_training"] for row in rows),
                "megabytes": options.megabytes,
                "rounds": options.rounds,
                "rows": rows,
            }
        )
    )


def training_rate(evidence: dict[str, Any]) -> float:
    """Tokens/s of our fastest training in what `train_cpu.py` found."""
    return float(max(evidence["tokens_per_s"][side] for side in ("linear", "nonlinear")))


def measure(
    folder: Path, tokens: np.ndarray, shape: dict[str, int], order: Any, disk: str, options: argparse.Namespace
) -> dict[str, Any]:
    steps, context = shape["steps"], shape["context"]
    config = RunConfig(
        ModelConfig(context=context),
        DataConfig(order=order),
        TrainConfig(tokens_per_step=shape["tokens_per_step"], micro_batch=shape["micro_batch"], device="cpu"),
    )
    speeds = []
    for turn in range(options.rounds + 1):
        _cache(folder / "train.bin", keep=disk == "warm")
        data = TokenData.open(folder)  # anew, since pages that are mapped do not leave the cache
        if turn == 0:
            _check(config, data, tokens)
            continue
        began = time.perf_counter()
        for step in range(turn * steps, (turn + 1) * steps):  # other windows each round
            make_batches(config, data, step)
        speeds.append(steps * shape["tokens_per_step"] / (time.perf_counter() - began))
    return {"tokens_per_s": spread(speeds)}


def make_batches(config: RunConfig, data: TokenData, step: int) -> None:
    """As the training loop does in a step."""
    split, stream = data.split("train"), training_stream(config, step)
    for part in training_windows(config, data, step)[1]:
        counted(config, part, stream)
        batch(config, split, part, stream)


def _check(config: RunConfig, data: TokenData, tokens: np.ndarray) -> None:
    starts = training_windows(config, data, 0)[1][0]
    inputs, targets = batch(config, data.split("train"), starts, training_stream(config, 0))
    for start, row, moved in zip(starts, inputs.numpy(), targets.numpy(), strict=True):
        right = tokens[start : start + config.model.context + 1]
        if not (np.array_equal(row, right[:-1]) and np.array_equal(moved, right[1:])):
            raise SystemExit(f"the batch's window at {start} is not the file's")


def _write(folder: Path, n_tokens: int) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, N_IDS, n_tokens, dtype=np.uint16)
    for name, of in {"train": tokens, "val": tokens[:4096]}.items():
        with open(folder / f"{name}.bin", "wb") as file:
            file.write(of.tobytes())
            file.flush()
            os.fsync(file.fileno())  # only clean pages can leave the cache
    return tokens


def _cache(file: Path, *, keep: bool) -> None:
    with open(file, "rb") as opened:
        if keep:
            while opened.read(1 << 24):
                pass
        else:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
