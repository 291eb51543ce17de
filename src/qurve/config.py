"""Frozen dataclasses <-> JSON, their content hash, and `path=value` settings: the machinery of every configuration.

A configuration is a tree of frozen dataclasses whose leaves are bool, int, float, str, None or tuples of these. A node
that comes in several kinds (a projection, say) is a subclass of `Choice`: in JSON it carries its registered name as
`"kind"`. The classes themselves stand beside what they configure; none of them imports torch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import sys
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from qurve.errors import BadInput, did_you_mean
from qurve.plugins import load_plugins

C = TypeVar("C")

FORMAT = 1
"""Version of the JSON form; a file that states another one is refused."""

LARGEST = 2**62
"""Of whole numbers: beyond, 64 bits do not hold what is computed from them."""

NOT_HASHED = {"hash": False}
"""Field metadata for what does not change the numbers: where and how a run is stored, logged, checkpointed, stopped."""


def or_else(words: str) -> dict[str, str]:
    """Field metadata of an optional field: what takes its place where it is None, in words, for tables of settings."""
    return {"or_else": words}


@dataclass(frozen=True)
class Choice:
    """Base of configurations that come in several registered kinds. A direct subclass opens a registry of its own."""

    kind: ClassVar[str]
    registry: ClassVar[dict[str, type[Any]]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Choice in cls.__bases__:
            cls.registry = {}

    @classmethod
    def register(cls, kind: str) -> Callable[[type[C]], type[C]]:
        """Class decorator: `@ProjectionConfig.register("linear")`."""

        def add(member: type[C]) -> type[C]:
            if cls.registry.get(kind, member) is not member:
                raise ValueError(f"{cls.__name__} {kind!r} is registered already, by {cls.registry[kind]!r}")
            member.kind = kind  # type: ignore[attr-defined]
            cls.registry[kind] = member
            return member

        return add


# ---------------------------------------------------------------------------------------------------------------- JSON


def to_dict(config: Any) -> Any:
    """The plain JSON tree of a configuration."""
    if dataclasses.is_dataclass(config):
        tree = {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
        return {"kind": config.kind, **tree} if isinstance(config, Choice) else tree
    if isinstance(config, tuple):
        return [to_dict(item) for item in config]
    return config


def from_dict(cls: type[C], tree: Any, path: str = "") -> C:
    """Build `cls` from its JSON tree, checking every name and type; missing fields take their defaults."""
    if not isinstance(tree, dict):
        raise BadInput(f"{path or 'the configuration'} must be an object, not {tree!r}")
    tree = dict(tree)
    if issubclass(cls, Choice):
        kind = tree.pop("kind", None)
        if isinstance(kind, str) and kind not in cls.registry:
            load_plugins()
        if not isinstance(kind, str) or kind not in cls.registry:
            hint = did_you_mean(str(kind), cls.registry) + "; one of your own: name its file in QURVE_PLUGINS"
            raise BadInput(f"{_join(path, 'kind')} = {kind!r} is unknown{hint}")
        cls = cls.registry[kind]
    hints = _hints(cls)
    for name in tree:
        if name not in hints:
            raise BadInput(f"unknown field {_join(path, name)!r}{did_you_mean(name, hints)}")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if field.name not in tree and not optional:
            raise BadInput(f"{_join(path, field.name)} is missing")
    fields = {name: _parse(hints[name], value, _join(path, name)) for name, value in tree.items()}
    try:
        return cls(**fields)
    except BadInput:
        raise
    except ValueError as error:
        raise BadInput(f"{path or 'the configuration'}: {error}") from None


def to_json(config: Any) -> str:
    return json.dumps({"format": FORMAT, **to_dict(config)}, indent=2, allow_nan=False) + "\n"


def from_json(cls: type[C], text: str, source: str = "the configuration") -> C:
    try:
        tree = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadInput(f"{source}: not JSON ({error})") from None
    if not isinstance(tree, dict):
        raise BadInput(f"{source}: must hold a JSON object")
    if tree.pop("format", None) != FORMAT:
        raise BadInput(f"{source}: not a qurve configuration of format {FORMAT}")
    try:
        return from_dict(cls, tree)
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from None


def content_hash(config: Any) -> str:
    """sha256 of everything that can change the numbers (fields marked `NOT_HASHED` are left out)."""
    typed = from_dict(type(config), to_dict(config))  # so that 1 and 1.0 in a float's place are one value
    canonical = json.dumps(_hashed(typed), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def differences(a: Any, b: Any) -> dict[str, tuple[Any, Any]]:
    """The leaves in which two configurations differ: `{"train.lr": (0.001, 0.002), …}`."""
    return _differences(_flatten(to_dict(a), ""), _flatten(to_dict(b), ""))


def in_place_of_none(config: Any, path: str) -> str:
    """What the configuration takes where the setting at `path` is None, in words; "none" where nothing does."""
    *nodes, leaf = path.split(".")
    for name in nodes:
        config = getattr(config, name)
    return next((str(f.metadata.get("or_else", "none")) for f in dataclasses.fields(config) if f.name == leaf), "none")


def hashed_leaves(config: Any) -> dict[str, Any]:
    """Every leaf that can change the numbers, by path: two configurations with equal ones have one content hash."""
    return _flatten(_hashed(from_dict(type(config), to_dict(config))), "")


def hashed_differences(a: Any, b: Any) -> dict[str, tuple[Any, Any]]:
    return _differences(hashed_leaves(a), hashed_leaves(b))


def _differences(left: dict[str, Any], right: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        key: (left.get(key), right.get(key))
        for key in dict.fromkeys([*left, *right])
        if key not in left or key not in right or left[key] != right[key]
    }


def check_values(config: Any) -> None:
    """Raise `BadInput` (a `ValueError`) for a field whose value is not of its type or not one of its values.

    Called when a configuration is made, so that Python gets the same answer as JSON and the command line.
    """
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        if not (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
            _parse(hint, value, name)
        elif not isinstance(value, hint):
            raise BadInput(f"{name} = {value!r} is no {hint.__name__}")


def _hashed(config: Any) -> Any:
    if dataclasses.is_dataclass(config):
        kept = [f for f in dataclasses.fields(config) if f.metadata.get("hash", True)]
        tree = {f.name: _hashed(getattr(config, f.name)) for f in kept}
        return {"kind": config.kind, **tree} if isinstance(config, Choice) else tree
    return to_dict(config)


def _flatten(tree: Any, path: str) -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {leaf: value for name, sub in tree.items() for leaf, value in _flatten(sub, _join(path, name)).items()}


# ------------------------------------------------------------------------------------------------------------ settings


def apply_settings(config: C, settings: Iterable[str]) -> C:
    """Apply `path=value` settings in order, each resolved and type-checked against the tree.

    `model.query=linear` replaces a choice by another kind's defaults, `model.query.width=64` sets a field of the
    present kind. Raises `BadInput` naming the setting and the nearest right name. Only what comes out of all of them
    has to fit together: one may ask for what a later one makes possible.
    """
    draft, trouble, blamed = config, "", ""
    cause: ValueError | None = None
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path.strip():
            raise BadInput(f"--set {setting!r}: write it as path=value, for example model.dropout=0.1")
        draft = _set(draft, path.strip().split("."), text.strip(), path.strip())
        try:
            config, trouble = _checked(draft), ""
        except ValueError as error:
            if str(error) != trouble:
                trouble, cause = str(error), error
                blamed = trouble if isinstance(error, BadInput) else f"--set {path.strip()}={text.strip()}: {error}"
    if trouble:
        raise BadInput(blamed) from cause
    return config


def _checked(draft: C) -> C:
    """A configuration anew, from its leaves up, with the checks that `_set` leaves out."""
    fields = {f.name: getattr(draft, f.name) for f in dataclasses.fields(draft)}  # type: ignore[arg-type]
    return type(draft)(**{name: _checked(v) if dataclasses.is_dataclass(v) else v for name, v in fields.items()})


def _set(config: Any, names: list[str], text: str, path: str) -> Any:
    hints = _hints(type(config))
    name = names[0]
    if name not in hints:
        raise BadInput(f"--set {path}: there is no field {name!r}{did_you_mean(name, hints)}")
    current = getattr(config, name)
    if len(names) > 1 and not dataclasses.is_dataclass(current):
        raise BadInput(f"--set {path}: {name!r} is a value ({current!r}) and has no field {names[1]!r}")
    try:
        value = (
            _set(current, names[1:], text, path)
            if len(names) > 1
            else _parse(hints[name], _literal(text, hints[name]), path)
        )
    except BadInput:
        raise
    except ValueError as error:
        raise BadInput(f"--set {path}={text}: {error}") from None
    changed = copy.copy(config)  # whose checks are made when all is set
    object.__setattr__(changed, name, value)
    return changed


def _literal(text: str, hint: Any) -> Any:
    """Read a command-line value. A string field takes the text as it is; the rest is JSON, or a bare word."""
    members = typing.get_args(hint) if _is_union(hint) else (hint,)
    if isinstance(hint, type) and issubclass(hint, Choice) and not text.startswith("{"):
        return {"kind": text}
    if text in ("None", "none", "null") and types.NoneType in members:
        return None
    if str in members:
        return text
    lowered = {"True": "true", "False": "false"}.get(text, text)
    try:
        return json.loads(lowered)
    except RecursionError:
        raise BadInput(f"{text[:40]}… is nested too deeply") from None
    except ValueError:
        try:
            return float(text)  # 1e-3, 6E-4: JSON wants a digit before the exponent's sign only, Python is the wider
        except ValueError:
            return text


def _parse(hint: Any, value: Any, path: str) -> Any:
    """Check `value` against a type hint and return it in that type. Whole floats are ints, ints are floats; no more."""
    origin = typing.get_origin(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_dict(hint, value, path)
    if origin is typing.Literal:
        if value in typing.get_args(hint) and not isinstance(value, bool):
            return value
        allowed = [str(a) for a in typing.get_args(hint)]
        raise BadInput(f"{path} = {value!r} is not one of its values{did_you_mean(str(value), allowed)}")
    if _is_union(hint):
        for member in typing.get_args(hint):
            if isinstance(value, dict) and dataclasses.is_dataclass(member):
                return _parse(member, value, path)  # whose error names the field
            try:
                return _parse(member, value, path)
            except BadInput:
                continue
    elif origin is tuple:
        if isinstance(value, (list, tuple)):
            item = typing.get_args(hint)[0]
            return tuple(_parse(item, v, f"{path}[{i}]") for i, v in enumerate(value))
    elif hint is types.NoneType:
        if value is None:
            return None
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is int:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1:
            if abs(value) > LARGEST:
                raise BadInput(f"{path} = {value!r:.30} is too large for any use")
            return int(value)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
            return float(value)
    elif hint is str and isinstance(value, str):
        return value
    raise BadInput(f"{path} = {value!r} is not {_describe(hint)}")


def _describe(hint: Any) -> str:
    if _is_union(hint):
        return " or ".join(_describe(member).removeprefix("a ").removeprefix("an ") for member in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        examples = {str: '["a", "b"]', int: "[0, 1]"}
        return f"a list such as {examples.get(typing.get_args(hint)[0], '[{…}]')}"
    if isinstance(hint, type) and issubclass(hint, Choice):
        return 'an object such as {"kind": …}'
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a finite number",
        str: "a text",
        types.NoneType: "none",
    }
    return names.get(hint, f"a value of type {hint}")


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _hints(cls: type[Any]) -> dict[str, Any]:
    return _hints_of(cls)  # type: ignore[arg-type]  # classes are hashable; mypy doubts it


@functools.cache
def _hints_of(cls: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
