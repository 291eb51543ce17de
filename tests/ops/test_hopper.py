"""What the kernels take of a Hopper GPU, as its compiler says: all that can be known of them without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED_MEMORY = 227 * 1024
"""Bytes that one program may have there."""


@pytest.mark.slow
def test_kernels_fit_a_hopper_gpu_without_spilling(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_for_hopper.py"))],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 20
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY, row
        assert row["stack"] == 0, row
        assert row["tensor_cores"] == (row["dtype"] == "torch.bfloat16"), row
