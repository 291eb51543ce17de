"""Runs that are cut short in every way there is, and the comparison with one that was left alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from qurve.config import apply_settings
from qurve.data.corpus import embedded_corpus
from qurve.data.loader import TokenData
from qurve.data.prepare import prepare
from qurve.errors import BadInput, QurveError, Stopped
from qurve.files import check_manifest, sha256_of
from qurve.model.config import ModelConfig
from qurve.projections import Bottleneck
from qurve.runfolder import RunFolder
from qurve.train import loop
from qurve.train.config import DataConfig, EvalConfig, RunConfig, TrainConfig
from qurve.train.loop import train
from qurve.train.progress import Progress

SMALLEST = RunConfig(
    ModelConfig(
        n_layers=1, d_model=16, n_heads=2, d_ff=32, context=16, vocab_size=320, query=Bottleneck(), dropout=0.2
    ),
    DataConfig(tokenizer="bytes"),
    TrainConfig(
        steps=10,
        tokens_per_step=64,
        micro_batch=2,
        lr=1e-2,
        min_lr=1e-3,
        warmup_steps=2,
        precision="float32",
        compile=False,
        threads=1,
        device="cpu",
        checkpoint_every=2,
    ),
    EvalConfig(every=3, windows=3),
)
"""Two micro-batches a step, dropout, the paper's query; in the third step, the second epoch of `little_data` begins."""


def smallest(*settings: str) -> RunConfig:
    return apply_settings(SMALLEST, settings)


def little_data(folder: Path, *, opening: int = 0) -> TokenData:
    """Real text, so little that a step takes 4 of its 9 training windows; `opening` says which words it begins at."""
    texts = folder / "texts"
    texts.mkdir(parents=True)
    address = sorted(embedded_corpus().glob("*.txt"))[0].read_bytes().decode("ascii", errors="ignore")
    window = SMALLEST.model.context
    lengths = {"first": window * 5, "second": window * 5, "third": window * 4, "fourth": window * 4}
    for name, length in lengths.items():
        (texts / f"{name}.txt").write_text(address[opening : opening + length])
        opening += length
    prepare([texts], folder / "data", tokenizer="bytes", split=0.25, progress=False)
    return TokenData.open(folder / "data")


# ---------------------------------------------------------------------------------------------------------- comparison


def numbers(run: RunFolder, *, extra: Collection[int] = ()) -> list[dict[str, Any]]:
    """Every line of the metrics without its time; without the evaluations after the steps `extra`."""
    return [
        {key: value for key, value in line.items() if key != "seconds"}
        for line in run.metrics()
        if not ("split" in line and line["step"] in extra)
    ]


def hashes(run: RunFolder) -> dict[str, str]:
    """Of what the newest checkpoint holds of tensors."""
    folder = run.latest_checkpoint()
    return {name: sha256_of(folder / name) for name in ("model.safetensors", "optimizer.safetensors")}


def assert_same(run: RunFolder, undisturbed: RunFolder, *, extra: Collection[int] = ()) -> None:
    """Metrics to the last bit, final weights and optimiser, and steps that are unique and increase."""
    assert numbers(run, extra=extra) == numbers(undisturbed)
    assert hashes(run) == hashes(undisturbed)
    steps = [line["step"] for line in run.train_lines()]
    assert steps == list(range(1, len(steps) + 1))
    assert run.status()["status"] == "finished"
    assert_whole(run)


def assert_whole(run: RunFolder) -> None:
    """What holds of a run's folder after any death: no half checkpoint under a checkpoint's name, readable metrics."""
    for step in run.checkpoint_steps():
        check_manifest(run.checkpoint(step), "model.safetensors", "optimizer.safetensors", "state.json")
        state = json.loads((run.checkpoint(step) / "state.json").read_text())
        assert state["step"] == step
    latest = run.checkpoints / "latest"
    if latest.is_symlink():
        assert latest.resolve() in [run.checkpoint(step).resolve() for step in run.checkpoint_steps()]
    if run.metrics_file.exists():
        lines = run.metrics_file.read_bytes().split(b"\n")
        for line in lines[:-1]:  # what follows the last line feed is a torn line, or nothing
            json.loads(line)


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """All that lies in a folder, byte by byte; a link is where it leads."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    } | {f"{path.relative_to(folder)}/": "" for path in folder.rglob("*") if path.is_dir() and not path.is_symlink()}


def refuse(
    run: RunFolder, data: TokenData, message: str, *settings: str, kind: type[QurveError] = BadInput, **how: Any
) -> None:
    """Expect a refusal that says `message`, and not a byte of the folder changed."""
    before = snapshot(run.path)
    with pytest.raises(kind, match=message) as refusal:
        train(smallest(*settings), run.path, data, **{"resume": "auto", **how})
    assert refusal.type is kind
    assert snapshot(run.path) == before


# --------------------------------------------------------------------------------------------------------- interrupting


class Lost(Exception):
    """The process is gone, and with it all that was not on the disk."""


class After(Progress):
    """Do something after update `step`, and keep what was said."""

    def __init__(self, step: int = -1, action: Callable[[], Any] = lambda: None) -> None:
        self.step, self.action = step, action
        self.notes: list[str] = []

    def updated(self, line: dict[str, Any]) -> None:
        if line["step"] == self.step:
            self.action()

    def note(self, text: str) -> None:
        self.notes.append(text)


def lose() -> None:
    raise Lost


def ask_to_stop() -> None:
    """As a scheduler does; Python runs the handler before it goes on."""
    os.kill(os.getpid(), signal.SIGTERM)


def cut_short(config: RunConfig, out: Path, data: TokenData, how: str, step: int, patching: Callable[[], Any]) -> None:
    """Go on with the run in `out`, and cut it short unless it has passed `step` already.

    how   `stop-at`; `lost`, as when the power goes after the update; `signal` after the update, or `evaluation`: a
          signal in the midst of the first evaluation that comes after it
    """
    if how == "stop-at":
        train(apply_settings(config, [f"train.stop_at={step}"]), out, data, resume="auto")
        return
    batch, asked = loop.batch, []

    def batch_and_signal(config: RunConfig, split: Any, *which: Any) -> Any:
        if how == "evaluation" and split.name != "train" and RunFolder(out).last_step() >= step and not asked:
            asked.append(step)
            ask_to_stop()  # this part is still measured, the next one is not
        return batch(config, split, *which)

    actions = {"lost": lose, "signal": ask_to_stop}
    with contextlib.suppress(Lost, Stopped), patching() as patch:
        patch.setattr(loop, "batch", batch_and_signal)
        train(config, out, data, After(step, actions.get(how, lambda: None)), resume="auto")


def stop_after(step: int, out: Path, data: TokenData, config: RunConfig | None = None) -> RunFolder:
    with pytest.raises(Stopped, match=f"stopped after step {step}, which is saved"):
        train(config or smallest(), out, data, After(step, ask_to_stop), resume="auto")
    return RunFolder(out)
