"""The commands of studies: compare, report, study, watch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from tyro.conf import Positional, UseAppendAction, arg
from tyro.extras import SubcommandApp

from qurve.cli.shared import Data, Device, Json, Settings, at_least, console_for, data_in, given, option, plain
from qurve.errors import EXIT_FAILED, BadInput
from qurve.files import LOCK, check_folders

if TYPE_CHECKING:
    from qurve.study.ladder_results import LadderResults

MOST_SEEDS = 1000
MOST_DOUBTS = 12
"""That the terminal says; the report and `--json` have all."""


def compare(
    study: Annotated[
        Positional[str],
        arg(
            metavar="STUDY",
            help="A built-in study (small, paper, zoo) or a Python file exposing STUDY; with --grid, a preset.",
        ),
    ] = "small",
    grid: Annotated[
        UseAppendAction[tuple[str, ...]],
        option(metavar="PATH=V1,V2", help="Compare these values of a field; again for another: every combination."),
    ] = (),
    data: Data = None,
    out: Annotated[Path | None, option(metavar="DIR", help="The study's folder. Default: runs/STUDY.")] = None,
    seeds: Annotated[
        int | None, option(metavar="N", help="Number of seeds, 1 to N, instead of the study's own.")
    ] = None,
    workers: Annotated[
        int | None, option(metavar="N", help="Runs at a time. Default: one per core, or one per GPU.")
    ] = None,
    retries: Annotated[
        int, option(metavar="N", help="Times that a failed run is tried again, from its checkpoint. Default: 1.")
    ] = 1,
    ray: Annotated[
        str | None, option(metavar="auto|HOST:PORT", help="Make the runs on a Ray cluster; auto: find or start one.")
    ] = None,
    cpus_per_run: Annotated[
        int | None, option(metavar="N", help="With --ray: CPUs of each run, and its threads. Default: 1.")
    ] = None,
    gpus_per_run: Annotated[
        float | None, option(metavar="X", help="With --ray: GPUs of each run, or a share of one. Default: 0.")
    ] = None,
    pool: Annotated[
        Path | None, option(metavar="DIR", help="Make the runs in this folder, and none that is there already.")
    ] = None,
    steps: Annotated[int | None, option(metavar="N", help="Steps of every run, instead of the study's own.")] = None,
    device: Device = None,
    settings: Settings = (),
    as_json: Json = False,
) -> int:
    """Train every arm of a study with the same seeds on the same batches, then report which differences are real.

    A study with a search first finds each arm's settings, with the same budget for each. Runs that are finished already
    are kept and unfinished ones continued: the same command goes on with a study that was cut short.
    """
    from qurve.study.definition import grid_study, load_study
    from qurve.study.execute import run_study
    from qurve.study.on_ray import Cluster
    from qurve.study.pool import check_pool

    flags = given(steps=steps, device=device)
    chosen = grid_study(study, grid, settings).change(**flags) if grid else load_study(study).change(settings, **flags)
    if seeds is not None:
        at_least("--seeds", seeds, 1)
        if seeds > MOST_SEEDS:
            raise BadInput(f"--seeds {seeds}: at most {MOST_SEEDS}")
        chosen = dataclasses.replace(chosen, seeds=tuple(range(1, seeds + 1)))
    if workers is not None:
        at_least("--workers", workers, 1)
    at_least("--retries", retries, 0)
    share = given(cpus_per_run=cpus_per_run, gpus_per_run=gpus_per_run)
    if ray is None and share:
        raise BadInput("--cpus-per-run and --gpus-per-run belong to --ray")
    if ray is not None and workers is not None:
        raise BadInput("--workers is for this machine; with --ray, the cluster's size and --cpus-per-run decide")
    cluster = None if ray is None else Cluster(ray, **share)
    folder = out or Path("runs") / chosen.name
    _refuse_foreign_study(folder)
    if pool is not None:
        check_pool(pool)
    config = chosen.arms[0].config.data
    if data is not None:
        config = dataclasses.replace(config, path=str(data))
    console = console_for(as_json)
    command = " ".join(["qurve", *sys.argv[1:]])
    with data_in(folder, config) as opened:
        failed = run_study(
            chosen,
            folder,
            opened,
            command=command,
            workers=workers,
            cluster=cluster,
            retries=retries,
            pool=pool,
            definition=Path(study) if study.endswith(".py") and not grid else None,
            say=plain(console),
        )
    _show_report(folder, console, as_json)
    for name, reason in failed.items():
        console.print(f"failed: {name}: {reason}", markup=False, highlight=False)
    return EXIT_FAILED if failed else 0


def report(
    folder: Annotated[
        Positional[Path], arg(metavar="FOLDER", help="A study's folder, or a ladder's, finished or not.")
    ],
    against: Annotated[
        Path | None, option(metavar="FOLDER", help="Another study's folder: compare the arms that both have.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Write a study's report anew from its runs: report.html, report.md, table.csv, table.tex, figures.

    Of a ladder the same without figures as files: those are in its page.
    """
    _show_report(folder, console_for(as_json), as_json, against)
    return 0


study = SubcommandApp()
"""The actions on a study, and on a ladder of them: `qurve study status`, `plan`, `documents`, `ladder`."""


@study.command(name="status")
def study_status(
    folder: Annotated[Positional[Path], arg(metavar="FOLDER", help="A study's folder, or a run's.")],
    as_json: Json = False,
) -> int:
    """Say how far a study's runs are, from its folder alone: it may be at work anywhere."""
    from qurve.study.watch import Watched, status_json, status_table

    watched = Watched(folder)
    if as_json:
        print(status_json(watched.look()))
    else:
        Console().print(status_table(watched.look()))
    return 0


@study.command(name="plan")
def study_plan(
    study: Annotated[
        Positional[str],
        arg(metavar="STUDY", help="A built-in study (small, paper, zoo) or a Python file exposing STUDY or LADDER."),
    ] = "small",
    effect: Annotated[
        str, option(metavar="X%", help="The gain to be seen, in per cent of the baseline's loss. Default: 0.2%.")
    ] = "0.2%",
    known: Annotated[
        Path | None,
        option(name="from", metavar="FOLDER|FILE", help="A study, or its evidence.json, that shows noise and speed."),
    ] = None,
    pool: Annotated[Path | None, option(metavar="DIR", help="Say how many of the runs are in this pool.")] = None,
    data: Data = None,
    settings: Settings = (),
    as_json: Json = False,
) -> int:
    """What a study or a ladder will take, searches with it, and how many seeds a study needs. Nothing is created.

    Hours are an estimate: at the speeds of the study named with --from, or by FLOPs at half of what a matrix product
    reaches on this machine.

    A pool is looked into for what this machine would make by itself: data, device and threads are those of a run, too.
    """
    from qurve.study.definition import Study
    from qurve.study.execute import made_already
    from qurve.study.noise import known_from
    from qurve.study.pace import pace_here, pace_of
    from qurve.study.plan import (
        built_in_knowledge,
        ladder_plan_table,
        load_planned,
        make_plan,
        parse_effect,
        plan_ladder,
        plan_table,
    )
    from qurve.study.pool import check_pool

    wanted, fraction = load_planned(study).change(settings), parse_effect(effect)
    knowledge, made = built_in_knowledge(study) if known is None else known_from(known), None
    pace = None if knowledge is None else pace_of(knowledge)
    if not isinstance(wanted, Study):
        if pool is not None:
            raise BadInput("--pool is for a study; of a ladder, every rung is one of its own")
        plan = plan_ladder(wanted, pace or pace_here(wanted.rungs[0].study.arms[0].config))
        print(json.dumps(plan)) if as_json else Console().print(ladder_plan_table(plan))
        return 0
    if data is not None and pool is None:
        raise BadInput("--data tells one run from another in a pool: it belongs to --pool")
    if pool is not None:
        check_pool(pool)
        config = dataclasses.replace(wanted.arms[0].config.data, **given(path=None if data is None else str(data)))
        with tempfile.TemporaryDirectory() as folder, data_in(Path(folder), config) as opened:
            made = made_already(wanted, opened, pool)
    call = shlex.join([study, *(word for setting in settings for word in ("--set", setting))])
    plan = make_plan(wanted, fraction, knowledge, made, pace or pace_here(wanted.arms[0].config), call)
    if as_json:
        print(json.dumps(plan))
    else:
        Console().print(plan_table(plan))
    return 0


@study.command(name="documents")
def study_documents(
    folder: Annotated[Positional[Path], arg(metavar="FOLDER", help="A study's folder; its runs need checkpoints.")],
    data: Annotated[
        Path | None, option(metavar="DIR", help="Where the runs' data is now. Default: where it was.")
    ] = None,
    device: Device = None,
    as_json: Json = False,
) -> int:
    """Evaluate a study's runs document by document: how far their differences hang on the documents.

    The whole split that the study reports on is evaluated, with each run's newest checkpoint. The intervals are a
    bootstrap over documents: noise of the evaluation, not of other seeds.
    """
    from qurve.generate.text import run_data
    from qurve.study.documents import document_noise, document_table
    from qurve.study.results import load

    results = load(folder)
    finished = next((run for run in results.runs if run.finished), None)
    if finished is None:
        raise BadInput(f"{folder}: no run is finished yet, so there is nothing to evaluate")
    opened = run_data(folder / "runs" / finished.arm / f"seed-{finished.seed}", data)
    noise = document_noise(results, opened, device or "auto")
    if as_json:
        print(json.dumps(noise.to_json()))
    else:
        Console().print(document_table(noise, results.baseline.label))
    return 0


def watch(
    folder: Annotated[Positional[Path], arg(metavar="RUN|STUDY", help="A run's folder, or a study's.")],
) -> int:
    """Show how far a run or a study is, live, until nothing runs any more. Ctrl-C leaves; nothing else stops."""
    from qurve.study.watch import watch as show

    with contextlib.suppress(KeyboardInterrupt):
        show(folder, Console())
    return 0


@study.command(name="ladder")
def study_ladder(
    ladder: Annotated[
        Positional[str],
        arg(metavar="LADDER", help="A built-in one (small, paper) or a Python file exposing LADDER."),
    ] = "small",
    data: Data = None,
    out: Annotated[Path | None, option(metavar="DIR", help="Its folder. Default: runs/ladder-LADDER.")] = None,
    workers: Annotated[
        int | None, option(metavar="N", help="Runs at a time. Default: one per core, or one per GPU.")
    ] = None,
    pool: Annotated[
        Path | None, option(metavar="DIR", help="Make the runs in this folder, and none that is there already.")
    ] = None,
    settings: Settings = (),
    as_json: Json = False,
) -> int:
    """Make the same arms at several sizes and training lengths; says how the gain changes with scale.

    Each rung is a study of full schedules. Runs that are finished already are kept: the same command goes on with a
    ladder that was cut short.
    """
    from qurve.study.ladder import load_definition, refuse_foreign, run_ladder
    from qurve.study.ladder_results import FILE
    from qurve.study.pool import check_pool
    from qurve.study.report import write_report

    wanted = load_definition(ladder).change(settings)
    if workers is not None:
        at_least("--workers", workers, 1)
    folder = out or Path("runs") / f"ladder-{wanted.name}"
    refuse_foreign(folder, wanted)
    if pool is not None:
        check_pool(pool)
    config = wanted.rungs[0].study.arms[0].config.data
    if data is not None:
        config = dataclasses.replace(config, path=str(data))
    console = console_for(as_json)
    command = " ".join(["qurve", *sys.argv[1:]])
    with data_in(folder, config) as opened:
        results, failed = run_ladder(
            wanted,
            folder,
            opened,
            command=command,
            definition=Path(ladder) if ladder.endswith(".py") else None,
            say=plain(console),
            workers=workers,
            pool=pool,
        )
    _show_ladder(results, write_report(folder), console, as_json)
    console.print(f"evidence: {folder / FILE}", markup=False, highlight=False, soft_wrap=True)
    for run, reason in failed.items():
        console.print(f"failed: {run}: {reason}", markup=False, highlight=False)
    return EXIT_FAILED if failed else 0


def _refuse_foreign_study(folder: Path) -> None:
    from qurve.study.source import FOLDER as DEFINITION
    from qurve.study.study_json import read_study

    check_folders(folder, "runs", "search", DEFINITION)
    if os.path.lexists(folder / "study.json"):
        read_study(folder / "study.json")  # refuses a damaged one
    found = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
    if found and not found & {"study.json", "data", LOCK}:
        raise BadInput(f"{folder} holds something that is not a study; give another --out")


def _show_report(folder: Path, console: Console, as_json: bool, against: Path | None = None) -> None:
    from qurve.study.against import against as differences
    from qurve.study.against import against_lines
    from qurve.study.headline import reservations
    from qurve.study.ladder_results import FILE as LADDER
    from qurve.study.ladder_results import load_ladder
    from qurve.study.report import write_report
    from qurve.study.results import load
    from qurve.study.statistics import overall_verdict, summary_rows
    from qurve.study.tables import terminal_table

    page = write_report(folder, against)
    if (folder / LADDER).is_file():
        _show_ladder(load_ladder(folder), page, console, as_json)
        return
    results = load(folder)
    console.print(terminal_table(results))
    doubts = reservations(results)
    _show_doubts(doubts, console)
    compared = {}
    if against is not None:
        other = load(against)
        pairs = differences(results, other)
        compared = {"against": [dataclasses.asdict(pair) for pair in pairs]}
        for line in against_lines(other, pairs):
            console.print(line, markup=False, highlight=False)
    console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        found = {"rows": summary_rows(results), "verdict": overall_verdict(results), "doubts": doubts}
        print(json.dumps({**found, "report": str(page), **compared}))


def _show_doubts(doubts: list[str], console: Console) -> None:
    said = [f"- {doubt}" for doubt in doubts[:MOST_DOUBTS]]
    if more := len(doubts) - len(said):
        said.append(f"- and {more} more in the report")
    for line in ("Before you believe it:", *said) if said else ():
        console.print(line, markup=False, highlight=False)


def _show_ladder(results: LadderResults, page: Path, console: Console, as_json: bool) -> None:
    from qurve.study.ladder_results import doubts, to_json
    from qurve.study.ladder_tables import lines, table

    console.print(table(results))
    for line in lines(results):
        console.print(line, markup=False, highlight=False)
    _show_doubts(doubts(results), console)
    console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print(to_json(results))
