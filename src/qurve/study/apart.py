"""Peak and floor apart: what a search found along each of its axes, and of each arm at the points chosen for others.

A gain of best against best holds the rates' share as well. Here one sees what a peak or a floor alone does to each arm,
and what the baseline and the controls are at the peak and floor that suit the variant. Losses are the search's own, on
validation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qurve.study.axes import Value
from qurve.study.results import Arm, StudyResults
from qurve.study.search import Point
from qurve.study.searched import Searched, on
from qurve.study.settings import in_words
from qurve.study.tables import NONE, plain, rate
from qurve.study.worth import Table

MOST_COLUMNS = 12
"""More values than this were drawn, not laid out: they say nothing beside each other."""

IN_WORDS = {
    "train.lr": "peak",
    "train.min_lr": "floor",
    "train.min_lr/train.lr": "floor / peak",
    "train.weight_decay": "decay",
}
CHOSEN = " ◂"


@dataclass(frozen=True)
class SearchedArm:
    """What the search chose for an arm, and what it was chosen from."""

    arm: Arm
    point: tuple[tuple[str, str], ...]
    """Setting and value, in words; empty where nothing is chosen."""
    without: str
    """Why nothing is chosen, where it is not."""
    val_loss: float | None
    points: int
    broken: int
    """Points that did not finish."""
    edges: tuple[str, ...]
    """Axes at whose open edge the choice lies."""


def searched_arms(results: StudyResults) -> list[SearchedArm]:
    """Every arm that was searched, in the study's order; none without a search."""
    search, found = results.search, []
    for arm in results.arms if search is not None else ():
        if search is None or arm.matched is not None or arm.seed_offset:
            continue
        chosen, points = search.chosen.get(arm.name), search.points(arm.name)
        found.append(
            SearchedArm(
                arm,
                () if chosen is None else tuple((path, in_words(value)) for path, value in chosen.point or ()),
                "not yet" if chosen is None else "none: no point finished with every seed",
                None if chosen is None else chosen.val_loss,
                len(points),
                sum(loss is None for loss in points.values()),
                () if chosen is None else tuple(axis for axis, *_ in search.edges(arm.name)),
            )
        )
    return found


def search_table(results: StudyResults) -> Table | None:
    """The same as a table in words; None without a search."""
    search = results.search
    if search is None:
        return None
    rows = [
        [
            one.arm.label,
            ", ".join(f"{path} {value}" for path, value in one.point) or one.without,
            plain(one.val_loss, 4),
            str(one.points),
            str(one.broken),
            ", ".join(one.edges) or ("no" if one.point else NONE),
        ]
        for one in searched_arms(results)
    ]
    seeds = ", ".join(map(str, search.seeds))
    note = f"{search.sampler} over {', '.join(search.axes)}, seeds {seeds}; chosen on validation."
    head = ["arm", "chosen point", "validation loss there", "points tried", "did not finish", "at an open edge"]
    return Table("What the search chose", head, rows, [note])


def apart_tables(search: Searched, labels: Mapping[str, str]) -> list[Table]:
    """A table for each of several axes, and one of every arm at every point that was chosen.

    `labels` are the arms by name; those that the search did not try are passed over.
    """
    tried = {arm: label for arm, label in labels.items() if search.points(arm)}
    axes = search.axes if len(search.axes) > 1 else ()  # one alone is all there is to see
    found = [*(_along(search, axis, tried) for axis in axes), _at_choices(search, tried)]
    return [table for table in found if table is not None]


def _along(search: Searched, axis: str, labels: Mapping[str, str]) -> Table | None:
    margins = {arm: search.margin(arm, axis) for arm in labels}
    values = list(dict.fromkeys(value for margin in margins.values() for value in margin))
    if not 2 <= len(values) <= MOST_COLUMNS:
        return None
    rows = []
    for arm, label in labels.items():
        chosen = search.chosen.get(arm)
        own = None if chosen is None or chosen.point is None else on(axis, chosen.point)
        cells = [_loss(margins[arm], value) + (CHOSEN if value == own else "") for value in values]
        rows.append([label, *cells])
    what = IN_WORDS.get(axis, axis)
    others = ", ".join(IN_WORDS.get(other, other) for other in search.axes if other != axis)
    note = f"The lowest validation loss at each {what}, over {others}.{_seeds(search)} ◂ the arm's own choice."
    return Table(f"By {what} alone", ["arm", *(f"{what} {_short(value)}" for value in values)], rows, [note])


def _at_choices(search: Searched, labels: Mapping[str, str]) -> Table | None:
    own = {arm: chosen.point for arm, chosen in search.chosen.items() if arm in labels and chosen.point is not None}
    points: dict[frozenset[tuple[str, Value]], Point] = {frozenset(point): point for point in own.values()}
    if not 2 <= len(points) <= MOST_COLUMNS:
        return None
    rows = []
    for arm, label in labels.items():
        losses = {frozenset(point): loss for point, loss in search.points(arm).items()}
        mine = frozenset(own[arm]) if arm in own else None
        rows.append([label, *(_loss(losses, key) + (CHOSEN if key == mine else "") for key in points)])
    head = [", ".join(f"{IN_WORDS.get(path, path)} {_short(value)}" for path, value in p) for p in points.values()]
    note = (
        f"Validation loss of each arm at each point that was chosen for one of them.{_seeds(search)} ◂ the arm's own "
        "choice."
    )
    return Table("Each arm at the points chosen for the others", ["arm", *head], rows, [note])


def _loss(losses: Mapping[Any, float | None], key: Any) -> str:
    if key not in losses:
        return NONE
    return "did not finish" if losses[key] is None else plain(losses[key], 4)


def _seeds(search: Searched) -> str:
    one = len(search.seeds) == 1
    return " One seed: no test." if one else f" Mean over {len(search.seeds)} seeds of the search: no test."


def _short(value: Value) -> str:
    return rate(value) if isinstance(value, float) else str(value)
