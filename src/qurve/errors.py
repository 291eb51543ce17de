"""What can go wrong, and the exit code each kind ends in.

Exit codes of every command: 0 done; 1 a run or a check failed; 2 the input was refused (nothing was created);
3 the training diverged; 130 stopped by Ctrl-C or SIGTERM (a training has finished its step and saved).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_DIVERGED = 3
EXIT_INTERRUPTED = 130


class QurveError(Exception):
    """An error whose message is for the user: the command line prints it without a traceback."""

    exit_code = EXIT_FAILED


class BadInput(QurveError, ValueError):
    """Input that cannot be used. The message names the thing, the place and the way out."""

    exit_code = EXIT_BAD_INPUT


class Damaged(BadInput):
    """A file that is not what was written: cut short, changed, or gone."""


class Busy(BadInput):
    """A folder that another process is working on."""


class Diverged(QurveError):
    """The loss or a gradient stopped being finite, or the loss stayed above its bound."""

    exit_code = EXIT_DIVERGED


class Stopped(QurveError):
    """Training was asked to stop, finished its step and saved: it can be continued."""

    exit_code = EXIT_INTERRUPTED


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"`, or the list of what there is when nothing known is near `name`."""
    known = list(known)
    if not known:
        return "; there are none"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(known)}"
