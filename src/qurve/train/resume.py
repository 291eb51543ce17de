"""Going on with a run: what must be as it was, and from where."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from qurve.config import FORMAT, content_hash, from_dict, hashed_differences, hashed_leaves
from qurve.data import order
from qurve.data.loader import TokenData
from qurve.errors import BadInput, Diverged, did_you_mean
from qurve.runfolder import RunFolder
from qurve.train.checkpoint import disk_needed, newest_complete
from qurve.train.config import RunConfig
from qurve.train.distributed import World
from qurve.train.runtime import resolve
from qurve.train.windows import check_windows, training_windows

Resume = Literal["never", "auto"]
Changes = dict[str, tuple[Any, Any]]
"""What a continued run has other than before: field -> (before, now)."""


def decide(
    wanted: RunConfig, run: RunFolder, data: TokenData, resume: Resume, changed: Sequence[str], world: World
) -> tuple[RunConfig, Changes]:
    """The resolved configuration, and in what it differs from the run's so far. Nothing is written.

    What `wanted` leaves open (device, precision, threads, micro-batch) is as it was, where it can be. Raises `BadInput`
    for a used folder unless it is to be continued, for other data, and for changes that are not named in `changed`.
    """
    if resume == "never":
        run.refuse_used()
    if not run.is_begun():
        run.refuse_foreign()
        config = _checked(resolve(wanted, data, world), run, data)
        _check_names(changed, hashed_leaves(config))
        return config, {}
    earlier = earlier_config(run)
    if earlier.data.fingerprint != data.fingerprint:
        raise BadInput(
            f"{run.path} was trained on other data: its fingerprint is {earlier.data.fingerprint}, "
            f"that of {data.folder} is {data.fingerprint}; give --data with the data it was trained on"
        )
    before = earlier.train
    open_ends: set[str] = set()
    if run.environment().get("processes") != world.size:  # then these two want deciding anew
        before = dataclasses.replace(before, threads=None, micro_batch=None)
        open_ends = {f"train.{name}" for name in ("threads", "micro_batch") if getattr(wanted.train, name) is None}
    config = _checked(resolve(wanted, data, world, before), run, data)
    changes = hashed_differences(earlier, config)
    _check_names(changed, hashed_leaves(earlier) | hashed_leaves(config))
    if unnamed := changes.keys() - open_ends - set(changed):
        listed = ", ".join(f"{name} ({changes[name][0]!r} there, {changes[name][1]!r} now)" for name in sorted(unnamed))
        flags = " ".join(f"--changed {name}" for name in sorted(unnamed))
        raise BadInput(f"{run.path} is a run of another configuration: {listed}; if that is meant, add {flags}")
    return config, changes


def _check_names(changed: Sequence[str], known: Iterable[str]) -> None:
    for name in changed:
        if name not in known:
            raise BadInput(f"--changed {name}: there is no such field{did_you_mean(name, known)}")


def earlier_config(run: RunFolder) -> RunConfig:
    """The configuration that a run's folder states."""
    tree, _ = run.config_json()
    if (version := tree.pop("format", None)) != FORMAT:
        raise BadInput(f"{run.config_file} is of format {version!r}; this version reads format {FORMAT}")
    try:
        return from_dict(RunConfig, tree)
    except BadInput as error:
        raise BadInput(f"{run.config_file}: {error}") from None


def find_checkpoint(
    run: RunFolder, config: RunConfig, changes: Changes, data: TokenData, note: Callable[[str], None]
) -> tuple[int, int]:
    """The step to go on from, 0 where there is no checkpoint, and for how many steps the loss was above its bound then.

    Damaged checkpoints are set aside. Raises `Diverged` for a run that did, unless something is changed: the same
    numbers would come again. Raises `BadInput` where no checkpoint is whole, the metrics do not lead to it, the data
    are not what they were, or this version would go on with other batches.
    """
    status = run.status()
    bounds = [(c.train.loss_bound, c.train.loss_bound_steps) for c in (earlier_config(run), config)]
    if status["status"] == "diverged" and not changes and bounds[0] == bounds[1]:
        raise Diverged(f"{run.path} diverged ({status['why']}), and would again: change something, and name it")
    lines = run.train_lines()  # before anything is set aside: they may be refused
    found = newest_complete(run, note)
    if found is None:
        return 0, 0
    folder, state = found
    step = int(state["step"])
    _, stored = run.config_json()
    if state.get("config_hash") not in (stored, *(entry["earlier_hash"] for entry in run.resumed())):
        raise BadInput(f"{folder} is the checkpoint of another run; remove it")
    lines = [line for line in lines if line["step"] <= step]
    if len(lines) != step or any(line["step"] != k for k, line in enumerate(lines, 1)):
        raise BadInput(
            f"{run.metrics_file} does not hold the steps 1 to {step}, each once, and {folder} is the checkpoint of "
            f"step {step}: it was cut or edited; remove the checkpoint to go on from an earlier one"
        )
    data.verify()
    expected = order.batch_sha(training_windows(config, data, step - 1)[0], data.fingerprint)
    if state["config_hash"] == content_hash(config) and lines[-1]["batch_sha"] != expected:
        raise BadInput(
            f"{run.path} was trained on other batches than this version of qurve takes: that of step {step} is "
            f"{lines[-1]['batch_sha']} there and {expected} here; go on with the version that began it"
        )
    return step, int(state["loss_above_bound"])


def _checked(config: RunConfig, run: RunFolder, data: TokenData) -> RunConfig:
    check_windows(config, data)
    place = next(folder for folder in (run.path, *run.path.absolute().parents) if folder.exists())
    several, needed = disk_needed(config)
    needed -= min(several, len(run.checkpoint_steps())) * needed // several  # those that are there already
    if needed > (free := shutil.disk_usage(place).free):
        raise BadInput(
            f"{place} has {free / 1e6:,.0f} MB free, and the checkpoints of this run take {needed / 1e6:,.0f} MB; "
            "make room, give another --out, or keep fewer (train.keep, train.keep_every)"
        )
    return config
