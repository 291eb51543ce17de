"""How a training is asked to stop: Ctrl-C, or a scheduler's SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import torch

from qurve.train.distributed import World

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether this process was asked to stop. The training looks at it between steps."""

    def __init__(self) -> None:
        self.requested = False

    def agreed(self, world: World) -> bool:
        """Whether any process of the run was asked. All ask this at the same place, so that all stop there."""
        if world.size == 1:
            return self.requested
        return bool(world.total(torch.tensor(float(self.requested))))


@contextlib.contextmanager
def listening(*, say: bool) -> Iterator[StopRequest]:
    """Turn a signal into a request, and `say` so. A Ctrl-C after that does what it did before: it interrupts at once.

    A second SIGTERM asks for the same again: schedulers send one to a process and one to its whole group.

    Signals reach a process's main thread alone: in any other thread nothing is installed.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def give_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        if say and not stop.requested:  # not by print: the signal may have come in the middle of one
            os.write(2, b"\nstopping: the step is finished and saved first (Ctrl-C now stops at once)\n")
        stop.requested = True
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    # A signal that its parent set to be ignored stays ignored.
    for number in SIGNALS:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, ask)
    try:
        yield stop
    finally:
        give_back()
