"""The file that a study comes from, kept in the study's folder: whoever has the folder alone can make it again.

    definition/                  the file as it was at the newest call, and the modules beside it that it imports

The configurations of the runs do not hang on it: each run has its own, whole. So a file that has changed since is no
other study, and what is kept is the newest, as `study.json` is.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

FOLDER = "definition"


def sources(file: Path) -> list[Path]:
    """The file, and those beside it (or in packages beside it) that this process has imported as modules."""
    place, found = file.parent.resolve(), {file.resolve(): None}
    for name, module in sorted(sys.modules.items()):
        source, top = getattr(module, "__file__", None), name.partition(".")[0]
        if source is None or not (source := Path(source).resolve()).is_relative_to(place) or source.suffix != ".py":
            continue
        if source == place / f"{top}.py" or source.is_relative_to(place / top):  # no environment that lies below
            found[source] = None
    return list(found)


def keep(file: Path, folder: Path) -> None:
    """Copy the file and its modules into the study's folder, in place of what was there."""
    kept, place = folder / FOLDER, file.parent.resolve()
    # read first: the file may be the copy itself
    contents = {source.relative_to(place): source.read_bytes() for source in sources(file)}
    if kept.exists():
        shutil.rmtree(kept)
    for path, content in contents.items():
        (kept / path).parent.mkdir(parents=True, exist_ok=True)
        (kept / path).write_bytes(content)


def kept(folder: Path) -> dict[str, str]:
    """path below the study's folder -> sha256, of every file that is kept there."""
    found = sorted(path for path in (folder / FOLDER).rglob("*.py") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}
