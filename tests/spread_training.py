"""`train` on the processes of one job: python spread_training.py DATA JOBS

JOBS is JSON: a list of [folder, settings…], each trained (or continued) in turn by all processes
together, to its end or until it diverges.
"""

from __future__ import annotations

import contextlib
import json
import sys

from qurve.data.loader import TokenData
from qurve.errors import Diverged
from qurve.train.distributed import joined
from qurve.train.loop import train
from tiny import tiny

if __name__ == "__main__":
    data = TokenData.open(sys.argv[1])
    with joined("cpu") as world:
        for folder, *settings in json.loads(sys.argv[2]):
            with contextlib.suppress(Diverged):
                train(tiny(*settings), folder, data, resume="auto", world=world)
