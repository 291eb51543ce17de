"""The affine hulls of a model's queries, keys and values on very many tokens: seconds and memory, however many come.

    python benchmarks/hulls.py [--preset paper/res-gelu-best] [--tokens 1048576] [--parts 8] [--out FILE]

What `qurve analyze geometry RUN --tokens N` measures with, on weights as they start and ids drawn evenly from the
vocabulary: values cost no time. Each part of the tokens has its seconds, those of the processor, and the most memory
that the process held meanwhile; with bounded memory that is the same for the last as for the first. A line a part as it
goes, then the blocks' dimensions beside their bounds, then one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measuring import command, machine, synchronise
from torch import Tensor

from qurve import presets
from qurve.analysis.hull import measure_hulls
from qurve.config import apply_settings
from qurve.files import write_atomic
from qurve.model.gpt import GPT
from qurve.train.runtime import available_cores, forget_peak_memory, peak_memory

PASS_TOKENS = 4_096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="paper/res-gelu-best")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="PATH=VALUE")
    parser.add_argument("--tokens", type=int, default=2**20, help="at least so many, in whole passes")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, help="write the JSON there, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = measure(options)
    for layer in report["layers"]:
        print(
            f"block {layer['layer']:>3}   linear {layer['flat']:>6,}   bound {layer['tight']:>6,}   "
            f"rank {layer['rank']:>6,}   bent {100 * layer['bent']:.3g} %"
        )
    print(
        f"spectra in {report['spectra_seconds']:.1f} s; last part's memory {report['memory_ratio']:.3f} of the first's"
    )
    print(json.dumps(report))
    if options.out:
        write_atomic(options.out, json.dumps(report, indent=1) + "\n")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Part by part; `SystemExit` where a part would have no pass."""
    config = apply_settings(presets.get(options.preset), options.settings).model
    sequences = max(1, PASS_TOKENS // config.context)
    passes = -(-options.tokens // (sequences * config.context))
    if passes < options.parts:
        raise SystemExit(f"{passes} passes of {sequences * config.context} tokens have no {options.parts} parts")
    model, ids = GPT(config).to(options.device), _ids(config.vocab_size, (sequences, config.context))
    rows: list[dict[str, Any]] = []

    def told() -> Iterator[Tensor]:
        """All passes; what a part took is known when the next one is asked for."""
        for part in range(options.parts):
            count = passes * (part + 1) // options.parts - passes * part // options.parts
            if not forget_peak_memory(options.device):
                raise SystemExit("this system does not tell how much memory a part took (Linux does)")
            began, worked = time.perf_counter(), time.process_time()
            for ids_BT in itertools.islice(ids, count):
                yield ids_BT.to(options.device)
            synchronise(options.device)
            row = {
                "tokens": count * sequences * config.context,
                "seconds": time.perf_counter() - began,
                "cpu_seconds": time.process_time() - worked,  # of all threads; they do not count what else runs
                "peak_bytes": peak_memory(options.device),
            }
            rows.append(row)
            done = sum(one["tokens"] for one in rows)
            memory = f"{row['peak_bytes'] / 2**20:>8,.0f} MiB"
            print(f"{done:>12,} tokens   {row['seconds']:>8.1f} s   {memory}", flush=True)

    began = time.perf_counter()
    hulls = measure_hulls(model, told())
    whole, passing = time.perf_counter() - began, sum(row["seconds"] for row in rows)
    return {
        "benchmark": "hulls",
        "command": command(),
        "preset": options.preset,
        "settings": options.settings,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": sum(row["tokens"] for row in rows),
        "seconds": passing,
        "cpu_seconds": sum(row["cpu_seconds"] for row in rows),
        "spectra_seconds": whole - passing,
        "memory_ratio": rows[-1]["peak_bytes"] / rows[0]["peak_bytes"],
        "parts": rows,
        "layers": [
            {
                "layer": hull.layer,
                "flat": hull.bound.flat,
                "tight": hull.bound.tight,
                "paper": hull.bound.paper,
                "rank": hull.qkv.rank(),
                "participation_ratio": hull.qkv.participation_ratio,
                "bent": hull.bent,
            }
            for hull in hulls
        ],
        "threads": options.threads,
        "machine": machine(options.device),
    }


def _ids(vocabulary: int, shape: tuple[int, int]) -> Iterator[Tensor]:
    """Passes without end, `[B, T]`, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(vocabulary, shape, generator=generator)


if __name__ == "__main__":
    main()
