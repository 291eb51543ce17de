"""What a training shows while it runs: a bar on a terminal, plain lines in a log, nothing when embedded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # a training that shows nothing needs none of it
    from rich.console import Console
    from rich.progress import Progress as Bar


class Progress:
    """Says nothing. Base of the two below."""

    speaks: ClassVar[bool] = False
    """Whether anybody hears of a request to stop from the training itself: in a study, whoever runs it says so once."""

    def start(self, updates: int, log_every: int, done: int) -> None:
        """Before the first update of this process: `done` of the `updates` were made before."""

    def updated(self, line: dict[str, Any]) -> None:
        """After an update, with its metrics line."""

    def evaluated(self, line: dict[str, Any]) -> None:
        """After an evaluation, with its metrics line."""

    def note(self, text: str) -> None: ...

    def finish(self) -> None:
        """At the end, whatever it was, even when `start` was never reached."""


class LogLines(Progress):
    """One line every `log_every` steps."""

    speaks: ClassVar[bool] = True

    def __init__(self, console: Console) -> None:
        self.console = console

    def start(self, updates: int, log_every: int, done: int) -> None:
        self.updates, self.log_every = updates, log_every

    def updated(self, line: dict[str, Any]) -> None:
        if line["step"] % self.log_every == 0 or line["step"] == self.updates:
            left = (self.updates - line["step"]) * line["seconds"] / line["step"]
            self.note(
                f"step {line['step']}/{self.updates}  loss {line['loss']:.4f}  "
                f"{line['tokens'] / line['seconds']:,.0f} tokens/s  {left:.0f} s left"
            )

    def evaluated(self, line: dict[str, Any]) -> None:
        self.note(f"step {line['step']}  {line['split']} loss {line['loss']:.4f}")

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class TerminalBar(LogLines):
    """A live bar: step, loss, tokens/s, time left; evaluations are printed above it."""

    bar: Bar | None = None

    def start(self, updates: int, log_every: int, done: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = [BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()]
        self.bar = Bar(*columns, console=self.console)
        self.task = self.bar.add_task("", total=updates, completed=done)
        self.bar.start()

    def updated(self, line: dict[str, Any]) -> None:
        speed = line["tokens"] / line["seconds"]
        assert self.bar is not None
        self.bar.update(self.task, advance=1, description=f"loss {line['loss']:.4f}  {speed:,.0f} tokens/s")

    def finish(self) -> None:
        if self.bar is not None:  # else the terminal keeps its hidden cursor
            self.bar.stop()


def for_console(console: Console) -> Progress:
    return TerminalBar(console) if console.is_terminal else LogLines(console)
