"""What the benchmarks share: sides that take turns, spreads, the machine in words, and a file that grows row by row."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from qurve.files import write_atomic
from qurve.train.config import RunConfig, TrainConfig
from qurve.train.runtime import describe

Measured = TypeVar("Measured")


def take_turns(sides: Mapping[str, Callable[[], Measured]], rounds: int) -> dict[str, list[Measured]]:
    """What each side returns, one value a round; the order rotates from round to round, so that everyone goes first."""
    names = list(sides)
    found: dict[str, list[Measured]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(sides[name]())
    return found


def seconds_of(call: Callable[[], Any], times: int, device: str) -> float:
    """Of one call, what it leaves the device to do included."""
    synchronise(device)
    began = time.perf_counter()
    for _ in range(times):
        call()
    synchronise(device)
    return (time.perf_counter() - began) / times


def read_bandwidth(array: torch.Tensor, times: int = 5) -> float:
    """Bytes/s at which the memory is read at best: the sum of a large array."""
    return array.nbytes / min(seconds_of(array.sum, 1, "cpu") for _ in range(times))


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, to five digits."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {name: float(f"{value:.5g}") for name, value in (("median", middle), ("low", low), ("high", high))}


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def command(*checkouts: Path | None) -> str:
    """As this script was called, without the place of the result (`--out`), and of the checkouts."""
    words, named = ["python"], {path.resolve() for path in checkouts if path}
    given = iter(sys.argv)
    for word in given:
        flag, equals, value = word.partition("=")
        if flag == "--out":
            if not equals:
                next(given)
        elif Path(value or word).resolve() in named:
            words.append(f"{flag}=PATH" if equals else "PATH")
        else:
            words.append(word)
    return " ".join(words)


def machine(device: str) -> dict[str, Any]:
    """Where a benchmark runs: versions and hardware, no names and no paths."""
    found = describe(RunConfig(train=TrainConfig(device=device)))
    return {name: found[name] for name in ("qurve", "python", "torch", "platform", "cpu", "cores", "gpu")}


class Results:
    """What a benchmark found, `{**head, "summary": {…}, "rows": […]}`, written to its file after every change.

    A file that holds rows already is gone on with, where it was made by the same command on the same machine; another
    one is refused (`SystemExit`). Without a file everything is only kept.
    """

    def __init__(self, file: Path | None, head: Mapping[str, Any]) -> None:
        self.file, self.head = file, json.loads(json.dumps(head))
        self.summary: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        if file is not None and file.exists():
            found = json.loads(file.read_text(encoding="utf-8"))
            self.summary, self.rows = found.pop("summary"), found.pop("rows")
            if found != self.head:
                other = next(name for name in {**found, **self.head} if found.get(name) != self.head.get(name))
                raise SystemExit(
                    f"{file} is of another measurement: its {other} is {found.get(other)!r}, and this one's "
                    f"{self.head.get(other)!r}; move it away, or name another file"
                )

    def find(self, **key: Any) -> dict[str, Any] | None:
        """The row with these values, if it was measured already."""
        return next((row for row in self.rows if all(row.get(name) == value for name, value in key.items())), None)

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        self.rows.append(row)
        self._write()
        return row

    def forget(self, **key: Any) -> None:
        """Drop the rows with these values: they are measured anew."""
        self.rows = [row for row in self.rows if not all(row.get(name) == value for name, value in key.items())]
        self._write()

    def conclude(self, name: str, value: Any) -> None:
        """What follows from the rows."""
        self.summary[name] = value
        self._write()

    def print_line(self) -> None:
        """All of it as one JSON line, as every benchmark ends."""
        print(json.dumps({**self.head, "summary": self.summary, "rows": self.rows}), flush=True)

    def _write(self) -> None:
        if self.file is not None:
            head = json.dumps({**self.head, "summary": self.summary}, indent=1).removesuffix("\n}")
            rows = ",\n".join(f"  {json.dumps(row)}" for row in self.rows)
            write_atomic(self.file, f'{head},\n "rows": [\n{rows}\n ]\n}}\n')
