"""A run's folder on disk: its layout and its files, written and read here and nowhere else.

    config.json        the resolved configuration and its hash
    environment.json   versions, hardware, commit
    metrics.jsonl      the truth; one object a line
    checkpoints/       step-00000400/: model.safetensors, optimizer.safetensors, state.json, and their manifest.json
    data/              the embedded corpus, where the run had no other data
    status.json        {"status": running | finished | diverged | failed | stopped, "why": …, "step": …}

Training lines of `metrics.jsonl`: `step loss lr grad_norm tokens seconds batch_sha`. `step` counts finished updates
from 1, update k uses order index k - 1; `tokens` and `seconds` are cumulative over training alone (evaluation and
compilation are not in `seconds`). Evaluation lines: `step split loss tokens`, after update `step` (0: untrained);
`tokens` counts those that the loss is on. With a mixture of experts they have `expert_usage` too: for each block, the
share of its tokens' choices that each expert got (an empty list for a block without experts). With
`eval.attention_logits` those on `val` have `max_logit`: each block's largest attention logit (null without one). With
`train.dynamics_every` some training lines have `dynamics`: measure -> its value in each block (null without one).
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from qurve.config import LARGEST
from qurve.errors import BadInput, did_you_mean
from qurve.files import LOCK, remove, write_atomic

FORMAT = 1
MEASURED = ("compile_seconds", "peak_memory_bytes")
"""What `environment.json` gets of the run itself: these differ between two runs in the same environment."""

Status = Literal["running", "finished", "diverged", "failed", "stopped"]


class RunFolder:
    """Paths, readers and writers of one run's folder. Making the object touches nothing on disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.json"
        self.environment_file = self.path / "environment.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.status_file = self.path / "status.json"
        self.checkpoints = self.path / "checkpoints"

    # ------------------------------------------------------------------------------------------------------ writing

    def create(self, config_json: str, config_hash: str, environment: dict[str, Any]) -> None:
        """Start a run; refuses a folder that holds one, or anything else, so that nothing is ever overwritten.

        `config.json` comes last: a folder without it holds no run, whatever a killed process began.
        """
        self.refuse_foreign()
        self.make()
        self.checkpoints.mkdir(exist_ok=True)
        write_atomic(self.environment_file, json.dumps({"format": FORMAT, **environment}, indent=2) + "\n")
        write_atomic(self.metrics_file, "")
        self.set_status("running", step=0)
        self.write_config(config_json, config_hash)

    def make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{self.path} cannot be made ({error.strerror}); give another --out") from None

    def write_config(self, config_json: str, config_hash: str) -> None:
        write_atomic(self.config_file, json.dumps({**json.loads(config_json), "hash": config_hash}, indent=2) + "\n")

    def refuse_used(self) -> None:
        """Raise `BadInput` unless the folder can take a new run: it is not there, or holds prepared data alone."""
        self._refuse_file()
        if self.is_begun():
            raise BadInput(f"{self.path} holds a run; continue it with --resume auto, or give another --out")
        if self.path.exists() and any(entry.name not in ("data", LOCK) for entry in self.path.iterdir()):
            raise BadInput(f"{self.path} is not empty; give another --out, or remove it first")

    def is_begun(self) -> bool:
        """Whether the folder holds a run."""
        return self.config_file.exists()

    def refuse_foreign(self) -> None:
        """Raise `BadInput` for a run, and for anything that is not what a run's killed creation leaves behind."""
        self._refuse_file()
        if self.is_begun():
            raise BadInput(f"{self.path} holds a run; continue it with --resume auto, or give another --out")
        own = (self.environment_file, self.metrics_file, self.status_file, self.checkpoints)
        for entry in self.path.iterdir() if self.path.exists() else ():
            if not (entry.name in ("data", LOCK) or entry in own or re.fullmatch(r"\..*\.part", entry.name)):
                raise BadInput(f"{self.path} holds {entry.name} and no run; give another --out")

    def _refuse_file(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise BadInput(f"{self.path} is a file; give another --out")

    def go_on(
        self, step: int, config_json: str, config_hash: str, environment: dict[str, Any], changes: dict[str, Any]
    ) -> None:
        """Continue the run after `step`: metrics of later steps go, and where it goes on is noted."""
        entry = {"step": step, "earlier_hash": self.config_json()[1], "changed": changes, **environment}
        for left_over in self.path.glob(".*.part"):
            remove(left_over)
        self.add_to_environment({"resumed": [*self.resumed(), entry], "processes": environment.get("processes")})
        self.set_status(
            "running", step=step
        )  # before the configuration: a kill in between leaves the changes to be made
        self.write_config(config_json, config_hash)
        self.trim_metrics(step if step or not changes else -1)  # of a changed model, step 0 is measured anew

    def resumed(self) -> list[dict[str, Any]]:
        """Where this run was continued, and on what: each entry has `step`, `changed` and `earlier_hash`."""
        entries = self.environment().get("resumed", [])
        if not (isinstance(entries, list) and all(isinstance(e, dict) and "earlier_hash" in e for e in entries)):
            raise BadInput(f"{self.environment_file} is damaged: 'resumed' is not a list of what was resumed")
        return entries

    def add_to_environment(self, facts: dict[str, Any]) -> None:
        write_atomic(self.environment_file, json.dumps({**self.environment(), **facts}, indent=2) + "\n")

    def set_status(self, status: Status, *, step: int, why: str = "") -> None:
        text = json.dumps({"format": FORMAT, "status": status, "step": step, "why": why}) + "\n"
        try:
            write_atomic(self.status_file, text)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            with open(self.status_file, "r+", encoding="utf-8") as file:  # a full disk has room for what it holds
                file.write(text)
                file.truncate()

    def mark_dead(self, status: Status, why: str) -> None:
        """For a run whose process is gone without a word: its status would say `running` for ever."""
        if self.status_file.exists() and self.status()["status"] == "running":
            self.set_status(status, step=self.last_step(), why=why)

    def append(self, line: dict[str, Any]) -> None:
        """Append one metrics line, whole: one write, then flushed. Numbers are written in full."""
        with open(self.metrics_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def trim_metrics(self, step: int) -> None:
        """Drop what was measured after `step`, and a torn last line: a continued run measures it again."""
        kept = [line for line in self.metrics() if line["step"] <= step]
        write_atomic(self.metrics_file, "".join(json.dumps(line) + "\n" for line in kept))

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    # ------------------------------------------------------------------------------------------------------ reading

    def config_json(self) -> tuple[dict[str, Any], str]:
        """The configuration's JSON tree and the hash stored beside it."""
        tree = self._read(self.config_file)
        return tree, str(tree.pop("hash", ""))

    def environment(self) -> dict[str, Any]:
        """One plain value a name, but for what tells of another run: `resumed` and `imported`."""
        tree = self._read(self.environment_file)
        for name, value in tree.items():
            if name not in ("resumed", "imported") and not is_fact(value):
                raise BadInput(f"{self.environment_file} is damaged: {name!r} has the wrong type: {value!r:.40}")
        return tree

    def status(self) -> dict[str, Any]:
        """`{"status", "step", "why", …}`, checked."""
        tree = self._read(self.status_file)
        if tree.get("status") not in typing.get_args(Status) or not _is_count(tree.get("step")):
            raise BadInput(f"{self.status_file} is damaged: it holds no status with a step")
        return {"why": "", **tree}

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The metrics, line by line; a torn last line of a killed run is left out."""
        if not self.metrics_file.is_file():
            raise BadInput(f"{self.path} is not a run folder: it has no metrics.jsonl")
        with open(self.metrics_file, encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n"):
                    return
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):
                    raise BadInput(f"{self.metrics_file}, line {number}: not JSON") from None
                if not _is_metrics_line(entry):
                    raise BadInput(f"{self.metrics_file}, line {number}: not a line of metrics: {line.strip()[:80]}")
                yield entry

    def train_lines(self) -> list[dict[str, Any]]:
        return [line for line in self.metrics() if "split" not in line]

    def eval_lines(self, split: str = "val") -> list[dict[str, Any]]:
        return [line for line in self.metrics() if line.get("split") == split]

    def last_step(self) -> int:
        return max((line["step"] for line in self.train_lines()), default=0)

    def checkpoint_steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending: one takes its name when it is whole."""
        folders = self.checkpoints.glob("step-*") if self.checkpoints.is_dir() else ()
        names = (folder.name for folder in folders if folder.is_dir() and not folder.is_symlink())
        return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d{8,}", name))

    def latest_checkpoint(self) -> Path:
        steps = self.checkpoint_steps()
        if not steps:
            raise BadInput(f"{self.path} holds no checkpoint (looked for {self.checkpoints}/step-*)")
        return self.checkpoint(steps[-1])

    def kept_checkpoint(self, step: int) -> Path:
        """The checkpoint of one step; `BadInput`, naming those there are, where it was not kept."""
        steps = self.checkpoint_steps()
        if step not in steps:
            raise BadInput(f"{self.path} has no checkpoint of step {step}{did_you_mean(str(step), map(str, steps))}")
        return self.checkpoint(step)

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            study = (self.path / "study.json").is_file()
            way_out = f", it is a study; its runs are {self.path / 'runs' / 'ARM' / 'seed-N'}" if study else ""
            raise BadInput(f"{self.path} is not a run folder: it has no {path.name}{way_out}") from None
        except (ValueError, RecursionError, IsADirectoryError) as error:
            raise BadInput(f"{path}: not JSON ({error})") from None
        if not isinstance(tree, dict):
            raise BadInput(f"{path}: must hold a JSON object")
        return tree


def _is_number(value: Any) -> bool:
    """A float, or a whole number that one can be made of."""
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_by_block(value: Any) -> bool:
    return isinstance(value, list) and all(each is None or _is_number(each) for each in value)


def is_fact(value: Any) -> bool:
    """Whether a value can be told from others and written again: a text, a finite number, true, false or null."""
    return value is None or isinstance(value, bool | str) or (_is_number(value) and math.isfinite(value))


TRAINING: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "loss": _is_number,
    "lr": _is_number,
    "grad_norm": _is_number,
    "tokens": _is_count,
    "seconds": _is_number,
    "batch_sha": _is_text,
}
EVALUATION: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "split": _is_text,
    "loss": _is_number,
    "tokens": _is_count,
}
MORE: dict[str, Callable[[Any], bool]] = {"max_logit": _is_by_block}
"""What not every line has, and others reckon with."""


def _is_metrics_line(entry: Any) -> bool:
    """Whether every field of a training or evaluation line is there, and what it can be."""
    if not isinstance(entry, dict):
        return False
    wanted = {**(EVALUATION if "split" in entry else TRAINING), **{key: MORE[key] for key in MORE if key in entry}}
    return all(name in entry and is_right(entry[name]) for name, is_right in wanted.items())
