"""Checkpoints: whole or not there, read back exactly, refused when damaged, pruned with care."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qurve import files
from qurve.errors import BadInput, Damaged
from qurve.files import write_manifest
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.train import checkpoint
from qurve.train.checkpoint import (
    MODEL,
    OPTIMIZER,
    STATE,
    disk_needed,
    kept_steps,
    load_checkpoint,
    newest_complete,
    prune,
    save_checkpoint,
)
from qurve.train.config import TrainConfig
from qurve.train.distributed import ALONE
from qurve.train.optim import build_optimizer
from tiny import tiny

FACTS = {"loss_above_bound": 0, "val_loss": None}


def trained(seed: int = 0) -> tuple[GPT, torch.optim.Optimizer]:
    """A model after two updates of gradients that mean nothing."""
    model = GPT(tiny().model, seed=seed)
    optimizer = build_optimizer(model, tiny().train)
    for step in (1, 2):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01 * step) + parameter.detach() * seed
        optimizer.step()
    return model, optimizer


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.create("{}", "hash", {})
    return run


def save(run: RunFolder, step: int, **facts: Any) -> Path:
    save_checkpoint(run, step, *trained(), FACTS | facts, ALONE)
    return run.checkpoint(step)


def tensors(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {**model.state_dict(), **checkpoint._optimizer_tensors(model, optimizer)}


# ------------------------------------------------------------------------------------------------------------- writing


def test_what_was_saved_is_read_back_bit_by_bit_and_goes_on_alike(run: RunFolder) -> None:
    model, optimizer = trained(seed=1)
    save_checkpoint(run, 2, model, optimizer, FACTS, ALONE)
    other = GPT(tiny().model, seed=5)
    other_optimizer = build_optimizer(other, tiny().train)
    load_checkpoint(run.checkpoint(2), other, other_optimizer)
    for _ in range(2):
        left, right = tensors(model, optimizer), tensors(other, other_optimizer)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
        assert optimizer.param_groups[0]["weight_decay"] == other_optimizer.param_groups[0]["weight_decay"] == 0.1
        for both in (model, other):
            for parameter in both.parameters():
                parameter.grad = torch.full_like(parameter, 0.03)
        optimizer.step()
        other_optimizer.step()


def test_what_the_system_says_to_a_write_arrives_as_its_error(run: RunFolder) -> None:
    with pytest.raises(FileNotFoundError) as failure:
        checkpoint._write_tensors({"a": torch.zeros(1)}, run.path / "not" / "there")
    assert failure.value.filename == str(run.path / "not" / "there")


def test_latest_leads_to_the_newest(run: RunFolder) -> None:
    for step in (4, 6):
        save(run, step)
        latest = run.checkpoints / "latest"
        assert latest.is_symlink()
        assert str(latest.readlink()) == f"step-0000000{step}"
        assert latest.resolve() == run.latest_checkpoint().resolve()


def test_what_a_killed_save_or_removal_left_is_not_in_the_way_nor_in_the_checkpoint(run: RunFolder) -> None:
    for left_over in (".step-00000004.part", ".step-00000002.doomed"):
        (run.checkpoints / left_over).mkdir()
        (run.checkpoints / left_over / "half-written").write_bytes(b"torn")
    save(run, 4)
    assert sorted(entry.name for entry in run.checkpoints.iterdir()) == ["latest", "step-00000004"]
    names = sorted(file.name for file in run.checkpoint(4).iterdir())
    assert names == ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("at", ["save_file", "write_atomic", "write_manifest", "sync"])
def test_a_save_that_breaks_off_anywhere_leaves_the_one_before_as_latest(
    at: str, error: BaseException, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise error

    save(run, 3)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, at, fail)
        with pytest.raises(type(error)):
            save(run, 7)
    assert run.checkpoint_steps() == [3]
    assert (run.checkpoints / "latest").resolve() == run.checkpoint(3).resolve()
    assert sorted(entry.name for entry in run.checkpoints.iterdir()) == ["latest", "step-00000003"]
    save(run, 7)
    assert run.checkpoint_steps() == [3, 7]


def test_everything_is_on_the_disk_before_the_checkpoint_takes_its_name(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = checkpoint.sync, checkpoint.os.replace
    monkeypatch.setattr(checkpoint, "sync", lambda path: (done.append(path.name), sync(path)))
    monkeypatch.setattr(checkpoint.os, "replace", lambda a, b: (done.append(f"-> {b.name}"), replace(a, b)))
    save(run, 1)
    named = done.index("-> step-00000001")
    assert {MODEL, OPTIMIZER, ".step-00000001.part", "metrics.jsonl"} <= set(done[:named])
    assert done[named + 1 :] == ["-> latest", "checkpoints"]


# ------------------------------------------------------------------------------------------------------------- reading


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, STATE, "manifest.json"])
@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_a_damaged_checkpoint_is_named_set_aside_and_passed_over(
    damage: Callable[[Path], None], name: str, run: RunFolder
) -> None:
    save(run, 2)
    damage(save(run, 4) / name)
    notes: list[str] = []
    if (name, damage) == ("manifest.json", truncate):  # its last character is a line feed: nothing is lost
        assert newest_complete(run, notes.append) is not None
        return
    found = newest_complete(run, notes.append)
    assert found is not None
    assert found[0] == run.checkpoint(2)
    assert found[1]["step"] == 2
    assert len(notes) == 1
    assert str(run.checkpoint(4) / name) in notes[0]
    assert run.checkpoint_steps() == [2]
    assert (run.checkpoints / "latest").resolve() == run.checkpoint(2).resolve()
    assert (run.checkpoints / "damaged-4-1").is_dir()
    assert (name in (MODEL, OPTIMIZER)) <= ("sha256" in notes[0] or "bytes" in notes[0] or "missing" in notes[0])


def test_nothing_is_moved_and_nothing_begun_when_all_are_damaged(run: RunFolder) -> None:
    notes: list[str] = []
    assert newest_complete(run, notes.append) is None
    for step in (2, 4):
        flip(save(run, step) / MODEL)
    with pytest.raises(Damaged, match=r"no whole checkpoint left \(.*step-00000004.*step-00000002.*another --out"):
        newest_complete(run, notes.append)
    assert (notes, run.checkpoint_steps()) == ([], [2, 4])


def test_an_error_of_the_disk_is_no_damage(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run, 2)

    def fail(*args: Any) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "sha256_of", fail)
    with pytest.raises(OSError, match="Input/output"):
        newest_complete(run, lambda _: None)
    assert run.checkpoint_steps() == [2]


@pytest.mark.parametrize("state", ["{}", "[]", "null", "5", "[" * 100_000, "{torn"])
def test_a_state_that_is_none_is_refused_where_it_is_needed_and_passed_over_where_not(
    state: str, run: RunFolder
) -> None:
    old, new = save(run, 2), save(run, 4)
    (old / STATE).write_text(state)
    prune(run, TrainConfig(keep=1))
    assert run.checkpoint_steps() == [2, 4]
    (new / STATE).write_text(state)
    (new / "manifest.json").unlink()
    write_manifest(new)
    with pytest.raises(BadInput, match=r"step-00000004/state\.json is not the state|is of format None"):
        newest_complete(run, lambda _: None)
    assert run.checkpoint_steps() == [2, 4]


@pytest.mark.parametrize("change", [{"step": 10**9}, {"step": -3}, {"step": "4"}, {"loss_above_bound": None}])
def test_a_state_that_is_not_of_its_checkpoint_is_refused(change: dict[str, Any], run: RunFolder) -> None:
    folder = save(run, 4)
    (folder / STATE).write_text(json.dumps(json.loads((folder / STATE).read_text()) | change))
    (folder / "manifest.json").unlink()
    write_manifest(folder)
    with pytest.raises(BadInput, match=r"state\.json is not the state of this checkpoint"):
        newest_complete(run, lambda _: None)


def test_links_and_strange_files_among_the_checkpoints_are_not_in_the_way(run: RunFolder, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(save(run, 2), elsewhere)
    run.checkpoint(9).symlink_to(elsewhere)
    (run.checkpoints / ".step-00000003.part").symlink_to(elsewhere)
    (run.checkpoints / ".step-00000005.part").write_text("a file")
    (run.checkpoints / "latest").unlink()
    shutil.copytree(elsewhere, run.checkpoints / "latest")  # as a copy makes it that follows links
    assert run.checkpoint_steps() == [2]
    save(run, 4)
    prune(run, TrainConfig(keep=1))
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", "step-00000004", "step-00000009"]
    assert (run.checkpoints / "latest").is_symlink()
    assert sorted(path.name for path in elsewhere.iterdir()) == ["manifest.json", MODEL, OPTIMIZER, STATE]


def rewrite(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change a checkpoint with its manifest, as somebody with an editor would."""
    held = load_file(folder / name)
    change(held)
    save_file(held, folder / name)
    (folder / "manifest.json").unlink()
    write_manifest(folder)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (MODEL, lambda t: t.pop("final_norm.weight"), r"final_norm\.weight is not in it"),
        (MODEL, lambda t: t.update(more=torch.zeros(1)), r"holds more, which this model has not"),
        (MODEL, lambda t: t.update({"final_norm.weight": torch.ones(33)}), r"F32 of shape \(33,\); F32 of \(32,\)"),
        (MODEL, lambda t: t.update({"final_norm.weight": torch.ones(32).half()}), r"F16 of shape \(32,\); F32"),
        (OPTIMIZER, lambda t: t.pop("exp_avg/final_norm.weight"), r"exp_avg/final_norm\.weight is not in it"),
        (OPTIMIZER, lambda t: t.update({"step/final_norm.weight": torch.ones(1)}), r"step/final_norm\.weight is F32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_any_is_taken(
    name: str, change: Callable[[dict[str, torch.Tensor]], Any], message: str, run: RunFolder
) -> None:
    folder = save(run, 2)
    rewrite(folder, name, change)
    model = GPT(tiny().model, seed=9)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(BadInput, match=message):
        load_checkpoint(folder, model, build_optimizer(model, tiny().train))
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_another_format_is_refused_by_its_number(run: RunFolder) -> None:
    folder = save(run, 2)
    state = json.loads((folder / STATE).read_text())
    (folder / STATE).write_text(json.dumps(state | {"format": 1}))
    (folder / "manifest.json").unlink()
    write_manifest(folder)
    with pytest.raises(BadInput, match="is of format 1; this version continues format 2"):
        checkpoint.read_state(folder)


# ------------------------------------------------------------------------------------------------------------- pruning


@given(
    states=st.dictionaries(
        st.integers(1, 40),
        st.tuples(st.none() | st.floats(1, 5), st.integers(0, 3)),
        min_size=1,
    ),
    keep=st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 10),
)
def test_what_is_kept(states: dict[int, tuple[float | None, int]], keep: int, keep_every: int | None) -> None:
    described = {step: {"val_loss": loss, "loss_above_bound": above} for step, (loss, above) in states.items()}
    kept = kept_steps(described, TrainConfig(keep=keep, keep_every=keep_every))
    steps = sorted(states)
    assert set(steps[-keep:]) <= kept <= set(steps)
    assert {step for step in steps if keep_every and step % keep_every == 0} <= kept
    losses = {step: loss for step, (loss, _) in states.items() if loss is not None}
    if losses:
        assert min(losses[step] for step in kept if step in losses) == min(losses.values())
    healthy = [step for step, (_, above) in states.items() if not above]
    if healthy:
        assert max(healthy) in kept
    others = kept - set(steps[-keep:]) - {step for step in steps if keep_every and step % keep_every == 0}
    assert len(others) <= 2  # the best and the last healthy one


def test_pruning_removes_the_others_and_leaves_what_cannot_be_read(run: RunFolder) -> None:
    source = save(run, 1, val_loss=2.0)
    for step, loss in ((2, 5.0), (3, 4.0), (4, 4.5), (5, 6.0)):
        shutil.copytree(source, run.checkpoint(step))
        (run.checkpoint(step) / STATE).write_text(json.dumps({"step": step, "val_loss": loss, "loss_above_bound": 0}))
    (run.checkpoint(2) / STATE).write_text("{torn")
    prune(run, TrainConfig(keep=2))
    assert run.checkpoint_steps() == [1, 2, 4, 5]
    assert not list(run.checkpoints.glob(".*"))


def test_the_disk_that_is_needed_covers_what_is_ever_there(run: RunFolder) -> None:
    config = tiny("train.steps=12", "train.checkpoint_every=2", "train.keep_every=4")
    several, needed = disk_needed(config)
    folder = save(run, 2)
    size = sum(file.stat().st_size for file in (folder / MODEL, folder / OPTIMIZER))
    assert several == 6  # made in all; at a time at most 2 newest, 3 for good, the best, one being written
    assert size * several == pytest.approx(needed, rel=0.15)  # of tensors this small the names count
    assert disk_needed(tiny("train.steps=1000", "train.checkpoint_every=1"))[0] == 4


def test_the_best_is_kept_even_if_it_was_measured_after_its_checkpoint_was_written(run: RunFolder) -> None:
    source = save(run, 1, val_loss=2.0)
    for step in (2, 3, 4):
        shutil.copytree(source, run.checkpoint(step))
    (run.checkpoint(2) / STATE).write_text(json.dumps({"step": 2, "val_loss": None, "loss_above_bound": 0}))
    run.append({"step": 2, "split": "val", "loss": 1.5, "tokens": 1})
    prune(run, TrainConfig(keep=1))
    assert run.checkpoint_steps() == [2, 4]
