"""Commands of the command line, run in this process or in one of their own, and what they leave behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qurve.cli import main

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document that standard output holds."""
        return json.loads(self.out)


def call(*arguments: object) -> Outcome:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return Outcome(int(left.value.code or 0), out.getvalue(), err.getvalue())


def apart(*arguments: object, **environment: str) -> Outcome:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "qurve", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment}
    )
    return Outcome(done.returncode, done.stdout.decode("latin-1"), done.stderr.decode("latin-1"))


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def words(text: str) -> str:
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())
