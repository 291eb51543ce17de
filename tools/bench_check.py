"""Has something become slower? Measures a few ratios again, quickly, and compares them with the committed ones.

    python tools/bench_check.py [--peer PATH_TO_A_NANOGPT_CHECKOUT] [--write]

Ratios, not times, so that another machine may ask; each is the higher the better, and may fall by a quarter before the
check fails (exit code 1). Each is of the best of a few rounds of either side, since whatever else the machine does only
makes them slower: good enough to see a loss of that size, for no finer claim.
`--write` keeps what was measured as `results/bench-check.json`, which is what later checks compare with. Under five
minutes on two cores. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qurve.data import tokenizers
from qurve.data.loader import TokenData
from qurve.data.prepare import prepare
from qurve.data.sources import Sources
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.projections import Bottleneck, Linear
from qurve.projections.module import project

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
COMMITTED = ROOT / "results" / "bench-check.json"
MARGIN = 0.25


def fallen(committed: dict[str, float], measured: dict[str, float]) -> dict[str, float]:
    """The ratios that are more than `MARGIN` below the committed ones, and by what part; one that was not measured, or
    is no number, has fallen by all."""
    parts = {name: 1 - measured.get(name, math.nan) / ratio for name, ratio in committed.items()}
    return {name: 1.0 if math.isnan(part) else part for name, part in parts.items() if not part <= MARGIN}


def report(committed: dict[str, float], measured: dict[str, float]) -> list[str]:
    """A line for each ratio, and one for each that fell or was not measured."""
    lost = fallen(committed, measured)
    lines = [f"{'':>40}  committed  measured  change"]
    for name, value in measured.items():
        before = committed.get(name)
        change = "not committed yet" if before is None else f"{100 * (value / before - 1):+5.0f} %"
        lines.append(f"{name:>40}  {before or float('nan'):9.3f}  {value:8.3f}  {change}")
    lines += [f"{name} WAS NOT MEASURED" for name in committed if name not in measured]
    return lines + [
        f"{name} FELL by {100 * part:.0f} %: from {committed[name]:.3f} to {measured[name]:.3f}"
        for name, part in lost.items()
        if name in measured
    ]


# ----------------------------------------------------------------------------------------------------- what is measured


def measure(peer: Path | None) -> dict[str, float]:
    """The ratios by name, the higher the better."""
    trained = _benchmark("train_cpu", "--rounds", "7", "--steps", "2", *(["--peer", peer] if peer else []))
    speed = {side: max(trained["rounds"][side]) for side in trained["tokens_per_s"]}
    found = {"training: nonlinear / linear": speed["nonlinear"] / speed["linear"]}
    if peer:
        found["training: linear / nanoGPT"] = speed["linear"] / speed["nanogpt"]
    loaded = _benchmark("loader_cpu", "--rounds", "3", "--megabytes", "64", "--rate", speed["linear"])
    found["loader / training"] = loaded["ratio_to_training"]
    say("prepare, fused stems and decoding")
    found["prepare / plain tiktoken loop"] = prepared()
    found["fused / unfused stems"] = fused()
    if importlib.util.find_spec("qurve.generate"):
        found["decoding: nonlinear / linear"] = decoded()
    return found


def say(what: str) -> None:
    print(f"measuring: {what}", file=sys.stderr, flush=True)


def _benchmark(name: str, *arguments: Any) -> dict[str, Any]:
    say(f"benchmarks/{name}.py")
    command = [sys.executable, f"benchmarks/{name}.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command[1:])} failed")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def decoded() -> float:
    """Times as fast as the linear query that the nonlinear one writes new tokens, one sequence, in bf16."""
    from qurve.generate.decoder import Decoder

    prompt_BT = torch.arange(64)[None]

    def side(query: Any) -> Callable[[], float]:
        shape = ModelConfig(n_layers=6, d_model=384, n_heads=6, d_ff=1536, context=256, vocab_size=8192)
        model = GPT(dataclasses.replace(shape, query=query)).eval()

        def write() -> float:
            decoder = Decoder(model, 1, None, 256, torch.bfloat16)
            token = decoder.read(prompt_BT).argmax(-1, keepdim=True)
            began = time.perf_counter()
            for _ in range(32):
                token = decoder.read(token).argmax(-1, keepdim=True)
            return time.perf_counter() - began

        return write

    with torch.inference_mode():
        return _times_as_fast(side(Bottleneck()), side(Linear()), rounds=7)


def fused() -> float:
    """Times as fast as the plain forwards that the fused stems of a block are, forward and backward."""
    torch.manual_seed(0)
    width = 384
    block = nn.ModuleList(kind.build(width, width) for kind in (Bottleneck(), Linear(), Linear()))
    x_BTD = torch.randn(8, 256, width, requires_grad=True)

    def passes(outputs: Callable[[], list[torch.Tensor]]) -> float:
        began = time.perf_counter()
        for _ in range(5):
            torch.stack([y_BTD.square().mean() for y_BTD in outputs()]).sum().backward()
        return time.perf_counter() - began

    plain, together = (lambda: [part(x_BTD) for part in block]), partial(project, list(block), x_BTD)
    for one, other in zip(plain(), together(), strict=True):
        torch.testing.assert_close(one, other)
    return _times_as_fast(partial(passes, together), partial(passes, plain), rounds=9)


def prepared() -> float:
    """Times as fast as a plain loop over tiktoken on one core that `prepare` is on one."""
    from prepare_cpu import write_text

    encoding = tokenizers.ready_made("gpt2")._encoding
    with tempfile.TemporaryDirectory() as folder:
        text, _ = write_text(None, 10, Path(folder) / "text.jsonl")
        places = iter(range(1000))

        def ours() -> float:
            began = time.perf_counter()
            prepare([text], Path(folder) / str(next(places)), workers=1, progress=False)
            return time.perf_counter() - began

        def loop() -> float:
            began = time.perf_counter()
            with open(Path(folder) / "tokens.bin", "wb") as file:
                for document in Sources([text]).documents():
                    ids = [*encoding.encode_ordinary(document), encoding.eot_token]
                    file.write(np.array(ids, dtype=np.uint16).tobytes())
            return time.perf_counter() - began

        ratio = _times_as_fast(ours, loop, rounds=5)
        data = TokenData.open(Path(folder) / "0")
        tokens = sum(len(data.split(name)) for name in ("train", "val"))
        if 2 * tokens != os.path.getsize(Path(folder) / "tokens.bin"):
            sys.exit("prepare and the plain loop do not give as many tokens")
    return ratio


def _times_as_fast(ours: Callable[[], float], other: Callable[[], float], rounds: int) -> float:
    from measuring import take_turns

    take_turns({"ours": ours, "other": other}, 1)  # warms up
    seconds = take_turns({"ours": ours, "other": other}, rounds)
    return float(min(seconds["other"]) / min(seconds["ours"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="checkout of nanoGPT: its ratio too")
    parser.add_argument("--write", action="store_true", help="commit to what is measured now")
    options = parser.parse_args()
    from measuring import machine

    if not options.write and not COMMITTED.exists():
        parser.error(f"{COMMITTED.relative_to(ROOT)} is missing, so nothing can have fallen; --write makes it")
    began = time.monotonic()
    measured = {name: round(value, 4) for name, value in measure(options.peer).items()}
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))["ratios"] if COMMITTED.exists() else {}
    if not options.peer:
        committed = {name: value for name, value in committed.items() if "nanoGPT" not in name}
    print("\n".join(report(committed, measured)))
    evidence = {
        "benchmark": "bench_check",
        "command": "python tools/bench_check.py --write" + (" --peer PATH" if options.peer else ""),
        "machine": machine("cpu"),
        "ratios": measured,
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(evidence))
    if options.write:
        COMMITTED.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    elif fallen(committed, measured):
        sys.exit(1)


if __name__ == "__main__":
    main()
