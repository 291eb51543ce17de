"""The command line. Each command is a function; tyro makes the parser from its signature."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence

import tyro
from rich.console import Console

from qurve.cli.analyze import analyze
from qurve.cli.evaluating import evaluate
from qurve.cli.exporting import export, import_
from qurve.cli.generating import generate
from qurve.cli.preparing import prepare
from qurve.cli.runs import plan, presets, train
from qurve.cli.studies import compare, report, study, watch
from qurve.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, BadInput, QurveError, Stopped, did_you_mean

DESCRIPTION = """\
qurve: nonlinear query projections in transformers, and a fair referee for architecture claims.

The main job is `qurve compare`: it trains the paper's three architectures on the same batches with several seeds and
says, with intervals, which differences are real.

Exit codes: 0 done; 1 a run failed; 2 the input was refused and nothing was created; 3 the training diverged;
130 interrupted.
"""

app = tyro.extras.SubcommandApp()
_command: Callable[..., int]
for _command in (compare, train, generate, prepare, report):  # in the order of the help
    app.command(_command)
app.command(name="eval")(evaluate)
app.command(
    study,
    name="study",
    help="How far a study is, what it would take, its noise over documents, ladders: status, plan, documents, ladder.",
)
app.command(analyze, name="analyze", help="Look into a trained model: redundancy, symmetry, geometry, mechanism.")
for _command in (watch, presets, plan, export):
    app.command(_command)
app.command(name="import")(import_)
COMMANDS = (
    "compare",
    "train",
    "generate",
    "prepare",
    "report",
    "eval",
    "study",
    "analyze",
    "watch",
    "presets",
    "plan",
    "export",
    "import",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit code."""
    code = _run_command(argv)
    if "RANK" in os.environ:
        from qurve.train.distributed import leave

        leave(code)
    sys.exit(code)


def _run_command(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without UTF-8 shows `?` for what it cannot
            stream.reconfigure(errors="replace")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's stop is an interrupt like Ctrl-C
    errors, rank = Console(stderr=True), os.environ.get("RANK", "0")
    if arguments in (["--version"], ["-V"]):
        import qurve

        print(qurve.__version__)
        return 0
    try:
        if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
            raise BadInput(f"there is no command {arguments[0]!r}{did_you_mean(arguments[0], COMMANDS)}")
        code: int = app.cli(args=arguments or ["--help"], prog="qurve", description=DESCRIPTION)
        return code
    except Stopped as stopped:
        if rank == "0":  # all processes of a run stop together
            errors.print(
                f"qurve: {stopped}; --resume auto goes on from there", markup=False, highlight=False, soft_wrap=True
            )
        return stopped.exit_code
    except QurveError as error:
        where = "" if rank == "0" else f"process {rank}: "
        errors.print("[bold red]qurve: error:[/] ", end="", highlight=False)
        errors.print(f"{where}{error}", markup=False, highlight=False, soft_wrap=True)
        return error.exit_code
    except BrokenPipeError:  # the reader of a pipe is gone: nothing more to say
        sys.stderr.close()
        return EXIT_FAILED
    except OSError as error:  # a full disk, no permission: the system's words say it
        if error.errno == errno.ENAMETOOLONG:
            errors.print(
                f"qurve: error: no file can have so long a name: {error.filename!s:.60}…; give a shorter one",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            return EXIT_BAD_INPUT
        errors.print(f"qurve: error: {error}", markup=False, highlight=False, soft_wrap=True)
        return EXIT_FAILED
    except KeyboardInterrupt:
        errors.print("qurve: interrupted", highlight=False)
        return EXIT_INTERRUPTED
