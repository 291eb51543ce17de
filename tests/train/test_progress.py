from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from qurve.data.loader import TokenData
from qurve.train.loop import train
from qurve.train.progress import LogLines, TerminalBar, for_console
from tiny import tiny

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def console(terminal: bool, width: int = 100) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=width), stream


def test_a_log_has_a_line_every_few_steps_the_last_and_every_evaluation(data: TokenData, tmp_path: Path) -> None:
    to, stream = console(terminal=False)
    run = train(tiny("train.steps=5", "train.log_every=2", "eval.every=5"), tmp_path / "run", data, for_console(to))
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 0", "step 2/5", "step 4/5", "step 5/5", "step 5"]
    last = run.train_lines()[-1]
    assert f"loss {last['loss']:.4f}" in lines[3]
    assert f"{last['tokens'] / last['seconds']:,.0f} tokens/s" in lines[3]
    assert lines[3].endswith("0 s left")
    assert lines[4] == f"step 5  val loss {run.eval_lines()[-1]['loss']:.4f}"


def test_time_left_is_that_of_the_steps_left() -> None:
    to, stream = console(terminal=False)
    log = LogLines(to)
    log.start(10, log_every=2, done=0)
    log.updated({"step": 2, "loss": 1.0, "tokens": 200, "seconds": 4.0})
    assert stream.getvalue() == "step 2/10  loss 1.0000  50 tokens/s  16 s left\n"


@pytest.mark.parametrize("width", [40, 100])
def test_a_terminal_shows_a_bar_and_gets_its_cursor_back(width: int, data: TokenData, tmp_path: Path) -> None:
    to, stream = console(terminal=True, width=width)
    run = train(tiny(), tmp_path / "run", data, for_console(to))
    text = stream.getvalue()
    assert "4/4" in text
    assert f"val loss {run.eval_lines()[-1]['loss']:.4f}" in text
    assert text.count(HIDE_CURSOR) == text.count(SHOW_CURSOR) == 1


def test_a_training_that_breaks_off_gives_the_cursor_back(data: TokenData, tmp_path: Path) -> None:
    to, stream = console(terminal=True)

    class Breaking(TerminalBar):
        def updated(self, line: dict[str, Any]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny(), tmp_path / "run", data, Breaking(to))
    assert stream.getvalue().count(HIDE_CURSOR) == stream.getvalue().count(SHOW_CURSOR) == 1


def test_the_bar_is_for_terminals_alone() -> None:
    assert type(for_console(console(terminal=True)[0])) is TerminalBar
    assert type(for_console(console(terminal=False)[0])) is LogLines
