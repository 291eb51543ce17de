"""What a ladder says, in sentences and tables, and as the files beside its page: Markdown, CSV, LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from qurve.study.effects import STEADY, Unknown
from qurve.study.ladder_results import (
    LadderResults,
    RungArm,
    RungResults,
    Series,
    doubts,
    equivalent_gain,
    family,
    fit,
    gain,
    gain_trend,
    loss,
    rung_tests,
    series,
    undecided,
)
from qurve.study.markdown import block, escaped, in_words
from qurve.study.power import LEVEL
from qurve.study.provenance import made_by
from qurve.study.scaling import PUBLISHED, Estimate, Fit, hoffmann_exponents
from qurve.study.tables import NONE, plain, signed, signed_change, tex_escape, with_interval
from qurve.study.worth import Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

COLUMNS = (
    "rung",
    "arm",
    "non_embedding",
    "tokens",
    "seeds_n",
    "loss",
    "dll_percent",
    "dll_low",
    "dll_high",
    "flops_per_token",
    "tokens_per_s",
    "peak_memory_bytes",
)
"""Of `table.csv`."""


def table(results: LadderResults) -> RichTable:
    """What `rich` prints: a row for each rung, each arm's mean loss with its gain over the baseline."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    found = Table(box=box.SIMPLE_HEAD, title=Text(results.title), title_justify="left", padding=(0, 0, 0, 1))
    found.add_column("rung", overflow="fold")
    found.add_column("N.E.\nparams", justify="right", no_wrap=True)
    found.add_column("tokens", justify="right", no_wrap=True)
    for label in results.arms.values():
        found.add_column(label, justify="right")
    for rung in results.rungs:
        base = rung.arms[results.baseline]
        cells = [rung.name, f"{base.non_embedding:,}", f"{rung.tokens:,}"]
        cells += [_cell(results, rung, arm) for arm in results.arms]
        found.add_row(*(Text(cell) for cell in cells))
    return found


def _cell(results: LadderResults, rung: RungResults, arm: str) -> str:
    if arm not in rung.arms or not rung.arms[arm].losses:
        return NONE
    losses = rung.arms[arm].losses
    words = plain(sum(losses.values()) / len(losses), 4)
    return words if arm == results.baseline else f"{words}\n{percent(gain(results, rung, arm))}"


def lines(results: LadderResults) -> list[str]:
    """What the ladder says beyond its table, in sentences; what cannot be said, with the reason."""
    said = []
    for one in series(results):
        for arm, label in results.arms.items():
            if arm != results.baseline:
                said.append(f"{label}, gain along {one.along} ({one.fixed}): {_slope(results, one, arm)}.")
        for arm, label in results.arms.items():
            said.append(f"{label}, loss along {one.along} ({one.fixed}): {_exponent(fit(one, arm), one.along)}.")
        said.append(_published(results, one))
    if said:
        said.append(JUDGED)
    said += _told(results)
    if results.not_begun:
        said.append(f"Not begun: {', '.join(results.not_begun)}.")
    for rung in results.rungs:
        for arm, there in rung.arms.items():
            if arm != results.baseline and isinstance(found := gain(results, rung, arm), Unknown):
                said.append(f"Rung {rung.name}, {there.label}: no gain ({found.why}).")
        if rung.epochs > 1:
            said.append(f"Rung {rung.name} went through the training data {rung.epochs:.1f} times.")
        for there in rung.arms.values():
            states = "; ".join(there.unfinished)
            if states and f"{there.label}: {states}." not in rung.doubts:  # which are said beside these
                said.append(f"Rung {rung.name}, {there.label}: {states}.")
    return said


def _told(results: LadderResults) -> list[str]:
    """The gains and losses at single rungs that are told from noise, and of how many."""
    tests = rung_tests(results)
    told = [test for test in tests if test.p_holm <= LEVEL]
    said = [
        f"Rung {test.rung}, {results.arms[test.arm]}: {'lower' if test.diff < 0 else 'higher'} loss than the baseline "
        f"by {abs(test.diff):.4f} nats per token (its own 95 % interval {test.low:+.4f} to {test.high:+.4f}), "
        f"{p_in_words(test.p_holm)} after Holm for every arm at every rung."
        for test in told
    ]
    if tests:
        said.append(f"Of {len(tests)} differences at single rungs, {len(told) or 'none'} can be told from noise.")
    return said


def percent(found: Estimate | Unknown) -> str:
    """`+2.40 % [+2.10, +2.70]`, or a dash."""
    return NONE if isinstance(found, Unknown) else with_interval(found, lambda x: signed(x, 2), " %")


JUDGED = (
    "A gain is called one that grows or shrinks by the t test of its slope, corrected by Holm for the arms of its "
    "series; the interval beside it is the slope's own, and not corrected."
)


def _slope(results: LadderResults, one: Series, arm: str) -> str:
    found, (arms, before, looks) = gain_trend(results, one, arm), family(results, one)
    if isinstance(found, Unknown):
        return f"no slope ({found.why})"
    size = with_interval(found.per_doubling, lambda x: signed(x, 3), " percentage points per doubling")
    if (why := undecided(results, one, arm)) is not None:
        return f"{why}; {size}"
    assert found.p_holm is not None  # three rungs leave a degree of freedom
    p = p_in_words(found.p_holm)
    p += f" after Holm for {arms + before} arms" if arms + before > 1 else ""
    p += f", {before} of them compared with it before" if before else ""
    return f"{found.outcome}: {size}, {p}" + (f", times {looks} declared looks" if looks > 1 else "")


def p_in_words(p: float) -> str:
    return "p < 0.0001" if p < 1e-4 else "p = 1" if p == 1 else f"p = {p:.4f}"


def _exponent(found: Fit | Unknown, along: str) -> str:
    if isinstance(found, Unknown):
        return f"no exponent ({found.why})"
    form = found.in_words() if along == "size" else found.in_words("D", "lengths")
    return f"exponent {with_interval(found.alpha, lambda x: plain(x, 3))}; {form}"


def _published(results: LadderResults, one: Series) -> str:
    kaplan, _ = PUBLISHED
    largest = max(one.rungs, key=lambda rung: one.scale[rung.name])
    theirs = hoffmann_exponents(largest.arms[results.baseline].total, largest.tokens)
    if one.along == "length":
        return (
            f"Published over tokens: {kaplan.numbers['alpha_D']} ({kaplan.name}, parameters not limiting), "
            f"{theirs['D']:.3f} at the longest by the fit of Hoffmann et al. 2022; both of other data and tokens."
        )
    return (
        f"Published over parameters: {kaplan.numbers['alpha_N']} ({kaplan.name}, tokens not limiting), "
        f"{theirs['N']:.3f} with tokens fixed and {theirs['N with D']:.3f} with tokens growing alike, as here, at the "
        "largest by the fit of Hoffmann et al. 2022; both of other data and tokens."
    )


# ------------------------------------------------------------------------------------------------------------- tables


def rungs_table(results: LadderResults) -> Table:
    """Losses, gains and what they are worth, rung by rung; every dash has its reason below."""
    reasons: dict[str, dict[str, None]] = {}
    rows = [[rung.name, arm.label, *_rung(results, rung, arm, reasons)] for rung, arm in _every(results)]
    head = ["rung", "arm", "N.E. parameters", "tokens", "n", "loss", "ΔLL", "worth in parameters", "worth in FLOPs"]
    notes = [
        "Loss in nats per token: mean over the finished seeds (n). ΔLL: relative gain in log-loss over the baseline of "
        "the same rung, over shared seeds, with its 95 % interval. Worth: how much larger the baseline would have to "
        "be for the same loss, by the rung of the next size; in FLOPs, its longer training is counted too."
    ]
    unknown = [f"{NONE} {'; '.join(where)}: {why}." for why, where in reasons.items()]
    return Table("Losses and gains", head, rows, [*notes, *unknown])


def _every(results: LadderResults) -> Iterable[tuple[RungResults, RungArm]]:
    return ((rung, rung.arms[name]) for rung in results.rungs for name in results.arms if name in rung.arms)


def _rung(results: LadderResults, rung: RungResults, arm: RungArm, reasons: dict[str, dict[str, None]]) -> list[str]:
    def said(found: object, words: str, what: str) -> str:
        if isinstance(found, Unknown):
            reasons.setdefault(found.why, {})[f"{rung.name}, {arm.label}, {what}"] = None
            return NONE
        return words

    mean = loss(rung, arm.name)
    numbers = [f"{arm.non_embedding:,}", f"{rung.tokens:,}", str(len(arm.losses))]
    numbers.append(said(mean, "" if isinstance(mean, Unknown) else f"{mean.value:.4f}", "loss"))
    if arm.name == results.baseline:
        return [*numbers, "ref.", "ref.", "ref."]
    found = gain(results, rung, arm.name)
    numbers.append(said(found, percent(found), "ΔLL"))
    for quantity in ("params", "flops"):
        worth = equivalent_gain(results, rung, arm.name, quantity)
        words = "" if isinstance(worth, Unknown) else with_interval(worth.percent, lambda x: signed(x, 1), " %")
        numbers.append(said(worth, words, "worth"))
    return numbers


def costs_table(results: LadderResults) -> Table:
    """What every arm takes at every rung, beside its gain there."""
    rows, busy = [], []
    for rung in results.rungs:
        base = rung.arms[results.baseline]
        steady = rung.speeds_apart <= STEADY
        if not steady:
            busy.append(f"{rung.name} ({rung.speeds_apart:.1f} times)")
        for name in results.arms:
            if (arm := rung.arms.get(name)) is not None:
                memory = arm.peak_memory_bytes
                mebibytes = NONE if memory is None else f"{memory / 2**20:,.0f} MiB"
                speed = base.tokens_per_s if steady else None
                rows.append(
                    [
                        rung.name,
                        arm.label,
                        "ref." if arm is base else percent(gain(results, rung, name)),
                        _beside(
                            arm is base, arm.flops_per_token, base.flops_per_token, f"{arm.flops_per_token / 1e6:,.2f}"
                        ),
                        _beside(arm is base, arm.tokens_per_s, speed, plain(arm.tokens_per_s, 0)),
                        _beside(arm is base, memory, base.peak_memory_bytes, mebibytes),
                    ]
                )
    notes = [
        "In brackets: against the baseline of the same rung. Tokens/s: median over the seeds, training alone; peak "
        "memory: the most that one process held. Both are of the machine that the runs were made on, busy or not; "
        f"{NONE} where the runs do not tell."
    ]
    if busy:
        notes.append(f"One arm's seeds ran far apart in speed at {', '.join(busy)}: no speed is compared there.")
    return Table("What it costs", ["rung", "arm", "ΔLL", "MFLOPs per token", "tokens/s", "peak memory"], rows, notes)


def _beside(is_base: bool, value: float | None, reference: float | None, text: str) -> str:
    if is_base or value is None or not reference:
        return text
    return f"{text} ({signed_change(100 * (value / reference - 1))})"


# --------------------------------------------------------------------------------------------------------------- files


def ladder_commands(results: LadderResults) -> list[str]:
    """What makes the ladder again, in a clone of the code."""
    commits = {rung.machine.get("commit") for rung in results.rungs}
    return made_by(commits, results.definition, results.command, "ladder")


def markdown(results: LadderResults) -> str:
    """`report.md` of a ladder, for a pull request."""
    said = lines(results)
    first = [words for words in said if ", gain along " in words or words == JUDGED]
    text = [f"## {escaped(results.title)}", "", *(f"- {escaped(words)}" for words in first)]
    for table in (rungs_table(results), costs_table(results)):
        text += ["", *in_words(table)]
    if found := doubts(results):
        text += ["", "### Before you believe it", "", *(f"- {escaped(doubt)}" for doubt in found)]
    text += ["", "### What the rungs say together", ""]
    text += [f"- {escaped(words)}" for words in said if words not in first]
    text += [
        "",
        "### How to reproduce",
        "",
        *block(ladder_commands(results)),
        "",
        f"- data: {results.data_fingerprint}",
    ]
    return "\n".join(text) + "\n"


def csv_table(results: LadderResults) -> str:
    """A row for each arm of each rung, numbers in full, an empty cell where a number is not defined."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for rung, arm in _every(results):
        mean, found = loss(rung, arm.name), gain(results, rung, arm.name)
        dll = None if isinstance(found, Unknown) or arm.name == results.baseline else found
        writer.writerow(
            {
                "rung": rung.name,
                "arm": arm.name,
                "tokens": rung.tokens,
                "seeds_n": len(arm.losses),
                "loss": None if isinstance(mean, Unknown) else mean.value,
                **{f"dll_{end}": dll and getattr(dll, end) for end in ("low", "high")},
                "dll_percent": dll and dll.value,
                **{
                    key: getattr(arm, key)
                    for key in ("non_embedding", "flops_per_token", "tokens_per_s", "peak_memory_bytes")
                },
            }
        )
    return out.getvalue()


def tex_table(results: LadderResults) -> str:
    r"""The losses and gains, for `\input` in a document that uses booktabs."""
    table = rungs_table(results)
    rows = [table.head, *table.rows]
    written = [" & ".join(tex_escape(cell) for cell in row) + r" \\" for row in rows]
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            rf"\begin{{tabular}}{{ll{'r' * (len(table.head) - 2)}}}",
            r"\toprule",
            written[0],
            r"\midrule",
            *written[1:],
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )
