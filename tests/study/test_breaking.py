"""Runs that break: how often each is tried again, and that it stops no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qurve.runfolder import RunFolder
from qurve.study import execute, jobs
from qurve.study.definition import Arm
from qurve.study.jobs import Job, Outcome
from tiny import tiny


class Scripted:
    """A worker whose runs end as they are told to, in order: each job has its list of outcomes."""

    at_a_time = 1

    def __init__(self, **outcomes: list[str]) -> None:
        self.outcomes = outcomes
        self.started: list[str] = []
        self.running: list[Job] = []
        self.stopped = 0

    def start(self, waiting: list[Job], data_folder: str) -> None:
        if waiting and not self.running:
            self.running.append(waiting.pop(0))
            self.started.append(self.running[0].arm.name)

    def ended(self, seconds: float) -> list[tuple[Job, Outcome]]:
        kind = self.outcomes[self.running[0].arm.name].pop(0)
        if kind == "interrupt":
            raise KeyboardInterrupt
        return [(self.running.pop(0), Outcome(kind, f"it {kind}"))]  # type: ignore[arg-type]

    def stop(self) -> None:
        self.stopped += 1


def execute_scripted(workers: Scripted, retries: int, tmp_path: Path) -> tuple[dict[str, str], list[str]]:
    said: list[str] = []
    config = tiny()
    todo = [Job(Arm(name, name, config), 1, config, tmp_path / name) for name in workers.outcomes]
    return execute._execute(todo, workers, "", retries, said.append), said  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcomes", "retries", "tries", "fails"),
    [
        (["failed", "made"], 1, 2, False),
        (["failed", "failed"], 1, 2, True),
        (["died", "made"], 1, 2, False),
        (["died", "failed", "made"], 1, 3, False),
        (["failed"], 0, 1, True),
        (["died"], 0, 1, True),
        (["failed"] * 3 + ["made"], 3, 4, False),
        (["lost"] * execute.MACHINES_LOST + ["made"], 0, execute.MACHINES_LOST + 1, False),
        (["lost"] * (execute.MACHINES_LOST + 1), 0, execute.MACHINES_LOST + 1, True),
        (["stopped"], 5, 1, True),
        (["made"], 5, 1, False),
    ],
)
def test_a_broken_run_is_tried_again_so_often_and_stops_no_other(
    outcomes: list[str], retries: int, tries: int, fails: bool, tmp_path: Path
) -> None:
    workers = Scripted(a=list(outcomes), b=["made"])
    failed, said = execute_scripted(workers, retries, tmp_path)
    assert workers.started.count("a") == tries
    assert workers.started.count("b") == 1
    assert failed == ({"a, seed 1": f"it {outcomes[-1]}"} if fails else {})
    assert len([text for text in said if "it will be continued from its last checkpoint" in text]) == tries - 1
    assert [text for text in said if text.startswith(("[1/2]", "[2/2]"))][-1].startswith("[2/2]")


def test_a_run_whose_process_died_is_no_longer_called_running(tmp_path: Path) -> None:
    RunFolder(tmp_path / "a").create("{}", "", {})
    execute_scripted(Scripted(a=["died"]), 0, tmp_path)
    state = RunFolder(tmp_path / "a").status()
    assert (state["status"], state["why"]) == ("failed", "it died")


def test_an_interruption_stops_the_workers_and_leaves_no_run_running(tmp_path: Path) -> None:
    RunFolder(tmp_path / "b").create("{}", "", {})
    workers = Scripted(a=["made"], b=["interrupt"], c=["made"])
    with pytest.raises(KeyboardInterrupt):
        execute_scripted(workers, 1, tmp_path)
    assert workers.stopped == 1
    assert workers.started == ["a", "b"]
    assert RunFolder(tmp_path / "b").status()["status"] == "stopped"


DAMAGES = [
    ("status.json", b""),
    ("status.json", b"{}"),
    ("status.json", b"[1]"),
    ("status.json", b"[" * 100_000),
    ("status.json", None),
    ("metrics.jsonl", b"{\n"),
    ("metrics.jsonl", b"[1]\n"),
    ("metrics.jsonl", b'{"step": "x"}\n'),
    ("metrics.jsonl", None),
]


def damaged_run(folder: Path, name: str, content: bytes | None) -> None:
    """A run in the making, one of whose files holds something else, or is a folder."""
    RunFolder(folder).create("{}", "", {})
    (folder / name).unlink()
    (folder / name).mkdir() if content is None else (folder / name).write_bytes(content)


@pytest.mark.parametrize(("name", "content"), DAMAGES)
@pytest.mark.parametrize("kind", ["died", "lost"])
def test_a_run_whose_process_died_and_left_a_damaged_folder_stops_no_other(
    kind: str, name: str, content: bytes | None, tmp_path: Path
) -> None:
    damaged_run(tmp_path / "a", name, content)
    workers = Scripted(a=[kind, "failed", "failed"], b=["made"])
    failed, said = execute_scripted(workers, 1, tmp_path)
    assert failed == {"a, seed 1": "it failed"}
    assert workers.started.count("b") == 1
    assert any(f"it {kind}; its folder is damaged: " in text and name in text for text in said)


def test_a_damaged_folder_is_the_reason_of_a_run_that_is_not_tried_again(tmp_path: Path) -> None:
    damaged_run(tmp_path / "a", "status.json", b"")
    failed, _ = execute_scripted(Scripted(a=["died"], b=["made"]), 0, tmp_path)
    assert list(failed) == ["a, seed 1"]
    assert f"{tmp_path / 'a' / 'status.json'}" in failed["a, seed 1"]


def test_an_interruption_stays_one_and_reaches_every_run_beside_a_damaged_one(tmp_path: Path) -> None:
    class Two(Scripted):
        def start(self, waiting: list[Job], data_folder: str) -> None:
            while waiting:
                self.running.append(waiting.pop(0))

    damaged_run(tmp_path / "a", "status.json", b"")
    RunFolder(tmp_path / "b").create("{}", "", {})
    workers = Two(a=["interrupt"], b=[])
    with pytest.raises(KeyboardInterrupt):
        execute_scripted(workers, 1, tmp_path)
    assert workers.stopped == 1
    assert RunFolder(tmp_path / "b").status()["status"] == "stopped"


@pytest.mark.parametrize(("name", "content"), [each for each in DAMAGES if each[0] == "metrics.jsonl"][:3])
def test_the_estimate_names_a_damaged_run_and_counts_the_others(name: str, content: bytes, tmp_path: Path) -> None:
    damaged_run(tmp_path / "a", name, content)
    line = {"step": 1, "loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "tokens": 64, "seconds": 3.0, "batch_sha": ""}
    RunFolder(tmp_path / "b").create("{}", "", {})
    RunFolder(tmp_path / "b").append(line)
    config = tiny("train.steps=5")
    running = [Job(Arm(name, name, config), 1, config, tmp_path / name) for name in ("a", "b")]
    text = execute.estimate(running, [], 1)
    assert text.startswith(f"a, seed 1: damaged: {tmp_path / 'a' / 'metrics.jsonl'}, line 1")
    assert text.endswith("; b, seed 1: step 1/5, loss 2.000; about 12 s left")


def test_a_run_that_is_made_but_cannot_be_read_has_failed(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged_run(tmp_path / "a", "metrics.jsonl", b"{\n")
    monkeypatch.setattr("qurve.train.loop.train", lambda *_, **__: RunFolder(tmp_path / "a"))
    outcome = jobs.make(Job(Arm("a", "A", tiny()), 1, tiny(), tmp_path / "a"), "cpu", str(data_folder))
    assert (outcome.kind, "metrics.jsonl, line 1" in outcome.words) == ("failed", True)


def test_what_fails_comes_back_in_words(data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unpicklable(Exception):
        def __init__(self, one: str, two: str) -> None:
            super().__init__(f"{one} {two}")

    def breaks(*args: Any, **kwargs: Any) -> None:
        raise Unpicklable("out of", "luck")

    monkeypatch.setattr("qurve.train.loop.train", breaks)
    job = Job(Arm("a", "A", tiny()), 1, tiny(), tmp_path / "a")
    assert jobs.make(job, "cpu", str(data_folder)) == Outcome("failed", "out of luck")
