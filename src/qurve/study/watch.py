"""How far a run or a study is, read from the run folders alone: nothing is written, locked or asked for.

So it can be watched from another machine, by another user, while it is made wherever it may be.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qurve.errors import BadInput, QurveError
from qurve.runfolder import RunFolder
from qurve.study.study_json import no_study, one_line, read_study, updates_of

if TYPE_CHECKING:
    from rich.console import Console, Group

SECONDS_BETWEEN_LOOKS = 1.0
SILENT_AFTER = 120.0
"""Seconds without a new line of metrics after which a run counts as silent, unless its steps take long."""
SILENT_STEPS = 30
"""The same in steps. An evaluation takes as long as many of them."""
PATIENCE = 60.0
"""Seconds that a study may have nothing running between two of its runs."""


@dataclass(frozen=True)
class State:
    """How far one run is. Losses in nats per token; None where there is no number, as for a run that diverged."""

    run: str
    status: str
    """The run folder's, `waiting` where there is no run yet, or `damaged` where it cannot be read."""
    why: str
    step: int
    updates: int | None
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_s: float | None = None
    seconds_left: float | None = None
    seconds_since_sign: float | None = None
    """Age of the last line of metrics."""
    silent: bool = False
    """It should be running, and has given no sign of life for long: its process may be gone."""
    search_of: str | None = None
    """The arm, if this is a run of its search."""

    @property
    def is_alive(self) -> bool:
        return self.status == "running" and not self.silent


class Watched:
    """A run's or a study's folder. Each `look` reads what was written since the last one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_study = os.path.lexists(folder / "study.json")
        if not self.is_study and not RunFolder(folder).is_begun():
            if (folder / "rungs").is_dir():
                raise BadInput(no_study(folder))
            raise BadInput(f"{folder} is neither a study nor a run: it has no study.json and no config.json")
        self._metrics: dict[Path, Metrics] = {}

    def look(self) -> list[State]:
        if not self.is_study:
            return [self._state(self.folder, self.folder.name, None)]
        tree = read_study(self.folder / "study.json")
        trials = sorted((self.folder / "search" / "runs").glob("*/seed-*"))
        searched = [
            dataclasses.replace(
                self._state(path, f"{path.parent.name}, {path.name.replace('-', ' ')}", None),
                search_of=path.parent.name.partition("@")[0],
            )
            for path in trials
        ]
        return searched + [
            self._state(
                self.folder / "runs" / arm["name"] / f"seed-{seed}", f"{arm['name']}, seed {seed}", arm["config"]
            )
            for arm in tree["arms"]
            for seed in tree["seeds"]
        ]

    def _state(self, path: Path, name: str, planned: dict[str, Any] | None) -> State:
        try:
            return self._found(path, name, planned)
        except (QurveError, OSError) as error:  # of this run; the others are shown as they are
            reason = one_line(str(error).replace(f"{path}{os.sep}", ""))  # the row says already which run it is
            return State(name, "damaged", reason, 0, updates_of(planned or {}))

    def _found(self, path: Path, name: str, planned: dict[str, Any] | None) -> State:
        run = RunFolder(path)
        if not run.is_begun():
            return State(name, "waiting", "", 0, updates_of(planned or {}))
        state, metrics = run.status(), self._metrics.setdefault(path, Metrics(run.metrics_file))
        metrics.read()
        config, last = run.config_json()[0], metrics.train
        if not isinstance(config.get("train", {}), dict):
            raise BadInput(f"{run.config_file} is damaged: 'train' has the wrong type")
        updates = updates_of(config)
        step, seconds, tokens = last.get("step", 0), last.get("seconds", 0.0), last.get("tokens", 0)
        found = State(name, one_line(state.get("status")), one_line(state.get("why", "")), step, updates)
        age = None if metrics.changed is None else max(0.0, time.time() - metrics.changed)
        pace = seconds / step if step else None
        if found.status != "diverged":  # the last finite loss of a run that broke says nothing
            found = dataclasses.replace(found, loss=last.get("loss"), val_loss=metrics.val.get("loss"))
        running = found.status == "running"
        return dataclasses.replace(
            found,
            tokens_per_s=tokens / seconds if seconds else None,
            seconds_left=pace * (updates - step) if running and pace is not None and updates is not None else None,
            seconds_since_sign=age,
            silent=running and age is not None and age > max(SILENT_AFTER, SILENT_STEPS * (pace or 0.0)),
        )


class Metrics:
    """The last training and validation lines of a growing `metrics.jsonl`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._place = (0, 0, 0)
        """The file's inode, and the bytes and lines of it that are read."""
        self.train: dict[str, Any] = {}
        self.val: dict[str, Any] = {}
        self.changed: float | None = None
        """When the file was last written to."""

    def read(self) -> None:
        """Raises `BadInput`, each time anew, where a line is damaged."""
        try:
            with open(self._file, "rb") as file:
                found = self._file.stat()
                inode, offset, number = self._place
                if inode != found.st_ino or found.st_size < offset:  # a continued run has trimmed it
                    offset, number, self.train, self.val = 0, 0, {}, {}
                file.seek(offset)
                for line in file:
                    if line.endswith(b"\n"):
                        offset, number = offset + len(line), number + 1
                        self._take(line, number)
                self._place, self.changed = (found.st_ino, offset, number), found.st_mtime
        except FileNotFoundError:
            return

    def _take(self, line: bytes, number: int) -> None:
        try:
            tree = json.loads(line)
        except (ValueError, RecursionError):
            raise BadInput(f"{self._file}, line {number}: not JSON") from None
        if not isinstance(tree, dict) or not all(_is_number(tree.get(key, 0)) for key in NUMBERS):
            raise BadInput(f"{self._file}, line {number}: not a line of metrics: {line[:80].decode(errors='replace')}")
        if "split" not in tree:
            self.train = tree
        elif tree["split"] == "val":
            self.val = tree


NUMBERS = ("step", "loss", "tokens", "seconds")
"""What is shown of a line of metrics. None that is not finite is ever written."""


def _is_number(value: Any) -> bool:
    return (type(value) is int and abs(value) < 2**63) or (type(value) is float and math.isfinite(value))


def counts(states: list[State]) -> dict[str, int]:
    """How many runs there are of each kind; a silent one is `silent`, not `running`."""
    return dict(Counter("silent" if state.silent else state.status for state in states))


# ------------------------------------------------------------------------------------------------------------- showing


def status_json(states: list[State]) -> str:
    return json.dumps({"runs": [dataclasses.asdict(state) for state in states], "counts": counts(states)})


def status_table(states: list[State]) -> Group:
    """How many runs there are of each kind, which a low terminal must not cut off, then one row a run.

    What is finished of a search is one row an arm: its runs are many, and their names long.
    """
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)  # 80 columns must not cost one of these
    table.add_column("run", overflow="fold")
    table.add_column("status", overflow="fold")
    for title in ("step", "loss", "val\nloss", "tokens\n/s", "left", "last\nsign"):
        table.add_column(title, justify="right", no_wrap=True)
    searched = Counter(state.search_of for state in states if _is_done(state))
    for arm, number in searched.items():
        every = sum(state.search_of == arm for state in states)
        table.add_row(Text(f"{arm}, its search"), Text("finished"), Text(f"{number:,} of {every:,}"))
    for state in states:
        if _is_done(state):
            continue
        lost = "diverged" if state.status == "diverged" else "–"
        cells = (
            state.run,
            _status(state),
            f"{state.step:,}" + (f"/{state.updates:,}" if state.updates is not None else ""),
            lost if state.loss is None else f"{state.loss:.4f}",
            lost if state.val_loss is None else f"{state.val_loss:.4f}",
            "–" if state.tokens_per_s is None else f"{state.tokens_per_s:,.0f}",
            _span(state.seconds_left),
            _span(state.seconds_since_sign),
        )
        table.add_row(*(Text(cell) for cell in cells))  # Text, not markup: a reason may hold brackets
    return Group(Text(", ".join(f"{number} {kind}" for kind, number in counts(states).items())), table)


def _is_done(state: State) -> bool:
    return state.search_of is not None and state.status == "finished"


def _status(state: State) -> str:
    if state.silent:
        return f"running, but silent for {_span(state.seconds_since_sign)}: is its process alive?"
    return state.status + (f": {state.why}" if state.why else "")


def _span(seconds: float | None) -> str:
    """`42 s`, `12 min`, `3.4 h`, `2.1 d`."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    for unit, size, least in (("d", 86400, 2 * 86400), ("h", 3600, 2 * 3600), ("min", 60, 120)):
        if seconds >= least:
            return f"{seconds / size:.{0 if unit == 'min' else 1}f} {unit}"
    return f"{seconds:.0f} s"


def watch(folder: Path, console: Console) -> None:
    """Show the folder's state until nothing runs any more."""
    from rich.live import Live

    watched, quiet_since = Watched(folder), time.monotonic()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            states = watched.look()
            live.update(status_table(states), refresh=True)
            now = time.monotonic()
            if any(state.is_alive for state in states):
                quiet_since = now
            elif now - quiet_since >= (PATIENCE if goes_on(states) else 0):
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)


def goes_on(states: list[State]) -> bool:
    """Nothing runs, but something is to come: another run of the study, or another try at one that has just failed."""
    signs = [state.seconds_since_sign for state in states if state.seconds_since_sign is not None]
    recent = not signs or min(signs) < PATIENCE
    return len(states) > 1 and recent and any(state.status in ("waiting", "failed") for state in states)
