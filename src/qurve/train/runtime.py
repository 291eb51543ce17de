"""What depends on the machine: filling a configuration's open ends, and describing where a run was made."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import qurve
from qurve.accounting import count
from qurve.data.loader import TokenData
from qurve.errors import BadInput
from qurve.ops.heads import check_impl, no_triton
from qurve.train.config import Precision, RunConfig, TrainConfig
from qurve.train.distributed import ALONE, World, launched

MODEST_TOKENS = {"cpu": 16_384, "cuda": 65_536}
"""Tokens of one micro-batch at most, where none is given."""


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""glibc's names (malloc.h) for the bytes above which it returns memory, or asks for it separately."""

PEAK_RESET = Path("/proc/self/clear_refs")
"""Linux: `5` written here makes a process forget the most memory that it held."""

BYTES_PER_PARAMETER = 16
"""Weight, gradient and AdamW's two moments, in float32."""


def resolve(config: RunConfig, data: TokenData, world: World = ALONE, before: TrainConfig | None = None) -> RunConfig:
    """The configuration with device, precision, compilation, threads, micro-batch and data decided.

    `before` is what was decided for the same run earlier, and fills what `config` leaves open. Raises `BadInput` for
    what this machine or this data cannot do.
    """
    train = config.train if before is None else _as_before(config.train, before)
    device = resolve_device(train.device)
    kind = device.partition(":")[0]
    sequences = config.sequences
    if train.min_lr > train.lr:
        raise BadInput(f"train.min_lr = {train.min_lr} is above the peak, train.lr = {train.lr}; lower it, too")
    check_processes(config, world)
    share = sequences // world.size
    micro_batch = train.micro_batch or modest_micro_batch(config, kind, share)
    if share % micro_batch:
        of = "the step's" if world.size == 1 else f"each of the {world.size} processes'"
        raise BadInput(f"train.micro_batch = {micro_batch} does not divide {of} {share} sequences")
    needed = BYTES_PER_PARAMETER * count(config.model).total
    if kind == "cpu" and needed > (memory := physical_memory()):
        raise BadInput(
            f"the model needs {needed / 1e9:,.0f} GB for its weights, gradients and optimiser; "
            f"this machine has {memory / 1e9:,.0f} GB; make it smaller"
        )
    if data.n_ids > config.model.vocab_size:
        padded = -(-data.n_ids // 64) * 64
        raise BadInput(
            f"{data.folder} has {data.n_ids:,} token ids, the model's vocabulary only {config.model.vocab_size:,}; "
            f"add --set model.vocab_size={padded}"
        )
    train.objective.check_data(config.model, data.n_ids)
    check_heads(config, kind)
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, path=str(data.folder), fingerprint=data.fingerprint),
        train=dataclasses.replace(
            train,
            device=device,
            precision=resolve_precision(train.precision, kind),
            compile=train.compile and (kind == "cuda" or compiler() is not None),
            threads=train.threads or max(1, available_cores() // world.local_size),
            micro_batch=micro_batch,
        ),
    )


def modest_micro_batch(config: RunConfig, kind: str, share: int) -> int:
    """The most sequences that divide a process's `share` of a step, and are no more than the device takes well."""
    modest = max(1, MODEST_TOKENS[kind] // config.model.context)
    return next(n for n in range(min(share, modest), 0, -1) if share % n == 0)


def check_processes(config: RunConfig, world: World) -> None:
    """Raise `BadInput` for processes that cannot share this run."""
    train, sequences = config.train, config.sequences
    if sequences % world.size:
        raise BadInput(
            f"a step's {sequences} sequences ({train.tokens_per_step:,} tokens) do not divide among {world.size} "
            f"processes; take a number of processes that divides {sequences}, or another train.tokens_per_step"
        )
    if world.size > 1 and train.parallel is None:
        raise BadInput(f"{world.size} processes were started for one run; add --parallel ddp or --parallel fsdp")
    if train.parallel is not None and not launched():
        raise BadInput(f"--parallel {train.parallel} is for several processes: start them with torchrun")


def check_heads(config: RunConfig, kind: str) -> None:
    """Raise `BadInput` where the model's heads cannot run as `train.head_impl` says, on a device of this kind."""
    impl, name = config.train.head_impl, "train.head_impl"
    if impl == "compiled" and kind == "cpu" and compiler() is None:
        raise BadInput(f"{name} = 'compiled' needs the C++ compiler {_compiler_name()}; {name} = 'auto' needs none")
    for layer in range(config.model.n_layers if impl == "triton" else 0):
        for place, (projection, dims) in config.model.projections(layer).items():
            if projection.heavy_head:
                reason = projection.triton_refusal(dims) or no_triton(kind)
                check_impl(impl, reason and f"model.{place} in block {layer}: {reason}", name)


def _as_before(train: TrainConfig, before: TrainConfig) -> TrainConfig:
    return dataclasses.replace(
        train,
        device=before.device if train.device == "auto" else train.device,
        precision=before.precision if train.precision == "auto" else train.precision,
        compile=train.compile and before.compile,
        threads=train.threads or before.threads,
        micro_batch=train.micro_batch or before.micro_batch,
    )


def physical_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resolve_device(device: str) -> str:
    found = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if found else "cpu"
    if device.startswith("cuda"):
        index = int(device.partition(":")[2] or 0)
        if not found or index >= torch.cuda.device_count():
            raise BadInput(f"train.device = {device!r}, but torch finds {torch.cuda.device_count()} CUDA devices here")
    return device


def resolve_precision(precision: Precision, kind: str) -> Precision:
    """`auto` takes bf16 where the hardware multiplies it: CUDA since Ampere, CPUs with avx512_bf16 or AMX."""
    if precision != "auto":
        return precision
    if kind == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bf16" if cpu_multiplies_bf16() else "float32"


def cpu_multiplies_bf16() -> bool:
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name)() for name in probes if hasattr(torch.cpu, name))


def compiler() -> str | None:
    """The C++ compiler that `torch.compile` calls on the CPU, or None: it looks for this one alone."""
    return shutil.which(_compiler_name())


def no_compiler() -> str:
    """What a user is told whose training was to be compiled and cannot be."""
    return (
        f"no C++ compiler found (looked for {_compiler_name()}; the variable CXX names another one, clang++ say): "
        "training runs eager, which is slower; the time left is shown as it goes"
    )


def _compiler_name() -> str:
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def available_cores() -> int:
    """Cores that this process may use (not all that the machine has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(config: RunConfig, world: World = ALONE) -> dict[str, Any]:
    """Where a run is made, for `environment.json`."""
    cuda = config.train.device.startswith("cuda")
    return {
        "qurve": qurve.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": available_cores(),
        "gpu": torch.cuda.get_device_name(config.train.device) if cuda else None,
        "device": config.train.device,
        "processes": world.size,
        "parallel": config.train.parallel,
        "threads": config.train.threads,
        "precision": config.train.precision,
        "compiled": config.train.compile,
        "compiler": None if cuda else compiler(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The commit of the source tree that qurve runs from, `+changes` when it differs; None for an installed wheel."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        changes = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


# ------------------------------------------------------------------------------------------------------ while training


def autocast(config: RunConfig) -> torch.autocast:
    kind = config.train.device.partition(":")[0]
    return torch.autocast(kind, torch.bfloat16, enabled=config.train.precision == "bf16")


def keep_freed_memory() -> None:
    """Have glibc keep large blocks for this process, for good, instead of returning each to the system.

    A training step takes and frees the same gigabyte again and again; fetching its pages anew took 8 per cent of the
    time. Elsewhere than under glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def forget_peak_memory(device: str) -> bool:
    """Begin to measure: memory that an earlier run of this process took at most, or left to the allocator, does not
    count. Returns whether this system can (Linux lets a process reset its own peak)."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        return True
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        PEAK_RESET.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak_memory(device: str) -> int:
    """Bytes that this process held at most since `forget_peak_memory` could measure: on a GPU what torch allocated
    there, else what was resident."""
    if device.startswith("cuda"):
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


@contextlib.contextmanager
def machine_settings(config: RunConfig) -> Iterator[None]:
    """Threads; on the CPU, determinism (the same run twice gives the same bits), and memory kept from step to step."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_num_threads(config.train.threads or threads)
    if config.train.device == "cpu":
        keep_freed_memory()
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
