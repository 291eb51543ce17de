"""Text from files, folders and data sets, streamed document by document in an order that never changes.

What is read, by the end of the name:

    .txt .text .md            one document a file (as is any other file that is named outright)
    .jsonl .jsonl.gz .jsonl.zst   one document a line, its field `text`
    .parquet                  one document a row, its column `text`
    hf:NAME[@CONFIG][:SPLIT]  a data set of the Hugging Face hub (needs the package `datasets`), its column `text`,
                              streamed: nothing of it is kept on the disk. NAME may be one of `RECIPES`

Folders are searched through, in the order of their files' names; hidden files are left alone. Everything that cannot
be used raises `BadInput` with the file and the place in it; what is left out is counted in `Sources.dropped`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qurve.errors import BadInput, QurveError

TEXT_SUFFIXES = (".txt", ".text", ".md")
READ_SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
FIELD = "text"

RECIPES = {
    "openwebtext": "Skylion007/openwebtext",
    "fineweb-10bt": "HuggingFaceFW/fineweb@sample-10BT",
    "fineweb-edu-10bt": "HuggingFaceFW/fineweb-edu@sample-10BT",
    "c4": "allenai/c4@en",
}
"""Short names of much-used data sets: `hf:c4`."""

_PIECE = 1 << 16
"""Compressed bytes handed on at a time: small, since a piece of zstd can unfold to thousands of times its size."""


@dataclass(frozen=True)
class Source:
    """One file, or one data set of the hub (`path` None). `name` is what the manifest and the messages call it."""

    name: str
    path: Path | None
    size: int
    version: str
    """What changes when the content does, without reading it: time of change, or the data set's commit."""


class Sources:
    """The documents of some inputs. `documents()` may be run through any number of times."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, leave_out: Path | None = None) -> None:
        """Look the inputs up (nothing is read yet). `leave_out` is a folder not to be searched through.

        Raises `BadInput` for a missing path, and when there is nothing to read.
        """
        if isinstance(paths, (str, os.PathLike)):
            paths = [paths]
        self._skipped: list[tuple[str, str]] = []
        self._data_sets: dict[str, Any] = {}
        self.dropped: dict[tuple[str, str], int] = {}
        """(file, reason) -> how often, as of the last `documents()`."""
        self.done = 0
        """Bytes of input read so far, out of `size`, as of the last `documents()`."""
        self.all: list[Source] = []
        seen: set[Path] = set()
        for path in paths:
            for source in self._look_up(path, leave_out):
                real = source.path.resolve() if source.path else Path(source.name)
                if real in seen:
                    self._skipped.append((source.name, "given twice"))
                else:
                    seen.add(real)
                    self.all.append(source)
        if not self.all:
            raise BadInput(f"nothing to read in {', '.join(map(str, paths)) or 'no input at all'}: {_WHAT_IS_READ}")
        self.size = sum(source.size for source in self.all)
        self.streamed = bool(self._data_sets)
        """Whether some of it comes from the hub, which need not say how much it is."""

    def identity(self) -> list[list[str | int]]:
        """What tells these inputs from others without reading them: place, size and version of each."""
        return [[str(s.path.resolve()) if s.path else s.name, s.size, s.version] for s in self.all]

    def content(self) -> list[dict[str, str | int]]:
        """What the manifest says of each input: name, size in bytes, sha256 (for a hub data set, its commit)."""
        return [{"name": s.name, "bytes": s.size, "sha256": _sha256(s.path) if s.path else s.version} for s in self.all]

    def documents(self) -> Iterator[str]:
        """Every document that is not empty, in order."""
        self.dropped = {}
        self.done = 0
        for name, reason in self._skipped:
            self._drop(name, reason)
        before = 0
        for source in self.all:
            for text in self._documents_of(source, before):
                if text:
                    yield text
                else:
                    self._drop(source.name, "empty document")
            before += source.size
            self.done = before

    # ----------------------------------------------------------------------------------------------------- looking up

    def _look_up(self, given: str | os.PathLike[str], leave_out: Path | None) -> Iterator[Source]:
        if isinstance(given, str) and given.startswith("hf:"):
            yield self._hub_source(given)
            return
        path = Path(given)
        if path.is_dir():
            for file in _files_under(path, leave_out):
                if not file.is_file():
                    self._skipped.append((str(file), "not a regular file, or a broken link"))
                elif file.name.lower().endswith(READ_SUFFIXES):
                    yield _file_source(file)
                else:
                    self._skipped.append((str(file), "not a kind of file that is read from folders"))
        elif path.is_file():
            yield _file_source(path)
        else:
            what = "is neither a file nor a folder" if path.exists() else "does not exist"
            raise BadInput(f"{path} {what}; give a text file, a folder, or {_WHAT_IS_READ}")

    def _hub_source(self, name: str) -> Source:
        """Look a data set up at its present commit: what is read later, and again after a stop, is that commit's."""
        where, _, split = name.removeprefix("hf:").partition(":")
        repository, _, config = RECIPES.get(where, where).partition("@")
        split = split or "train"
        try:
            datasets = importlib.import_module("datasets")
            hub = importlib.import_module("huggingface_hub")
        except ImportError:
            raise BadInput(f"{name} needs the package datasets; install it with `pip install 'qurve[hf]'`") from None
        try:
            commit = str(hub.HfApi().dataset_info(repository).sha)
            data = datasets.load_dataset(repository, config or None, split=split, revision=commit, streaming=True)
        except Exception as error:  # its errors have no common base, and a missing network shows in many ways
            why = str(error).strip().splitlines() or [""]
            raise BadInput(
                f"{name} cannot be had from the Hugging Face hub ({type(error).__name__}: {why[0]}); "
                "check the name, the split and the network, or download the text and give its files"
            ) from None
        if data.column_names is not None and FIELD not in data.column_names:
            raise BadInput(f"{name} has no column {FIELD!r}; it has: {', '.join(data.column_names)}")
        self._data_sets[name] = data
        stated = (data.info.splits or {}).get(split)
        return Source(name, None, int(stated.num_bytes or 0) if stated else 0, commit)

    # -------------------------------------------------------------------------------------------------------- reading

    def _documents_of(self, source: Source, before: int) -> Iterator[str]:
        def progress(read: int) -> None:
            self.done = before + min(read, source.size)

        if source.path is None:
            yield from self._hub_documents(source, progress)
            return
        if source.size == 0:
            self._drop(source.name, "empty file")
            return
        name = source.path.name.lower()
        try:
            if name.endswith(".parquet"):
                yield from _parquet(source.path, progress)
            elif name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
                yield from (_field(record, place) for place, record in _objects(source.path, progress))
            else:
                yield _text(source.path.read_bytes(), source.path)
        except OSError as error:
            raise BadInput(f"{source.path} cannot be read ({error.strerror or error})") from None

    def _hub_documents(self, source: Source, progress: Callable[[int], None]) -> Iterator[str]:
        read = 0
        examples = iter(self._data_sets[source.name])
        row = 0
        while True:
            try:
                example = next(examples)
            except StopIteration:
                return
            except Exception as error:  # as above; a connection may break at any document
                why = (str(error).strip().splitlines() or [""])[0]
                raise QurveError(
                    f"{source.name}, row {row}: the stream from the hub broke off ({type(error).__name__}: {why}); "
                    "the same call goes on from the documents that are tokenised already"
                ) from None
            text = _field(example, f"{source.name}, row {row}")
            row, read = row + 1, read + len(text)
            yield text
            progress(read)

    def _drop(self, name: str, reason: str) -> None:
        self.dropped[name, reason] = self.dropped.get((name, reason), 0) + 1


_WHAT_IS_READ = f"files ending in {' '.join(READ_SUFFIXES)}, or hf:NAME"


def _files_under(folder: Path, leave_out: Path | None) -> list[Path]:
    avoid = leave_out.resolve() if leave_out else None
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        here = Path(place)
        folders[:] = [f for f in folders if not f.startswith(".") and (here / f).resolve() != avoid]
        found += [here / f for f in files if not f.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def _file_source(file: Path) -> Source:
    stat = file.stat()
    return Source(str(file), file, stat.st_size, str(stat.st_mtime_ns))


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _pieces(file: Path, progress: Callable[[int], None]) -> Iterator[bytes]:
    read = 0
    with open(file, "rb") as opened:
        while piece := opened.read(_PIECE):
            yield piece
            read += len(piece)
            progress(read)


def _unpacker(name: str) -> Callable[[], Any] | None:
    if name.endswith(".gz"):
        return lambda: zlib.decompressobj(wbits=31)
    if name.endswith(".zst"):
        import zstandard

        return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
    return None


def _unpacked(pieces: Iterator[bytes], file: Path, new: Callable[[], Any]) -> Iterator[bytes]:
    """Unpack a gzip or zstd file of one or more frames; a broken or torn one raises `BadInput`."""
    import zstandard

    unpacker = new()
    torn = False  # within a frame
    try:
        for piece in pieces:
            while piece:
                yield unpacker.decompress(piece)
                torn = not unpacker.eof
                piece = unpacker.unused_data if unpacker.eof else b""
                if unpacker.eof:
                    unpacker = new()
    except (zlib.error, zstandard.ZstdError) as error:
        raise BadInput(f"{file} is corrupt: it does not unpack ({error}); get the file anew") from None
    if torn:
        raise BadInput(f"{file} is cut short: its last frame does not end; get the file anew")


def json_objects(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of each line of a `.jsonl`, `.jsonl.gz` or `.jsonl.zst` file that is not blank.

    `place` names file and line, for messages. Raises `BadInput` for what cannot be read, or is not one object a line.
    """
    try:
        yield from _objects(file, lambda _: None)
    except OSError as error:
        raise BadInput(f"{file} cannot be read ({error.strerror or error})") from None


def _objects(file: Path, progress: Callable[[int], None]) -> Iterator[tuple[str, dict[str, Any]]]:
    pieces = _pieces(file, progress)
    if new := _unpacker(file.name.lower()):
        pieces = _unpacked(pieces, file, new)
    for number, offset, line in _lines(pieces):
        if line.strip():
            place = f"{file}, line {number}"
            yield place, _json_object(line, place, offset)


def _json_object(line: bytes, place: str, offset: int) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadInput(_not_utf8(place, offset + error.start, line[error.start])) from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadInput(f"{place}: not JSON ({error}); each line must hold one object") from None
    if not isinstance(record, dict):
        raise BadInput(f"{place}: not a JSON object; each line must be one")
    return record


def _field(record: dict[str, Any], place: str) -> str:
    if FIELD not in record:
        raise BadInput(f"{place}: no field {FIELD!r}; it has: {', '.join(record)}")
    return _checked(record[FIELD], place)


def _lines(pieces: Iterator[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, byte offset in the unpacked text, line without its end) of each line."""
    number, offset, rest = 1, 0, [b""]
    for piece in pieces:
        head, *lines = piece.split(b"\n")
        rest.append(head)
        for following in lines:
            line = b"".join(rest)
            yield number, offset, line
            number, offset, rest = number + 1, offset + len(line) + 1, [following]
    if line := b"".join(rest):
        yield number, offset, line


def _parquet(file: Path, progress: Callable[[int], None]) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    size = file.stat().st_size
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            if FIELD not in table.schema_arrow.names:
                raise BadInput(f"{file} has no column {FIELD!r}; it has: {', '.join(table.schema_arrow.names)}")
            rows = max(1, table.metadata.num_rows)
            for batch in table.iter_batches(batch_size=256, columns=[FIELD]):
                for value in batch.column(0):
                    try:
                        text = value.as_py()
                    except UnicodeDecodeError as error:
                        byte = error.object[error.start]
                        raise BadInput(_not_utf8(f"{file}, row {row}", error.start, byte)) from None
                    yield _checked(text, f"{file}, row {row}")
                    row += 1
                progress(size * row // rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(f"{file} is corrupt: not a readable parquet file ({str(error).splitlines()[0]})") from None


def _text(data: bytes, file: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadInput(_not_utf8(str(file), error.start, data[error.start])) from None


def _checked(text: Any, place: str) -> str:
    if not isinstance(text, str):
        raise BadInput(f"{place}: {FIELD!r} is not a text but {json.dumps(text, default=repr)[:40]}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(
            f"{place}: half a surrogate pair ({text[error.start]!a}) at character {error.start} of {FIELD!r}; "
            "it has no UTF-8; repair the text"
        ) from None
    return text


def _not_utf8(place: str, offset: int, byte: int) -> str:
    return f"{place}: not UTF-8 at byte offset {offset} (0x{byte:02x}); convert it first, for example with iconv"
