"""The report of a study: one self-contained HTML page, and beside it the table and the figures as files.

    report/report.html  report.md  table.csv  table.tex  evidence.json
           curves.svg|png  gains.svg|png  differences.svg|png  search.svg|png  dynamics-*.svg|png  errors-TASK.svg|png

The page needs no network, and can be read without its script. The same study folder gives the same bytes.
"""

from __future__ import annotations

import os
from pathlib import Path

from qurve.errors import BadInput
from qurve.files import write_atomic
from qurve.study import drawing, tables
from qurve.study.against import against
from qurve.study.evidence import evidence_json
from qurve.study.figures import figures_of
from qurve.study.results import load


def write_report(folder: str | os.PathLike[str], other: str | os.PathLike[str] | None = None) -> Path:
    """Write `report/` inside the study's folder, finished or not, and return the path of `report.html`. A ladder's
    folder gets page, Markdown and tables; its figures are in the page, and each rung's study has a report of its own.

    With the folder of an `other` study the arms that both have are compared too. Raises `BadInput` when a folder is not
    a study's, when no arm of the two can be compared, or when a file cannot be written, which it names. Each file is
    written whole, then renamed over the old one.
    """
    # the effects' mathematics brings numpy along, which nobody needs before a report is written
    from qurve.study.ladder_results import FILE as LADDER
    from qurve.study.ladder_results import load_ladder
    from qurve.study.ladder_tables import csv_table, tex_table
    from qurve.study.ladder_tables import markdown as ladder_markdown
    from qurve.study.markdown import markdown
    from qurve.study.page.build import page
    from qurve.study.page.evaluated import task_figures
    from qurve.study.page.ladder import ladder_page
    from qurve.study.page.sections import against_section

    folder = Path(folder)
    if (folder / LADDER).is_file() and other is None:
        ladder = load_ladder(folder)
        writers = {
            "table.csv": csv_table,
            "table.tex": tex_table,
            "report.md": ladder_markdown,
            "report.html": ladder_page,
        }
        return _written(folder, {name: write(ladder).encode() for name, write in writers.items()})
    results = load(folder)
    before = None if other is None else load(other)
    pairs = [] if before is None else against(results, before)
    files: dict[str, bytes] = {
        "table.csv": tables.csv_table(results).encode(),
        "table.tex": tables.tex_table(results).encode(),
        "evidence.json": evidence_json(results).encode(),
        "report.md": markdown(results, before, pairs).encode(),
    }
    for name, draw in figures_of(results).items():
        files[f"{name}.svg"] = drawing.svg(draw(results, drawing.WIDE), name, themed=False).encode()
        files[f"{name}.png"] = drawing.png(draw(results, drawing.WIDE))
    for name, task in task_figures(results).items():
        files[f"{name}.svg"] = drawing.svg(task(drawing.WIDE), name, themed=False).encode()
        files[f"{name}.png"] = drawing.png(task(drawing.WIDE))
    files["report.html"] = page(results, [] if before is None else [against_section(before, pairs)]).encode()
    return _written(folder, files)


def _written(folder: Path, files: dict[str, bytes]) -> Path:
    report = folder / "report"
    try:
        report.mkdir(exist_ok=True)
        for name, content in files.items():  # the page last: who sees it finds the rest beside it
            write_atomic(report / name, content)
    except OSError as error:
        raise BadInput(
            f"{error.filename} cannot be written ({error.strerror}); make room for it, and run the same command again"
        ) from None
    return report / "report.html"
