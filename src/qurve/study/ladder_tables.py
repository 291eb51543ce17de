"""What a ladder says, as tables in words, and as the files beside its page: Markdown, CSV, LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from qurve.study.effects import STEADY, Unknown
from qurve.study.ladder_results import (
    JUDGED,
    LadderResults,
    RungArm,
    RungResults,
    equivalent_gain,
    gain,
    lines,
    loss,
    percent,
)
from qurve.study.markdown import block, escaped, in_words
from qurve.study.tables import NONE, plain, signed, signed_change, tex_escape, with_interval
from qurve.study.worth import Table

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


def markdown(results: LadderResults) -> str:
    """`report.md` of a ladder, for a pull request."""
    said = lines(results)
    first = [words for words in said if ", gain along " in words or words == JUDGED]
    text = [f"## {escaped(results.title)}", "", *(f"- {escaped(words)}" for words in first)]
    for table in (rungs_table(results), costs_table(results)):
        text += ["", *in_words(table)]
    text += ["", "### What the rungs say together", ""]
    text += [f"- {escaped(words)}" for words in said if words not in first]
    text += ["", "### How to reproduce", "", *block([results.command]), "", f"- data: {results.data_fingerprint}"]
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
