"""The page's sections, in their order. Each is a title and a function of the results that gives the section's HTML, or
None where the study has nothing for it.

What another module knows as pure data becomes a section here: a function that draws it (`drawing.heatmap`,
`drawing.scatter_fit`, put in with `picture`) or a macro of `sections.html` that writes it, and one entry in `SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from qurve.runfolder import MEASURED
from qurve.study import tables
from qurve.study.against import Pairing
from qurve.study.apart import apart_tables, searched_arms
from qurve.study.curves import band, compared_pairs, gains
from qurve.study.doubts import searched_alike
from qurve.study.figures import colour_index, drawn, figures_of
from qurve.study.page.dynamics import dynamics_section
from qurve.study.page.evaluated import tasks_section
from qurve.study.page.pieces import Numbers, Section, aside, in_table, macro, numbers_of, picture
from qurve.study.page.stability import claims_section, maps_section, smoothness_section
from qurve.study.provenance import commands, folder_of, provenance, single_run
from qurve.study.results import Arm, StudyResults
from qurve.study.settings import changed_settings, in_words
from qurve.study.statistics import MOST_NAMED, comparisons, summary_rows
from qurve.study.worth import costs_table, gains_table, noise_table, savings_table

UNSAID = ("format", *MEASURED)
"""Of a run's environment: the costs have what was measured."""
ANALYSIS = "analysis"
"""The folder inside of a run's, or the study's, in which the report looks for pages of `qurve analyze`."""


# ------------------------------------------------------------------------------------------------------------- figures


def _drawn(results: StudyResults, name: str, alt: str, caption: str, numbers: Numbers | None = None) -> str | None:
    draw = figures_of(results).get(name)
    if draw is None:
        return None
    return picture(name, lambda width: draw(results, width), alt=alt, caption=caption, numbers=numbers)


def _curves(results: StudyResults) -> str | None:
    dashed = "; dashed: training loss of the best arm, smoothed" if results.best else ""
    curves = {arm.label: band([run.val for run in arm.finished]).mean for arm in results.arms}
    return _drawn(
        results,
        "curves",
        "Validation loss of every arm against steps; below, the relative gain over the baseline",
        f"Top: validation loss; line: mean over the finished seeds, shaded: from the smallest to the largest of them, "
        f"cross: where a run diverged{dashed}. Bottom: relative log-loss gain over the baseline.{_refused(results)} "
        "The steep beginning is cut off so that the rest can be seen; the table of runs has the loss at the start."
        f"{aside(results)}",
        numbers_of("Mean validation loss over the finished seeds", curves, lambda loss: tables.plain(loss, 4)),
    )


def _refused(results: StudyResults) -> str:
    """What the gains' figures say of arms that are not drawn in them."""
    labels = [arm.label for arm in drawn(results) if arm is not results.baseline and not compared_pairs(results, arm)]
    said = ", ".join(labels) if len(labels) <= MOST_NAMED else f"{len(labels)} arms"
    return f" No gain is drawn where there is no verdict: {said}." if labels else ""


def _gains(results: StudyResults) -> str | None:
    curves = {arm.label: gains(results, arm).mean for arm in results.others}
    return _drawn(
        results,
        "gains",
        "Relative log-loss gain of every arm over the baseline against steps, from the first evaluation on",
        "Every arm from the first evaluation on, the warm-up among it; line: gain of the mean losses, shaded: from the "
        "smallest to the largest seed's. A gain that is large early says nothing of the end. M: millions of "
        f"non-embedding parameters.{_refused(results)}{aside(results)}",
        numbers_of("Relative log-loss gain over the baseline, in per cent", curves, lambda g: tables.signed(g, 2)),
    )


def _differences(results: StudyResults) -> str | None:
    return _drawn(
        results,
        "differences",
        "Difference to the baseline per arm, with each seed and the 95 % interval; the numbers are in the table above "
        "and in that of the runs",
        "Filled: mean over the seeds, with its 95 % t interval (from three seeds on). Hollow: each seed against the "
        "baseline of the same seed. Left of the line is lower loss.",
    )


# -------------------------------------------------------------------------------------------------------------- tables


def _summary(results: StudyResults) -> str:
    lower = {pair.arm for pair in comparisons(results) if pair.outcome == "lower"}
    rows = [_row(results, arm, row, lower) for arm, row in zip(results.arms, summary_rows(results), strict=True)]
    return macro("summary", results, rows, tables.PAPER_SCALE, tables.AT_BASELINE)


def _row(results: StudyResults, arm: Arm, row: dict[str, Any], lower: set[str]) -> dict[str, Any]:
    best = results.best is not None and results.best.name == arm.name
    return {
        **row,
        "arm": arm,
        "colour": colour_index(results, arm),
        "is_baseline": arm.name == results.baseline.name,
        "delta": tables.signed_parameters(arm, results.baseline),
        "loss": tables.loss_in_words(arm),
        "settings": [arm.setting(path) for path in tables.SETTINGS],
        "is_first_matched": arm in results.matched[:1],
        "is_best": best and arm.name in lower,  # bold is a claim too
    }


def _runs(results: StudyResults) -> str:
    hashes = provenance(results).configurations
    table = [(arm, colour_index(results, arm), _lines(results, arm, hashes)) for arm in results.arms]
    return macro("runs", results, table)


def _lines(results: StudyResults, arm: Arm, hashes: dict[tuple[str, int], str]) -> list[dict[str, Any]]:
    lines = []
    for seed, run in arm.runs.items():
        base = results.baseline.runs[seed].final_loss
        lines.append(
            {
                "run": run,
                "utilisation": tables.utilisation_in_words(arm, run),
                "start": run.val[0] if run.val else None,
                "diff": None
                if run.final_loss is None or base is None or arm is results.baseline
                else run.final_loss - base,
                "hash": hashes.get((arm.name, seed), "")[:12],
            }
        )
    return lines


def _search(results: StudyResults) -> str | None:
    if results.search is None:
        return None  # the doubts say so
    figure = _drawn(
        results,
        "search",
        "Validation loss of the search against the peak learning rate; the table below has the numbers",
        "Mean over the search's seeds. Ringed: the chosen point. Cross at the upper edge: a run did not finish there.",
    )
    from markupsafe import Markup

    labels = {arm.name: arm.label for arm in results.arms}
    tables_ = apart_tables(results.search, labels)
    words = "".join(in_table(f"apart-{place}", table) for place, table in enumerate(tables_, 1))
    chosen = [(one, colour_index(results, one.arm)) for one in searched_arms(results)]
    alike = searched_alike(results)
    return macro("search", results, alike, chosen, _grid(results), Markup(figure or ""), Markup(words))


def _grid(results: StudyResults) -> dict[str, Any] | None:
    if results.search is None:
        return None
    arms = [arm for arm in results.arms if results.search.grid(arm.name)]
    found = {point for arm in arms for point in results.search.grid(arm.name)}
    points = sorted(found, key=lambda point: (point[0], point[1] or 0.0))
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
    floors = any(floor is not None for _, floor in points)
    return {"arms": arms, "rows": list(zip(points, cells, strict=True)), "floors": floors}


def _looked_into(results: StudyResults) -> str | None:
    """Links to what `qurve analyze` left of the study in its folder, and of runs in theirs."""
    places = [("All arms", results.folder)]
    places += [
        (f"{arm.label}, seed {run.seed}", folder_of(results, run)) for arm in results.arms for run in arm.runs.values()
    ]
    rows = []
    for what, folder in places:
        pages = sorted((folder / ANALYSIS).glob("*.html"))
        if pages:
            rows.append(
                (what, [(page.stem, f"../{quote(page.relative_to(results.folder).as_posix())}") for page in pages])
            )
    return macro("looked_into", rows) if rows else None


def _changed(results: StudyResults) -> str:
    return macro("changed", results, changed_settings(results))


def _provenance(results: StudyResults) -> str:
    return macro("provenance", provenance(results), _machine(results))


def _machine(results: StudyResults) -> list[tuple[str, list[str]]]:
    """What the runs' environments say: (key, its distinct values over the runs). Start times become a span."""
    environments = [run.environment for run in results.runs if run.environment]
    table = []
    for key in dict.fromkeys(key for environment in environments for key in environment if key not in UNSAID):
        values = sorted({in_words(environment[key]) for environment in environments if key in environment})
        values = [value for value in values if value]
        if key == "started" and len(values) > 1:
            values = [f"{values[0]} to {values[-1]}"]
        table.append((key.replace("_", " "), values))
    return table


def _reproduce(results: StudyResults) -> str:
    singles = [line for arm in results.arms if (line := single_run(results, arm)) is not None]
    return macro("reproduce", results, commands(results), singles)


def _worth(results: StudyResults) -> str:
    gains_, saved = gains_table(results), savings_table(results)
    parts = [] if gains_ is None or saved is None else [in_table("worth", gains_), in_table("saved", saved)]
    return "".join([*parts, in_table("costs", costs_table(results))])


def _noise(results: StudyResults) -> str | None:
    table = noise_table(results)
    return None if table is None else in_table("noise", table)


SECTIONS: tuple[Section, ...] = (
    Section("Stability over rate and decay", maps_section),
    Section("Published claims of stability", claims_section),
    Section("Configurations and final loss", _summary, by_arm=True),
    Section("Paired differences", _differences, by_arm=True),
    Section("What it is worth, and what it costs", _worth, by_arm=True),
    Section("How much is noise", _noise, by_arm=True),
    Section("Likelihood tasks", tasks_section, by_arm=True),
    Section("Learning curves", _curves, by_arm=True),
    Section("Gain from the first step on", _gains, by_arm=True),
    Section("Search", _search),
    Section("Spikes and attention logits", smoothness_section, by_arm=True),
    Section("Dynamics", dynamics_section, by_arm=True),
    Section("Looked into", _looked_into, by_arm=True),
    Section("Every run", _runs, by_arm=True),
    Section("What differed between the arms", _changed, by_arm=True),
    Section("Identical batches", lambda results: macro("batches", results)),
    Section("Where the numbers come from", _provenance),
    Section("How to reproduce", _reproduce),
)


def against_section(other: StudyResults, pairs: Sequence[Pairing]) -> Section:
    return Section(f"Against {other.name}", lambda _: macro("against", other, pairs))
