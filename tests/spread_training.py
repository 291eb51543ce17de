"""`train` on the processes of one job: python spread_training.py DATA JOBS

JOBS is JSON: a list of [folder, settings…], each trained (or continued) in turn by all processes
together, to its end or until it diverges.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from typing import Any

from qurve.data.loader import TokenData
from qurve.errors import Diverged, Stopped
from qurve.train import loop
from qurve.train.distributed import joined, leave
from qurve.train.loop import train
from tiny import tiny


def ask_one_process_to_stop_in_an_evaluation(rank: int) -> None:
    """All must agree on it: one that left its evaluation alone would keep the others waiting."""
    batch = loop.batch

    def signalling(config: Any, split: Any, *which: Any) -> Any:
        if rank == 1 and split.name == "val":
            signal.raise_signal(signal.SIGTERM)
        return batch(config, split, *which)

    loop.batch = signalling


if __name__ == "__main__":
    data = TokenData.open(sys.argv[1])
    with joined("cpu") as world:
        for folder, *settings in json.loads(sys.argv[2]):
            if settings[-1] == "asked to stop in an evaluation":
                settings.pop()
                ask_one_process_to_stop_in_an_evaluation(world.rank)
            with contextlib.suppress(Diverged, Stopped):
                train(tiny(*settings), folder, data, resume="auto", world=world)
    leave(0)
