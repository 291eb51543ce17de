"""Kinds from outside of the package: where the Python files are that register them.

`QURVE_PLUGINS` lists such files, separated as in `PATH`. They are imported when a configuration names a kind that is
not known. What a run's folder says is never imported: who sets the variable, or imports the file, decides.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from qurve.errors import BadInput

VARIABLE = "QURVE_PLUGINS"

_named: set[str] = set()
"""Folders that are on the path for what was loaded from them."""


def load_plugins() -> None:
    """Import the files that `QURVE_PLUGINS` lists. Raises `BadInput` for one that cannot be."""
    for file in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        load(Path(file))


def load(file: Path) -> None:
    """Import a file as the module that it is for the files beside it, once.

    Of files of one name in several folders it is this one that is imported; there can be but one in a process.
    """
    if file.suffix != ".py" or not file.is_file():
        raise BadInput(f"{VARIABLE}: there is no Python file {file}")
    make_importable(file.parent)
    try:
        module = importlib.import_module(file.stem)
    except (Exception, SystemExit) as error:  # anything can go wrong in a file that somebody wrote
        raise BadInput(f"{VARIABLE}: {file} cannot be run: {type(error).__name__}: {error}") from error
    found = getattr(module, "__file__", None)
    if found is None or not file.samefile(found):
        raise BadInput(f"{VARIABLE}: {file} has the name of another module ({found or file.stem}); rename it")


def make_importable(folder: Path) -> None:
    """Let the files of a folder be imported by their names: here, and in worker processes, which inherit the path.

    At the end of the path, so that they stand in nobody's way; before folders that were named earlier, so that of two
    files of one name the one beside what is loaded now is found.
    """
    name = os.path.abspath(folder)
    if name in _named:
        sys.path[:] = [entry for entry in sys.path if entry != name]
    elif name in sys.path:  # it was there before us, and keeps its place
        return
    _named.add(name)
    place = next((place for place, entry in enumerate(sys.path) if entry in _named), len(sys.path))
    sys.path.insert(place, name)
