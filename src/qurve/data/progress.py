"""How far a long work on data has come: a bar on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """`with Progress("tokenising", total, unit="B") as progress: progress.update(done)`; `on=False` shows nothing.

    Rate and time left count from `start`, where a continued work begins. All goes to stderr.
    """

    def __init__(self, what: str, total: int, *, start: int = 0, on: bool = True) -> None:
        self._what, self._total, self._start, self._on = what, max(1, total), start, on
        self._bar: Any = None
        self._began = self._said = time.monotonic()

    def __enter__(self) -> Progress:
        if self._on and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total, completed=self._start)
        return self

    def update(self, done: int) -> None:
        """`done` bytes of the total are done."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif self._on and now - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = now
            rate = max(1.0, (done - self._start) / (now - self._began))
            left = int((self._total - done) / rate)
            print(
                f"{self._what}: {100 * done / self._total:.0f} %, {rate / 1e6:.1f} MB/s, "
                f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left",
                file=sys.stderr,
                flush=True,
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
