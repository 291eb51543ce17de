"""Projections that break in a worker and nowhere else, to see what becomes of the other runs.

They are not registered: by name they are the linear projection, whose configuration they share.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import dataclass
from typing import Any

from qurve.projections import Linear


@dataclass(frozen=True)
class Killed(Linear):
    """Its process is gone without a word, as when the machine's memory is out."""

    def build(self, d_in: int, d_out: int, **more: Any) -> Any:
        if multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().build(d_in, d_out, **more)


@dataclass(frozen=True)
class Failing(Linear):
    def build(self, d_in: int, d_out: int, **more: Any) -> Any:
        if multiprocessing.parent_process() is not None:
            raise RuntimeError("planted failure")
        return super().build(d_in, d_out, **more)
