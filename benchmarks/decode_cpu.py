"""Decoding on the CPU: our linear and nonlinear queries, nanoGPT's `generate` and Hugging Face's, in one process.

    python benchmarks/decode_cpu.py --peer PATH_TO_A_NANOGPT_CHECKOUT --rounds 1
    python benchmarks/decode_cpu.py --hugging-face --rounds 5

All sides have the same weights (but for the nonlinear query's own), which is checked first: the linear query's logits
and greedy tokens against the other's, and the logits of each side as it is timed against the model's own in float32.
Warm-up and compilation come before the first round and are stated apart. The sides
take turns, in an order that rotates from round to round; ratios are taken within a round, and the memory's bandwidth
(the sum of a large array) is measured after each turn. Prints a table, then one JSON line.

Everybody's `generate` is timed as a whole; ours prepares the weights each time. nanoGPT samples 512 tokens after one,
at 124 M parameters for about three minutes, so give that run few rounds. Hugging Face's GPT-2, whose activation is the
exact GELU here as in ours, continues 128 tokens greedily: a call for one token is the prompt, and what a longer call
takes more is the steps.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peers
import torch
from measuring import command, machine, read_bandwidth
from torch import Tensor, nn
from train_cpu import in_words

from qurve.convert import load_checkpoint
from qurve.files import write_atomic
from qurve.generate import Sampling, generate
from qurve.generate.decoder import Decoder
from qurve.model.gpt import GPT
from qurve.projections import Bottleneck
from qurve.train.runtime import available_cores

Side = Callable[[], dict[str, float]]
"""Runs once; seconds per `step` (one token of each sequence) and, where it is timed apart, for the `prompt`."""
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
PROMPT, TOLERANCE = 128, 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--peer", type=Path, help="checkout of nanoGPT, to race against its generate")
    which.add_argument("--hugging-face", action="store_true", help="race against transformers' generate")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--batches", type=int, nargs="+", default=[1], help="for Hugging Face: 1 8")
    parser.add_argument("--new", type=int, default=32, help="new tokens in a round; nanoGPT is given 512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--out", type=Path, help="write the JSON there, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    new = 512 if options.peer else options.new

    shape = {
        "block_size": options.context,
        "vocab_size": options.vocab,
        "n_layer": options.layers,
        "n_head": options.heads,
        "n_embd": options.width,
    }
    peer, linear = _nanogpt(options.peer, shape) if options.peer else _hugging_face(shape)
    models = {"linear": linear, "nonlinear": _with_nonlinear_queries(linear)}
    differences = _same_tokens(peer, linear)

    ways = ("eager",) if options.eager else ("compiled",) if options.peer else ("eager", "compiled")
    sides: dict[str, Side] = {}
    bytes_per_step, setup = {}, {}
    for batch in options.batches:
        for precision, dtype in DTYPES.items():
            if options.hugging_face:
                sides[f"hugging-face {precision} {batch}"] = _TheirGenerate(peer, dtype, batch, new)
            for query, model in models.items():
                for how in ways if batch == 1 else ("eager",):
                    name, race = f"{query} {how} {precision} {batch}", "nanogpt" if options.peer else "hugging-face"
                    sides[name] = ours = _Ours(model, dtype, batch, new, how == "compiled", race)
                    bytes_per_step[name], setup[name] = ours.bytes_per_step, ours.setup
                    differences[name] = ours.error
    if options.peer:
        sides["nanogpt float32 1"] = _NanoGenerate(peer, new)
    rounds, bandwidth = _race(sides, options.rounds)

    found = {name: {what: statistics.median(v) for what, v in timed.items()} for name, timed in rounds.items()}
    shares = {
        name: [size / t / b for t, b in zip(rounds[name]["step"], bandwidth[name], strict=True)]
        for name, size in bytes_per_step.items()
    }
    read = [b for measured in bandwidth.values() for b in measured]
    ratios = _ratios(rounds)
    print(f"memory bandwidth {in_words([b / 1e9 for b in read], '6.1f')} GB/s")
    for name, timed in rounds.items():
        batch = int(name.split()[-1])
        speed = in_words([batch / t for t in timed["step"]], "7.1f")
        prompt = f"   prompt of {PROMPT}: {found[name]['prompt']:6.3f} s" if "prompt" in timed else ""
        of = f"   {statistics.median(shares[name]):.0%} of the bandwidth" if name in shares else ""
        print(f"{name:>30}  {speed} tokens/s{prompt}{of}")
    for name, values in ratios.items():
        print(f"{name:>60}  {in_words(values, '7.3f')}")
    report = {
        "benchmark": "decode_cpu",
        "command": command(options.peer),
        "ratios": {name: statistics.median(values) for name, values in ratios.items()},
        "seconds": found,
        "bandwidth_bytes_per_s": statistics.median(read),
        "setup_seconds": setup,
        "differences": differences,
        "rounds": {**rounds, "bandwidth": bandwidth, "bandwidth_share": shares, "ratios": ratios},
        "shape": {**shape, "prompt": 1 if options.peer else PROMPT, "new": new, "rounds": options.rounds},
        "threads": options.threads,
        "machine": machine("cpu"),
    }
    print(json.dumps(report))
    if options.out:
        write_atomic(options.out, json.dumps(report, indent=1) + "\n")


# ---------------------------------------------------------------------------------------------------------------- sides


class _Ours:
    """`generate`, all that it does: preparing the weights and choosing tokens included. `race` says against whom."""

    def __init__(self, model: GPT, dtype: torch.dtype, batch: int, new: int, compiled: bool, race: str) -> None:
        self.new, self.race = new, race
        prompt_BT = torch.zeros(batch, 1, dtype=torch.long) if race == "nanogpt" else _ids(batch, PROMPT, model.config)
        sampling = Sampling() if race == "nanogpt" else Sampling(temperature=0)
        self.write = partial(generate, model, prompt_BT, sampling=sampling, dtype=dtype, compile=compiled)
        started = time.perf_counter()
        self.seconds(3)
        self.setup = time.perf_counter() - started
        decoder = Decoder(model, batch, None, 32, dtype, compile=compiled)
        self.bytes_per_step = _bytes_per_step(decoder, prompt_BT.shape[1] + new / 2)
        self.error = _error(decoder, model)

    def seconds(self, new: int) -> float:
        started = time.perf_counter()
        self.write(max_new_tokens=new)
        return time.perf_counter() - started

    def __call__(self) -> dict[str, float]:
        if self.race == "nanogpt":
            return {"step": self.seconds(self.new) / self.new}
        prompt = self.seconds(1)
        return {"prompt": prompt, "step": (self.seconds(1 + self.new) - prompt) / self.new}


ERRORS = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""How far a side's logits may be from the model's own in float32, by norm."""


@torch.no_grad()
def _error(decoder: Decoder, model: GPT) -> float:
    """By how much the logits that are timed differ from the model's own, by norm. `SystemExit` where it is too much."""
    ids_BT = _ids(decoder.batch, 12, model.config)
    found = [decoder.read(part_BT) for part_BT in ids_BT.split([8, 1, 1, 1, 1], dim=1)]
    exact_BTV = model(ids_BT)[:, 7:]
    error = ((torch.stack(found, dim=1) - exact_BTV).norm() / exact_BTV.norm()).item()
    if not error <= ERRORS[decoder.dtype]:
        raise SystemExit(f"a decoder in {decoder.dtype} is off by {error:.3g} of the logits: nothing is timed")
    return error


def _bytes_per_step(decoder: Decoder, tokens: float) -> float:
    """What one new token after so many has to read: matrices, keys and values."""
    matrices = [p for block in decoder.model.blocks for p in _read_by(block)]
    weights = sum(p.numel() * p.element_size() for p in [*matrices, decoder.model.head_weight])
    rows = sum(s.keys[:, :, 0].numel() + s.values[:, :, 0].numel() for s in decoder.cache.states)
    return weights + rows * decoder.dtype.itemsize * tokens


def _ids(batch: int, length: int, config: Any) -> Tensor:
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


def _read_by(block: nn.Module) -> list[Tensor]:
    """The matrices that one token is multiplied by, in a prepared block."""
    attention, mlp = block.attention, block.mlp
    found = [attention.query.stacked, attention.output.weight, mlp.up.weight, mlp.down.weight]
    return [*found, w2] if (w2 := attention.query.get("w2")) is not None else found


class _NanoGenerate:
    def __init__(self, model: nn.Module, new: int) -> None:
        self.model, self.new = model, new
        model.generate(torch.zeros(1, 1, dtype=torch.long), 3)

    def __call__(self) -> dict[str, float]:
        started = time.perf_counter()
        self.model.generate(torch.zeros(1, 1, dtype=torch.long), self.new)
        return {"step": (time.perf_counter() - started) / self.new}


class _TheirGenerate:
    def __init__(self, model: nn.Module, dtype: torch.dtype, batch: int, new: int) -> None:
        self.model = model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)
        self.new = new
        self.prompt = _ids(batch, PROMPT, model.config)
        self.seconds(3)

    def seconds(self, new: int) -> float:
        started = time.perf_counter()
        self.model.generate(
            self.prompt,
            attention_mask=torch.ones_like(self.prompt),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - started

    def __call__(self) -> dict[str, float]:
        prompt = self.seconds(1)
        return {"prompt": prompt, "step": (self.seconds(1 + self.new) - prompt) / self.new}


def _race(sides: dict[str, Side], rounds: int) -> tuple[dict[str, dict[str, list[float]]], dict[str, list[float]]]:
    """What every side took in every round, and the memory's bandwidth right after it; who goes first rotates."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    bandwidth: dict[str, list[float]] = {name: [] for name in sides}
    memory, names = torch.rand(1 << 27), list(sides)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for what, value in sides[name]().items():
                found[name].setdefault(what, []).append(value)
            bandwidth[name].append(read_bandwidth(memory))
    return found, bandwidth


def _ratios(rounds: dict[str, dict[str, list[float]]]) -> dict[str, list[float]]:
    """How many times as fast as the other ours is, or, of the nonlinear query, how many times as long it takes."""
    ratios: dict[str, list[float]] = {}
    for name, timed in rounds.items():
        side, *rest = name.split()
        if side == "nonlinear":
            usual = rounds[" ".join(["linear", *rest])]
            ratios[f"time of {name} to linear"] = [a / b for a, b in zip(timed["step"], usual["step"], strict=True)]
        for other, theirs in rounds.items():
            against, *its = other.split()
            if side not in ("linear", "nonlinear") or against in ("linear", "nonlinear") or its[-1] != rest[-1]:
                continue
            if against == "nanogpt" or its[0] == rest[1]:
                for what in timed.keys() & theirs.keys():
                    speedup = [b / a for a, b in zip(timed[what], theirs[what], strict=True)]
                    ratios[f"{name} against {against}, {what}"] = speedup
    return ratios


# --------------------------------------------------------------------------------------------------------------- models


def _nanogpt(checkout: Path, shape: dict[str, int]) -> tuple[nn.Module, GPT]:
    """nanoGPT's model and ours, with the same weights."""
    peer = peers.load(checkout).module
    torch.manual_seed(0)
    arguments = {**shape, "dropout": 0.0, "bias": False}
    theirs: nn.Module = peer.GPT(peer.GPTConfig(**arguments)).eval()
    return theirs, _converted(theirs.state_dict(), arguments)


def _hugging_face(shape: dict[str, int]) -> tuple[nn.Module, GPT]:
    """Hugging Face's GPT-2 and ours, with the same weights. It multiplies by its matrices from the other side."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    config = GPT2Config(
        n_positions=shape["block_size"],
        **{name: shape[name] for name in ("vocab_size", "n_layer", "n_head", "n_embd")},
        activation_function="gelu",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    theirs = GPT2LMHeadModel(config).eval()
    turned = {f"{name}.weight" for name, module in theirs.named_modules() if isinstance(module, Conv1D)}
    weights = {name: p.t().contiguous() if name in turned else p for name, p in theirs.state_dict().items()}
    return theirs, _converted(weights, {**shape, "dropout": 0.0, "bias": True})


def _converted(weights: dict[str, Tensor], arguments: dict[str, Any]) -> GPT:
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"model": weights, "model_args": arguments}, f"{folder}/ckpt.pt")
        return load_checkpoint(f"{folder}/ckpt.pt")


def _with_nonlinear_queries(linear: GPT) -> GPT:
    """The same model with the paper's queries, as they start."""
    model = GPT(dataclasses.replace(linear.config, query=Bottleneck())).eval()
    own = model.state_dict()
    model.load_state_dict({**own, **{name: p for name, p in linear.state_dict().items() if name in own}})
    return model


@torch.no_grad()
def _same_tokens(theirs: nn.Module, ours: GPT) -> dict[str, float]:
    """By how much the logits differ, and that greedy tokens do not. Too large a difference ends the benchmark."""
    ids_BT = _ids(1, 24, ours.config)
    decoder = Decoder(ours, 1, None, 64)
    logits_BV, worst = decoder.read(ids_BT), 0.0
    for _ in range(8):
        found = theirs(ids_BT)
        expected_BV = (found[0] if isinstance(found, tuple) else found.logits)[:, -1].float()
        worst = max(worst, (logits_BV - expected_BV).abs().max().item())
        token_B1 = expected_BV.argmax(-1, keepdim=True)
        if worst > TOLERANCE or not torch.equal(token_B1, logits_BV.argmax(-1, keepdim=True)):
            raise SystemExit(f"the two do not compute the same: their logits differ by {worst}")
        ids_BT, logits_BV = torch.cat([ids_BT, token_B1], dim=1), decoder.read(token_B1)
    return {"logits": worst}


if __name__ == "__main__":
    main()
