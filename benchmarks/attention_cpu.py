"""torch's CPU attention, forward and backward: bf16 against float32 with the casts to and from it, by sequence length.

    python benchmarks/attention_cpu.py

Decides `qurve.model.attention.SHORT`. The two take turns within a round, the order alternates, and ratios are taken
within a round. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

TOKENS = 2048


def bf16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True).bfloat16()


def seconds(attend: Callable[[Tensor, Tensor, Tensor], Tensor], qkv: list[Tensor], repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        attend(*qkv).sum().backward()
    return (time.perf_counter() - started) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    print("heads  width      T    bf16 ms  float32 ms   bf16 / float32: median   min   max")
    for heads, width in ((4, 32), (12, 64)):
        for length in (32, 64, 128, 256, 512, 1024):
            shape = (TOKENS // length, heads, length, width)
            qkv = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
            times: dict[str, list[float]] = {"bf16": [], "float32": []}
            for turn in range(options.rounds + 1):
                for attend in (bf16, float32) if turn % 2 else (float32, bf16):
                    spent = seconds(attend, qkv, 3)
                    if turn:  # the first round warms up
                        times[attend.__name__].append(spent)
            ratios = [b / f for b, f in zip(times["bf16"], times["float32"], strict=True)]
            medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
            print(
                f"{heads:5}  {width:5}  {length:5}  {medians['bf16']:9.2f}  {medians['float32']:10.2f}   "
                f"{statistics.median(ratios):22.2f}  {min(ratios):4.2f}  {max(ratios):4.2f}"
            )
            rows.append({"heads": heads, "width": width, "length": length, "ms": medians, "ratios": ratios})
    print(json.dumps({"benchmark": "attention_cpu", "tokens": TOKENS, **vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
