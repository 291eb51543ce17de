"""Trainings on a disk of 20 MB that is too small, fills up, or holds a damaged checkpoint: one scenario per call.

    unshare --user --map-root-user --mount python tests/small_disk.py SCENARIO DIR

`DIR` is a new folder on another disk; the small one is mounted in it, and is gone with this process.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import pytest

from interrupted import After, assert_same, assert_whole, little_data, smallest, snapshot
from qurve.cli import main
from qurve.data.loader import TokenData
from qurve.errors import BadInput, QurveError
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.train.checkpoint import disk_needed
from qurve.train.loop import train

SIZE = 20_000_000
CONFIG = smallest("model.d_model=128", "model.d_ff=512")
LEFT = 600_000
"""Bytes that stay free on the full disk: enough for all but a checkpoint."""


def fill(disk: Path, left: int) -> None:
    (disk / "somebody-elses").write_bytes(bytes(shutil.disk_usage(disk).free - left))


def make_room(disk: Path) -> None:
    (disk / "somebody-elses").unlink()


def command(*arguments: str) -> tuple[int, str]:
    """Exit code and standard error of `qurve …`."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            main(arguments)
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
    raise AssertionError("a command ends in an exit")


def too_small(disk: Path, data: TokenData, undisturbed: RunFolder) -> None:
    settings = ["--set", "model.d_model=512", "--data", str(data.folder), "--out", str(disk / "new" / "run")]
    code, said = command("train", "smoke", *settings)
    assert code == 2, (code, said)
    assert "has 20 MB free, and the checkpoints of this run take" in said, said
    assert list(disk.iterdir()) == []


def filled(disk: Path, data: TokenData, left: int = LEFT) -> RunFolder:
    """A run that met a full disk after step 5."""
    run = RunFolder(disk / "run")
    with pytest.raises(
        QurveError, match=r"the disk is full .*; the newest checkpoint is of step 4\. Make room"
    ) as failure:
        train(CONFIG, run.path, data, After(5, lambda: fill(disk, left)))
    assert failure.value.exit_code == 1
    assert run.checkpoint_steps()[-1] == 4
    assert run.status()["status"] == "failed"
    assert_whole(run)
    GPT.from_run(run.path)
    return run


def fills_up(disk: Path, data: TokenData, undisturbed: RunFolder) -> None:
    run = filled(disk, data)
    before = snapshot(run.path)
    with pytest.raises(BadInput, match="has 1 MB free, and the checkpoints of this run take"):
        train(CONFIG, run.path, data, resume="auto")
    assert snapshot(run.path) == before
    make_room(disk)
    assert_same(train(CONFIG, run.path, data, resume="auto"), undisturbed)


def not_a_byte_left(disk: Path, data: TokenData, undisturbed: RunFolder) -> None:
    run = filled(disk, data, left=0)
    make_room(disk)
    assert_same(train(CONFIG, run.path, data, resume="auto"), undisturbed)


def damaged(disk: Path, data: TokenData, undisturbed: RunFolder, how: str) -> None:
    run = filled(disk, data)
    file = run.checkpoint(4) / "optimizer.safetensors"
    with open(file, "r+b") as opened:
        if how == "truncated":
            opened.truncate(file.stat().st_size // 2)
        else:
            opened.seek(file.stat().st_size // 2)
            byte = opened.read(1)[0]
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte ^ 1]))
    make_room(disk)
    progress = After()
    assert_same(train(CONFIG, run.path, data, progress, resume="auto"), undisturbed)
    assert f"{file} is damaged" in progress.notes[0], progress.notes
    assert ("bytes, not" if how == "truncated" else "its sha256 is") in progress.notes[0], progress.notes
    assert f"continuing {run.path} after step 2" in progress.notes, progress.notes


def run_scenario(name: str, folder: Path) -> None:
    folder = folder.resolve()
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "small", str(disk)], check=True)
    data = little_data(folder)
    several, needed = disk_needed(CONFIG)
    assert needed / several > 2 * LEFT
    assert needed < shutil.disk_usage(disk).free
    undisturbed = RunFolder(folder / "undisturbed")
    if name == "too small":
        too_small(disk, data, undisturbed)
        return
    train(CONFIG, undisturbed.path, data)
    if name == "fills up":
        fills_up(disk, data, undisturbed)
    elif name == "not a byte left":
        not_a_byte_left(disk, data, undisturbed)
    else:
        damaged(disk, data, undisturbed, how=name)


if __name__ == "__main__":
    run_scenario(sys.argv[1], Path(sys.argv[2]))
