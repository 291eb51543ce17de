"""How a training ends, and what is refused before one begins."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from qurve.data.loader import TokenData
from qurve.errors import BadInput, Diverged
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.train import loop
from qurve.train.loop import train
from qurve.train.progress import Progress
from tiny import PAPER_ORDER, tiny


class Interfering(Progress):
    """Raises after an update; counts how often it was told that all is over."""

    def __init__(self, step: int, error: BaseException) -> None:
        self.step, self.error, self.finishes = step, error, 0

    def updated(self, line: dict[str, Any]) -> None:
        if line["step"] == self.step:
            raise self.error

    def finish(self) -> None:
        self.finishes += 1


@pytest.mark.parametrize(
    ("error", "status", "why"),
    [
        (KeyboardInterrupt(), "stopped", "interrupted"),
        (RuntimeError("out of luck"), "failed", "out of luck"),
        (SystemExit(), "failed", "SystemExit"),
    ],
)
def test_a_run_that_is_cut_short_says_how_and_after_which_step(
    error: BaseException, status: str, why: str, data: TokenData, tmp_path: Path
) -> None:
    progress = Interfering(3, error)
    with pytest.raises(type(error)):
        train(tiny(), tmp_path / "run", data, progress)
    run = RunFolder(tmp_path / "run")
    assert run.status() == {"format": 1, "status": status, "step": 3, "why": why}
    assert run.last_step() == 3
    assert progress.finishes == 1


def plant(monkeypatch: pytest.MonkeyPatch, act: Any) -> list[GPT]:
    """Let `act(model)` loose on the model before training; returns the list that the model is put into."""
    models: list[GPT] = []
    build = loop.build_optimizer

    def building(model: GPT, config: Any) -> Any:
        models.append(model)
        act(model)
        return build(model, config)

    monkeypatch.setattr(loop, "build_optimizer", building)
    return models


def test_a_weight_that_is_not_a_number_is_named(
    monkeypatch: pytest.MonkeyPatch, data: TokenData, tmp_path: Path
) -> None:
    def spoil(model: GPT) -> None:
        with torch.no_grad():
            model.blocks[1].mlp.up.weight[3, 5] = float("nan")

    plant(monkeypatch, spoil)
    with pytest.raises(Diverged, match=r"after step 0.* weight blocks\.1\.mlp\.up\.weight is not finite") as caught:
        train(tiny(), tmp_path / "run", data)
    assert caught.value.exit_code == 3
    run = RunFolder(tmp_path / "run")
    assert run.status() == {"format": 1, "status": "diverged", "step": 0, "why": str(caught.value)}
    assert list(run.metrics()) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named_and_its_update_not_made(
    bad: float, monkeypatch: pytest.MonkeyPatch, data: TokenData, tmp_path: Path
) -> None:
    calls = []

    def third(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.full_like(gradient, bad) if len(calls) == 3 else gradient

    models = plant(monkeypatch, lambda model: model.blocks[0].attention.output.weight.register_hook(third))
    config = tiny("train.checkpoint_every=1", "eval.every=100", "train.keep=1")
    with pytest.raises(Diverged, match=r"step 3: the gradient of blocks\.0\.attention\.output\.weight is not finite"):
        train(config, tmp_path / "run", data)
    run = RunFolder(tmp_path / "run")
    assert run.status()["status"] == "diverged"
    assert run.status()["step"] == run.last_step() == 2
    assert run.checkpoint_steps() == [2]
    before = load_file(run.checkpoint(2) / "model.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in models[0].state_dict().items())


def test_weights_that_overflow_get_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch, data: TokenData, tmp_path: Path
) -> None:
    rates = {0: 1e-3, 1: 3e38, 2: 3e38}
    monkeypatch.setattr(loop, "learning_rate", lambda config, update: rates[update])
    config = tiny("train.checkpoint_every=1", "eval.every=100")
    with pytest.raises(Diverged, match=r"step [23]: the (weight|loss|gradient)"):
        train(config, tmp_path / "run", data)
    run = RunFolder(tmp_path / "run")
    assert run.status()["status"] == "diverged"
    for folder in run.checkpoints.iterdir():
        assert all(torch.isfinite(tensor).all() for tensor in load_file(folder / "model.safetensors").values())


def test_an_absurd_learning_rate_diverges(data: TokenData, tmp_path: Path) -> None:
    config = tiny("train.lr=1e6", "train.steps=60", "train.warmup_steps=0", "train.weight_decay=0.1")
    with pytest.raises(Diverged, match=r"step \d+: the (loss|weight|gradient)"):
        train(config, tmp_path / "run", data)
    run = RunFolder(tmp_path / "run")
    assert run.status()["status"] == "diverged"
    assert not list(run.checkpoints.iterdir())


def test_machine_settings_are_given_back(data: TokenData, tmp_path: Path) -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    seen = []

    class Looking(Progress):
        def updated(self, line: dict[str, Any]) -> None:
            seen.append((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()))

    train(tiny("train.threads=2", "train.steps=1"), tmp_path / "run", data, Looking())
    assert seen == [(2, True)]
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


# -------------------------------------------------------------------------------------------------- refused beforehand


def write_nanogpt(folder: Path, *, train_tokens: int, val_tokens: int) -> TokenData:
    folder.mkdir()
    for name, n in (("train", train_tokens), ("val", val_tokens)):
        (np.arange(n) % 300).astype("<u2").tofile(folder / f"{name}.bin")
    return TokenData.open(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("train.tokens_per_step=100",), r"tokens_per_step = 100 .* model\.context = 32.* 96"),
        (("train.micro_batch=3",), r"micro_batch = 3 does not divide the step's 4 sequences"),
        (("model.vocab_size=256",), r"257 token ids.* only 256; add --set model\.vocab_size=320"),
        (('eval.splits=["val","valid"]',), r"no split 'valid'; did you mean 'val'"),
        ((*PAPER_ORDER, 'eval.splits=["test"]'), r"not test"),
        (("data.order=paper", "train.seed=-1"), r"train\.seed = -1: it must be at least 0"),
        ((*PAPER_ORDER, "eval.every=1", "train.steps=600"), r"evaluation 600 is not in the paper's order"),
        (("train.lr=1e-4", "train.min_lr=1e-3"), r"train\.min_lr = 0\.001 is above the peak, train\.lr = 0\.0001"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_made(
    settings: Sequence[str], message: str, data: TokenData, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        train(tiny(*settings), tmp_path / "run", data)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("train_tokens", "val_tokens"), [(20, 500), (500, 20)])
def test_data_shorter_than_a_window_is_refused(train_tokens: int, val_tokens: int, tmp_path: Path) -> None:
    data = write_nanogpt(tmp_path / "data", train_tokens=train_tokens, val_tokens=val_tokens)
    with pytest.raises(BadInput, match=r"too short: it has 20 tokens, and one window of context 32 needs 33"):
        train(tiny("model.vocab_size=50304"), tmp_path / "run", data)
    assert not (tmp_path / "run").exists()


def test_a_used_folder_is_refused_and_left_as_it_is(data: TokenData, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match="is not empty"):
        train(tiny(), tmp_path, data)
    with pytest.raises(BadInput, match=r"notes\.txt is a file"):
        train(tiny(), tmp_path / "notes.txt", data)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused(device: str, data: TokenData, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=rf"'{device}', but torch finds 0 CUDA devices"):
        train(tiny(f"train.device={device}"), tmp_path / "run", data)
    assert not (tmp_path / "run").exists()


def test_damaged_data_is_named_when_it_is_met(data_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(data_folder, folder)
    shard = np.memmap(folder / "train-00000.bin", dtype="<u2", mode="r+")
    shard[:] = 65_535
    shard.flush()
    with pytest.raises(BadInput, match=r"the train split holds the id 65535, and the vocabulary has 320"):
        train(tiny(), tmp_path / "run", TokenData.open(folder))
    assert RunFolder(tmp_path / "run").status()["status"] == "failed"
