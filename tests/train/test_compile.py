"""Compiling the training step, and every way it may not work: announced, recorded, and trained eager."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from qurve.config import to_json
from qurve.data.loader import TokenData
from qurve.runfolder import RunFolder
from qurve.train import runtime
from qurve.train.loop import train
from qurve.train.progress import Progress
from qurve.train.runtime import resolve
from tiny import tiny

COMPILED = "train.compile=true"


class Noting(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def with_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "compiler", lambda: "/usr/bin/c++")


def numbers(run: RunFolder) -> list[Any]:
    return [(line["step"], line["loss"], line.get("grad_norm"), line.get("batch_sha")) for line in run.metrics()]


def failing_with(error: Exception) -> Callable[[Any], Any]:
    def compiled(*args: Any) -> Any:
        raise error

    return lambda function, **options: compiled


def inductor_error() -> Exception:
    from torch._inductor.exc import InductorError

    return InductorError(RuntimeError("the compiler is out of order"), None)


def dynamo_error() -> Exception:
    from torch._dynamo.exc import Unsupported

    return Unsupported("the compiler is out of order", gb_type="")


@pytest.mark.parametrize("make_error", [inductor_error, dynamo_error])
def test_a_compilation_that_fails_is_announced_recorded_and_trains_eager(
    make_error: Callable[[], Exception],
    with_compiler: None,
    monkeypatch: pytest.MonkeyPatch,
    finished: RunFolder,
    data: TokenData,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(torch, "compile", failing_with(make_error()))
    progress = Noting()
    run = train(tiny(COMPILED), tmp_path / "run", data, progress)
    assert numbers(run) == numbers(finished)
    assert run.environment()["compiled"] is False
    assert "the compiler is out of order" in run.environment()["compile_error"]
    assert any("torch.compile failed" in note and "out of order" in note and "eager" in note for note in progress.notes)


def test_an_error_of_the_model_itself_is_not_taken_for_the_compiler_s(
    with_compiler: None, monkeypatch: pytest.MonkeyPatch, data: TokenData, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch, "compile", failing_with(RuntimeError("shapes do not fit")))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        train(tiny(COMPILED), tmp_path / "run", data)
    assert RunFolder(tmp_path / "run").status()["status"] == "failed"


def test_trying_the_compilation_leaves_no_gradient_and_no_random_number_behind(
    with_compiler: None, monkeypatch: pytest.MonkeyPatch, data: TokenData, tmp_path: Path
) -> None:
    eager = train(tiny("model.dropout=0.3"), tmp_path / "eager", data)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    compiled = train(tiny("model.dropout=0.3", COMPILED), tmp_path / "compiled", data)
    assert numbers(compiled) == numbers(eager)
    assert compiled.environment()["compiled"] is True
    assert compiled.environment()["compile_seconds"] >= 0


@pytest.mark.slow
def test_every_arm_of_a_long_study_is_compiled_and_its_next_seed_is_not(
    with_compiler: None, monkeypatch: pytest.MonkeyPatch, data: TokenData, tmp_path: Path
) -> None:
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    compiled = []
    for width, seed in ((16, 1), (16, 2), (32, 1), (48, 1), (64, 1), (80, 1)):
        before = graphs
        settings = (f"model.d_model={width}", "model.n_layers=1", f"train.seed={seed}", "train.steps=1", COMPILED)
        train(tiny(*settings), tmp_path / f"{width}-{seed}", data)
        compiled.append(graphs - before)
    each = compiled[0]
    assert each >= 2  # a training and an evaluation: five arms are more than torch compiles of one function
    assert compiled == [each, 0, each, each, each, each]


def test_without_a_compiler_training_says_so_and_runs_eager(
    monkeypatch: pytest.MonkeyPatch, finished: RunFolder, data: TokenData, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert runtime.compiler() is None
    assert resolve(tiny(COMPILED), data).train.compile is False
    progress = Noting()
    run = train(tiny(COMPILED), tmp_path / "run", data, progress)
    assert [note for note in progress.notes if "no C++ compiler found (looked for no-such-compiler" in note]
    assert "CXX" in progress.notes[0]
    assert "eager" in progress.notes[0]
    assert numbers(run) == numbers(finished)
    assert run.environment()["compiled"] is False
    assert run.environment()["compiler"] is None


def test_eager_by_choice_needs_no_announcement(
    monkeypatch: pytest.MonkeyPatch, data: TokenData, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    progress = Noting()
    train(tiny("train.steps=1"), tmp_path / "run", data, progress)
    assert progress.notes == []


def test_compiler_is_the_one_that_torch_would_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "my-c++"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    assert runtime.compiler() == str(script)
    monkeypatch.delenv("CXX")
    assert runtime.compiler() == shutil.which("clang++" if sys.platform == "darwin" else "g++")


# In a process of their own: torch reads CXX once. A cache of their own: what was compiled before is not compiled again.
SCRIPT = """
import sys
from qurve.config import from_json
from qurve.data.loader import TokenData
from qurve.train.config import RunConfig
from qurve.train.loop import train
from qurve.train.progress import for_console
from rich.console import Console
train(from_json(RunConfig, sys.argv[1]), sys.argv[2], TokenData.open(sys.argv[3]), for_console(Console()))
"""


def train_apart(out: Path, data: TokenData, monkeypatch: pytest.MonkeyPatch) -> tuple[RunFolder, str]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(out.with_name("cache")))
    arguments = [to_json(tiny(COMPILED)), str(out), str(data.folder)]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True)
    return RunFolder(out), " ".join(done.stdout.split())


@pytest.mark.slow
def test_a_broken_compiler_falls_back_to_eager(
    monkeypatch: pytest.MonkeyPatch, finished: RunFolder, data: TokenData, tmp_path: Path
) -> None:
    script = tmp_path / "broken-c++"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "g++ (broken) 13.0" && exit 0\necho broken >&2; exit 1\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    run, output = train_apart(tmp_path / "run", data, monkeypatch)
    assert "torch.compile failed" in output
    assert run.status()["status"] == "finished"
    assert run.environment()["compiled"] is False
    assert [n[1] for n in numbers(run)] == pytest.approx([n[1] for n in numbers(finished)], rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(runtime.compiler() is None, reason="no C++ compiler")
def test_compiled_training_gives_the_eager_losses(
    monkeypatch: pytest.MonkeyPatch, finished: RunFolder, data: TokenData, tmp_path: Path
) -> None:
    run, output = train_apart(tmp_path / "run", data, monkeypatch)
    assert "torch.compile failed" not in output
    assert run.environment()["compiled"] is True
    assert [n[1] for n in numbers(run)] == pytest.approx([n[1] for n in numbers(finished)], rel=1e-4)
