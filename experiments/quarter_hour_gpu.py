"""A fair comparison in ten minutes of one large GPU: an equal search, then as many fresh seeds as fit.

Five arms at 11 M non-embedding parameters: baseline, MLP 4.75, `W_Q = I` with the larger MLP, QK-norm, and the paper's
layer. Each is given the same four peak rates, with floors at a tenth, on one seed; then each trains at its own best
with fresh seeds, seed by seed through all arms, until the time is up. Chosen on validation, reported on test as well.
10 M tokens a run: 35 runs are an equal search and three seeds.

Needs torch, numpy and safetensors alone, and no network. The text comes as one file of token ids, under 45 MB, that is
made before, where the package is installed whole:

    python experiments/quarter_hour_gpu.py --make-data TEXT.jsonl.zst … --data tokens.safetensors
    python experiments/quarter_hour_gpu.py --data tokens.safetensors --out results/quarter-hour-gpu.json
    python experiments/quarter_hour_gpu.py --rehearsal --out FILE        end to end on the CPU, tiny: means nothing

The file is written after every run. A second call with the same file makes the runs that it lacks; one that was cut
short begins anew. Nothing is compiled: at this size it would take longer than it saves.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from qurve.accounting import count
from qurve.data.loader import TokenData
from qurve.errors import BadInput, Diverged
from qurve.files import write_atomic
from qurve.model.config import ModelConfig
from qurve.projections import Bottleneck, Identity
from qurve.runfolder import RunFolder
from qurve.study.paired import holm
from qurve.train.config import DataConfig, EvalConfig, RunConfig, TrainConfig
from qurve.train.loop import train

EVIDENCE = Path(__file__).parents[1] / "results" / "quarter-hour-gpu.json"
FORMAT = 1
MOST_BYTES = 45_000_000
HELD_OUT = 400_000
"""Tokens of validation and of test, each."""
SEARCH_SEED = 101
FLOOR = 0.1
LEAST_SEEDS = 3
"""Fewer decide nothing."""
MARGIN = 1.3
"""A run is begun when so many times the longest one's time is left."""


@dataclass(frozen=True)
class Plan:
    """What is trained, and how long."""

    base: RunConfig
    rates: tuple[float, ...]
    most_seeds: int
    minutes: float


GPU = Plan(
    RunConfig(
        ModelConfig(n_layers=6, d_model=384, n_heads=6, d_ff=1536, context=512),
        DataConfig(),
        TrainConfig(steps=300, tokens_per_step=32_768, warmup_steps=15, compile=False, keep=1, log_every=300),
        EvalConfig(every=100, windows=512, splits=("val", "test")),
    ),
    rates=(1e-3, 2e-3, 4e-3, 8e-3),
    most_seeds=20,
    minutes=9.5,
)
REHEARSAL = Plan(
    RunConfig(
        ModelConfig(n_layers=1, d_model=32, n_heads=2, d_ff=128, context=16),
        DataConfig(),
        TrainConfig(steps=2, tokens_per_step=32, warmup_steps=1, compile=False, device="cpu", threads=1, keep=1),
        EvalConfig(every=2, windows=2, splits=("val", "test")),
    ),
    rates=(1e-3, 1e-2),
    most_seeds=2,
    minutes=1.0,
)


def arms(model: ModelConfig) -> dict[str, ModelConfig]:
    """With `W_Q = I` the authors halve the attention scale; its larger MLP gets back what the queries gave up."""
    changes: dict[str, dict[str, Any]] = {
        "baseline": {},
        "mlp-4.75": {"d_ff": model.d_ff * 19 // 16},
        "identity-mlp-4.5": {
            "query": Identity(),
            "attention_scale": model.scale / 2,
            "d_ff": model.d_ff * 9 // 8,
        },
        "qk-norm": {"qk_norm": True},
        "res-gelu": {"query": Bottleneck()},
    }
    return {name: dataclasses.replace(model, **change) for name, change in changes.items()}


# ------------------------------------------------------------------------------------------------------------- the data


def make_data(texts: list[str], file: Path) -> None:
    """Tokenise the texts, and put as much of them into one file as may be carried."""
    from qurve.data.prepare import prepare

    with tempfile.TemporaryDirectory() as folder:
        prepare(texts, Path(folder) / "data", tokenizer="gpt2", split=0.02)
        data = TokenData.open(Path(folder) / "data")
        room = MOST_BYTES // 2 - 2 * HELD_OUT - 10_000
        tensors = {}
        for name, most in (("train", room), ("val", HELD_OUT), ("test", HELD_OUT)):
            split = data.split(name)
            tokens, _ = split.windows(np.array([0]), min(most, len(split) - 1))
            tensors[name] = tokens[0].astype(np.uint16)
    save_file(tensors, file, metadata={"tokenizer": "gpt2", "format": str(FORMAT)})
    said = ", ".join(f"{name} {len(ids):,}" for name, ids in tensors.items())
    print(f"{file}: {file.stat().st_size:,} bytes; tokens: {said}")


def invented() -> dict[str, Any]:
    """Tokens of no meaning, for a rehearsal."""
    draw = np.random.default_rng(0)
    return {name: draw.integers(0, 300, 2_000).astype(np.uint16) for name in ("train", "val", "test")}


def unpacked(tensors: dict[str, Any], folder: Path) -> TokenData:
    """The tokens as files that can be trained on."""
    for name, ids in tensors.items():
        ids.astype("<u2").tofile(folder / f"{name}.bin")
    return TokenData.open(folder)


# ------------------------------------------------------------------------------------------------------------- the runs


class TimeUp(BaseException):
    """The time limit: no `Exception`, so that nobody on the way takes it for a failure of his own."""


@contextlib.contextmanager
def until(ends: float) -> Iterator[None]:
    """Raise `TimeUp` within the block when `time.monotonic()` reaches `ends`."""

    def up(number: int, frame: FrameType | None) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, up)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, ends - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Job:
    arm: str
    lr: float
    seed: int


def to_do(plan: Plan, done: list[dict[str, Any]]) -> Job | None:
    """The next run, by what has been made: the search, rate by rate, then seeds at each arm's best rate."""
    made = {(run["arm"], run["lr"], run["seed"]) for run in done}
    names = list(arms(plan.base.model))
    for lr in plan.rates:
        for arm in names:
            if (arm, lr, SEARCH_SEED) not in made:
                return Job(arm, lr, SEARCH_SEED)
    best = chosen(plan, done)
    for seed in range(1, plan.most_seeds + 1):
        for arm in names:
            if (lr := best[arm]) is not None and (arm, lr, seed) not in made:
                return Job(arm, lr, seed)
    return None


def chosen(plan: Plan, done: list[dict[str, Any]]) -> dict[str, float | None]:
    """Each arm's rate of the lowest validation loss; None where every one diverged, or the search is not over."""
    best: dict[str, float | None] = {}
    for arm in arms(plan.base.model):
        tried = {run["lr"]: run["val"] for run in done if run["arm"] == arm and run["seed"] == SEARCH_SEED}
        finite = {lr: loss for lr, loss in tried.items() if loss is not None}
        over = len(tried) == len(plan.rates)
        best[arm] = min(finite, key=lambda lr: finite[lr]) if over and finite else None
    return best


def config_of(plan: Plan, job: Job) -> RunConfig:
    settings = dataclasses.replace(plan.base.train, lr=job.lr, min_lr=FLOOR * job.lr, seed=job.seed)
    return dataclasses.replace(plan.base, model=arms(plan.base.model)[job.arm], train=settings)


def made(plan: Plan, job: Job, data: TokenData) -> dict[str, Any]:
    """Train, and keep what the run says; its folder goes. Losses are None for a run that diverged."""
    config, started = config_of(plan, job), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run, why = RunFolder(Path(folder) / "run"), None
        try:
            train(config, run.path, data)
        except Diverged as error:
            why = str(error)
        curves = {
            split: [[line["step"], line["loss"]] for line in run.eval_lines(split)] for split in config.eval.splits
        }
        last, environment = run.train_lines()[-1:], run.environment()
    return {
        **dataclasses.asdict(job),
        **{split: None if why else curve[-1][1] for split, curve in curves.items()},
        "diverged": why,
        "curves": curves,
        "tokens_per_s": round(last[0]["tokens"] / last[0]["seconds"]) if last else None,
        "peak_memory_bytes": environment.get("peak_memory_bytes"),
        "seconds": round(time.monotonic() - started, 2),
    }


def edges(plan: Plan, best: dict[str, float | None]) -> list[str]:
    """The arms that are best at the lowest or the highest rate tried: a better one may lie outside."""
    return [arm for arm, lr in best.items() if lr in (min(plan.rates), max(plan.rates))]


def within(t: float, freedom: int) -> float:
    """The chance that Student's t lies between `-t` and `t`: Abramowitz and Stegun 26.7.3 and 26.7.4, for there may be
    no SciPy here."""
    angle = math.atan(t / math.sqrt(freedom))
    term = math.cos(angle) if freedom % 2 else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if freedom % 2 else math.sin(angle) * total


def paired(differences: list[float]) -> dict[str, float | None]:
    """Mean, 95 % t interval and the paired t test's p (None with fewer than two), as `qurve.study.paired` has them."""
    mean, n = statistics.fmean(differences), len(differences)
    if n < 2:
        return {"diff": mean, "low": None, "high": None, "p": None}
    error, low, high = statistics.stdev(differences) / math.sqrt(n), 0.0, 13.0
    while high - low > 1e-9:  # 12.7 is the largest that it can be, with two differences
        middle = (low + high) / 2
        low, high = (low, middle) if within(middle, n - 1) > 0.95 else (middle, high)
    p = float(mean == 0) if error == 0 else 1 - within(abs(mean) / error, n - 1)
    return {"diff": mean, "low": mean - low * error, "high": mean + low * error, "p": max(0.0, p)}


def summary(plan: Plan, done: list[dict[str, Any]]) -> dict[str, Any]:
    """Rates chosen, and each arm's losses less the baseline's for the seeds that every arm has finished.

    The interval is the arm's own, p is corrected by Holm for all arms. No p for an arm that broke with some seed, or
    where the baseline did, nor with fewer than three seeds.
    """
    best = chosen(plan, done)
    broken = {
        (run["arm"], run["seed"])
        for run in done
        if run["seed"] != SEARCH_SEED and run["lr"] == best[run["arm"]] and run["diverged"] is not None
    }
    losses = {
        (run["arm"], run["seed"]): run
        for run in done
        if run["seed"] != SEARCH_SEED and run["lr"] == best[run["arm"]] and run["diverged"] is None
    }
    trained = [arm for arm, lr in best.items() if lr is not None]
    seeds = [n for n in range(1, plan.most_seeds + 1) if trained and all((arm, n) in losses for arm in trained)]
    found: dict[str, Any] = {"chosen": best, "edges": edges(plan, best), "seeds": seeds, "arms": {}}
    found["diverged"] = [f"{arm}, seed {seed}" for arm, seed in sorted(broken)]
    for arm in trained if seeds and "baseline" in trained else ():
        of = found["arms"][arm] = {}
        for split in plan.base.eval.splits:
            differences = [losses[arm, n][split] - losses["baseline", n][split] for n in seeds]
            of[split] = statistics.fmean(losses[arm, n][split] for n in seeds)
            of[f"{split}_differences"] = differences
        of |= paired(of["test_differences"])
        if len(seeds) < LEAST_SEEDS or {arm, "baseline"} & {name for name, _ in broken}:
            of["p"] = None
    others = [arm for arm in found["arms"] if arm != "baseline"]
    for arm, p_holm in zip(others, holm([found["arms"][arm]["p"] for arm in others]), strict=True):
        found["arms"][arm]["p_holm"] = p_holm
    return found


# ------------------------------------------------------------------------------------------------------------- the file


def head_of(plan: Plan, data: TokenData) -> dict[str, Any]:
    """What a file's runs have in common: it is gone on with only where all of this is the same."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = plan.base
    return {
        "format": FORMAT,
        "command": "python experiments/quarter_hour_gpu.py",
        "rehearsal": plan is REHEARSAL,
        "machine": {
            "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
            "platform": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "data": {"fingerprint": data.fingerprint, "tokens": {name: len(data.split(name)) for name in data.splits}},
        "steps": config.train.steps,
        "tokens_per_step": config.train.tokens_per_step,
        "context": config.model.context,
        "rates": list(plan.rates),
        "floor": FLOOR,
        "search_seed": SEARCH_SEED,
        "non_embedding": {name: count(model).non_embedding for name, model in arms(config.model).items()},
    }


def begun(file: Path, head: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs that the file has already. Raises `BadInput` for the file of another measurement."""
    if not file.exists():
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        runs: list[dict[str, Any]] = found["runs"]
        other = [key for key in head if found[key] != head[key]]
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{file} is no evidence of this script ({error}); name another --out") from None
    if other:
        raise BadInput(f"{file} is of another measurement: its {other[0]} differs; name another --out")
    return runs


def go(plan: Plan, data: TokenData, file: Path, ends: float) -> list[dict[str, Any]]:
    """Make runs until there are none left, or no time; the file has each as it comes."""
    head = json.loads(json.dumps(head_of(plan, data)))
    done = begun(file, head)
    longest = 0.0
    while (job := to_do(plan, done)) is not None:
        if time.monotonic() + MARGIN * longest >= ends:
            print("the time is up")
            break
        try:
            with until(ends):
                run = made(plan, job, data)
        except TimeUp:
            print(f"the time is up; {job.arm} at {job.lr:g}, seed {job.seed}, is not finished and not kept")
            break
        done.append(run)
        longest = max(longest, run["seconds"])
        write_atomic(file, json.dumps({**head, "summary": summary(plan, done), "runs": done}, indent=1) + "\n")
        loss = run["diverged"] or f"val {run['val']:.4f}, test {run['test']:.4f}"
        what = "search" if job.seed == SEARCH_SEED else "compare"
        print(f"{what} {job.arm} {job.lr:g} seed {job.seed}: {loss} ({run['seconds']:.1f} s)", flush=True)
    return done


def show(plan: Plan, done: list[dict[str, Any]]) -> None:
    found = summary(plan, done)
    print(f"{len(done)} runs; seeds that every arm has finished: {len(found['seeds'])}")
    for arm, of in found["arms"].items():
        said = f"{arm:18} rate {found['chosen'][arm]:g}  test {of['test']:.4f}"
        if arm != "baseline":
            between = "" if of["low"] is None else f" [{of['low']:+.4f}, {of['high']:+.4f}]"
            p = "no p" if of["p_holm"] is None else f"p (Holm) {of['p_holm']:.4f}"
            said += f"  against the baseline {of['diff']:+.4f}{between}  {p}"
        print(said)
    for what, names in (("best at the edge of the rates tried", found["edges"]), ("diverged", found["diverged"])):
        if names:
            print(f"{what}: {'; '.join(names)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the file of token ids")
    parser.add_argument("--make-data", nargs="+", metavar="TEXT", help="make that file of these texts, and end")
    parser.add_argument("--rehearsal", action="store_true", help="all of it on the CPU, tiny, on invented tokens")
    parser.add_argument("--minutes", type=float, help="in all; default: 9.5 (rehearsal: 1)")
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    args = parser.parse_args()
    started = time.monotonic()
    if args.make_data:
        if args.data is None:
            parser.error("--make-data needs --data, the file to write")
        make_data(args.make_data, args.data)
        return
    if args.rehearsal == (args.data is not None):
        parser.error("give either --data FILE or --rehearsal")
    if args.rehearsal and args.out == EVIDENCE:
        parser.error("a rehearsal is no evidence: give it an --out of its own")
    if not args.rehearsal and not torch.cuda.is_available():
        parser.error("there is no GPU here; --rehearsal goes through all of it on the CPU")
    plan = REHEARSAL if args.rehearsal else GPU
    tensors = invented() if args.rehearsal else load_file(args.data)
    with tempfile.TemporaryDirectory() as folder:
        data = unpacked(tensors, Path(folder))
        minutes = plan.minutes if args.minutes is None else args.minutes
        show(plan, go(plan, data, args.out, started + 60 * minutes))


if __name__ == "__main__":
    try:
        main()
    except BadInput as error:
        sys.exit(str(error))
