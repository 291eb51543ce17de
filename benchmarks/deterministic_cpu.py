"""What `torch.use_deterministic_algorithms(True)` costs a training on the CPU, eager and compiled.

    python benchmarks/deterministic_cpu.py [--rounds 15] [--threads 2]

One model a side, trained as the loop does; sides take turns within a round and who goes first alternates; the ratio is
taken within a round. Compilation comes before the first round. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.projections import Bottleneck
from qurve.train.config import RunConfig, TrainConfig
from qurve.train.optim import build_optimizer
from qurve.train.runtime import autocast, available_cores, machine_settings, resolve_precision

MODEL = ModelConfig(n_layers=6, d_model=384, n_heads=6, d_ff=1536, context=256, query=Bottleneck())
BATCH = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=available_cores())
    options = parser.parse_args()
    training = TrainConfig(device="cpu", precision=resolve_precision("auto", "cpu"), threads=options.threads)
    config = RunConfig(MODEL, train=training)
    ids = torch.randint(0, 50257, (BATCH, MODEL.context + 1), generator=torch.Generator().manual_seed(0))
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    ratios: dict[str, list[float]] = {}
    with machine_settings(config):
        for how in ("eager", "compiled"):
            sides = {on: _side(config, batch, compiled=how == "compiled", deterministic=on) for on in (True, False)}
            for step in sides.values():
                step()
                step()
            ratios[how] = []
            for turn in range(options.rounds):
                seconds = {}
                for on in (True, False) if turn % 2 else (False, True):
                    started = time.perf_counter()
                    sides[on]()
                    seconds[on] = time.perf_counter() - started
                ratios[how].append(seconds[True] / seconds[False])
    for how, values in ratios.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{how:>9}: deterministic takes {middle:.3f} times as long (quartiles {low:.3f} and {high:.3f})")
    shape = {"layers": 6, "width": 384, "context": 256, "batch": BATCH, "threads": options.threads}
    shape |= {"precision": training.precision, "torch": torch.__version__}
    medians = {how: statistics.median(values) for how, values in ratios.items()}
    print(json.dumps({"benchmark": "deterministic_cpu", **medians, "rounds": ratios, "shape": shape}))


def _side(
    config: RunConfig, batch: tuple[torch.Tensor, torch.Tensor], *, compiled: bool, deterministic: bool
) -> Callable[[], None]:
    model = GPT(config.model)
    optimizer = build_optimizer(model, config.train)
    torch.use_deterministic_algorithms(deterministic)
    loss_of = torch.compile(model.loss) if compiled else model.loss

    def step() -> None:
        torch.use_deterministic_algorithms(deterministic)
        with autocast(config):
            loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
