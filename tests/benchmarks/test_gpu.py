from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import gpu
import pytest
from measuring import Results

import bare

SCRIPT = Path(gpu.__file__)


@pytest.mark.slow
def test_rehearsal_passes_where_torch_numpy_and_safetensors_are_all_there_is(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = bare.run(SCRIPT, "--rehearse", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["rehearsal"]
    assert {"peaks", "kernel", "train 124M", "decode 124M", "attention", "train 350M"} <= found["summary"].keys()
    assert not [row for row in found["rows"] if "failed" in row]
    assert "target: at least 0.98" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1]) == found


def bench(file: Path | None = None) -> gpu.Bench:
    return gpu.Bench("cpu", gpu.REHEARSAL, Results(file, {"benchmark": "gpu"}), time.monotonic() + 60)


def test_failed_section_is_named_and_the_next_begins(capsys: pytest.CaptureFixture[str]) -> None:
    def out_of_memory() -> dict[str, Any]:
        raise RuntimeError("out of memory")

    here = bench()
    assert gpu.run(here, {"first": (0, out_of_memory), "second": (0, lambda: {"x": 1.0})}) == ["first"]
    assert here.results.summary == {"second": {"x": 1.0}}
    assert here.results.rows == [{"section": "first", "failed": "RuntimeError: out of memory"}]
    gpu.show(here)
    assert "out of memory" in capsys.readouterr().out


def test_time_limit_keeps_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    here = bench(file)

    def endless() -> dict[str, Any]:
        here.add(side="one", ms=1.0)
        signal.setitimer(signal.ITIMER_REAL, 0.01)  # the time is up now, however slow the machine was before
        while True:
            try:
                time.sleep(0.01)
            except Exception:  # as a compiler may do
                continue

    assert gpu.run(here, {"quick": (0, lambda: {"x": 1.0}), "endless": (0, endless)}) == []
    there = json.loads(file.read_text())
    assert there["summary"] == {"quick": {"x": 1.0}}
    assert there["rows"] == [{"section": "endless", "side": "one", "ms": 1.0}]

    again = bench(file)
    ran: list[str] = []
    gpu.run(again, {name: (0, lambda name=name: ran.append(name) or {}) for name in ("quick", "endless")})
    assert ran == ["endless"]
    assert again.results.rows == []


def test_section_that_wants_more_than_is_left_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.run(here := bench(), {"long": (2.0, lambda: {"x": 1.0})}) == []
    assert here.results.summary == {}
    assert "long: left out" in capsys.readouterr().out


def test_targets_are_stated_even_when_nothing_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.show(bench())
    printed = capsys.readouterr().out
    for target in gpu.TARGETS:
        assert target in printed
    assert printed.count("not measured") == len(gpu.TARGETS)
