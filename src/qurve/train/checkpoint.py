"""A checkpoint: all that a training needs to go on as if it had never stopped. Complete, or not there.

    step-00000400/
      model.safetensors       the weights, by name
      optimizer.safetensors   AdamW's state: `exp_avg/<weight>`, `exp_avg_sq/<weight>`, `step/<weight>`
      state.json              everything that is no tensor
      manifest.json           size and sha256 of these three

Two things need no state. The order of the data and the learning rate are functions of the step. Random numbers are
seeded anew for each micro-batch (see `loop`). There is no loss scale either: nothing trains in float16.

Tensors are whole, whatever the processes that trained them: any number of processes reads them back.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qurve.accounting import count
from qurve.errors import BadInput, Damaged
from qurve.files import check_manifest, remove, sync, write_atomic, write_manifest
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.train.config import RunConfig, TrainConfig
from qurve.train.distributed import World, fill, full

FORMAT = 2
"""Version of the checkpoint's layout; another one is refused."""

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"

BYTES_PER_PARAMETER = 12
"""Of a checkpoint: a weight and its two moments, in float32."""


def save_checkpoint(
    run: RunFolder, step: int, model: GPT, optimizer: torch.optim.Optimizer, state: dict[str, Any], world: World
) -> None:
    """Write the checkpoint of `step`; its folder takes its name when everything is on the disk.

    Called by every process of the run (each has parts of the tensors); the first one writes.
    """
    weights = {name: full(tensor).contiguous() for name, tensor in model.state_dict().items()}
    moments = {name: full(tensor) for name, tensor in _optimizer_tensors(model, optimizer).items()}
    if world.main:
        folder = run.checkpoint(step)
        part = folder.with_name(f".{folder.name}.part")
        for left_over in run.checkpoints.glob(".step-*"):
            remove(left_over)
        part.mkdir(parents=True)
        try:
            _write_tensors(weights, part / MODEL)
            _write_tensors(moments, part / OPTIMIZER)
            write_atomic(part / STATE, json.dumps({"format": FORMAT, "step": step, **state}, indent=2) + "\n")
            write_manifest(part)
            for name in (MODEL, OPTIMIZER):
                sync(part / name)
            sync(part)
            sync(run.metrics_file)  # a checkpoint never outlives the lines that lead to it
            sync(run.path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        os.replace(part, folder)
        _point_latest_to(folder)
        sync(run.checkpoints)
    world.wait()


def _write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(tensors, file)
    except SafetensorError as error:  # a full disk, say: the system's number is in the message alone
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error
        raise


def _optimizer_tensors(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's tensors by name, the very ones that it works with."""
    return {
        f"{kind}/{name}": tensor
        for name, parameter in model.named_parameters()
        for kind, tensor in optimizer.state[parameter].items()
    }


def _point_latest_to(folder: Path) -> None:
    """`checkpoints/latest`, for people and scripts. Nothing here reads it."""
    link = folder.with_name(".latest.part")
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    if (latest := folder.with_name("latest")).is_dir() and not latest.is_symlink():
        remove(latest)  # a copy that followed the link
    os.replace(link, latest)


def disk_needed(config: RunConfig) -> tuple[int, int]:
    """How many checkpoints a run has at a time at most (one is being written), and their bytes."""
    made = -(-config.train.updates // config.checkpoint_every)
    kept_for_good = config.train.updates // config.train.keep_every if config.train.keep_every else 0
    several = min(made, config.train.keep + kept_for_good + 2)  # the best, and the one that is being written
    return several, several * BYTES_PER_PARAMETER * count(config.model).total


# ------------------------------------------------------------------------------------------------------------- reading


def read_state(folder: Path) -> dict[str, Any]:
    """A checkpoint's `state.json`, after its files were checked.

    Raises `Damaged`, naming the file; `BadInput` for a checkpoint of another version, or one written by hand.
    """
    check_manifest(folder, MODEL, OPTIMIZER, STATE)
    state = _read_json(folder / STATE)
    if state is not None and state.get("format") != FORMAT:
        raise BadInput(
            f"{folder} is of format {state.get('format')!r}; this version continues format {FORMAT}: "
            "go on with the version of qurve that wrote it"
        )
    if state is None or not _is_state(state) or state["step"] != int(folder.name[len("step-") :]):
        raise BadInput(
            f"{folder / STATE} is not the state of this checkpoint; remove {folder} to go on from an earlier one"
        )
    return state


def _read_json(file: Path) -> dict[str, Any] | None:
    """The object in a file; None for anything else."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError):
        return None
    return tree if isinstance(tree, dict) else None


def _is_state(state: dict[str, Any]) -> bool:
    numbers = isinstance(state.get("step"), int) and isinstance(state.get("loss_above_bound"), int)
    return numbers and isinstance(state.get("val_loss"), (float, int, type(None)))


def newest_complete(run: RunFolder, note: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is whole, with its state; None when the run has made none yet.

    Damaged ones are named, set aside, and passed over. Raises `Damaged`, leaving all as it is, when none is whole: the
    way back would be to the start, which is not for us to decide.
    """
    damages: dict[Path, Damaged] = {}
    for step in reversed(run.checkpoint_steps()):
        folder = run.checkpoint(step)
        try:
            state = read_state(folder)
        except Damaged as damage:
            damages[folder] = damage
            continue
        for other, what in damages.items():
            stem = f"damaged-{int(other.name[len('step-') :])}"
            names = (other.with_name(f"{stem}-{n}") for n in range(1, 1_000_000))
            aside = next(path for path in names if not path.exists())
            os.replace(other, aside)
            note(f"{what}; it was moved to {aside}, and the checkpoint before it is taken")
        if damages:
            _point_latest_to(folder)
        return folder, state
    if damages:
        told = "; ".join(map(str, damages.values()))
        raise Damaged(f"{run.path} has no whole checkpoint left ({told}); to start again, give another --out")
    return None


def load_checkpoint(folder: Path, model: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's tensors into model and optimiser. `BadInput`, before any is touched, if they do not fit."""
    _make_state(optimizer)
    wanted = {MODEL: model.state_dict(), OPTIMIZER: _optimizer_tensors(model, optimizer)}
    for file, tensors in wanted.items():
        _check_shapes(folder / file, tensors)
    for file, tensors in wanted.items():
        with safe_open(folder / file, framework="pt") as opened, torch.no_grad():
            for name, tensor in tensors.items():
                fill(tensor, opened.get_tensor(name))


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimiser make its tensors, which it does in its first step: here one of no gradient and rate zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _check_shapes(file: Path, tensors: dict[str, Tensor]) -> None:
    """By the file's header alone: nothing of the size it states is read, or made, before it is what was expected."""
    try:
        with safe_open(file, framework="pt") as opened:
            headers = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            found = {name: (header.get_dtype(), tuple(header.get_shape())) for name, header in headers.items()}
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{file} is damaged: {error}") from None
    for name, tensor in tensors.items():
        if found.get(name) != ("F32", tuple(tensor.shape)):
            held = "{} of shape {}".format(*found[name]) if name in found else "not in it"
            raise BadInput(f"{file} does not fit this run: {name} is {held}; F32 of {tuple(tensor.shape)} is needed")
    if extra := sorted(found.keys() - tensors.keys()):
        raise BadInput(f"{file} does not fit this run: it holds {extra[0]}, which this model has not")


# ------------------------------------------------------------------------------------------------------------- pruning


def prune(run: RunFolder, settings: TrainConfig) -> None:
    """Remove old checkpoints: all but the newest `keep`, those of `keep_every`, the best, and the last healthy one.

    One that cannot be read is left to `newest_complete`, which names it. The best is the one that the metrics say: a
    stop in the midst of its evaluation leaves that to the process that goes on, when the checkpoint is written already.
    """
    measured = {line["step"]: line["loss"] for line in run.eval_lines()}
    states = {}
    for step in run.checkpoint_steps():
        state = _read_json(run.checkpoint(step) / STATE)
        if state is not None and _is_state(state):
            states[step] = state | {"val_loss": measured.get(step, state["val_loss"])}
    for step in states.keys() - kept_steps(states, settings):
        doomed = run.checkpoints / f".step-{step:08d}.doomed"  # a removal that is cut short leaves no half checkpoint
        os.replace(run.checkpoint(step), doomed)
        remove(doomed)


def kept_steps(states: dict[int, dict[str, Any]], settings: TrainConfig) -> set[int]:
    """Which of the checkpoints (step -> state) are kept."""
    steps = sorted(states)
    kept = set(steps[-settings.keep :])
    kept |= {step for step in steps if settings.keep_every and step % settings.keep_every == 0}
    kept |= set([step for step in steps if not states[step]["loss_above_bound"]][-1:])
    losses = {step: states[step]["val_loss"] for step in steps if states[step]["val_loss"] is not None}
    if losses:
        kept.add(min(losses, key=losses.__getitem__))
    return kept
