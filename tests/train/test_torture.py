"""Trainings that are killed with SIGKILL: the driver in `tests/torture.py`, in small portions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TORTURE = Path(__file__).parents[1] / "torture.py"


def torture(tmp_path: Path, *options: str) -> dict[str, Any]:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(TORTURE), "--out", str(tmp_path / "runs"), "--json", str(figures), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()
    found: dict[str, Any] = json.loads(figures.read_text())
    assert found["survived"] == found["kills"] == sum(found["kills_at"].values())
    return found


def test_five_kills(tmp_path: Path) -> None:
    assert torture(tmp_path, "--kills", "5", "--cli-kills", "0", "--seed", "3")["kills"] == 5


@pytest.mark.slow
def test_thirty_kills_many_of_them_in_saves(tmp_path: Path) -> None:
    found = torture(tmp_path, "--kills", "30", "--cli-kills", "2", "--seed", "4")
    assert found["kills"] == 32
    assert found["in_a_save"] >= 5  # some 13 are expected; the times of the others are the machine's
