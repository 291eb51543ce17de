"""The commands of single runs: train, presets, plan."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, UseAppendAction, arg

from qurve.cli.shared import Data, Device, Json, Precision, Settings, console_for, data_in, given, option
from qurve.config import apply_settings
from qurve.runfolder import RunFolder

if TYPE_CHECKING:
    from qurve.train.config import RunConfig


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
    precision: Precision = None,
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

    console = console_for(as_json)
    with joined(resolve_device(config.train.device)) as world, contextlib.ExitStack() as ending:
        check_processes(config, world)
        if world.main:
            opened = ending.enter_context(data_in(out, config.data))
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


def presets(as_json: Json = False) -> int:
    """List the named configurations."""
    from qurve import accounting
    from qurve import presets as named
    from qurve.study.tables import rate

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
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)  # 80 columns must not cost a digit
    for title in ("preset", "N.E.\nparams", "query", "peak\nrate", "floor", "decay", "steps"):
        left, limit = title in ("preset", "query"), 10 if title == "query" else None
        table.add_column(title, overflow="fold", max_width=limit, justify="left" if left else "right")
    for row in rows:
        figures = (*(rate(float(f"{row[key]:.3g}")) for key in ("lr", "min_lr")), f"{row['weight_decay']:.4g}")
        table.add_row(row["name"], f"{row['non_embedding']:,}", row["query"], *figures, f"{row['steps']:,}")
    Console().print(table)
    return 0


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
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, **given(**train)))
    return apply_settings(config, settings)
