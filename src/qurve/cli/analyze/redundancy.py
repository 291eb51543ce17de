"""The command that says which linear queries a trained model could do without, and what is in the way."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from qurve.cli.analyze.shared import (
    as_text,
    check_out,
    embedded_windows,
    finite,
    leave,
    name_of,
    show,
    validation_windows,
)
from qurve.cli.exporting import hub
from qurve.cli.shared import Json, console_for, option, plain
from qurve.errors import BadInput

if TYPE_CHECKING:
    import torch

    from qurve.analysis.absorb import Verdict
    from qurve.analysis.redundancy import Redundancy
    from qurve.model.config import ModelConfig
    from qurve.model.gpt import GPT
    from qurve.study.worth import Table

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
    out: Annotated[
        Path | None, option(metavar="DIR", help="Also leave redundancy.json, redundancy.html and its figures here.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Say of each block whether its linear query is redundant: what can be absorbed exactly, what is in the way.

    Logits are compared on a run's validation data; of a Hugging Face model, on the embedded corpus.
    """
    from qurve.analysis.redundancy import redundancy as measure

    check_out(out)
    model, ids_BT = _model_and_text(run, data)
    chosen = tuple(dict.fromkeys(weights)) or ("query",)
    with Console(stderr=True).status("") as shown:  # on a terminal, nothing in a log
        found = measure(model, ids_BT, chosen, untie, shown.update, **_limits(model.config, ids_BT))
    before = sum(p.numel() for p in model.parameters())
    tree = _tree(run, found, before, ids_BT)
    console = console_for(as_json)
    say = plain(console)
    if out is not None:
        from qurve.study.page.redundancy import figures, redundancy_page

        page = redundancy_page(f"Redundancy in {name_of(run)}", _words(tree), tree, tables(tree))
        leave(out, {"redundancy.json": as_text(tree), "redundancy.html": page, **figures(tree)}, say)
    if as_json:
        print(json.dumps(tree, allow_nan=False))
        return 0
    for table in tables(tree):
        show(table, console)
    for line in _words(tree):
        say(line)
    return 0


def _model_and_text(folder: Path, data: Path | None) -> tuple[GPT, torch.Tensor]:
    """The model in float64, and the ids `[B, T]` that its logits are compared on."""
    import torch

    from qurve.evaluate.model import model_type
    from qurve.model.gpt import GPT

    if model_type(folder) is None:
        model = finite(GPT.from_run(folder), folder).double()
        ids = validation_windows(folder, data, min(model.config.context, LONGEST), WINDOWS)
        return model, torch.from_numpy(ids)
    if data is not None:
        raise BadInput(f"--data {data}: {folder} is no run's folder; logits are compared on the embedded corpus")
    model = finite(hub().read_model(folder), folder).double()
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


def tables(tree: dict[str, Any]) -> list[Table]:
    """What was found, for people; the JSON has every obstacle and violation."""
    from qurve.study.page.redundancy import BECOMES
    from qurve.study.worth import Table

    several = len({verdict["weight"] for verdict in tree["verdicts"]}) > 1
    rows, told = [], dict[tuple[str, str], str]()
    for v in tree["verdicts"]:
        condition = "" if v["condition"] is None else f"{v['condition']:.3g}"
        saved = f"{v['saved']:,}" if v["saved"] else ""
        kinds = ", ".join(dict.fromkeys(obstacle["kind"] for obstacle in v["obstacles"]))
        rows.append(
            [str(v["layer"]), *([v["weight"]] if several else []), condition, BECOMES[v["outcome"]], saved, kinds]
        )
        for one in v["obstacles"]:  # the first of a kind; the JSON has them all
            told.setdefault((one["kind"], one["leaves"]), f"{one['kind']}: {one['where']} {one['why']}")
    head = ["block", *(["weight"] if several else []), "condition", "becomes", "saved", "in the way"]
    return [Table(title="Linear weights", head=head, rows=rows, notes=list(told.values()))]


def _words(tree: dict[str, Any]) -> list[str]:
    """What it comes to, with the logits before and after."""
    lines = []
    exact, forced = tree["exact"], tree["forced"]
    before, after = (tree["parameters"][name] for name in ("before", "after"))
    if exact is not None:
        untied = ", with a head of its own" if tree["unties"] else ""
        lines.append(
            f"exactly{untied}: {before:,} parameters become {after:,} ({after - before:+,}), and the "
            f"logits differ by {exact['relative']:.1e} of their size (at most {exact['largest']:.1e})"
        )
    elif all(verdict["outcome"] == "none" for verdict in tree["verdicts"]):
        lines.append("there is no linear weight to absorb")
    else:
        lines.append("nothing can be absorbed exactly")
    if forced is not None:
        lines.append(
            f"forced: with every one the identity the logits change by {forced['relative']:.0%} of their size, "
            f"{forced['divergence']:.3g} nats a token"
        )
        for kind in dict.fromkeys(violation["kind"] for violation in tree["violations"]):
            alike = [violation for violation in tree["violations"] if violation["kind"] == kind]
            worst = max(alike, key=lambda violation: violation["size"])
            lines.append(f"  {len(alike)} x {kind}, at worst {worst['size']:.0%}: {worst['where']}")
    return lines
