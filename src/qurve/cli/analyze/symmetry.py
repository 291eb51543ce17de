"""The command that says what a run's model is free to change, and how its heads use their bases."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from tyro.conf import Positional, arg

from qurve.cli.analyze.shared import as_text, check_out, finite, leave, name_of, show, validation_windows
from qurve.cli.shared import Json, console_for, option, plain
from qurve.errors import BadInput
from qurve.runfolder import RunFolder

if TYPE_CHECKING:
    from qurve.analysis.gauges import Pair
    from qurve.study.worth import Table

WINDOWS = 8
"""Windows of validation text on which logits are measured."""


def symmetry(
    run: Annotated[Positional[Path], arg(metavar="RUN", help="A run's folder: its newest checkpoint is taken.")],
    data: Annotated[Path | None, option(metavar="DIR", help="Where the run's data is now.")] = None,
    out: Annotated[
        Path | None, option(metavar="DIR", help="Also leave symmetry.json, symmetry.html and its figures here.")
    ] = None,
    as_json: Json = False,
) -> int:
    """How many parameters change nothing, how asymmetric each head is, and how unbalanced its weights are."""
    check_out(out)
    tree = _measured(RunFolder(run), data)
    console = console_for(as_json)
    say = plain(console)
    if out is not None:
        from qurve.study.page.symmetry import figures, symmetry_page

        page = symmetry_page(f"Symmetry of {name_of(run)}", _words(tree), tree, tables(tree))
        leave(out, {"symmetry.json": as_text(tree), "symmetry.html": page, **figures(tree)}, say)
    if as_json:
        print(json.dumps(tree, allow_nan=False))
        return 0
    for line in _words(tree):
        say(line)
    for table in tables(tree):
        show(table, console)
    return 0


def _measured(run: RunFolder, data: Path | None) -> dict[str, Any]:
    import torch

    from qurve.analysis.gauges import Pair, asymmetry, logit_asymmetry
    from qurve.analysis.symmetry import symmetries
    from qurve.model.gpt import GPT

    model = finite(GPT.from_run(run.path), run.path)
    tree: dict[str, Any] = {"run": str(run.path), "parameters": sum(p.numel() for p in model.parameters())}
    try:
        found = symmetries(model.config)
        tree["symmetries"] = [{"name": s.name, "dimension": s.dimension, "what": s.what} for s in found]
        tree["redundancy"] = sum(s.dimension for s in found)
    except BadInput as refusal:
        tree["why_not_counted"] = str(refusal)
    by_weights = asymmetry(model)
    ids_BT = torch.from_numpy(validation_windows(run.path, data, model.config.context, WINDOWS))
    prefix_B = torch.zeros(len(ids_BT), dtype=torch.long) if model.config.attends == "prefix" else None
    tree["blocks"] = []
    for layer, by_logits in enumerate(logit_asymmetry(model, ids_BT, prefix_B)):
        number = layer % len(model.blocks)
        attention = model.get_submodule(f"blocks.{number}.attention")
        tree["blocks"].append(
            {
                "block": layer,
                "asymmetry": by_weights[number],
                "logit_asymmetry": by_logits,
                **{pair: _norms(attention, pair) for pair in get_args(Pair)},
            }
        )
    return tree


def _norms(attention: Any, pair: Pair) -> list[dict[str, float | None]] | None:
    from qurve.analysis.gauges import head_norms

    try:
        found = head_norms(attention, pair)
    except ValueError:  # no basis to choose: a projection is nonlinear, say
        return None
    return [{**dataclasses.asdict(n), "excess": n.excess if n.nuclear else None} for n in found]


def _words(tree: dict[str, Any]) -> list[str]:
    if "why_not_counted" in tree:
        return [tree["why_not_counted"]]
    share = tree["redundancy"] / tree["parameters"]
    return [f"{tree['redundancy']:,} of {tree['parameters']:,} parameters change nothing ({share:.2%})."]


def tables(tree: dict[str, Any]) -> list[Table]:
    """What was found, for people; the JSON has every head."""
    from qurve.study.worth import Table

    found = []
    if "symmetries" in tree:
        found.append(
            Table(
                title="Symmetries",
                head=["symmetry", "dimension", "what changes; what undoes it"],
                rows=[[row["name"], f"{row['dimension']:,}", row["what"]] for row in tree["symmetries"]],
            )
        )
    rows = []
    for block in tree["blocks"]:
        shares = (_range(block[name]) for name in ("asymmetry", "logit_asymmetry"))
        norms = (text for pair in ("logits", "values") for text in _pair(block[pair]))
        rows.append([str(block["block"]), *shares, *norms])
    heads = Table(
        title="Heads",
        head=["block", "asymmetry", "of logits", "|W_Q| |W_K|", "excess", "|W_V| |W_O|", "excess"],
        rows=rows,
        notes=[
            "Means over the heads, and their range. Asymmetry: 0 for symmetric W_Q W_K^T or logits, 0.5 for unrelated "
            "W_Q and W_K, 1 for antisymmetric. Excess: the two factors' squared norms over the least that heads' bases "
            "allow."
        ],
    )
    return [*found, heads]


def _range(values: list[float] | None) -> str:
    if values is None:
        return "-"
    return f"{statistics.fmean(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def _pair(norms: list[dict[str, float]] | None) -> tuple[str, str]:
    if norms is None:
        return "-", "-"
    near, far = (statistics.fmean(one[name] for one in norms) for name in ("near", "far"))
    known = [one["excess"] for one in norms if one["excess"] is not None]
    return f"{near:.3g} {far:.3g}", _range(known or None)
