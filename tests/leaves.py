"""Walking a configuration: every leaf with its type, and another value that it may take."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from qurve.projections import ProjectionConfig


class Leaf(NamedTuple):
    path: str
    hint: Any
    value: Any
    hashed: bool


def leaves(config: Any, path: str = "", hashed: bool = True) -> Iterator[Leaf]:
    """Every leaf of a tree of dataclasses, depth first."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        where = f"{path}.{field.name}" if path else field.name
        value, counts = getattr(config, field.name), hashed and field.metadata.get("hash", True)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, where, counts)
        else:
            yield Leaf(where, hints[field.name], value, counts)


def another(hint: Any, value: Any) -> Any:
    """A value of the hinted type that differs from `value`: near it, so that what fits together still does."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    member = next(m for m in members if m is not types.NoneType)
    if typing.get_origin(member) is typing.Literal:
        return next(a for a in typing.get_args(member) if a != value)
    if typing.get_origin(member) is tuple:
        item = typing.get_args(member)[0]
        if dataclasses.is_dataclass(item):
            return (*value, item((0,), window=3))  # type: ignore[operator]
        return (*value, "test" if item is str else another(item, None))
    if isinstance(value, ProjectionConfig):
        return next(kind() for kind in ProjectionConfig.registry.values() if kind is not type(value))
    if member is bool:
        return not value
    if member is int:
        return 1 if value is None else 2 * value or 1
    if member is float:
        return 0.25 if value is None else value / 2 or 0.125
    assert member is str, hint
    return "cpu" if value == "auto" else f"{value or ''}x"


def places(config: ProjectionConfig) -> tuple[str, ...]:
    """Which of a model's projections this kind can be, by what it reads."""
    return ("output",) if config.also_reads == "block_input" else ("query", "key", "value")
