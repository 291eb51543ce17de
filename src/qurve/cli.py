"""The command line. Each command is a function; tyro makes the parser from its signature."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from qurve.config import apply_settings
from qurve.errors import EXIT_FAILED, EXIT_INTERRUPTED, BadInput, QurveError, Stopped, did_you_mean
from qurve.files import LOCK, claimed
from qurve.runfolder import RunFolder

if TYPE_CHECKING:
    from qurve.data.loader import TokenData
    from qurve.train.config import DataConfig, RunConfig

DESCRIPTION = """\
qurve: nonlinear query projections in transformers, and a fair referee for architecture claims.

The main job is `qurve compare`: it trains the paper's three architectures on the same batches with several seeds and
says, with intervals, which differences are real.

Exit codes: 0 done; 1 a run failed; 2 the input was refused and nothing was created; 3 the training diverged;
130 interrupted.
"""

option = functools.partial(arg, help_behavior_hint="")
"""An option whose help says what it is by default."""

Settings = Annotated[
    UseAppendAction[tuple[str, ...]],
    arg(name="set", metavar="PATH=VALUE", help="Set any field of the configuration, e.g. model.dropout=0.1."),
]
Json = Annotated[
    FlagCreatePairsOff[bool],
    option(name="json", help="Print one JSON document to standard output, and nothing else there."),
]
Data = Annotated[
    Path | None, option(metavar="DIR", help="Prepared folder (see `qurve prepare`). Default: the embedded corpus.")
]
Device = Annotated[
    str | None, option(metavar="DEVICE", help="cpu, cuda or cuda:N. Default: the GPU when there is one.")
]

MOST_SEEDS = 1000
FEW_DOCUMENTS = 10
"""Validation documents below which `prepare` points to another rule."""

app = tyro.extras.SubcommandApp()
COMMANDS = ("compare", "train", "prepare", "report", "study", "watch", "presets", "plan")


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
    except OSError as error:  # a full disk, a name too long, no permission: the system's words say it
        errors.print(f"qurve: error: {error}", markup=False, highlight=False, soft_wrap=True)
        return EXIT_FAILED
    except KeyboardInterrupt:
        errors.print("qurve: interrupted", highlight=False)
        return EXIT_INTERRUPTED


# ------------------------------------------------------------------------------------------------------------ commands


@app.command(name="compare")
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
    steps: Annotated[int | None, option(metavar="N", help="Steps of every run, instead of the study's own.")] = None,
    device: Device = None,
    settings: Settings = (),
    as_json: Json = False,
) -> int:
    """Train every arm of a study with the same seeds on the same batches, then report which differences are real.

    Runs that are finished already are kept and unfinished ones continued: the same command goes on with a study that
    was cut short.
    """
    from qurve.study.definition import grid_study, load_study
    from qurve.study.execute import run_study
    from qurve.study.on_ray import Cluster

    flags = _given(steps=steps, device=device)
    chosen = grid_study(study, grid, settings).change(**flags) if grid else load_study(study).change(settings, **flags)
    if seeds is not None:
        _at_least("--seeds", seeds, 1)
        if seeds > MOST_SEEDS:
            raise BadInput(f"--seeds {seeds}: at most {MOST_SEEDS}")
        chosen = dataclasses.replace(chosen, seeds=tuple(range(1, seeds + 1)))
    if workers is not None:
        _at_least("--workers", workers, 1)
    _at_least("--retries", retries, 0)
    share = _given(cpus_per_run=cpus_per_run, gpus_per_run=gpus_per_run)
    if ray is None and share:
        raise BadInput("--cpus-per-run and --gpus-per-run belong to --ray")
    if ray is not None and workers is not None:
        raise BadInput("--workers is for this machine; with --ray, the cluster's size and --cpus-per-run decide")
    cluster = None if ray is None else Cluster(ray, **share)
    folder = out or Path("runs") / chosen.name
    _refuse_foreign_study(folder)
    config = chosen.arms[0].config.data
    if data is not None:
        config = dataclasses.replace(config, path=str(data))
    console = _console(as_json)
    command = " ".join(["qurve", *sys.argv[1:]])
    with _data_in(folder, config) as opened:
        failed = run_study(
            chosen,
            folder,
            opened,
            command=command,
            workers=workers,
            cluster=cluster,
            retries=retries,
            say=_plain(console),
        )
    _show_report(folder, console, as_json)
    for name, reason in failed.items():
        console.print(f"failed: {name}: {reason}", markup=False, highlight=False)
    return EXIT_FAILED if failed else 0


@app.command(name="train")
def train(
    preset: Annotated[
        Positional[str], arg(metavar="PRESET", help="A name from `qurve presets`, e.g. smoke or paper/res-gelu-best.")
    ],
    out: Annotated[Path, arg(metavar="DIR", help="The run's folder.")],
    data: Data = None,
    resume: Annotated[
        Literal["never", "auto"],
        option(metavar="never|auto", help="auto: go on with the run in DIR, if there is one. Default: never."),
    ] = "never",
    changed: Annotated[
        UseAppendAction[tuple[str, ...]],
        option(metavar="PATH", help="A field that a resumed run may have other than before, e.g. train.lr."),
    ] = (),
    seed: Annotated[
        int | None, option(metavar="N", help="Varies initial weights, dropout, and the order of the data.")
    ] = None,
    steps: Annotated[int | None, option(metavar="N", help="Updates of the full schedule.")] = None,
    stop_at: Annotated[int | None, option(metavar="N", help="Stop after this step of the schedule.")] = None,
    checkpoint_every: Annotated[
        int | None, option(metavar="N", help="Steps between checkpoints. Default: after every evaluation.")
    ] = None,
    parallel: Annotated[
        Literal["ddp", "fsdp"] | None,
        option(metavar="ddp|fsdp", help="Under torchrun: each process has the whole model, or a part of it."),
    ] = None,
    device: Device = None,
    precision: Annotated[
        Literal["auto", "float32", "bf16"] | None,
        option(metavar="auto|float32|bf16", help="Of the matrix products; auto: bf16 where the hardware has it."),
    ] = None,
    settings: Settings = (),
    as_json: Json = False,
) -> int:
    """Train one model into a run folder. Under torchrun, every process runs this command."""
    from qurve.train.data import open_data

    options = {"steps": steps, "stop_at": stop_at, "checkpoint_every": checkpoint_every, "parallel": parallel}
    config = _preset(preset, settings, seed=seed, device=device, precision=precision, **options)
    if data is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(data)))
    if resume == "never":
        RunFolder(out).refuse_used()
    elif not RunFolder(out).is_begun():
        RunFolder(out).refuse_foreign()
    from qurve.train.distributed import joined
    from qurve.train.loop import train as train_model
    from qurve.train.progress import Progress, for_console
    from qurve.train.runtime import check_processes, resolve_device

    console = _console(as_json)
    with joined(resolve_device(config.train.device)) as world, contextlib.ExitStack() as ending:
        check_processes(config, world)
        if world.main:
            opened = ending.enter_context(_data_in(out, config.data))
        world.wait()  # the embedded corpus is prepared once
        if not world.main:
            opened = open_data(config.data, out / "data")
        progress = for_console(console) if world.main else Progress()
        run = train_model(config, out, opened, progress, resume=resume, changed=changed, world=world)
        if not world.main:
            return 0
    last, evaluations = run.train_lines()[-1], [line for line in run.metrics() if "split" in line]
    figures = {
        "run": str(run.path),
        "steps": last["step"],
        "tokens": last["tokens"],
        "train_loss": last["loss"],
        **{f"{line['split']}_loss": line["loss"] for line in evaluations},
        "tokens_per_s": last["tokens"] / last["seconds"],
    }
    if as_json:
        print(json.dumps(figures))
    else:
        losses = ", ".join(f"{k.removesuffix('_loss')} {v:.4f}" for k, v in figures.items() if k.endswith("_loss"))
        console.print(
            f"{run.status()['status']} {run.path}: loss {losses}; {figures['tokens_per_s']:,.0f} tokens/s",
            highlight=False,
        )
    return 0


@app.command(name="prepare")
def prepare(
    paths: Annotated[
        Positional[tuple[str, ...]],
        arg(
            metavar="PATH…",
            help_behavior_hint="",
            help="Text files, folders, .jsonl(.gz|.zst), .parquet, or hf:NAME for a hub data set.",
        ),
    ],
    out: Annotated[Path, arg(metavar="DIR", help="The new data folder.")],
    tokenizer: Annotated[str, arg(metavar="SPEC", help="gpt2, bytes, or bpe:N (trained on the data).")] = "gpt2",
    split: Annotated[
        float | None,
        option(
            metavar="FRACTION", help="Share of the documents for validation and for test each. Default: nanoGPT's rule."
        ),
    ] = None,
    workers: Annotated[int | None, option(metavar="N", help="Processes. Default: one per core.")] = None,
    as_json: Json = False,
) -> int:
    """Turn text into token shards and a manifest. A call that was cut short is continued by the same call."""
    from qurve.data.prepare import prepare as prepare_data

    if not paths:
        raise BadInput("name at least one file, folder or hf: data set to prepare")
    manifest = prepare_data(paths, out, tokenizer=tokenizer, split=split, workers=workers, progress=True)
    if as_json:
        print(json.dumps(manifest))
        return 0
    table = Table("split", "documents", "tokens", "bytes of text")
    for name, size in manifest["splits"].items():
        table.add_row(name, *(f"{size[key]:,}" for key in ("documents", "tokens", "bytes")))
    Console().print(table)
    documents = manifest["splits"]["val"]["documents"]
    if manifest["split_rule"]["rule"] == "nanogpt" and documents < FEW_DOCUMENTS:
        print(f"note: nanoGPT's rule leaves {documents} for validation, test among them; --split 0.05 takes more")
    dropped = sum(entry["count"] for entry in manifest["dropped"])
    print(f"{out}: tokenizer {manifest['tokenizer']['spec']}, {manifest['n_ids']:,} ids, {dropped} documents dropped")
    return 0


@app.command(name="report")
def report(
    folder: Annotated[Positional[Path], arg(metavar="FOLDER", help="A study's folder, finished or not.")],
    as_json: Json = False,
) -> int:
    """Write a study's report anew from its runs: report.html, table.csv, table.tex, figures."""
    _show_report(folder, _console(as_json), as_json)
    return 0


@app.command(name="study")
def study(
    action: Annotated[Positional[Literal["status"]], arg(help="What to do with the study.")],
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


@app.command(name="watch")
def watch(
    folder: Annotated[Positional[Path], arg(metavar="RUN|STUDY", help="A run's folder, or a study's.")],
) -> int:
    """Show how far a run or a study is, live, until nothing runs any more. Ctrl-C leaves; nothing else stops."""
    from qurve.study.watch import watch as show

    with contextlib.suppress(KeyboardInterrupt):
        show(folder, Console())
    return 0


@app.command(name="presets")
def presets(as_json: Json = False) -> int:
    """List the named configurations."""
    from qurve import accounting
    from qurve import presets as named

    rows: list[dict[str, Any]] = []
    for name in named.names():
        config = named.get(name)
        rows.append(
            {
                "name": name,
                "non_embedding": accounting.count(config.model).non_embedding,
                "query": config.model.query.kind,
                "lr": config.train.lr,
                "min_lr": config.train.min_lr,
                "weight_decay": config.train.weight_decay,
                "steps": config.train.steps,
            }
        )
    if as_json:
        print(json.dumps(rows))
        return 0
    table = Table(box=None, padding=(0, 1, 0, 0))  # 80 columns must not cost a digit
    for title in ("preset", "N.E.\nparams", "query", "peak\nrate", "floor", "decay", "steps"):
        left, limit = title in ("preset", "query"), 10 if title == "query" else None
        table.add_column(title, overflow="fold", max_width=limit, justify="left" if left else "right")
    for row in rows:
        figures = (f"{row['lr']:.3g}", f"{row['min_lr']:.3g}", f"{row['weight_decay']:.4g}")
        table.add_row(row["name"], f"{row['non_embedding']:,}", row["query"], *figures, f"{row['steps']:,}")
    Console().print(table)
    return 0


@app.command(name="plan")
def plan(
    preset: Annotated[Positional[str], arg(metavar="PRESET", help="A name from `qurve presets`.")],
    steps: Annotated[int | None, option(metavar="N", help="Updates of the full schedule.")] = None,
    device: Device = None,
    settings: Settings = (),
    as_json: Json = False,
) -> int:
    """What a run will take: parameters, tokens, FLOPs, hours on this machine, memory, disk. Nothing is created."""
    from qurve.train.plan import make_plan

    figures = make_plan(preset, _preset(preset, settings, steps=steps, device=device))
    if as_json:
        print(json.dumps(figures))
        return 0
    table = Table(show_header=False, box=None)
    for key, value in figures.items():
        table.add_row(key.replace("_", " "), _readable(key, value))
    Console().print(table)
    return 0


# -------------------------------------------------------------------------------------------------------------- shared


def _readable(key: str, value: Any) -> str:
    """A figure of a plan, for people."""
    if key == "estimated_hours":
        return f"{value:,.1f}" + (f" ({value / 24:,.0f} days)" if value > 48 else "")
    if key.endswith("_bytes"):
        return f"{value / 1e9:,.2f} GB" if value >= 1e9 else f"{value / 1e6:,.2f} MB"
    if isinstance(value, float) or (isinstance(value, int) and value > 10**12):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _preset(name: str, settings: Sequence[str], **train: Any) -> RunConfig:
    from qurve import presets as named

    config = named.get(name)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, **_given(**train)))
    return apply_settings(config, settings)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise BadInput(f"{name} {value}: it must be at least {least}")


def _refuse_foreign_study(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is a file; give another --out")
    found = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
    if found and not found & {"study.json", "data", LOCK}:
        raise BadInput(f"{folder} holds something that is not a study; give another --out")


@contextlib.contextmanager
def _data_in(folder: Path, config: DataConfig) -> Iterator[TokenData]:
    """The data that `config` names. The embedded corpus is prepared in `folder`, and goes again on a refusal."""
    from qurve.train.data import open_data

    made = [place for place in (folder, *folder.parents) if not place.exists()]
    is_missing, prepared = not (folder / "data").exists(), False
    try:
        data = open_data(config, folder / "data")
        prepared = is_missing and config.path is None
        yield data
    except BadInput:
        if prepared:  # by us; but another process may have begun with it in the meantime, and then has the lock
            with contextlib.suppress(BadInput), claimed(folder):
                if not (folder / "config.json").exists() and not (folder / "study.json").exists():
                    shutil.rmtree(folder / "data")
        for place in made:
            with contextlib.suppress(OSError):  # it is not empty, or was never made
                place.rmdir()
        raise


def _console(as_json: bool) -> Console:
    """Where people read: standard output, or standard error when that is kept for JSON."""
    return Console(stderr=as_json)


def _plain(console: Console) -> Any:
    return lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)


def _show_report(folder: Path, console: Console, as_json: bool) -> None:
    from qurve.study.report import write_report
    from qurve.study.results import load
    from qurve.study.statistics import overall_verdict, summary_rows
    from qurve.study.tables import terminal_table

    page = write_report(folder)
    results = load(folder)
    console.print(terminal_table(results))
    console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps({"rows": summary_rows(results), "verdict": overall_verdict(results), "report": str(page)}))
