"""How wide must the baseline's feed-forward be for its training step to take as long as that of the paper's layer?

    python benchmarks/time_match.py [--rounds 31] [--out FILE]

Parameters and FLOPs are counted; seconds have to be measured. The small model trains with the paper's query, and with
the linear one at several widths of the feed-forward, as in the small studies: eager, on one thread. All take turns, in
an order that rotates from round to round. In each round a straight line goes through the linear models' seconds over
their widths, and the width is where that line comes to the seconds of the paper's layer. Prints a table, then one JSON
line; `experiments/controls.py` takes the median of the rounds for its time-matched control.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import machine, ratios, seconds_of, spread, take_turns
from train_cpu import our_step

from qurve import presets
from qurve.files import write_atomic
from qurve.model.config import ModelConfig
from qurve.projections import Bottleneck
from qurve.train.config import RunConfig

SHARES = (0.75, 1.0, 1.25, 1.5)
"""Of the baseline's `d_ff`: what the line goes through."""
LAYER = "res-gelu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--steps", type=int, default=8, help="steps of each side in a round")
    parser.add_argument("--out", type=Path, help="write the JSON there, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = presets.get("small/baseline")
    models = sides(config.model)
    steps = {name: _step(config, model) for name, model in models.items()}
    for step in steps.values():
        step()
    seconds = take_turns(
        {name: lambda step=step: seconds_of(step, options.steps, "cpu") for name, step in steps.items()}, options.rounds
    )
    layer = seconds.pop(LAYER)
    found = [
        width_at(here, dict(zip(map(int, seconds), turn, strict=True)))
        for here, *turn in zip(layer, *seconds.values(), strict=True)
    ]
    baseline = seconds[str(config.model.d_ff)]
    report = {
        "benchmark": "time_match",
        "command": "python benchmarks/time_match.py",
        "d_ff_of_baseline": config.model.d_ff,
        "d_ff": round(statistics.median(found)),
        "d_ff_by_round": spread(found),
        "ratio_of_layer_to_baseline": spread(ratios(layer, baseline)),
        "ms": {name: spread([1e3 * s for s in values]) for name, values in {LAYER: layer, **seconds}.items()},
        "rounds": options.rounds,
        "steps": options.steps,
        "threads": 1,
        **machine("cpu"),
    }
    for name, of in report["ms"].items():
        print(f"{name:>10}  median {of['median']:8.2f} ms   quartiles {of['low']:.2f} to {of['high']:.2f}")
    print(f"d_ff {report['d_ff']} by the rounds' median; quartiles {report['d_ff_by_round']}")
    print(json.dumps(report))
    if options.out:
        write_atomic(options.out, json.dumps(report, indent=1) + "\n")


def sides(baseline: ModelConfig) -> dict[str, ModelConfig]:
    """The paper's layer, and the linear models by their `d_ff`."""
    widths = [round(share * baseline.d_ff) for share in SHARES]
    linear = {str(width): dataclasses.replace(baseline, d_ff=width) for width in widths}
    return {LAYER: dataclasses.replace(baseline, query=Bottleneck()), **linear}


def width_at(seconds: float, linear: dict[int, float]) -> float:
    """Where the line through the linear models' seconds over their widths comes to so many."""
    line = statistics.linear_regression(list(linear), list(linear.values()))
    return (seconds - line.intercept) / line.slope


def _step(config: RunConfig, model: ModelConfig) -> Callable[[], float]:
    torch.manual_seed(0)
    ids = torch.randint(0, model.vocab_size, (config.train.tokens_per_step // model.context, model.context + 1))
    training = dataclasses.replace(config.train, device="cpu", threads=1)
    return our_step(model, training, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), eager=True)


if __name__ == "__main__":
    main()
