"""The JSON files of a study, read in one place: whatever they hold ends in values that can be reckoned with, or in a
message that names the file and the way out.

`damage_named` makes such a message of whatever a reader stumbles over, `number` and `count` see to it that no later
sum does, and `read_study` reads `study.json` itself: it leads nobody out of its folder.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qurve.config import LARGEST, differences
from qurve.errors import BadInput

FORMAT = 1
MOST_LEVELS = 50
"""Of lists and objects within each other. No configuration has so many, and what reads them calls itself for each."""

LARGEST_FLOAT = 3.4e38
"""float32's, about: no training comes to a larger number, and the square of this is still one."""

RESTORE = "restore it, or make the study in another folder"
"""The way out of a damaged `study.json`."""

MOST_NAMED = 3
"""Rungs of a ladder, before the rest is only counted."""

MOST_LETTERS = 250
"""Of a folder's name: file systems take 255 bytes."""


@contextlib.contextmanager
def damage_named(file: Path | str, way_out: str, verdict: str = "is damaged") -> Iterator[None]:
    """Raise `BadInput`, which names the file and the way out, for whatever the block finds wrong in what it holds."""
    try:
        yield
        return
    except OSError as error:
        raise BadInput(f"{file} cannot be read ({error.strerror}); {way_out}") from None
    except BadInput as error:
        what = str(error)
    except KeyError as error:
        what = f"the field {error} is missing"
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        what = f"a field has the wrong type ({error})"
    raise BadInput(f"{file} {verdict}: {what}; {way_out}")


def read_plain(content: bytes) -> Any:
    """The JSON tree that a file's content is, if it can be written again; else raises `BadInput`."""
    try:
        tree = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not JSON ({error})") from None
    check_plain(tree)
    return tree


def number(value: Any, what: str, least: float = -LARGEST_FLOAT) -> float:
    """A number with which one can reckon: its square is a number too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= LARGEST_FLOAT:
        above = "" if least < 0 else " above zero"
        raise ValueError(f"{what} = {value!r:.40}, no number{above}")
    return float(value)


def positive(value: Any, what: str) -> float:
    """A number above zero, with which one can reckon: so are its inverse and its logarithm."""
    return number(value, what, 1 / LARGEST_FLOAT)


def count(value: Any, what: str, least: int = 1) -> int:
    """A whole number from `least` on."""
    if type(value) is not int or not least <= value <= LARGEST:
        raise ValueError(f"{what} = {value!r:.40}, no whole number from {least} on")
    return value


def no_study(folder: Path) -> str:
    """Why a folder is no study, and what to give instead."""
    rungs = sorted(str(file.parent) for file in folder.glob("rungs/*/study.json"))
    if not rungs:
        return f"{folder} is not a study folder: it has no study.json; give the folder that `qurve compare` wrote"
    more = f", or one of {len(rungs) - MOST_NAMED} more" if len(rungs) > MOST_NAMED else ""
    return f"{folder} is a ladder, and each of its rungs a study: give {' or '.join(rungs[:MOST_NAMED])}{more}"


def check_arm_name(name: Any, whose: str = "an arm's") -> None:
    """Raise `BadInput` for a name that cannot be a folder's, or would lead elsewhere."""
    if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=@+-]*", name)):
        raise BadInput(f"{whose} name becomes a folder: letters, digits and . _ = @ + - only, not {name!r}")
    if len(name) > MOST_LETTERS:
        raise BadInput(f"{whose} name becomes a folder: at most {MOST_LETTERS} letters, not {len(name)}")


def read_study(file: Path) -> dict[str, Any]:
    """The tree of a `study.json`: its name, arms (name and configuration) and seeds are there and of their types.

    Raises `BadInput`, which names the file, where they are not.
    """
    with damage_named(file, RESTORE):
        tree = read_plain(file.read_bytes())
        check_study(tree)
        return dict(tree)


def check_plain(tree: Any) -> None:
    """Raise `BadInput` for JSON that cannot be written again: nested without end, or with halves of characters."""
    level = [tree]
    for _ in range(MOST_LEVELS):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            break
    else:
        raise BadInput(f"it is nested more than {MOST_LEVELS} levels deep")
    try:
        json.dumps(tree, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"it holds half a character ({error})") from None


def check_study(tree: Any) -> None:
    """Raise `BadInput` for a tree that no reader would take: before it is written, too."""
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise BadInput(f"it is not a study of format {FORMAT}, which this version reads")
    try:
        json.dumps(tree, allow_nan=False)
    except ValueError:
        raise BadInput("it holds a number that is none: NaN or Infinity") from None
    for field, kind in (("name", str), ("arms", list), ("seeds", list)):
        if field not in tree:
            raise BadInput(f"the field {field!r} is missing")
        if not isinstance(tree[field], kind):
            raise BadInput(f"{field!r} has the wrong type: {tree[field]!r}")
    for seeds in (tree["seeds"], *_lists(tree.get("earlier_seeds", []))):
        for seed in seeds:
            if type(seed) is not int or not 0 <= seed <= LARGEST:
                raise BadInput(f"a seed is a whole number from 0 to {LARGEST}, not {seed!r:.40}")
    if not tree["seeds"] or len(set(tree["seeds"])) < len(tree["seeds"]):
        raise BadInput(f"'seeds' are different and at least one, not {tree['seeds']}")
    looked = tree.get("looked_in_pool", {})
    if not isinstance(looked, dict) or any(
        type(s) is not int for of in looked.values() for set_ in _lists(of) for s in set_
    ):
        raise BadInput(f"'looked_in_pool' are sets of seeds by arm, not {looked!r}")
    beside = tree.get("compared_in_pool", {})
    if not isinstance(beside, dict) or any(type(arm) is not str for arms in _lists([*beside.values()]) for arm in arms):
        raise BadInput(f"'compared_in_pool' are lists of arms, not {beside!r}")
    looks = tree.get("looks", [])
    if not isinstance(looks, list) or not all(type(look) is int and look > 0 for look in looks):
        raise BadInput(f"'looks' are numbers of seeds, not {looks!r}")
    for arm in tree["arms"]:
        if not isinstance(arm, dict):
            raise BadInput(f"an arm has the wrong type: {arm!r}")
        check_arm_name(arm.get("name"))
        if not isinstance(arm.get("config"), dict) or not isinstance(arm["config"].get("train", {}), dict):
            raise BadInput(f"the configuration of {arm['name']} has the wrong type")
        if type(offset := arm.get("seed_offset", 0)) is not int or not 0 <= offset <= LARGEST:
            raise BadInput(f"the seed_offset of {arm['name']} is a whole number from 0, not {offset!r:.40}")
        if offset and (both := {seed + offset for seed in tree["seeds"]} & set(tree["seeds"])):
            raise BadInput(
                f"with its seed_offset {arm['name']} has weights of seed {min(both)}, which is the baseline's"
            )
    names = [arm["name"] for arm in tree["arms"]]
    if len(set(names)) < len(names):
        raise BadInput(f"two arms have the same name (arms: {', '.join(names)})")
    check_matched(tree["arms"], tree.get("baseline"), tree.get("search"))


def check_matched(arms: list[dict[str, Any]], baseline: Any, search: Any) -> None:
    """Raise `BadInput` for an arm whose `matched` is not so: it must be another arm's architecture at the best point of
    the baseline. These are no part of the family of tests of the study's own arms, so that nothing else may be one."""
    named = {arm["name"]: arm for arm in arms}
    for arm in arms:
        if (name := arm.get("matched")) is None:
            continue
        own, base = (named.get(one) if isinstance(one, str) else None for one in (name, baseline))
        if own is None or base is None or own is base or own.get("matched") is not None:
            raise BadInput(
                f"{arm['name']} is called matched with {name!r}, which is none of the arms that were searched"
            )
        try:
            point = tuple(f"{path}." for path in search["chosen"][baseline]["point"])
        except (KeyError, TypeError):
            raise BadInput(
                f"{arm['name']} is called matched, at the baseline's best point, and no search has chosen one; such "
                "arms are made after a search"
            ) from None
        trees = [{key: value for key, value in one["config"].items() if key != "format"} for one in (arm, base, own)]
        for path, (mine, theirs) in differences(trees[0], trees[1]).items():
            if f"{path}.".startswith(point):  # a whole projection may be searched
                raise BadInput(
                    f"{arm['name']} is called matched, at the baseline's best point, and has {path} = {mine!r} where "
                    f"the baseline has {theirs!r}"
                )
        if apart := [path for path in differences(trees[0], trees[2]) if not f"{path}.".startswith(point)]:
            raise BadInput(
                f"{arm['name']} is called matched with {name}, and differs from it in {', '.join(apart[:3])}"
            )


def _lists(value: Any) -> list[list[Any]]:
    if not isinstance(value, list) or not all(isinstance(item, list) for item in value):
        raise BadInput(f"lists have the wrong type: {value!r}")
    return value


def updates_of(config: dict[str, Any]) -> int | None:
    """How many updates a run of this configuration's tree makes; None where it does not say."""
    train = config.get("train", {})
    planned = [train[key] for key in ("steps", "stop_at") if type(train.get(key)) is int]
    return min(planned) if planned else None


def one_line(text: Any) -> str:
    """One printable line: what people name things must not break a table, an SVG or a terminal."""
    return "".join(char for char in " ".join(str(text).split()) if char.isprintable())
