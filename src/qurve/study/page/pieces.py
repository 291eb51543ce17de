"""What sections are made of: pictures with their numbers, macros of `sections.html`, tables in words."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from qurve.study import tables
from qurve.study.curves import Curve, thinned
from qurve.study.drawing import NARROW, WIDE, svg
from qurve.study.results import StudyResults
from qurve.study.worth import Table

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Section:
    title: str
    fragment: Callable[[StudyResults], str | None]
    by_arm: bool = False
    """It has a row, a line or a column for each arm: folded away where a map says the same of very many."""


@dataclass(frozen=True)
class Numbers:
    """The table that says in numbers what a figure shows."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


MOST_COLUMNS = 8
"""Steps in the table beside a figure of curves."""


def numbers_of(title: str, curves: dict[str, Curve], cell: Callable[[float], str]) -> Numbers | None:
    """Curves as a table, a row each, at some of their steps."""
    steps = sorted({step for curve in curves.values() for step, _ in curve})
    shown = [step for step, _ in thinned([(step, 0.0) for step in steps], MOST_COLUMNS)]
    if not shown:
        return None
    rows = []
    for label, curve in curves.items():
        values = dict(curve)
        rows.append([label, *(cell(values[step]) if step in values else tables.NONE for step in shown)])
    return Numbers(title, ["arm", *(f"step {step:,}" for step in shown)], rows)


def aside(results: StudyResults, look: str = "dotted, in their architectures' colours") -> str:
    """What a figure of curves says of the arms that it leaves out, if there are any."""
    if not results.matched:
        return ""
    return (
        " The arms at the baseline's best point stand in the numbers below, and are drawn when their buttons are "
        f"pressed: {look}."
    )


def picture(
    name: str,
    draw: Callable[[float], Figure],
    *,
    alt: str,
    caption: str,
    numbers: Numbers | None = None,
) -> str:
    """A figure with its caption and its numbers; `draw` takes a width in inches. `name` is its id in the page."""
    from markupsafe import Markup

    sizes = {
        size: Markup(svg(draw(width), f"{name}-{size}", themed=True))
        for size, width in (("wide", WIDE), ("narrow", NARROW))
    }
    return macro("figure", name, sizes, alt, caption, numbers)


def in_table(name: str, table: Table) -> str:
    """A table in words, its notes below; `name` is its id in the page."""
    return macro("words", name, table)


def macro(name: str, *values: Any) -> str:
    """The HTML that a macro of `sections.html` makes of these values."""
    return str(getattr(environment().get_template("sections.html").module, name)(*values))


@functools.cache
def environment() -> Environment:
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("qurve.study.page", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        signed=tables.signed,
        plain=tables.plain,
        rate=tables.rate,
        chance=tables.chance,
        sentence=sentence,
    )
    return made


def sentence(words: str) -> str:
    return words[:1].upper() + words[1:].replace(" %", "\u00a0%") + "."  # no line break before the sign


def text(name: str) -> str:
    """A file that lies beside this one."""
    return resources.files("qurve.study.page").joinpath(name).read_text(encoding="utf-8")
