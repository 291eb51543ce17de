"""What commands share: their common options, and small helpers."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg

from qurve.errors import BadInput
from qurve.files import claimed

if TYPE_CHECKING:
    from qurve.data.loader import TokenData
    from qurve.train.config import DataConfig

option = functools.partial(arg, help_behavior_hint="")
"""An option whose help says what it is by default."""

Settings = Annotated[
    UseAppendAction[tuple[str, ...]],
    arg(name="set", metavar="PATH=VALUE", help="Set any field of the configuration, e.g. model.dropout=0.1."),
]
Json = Annotated[
    FlagCreatePairsOff[bool],
    option(name="json", help="Print one JSON document to standard output, and nothing else there."),
]
Data = Annotated[
    Path | None, option(metavar="DIR", help="Prepared folder (see `qurve prepare`). Default: the embedded corpus.")
]
Device = Annotated[
    str | None, option(metavar="DEVICE", help="cpu, cuda or cuda:N. Default: the GPU when there is one.")
]
Precision = Annotated[
    Literal["auto", "float32", "bf16"] | None,
    option(metavar="auto|float32|bf16", help="Of the matrix products; auto: bf16 where the hardware has it."),
]


def given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise BadInput(f"{name} {value}: it must be at least {least}")


@contextlib.contextmanager
def data_in(folder: Path, config: DataConfig) -> Iterator[TokenData]:
    """The data that `config` names. The embedded corpus is prepared in `folder`, and goes again on a refusal."""
    from qurve.train.data import open_data

    made = [place for place in (folder, *folder.parents) if not place.exists()]
    is_missing, prepared = not (folder / "data").exists(), False
    try:
        data = open_data(config, folder / "data")
        prepared = is_missing and config.path is None
        yield data
    except BadInput:
        if prepared:  # by us; but another process may have begun with it in the meantime, and then has the lock
            with contextlib.suppress(BadInput), claimed(folder):
                if not (folder / "config.json").exists() and not (folder / "study.json").exists():
                    shutil.rmtree(folder / "data")
        for place in made:
            with contextlib.suppress(OSError):  # it is not empty, or was never made
                place.rmdir()
        raise


def console_for(as_json: bool) -> Console:
    """Where people read: standard output, or standard error when that is kept for JSON."""
    return Console(stderr=as_json)


def plain(console: Console) -> Callable[[str], None]:
    """Say a text as it is: a path is no markup, and no line is broken."""
    return lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's standard error, nothing in a log; what it yields is told how many are done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = Console(stderr=True)
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
