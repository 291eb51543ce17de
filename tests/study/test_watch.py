"""How far runs are, from their folders alone."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_study import BASELINE, STEPS, write_study
from rich.console import Console

from qurve.errors import BadInput
from qurve.runfolder import RunFolder
from qurve.study import watch
from qurve.study.results import load
from qurve.study.watch import Metrics, State, Watched, counts, goes_on, status_json, status_table

FATES = {
    ("baseline", 2): "running",
    ("mlp-4.75", 1): "diverged",
    ("mlp-4.75", 2): "failed",
    ("res-gelu", 1): "stopped",
    ("res-gelu", 2): "missing",
}


def states_of(folder: Path) -> dict[str, State]:
    return {state.run: state for state in Watched(folder).look()}


def printed(states: list[State], width: int = 160) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(status_table(states))
    return console.export_text()


def test_every_run_of_a_study_has_its_state(tmp_path: Path) -> None:
    states = states_of(write_study(tmp_path, seeds=(1, 2), fates=FATES))
    assert [state.status for state in states.values()] == [
        "finished",
        "running",
        "diverged",
        "failed",
        "stopped",
        "waiting",
    ]
    run = RunFolder(tmp_path / "runs" / "baseline" / "seed-2")
    last, running = run.train_lines()[-1], states["baseline, seed 2"]
    assert (running.step, running.updates) == (140, STEPS)
    assert (running.loss, running.val_loss) == (last["loss"], run.eval_lines()[-1]["loss"])
    assert running.tokens_per_s == pytest.approx(last["tokens"] / last["seconds"])
    assert running.seconds_left == pytest.approx(last["seconds"] / 140 * (STEPS - 140))
    assert running.is_alive
    assert states["baseline, seed 1"].seconds_left is None
    assert states["mlp-4.75, seed 2"].why == "out of memory"


def test_a_diverged_run_is_called_so_and_has_no_last_finite_loss(tmp_path: Path) -> None:
    states = list(states_of(write_study(tmp_path, seeds=(1, 2), fates=FATES)).values())
    diverged = states[2]
    assert (diverged.loss, diverged.val_loss, diverged.step) == (None, None, 140)
    (row,) = (line for line in printed(states).splitlines() if line.split()[:1] == ["mlp-4.75,"] and "diverged" in line)
    assert row.count("diverged") == 3  # status and both losses


def test_a_run_that_is_silent_for_long_is_not_taken_for_alive(tmp_path: Path) -> None:
    write_study(tmp_path, seeds=(1, 2), fates=FATES)
    file = RunFolder(tmp_path / "runs" / "baseline" / "seed-2").metrics_file
    os.utime(file, (time.time() - watch.SILENT_AFTER - 60,) * 2)
    states = Watched(tmp_path).look()
    assert states[1].silent
    assert not states[1].is_alive
    assert "running, but silent for 3 min" in printed(states)
    assert counts(states)["silent"] == 1
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    slow = [{**line, "seconds": line["seconds"] * 1000} if "seconds" in line else line for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in slow))
    os.utime(file, (time.time() - watch.SILENT_AFTER - 60,) * 2)
    assert Watched(tmp_path).look()[1].is_alive  # its steps take longer than that


def test_one_run_alone_can_be_watched(tmp_path: Path) -> None:
    write_study(tmp_path, seeds=(1, 2), fates=FATES)
    (state,) = Watched(tmp_path / "runs" / "mlp-4.75" / "seed-2").look()
    assert (state.run, state.status, state.updates) == ("seed-2", "failed", STEPS)


def test_lines_are_read_once_as_they_come_and_anew_after_a_trim(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    metrics = Metrics(file)
    metrics.read()
    assert (metrics.train, metrics.val, metrics.changed) == ({}, {}, None)
    file.write_text('{"step": 0, "split": "val", "loss": 9.0}\n{"step": 1, "loss": 8.0}\n{"step": 2, "lo')
    metrics.read()
    assert (metrics.train["step"], metrics.val["loss"]) == (1, 9.0)
    with open(file, "a") as more:
        more.write('ss": 7.0}\n{"step": 2, "split": "test", "loss": 6.0}\n')
    metrics.read()
    assert (metrics.train["loss"], metrics.val["loss"]) == (7.0, 9.0)
    other = tmp_path / "trimmed"
    other.write_text('{"step": 1, "loss": 8.0}' + " " * 500 + "\n")
    other.replace(file)
    metrics.read()
    assert (metrics.train["step"], metrics.val) == (1, {})
    os.truncate(file, 0)
    metrics.read()
    assert metrics.train == {}


def test_the_table_fits_80_columns_and_shows_hostile_reasons_as_they_are(tmp_path: Path) -> None:
    write_study(tmp_path, seeds=(1, 2), fates=FATES)
    RunFolder(tmp_path / "runs" / "mlp-4.75" / "seed-2").set_status("failed", step=3, why="[red]no[/]")
    text = printed(Watched(tmp_path).look(), 80)
    assert "[red]no[/]" in "".join(text.split())
    assert "…" not in text
    assert f"140/{STEPS}" in text
    assert "1 finished, 1 running, 1 diverged, 1 failed, 1 stopped, 1 waiting" in " ".join(text.split())


@pytest.mark.parametrize("name", ["baseline, seed 1", "res-gelu-wd005@lr=0.0012+min_lr=0.00012, seed 101"])
@pytest.mark.parametrize("silent", [False, True])
def test_large_numbers_cost_no_column_its_end(name: str, silent: bool) -> None:
    large = {"tokens_per_s": 1_234_567.0, "seconds_left": 7100.0, "seconds_since_sign": 110.0}
    state = State(name, "running", "", 59_999, 60_000, 2.9441, 3.1234, **large, silent=silent)
    text = printed([state], 80)
    (row,) = (line for line in text.splitlines() if "59,999/60,000" in line)
    assert row.split()[-7:] == ["2.9441", "3.1234", "1,234,567", "118", "min", "110", "s"]


def test_a_ladder_points_to_its_rungs(tmp_path: Path) -> None:
    for rung in ("a", "b"):
        write_study(tmp_path / "rungs" / rung, (BASELINE,), seeds=(1,), search=False, steps=2)
    with pytest.raises(BadInput, match=f"is a ladder, and each of its rungs a study: give {tmp_path}/rungs/a or "):
        Watched(tmp_path)
    with pytest.raises(BadInput, match=f"give {tmp_path}/rungs/a or {tmp_path}/rungs/b"):
        load(tmp_path)


def test_a_search_fits_80_columns(tmp_path: Path) -> None:
    """Its finished runs are one row an arm, and a name takes two lines at most; JSON has every run."""
    write_study(tmp_path, seeds=(1,), search=False)
    points = [f"lr={lr:g}+min_lr={lr / 10:g}" for lr in (1e-3, 2e-3, 4e-3)]
    for arm in ("baseline", "res-gelu"):
        for point in points:
            trial = tmp_path / "search" / "runs" / f"{arm}@{point}" / "seed-101"
            shutil.copytree(tmp_path / "runs" / arm / "seed-1", trial)
    RunFolder(trial).set_status("running", step=140)
    states = Watched(tmp_path).look()
    assert len(json.loads(status_json(states))["runs"]) == 2 * 3 + 3
    text = printed(states, 80)
    assert "…" not in text
    lines = text.splitlines()
    done = [" ".join(line.split()) for line in lines if "search" in line]
    assert done == ["baseline, its search finished 3 of 3", "res-gelu, its search finished 2 of 3"]
    assert "lr=0.002" not in text
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith("res-gelu@"))
    after = next(i for i, line in enumerate(lines) if line.lstrip().startswith("baseline, seed 1"))
    assert after - start <= 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2.0 h"), (200_000, "2.3 d")],
)
def test_spans_are_written_for_people(seconds: float | None, text: str) -> None:
    assert watch._span(seconds) == text


def test_json_is_one_document_with_every_field(tmp_path: Path) -> None:
    states = Watched(write_study(tmp_path, seeds=(1, 2), fates=FATES)).look()
    tree = json.loads(status_json(states))
    assert [State(**run) for run in tree["runs"]] == states
    assert tree["counts"]["diverged"] == 1


def state(status: str, age: float | None) -> State:
    return State("a", status, "", 1, 2, seconds_since_sign=age)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([state("finished", 1), state("waiting", None)], True),
        ([state("failed", 1), state("finished", 1)], True),
        ([state("waiting", None), state("waiting", None)], True),
        ([state("finished", 1), state("finished", 1)], False),
        ([state("diverged", 1), state("stopped", 1)], False),
        ([state("finished", 999), state("waiting", None)], False),
        ([state("failed", 1)], False),
    ],
)
def test_a_study_between_two_runs_is_waited_for(states: list[State], expected: bool) -> None:
    assert goes_on(states) is expected


def test_watching_shows_what_changes_and_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_study(tmp_path, seeds=(1,), fates={("mlp-4.75", 1): "running"})
    run = RunFolder(tmp_path / "runs" / "mlp-4.75" / "seed-1")
    looks = []

    def a_second_later(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            run.set_status("diverged", step=140, why="planted")

    monkeypatch.setattr(watch.time, "sleep", a_second_later)
    console = Console(width=120, file=io.StringIO(), force_terminal=True)
    watch.watch(tmp_path, console)
    assert len(looks) == 3
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "running" in shown
    assert "diverged: planted" in shown


@pytest.mark.parametrize("text", ["{", "[]", '{"arms": 3}', '{"arms": [{}], "seeds": [1]}'])
def test_a_damaged_study_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(BadInput, match=r"study\.json is damaged"):
        Watched(tmp_path).look()


def test_watching_needs_no_torch() -> None:
    code = "import sys, qurve.study.watch; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
