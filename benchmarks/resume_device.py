"""Does a stopped run go on as if it had never stopped, on this device? With several GPUs, on several processes, too?

    python benchmarks/resume_device.py --data DIR [--device cuda] [--steps 40]

DIR is prepared data (`qurve prepare`). Trains a small model with dropout and accumulation three times with one seed:
twice undisturbed, for what the device's own order of additions does, and once stopped in the middle and continued.
Prints the largest differences of loss, then one JSON line. Needs torch, numpy and safetensors alone.

Under torchrun (`--parallel ddp` or `fsdp`, and `--out`) all processes make the stopped run together; the undisturbed
one is made before by one process with `--save-reference FILE`, and read with `--reference FILE`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from qurve import presets
from qurve.config import apply_settings
from qurve.data.loader import TokenData
from qurve.runfolder import RunFolder
from qurve.train.distributed import joined
from qurve.train.loop import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"])
    parser.add_argument("--out", type=Path, help="shared by all processes; default: a temporary folder")
    parser.add_argument("--save-reference", type=Path, metavar="FILE")
    parser.add_argument("--reference", type=Path, metavar="FILE")
    options = parser.parse_args()
    data = TokenData.open(options.data)
    settings = [
        f"train.device={options.device}",
        f"train.precision={options.precision}",
        f"train.steps={options.steps}",
        "train.lr=5e-4",
        "train.micro_batch=4",
        "model.dropout=0.1",
        f"model.vocab_size={-(-data.n_ids // 64) * 64}",
        f"eval.every={options.steps}",
    ]
    config = apply_settings(presets.get("smoke"), settings)
    with tempfile.TemporaryDirectory() as scratch, joined(options.device) as world:
        out = options.out or Path(scratch)

        def lines(name: str, *stops: int) -> list[dict[str, Any]]:
            run = RunFolder(out / name)
            for stop in (*stops, options.steps):
                more = [f"train.stop_at={stop}", f"train.parallel={options.parallel or 'none'}"]
                run = train(apply_settings(config, more), run.path, data, resume="auto", world=world)
            return run.train_lines()

        started = time.perf_counter()
        if options.reference:
            first = second = json.loads(options.reference.read_text(encoding="utf-8"))
        else:
            first, second = lines("first"), lines("second")
        if options.save_reference and world.main:
            options.save_reference.write_text(json.dumps(first), encoding="utf-8")
        stopped = lines("stopped", options.steps // 3, 2 * options.steps // 3)
        if world.main:
            report(options, world.size, first, second, stopped, time.perf_counter() - started)


def report(
    options: argparse.Namespace,
    processes: int,
    first: list[dict[str, Any]],
    second: list[dict[str, Any]],
    stopped: list[dict[str, Any]],
    seconds: float,
) -> None:
    same_batches = [line["batch_sha"] for line in first] == [line["batch_sha"] for line in stopped]
    found = {
        "benchmark": "resume_device",
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device,
        "torch": torch.__version__,
        "processes": processes,
        "parallel": options.parallel,
        "precision": options.precision,
        "same_batches": same_batches,
        "largest_loss_difference_of_two_undisturbed": largest(first, second),
        "largest_loss_difference_of_the_stopped": largest(first, stopped),
        "losses": [first[0]["loss"], first[-1]["loss"]],
        "seconds": seconds,
    }
    print(f"two undisturbed runs differ by {found['largest_loss_difference_of_two_undisturbed']:.3g} at most,")
    print(f"the stopped one from the first by {found['largest_loss_difference_of_the_stopped']:.3g}")
    print(json.dumps(found))


def largest(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> float:
    return max(abs(x["loss"] - y["loss"]) for x, y in zip(a, b, strict=True))


if __name__ == "__main__":
    main()
