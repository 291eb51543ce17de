"""The published table of refusals: it says what the code says, and nothing is refused that it does not have."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from qurve.config import Choice

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "refusals.py"))
ROWS = [(title, row) for title, rows in TOOL["REFUSALS"].items() for row in rows]


def test_the_page_is_the_codes() -> None:
    assert (ROOT / "docs/refusals.md").read_text() == TOOL["page"](), "run: python tools/refusals.py"


@pytest.mark.parametrize("row", [row for _, row in ROWS], ids=" ".join)
def test_a_refusal_names_the_thing_and_its_reason(row: tuple[str, ...]) -> None:
    said = TOOL["message"](row)
    assert len(said) > 20
    assert re.match(r"((model|train|mixer|mlp|positions|residual)\.|heads of )", said)


@pytest.mark.parametrize("row", [row for title, row in ROWS if title.startswith("Combinations")], ids=" ".join)
def test_a_refused_combination_has_a_way_out(row: tuple[str, ...]) -> None:
    assert re.search(r"\b(use|give|take|add|leave|keep|allot|nearest|it is for|needs|equally)\b", TOOL["message"](row))


# ------------------------------------------------------------------------------------------------------ nothing is left


def modules() -> set[str]:
    """Where the configurations of a model are: of every registered kind, and of what they have in common."""
    kinds = [kind for base in Choice.__subclasses__() for kind in base.registry.values()]
    classes = {cls for kind in kinds for cls in kind.__mro__ if issubclass(cls, Choice) and cls is not Choice}
    of_models = ("qurve.model.", "qurve.projections.", "qurve.zoo.")
    return {"qurve.model.config", *(cls.__module__ for cls in classes if cls.__module__.startswith(of_models))}


def refusals_in(module: str) -> Iterator[tuple[str, int, int]]:
    """File, first and last line of every `raise` of a refusal; those that pass on another's words left out."""
    file = str(importlib.import_module(module).__file__)
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call) or node.cause is not None:
            continue
        if ast.unparse(node.exc.func) in ("BadInput", "ValueError"):
            yield file, node.lineno, node.end_lineno or node.lineno


def lines_that_raise(row: tuple[str, ...]) -> set[tuple[str, int]]:
    """Every line of a configuration that an error is raised in, or passes through, on the way to this refusal."""
    found = set()

    def follow(frame: FrameType, event: str, _: Any) -> Any:
        if event == "exception":
            found.add((frame.f_code.co_filename, frame.f_lineno))
        return follow

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        TOOL["refusal"](row)
    finally:
        sys.settrace(before)
    return found


def test_every_refusal_of_the_code_has_a_row() -> None:
    reached = set().union(*(lines_that_raise(row) for _, row in ROWS))
    missing = [
        f"{Path(file).relative_to(ROOT)}:{first}"
        for module in sorted(modules())
        for file, first, last in refusals_in(module)
        if not any((file, line) in reached for line in range(first, last + 1))
    ]
    assert missing == [], "add settings that reach them to tools/refusals.py"
