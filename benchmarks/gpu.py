"""Everything that is claimed of one GPU, in under 8 minutes: kernel, training, prefill and decoding, memory.

    python benchmarks/gpu.py --out results/gpu-h200.json [--peer PATH_TO_A_NANOGPT_CHECKOUT] [--minutes 7.5]
    python benchmarks/gpu.py --rehearse        end to end on the CPU, tiny: its figures mean nothing

Needs torch, numpy and safetensors alone, Triton as torch brings it, and no network. What matters most comes first. Each
section is checked (both sides compute the same numbers) before it is timed; sides take turns, in an order that rotates;
ratios are taken within a round; compilation and warm-up come before. A section that fails is named and the next begins;
at the time limit everything is left where it is. The file is written after every row, and a second call with the same
file goes on with the sections that it lacks. Prints a table, targets beside what was measured, then one JSON line.

Training is one micro-batch a step: bf16 autocast over float32 weights, compiled, clipped, fused AdamW. FLOPs are those
of `qurve.accounting` (6 N + 12 L D T for a plain transformer, the head counted, attention unmasked); their share of the
peak (MFU) is stated for devices whose peak is known there.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import peers
import torch
import torch.nn.functional as F
from measuring import Results, machine, ratios, seconds_of, spread, synchronise, take_turns
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qurve.accounting import count, state_bytes, utilisation
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.projections import Bottleneck, Linear
from qurve.train.config import RunConfig, TrainConfig
from qurve.train.distributed import Loss
from qurve.train.optim import build_optimizer
from qurve.train.runtime import autocast

QUERIES = {"linear": Linear(), "nonlinear": Bottleneck()}
TARGETS = {"train 124M: MFU": 0.50, "peer 124M: linear / nanoGPT": 1.4, "train 124M: nonlinear / linear": 0.98}
CLOSE = 0.02
"""How far the first loss, compiled and in bf16, may be from the eager one of float32, in nats of about 11."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured, and how often."""

    models: dict[str, tuple[ModelConfig, int]]
    """By name: the shape, and the sequences of a micro-batch."""
    rounds: int
    steps: int
    """Steps of each side in a round."""
    batches: tuple[int, ...]
    """Sequences that are decoded at once."""
    prompt: int
    new_tokens: int
    product: int
    """Side of the square matrices of the measured peak."""
    copied: int
    """Bytes of the measured bandwidth."""
    attention: tuple[SDPBackend, ...]
    kernel: tuple[tuple[int, int, int], ...]
    """Shapes of the kernel's check: rows, D, R."""


GPU = Sizes(
    models={
        "124M": (ModelConfig(n_layers=12, d_model=768, n_heads=12, d_ff=3072), 32),
        "350M": (ModelConfig(n_layers=24, d_model=1024, n_heads=16, d_ff=4096), 16),
    },
    rounds=5,
    steps=10,
    batches=(1, 32),
    prompt=512,
    new_tokens=64,
    product=8192,
    copied=1 << 32,
    attention=(SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
    kernel=((32768, 768, 384), (16384, 1024, 512), (63, 60, 17)),
)
_TINY = ModelConfig(n_layers=1, d_model=32, n_heads=2, d_ff=64, context=32, vocab_size=128)
REHEARSAL = Sizes(
    models={"124M": (_TINY, 2), "350M": (_TINY, 1)},
    rounds=2,
    steps=1,
    batches=(1, 2),
    prompt=8,
    new_tokens=3,
    product=64,
    copied=1 << 20,
    attention=(SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
    kernel=((6, 16, 8),),
)

Step = Callable[[], Any]


class TimeUp(BaseException):
    """The time limit: no `Exception`, so that nobody on the way takes it for a failure of his own."""


@dataclasses.dataclass
class Bench:
    """What every section works with."""

    device: str
    sizes: Sizes
    results: Results
    ends: float
    """When time is up, on `time.monotonic`'s clock."""
    section: str = ""
    """The one that runs."""

    @property
    def minutes_left(self) -> float:
        return (self.ends - time.monotonic()) / 60

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """As the trainer compiles; in a rehearsal without the code generator, which takes longer than all the rest."""
        return torch.compile(function, dynamic=False, backend="inductor" if self.on_gpu else "aot_eager")

    def race(self, sides: dict[str, Step], times: int) -> dict[str, list[float]]:
        """Seconds of a call of each side, one value a round."""
        return take_turns(
            {name: partial(seconds_of, call, times, self.device) for name, call in sides.items()}, self.sizes.rounds
        )

    def add(self, **row: Any) -> None:
        self.results.add({"section": self.section, **row})

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.on_gpu else 0

    def peak_above(self, base: int) -> int | None:
        """The most bytes since `forget_peak`, those of others left out; None on a CPU."""
        return torch.cuda.max_memory_allocated() - base if self.on_gpu else None

    def forget_peak(self) -> None:
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


# ------------------------------------------------------------------------------------------------------------ sections


def kernel(bench: Bench) -> dict[str, Any]:
    """The query's head in every way it can be run: output and gradients right, or the section fails; then times."""
    from kernel import measure

    for row in measure(bench.device, bench.sizes.kernel):
        bench.add(**row)
    return {}


def peaks(bench: Bench) -> dict[str, Any]:
    """What this device reaches: a square bf16 product of random numbers, and a copy, bytes read and written counted."""
    side, length = bench.sizes.product, bench.sizes.copied // 2
    a, b = (torch.randn(side, side, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.ones(length, device=bench.device, dtype=torch.int8)
    target = torch.empty_like(source)
    sides: dict[str, Step] = {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}
    bench.race(sides, 3)  # warms up
    found = bench.race(sides, 10)
    return {
        "bf16_flops_per_s": 2 * side**3 / statistics.median(found["product"]),
        "bytes_per_s": 2 * length / statistics.median(found["copy"]),
    }


def train(bench: Bench, name: str) -> dict[str, Any]:
    """Our linear and nonlinear queries."""
    sides = {query: _side(bench, name, query) for query in QUERIES}
    seconds = _race_training(bench, name, sides)
    utilised = bench.results.find(section=bench.section, side="linear")["mfu"]
    return {"MFU": utilised, "nonlinear / linear": spread(ratios(seconds["linear"], seconds["nonlinear"]))}


def peer(bench: Bench, name: str, checkout: Path) -> dict[str, Any]:
    """Our linear query and nanoGPT, which are the same architecture."""
    theirs, (config, _) = peers.load(checkout), bench.sizes.models[name]
    difference = peers.same_loss(theirs, config, tuple(t.cpu()[:1] for t in _batch(bench, name)))
    sides = {"linear": _side(bench, name, "linear"), "nanoGPT": _side(bench, name, "linear", theirs)}
    seconds = _race_training(bench, name, sides)
    return {
        "linear / nanoGPT": spread(ratios(seconds["nanoGPT"], seconds["linear"])),
        "loss_difference": difference,
    }


def decode(bench: Bench, name: str) -> dict[str, Any]:
    """Prefill and decoding with bf16 weights, linear and nonlinear query, by batch."""
    from qurve.generate.decoder import Decoder

    sizes, found = bench.sizes, {}
    configs = {query: _config(bench, name, query) for query in QUERIES}
    models = {query: GPT(config).to(bench.device).eval() for query, config in configs.items()}
    for batch in sizes.batches:
        ids_BT, room = _ids(bench, name, batch, sizes.prompt), sizes.prompt + sizes.new_tokens

        compiled = bench.on_gpu and batch == 1  # where launches take longer than what is launched

        def decoder(query: str, batch: int = batch, room: int = room, compiled: bool = compiled) -> Decoder:
            return Decoder(models[query], batch, None, room, torch.bfloat16, compile=compiled)

        for query, model in models.items():
            _check_decoder(decoder(query), model, ids_BT)
        sides = {
            query: lambda query=query, decoder=decoder, ids_BT=ids_BT: _read_and_write(bench, decoder(query), ids_BT)
            for query in QUERIES
        }
        take_turns(sides, 1)  # warms up
        pairs = take_turns(sides, sizes.rounds)
        prefill, step = ({query: [pair[part] for pair in pairs[query]] for query in QUERIES} for part in (0, 1))
        for query, config in configs.items():
            read = 2 * (count(config).active + config.vocab_size * config.d_model)
            read += state_bytes(config, batch, sizes.prompt + sizes.new_tokens // 2, 2)
            bench.add(
                side=query,
                batch=batch,
                compiled=compiled,
                prefill_tokens_per_s=spread([batch * sizes.prompt / s for s in prefill[query]]),
                decode_tokens_per_s=spread([batch / s for s in step[query]]),
                decode_ms=spread([1e3 * s for s in step[query]]),
                decode_bytes_per_s=read / statistics.median(step[query]),
            )
        for part, times in (("prefill", prefill), ("decode", step)):
            ratio = spread(ratios(times["nonlinear"], times["linear"]))
            found[f"{part} batch {batch}: nonlinear time / linear"] = ratio
    return found


def attention(bench: Bench) -> dict[str, Any]:
    """torch's attention backends, forward and backward, at the shapes of training."""
    for name, (config, batch) in bench.sizes.models.items():
        shape = (batch, config.context, config.n_heads, config.head_width)
        qkv = [
            torch.randn(shape, device=bench.device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
            for _ in "qkv"
        ]
        given = torch.randn_like(qkv[0])

        def attend(backend: SDPBackend, qkv: list[Tensor] = qkv, given: Tensor = given) -> None:
            with sdpa_kernel(backend):
                y = F.scaled_dot_product_attention(*qkv, is_causal=True)
            torch.autograd.grad(y, qkv, given)

        sides: dict[str, Step] = {b.name: lambda b=b: attend(b) for b in bench.sizes.attention}
        for side in list(sides):
            try:
                sides[side]()
            except RuntimeError as error:  # this build or device has no such backend
                del sides[side]
                bench.add(model=name, side=side, missing=str(error)[:200])
        bench.race(sides, 2)  # warms up
        for side, seconds in bench.race(sides, 5).items():
            ms = spread([1e3 * s for s in seconds])
            bench.add(model=name, side=side, ms=ms)
    return {}


# ------------------------------------------------------------------------------------------------------------ training


@dataclasses.dataclass
class Side:
    step: Step
    facts: dict[str, Any]
    """What is known before the race."""


def _config(bench: Bench, name: str, query: str) -> ModelConfig:
    return dataclasses.replace(bench.sizes.models[name][0], query=QUERIES[query])


def _ids(bench: Bench, name: str, batch: int, length: int) -> Tensor:
    ids = min(bench.sizes.models[name][0].vocab_size, 50257)  # without the padded ones
    return torch.randint(0, ids, (batch, length), generator=torch.Generator().manual_seed(0)).to(bench.device)


def _batch(bench: Bench, name: str) -> tuple[Tensor, Tensor]:
    config, sequences = bench.sizes.models[name]
    ids = _ids(bench, name, sequences, config.context + 1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _side(bench: Bench, name: str, query: str, theirs: peers.Peer | None = None) -> Side:
    """Our model with this query, or nanoGPT's: built, compiled, warm. Its first loss must be the eager float32 one."""
    settings = TrainConfig(device=bench.device, precision="bf16")
    run = RunConfig(_config(bench, name, query), train=settings)
    bench.forget_peak()
    base, batch = bench.allocated(), _batch(bench, name)
    model = GPT(run.model) if theirs is None else peers.build(theirs, run.model)
    model.to(bench.device)
    optimizer = build_optimizer(model, settings) if theirs is None else peers.optimizer(model, bench.device)
    module = Loss(model) if isinstance(model, GPT) else model
    compiled = bench.compiled(module)

    def loss_by(forward: Callable[..., Any]) -> Tensor:
        found = forward(*batch)
        return found[1] if theirs else found

    def step() -> Tensor:
        with autocast(run):
            loss = loss_by(compiled)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with torch.no_grad():
        exact = loss_by(module).item()
    began = time.perf_counter()
    found = step().item()
    first = time.perf_counter() - began
    if not abs(found - exact) <= CLOSE:
        raise AssertionError(f"the first loss is {found}, and {exact} in float32 without compilation")
    bench.forget_peak()
    seconds_of(step, 3, bench.device)
    facts = {"first_step_s": round(first, 1), "first_loss_difference": found - exact}
    return Side(step, facts | {"peak_bytes": bench.peak_above(base)})


def _race_training(bench: Bench, name: str, sides: dict[str, Side]) -> dict[str, list[float]]:
    """Seconds of a step; adds a row for each side."""
    seconds = bench.race({side: found.step for side, found in sides.items()}, bench.sizes.steps)
    config, sequences = bench.sizes.models[name]
    tokens = sequences * config.context
    for side, found in sides.items():
        flops = count(_config(bench, name, side if side in QUERIES else "linear")).flops_per_token
        speeds = [tokens / s for s in seconds[side]]
        rate = flops * statistics.median(speeds)
        bench.add(
            side=side,
            sequences=sequences,
            tokens_per_s=spread(speeds),
            flops_per_s=rate,
            mfu=utilisation(bench.results.head["machine"]["gpu"], rate, "bf16"),
            **found.facts,
        )
    return seconds


# ------------------------------------------------------------------------------------------------------------ decoding


@torch.no_grad()
def _check_decoder(decoder: Any, model: GPT, ids_BT: Tensor) -> None:
    """Its last logits after a prompt and one token, against the whole model's: no farther from float32's than twice
    the model's own in bf16."""
    exact_BV = model(ids_BT)[:, -1].float()
    with torch.autocast(ids_BT.device.type, torch.bfloat16):
        plain_BV = model(ids_BT)[:, -1].float()
    decoder.read(ids_BT[:, :-1])
    errors = [(found - exact_BV).norm().item() for found in (decoder.read(ids_BT[:, -1:]).float(), plain_BV)]
    if errors[0] > 2 * errors[1]:
        raise AssertionError(f"decoding is off by {errors[0]:.3g}, and the model in bf16 by {errors[1]:.3g}")


def _read_and_write(bench: Bench, decoder: Any, ids_BT: Tensor) -> tuple[float, float]:
    """Seconds of the prompt, and of one token after it, greedy."""
    synchronise(bench.device)
    began = time.perf_counter()
    logits_BV = decoder.read(ids_BT)
    synchronise(bench.device)
    prompt = time.perf_counter() - began

    def write() -> None:
        nonlocal logits_BV
        logits_BV = decoder.read(logits_BV.argmax(-1, keepdim=True))

    return prompt, seconds_of(write, bench.sizes.new_tokens, bench.device)


# ----------------------------------------------------------------------------------------------------------- the whole


def run(bench: Bench, sections: dict[str, tuple[float, Callable[[], dict[str, Any]] | None]]) -> list[str]:
    """Every section that has time left and was not concluded before; the names of those that failed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeUp

    failed: list[str] = []
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(60 * bench.minutes_left, 0.1))
    try:
        for name, (minutes, section) in sections.items():
            if section is None or name in bench.results.summary:
                continue
            if minutes > bench.minutes_left:
                print(f"{name}: left out, it wants {minutes} minutes and {bench.minutes_left:.1f} are left", flush=True)
                continue
            began, bench.section = time.monotonic(), name
            bench.results.forget(section=name)  # of an earlier call that was cut
            try:
                bench.results.conclude(name, section())
            except (Exception, SystemExit) as error:
                traceback.print_exc()
                bench.add(failed=f"{type(error).__name__}: {error}"[:500])
                failed.append(name)
            torch.compiler.reset()
            gc.collect()  # compiled models hang together in circles
            bench.forget_peak()
            print(f"{name}: {time.monotonic() - began:.0f} s, {bench.minutes_left:.1f} minutes left", flush=True)
    except TimeUp:
        print("time is up: what was not measured by now is left out", flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return failed


def show(bench: Bench) -> None:
    """The table."""
    for row in bench.results.rows:
        where = f"{row['section']:>11} {row.get('model', ''):>4} {row.get('side', ''):>20}"
        if (trouble := row.get("failed") or row.get("missing")) is not None:
            print(f"{where}  {trouble}")
        elif "errors" in row:
            shape = "{rows:,} x {d}, R {r}, {dtype}".format(**row)
            times = (f"{way} {found['us']['median']:,.0f} µs" for way, found in row["forward_backward"].items())
            print(f"{where}  {shape}: {', '.join(times)}; errors {row['errors']} of torch's own, at most 2")
        elif "mfu" in row:
            share = "MFU not known" if row["mfu"] is None else f"MFU {row['mfu']:.3f}"
            memory = "" if row["peak_bytes"] is None else f"   at most {row['peak_bytes'] / 2**30:.1f} GiB"
            print(f"{where}  {_words(row['tokens_per_s'], ',.0f')} tokens/s   {share}{memory}")
        elif "batch" in row:
            read, write = row["prefill_tokens_per_s"]["median"], row["decode_tokens_per_s"]["median"]
            print(f"{where}  batch {row['batch']:3}   prefill {read:11,.0f}   decode {write:9,.0f} tokens/s")
        elif "ms" in row:
            print(f"{where}  {_words(row['ms'], '.2f')} ms")
    found = {
        f"{section}: {name}": value["median"] if isinstance(value, dict) else value
        for section, values in bench.results.summary.items()
        for name, value in values.items()
        if value is not None
    }
    for name in {**found, **TARGETS}:
        value = f"{found[name]:.4g}" if name in found else "not measured"
        target = f"   target: at least {TARGETS[name]}" if name in TARGETS else ""
        print(f"{name:>60}  {value}{target}")


def _words(found: dict[str, float], form: str) -> str:
    return f"{found['median']:{form}} ({found['low']:{form}} to {found['high']:{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file, written after every row")
    parser.add_argument("--peer", type=Path, help="checkout of nanoGPT; without it our own two are compared")
    parser.add_argument("--minutes", type=float, default=7.5, help="the time limit, start-up apart")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny shapes")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here; --rehearse runs everything on the CPU, tiny, for no figures")
    device = "cpu" if options.rehearse else "cuda"
    head = {"benchmark": "gpu", "command": "python benchmarks/gpu.py", "rehearsal": options.rehearse}
    head |= {"machine": machine(device), "cuda": torch.version.cuda}
    ends = time.monotonic() + 60 * options.minutes
    bench = Bench(device, REHEARSAL if options.rehearse else GPU, Results(options.out, head), ends)

    failed = run(
        bench,
        {  # in order of importance, each with the minutes that it wants
            "peaks": (0.1, partial(peaks, bench)),
            "kernel": (1.2, partial(kernel, bench)),
            "train 124M": (1.5, partial(train, bench, "124M")),
            "peer 124M": (1.5, partial(peer, bench, "124M", options.peer) if options.peer else None),
            "train 350M": (2.0, partial(train, bench, "350M")),
            "decode 124M": (1.0, partial(decode, bench, "124M")),
            "attention": (0.2, partial(attention, bench)),
            "peer 350M": (2.0, partial(peer, bench, "350M", options.peer) if options.peer else None),
        },
    )
    show(bench)
    bench.results.print_line()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
