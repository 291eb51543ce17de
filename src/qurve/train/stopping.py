"""How a training is asked to stop, Ctrl-C or a scheduler's SIGTERM, and how one that raised has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import torch

from qurve.errors import Diverged, Stopped
from qurve.runfolder import Status
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
    # A signal that its parent set to be ignored stays ignored (None: a handler that is not Python's).
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}

    def ask(number: int, frame: FrameType | None) -> None:
        if say and not stop.requested:  # not by print: the signal may have come in the middle of one
            os.write(2, b"\nstopping: the step is finished and saved first (Ctrl-C now stops at once)\n")
        stop.requested = True
        if signal.SIGINT in before:
            signal.signal(signal.SIGINT, before[signal.SIGINT])

    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def how_it_ended(error: BaseException) -> Status:
    if isinstance(error, (Stopped, KeyboardInterrupt)):
        return "stopped"
    return "diverged" if isinstance(error, Diverged) else "failed"
