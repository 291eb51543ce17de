"""Text <-> token ids. Three kinds, named by a spec:

    gpt2     GPT-2's byte-level BPE, 50,257 ids, end of text 50,256; its merge table ships with this package
    bytes    the UTF-8 bytes, and 256 for the end of text: 257 ids
    bpe:N    byte-level BPE trained on the data, N ids in all, end of text N - 1

All are lossless, and none reads a special token out of a text: `<|endoftext|>` within a document is thirteen ordinary
characters, never its end. Embedding tables may be padded beyond `n_ids`; such ids are neither produced nor decoded.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qurve.errors import BadInput, did_you_mean

Ids = npt.NDArray[np.uint32]

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
SPECS = ("gpt2", "bytes", "bpe:N")
MIN_BPE = 257
"""The bytes and the end of text."""


class Tokenizer(ABC):
    """`spec`, `n_ids` (ids are 0 … n_ids - 1), `eot` (the end-of-text id), `sha256` (of what defines it)."""

    spec: str
    n_ids: int
    eot: int
    sha256: str

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, without any end-of-text id."""

    def decode(self, ids: Iterable[int] | npt.NDArray[Any]) -> str:
        """The text of some ids; the end-of-text id is written as `<|endoftext|>`, broken UTF-8 as U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int] | npt.NDArray[Any]) -> bytes:
        """The same as bytes: a token may end within a character. Raises `BadInput` for an id that is none of its."""
        array = np.asarray(list(ids), dtype=np.int64)
        bad = array[(array < 0) | (array >= self.n_ids)]
        if bad.size:
            raise BadInput(f"id {bad[0]} is no token of {self.spec}, whose ids are 0 to {self.n_ids - 1}")
        pieces: list[bytes] = []
        start = 0
        for end in [*np.flatnonzero(array == self.eot).tolist(), len(array)]:
            pieces.append(self._decode_bytes(array[start:end]))
            start = end + 1
        return END_OF_TEXT.encode().join(pieces)

    @abstractmethod
    def _decode_bytes(self, ids: npt.NDArray[np.int64]) -> bytes: ...

    @abstractmethod
    def as_json(self) -> str:
        """It as a `tokenizer.json` of the package `tokenizers`: the same ids for every text, where that is told to
        leave special tokens in a text alone (`encode_special_tokens`)."""

    def save(self, path: str | os.PathLike[str]) -> None:  # noqa: B027 (the ready-made ones have nothing to write)
        """Write into the folder `path` what `load` needs beyond the spec: `tokenizer.json`, if it was trained."""


class _Bytes(Tokenizer):
    def __init__(self) -> None:
        self.spec, self.n_ids, self.eot = "bytes", 257, 256
        self.sha256 = hashlib.sha256(b"ids 0-255: bytes; id 256: end of text").hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]

    def _decode_bytes(self, ids: npt.NDArray[np.int64]) -> bytes:
        return ids.astype(np.uint8).tobytes()

    def as_json(self) -> str:
        return _byte_level_json({sign: byte for byte, sign in enumerate(_byte_signs())}, [], words=False)


class _Gpt2(Tokenizer):
    # contractions; then letters, digits or other signs, each with the space before it; then white space
    _PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

    def __init__(self) -> None:
        import tiktoken

        table = _gpt2_table()
        self.spec, self.n_ids, self.eot = "gpt2", 50_257, 50_256
        self.sha256 = hashlib.sha256(table).hexdigest()
        self._encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=self._PATTERN,
            mergeable_ranks=_gpt2_ranks(table.decode()),
            special_tokens={END_OF_TEXT: self.eot},
            explicit_n_vocab=self.n_ids,
        )

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.array(self._encoding.encode_ordinary(text), dtype=np.uint32) for text in texts]

    def _decode_bytes(self, ids: npt.NDArray[np.int64]) -> bytes:
        return bytes(self._encoding.decode_bytes(ids.tolist()))

    def as_json(self) -> str:
        table, signs = _gpt2_table().decode(), _byte_signs()
        vocabulary = {"".join(signs[byte] for byte in piece): i for piece, i in _gpt2_ranks(table).items()}
        merges = [(left, right) for left, right in (line.split(" ") for line in table.splitlines()[1:])]
        return _byte_level_json(vocabulary, merges, words=True)


class _Trained(Tokenizer):
    def __init__(self, text: str) -> None:
        import tokenizers as hf

        self._json = text
        self._hf = hf.Tokenizer.from_str(text)
        self._hf.encode_special_tokens = True  # that is: as ordinary text
        self.n_ids = self._hf.get_vocab_size()
        self.spec, end = f"bpe:{self.n_ids}", self._hf.token_to_id(END_OF_TEXT)
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        if end is None:
            raise ValueError(f"it has no {END_OF_TEXT}")
        self.eot = end  # the last id, in one that was trained here
        vocabulary = self._hf.get_vocab(with_added_tokens=False)
        byte_of = {sign: byte for byte, sign in enumerate(_byte_signs())}
        self._pieces = {i: bytes(byte_of[sign] for sign in piece) for piece, i in vocabulary.items()}

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [
            np.array(encoding.ids, dtype=np.uint32)
            for encoding in self._hf.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def _decode_bytes(self, ids: npt.NDArray[np.int64]) -> bytes:
        return b"".join(self._pieces[i] for i in ids.tolist())

    def as_json(self) -> str:
        return self._json

    def save(self, path: str | os.PathLike[str]) -> None:
        part = Path(path) / f".{TOKENIZER_FILE}.part"
        part.write_bytes(self._json.encode())
        os.replace(part, Path(path) / TOKENIZER_FILE)


def check_spec(spec: str) -> int | None:
    """Raise `BadInput` unless `spec` names a tokenizer; returns N of `bpe:N`, None for the ready-made ones."""
    kind, colon, number = spec.partition(":")
    if spec in ("gpt2", "bytes"):
        return None
    if kind == "bpe" and colon:
        if number.isascii() and number.isdigit() and MIN_BPE <= int(number) < 2**31:
            return int(number)
        raise BadInput(f"tokenizer {spec!r}: N in bpe:N is a whole number of ids, at least {MIN_BPE}; try bpe:8192")
    raise BadInput(f"unknown tokenizer {spec!r}{did_you_mean(spec, SPECS)}")


def ready_made(spec: str) -> Tokenizer:
    """The tokenizer `gpt2` or `bytes`. (`bpe:N` is trained by `train_bpe`, or loaded from the data's folder.)"""
    if check_spec(spec) is not None:
        raise BadInput(f"{spec} is trained on data; load it from the folder of data prepared with it")
    return _Gpt2() if spec == "gpt2" else _Bytes()


def train_bpe(n_ids: int, texts: Iterable[str]) -> Tokenizer:
    """Train byte-level BPE of `n_ids` ids in all; the same texts give the same tokenizer.

    Raises `BadInput` when the texts do not hold enough different pieces for `n_ids`.
    """
    import tokenizers as hf
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = hf.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_ids - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    if bpe.get_vocab_size() < n_ids - 1:
        found = bpe.get_vocab_size() + 1
        raise BadInput(f"the data is too small for bpe:{n_ids}: it gives {found} ids; ask for bpe:{found} or fewer")
    bpe.add_special_tokens([END_OF_TEXT])
    return _Trained(bpe.to_str(pretty=True))


def load(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a folder of prepared data, checked against the hash in its manifest."""
    folder = Path(folder)
    try:
        stated = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["tokenizer"]
        spec, sha256 = str(stated["spec"]), str(stated["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder}: no tokenizer to be read from its manifest.json ({error})") from None
    tokenizer = ready_made(spec) if check_spec(spec) is None else load_trained(folder / TOKENIZER_FILE)
    if tokenizer.sha256 != sha256:
        raise BadInput(f"{folder}: the tokenizer is not the one the data was prepared with; prepare the data again")
    return tokenizer


def load_trained(file: Path) -> Tokenizer:
    """A tokenizer written by `save`."""
    try:
        return _Trained(file.read_bytes().decode())
    except OSError as error:
        raise BadInput(f"{file}: the trained tokenizer cannot be read ({error.strerror})") from None
    except Exception as error:  # the tokenizers package raises bare Exception
        raise BadInput(f"{file}: not a tokenizer of this program ({error})") from None


def _byte_signs() -> list[str]:
    """The printable sign that byte-level BPE files write for each byte: itself, or one from U+0100 on."""
    signs = [chr(b) if chr(b).isprintable() and chr(b) != " " else "" for b in range(256)]
    spare = iter(range(256, 512))
    return [sign or chr(next(spare)) for sign in signs]


def _byte_level_json(vocabulary: dict[str, int], merges: list[tuple[str, str]], *, words: bool) -> str:
    """Byte-level BPE as a `tokenizer.json`; `words`: merges stay within GPT-2's words."""
    import tokenizers as hf
    from tokenizers import decoders, models, pre_tokenizers

    bpe = hf.Tokenizer(models.BPE(vocabulary, merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([END_OF_TEXT])
    return str(bpe.to_str(pretty=True))


def _gpt2_table() -> bytes:
    return (resources.files("qurve.data") / "gpt2" / "vocab.bpe").read_bytes()


def _gpt2_ranks(table: str) -> dict[bytes, int]:
    """Merge table -> {piece: id}: first the 256 bytes, those that print before the others; then the merges in order."""
    signs = _byte_signs()
    byte_of = {sign: byte for byte, sign in enumerate(signs)}
    pieces = [bytes([byte]) for byte in sorted(range(256), key=lambda byte: ord(signs[byte]))]
    for line in table.splitlines()[1:]:
        pieces.append(bytes(byte_of[sign] for sign in line.replace(" ", "")))
    return {piece: i for i, piece in enumerate(pieces)}
