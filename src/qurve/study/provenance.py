"""Where a study's numbers come from: hashes of data, order, code, configurations and environment, and the commands that
make them again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qurve.config import apply_settings, from_dict, hashed_leaves, to_dict
from qurve.errors import BadInput
from qurve.runfolder import MEASURED, RunFolder
from qurve.study.results import Arm, Run, StudyResults
from qurve.study.source import kept

MOST_SETTINGS = 12
"""A run that needs more of them is no variation of a preset: its study's file says more."""
NEAREST = 3
"""So many presets are tried, the nearest first."""
OWN = ("train.seed", "data.path", "data.fingerprint")
"""What each run has of its own, or finds in its data."""
LATER = ("format", "started", "resumed", *MEASURED)
"""Of an environment, what differs between two runs in the same one."""


@dataclass(frozen=True)
class Provenance:
    """Each a tuple of the distinct values over the runs; empty where no run tells."""

    data: tuple[str, ...]
    """Fingerprints of the tokens."""
    order: str
    """sha256 over the digests of all batches that were compared, seed by seed; empty where there are none."""
    code: tuple[str, ...]
    """`qurve VERSION, commit HASH`"""
    environments: tuple[str, ...]
    """sha256 of what the runs' environments say, without their times and what was measured."""
    configurations: dict[tuple[str, int], str]
    """(arm, seed) -> the hash of the run's configuration."""


def provenance(results: StudyResults) -> Provenance:
    data: dict[str, None] = {}
    hashes: dict[tuple[str, int], str] = {}
    for run in results.runs:
        try:
            tree, config_hash = RunFolder(folder_of(results, run)).config_json()
            fingerprint = tree.get("data", {}).get("fingerprint")
        except (BadInput, OSError, ValueError, AttributeError):
            continue  # a run that is missing or damaged tells nothing; its line in the report says so
        hashes[run.arm, run.seed] = config_hash
        if fingerprint:
            data[str(fingerprint)] = None
    digests = "\n".join(f"{seed.seed}:{seed.digest}" for seed in results.batches.seeds if seed.digest)
    environments = [part.environment for run in results.runs if run.environment for part in run.parts]
    return Provenance(
        data=tuple(data),
        order=_sha256(digests) if digests else "",
        code=_distinct(_code(environment) for environment in environments),
        environments=_distinct(
            _sha256(json.dumps({k: v for k, v in environment.items() if k not in LATER}, sort_keys=True))
            for environment in environments
        ),
        configurations=hashes,
    )


def folder_of(results: StudyResults, run: Run) -> Path:
    return results.folder / "runs" / run.arm / f"seed-{run.seed}"


def commands(results: StudyResults) -> list[str]:
    """What makes the study again, in a clone of the code."""
    commits = {part.environment.get("commit") for run in results.runs if run.environment for part in run.parts}
    return made_by(commits, kept(results.folder), results.command, "study")


def made_by(commits: Collection[Any], copies: Mapping[str, str], command: str, what: str) -> list[str]:
    """The commit, where the runs agree on one, and the command.

    Of what comes from a file, comments say where a copy of that is (path -> sha256, as `kept` has them), and of what it
    imports from beside it.
    """
    lines = []
    if len(commits) == 1 and isinstance(commit := next(iter(commits)), str) and commit:
        clean, changed, _ = commit.partition("+changes")
        lines = [f"git checkout {clean}", *(["# and changes that were not committed"] if changed else [])]
    if copies:
        lines.append(f"# the {what}'s file as it was, with what it imports from beside it:")
        lines += [f"# {path} in the {what}'s folder, sha256 {sha}" for path, sha in copies.items()]
    return [*lines, command]


def single_run(results: StudyResults, arm: Arm) -> str | None:
    """The `qurve train` line that makes the arm's run of the first seed; None where no preset is near it.

    It is checked: preset and settings together give the arm's configuration in every leaf that can change the numbers.
    """
    from qurve import presets
    from qurve.train.config import RunConfig

    try:
        wanted = from_dict(RunConfig, arm.config)
    except (BadInput, ValueError):
        return None  # of kinds, or of a version, that are not known here
    leaves = hashed_leaves(wanted)
    distances = {name: len(_other(_leaves(name), leaves)) for name in presets.names()}
    for preset in sorted(distances, key=lambda name: distances[name])[:NEAREST]:
        settings = _settings(preset, wanted, leaves)
        if settings is not None:
            break
    else:
        return None
    threads = {run.environment.get("threads") for run in arm.runs.values() if run.environment}
    if arm.setting("train.threads") is None and len(threads) == 1 and isinstance(only := threads.pop(), int):
        settings = [*settings, f"train.threads={only}"]  # the study shares the cores out; the last bits hang on it
    seed = results.seeds[0]
    if arm.seed_offset and arm.setting("data.order_seed") is None:
        settings = [*settings, f"data.order_seed={seed}"]
    words = ["qurve", "train", preset, "--out", f"runs/{arm.name}", "--seed", str(seed + arm.seed_offset)]
    for setting in settings:
        words += ["--set", setting]
    return shlex.join([*words, *_data_option(results.command)])


@functools.cache
def _leaves(preset: str) -> dict[str, Any]:
    from qurve import presets

    return hashed_leaves(presets.get(preset))


def _settings(preset: str, wanted: Any, leaves: dict[str, Any]) -> list[str] | None:
    """The settings that turn a preset into the configuration; None where no settings do, or too many."""
    from qurve import presets

    settings, tree = [], to_dict(wanted)
    paths = _other(_leaves(preset), leaves)
    whole = {path.removesuffix(".kind") for path in paths if path.endswith(".kind")}
    for path in [*sorted(whole), *(path for path in paths if not path.endswith(".kind"))]:
        node = tree
        for name in path.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        value = node["kind"] if isinstance(node, dict) and path in whole else node
        settings.append(f"{path}={value if isinstance(value, str) else json.dumps(value)}")
    if len(settings) > MOST_SETTINGS:
        return None
    try:
        made = apply_settings(presets.get(preset), settings)
    except (BadInput, ValueError):
        return None
    return None if _other(hashed_leaves(made), leaves) else settings


def _other(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    absent = object()
    paths = dict.fromkeys([*a, *b])
    return [path for path in paths if path not in OWN and a.get(path, absent) != b.get(path, absent)]


def _data_option(command: str) -> list[str]:
    """`--data` as the study was given it."""
    try:
        words = shlex.split(command)
    except ValueError:
        return []
    for place, word in enumerate(words):
        if word.startswith("--data="):
            return [word]
        if word == "--data":
            return words[place : place + 2]
    return []


def _code(environment: dict[str, Any]) -> str:
    version, commit = environment.get("qurve"), environment.get("commit")
    return f"qurve {version or '?'}, commit {commit or 'unknown'}"


def _distinct(values: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def short(hashes: Sequence[str], length: int = 16) -> str:
    return ", ".join(value[:length] for value in hashes)
