"""Reading prepared data: a folder of shards with a manifest, or nanoGPT's `train.bin` and `val.bin` as they are.

Tokens stay on disk, mapped into memory; a window may reach from one shard into the next.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qurve.errors import BadInput, did_you_mean

FORMAT = 1
"""Version of the manifest; another one is refused."""

MANIFEST = "manifest.json"
SPLITS = ("train", "val", "test")

Int64s = npt.NDArray[np.int64]
Shard = npt.NDArray[Any]

SHARD_NAME = re.compile(rf"({'|'.join(SPLITS)})-\d{{5}}\.bin")
_SAMPLE_BLOCK = 1 << 16
_SAMPLES = 64


def fingerprint_of(tokenizer_sha256: str, dtype: str, shard_sha256s: list[str]) -> str:
    """What names a data set: sha256 over its tokenizer's hash, its dtype, and its shards' hashes in order."""
    return hashlib.sha256("\n".join([tokenizer_sha256, dtype, *shard_sha256s]).encode()).hexdigest()


class TokenSplit:
    """The tokens of one split, as one sequence."""

    def __init__(self, name: str, shards: list[Shard]) -> None:
        self.name = name
        self._shards = shards
        self._ends = np.cumsum([len(shard) for shard in shards], dtype=np.int64)

    def __len__(self) -> int:
        """How many tokens."""
        return int(self._ends[-1])

    def windows(self, starts_N: Int64s, context: int) -> tuple[Int64s, Int64s]:
        """Inputs and targets, each `int64[N, context]`: tokens from each start on, and those moved on by one.

        Raises `BadInput` for a window that is not wholly within the split.
        """
        starts_N = np.asarray(starts_N, dtype=np.int64)
        bad = starts_N[(starts_N < 0) | (starts_N + context + 1 > len(self))]
        if bad.size:
            raise BadInput(
                f"a window of context {context} at {bad[0]} needs tokens up to {bad[0] + context}; "
                f"the {self.name} split has {len(self)} tokens, from 0"
            )
        tokens_NT = np.empty((len(starts_N), context + 1), dtype=np.int64)
        for start in starts_N.tolist():  # all of them, before the first is waited for
            for shard, begin, end in self._parts(start, context + 1):
                _read_ahead(shard, begin, end)
        for row_T, start in zip(tokens_NT, starts_N.tolist(), strict=True):
            filled = 0
            for shard, begin, end in self._parts(start, context + 1):
                row_T[filled : filled + end - begin] = shard[begin:end]
                filled += end - begin
        return tokens_NT[:, :-1].copy(), tokens_NT[:, 1:].copy()

    def _parts(self, start: int, length: int) -> Iterator[tuple[Shard, int, int]]:
        """Where a run of tokens lies: shards, each with the first place in it and the one after the last."""
        at = int(np.searchsorted(self._ends, start, side="right"))
        begin = start - int(self._ends[at]) + len(self._shards[at])
        while length:
            shard = self._shards[at]
            end = min(begin + length, len(shard))
            yield shard, begin, end
            length, begin, at = length - (end - begin), 0, at + 1


class TokenData:
    """A data set: `fingerprint`, `tokenizer` (its spec), `n_ids` (ids are 0 … n_ids - 1), `splits` (their names)."""

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        tokenizer: str,
        n_ids: int,
        splits: list[TokenSplit],
        sha256s: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._sha256s = sha256s or {}
        self.fingerprint = fingerprint
        self.tokenizer = tokenizer
        self.n_ids = n_ids
        self._splits = {split.name: split for split in splits}
        self.splits = tuple(self._splits)

    def split(self, name: str) -> TokenSplit:
        if name not in self._splits:
            raise BadInput(f"{self.folder} has no split {name!r}{did_you_mean(name, self._splits)}")
        return self._splits[name]

    def verify(self) -> None:
        """Read every shard; `BadInput` for one that is not what its manifest says. (Opening looks at sizes alone.)

        nanoGPT's files have no manifest; their fingerprint is of what they hold, as far as it goes.
        """
        for name, stated in self._sha256s.items():
            with open(self.folder / name, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != stated:
                raise BadInput(
                    f"{self.folder / name} is not what was prepared: its sha256 is {found}, not {stated}; "
                    "copy or prepare the data again"
                )

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> TokenData:
        """Open a folder made by `prepare`, or one of nanoGPT's.

        Sizes are checked against the manifest; a shard that is missing, cut short or too long raises `BadInput`.
        nanoGPT's files hold 16-bit ids; there is no test split, and a `meta.pkl` is not read, since unpickling runs
        whatever code is in it (tokenizer `unknown`, ids up to the largest found). Their fingerprint is the sha256 of
        each file's name, size and 64 blocks of 64 KiB spread evenly from its first to its last byte.
        """
        folder = Path(folder)
        if (folder / MANIFEST).is_file():
            return cls._open_prepared(folder)
        if (folder / "train.bin").is_file() and (folder / "val.bin").is_file():
            return cls._open_nanogpt(folder)
        state = "is not a folder" if not folder.is_dir() else f"holds neither {MANIFEST} nor train.bin and val.bin"
        raise BadInput(f"{folder} is no prepared data: it {state}; make some with `qurve prepare PATH… --out {folder}`")

    @classmethod
    def _open_prepared(cls, folder: Path) -> TokenData:
        manifest = read_manifest(folder)
        try:
            dtype = np.dtype({"uint16": "<u2", "uint32": "<u4"}[manifest["dtype"]])
            splits = [
                TokenSplit(name, [_open_shard(folder, shard, dtype) for shard in split["shards"]])
                for name, split in manifest["splits"].items()
            ]
            for split in splits:
                stated = manifest["splits"][split.name]["tokens"]
                if len(split) != stated:
                    raise BadInput(
                        f"{folder / MANIFEST}: {split.name} has {stated} tokens, but its shards {len(split)}; "
                        "prepare the data again"
                    )
            tokenizer = manifest["tokenizer"]["spec"]
            shards = [shard for split in manifest["splits"].values() for shard in split["shards"]]
            sha256s = {str(shard["name"]): str(shard["sha256"]) for shard in shards}
            return cls(folder, str(manifest["fingerprint"]), str(tokenizer), int(manifest["n_ids"]), splits, sha256s)
        except BadInput:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise BadInput(
                f"{folder / MANIFEST} is damaged ({type(error).__name__}: {error}); prepare the data again"
            ) from None

    @classmethod
    def _open_nanogpt(cls, folder: Path) -> TokenData:
        files = [folder / f"{name}.bin" for name in SPLITS if (folder / f"{name}.bin").is_file()]
        splits = []
        for file in files:
            size = file.stat().st_size
            if size == 0 or size % 2:
                raise BadInput(f"{file} has {size} bytes; 16-bit token ids take an even number, and at least one")
            splits.append(TokenSplit(file.stem, [np.memmap(file, dtype="<u2", mode="r")]))
        fingerprint, largest = _sample(files)
        if (folder / "meta.pkl").exists():
            return cls(folder, fingerprint, "unknown", _largest_id(splits) + 1, splits)
        if largest > 50_256:
            raise BadInput(f"{folder}: id {largest} is no GPT-2 token (they go up to 50256); is the file damaged?")
        return cls(folder, fingerprint, "gpt2", 50_257, splits)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder of prepared data; `BadInput` when it is none, or of another version."""
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{file} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise BadInput(f"{file}: not JSON ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BadInput(f"{file}: not a manifest of format {FORMAT}; prepare the data again with this version")
    return manifest


def _open_shard(folder: Path, shard: dict[str, Any], dtype: np.dtype[Any]) -> Shard:
    name, tokens = str(shard["name"]), int(shard["tokens"])
    if not SHARD_NAME.fullmatch(name):  # so that no manifest leads out of its folder
        raise BadInput(f"{folder / MANIFEST}: {name!r} is no name of a shard; they are like train-00000.bin")
    file = folder / name
    expected = tokens * dtype.itemsize
    found = file.stat().st_size if file.is_file() else None
    if found != expected or not tokens:
        state = "is missing" if found is None else f"has {found} bytes"
        raise BadInput(f"{file} {state}; {expected} are expected ({tokens} tokens); copy or prepare the data again")
    return np.memmap(file, dtype=dtype, mode="r")


def _read_ahead(shard: Shard, begin: int, end: int) -> None:
    """Have the system fetch these tokens. Left to itself it waits at each page, and fetches far more than is asked."""
    mapped: object = shard.base
    if isinstance(mapped, mmap.mmap):
        at = begin * shard.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
        mapped.madvise(mmap.MADV_WILLNEED, at, end * shard.itemsize - at)


def _sample(files: list[Path]) -> tuple[str, int]:
    """Fingerprint of nanoGPT's files, and the largest id in what was sampled for it."""
    digest = hashlib.sha256()
    largest = 0
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        last = max(0, size - _SAMPLE_BLOCK)
        with open(file, "rb") as opened:
            for at in sorted({last * i // (_SAMPLES - 1) // 2 * 2 for i in range(_SAMPLES)}):
                opened.seek(at)
                block = opened.read(_SAMPLE_BLOCK)
                digest.update(block)
                largest = max(largest, int(np.frombuffer(block, dtype="<u2").max()))
    return digest.hexdigest(), largest


def _largest_id(splits: list[TokenSplit]) -> int:
    shards = [shard for split in splits for shard in split._shards]
    block = 1 << 24
    return max(int(shard[at : at + block].max()) for shard in shards for at in range(0, len(shard), block))
