"""Progress: plain lines in a log, a bar on a terminal, silence when asked for."""

from __future__ import annotations

import sys

import pytest

from qurve.data import progress
from qurve.data.progress import Progress


def run(on: bool = True) -> None:
    with Progress("tokenising", 2_000_000, on=on) as bar:
        for done in (500_000, 1_000_000, 2_000_000):
            bar.update(done)


def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 4.0, 20.0, 21.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))


def test_lines_in_a_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock(monkeypatch)
    run()
    assert capsys.readouterr().err == "tokenising: 50 %, 0.1 MB/s, 0:00:20 left\n"  # one in ten seconds at most
    clock(monkeypatch)
    run(on=False)
    assert capsys.readouterr().err == ""


def test_rate_and_time_left_count_from_where_a_continued_work_began(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([0.0, 20.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    left = 2 * 3600 + 3 * 60 + 4
    with Progress("writing", 10_000_000 + left * 100_000, start=8_000_000) as bar:
        bar.update(10_000_000)
    assert capsys.readouterr().err == "writing: 1 %, 0.1 MB/s, 2:03:04 left\n"


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    run()
    shown = capsys.readouterr().err
    assert "tokenising" in shown
    assert "2.0/2.0 MB" in shown
