"""From token ids to text that can be shown while it is made, and the tokenizer of a run."""

from __future__ import annotations

import codecs
import os
from collections.abc import Sequence
from pathlib import Path

from qurve.data.loader import MANIFEST, TokenData
from qurve.data.tokenizers import Tokenizer, load, ready_made
from qurve.errors import BadInput
from qurve.runfolder import RunFolder


class TextStream:
    """Characters of a growing list of ids, given out as soon as they are certain, and never taken back.

    A character that needs further bytes is waited for, and so is what may be the beginning of a stop string. The first
    of those that comes up ends the text before it, wherever the borders of tokens are.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False
        """Whether a stop string has come up."""

    def push(self, token: int) -> str:
        """What is certain after one more token."""
        return self._give(self._characters.decode(self._tokenizer.decode_bytes([token])), final=False)

    def finish(self) -> str:
        """The rest: what was held back, and U+FFFD for a character that was never completed."""
        return self._give(self._characters.decode(b"", final=True), final=True)

    def _give(self, more: str, final: bool) -> str:
        text = self._held + more
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        held = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters are a beginning of `stop`, which is not whole in `text`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def run_data(folder: str | os.PathLike[str], data: str | os.PathLike[str] | None = None) -> TokenData:
    """The data that a run was trained on: in `data`, or in the folder that the run names.

    Raises `BadInput` when it is not there any more, or is other data, and for an imported model.
    """
    run = RunFolder(folder)
    stated = run.config_json()[0].get("data") or {}
    named = Path(stated.get("path") or run.path / "data")
    place = Path(data) if data else next((p for p in (named, run.path / "data") if p.is_dir()), None)
    opened = None if place is None else TokenData.open(place)
    if opened is not None and opened.fingerprint == stated.get("fingerprint"):
        return opened
    if _is_imported(run):
        raise BadInput(f"{run.path} was imported and has no data of its own; `qurve eval --text PATH…` takes any text")
    if opened is None:
        raise BadInput(
            f"{run.path} was trained on {named}, which is not there; name the folder of that data (--data DIR)"
        )
    raise BadInput(f"{place} is not the data that {run.path} was trained on; name that folder (--data DIR)")


def _is_imported(run: RunFolder) -> bool:
    return run.environment_file.exists() and "imported" in run.environment()


def run_tokenizer(folder: str | os.PathLike[str], data: str | os.PathLike[str] | None = None) -> Tokenizer:
    """The tokenizer that a run's data was prepared with, found as `run_data` finds it, which says what it raises.

    An imported model has no data; its tokenizer is in the run's own folder `tokenizer`.
    """
    run = RunFolder(folder)
    if data is None and (own := run.path / "tokenizer").is_dir():
        return load(own)
    if data is None and _is_imported(run):
        raise BadInput(f"{run.path} was imported without a tokenizer, and can take no text; give prompts as ids")
    opened = run_data(folder, data)
    if opened.tokenizer == "unknown":
        raise BadInput(
            f"{opened.folder} does not say what its ids mean (its meta.pkl is not read); give prompts as ids"
        )
    return load(opened.folder) if (opened.folder / MANIFEST).exists() else ready_made(opened.tokenizer)
