"""Runs that were stopped and continued: what each part of one was made with, as its environment tells.

A part that was trained with other settings than the run ends with is no run of its arm. One that was made elsewhere
(another commit, torch, machine, number of threads) may differ in its last digits, and is told.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from qurve.study.same_run import OPEN

PLACE = ("commit", "qurve", "torch", "cpu", "gpu", "device", "precision", "threads")
"""What a run's numbers may depend on, of the place where it was made."""
OF_RESUMING = ("step", "changed", "earlier_hash")
"""What an entry of `resumed` has beside the environment."""
OF_COMPILING = ("compiled", "compile_error")
"""What is found out after a run has begun or was continued: `environment.json` has it of the last time alone."""


@dataclass(frozen=True)
class Part:
    after: int
    """It begins after this step: 0 for the first."""
    environment: dict[str, Any]
    otherwise: dict[str, Any]
    """Settings that were others than at the run's end: path -> value then."""


def parts_of(environment: dict[str, Any]) -> list[Part]:
    """The parts of a run of which steps are left: what was made after a step that it went back to is gone.

    Raises `ValueError` where `environment["resumed"]` is not what `RunFolder.go_on` writes.
    """
    found = [Part(0, environment, {})]
    final: dict[str, Any] = {}
    for entry in _entries(environment):
        for path, (before, now) in entry["changed"].items():
            final[path] = now
            for part in found:
                part.otherwise.setdefault(path, before)
        there = {key: value for key, value in entry.items() if key not in OF_RESUMING}
        there |= {key: environment[key] for key in OF_COMPILING if key in environment}
        found = [*(part for part in found if part.after < entry["step"]), Part(entry["step"], there, {})]
    return [
        Part(part.after, part.environment, {k: v for k, v in part.otherwise.items() if v != final[k]}) for part in found
    ]


def _entries(environment: dict[str, Any]) -> list[dict[str, Any]]:
    entries = environment.get("resumed", [])
    for entry in entries if isinstance(entries, list) else (None,):
        if not (
            isinstance(entry, dict)
            and type(entry.get("step")) is int
            and isinstance(entry.get("changed"), dict)
            and all(isinstance(pair, list) and len(pair) == 2 for pair in entry["changed"].values())
        ):
            raise ValueError("'resumed' in its environment.json is not a list of what was resumed")
    return list(entries)


def check_settings(parts: Sequence[Part], arm: dict[str, Any]) -> None:
    """Raise `ValueError` where a part was trained with a setting that the arm does not leave to the run."""
    for part, following in pairwise(parts):
        for path, value in part.otherwise.items():
            if not _is_open(path, arm):
                raise ValueError(
                    f"it holds another run: {path} was {value!r} for steps {part.after + 1:,} to {following.after:,} "
                    "of it"
                )


def _is_open(path: str, arm: dict[str, Any]) -> bool:
    node: Any = arm
    for name in path.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return path in OPEN and node == OPEN[path]


def in_words(parts: Sequence[Part]) -> list[str]:
    """For each part that was made elsewhere than the one before it: after which step, and what was another there."""
    found = []
    for before, part in pairwise(parts):
        here, there = before.environment, part.environment
        apart = [key for key in PLACE if key in here and key in there and here[key] != there[key]]
        words = [f"{key} {json.dumps(here[key])}, then {json.dumps(there[key])}" for key in apart]
        for path in dict.fromkeys([*before.otherwise, *part.otherwise]):
            is_another = before.otherwise.get(path, ...) != part.otherwise.get(path, ...)
            words += [f"another {path}"] if is_another and path.removeprefix("train.") not in PLACE else []
        if words:
            found.append(f"continued after step {part.after:,} elsewhere than it began: {'; '.join(words)}")
    return found
