"""Decoding with absorbed weights: a norm-free model as it is, and with its queries and output projections the identity.

    python benchmarks/absorbed.py --rounds 9
    python benchmarks/absorbed.py --topology attention --compile --out results/absorbed-cpu.json

The sides have the same logits, which is checked first: in float64, where they are exact (nothing is timed otherwise),
and in float32, as they are timed, where the condition of what was absorbed magnifies the rounding. What is saved
depends on the topology: with a skip over attention alone W_O has no basis of its own and stays. Weights are as they
start: their values cost no time.

The sides take turns, in an order that rotates from round to round; ratios are taken within a round. A step reads one
token of one sequence after a prompt. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from measuring import command, machine, ratios, spread, take_turns
from torch import Tensor

from qurve.analysis.absorb import absorb
from qurve.analysis.redundancy import difference
from qurve.files import write_atomic
from qurve.generate.decoder import Decoder
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.model.residual import Skip
from qurve.train.runtime import available_cores

PROMPT, EXACT = 128, 1e-6
TOPOLOGIES = {
    "skipless": Skip("none", attention=False, mlp=False),
    "attention": Skip("none", attention=True, mlp=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", choices=TOPOLOGIES, default="skipless", help="what is skipped over, if anything")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--new", type=int, default=32, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, help="write the JSON there, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = measure(options)
    for name, side in report["sides"].items():
        ratio = f"   {report['ratios'][name]['median']:.3f} of the time" if name in report["ratios"] else ""
        print(
            f"{name:>14}  {side['parameters']:>12,} parameters  {1e3 * side['step_s']['median']:8.2f} ms a step{ratio}"
        )
    print(json.dumps(report))
    if options.out:
        write_atomic(options.out, json.dumps(report, indent=1) + "\n")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Absorb, compare, time. `SystemExit` where the logits are not the same."""
    config = ModelConfig(
        n_layers=options.layers,
        d_model=options.width,
        n_heads=options.heads,
        d_ff=4 * options.width,
        context=options.context,
        vocab_size=options.vocab,
        residual=TOPOLOGIES[options.topology],
    )
    prompt_BT = torch.randint(config.vocab_size, (1, min(PROMPT, config.context // 2)))
    model = GPT(config).double().eval()
    models = {"as it is": model, "W_Q = I": absorb(model, ["query"]).model}
    if options.topology == "skipless":
        models["W_Q = W_O = I"] = absorb(model, ["query", "output"]).model
    exact = {name: difference(model, other, prompt_BT).relative for name, other in models.items()}
    if (worst := max(exact.values())) > EXACT:
        raise SystemExit(f"the logits differ by {worst:.3g} of their size: nothing is timed")
    models = {name: other.float() for name, other in models.items()}
    rounded = {name: difference(models["as it is"], other, prompt_BT).relative for name, other in models.items()}
    sides = {name: _Side(other, prompt_BT, options.new, options.compile) for name, other in models.items()}
    steps = take_turns(sides, options.rounds)
    return {
        "benchmark": "absorbed",
        "command": command(),
        "ratios": {name: spread(ratios(t, steps["as it is"])) for name, t in steps.items() if name != "as it is"},
        "sides": {
            name: {
                "parameters": sum(p.numel() for p in other.parameters()),
                "difference_float64": exact[name],
                "difference_float32": rounded[name],
                "step_s": spread(steps[name]),
            }
            for name, other in models.items()
        },
        "rounds": steps,
        "shape": {
            **{name: getattr(options, name) for name in ("topology", "layers", "width", "heads", "context", "vocab")},
            "prompt": prompt_BT.shape[1],
            "new": options.new,
            "compile": options.compile,
        },
        "threads": options.threads,
        "machine": machine("cpu"),
    }


class _Side:
    """Seconds of one step after the prompt."""

    def __init__(self, model: GPT, prompt_BT: Tensor, new: int, compiled: bool) -> None:
        room = prompt_BT.shape[1] + new
        self.decoder = Decoder(model, 1, None, room, compile=compiled)
        self.decoder.read(prompt_BT)
        self.start, self.new = self.decoder.filled, new
        self()

    def __call__(self) -> float:
        self.decoder.cache.filled = self.start
        token_B1 = torch.zeros(1, 1, dtype=torch.long)
        began = time.perf_counter()
        for _ in range(self.new):
            self.decoder.read(token_B1)
        return (time.perf_counter() - began) / self.new


if __name__ == "__main__":
    main()
