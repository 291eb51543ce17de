"""The command that says which linear queries a trained model could do without, and what is in the way."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.table import Table
from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from qurve.cli.analyze.shared import as_text, embedded_windows, leave, validation_windows
from qurve.cli.exporting import hub
from qurve.cli.shared import Json, console_for, option, plain
from qurve.errors import BadInput

if TYPE_CHECKING:
    import torch

    from qurve.analysis.absorb import Verdict
    from qurve.analysis.redundancy import Redundancy
    from qurve.model.config import ModelConfig
    from qurve.model.gpt import GPT

WINDOWS, LONGEST = 4, 256
"""Stretches of text that logits are compared on, and their tokens at most."""


def redundancy(
    run: Annotated[
        Positional[Path],
        arg(
            metavar="RUN|HF_DIR",
            help="A run's folder, at its newest checkpoint, or a Hugging Face model's that `qurve import` reads.",
        ),
    ],
    weights: Annotated[
        UseAppendAction[tuple[Literal["query", "key", "value", "output"], ...]],
        option(
            name="weight",
            metavar="query|key|value|output",
            help="Which weight; again for another in the same change of basis. Default: query.",
        ),
    ] = (),
    untie: Annotated[
        FlagCreatePairsOff[bool],
        option(help="Where a tied head stands in the way, count with one that has a weight of its own."),
    ] = False,
    data: Annotated[Path | None, option(metavar="DIR", help="Where the run's data is now.")] = None,
    out: Annotated[Path | None, option(metavar="DIR", help="Also leave redundancy.json here.")] = None,
    as_json: Json = False,
) -> int:
    """Say of each block whether its linear query is redundant: what can be absorbed exactly, what is in the way.

    Logits are compared on a run's validation data; of a Hugging Face model, on the embedded corpus.
    """
    from qurve.analysis.redundancy import redundancy as measure

    model, ids_BT = _model_and_text(run, data)
    chosen = tuple(dict.fromkeys(weights)) or ("query",)
    found = measure(model, ids_BT, chosen, untie, **_limits(model.config, ids_BT))
    before = sum(p.numel() for p in model.parameters())
    tree = _tree(run, found, before, ids_BT)
    console = console_for(as_json)
    say = plain(console)
    leave(out, {"redundancy.json": as_text(tree)}, say)
    if as_json:
        print(json.dumps(tree, allow_nan=False))
        return 0
    console.print(_table(found))
    for line in _lines(found, before):
        say(line)
    return 0


def _model_and_text(folder: Path, data: Path | None) -> tuple[GPT, torch.Tensor]:
    """The model in float64, and the ids `[B, T]` that its logits are compared on."""
    import torch

    from qurve.evaluate.model import model_type
    from qurve.model.gpt import GPT

    if model_type(folder) is None:
        model = GPT.from_run(folder).double()
        ids = validation_windows(folder, data, min(model.config.context, LONGEST), WINDOWS)
        return model, torch.from_numpy(ids)
    if data is not None:
        raise BadInput(f"--data {data}: {folder} is no run's folder; logits are compared on the embedded corpus")
    model = hub().read_model(folder).double()
    return model, torch.from_numpy(embedded_windows(folder, model.config, LONGEST, WINDOWS))


def _limits(config: ModelConfig, ids_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """A model that attends to a prefix has half of each stretch for one."""
    import torch

    return {"prefix_B": torch.full((len(ids_BT),), ids_BT.shape[1] // 2)} if config.attends == "prefix" else {}


def _tree(run: Path, found: Redundancy, before: int, ids_BT: torch.Tensor) -> dict[str, Any]:
    return {
        "run": str(run),
        "tokens": ids_BT.numel(),
        "verdicts": [_verdict_tree(verdict) for verdict in found.plan.verdicts],
        "unties": found.plan.unties,
        "parameters": {"before": before, "after": before + found.added},
        "exact": None if found.exact is None else dataclasses.asdict(found.exact),
        "forced": None if found.forced is None else dataclasses.asdict(found.forced),
        "violations": [dataclasses.asdict(violation) for violation in found.violations],
    }


def _verdict_tree(verdict: Verdict) -> dict[str, Any]:
    tree = dataclasses.asdict(verdict)
    return {**tree, "condition": None if verdict.condition == math.inf else verdict.condition}


def _table(found: Redundancy) -> Table:
    several = len({verdict.weight for verdict in found.plan.verdicts}) > 1
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("block", *(["weight"] if several else []), "condition", "becomes", "saved", "in the way"):
        table.add_column(title, justify="right" if title in ("block", "condition", "saved") else "left")
    for v in found.plan.verdicts:
        kinds = ", ".join(dict.fromkeys(obstacle.kind for obstacle in v.obstacles))
        saved = f"{v.saved:,}" if v.saved else ""
        becomes = {"kept": "stays", "none": "no such weight"}.get(v.outcome, v.outcome)
        condition = "" if v.condition is None else f"{v.condition:.3g}"
        table.add_row(str(v.layer), *([v.weight] if several else []), condition, becomes, saved, kinds)
    return table


def _lines(found: Redundancy, before: int) -> list[str]:
    """What the table says in words, with the logits before and after."""
    lines, told = [], set[tuple[str, str]]()
    for obstacle in (obstacle for verdict in found.plan.verdicts for obstacle in verdict.obstacles):
        if (obstacle.kind, obstacle.leaves) not in told:  # the first of a kind; the JSON has them all
            told.add((obstacle.kind, obstacle.leaves))
            lines.append(f"{obstacle.kind}: {obstacle.where} {obstacle.why}")
    if found.exact is not None:
        untied = ", with a head of its own" if found.plan.unties else ""
        lines.append(
            f"exactly{untied}: {before:,} parameters become {before + found.added:,} ({found.added:+,}), and the "
            f"logits differ by {found.exact.relative:.1e} of their size (at most {found.exact.largest:.1e})"
        )
    else:
        lines.append("nothing can be absorbed exactly")
    if found.forced is not None:
        lines.append(
            f"forced: with every one the identity the logits change by {found.forced.relative:.0%} of their size, "
            f"{found.forced.divergence:.3g} nats a token"
        )
        for kind in dict.fromkeys(violation.kind for violation in found.violations):
            alike = [violation for violation in found.violations if violation.kind == kind]
            worst = max(alike, key=lambda violation: violation.size)
            lines.append(f"  {len(alike)} x {kind}, at worst {worst.size:.0%}: {worst.where}")
    return lines
