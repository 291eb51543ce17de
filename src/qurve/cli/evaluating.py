"""The command that evaluates: a run, a Hugging Face model, or all runs of a study."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from qurve.cli.shared import Device, Json, Precision, at_least, console_for, option, plain
from qurve.errors import BadInput

if TYPE_CHECKING:
    from qurve.evaluate import Loss, Task, TaskResult
    from qurve.study.evaluated import StudyEvaluation

TASK_FILES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


def evaluate(
    model: Annotated[
        Positional[Path],
        arg(metavar="RUN|HF_DIR|STUDY", help="A run's folder, a Hugging Face model's, or a study's: all of its runs."),
    ],
    tasks: Annotated[
        tuple[str, ...],
        option(
            metavar="TASK…",
            help="Task files (.jsonl, .jsonl.zst: see docs/evaluation.md); names or .yaml files of lm-eval's.",
        ),
    ] = (),
    text: Annotated[
        tuple[str, ...],
        option(metavar="PATH…", help="Take the loss on these documents: whatever `qurve prepare` reads."),
    ] = (),
    split: Annotated[
        Literal["train", "val", "test"] | None,
        option(
            metavar="SPLIT", help="Take the loss on this split of a run's data. Default without tasks or text: val."
        ),
    ] = None,
    context: Annotated[
        int | None, option(metavar="N", help="Tokens that a prediction may look at. Default: the model's context.")
    ] = None,
    stride: Annotated[
        int | None, option(metavar="N", help="Tokens that the context moves on by. Default: the context.")
    ] = None,
    limit: Annotated[int | None, option(metavar="N", help="Take the first N items of each task alone.")] = None,
    batch: Annotated[
        int, option(metavar="N", help="Sequences at a time; the numbers do not hang on it. Default: 8.")
    ] = 8,
    data: Annotated[
        Path | None, option(metavar="DIR", help="Where a run's data is now: its tokenizer is needed.")
    ] = None,
    precision: Precision = "float32",
    device: Device = None,
    as_json: Json = False,
) -> int:
    """Evaluate a trained model: loss, bits per byte and perplexity, and likelihood tasks.

    Of a study every finished run is evaluated on the task files, and the paired differences go into its report.
    """
    at_least("--batch", batch, 1)
    if limit is not None:
        at_least("--limit", limit, 1)
    options: dict[str, Any] = {"device": device or "auto", "precision": precision or "float32"}
    files = [task for task in tasks if task.lower().endswith(TASK_FILES)]
    named = [task for task in tasks if task not in files]
    is_windowed = (context, stride) != (None, None)
    console = console_for(as_json)
    if (model / "study.json").is_file():
        if named or text or split or is_windowed or not files:
            raise BadInput(f"{model} is a study: its runs are evaluated with --tasks FILE.jsonl…, and nothing else")
        return _study(model, _read(files, limit), data, batch, options, console, as_json)
    if named and importlib.util.find_spec("lm_eval") is None:
        raise BadInput(f"--tasks {named[0]} is no task file, and lm-eval's tasks need `pip install 'qurve[hf]'`")
    is_run = (model / "metrics.jsonl").exists()
    if split is not None and not is_run:
        raise BadInput(f"--split {split}: {model} is no run's folder, and has no data of its own; give --text PATH…")
    if not (tasks or text or split):
        if not is_run:
            raise BadInput("say what to evaluate it on: --tasks TASK…, --text PATH…, or both")
        split = "val"
    if is_windowed and not (text or split):
        raise BadInput("--context and --stride are of the loss: give --text PATH… or --split SPLIT with them")
    read = _read(files, limit)
    from qurve.data.sources import Sources
    from qurve.evaluate import evaluate_task, open_model, split_loss, text_loss
    from qurve.generate.text import run_data

    sources = Sources(text) if text else None
    opened = open_model(model, data=data, **options)
    window: dict[str, Any] = {"context": context, "stride": stride, "batch_size": batch}
    losses: dict[str, Loss] = {}
    if split is not None:
        losses[split] = split_loss(opened, run_data(model, data), split, **window)
    if sources is not None:
        losses[", ".join(text)] = text_loss(opened, sources.documents(), **window)
    results = [evaluate_task(opened, task, batch_size=batch) for task in read]
    harness: dict[str, dict[str, Any]] = {}
    if named:
        from qurve.evaluate.harness import run_harness

        harness = run_harness(opened, named, limit=limit, batch_size=batch)
    if as_json:
        found = {
            "model": str(model),
            "precision": options["precision"],
            "limit": limit,
            "losses": {name: loss.to_json() for name, loss in losses.items()},
            "tasks": [result.to_json() for result in results],
            "lm_eval": harness,
        }
        print(json.dumps(found, default=str))
        return 0
    if losses:
        console.print(_losses(losses))
    if results:
        console.print(_tasks(results))
        for note in _task_notes(results, limit):
            console.print(note, markup=False, highlight=False)
    if harness:
        console.print(_harness(harness))
    return 0


def _read(files: Sequence[str], limit: int | None) -> list[Task]:
    from qurve.evaluate.tasks import read_task

    tasks = [read_task(file, limit) for file in files]
    names = [task.name for task in tasks]
    if twice := {name for name in names if names.count(name) > 1}:
        raise BadInput(f"--tasks: two files have the name {min(twice)}; rename one of them")
    return tasks


def _study(
    folder: Path,
    tasks: Sequence[Task],
    data: Path | None,
    batch: int,
    options: dict[str, Any],
    console: Console,
    as_json: bool,
) -> int:
    from qurve.study.evaluated import evaluate_study, evaluation_table
    from qurve.study.report import write_report
    from qurve.study.results import load

    results = load(folder)
    found: StudyEvaluation = evaluate_study(results, tasks, data=data, batch_size=batch, say=plain(console), **options)
    page = write_report(folder)
    if as_json:
        print(json.dumps({**found.to_json(), "report": str(page)}))
        return 0
    words = evaluation_table(results, found)
    console.print(_table(words.head, words.rows))
    for note in words.notes:
        console.print(note, markup=False, highlight=False)
    console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)
    return 0


# -------------------------------------------------------------------------------------------------------------- tables


def _losses(losses: dict[str, Loss]) -> Table:
    head = ("text", "loss", "bits per byte", "perplexity", "tokens", "context", "stride")
    rows = []
    for name, loss in losses.items():
        measures = (f"{loss.loss:.4f}", f"{loss.bits_per_byte:.4f}", f"{loss.perplexity:.2f}")
        rows.append((name, *measures, *(f"{n:,}" for n in (loss.tokens, loss.context, loss.stride))))
    return _table(head, rows)


def _tasks(results: Sequence[TaskResult]) -> Table:
    rows = []
    for result in results:
        rows.append(
            (
                result.task,
                f"{result.items:,}",
                _share(result.accuracy, result.interval),
                _share(result.accuracy_norm, result.interval_norm),
                _share(result.chance),
                "–" if result.perplexity is None else f"{result.perplexity:.2f}",
            )
        )
    return _table(("task", "items", "accuracy, %", "per byte, %", "chance", "perplexity"), rows)


def _task_notes(results: Sequence[TaskResult], limit: int | None) -> list[str]:
    notes = ["In brackets: the 95 % interval over the items."]
    if limit is not None:
        notes.append(f"Only the first {limit:,} items of each task were taken.")
    cut = [f"{result.task} {result.cut:,}" for result in results if result.cut]
    if cut:
        notes.append(f"Contexts that were too long and lost their beginning: {', '.join(cut)}.")
    return notes


def _share(share: float | None, interval: tuple[float, float] | None = None) -> str:
    if share is None:
        return "–"
    ends = "" if interval is None else f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"
    return f"{100 * share:.1f}{ends}"


def _harness(harness: dict[str, dict[str, Any]]) -> Table:
    rows = [
        (task, metric.removesuffix(",none"), f"{value:.4f}")
        for task, metrics in harness.items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return _table(("lm-eval task", "metric", "value"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for place, name in enumerate(head):
        table.add_column(name, overflow="fold", justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    return table
