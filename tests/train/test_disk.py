"""A disk that is too small, or fills up in the midst of a training: `tests/small_disk.py` on 20 MB of memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SMALL_DISK = Path(__file__).parents[1] / "small_disk.py"
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.fixture(scope="module")
def mounting(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where a user may not mount anything, even in a namespace of their own."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare (util-linux), to mount a small disk that nobody else sees")
    folder = tmp_path_factory.mktemp("mount")
    tried = subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "small", folder], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {tried.stderr.strip()}")


@pytest.mark.parametrize(
    "scenario",
    [
        "fills up",
        pytest.param("too small", marks=pytest.mark.slow),
        pytest.param("not a byte left", marks=pytest.mark.slow),
        pytest.param("truncated", marks=pytest.mark.slow),
        pytest.param("flipped", marks=pytest.mark.slow),
    ],
)
def test_on_a_disk_of_20_megabytes(scenario: str, mounting: None, tmp_path: Path) -> None:
    command = [*NAMESPACE, sys.executable, str(SMALL_DISK), scenario, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
