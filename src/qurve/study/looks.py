"""Looks: what was seen of a comparison before it is judged, and what of that takes its verdict or widens its family.

    <pool>/looks.jsonl    one object a line: `baseline`, `arms` (`matched` of them at the baseline's point), `seeds`,
                          `looks` (those that were declared), and `evaluation`; configurations by a hash that leaves
                          out the seed; and the `runs`, by the names of their folders in the pool: where none has a
                          loss, nothing was seen

A study's folder remembers with which seeds it was run, and a pool which arms were compared in it. The rules, here and
nowhere else:

* A set of seeds that could have ended in a claim, or in a choice among seeds, is a look; one that was not declared
  takes the verdict (`undeclared`). In a pool that is so for the same evaluation: another reads other losses off.
* Arms that were compared with the same baseline, on seeds that the study has too, belong to its family of tests,
  whatever study they were in: Holm counts them (`Seen.beside`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qurve.errors import BadInput
from qurve.runfolder import RunFolder
from qurve.study.power import LEAST_SEEDS
from qurve.study.same_run import was_seen

FILE = "looks.jsonl"
FAMILIES = ("own", "matched")
"""Of tests: the arms of a study's first comparison, and the same architectures at the baseline's best point."""
Beside = Mapping[str, Sequence[str]]
"""Family -> arms beside a study's own, by hash."""


@dataclass(frozen=True)
class Seen:
    """What a study remembers of the looks before it."""

    earlier_seeds: Sequence[Sequence[int]] = ()
    """The sets of seeds that it was run with before in its folder."""
    in_pool: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    """Arm -> the sets of seeds with which another study of its pool compared it with this baseline, undeclared."""
    beside: Beside = field(default_factory=dict)
    """The arms that other studies of its pool compared with this baseline."""

    def to_json(self) -> dict[str, Any]:
        """The fields of `study.json`."""
        return {
            "earlier_seeds": [list(seeds) for seeds in self.earlier_seeds],
            "looked_in_pool": {arm: [list(seeds) for seeds in sets] for arm, sets in self.in_pool.items()},
            "compared_in_pool": {family: list(arms) for family, arms in self.beside.items()},
        }


NOTHING_SEEN = Seen()


def undeclared(earlier: Iterable[Sequence[int]], seeds: Sequence[int], looks: Sequence[int]) -> list[tuple[int, ...]]:
    """Of earlier sets of seeds, those that were looks which were not declared.

    Fewer than `LEAST_SEEDS` of the present ones can have ended in no claim, so that they make no false one likelier. Of
    declared looks each adds to the seeds of the one before: another set of as many seeds is a choice among sets.
    """
    sets, now = [tuple(one) for one in earlier], set(seeds)
    claims = [set(one) for one in sets if len(one) >= LEAST_SEEDS]

    def is_harmless(one: set[int]) -> bool:
        if len(one) < LEAST_SEEDS or one == now:
            return one <= now
        return one <= now and len(one) in looks and all(one <= other or other <= one for other in claims)

    return [one for one in sets if not is_harmless(set(one))]


# ----------------------------------------------------------------------------------------------------------- in a pool


def note(pool: Path, own: dict[str, Any]) -> list[dict[str, Any]]:
    """Note a look, once, and return those of the pool before it that saw something. One that comes again sees what was
    before it then, wherever its own runs are made.

    Raises `BadInput`, with the line, for a file that says something else, or cannot be read or written.
    """
    file = pool / FILE
    try:
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        lines = _lines(text, file)
        for place, line in enumerate(lines):
            if {**line, "runs": None} == {**own, "runs": None}:
                return _that_saw(pool, lines[:place])
        pool.mkdir(parents=True, exist_ok=True)
        torn = "" if text.endswith("\n") or not text else "\n"  # or what was torn would take this line with it
        with open(file, "a", encoding="utf-8") as log:  # one write: two studies may come at once
            log.write(torn + json.dumps(own) + "\n")
    except OSError as error:
        raise BadInput(f"{file} cannot be used ({error.strerror}); give another --pool") from None
    return _that_saw(pool, lines)


def _that_saw(pool: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        line for line in lines if "runs" not in line or any(was_seen(RunFolder(pool / run)) for run in line["runs"])
    ]


def _lines(text: str, file: Path) -> list[dict[str, Any]]:
    """What was noted. A line that is no JSON was torn by a killed process, which made and saw nothing after it: when
    that study comes again, it notes its look anew."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            tree = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not _is_look(tree):
            raise BadInput(
                f"{file}, line {number} says of no look with which seeds which arms were compared: {line[:80]}; "
                "restore it, or give another --pool"
            )
        found.append(tree)
    return found


def _is_look(tree: Any) -> bool:
    if not isinstance(tree, dict) or not all(isinstance(tree.get(k, ""), str) for k in ("baseline", "evaluation")):
        return False
    if "baseline" not in tree:
        return False
    lists = (
        (tree.get("arms"), str),
        (tree.get("matched", []), str),
        (tree.get("runs", []), str),
        (tree.get("seeds"), int),
        (tree.get("looks"), int),
    )
    return all(isinstance(values, list) and all(type(one) is kind for one in values) for values, kind in lists)


def seen_in_pool(before: Sequence[dict[str, Any]], own: dict[str, Any]) -> tuple[dict[str, list[list[int]]], Beside]:
    """What the looks before a study's own say of it: the arms, by hash, with the sets of seeds of undeclared looks at
    them, and the arms of others that share its baseline and some of its seeds."""
    lines = [line for line in before if line["baseline"] == own["baseline"]]
    found: dict[str, list[list[int]]] = {}
    for arm in own["arms"]:
        looks = [
            line
            for line in lines
            if arm in line["arms"]
            and line.get("evaluation") == own.get("evaluation")
            and set(line["seeds"]) != set(own["seeds"])
        ]
        alike = [line["seeds"] for line in looks if line["looks"] == own["looks"]]  # in declaring the same
        others = [line["seeds"] for line in looks if line["looks"] != own["looks"]]
        sets = {*undeclared(alike, own["seeds"], own["looks"]), *undeclared(others, own["seeds"], ())}
        if sets:
            found[arm] = [
                list(seeds) for seeds in dict.fromkeys(tuple(line["seeds"]) for line in looks) if seeds in sets
            ]
    shared = [line for line in lines if set(line["seeds"]) & set(own["seeds"])]
    return found, {
        family: sorted({arm for line in shared for arm in _of(line, family)} - _of(own, family)) for family in FAMILIES
    }


def _of(line: dict[str, Any], family: str) -> set[str]:
    matched = set(line.get("matched", ()))
    return matched if family == "matched" else set(line["arms"]) - matched
