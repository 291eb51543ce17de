"""Files that are whole or not there, and folders that one process at a time works on."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from qurve.errors import BadInput, Busy, Damaged

LOCK = ".lock"


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a whole file or nothing: to a neighbour first, then renamed over the old one.

    Raises `OSError` with the file's own path, whatever step failed: a full disk does not name what it had no room for.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def sync(path: Path) -> None:
    """Have a file's content, or a folder's list of names, on the disk before anything else happens."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a folder with all it holds, a file, or a link (never what it leads to)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_folders(place: Path, *names: str, option: str = "--out") -> None:
    """Raise `BadInput` where `place`, or what it has by one of these names, is there and no folder.

    `option` is the way out.
    """
    for path in (place, *(place / name for name in names)):
        if os.path.lexists(path) and not path.is_dir():
            raise BadInput(f"{path} is a file; give another {option}")


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other processes from working on `folder`, which must be there. `Busy` names who does already.

    The lock is the kernel's, on the file `.lock`: it ends with its process however that dies, so a file that a dead one
    left is no lock. The file holds who has it, for the message alone.
    """
    handle = _lock(folder / LOCK)
    try:
        holder = {"host": platform.node(), "pid": os.getpid()}
        os.truncate(handle, 0)
        os.write(handle, json.dumps(holder).encode())
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        os.close(handle)


def _lock(path: Path) -> int:
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise BadInput(f"{path.parent} cannot be locked ({error.strerror}); give another --out") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            who = os.read(handle, 200).decode(errors="replace")
            os.close(handle)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise BadInput(f"{path.parent}: its file system gives no locks ({error.strerror})") from None
            raise Busy(
                f"another process is working on {path.parent} ({_named(who)}); wait for it, or give another --out"
            ) from None
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)  # whoever had it has just removed this file: lock the next one


def _named(who: str) -> str:
    try:
        holder = json.loads(who)
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, TypeError, KeyError):
        return "it has not said which"


# ----------------------------------------------------------------------------------------------------------- manifests

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Write down every file of `folder` with its size and sha256."""
    files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)} for file in sorted(folder.iterdir())}
    write_atomic(folder / MANIFEST, json.dumps({"format": 1, "files": files}, indent=2) + "\n")


def check_manifest(folder: Path, *names: str) -> None:
    """Raise `Damaged`, which names the file, unless each of `names` is in the folder's manifest and is what it says.

    Only the names asked for are opened, so that no manifest leads anywhere else.
    """
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        stated = {name: (int(listed[name]["bytes"]), str(listed[name]["sha256"])) for name in names}
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise Damaged(f"{folder / MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise Damaged(f"{folder / MANIFEST} is damaged ({type(error).__name__}: {error})") from None
    for name, (size, sha256) in stated.items():
        file = folder / name
        if file.is_symlink():
            raise Damaged(f"{file} is a link, which is not followed")
        if not file.is_file():
            raise Damaged(f"{file} is missing")
        if file.stat().st_size != size:
            raise Damaged(f"{file} is damaged: it has {file.stat().st_size} bytes, not {size}")
        if (found := sha256_of(file)) != sha256:
            raise Damaged(f"{file} is damaged: its sha256 is {found}, not {sha256}")
