from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qurve.data.loader import TokenData
from qurve.errors import BadInput
from qurve.runfolder import RunFolder
from qurve.train import runtime
from qurve.train.distributed import ALONE, World
from qurve.train.runtime import available_cores, resolve
from tiny import tiny


def test_open_ends_are_filled(data: TokenData) -> None:
    config = resolve(tiny("train.threads=none", "train.micro_batch=none"), data)
    assert config.train.threads == available_cores()
    assert config.train.micro_batch == 4
    assert config.data.path == str(data.folder)
    assert config.data.fingerprint == data.fingerprint


def test_resolving_twice_changes_nothing(data: TokenData) -> None:
    once = resolve(tiny("train.threads=none", "train.micro_batch=none", "train.precision=auto"), data)
    assert resolve(once, data) == once


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_machines_settings_hold_within_a_training_and_not_after(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    monkeypatch.setattr(runtime, "keep_freed_memory", lambda: kept.append(1))

    def now() -> tuple[Any, ...]:
        fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        return torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), fill

    threads, deterministic, fill = before = now()
    inside = (threads + 1, True, False) if device == "cpu" else (threads + 1, deterministic, fill)
    with contextlib.suppress(KeyboardInterrupt):
        with runtime.machine_settings(tiny(f"train.device={device}", f"train.threads={threads + 1}")):
            assert now() == inside
            assert len(kept) == (device == "cpu")
        assert now() == before
        with runtime.machine_settings(tiny(f"train.device={device}", "train.threads=none")):
            assert now() == (threads, *inside[1:])
            raise KeyboardInterrupt
    assert now() == before


@given(sequences=st.integers(1, 600), most=st.integers(1, 600))
def test_micro_batch_is_the_largest_divisor_that_is_modest(data: TokenData, sequences: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "MODEST_TOKENS", {"cpu": most * 32})
        config = tiny(f"train.tokens_per_step={32 * sequences}", "train.micro_batch=none")
        found = resolve(config, data).train.micro_batch
    assert found is not None
    assert sequences % found == 0
    assert found <= most
    assert not any(sequences % n == 0 for n in range(found + 1, min(sequences, most) + 1))


def test_one_sequence_is_taken_even_where_it_is_not_modest(data: TokenData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "MODEST_TOKENS", {"cpu": 1})
    assert resolve(tiny("train.micro_batch=none"), data).train.micro_batch == 1


def test_automatic_precision_follows_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, expected in ((True, "bf16"), (False, "float32")):
        monkeypatch.setattr(runtime, "cpu_multiplies_bf16", lambda found=found: found)
        assert runtime.resolve_precision("auto", "cpu") == expected
    assert runtime.resolve_precision("float32", "cpu") == "float32"
    assert runtime.resolve_precision("bf16", "cpu") == "bf16"


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git to ask for a commit")
def test_a_run_says_its_commit_and_whether_the_sources_differ_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    monkeypatch.setattr(runtime, "__file__", str(tmp_path / "src" / "qurve" / "train" / "runtime.py"))
    assert runtime._commit() is None
    git("init")
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
    git(*identity, "commit", "--allow-empty", "-m", "Begin")
    assert runtime._commit() == git("rev-parse", "HEAD")
    (tmp_path / "changed.py").touch()
    assert runtime._commit() == git("rev-parse", "HEAD") + "+changes"


@pytest.mark.parametrize(
    ("settings", "world", "message"),
    [
        (("train.parallel=ddp",), World(0, 3, 0, 3), r"4 sequences \(128 tokens\) do not divide among 3 processes"),
        (
            ("train.parallel=ddp", "train.micro_batch=4"),
            World(0, 2, 0, 2),
            r"= 4 does not divide each of the 2 processes' 2 seq",
        ),
        ((), World(1, 2, 1, 2), r"2 processes were started for one run; add --parallel ddp or --parallel fsdp"),
        (("train.parallel=fsdp",), ALONE, r"--parallel fsdp is for several processes: start them with torchrun"),
    ],
)
def test_processes_that_cannot_share_a_step_are_refused(
    settings: tuple[str, ...], world: World, message: str, data: TokenData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "launched", lambda: world.size > 1)
    with pytest.raises(BadInput, match=message):
        resolve(tiny("train.micro_batch=none", *settings), data, world)


def test_what_processes_share_out_is_resolved_for_their_number(
    data: TokenData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "launched", lambda: True)
    monkeypatch.setattr(runtime, "available_cores", lambda: 8)
    config = tiny("train.micro_batch=none", "train.threads=none", "train.parallel=ddp")
    for size, local, micro_batch, threads in ((1, 1, 4, 8), (2, 2, 2, 4), (4, 2, 1, 4)):
        resolved = resolve(config, data, World(0, size, 0, local)).train
        assert (resolved.micro_batch, resolved.threads) == (micro_batch, threads)


def test_what_is_left_open_stays_as_it_was(data: TokenData) -> None:
    before = tiny("train.threads=3", "train.micro_batch=2", "train.precision=bf16").train
    names = ("threads", "micro_batch")
    auto = ("train.precision=auto", "train.device=auto", "train.compile=true")
    open_ended = tiny(*(f"train.{name}=none" for name in names), *auto)
    resolved = resolve(open_ended, data, before=before).train
    assert (resolved.threads, resolved.micro_batch, resolved.precision) == (3, 2, "bf16")
    assert (resolved.device, resolved.compile) == ("cpu", False)
    assert resolve(tiny("train.micro_batch=1"), data, before=before).train.micro_batch == 1


@pytest.mark.skipif(not runtime.PEAK_RESET.exists(), reason="this system does not let a process reset its own peak")
def test_peak_memory_is_that_of_its_run_alone(finished: RunFolder) -> None:
    earlier = np.ones(25_000_000)  # 200 MB
    assert runtime.forget_peak_memory("cpu")
    before = runtime.peak_memory("cpu")
    assert before > earlier.nbytes
    del earlier
    assert runtime.forget_peak_memory("cpu")
    assert runtime.peak_memory("cpu") < before - 150_000_000
    taken = np.ones(12_500_000)
    assert runtime.peak_memory("cpu") > taken.nbytes
    assert finished.environment()["peak_memory_bytes"] > 10_000_000


def test_a_system_that_cannot_measure_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "PEAK_RESET", tmp_path / "missing" / "clear_refs")
    assert not runtime.forget_peak_memory("cpu")
