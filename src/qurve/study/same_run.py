"""Whether a run's folder holds the run that a study means: an arm's configuration, with a seed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from qurve.config import content_hash, differences, from_dict, hashed_differences, to_dict
from qurve.errors import BadInput, QurveError
from qurve.runfolder import RunFolder
from qurve.train.config import ABOVE_BOUND, RunConfig

OPEN = {
    "data.fingerprint": None,
    "train.device": "auto",
    "train.precision": "auto",
    "train.compile": True,
    "train.threads": None,
    "train.micro_batch": None,
}
"""What a run decides where it is made, if its configuration leaves it so (`train.runtime.resolve`)."""

LONGEST = 30
"""Digits of a seed."""
NAMED = 3
"""Settings in which a run is another one, before the rest is only counted."""


def begun_runs(folder: Path) -> list[tuple[str, int]]:
    """Arm and seed of every run that was begun in a study's folder, whatever its `study.json` says."""
    found = []
    for path in sorted(folder.glob("runs/*/seed-*")):
        seed = path.name.removeprefix("seed-")
        if seed.isdecimal() and len(seed) <= LONGEST and RunFolder(path).is_begun():
            found.append((path.parent.name, int(seed)))
    return found


def was_seen(run: RunFolder) -> bool:
    """Whether a run shows how a trained model does: a validation loss after its first step. A damaged one may have."""
    try:
        return run.metrics_file.exists() and any(line["step"] > 0 for line in run.eval_lines())
    except (QurveError, OSError):
        return True


def seeded(config: RunConfig, seed: int, seed_offset: int = 0) -> RunConfig:
    """An arm with this seed. An A/A arm keeps the batches of the seed, and takes its weights from another one."""
    if seed_offset and config.data.order_seed is None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, order_seed=seed))
    return dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed + seed_offset))


def check_run(run: RunFolder, arm: dict[str, Any], seed: int, seed_offset: int = 0) -> None:
    """Raise `BadInput`, which says where they part, unless the folder holds the run of this arm and seed.

    `arm` is a configuration as `study.json` has it. One that this version does not know (a projection whose file is not
    at hand, say) is compared by its leaves as they are.
    """
    tree, stored = run.config_json()
    tree.pop("format", None)
    arm = {key: value for key, value in arm.items() if key != "format"}
    try:
        there, wanted = from_dict(RunConfig, tree), seeded(from_dict(RunConfig, arm), seed, seed_offset)
    except BadInput:
        apart = _raw_differences(tree, arm, seed + seed_offset)
    else:
        if ended_by_another_bound(run, wanted):
            raise BadInput("it would have ended otherwise with the train.loss_bound of study.json")
        apart = hashed_differences(there, wanted)
        # one that an older version wrote has fewer fields, and another hash
        if not apart and to_dict(there) == tree and content_hash(there) != stored:
            raise BadInput("its config.json is not what was written there: the hash is another one's")
    apart = {path: pair for path, pair in apart.items() if pair[1] != OPEN.get(path, ...)}
    if apart:
        words = [f"{path} is {mine!r} in it and {theirs!r} in study.json" for path, (mine, theirs) in apart.items()]
        more = f", and {len(words) - NAMED} more" if len(words) > NAMED else ""
        raise BadInput(f"it holds another run: {', '.join(words[:NAMED])}{more}")


def ended_by_another_bound(run: RunFolder, wanted: RunConfig) -> bool:
    """Whether the run that lies there has ended, and would have ended otherwise with the loss bound of `wanted`.

    The bound is no part of the hash: until a run reaches it, it changes no number. One that diverged by another bound
    says nothing of this one. A folder that cannot be read is told of elsewhere.
    """
    try:
        state, (tree, _) = run.status(), run.config_json()
        tree.pop("format", None)
        bounds = [_bound(config) for config in (from_dict(RunConfig, tree), wanted)]
        if bounds[0] == bounds[1]:
            return False
        if state["status"] == "diverged":
            return ABOVE_BOUND in str(state["why"])
        return state["status"] == "finished" and _strikes([line["loss"] for line in run.train_lines()], bounds[1])
    except (QurveError, OSError):
        return False


def serves_less(run: RunFolder, wanted: RunConfig) -> bool:
    """Whether the run that lies there is less than `wanted` asks for: stopped at another step, or without its attention
    logits, dynamics or checkpoints.

    None of these is part of the hash, since they change no number. A folder that cannot be read is told of elsewhere.
    """
    try:
        tree, _ = run.config_json()
        tree.pop("format", None)
        there = from_dict(RunConfig, tree)
    except (QurveError, OSError):
        return False
    if there.train.stop_at != wanted.train.stop_at or wanted.eval.attention_logits > there.eval.attention_logits:
        return True
    intervals = [(getattr(there.train, name), getattr(wanted.train, name)) for name in ("dynamics_every", "keep_every")]
    return any(asked is not None and (kept is None or asked % kept != 0) for kept, asked in intervals)


def _bound(config: RunConfig) -> tuple[float, int] | None:
    train = config.train
    return None if train.loss_bound is None else (train.loss_bound, train.loss_bound_steps)


def _strikes(losses: list[float], bound: tuple[float, int] | None) -> bool:
    """Whether the losses of successive steps are above the bound as many times in a row as it allows."""
    if bound is None:
        return False
    above = 0
    for loss in losses:
        above = above + 1 if loss > bound[0] else 0
        if above >= bound[1]:
            return True
    return False


def _raw_differences(tree: dict[str, Any], arm: dict[str, Any], seed: int) -> dict[str, tuple[Any, Any]]:
    """Leaves that both have and that can change the numbers; the seed of the weights, too."""
    missing = object()
    wanted = {**arm, "train": {**arm.get("train", {}), "seed": seed}}
    unhashed = {
        f"{part.name}.{field.name}"
        for part in dataclasses.fields(RunConfig)
        for field in dataclasses.fields(getattr(RunConfig(), part.name))
        if not field.metadata.get("hash", True)
    }
    found = {}
    for path, pair in differences(tree, wanted).items():
        is_in_both = all(_leaf(one, path, missing) is not missing for one in (tree, wanted))
        if is_in_both and path not in unhashed and path != "data.order_seed":
            found[path] = pair
    return found


def _leaf(tree: Any, path: str, missing: object) -> Any:
    for name in path.split("."):
        tree = tree.get(name, missing) if isinstance(tree, dict) else missing
    return tree
