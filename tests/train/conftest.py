"""A run that was cut short, for the tests of going on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from interrupted import stop_after
from qurve.data.loader import TokenData
from qurve.runfolder import RunFolder


@pytest.fixture(scope="module")
def stopped(little: TokenData, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that was stopped after step 5. Tests copy it."""
    return stop_after(5, tmp_path_factory.mktemp("stopped") / "run", little)


@pytest.fixture
def run(stopped: RunFolder, tmp_path: Path) -> RunFolder:
    shutil.copytree(stopped.path, tmp_path / "run", symlinks=True)
    return RunFolder(tmp_path / "run")
