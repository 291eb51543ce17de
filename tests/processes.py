"""Several processes of one training on this machine, started as by torchrun, without the time that takes itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"


def environment(**more: str) -> dict[str, str]:
    """For a process that uses this source tree, one thread and the loopback interface."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCES), str(Path(__file__).parent)]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **more,
    }


def together(size: int, *arguments: str, timeout: float = 120) -> list[subprocess.CompletedProcess[str]]:
    """Run `python ARGUMENTS` as the `size` processes of one job, and return what became of each, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    jobs = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=environment(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                LOCAL_WORLD_SIZE=str(size),
                WORLD_SIZE=str(size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    end = time.monotonic() + timeout
    try:
        outputs = [job.communicate(timeout=end - time.monotonic()) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [
        subprocess.CompletedProcess(job.args, job.returncode, out, errors)
        for job, (out, errors) in zip(jobs, outputs, strict=True)
    ]
