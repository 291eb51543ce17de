"""The report as Markdown, for a pull request: verdict, tables, doubts, and how to make it again.

The tables are the page's own: what it says in words and numbers is here as well, all but its figures and single runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from qurve.study import tables
from qurve.study.against import Pairing
from qurve.study.apart import apart_tables, search_table
from qurve.study.evaluated import evaluation_table, load_evaluation
from qurve.study.headline import alarms, headline, reservations
from qurve.study.holds import claims_tables, grids, map_table, rates_table, smoothness_table
from qurve.study.provenance import commands, provenance
from qurve.study.results import Arm, StudyResults
from qurve.study.settings import changed_settings
from qurve.study.statistics import comparisons, overall_verdict, scope, summary_rows, verdicts
from qurve.study.worth import Table, costs_table, gains_table, noise_table, savings_table

P_HEAD = ("p", "p Holm", "p sign-flip")


def markdown(results: StudyResults, other: StudyResults | None = None, pairs: Sequence[Pairing] = ()) -> str:
    """`report.md`; `pairs` are what `against` found between the study and the `other` one."""
    finished = sum(run.finished for run in results.runs)
    maps = _maps(results)
    lines = [
        f"## {escaped(results.title)}",
        "",
        *_top(results),
        f"{finished} of {len(results.runs)} runs finished. {results.split_in_words.capitalize()} loss in nats per "
        f"token, differences to {escaped(results.baseline.label)} paired by seed; negative is better.",
        *maps,
        "",
        *_folded("Arm by arm", _by_arm(results), bool(maps)),
    ]
    for table in _of_search(results):
        lines += ["", *in_words(table)]
    papers = [arm for arm in results.arms if arm.paper]
    if papers:
        printed = (
            f"{escaped(arm.label)} {escaped(arm.paper.get('val_loss', tables.NONE))}" for arm in papers if arm.paper
        )
        lines += ["", f"The paper, as printed, at another scale (not to be compared): {', '.join(printed)}."]
    if found := reservations(results):
        lines += ["", "### Before you believe it", "", *(f"- {escaped(doubt)}" for doubt in found)]
    if other is not None:
        head = ("arm", "n", "loss here", "loss there", "diff [95 %]", "p", "p Holm", "in words", "there → here")
        lines += ["", f"### Against {escaped(other.name)}", "", *_table(head, [_pair(pair) for pair in pairs])]
    origin = provenance(results)
    batches = "shown for every run" if results.batches.complete else "not shown for every run"
    lines += [
        "",
        "### How to reproduce",
        "",
        *block(commands(results)),
        "",
        f"- data: {', '.join(origin.data) or 'no run tells'}",
        f"- identical batches: {batches}{f'; order {origin.order[:16]}' if origin.order else ''}",
        f"- code: {escaped('; '.join(origin.code)) or 'no run tells'}",
        f"- environment: {', '.join(value[:16] for value in origin.environments) or 'no run has started'}",
    ]
    return "\n".join(lines) + "\n"


def _maps(results: StudyResults) -> list[str]:
    """Maps, sensitivities and claims of a study that has them."""
    maps = grids(results)
    if not maps:
        return []
    tables_ = [
        *(map_table(results, map_) for map_ in maps.values()),
        rates_table(results, maps),
        *claims_tables(results, maps),
    ]
    return [line for table in tables_ for line in ("", *in_words(table))]


def _by_arm(results: StudyResults) -> list[str]:
    lines = _arms(results)
    evaluation = load_evaluation(results)
    tasks = None if evaluation is None else evaluation_table(results, evaluation)
    found = (gains_table(results), savings_table(results), costs_table(results), noise_table(results), tasks)
    for table in (*found, smoothness_table(results), _changed(results)):
        lines += [] if table is None else ["", *in_words(table)]
    return lines


def _folded(title: str, lines: list[str], fold: bool) -> list[str]:
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>"] if fold else lines


def _of_search(results: StudyResults) -> list[Table]:
    """What the search chose, and each axis of it apart."""
    chosen = search_table(results)
    if results.search is None or chosen is None:
        return []
    return [chosen, *apart_tables(results.search, {arm.name: arm.label for arm in results.arms})]


def _changed(results: StudyResults) -> Table | None:
    """The settings in which the arms differ; the baseline's first, and of the others what is not the same."""
    changed = changed_settings(results)
    if not changed:
        return None
    rows = []
    for place, arm in enumerate(results.arms):
        base = arm.name == results.baseline.name
        rows.append([arm.label, *(v[place] if base or differs[place] else "same" for _, v, differs in changed)])
    notes = [f"Everything else is the same. {tables.NONE}: the arm has no such setting."]
    return Table("What differed between the arms", ["arm", *(path for path, _, _ in changed)], rows, notes)


def _arms(results: StudyResults) -> list[str]:
    """The table of the arms; those at the baseline's point follow in one of their own."""
    head = ["arm", "Δ N.E. params", "λ", "η max", "η min", "n", f"{results.split} loss", "diff [95 %]", *P_HEAD]
    head += ["ΔLL", "ΔPPX", "tokens/s"]
    rows = {arm.name: _cells(results, arm, row) for arm, row in zip(results.arms, summary_rows(results), strict=True)}
    lines = _table(head, [rows[arm.name] for arm in results.arms if arm.matched is None])
    if results.matched:
        matched = _table(head, [rows[arm.name] for arm in results.matched])
        lines += ["", f"{escaped(tables.AT_BASELINE)} (a family of tests of its own):", "", *matched]
    return lines


def in_words(table: Table) -> list[str]:
    """A table with its heading and its notes; without rows, the notes alone."""
    rows = [[escaped(cell) for cell in row] for row in table.rows]
    notes = [f"- {escaped(note)}" for note in table.notes]
    lines = [f"### {escaped(table.title)}", ""]
    lines += [*_table([escaped(cell) for cell in table.head], rows), ""] if rows else []
    return [*lines, *notes] if notes else lines[:-1]


def _top(results: StudyResults) -> list[str]:
    top, lines = headline(results), [f"> **{escaped(alarm)}**\n" for alarm in alarms(results)]
    if not results.others:
        return [*lines, escaped(overall_verdict(results)), ""]
    if top is not None:
        lines += [f"**{escaped(top.words)}**", ""]
        lines += [*(f"- {escaped(sentence)}" for sentence in top.more), ""] if top.more else []
    if top is not None and top.pair is not None and top.pair.diff is not None:
        number = _interval(top.pair.diff, top.pair.low, top.pair.high)
        lines += [f"**{escaped(number)}** nats per token, n = {top.pair.n}. {top.caveat}".rstrip(), ""]
    pairs = comparisons(results)
    return [*lines, escaped(" ".join([*verdicts(results, pairs), *scope(results, pairs)])), ""]


def _cells(results: StudyResults, arm: Arm, row: dict[str, object]) -> list[str]:
    reference = arm.name == results.baseline.name

    def gain(key: str) -> str:
        return "ref." if reference else tables.signed(_number(row[key]), 2, "%")

    return [
        escaped(arm.label),
        "ref." if reference else tables.signed_parameters(arm, results.baseline),
        *(tables.rate(arm.setting(path)) for path in tables.SETTINGS),
        f"{row['seeds_n']}/{len(results.seeds)}",
        tables.loss_in_words(arm),
        "ref." if reference else _interval(*(_number(row[key]) for key in ("diff", "diff_low", "diff_high"))),
        *("ref." if reference else tables.chance(_number(row[key])) for key in ("p", "p_holm")),
        "ref." if reference else tables.sign_flip(row),
        gain("dll_percent"),
        gain("dppx_percent"),
        tables.plain(arm.tokens_per_s, 0),
    ]


def _pair(pair: Pairing) -> list[str]:
    return [
        escaped(pair.label),
        str(len(pair.seeds)),
        tables.plain(pair.here, 4),
        tables.plain(pair.there, 4),
        _interval(pair.diff, pair.low, pair.high),
        *(tables.chance(p) for p in (pair.p, pair.p_holm)),
        escaped(pair.in_words),
        escaped("; ".join(f"{path} {a} → {b}" for path, (a, b) in pair.changed_in_words.items()) or "no setting"),
    ]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _interval(diff: float | None, low: float | None, high: float | None) -> str:
    return tables.signed(diff, 4) + ("" if low is None else f" [{tables.signed(low, 4)}, {tables.signed(high, 4)}]")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in head[1:])]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def block(lines: Sequence[str]) -> list[str]:
    """A code block whose fence no line of it can close."""
    longest = max((len(ticks) for line in lines for ticks in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}sh", *lines, fence]


def escaped(text: str) -> str:
    """Text as it is: no mark-up, no mention of anybody, no end of a table's cell."""
    return re.sub(r"([\\`*_{}\[\]<>|#~@])", r"\\\1", text)
