"""Where a training step's time goes on the CPU: by kind of work, and for every product how near it comes to the
processor's matrix peak and to the memory's bandwidth.

    python benchmarks/profile_cpu.py [--layers 12 --width 768 --heads 12 --context 1024 --batch 2] [--out FILE]

The step is the one of `train_cpu.py`, compiled. FLOPs stand over the matrix peak, and bytes (both factors and the
result, once each) over the bandwidth of reading, measured in the same run. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from measuring import command, machine, read_bandwidth
from torch.profiler import ProfilerActivity, profile
from train_cpu import SHAPE, add_shape, batch_of, matrix_peak, our_step, shape_of

from qurve.files import write_atomic
from qurve.projections import Bottleneck
from qurve.train.config import RunConfig, TrainConfig
from qurve.train.runtime import available_cores, machine_settings, resolve_precision

KINDS = {
    "products": ("aten::mm", "aten::addmm"),
    "attention": ("aten::bmm", "aten::_scaled_dot_product", "qurve::causal_attention"),
    "loss, without its products": ("qurve::linear_cross_entropy",),
    "optimiser and clipping": (
        "aten::_fused_adamw_",
        "Optimizer.",
        "aten::linalg_vector",
        "aten::_foreach",
        "aten::mul_",
    ),
    "fused by the compiler": ("## Call CompiledFxGraph",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape(parser)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.set_defaults(peer=None, authors=None)
    parser.add_argument("--out", type=Path, help="write the JSON there, too")
    options = parser.parse_args()
    config, batch = shape_of(options), batch_of(options)
    config = dataclasses.replace(config, query=Bottleneck())
    training = TrainConfig(device="cpu", precision=resolve_precision("auto", "cpu"), threads=options.threads)
    with machine_settings(RunConfig(config, train=training)):
        step = our_step(config, training, batch, eager=False)
        for _ in range(3):
            step()
        peak = matrix_peak(options.width)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
            for _ in range(options.steps):
                step()
        peak = max(peak, matrix_peak(options.width))
    bandwidth = read_bandwidth(torch.rand(1 << 27))
    by_name = [(event.key, event.self_cpu_time_total / options.steps / 1e3) for event in profiled.key_averages()]
    total = sum(ms for _, ms in by_name)
    kinds = {kind: sum(ms for name, ms in by_name if name.startswith(starts)) for kind, starts in KINDS.items()}
    kinds["all else"] = total - sum(kinds.values())
    width = 2 if training.precision == "bf16" else 4
    products = shapes_of_products(profiled, options.steps, peak, bandwidth / width)
    report: dict[str, Any] = {
        "benchmark": "profile_cpu",
        "command": command(),
        "step_ms": total,
        "kinds_ms": kinds,
        "products": products,
        "matrix_peak_flops": peak,
        "bandwidth_bytes_per_s": bandwidth,
        "shape": {name: getattr(options, name) for name in SHAPE},
        **machine("cpu"),
    }
    print(f"a step takes {total:,.0f} ms; peak {peak / 1e9:,.0f} GFLOP/s, bandwidth {bandwidth / 1e9:.0f} GB/s")
    for kind, ms in kinds.items():
        print(f"{kind:>30}  {ms:8.1f} ms  {ms / total:6.1%}")
    for row in products:
        shares = f"{row['share_of_peak']:6.1%} of the peak, {row['share_of_bandwidth']:6.1%} of the bandwidth"
        print(f"{row['shape']:>30}  {row['ms']:8.1f} ms  {shares}, {row['times']:g} times")
    print(json.dumps(report))
    if options.out:
        write_atomic(options.out, json.dumps(report, indent=1) + "\n")


def shapes_of_products(profiled: profile, steps: int, peak: float, numbers_per_s: float) -> list[dict[str, Any]]:
    """Each shape `rows x inner x columns`, the costliest first: ms and times a step, FLOPs over the peak, bytes over
    the bandwidth."""
    rows = []
    for event in profiled.key_averages(group_by_input_shape=True):
        if event.key == "aten::mm" and event.input_shapes:
            (m, k), (_, n) = event.input_shapes[:2]
            seconds = event.self_cpu_time_total / 1e6
            rows.append(
                {
                    "shape": f"{m} x {k} x {n}",
                    "ms": 1e3 * seconds / steps,
                    "times": event.count / steps,
                    "share_of_peak": 2 * m * k * n * event.count / seconds / peak,
                    "share_of_bandwidth": (m * k + k * n + m * n) * event.count / seconds / numbers_per_s,
                }
            )
    return sorted(rows, key=lambda row: -row["ms"])


if __name__ == "__main__":
    main()
