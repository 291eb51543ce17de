"""Kill trainings with SIGKILL, by the hundred, and compare what becomes of them with one that was left alone.

    python tests/torture.py --kills 300 --seed 1 --out DIR [--cli-kills 3] [--json FILE]

One run after another is trained in `DIR`, each by as many processes as it takes: every process goes on with
`resume="auto"` and is killed: before its n-th file operation (two in five), before the n-th among its checkpoints (one
in five), at a random time, or a moment after it was seen to write or remove a checkpoint. After each death the folder
is checked, and a run that has come to its end must equal the undisturbed one: its metrics to the last bit, its weights
and its optimiser. A few kills are of the whole command, `python -m qurve train smoke`. Exits with 1 when anything
differs; the folder stays.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch._dynamo
import torch._inductor

from interrupted import assert_same, assert_whole, little_data, smallest
from qurve.data.loader import TokenData
from qurve.runfolder import RunFolder
from qurve.train.loop import train

CONFIG = smallest("train.steps=16")
OPERATIONS = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.truncate", "shutil.rmtree"}
SHARE = 3  # of a whole run's time and operations a process gets one part at most: a run takes several
MOST_TRIES = 200  # of one run; the progress made is not lost, so that even unlucky ones come to an end


@dataclass
class Tally:
    kills: int = 0
    survived: int = 0
    in_a_save: int = 0
    finished: int = 0
    at: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


# ----------------------------------------------------------------------------------------------------- a child's death


def die_at(n: int, out: Path, report: int, among: Path | None = None) -> None:
    """Have this process killed just before its n-th file operation in `out`, or `among` what lies there.

    It writes each to `report` first.
    """
    left = n

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in OPERATIONS or (event == "open" and str(arguments[0]).startswith(str(out))):
            left -= among is None or str(arguments[0]).startswith(str(among))
            os.write(report, f"{event} {arguments[0]}\n".encode(errors="replace"))
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def start(out: Path, data: TokenData, operation: int = 0, among: Path | None = None) -> tuple[int, int]:
    """Go on with the run in `out` in a process of its own: its id, and where its file operations can be read."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        if operation:
            die_at(operation, out, writing, among)
        train(CONFIG, out, data, resume="auto")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def operations_of(reading: int) -> list[str]:
    with os.fdopen(reading, encoding="utf-8", errors="replace") as file:
        return file.read().splitlines()


def half_there(out: Path) -> set[tuple[str, int]]:
    """What is being written or removed among the checkpoints, or was when its process died: it has a hidden name."""
    found = set()
    with contextlib.suppress(FileNotFoundError):  # of names that go away meanwhile, too
        for entry in os.scandir(out / "checkpoints"):
            if entry.name.startswith("."):
                found.add((entry.name, entry.stat(follow_symlinks=False).st_ctime_ns))
    return found


def kill(how: str, out: Path, data: TokenData, rng: random.Random, operations: int, seconds: float) -> tuple[bool, str]:
    """Go on with the run and kill the process: whether that came before its end, and where it was."""
    if how in ("operation", "save"):
        among = out / "checkpoints" if how == "save" else None
        pid, reading = start(out, data, rng.randint(1, max(1, operations // SHARE)), among)
        done = operations_of(reading)  # until the process is gone
        where = done[-1] if done else ""
    else:
        pid, reading = start(out, data)
        os.close(reading)
        before = half_there(out)
        began, wait = time.monotonic(), rng.uniform(0, seconds / SHARE)
        while time.monotonic() - began < wait:
            time.sleep(0.0005)
        if how == "aimed":
            deadline = time.monotonic() + 3 * seconds
            while half_there(out) <= before and time.monotonic() < deadline and not exited(pid):
                time.sleep(0.0001)
            time.sleep(rng.uniform(0, 0.004))
        os.kill(pid, signal.SIGKILL)
        where = how
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True, where
    if os.WEXITSTATUS(status):
        raise AssertionError(f"the process failed with {os.WEXITSTATUS(status)}; its traceback is above")
    return False, where


def exited(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


# ---------------------------------------------------------------------------------------------------------- the torture


def torture(kills: int, rng: random.Random, out: Path, tally: Tally) -> None:
    data = little_data(out / "little")
    began = time.monotonic()
    pid, reading = start(out / "undisturbed", data)
    operations_of(reading)
    if os.waitpid(pid, 0)[1]:
        raise SystemExit("the undisturbed run failed")
    seconds = time.monotonic() - began
    undisturbed = RunFolder(out / "undisturbed")
    pid, reading = start(out / "counted", data, operation=1_000_000)
    operations = len(operations_of(reading))
    os.waitpid(pid, 0)
    assert_same(RunFolder(out / "counted"), undisturbed)
    shutil.rmtree(out / "counted")
    while tally.kills < kills and not tally.faults:
        run, suffered = RunFolder(out / f"run-{tally.finished + 1}"), 0
        try:
            for _ in range(MOST_TRIES):
                if tally.kills == kills:
                    pid, reading = start(run.path, data)
                    os.close(reading)
                    died = bool(os.waitpid(pid, 0)[1])
                    assert not died, "the process failed; its traceback is above"
                else:
                    how = rng.choice(["operation", "operation", "save", "time", "aimed"])
                    before = half_there(run.path)
                    died, where = kill(how, run.path, data, rng, operations, seconds)
                    if died:
                        suffered += 1
                        tally.kills += 1
                        tally.at[how] += 1
                        tally.in_a_save += not half_there(run.path) <= before or str(run.checkpoints) in where
                        assert_whole(run)
                if not died:
                    break
            assert_same(run, undisturbed)
        except Exception as fault:
            tally.faults.append(f"{run.path}, after {suffered} kills: {type(fault).__name__}: {fault}")
            return
        tally.survived += suffered
        tally.finished += 1
        shutil.rmtree(run.path)


def torture_the_command(kills: int, rng: random.Random, out: Path, tally: Tally) -> None:
    """`qurve train smoke` as a user starts it, killed as a whole between its start and its end."""
    options = ["--steps", "40", "--checkpoint-every", "3", "--set", "eval.every=10", "--set", "model.dropout=0.1"]
    command = [sys.executable, "-m", "qurve", "train", "smoke", *options, "--resume", "auto", "--json"]
    undisturbed, run = RunFolder(out / "command-undisturbed"), RunFolder(out / "command")
    with open(out / "command.log", "wb") as log:
        to_log: dict[str, Any] = {"stdout": log, "stderr": log}
        subprocess.run([*command, "--out", str(undisturbed.path)], check=True, **to_log)
        command += ["--data", str(undisturbed.path / "data"), "--out", str(run.path)]
        suffered = 0
        try:
            for place in range(kills):
                before = half_there(run.path)
                process = subprocess.Popen(command, **to_log)
                goal = rng.randint(40 * place // kills, 40 * (place + 1) // kills)
                while process.poll() is None and not (run.is_begun() and run.last_step() >= goal):
                    time.sleep(0.002)
                process.kill()
                if process.wait() == 0:
                    break
                assert process.returncode == -signal.SIGKILL, f"the command failed with {process.returncode}"
                suffered += 1
                tally.kills += 1
                tally.at["command"] += 1
                tally.in_a_save += not half_there(run.path) <= before
                assert_whole(run)
            subprocess.run(command, check=True, **to_log)
            assert_same(run, undisturbed)
        except Exception as fault:
            tally.faults.append(f"{run.path}, after {suffered} kills: {type(fault).__name__}: {fault}")
            return
    tally.survived += suffered
    tally.finished += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="of trainings, besides --cli-kills")
    parser.add_argument("--cli-kills", type=int, default=3, help="of the whole command, after those")
    parser.add_argument("--seed", type=int, default=1, help="of what is killed when")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures are written, too")
    given = parser.parse_args()
    given.out = given.out.resolve()
    if given.out.exists():
        parser.error(f"{given.out} is there already: a torture that found a fault leaves it")
    given.out.mkdir(parents=True)
    began, tally, rng = time.monotonic(), Tally(), random.Random(given.seed)
    torture(given.kills, rng, given.out, tally)
    if given.cli_kills and not tally.faults:
        torture_the_command(given.cli_kills, rng, given.out, tally)
    figures = {
        "kills": tally.kills,
        "survived": tally.survived,
        "in_a_save": tally.in_a_save,
        "kills_at": dict(sorted(tally.at.items())),
        "runs_finished": tally.finished,
        "seed": given.seed,
        "seconds": round(time.monotonic() - began, 1),
        "torch": torch.__version__,
    }
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"survived {tally.survived} of {tally.kills} kills, {tally.in_a_save} of them in or around a save;")
    print(f"{tally.finished} runs came to their end in {figures['seconds']} s and equal the undisturbed one")
    for fault in tally.faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    if not tally.faults:
        shutil.rmtree(given.out)
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
