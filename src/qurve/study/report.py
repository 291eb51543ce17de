"""The report of a study: one self-contained HTML page, and beside it the table and the figures as files.

    report/report.html  table.csv  table.tex  evidence.json  curves.svg|png  differences.svg|png  search.svg|png

The page needs no network and no script. The same study folder gives the same bytes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from qurve.config import differences
from qurve.study import figures, tables
from qurve.study.evidence import evidence_json
from qurve.study.results import Arm, StudyResults, doubts, load
from qurve.study.statistics import Comparison, compare, overall_verdict, scope, summary_rows

PAPER_SCALE = "the paper, as printed: 124 M parameters, 60,000 steps, one seed; another scale"


def write_report(folder: str | os.PathLike[str]) -> Path:
    """Write `report/` inside the study's folder, finished or not, and return the path of `report.html`.

    Raises `BadInput` when `folder` is not a study's. Each file is written whole, then renamed over the old one.
    """
    results = load(folder)
    drawings = {"curves": figures.curves_figure}
    if results.others:
        drawings["differences"] = figures.differences_figure
    if results.search is not None:
        drawings["search"] = figures.search_figure
    files: dict[str, bytes] = {
        "table.csv": tables.csv_table(results).encode(),
        "table.tex": tables.tex_table(results).encode(),
        "evidence.json": evidence_json(results).encode(),
    }
    inline: dict[str, dict[str, str]] = {}
    for name, draw in drawings.items():
        files[f"{name}.svg"] = figures.svg(draw(results, figures.WIDE), name, themed=False).encode()
        files[f"{name}.png"] = figures.png(draw(results, figures.WIDE))
        inline[name] = {
            size: figures.svg(draw(results, width), f"{name}-{size}", themed=True)
            for size, width in (("wide", figures.WIDE), ("narrow", figures.NARROW))
        }
    files["report.html"] = _page(results, inline).encode()

    report = Path(folder) / "report"
    report.mkdir(exist_ok=True)
    for name, content in files.items():  # the page last: who sees it finds the rest beside it
        _write(report / name, content)
    return report / "report.html"


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with open(part, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _page(results: StudyResults, inline: dict[str, dict[str, str]]) -> str:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("qurve.study", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(signed=tables.signed, plain=tables.plain, rate=tables.rate, sentence=_sentence)
    return environment.get_template("report.html").render(
        results=results,
        figures={name: {size: Markup(svg) for size, svg in sizes.items()} for name, sizes in inline.items()},
        verdict=overall_verdict(results),
        scope=scope(results, [compare(results, arm) for arm in results.others]),
        cards=[_card(results, arm, compare(results, arm)) for arm in results.others],
        rows=[_row(results, arm, row) for arm, row in zip(results.arms, summary_rows(results), strict=True)],
        paper_scale=PAPER_SCALE,
        runs=[(arm, figures.colour_index(results, arm), _runs(results, arm)) for arm in results.arms],
        changed=_changed(results),
        doubts=doubts(results),
        search=_search(results),
        machine=_machine(results),
        progress=f"{sum(run.finished for run in results.runs)} of {len(results.runs)}",
    )


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:].replace(" %", "\u00a0%") + "."  # no line break before the sign


def _card(results: StudyResults, arm: Arm, pair: Comparison) -> dict[str, Any]:
    word = {"lower": "lower loss", "higher": "higher loss", "noise": "not told apart", "none": "no verdict"}
    return {"arm": arm, "pair": pair, "word": word[pair.outcome], "colour": figures.colour_index(results, arm)}


def _row(results: StudyResults, arm: Arm, row: dict[str, Any]) -> dict[str, Any]:
    best = results.best is not None and results.best.name == arm.name
    return {
        **row,
        "arm": arm,
        "colour": figures.colour_index(results, arm),
        "is_baseline": arm.name == results.baseline.name,
        "delta": tables.signed_parameters(arm, results.baseline),
        "loss": tables.loss_in_words(arm),
        "settings": [arm.setting(path) for path in ("train.weight_decay", "train.lr", "train.min_lr")],
        "is_best": best and compare(results, arm).outcome == "lower",  # bold is a claim too
    }


def _runs(results: StudyResults, arm: Arm) -> list[dict[str, Any]]:
    lines = []
    for seed, run in arm.runs.items():
        base = results.baseline.runs[seed].val_loss
        lines.append(
            {
                "run": run,
                "utilisation": tables.utilisation_in_words(arm, run),
                "start": run.val[0] if run.val else None,
                "diff": None
                if run.val_loss is None or base is None or arm is results.baseline
                else run.val_loss - base,
            }
        )
    return lines


def _changed(results: StudyResults) -> list[tuple[str, list[str], list[bool]]]:
    """The settings in which any arm differs from the baseline: (path, value per arm, whether it differs)."""
    paths = dict.fromkeys(
        path
        for arm in results.others
        for path in differences(results.baseline.config, arm.config)
        if path != "train.seed"  # every arm has every seed
    )
    table = []
    for path in paths:
        values = [_value(arm.setting(path)) for arm in results.arms]
        reference = _value(results.baseline.setting(path))
        table.append((path, values, [value != reference for value in values]))
    return table


def _value(value: Any) -> str:
    if value is None:
        return tables.NONE
    if isinstance(value, float):
        return tables.rate(value)
    return value if isinstance(value, str) else json.dumps(value)


def _search(results: StudyResults) -> dict[str, Any] | None:
    if results.search is None:
        return None
    arms = [arm for arm in results.arms if results.search.grid(arm.name)]
    points = sorted({point for arm in arms for point in results.search.grid(arm.name)})
    cells = [
        [
            {
                "loss": results.search.grid(arm.name).get(point),
                "tried": point in results.search.grid(arm.name),
                "chosen": (chosen := results.search.chosen.get(arm.name)) is not None
                and (chosen.lr, chosen.min_lr) == point,
            }
            for arm in arms
        ]
        for point in points
    ]
    return {"arms": arms, "rows": list(zip(points, cells, strict=True))}


def _machine(results: StudyResults) -> list[tuple[str, list[str]]]:
    """What the runs' environments say: (key, its distinct values over the runs). Start times become a span."""
    environments = [run.environment for run in results.runs if run.environment]
    table = []
    for key in dict.fromkeys(key for environment in environments for key in environment if key != "format"):
        values = sorted({_value(environment[key]) for environment in environments if key in environment} - {""})
        if key == "started" and len(values) > 1:
            values = [f"{values[0]} to {values[-1]}"]
        table.append((key.replace("_", " "), values))
    return table
