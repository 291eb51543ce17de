"""The summary of a study as a terminal table, as CSV and as LaTeX, and how its numbers are written everywhere."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from qurve.accounting import utilisation
from qurve.study.results import Arm, Run, StudyResults
from qurve.study.statistics import ROW_KEYS, overall_verdict, summary_rows

if TYPE_CHECKING:
    from rich.console import Group

NONE = "–"
AT_BASELINE = "At the baseline's best point"
PAPER_SCALE = "the paper, as printed: 124 M parameters, 60,000 steps, one seed; another scale"
SETTINGS = ("train.weight_decay", "train.lr", "train.min_lr")
"""That stand beside an arm's loss."""
CSV_KEYS = (*ROW_KEYS, "diverged", *(path.removeprefix("train.") for path in SETTINGS))


def signed(value: float | None, digits: int, unit: str = "") -> str:
    """`+0.94 %`, with a true minus sign; a dash where there is no number. What rounds to zero carries no sign."""
    if value is None:
        return NONE
    text = f"{value:+,.{digits}f}"
    if not text.strip("+-0.,"):
        text = text[1:]
    return text.replace("-", "−") + (f" {unit}" if unit else "")


def plain(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def chance(p: float | None) -> str:
    """A p value in five signs: `.0625`, `<1e-4`, `1`."""
    if p is None:
        return NONE
    return "<1e-4" if p < 1e-4 else f"{p:.4f}".removeprefix("0").rstrip("0").removesuffix(".")


def sign_flip(row: Mapping[str, Any]) -> str:
    """The sign-flip test's p in one of `summary_rows`, with the smallest that its seeds can reach: `.5 (≥ .25)`."""
    if row["p_signflip"] is None:
        return NONE
    return f"{chance(row['p_signflip'])} (≥ {chance(row['p_signflip_least'])})"


class Bounded(Protocol):
    """A number with the ends of its interval, or None for both."""

    @property
    def value(self) -> float: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...


def with_interval(found: Bounded, write: Callable[[float], str], unit: str = "") -> str:
    """`+2.40 % [+2.10, +2.70]`, or the number alone."""
    interval = "" if found.low is None or found.high is None else f" [{write(found.low)}, {write(found.high)}]"
    return write(found.value) + unit + interval


def rate(value: float | None) -> str:
    """A hyperparameter as people write it: 6e-4, 0.1."""
    if value is None:
        return NONE
    text = f"{value:.6g}" if value == 0 or 0.01 <= abs(value) < 1000 else f"{value:.5e}"
    return re.sub(r"\.?0*e([+-])0*(\d)", lambda m: "e" + m[1].replace("+", "") + m[2], text)


def loss_in_words(arm: Arm) -> str:
    """The arm's mean final loss, or what became of it: never blank, never the last value of a run that broke."""
    if arm.final_loss is not None:
        return plain(arm.final_loss, 4) + (f" ({arm.diverged} diverged)" if arm.diverged else "")
    return ", ".join(dict.fromkeys("not run" if run.status == "missing" else run.status for run in arm.unfinished))


def delta_parameters(arm: Arm, baseline: Arm) -> float:
    """Non-embedding parameters beyond the baseline's, in per cent."""
    return 100 * (arm.non_embedding - baseline.non_embedding) / baseline.non_embedding


def signed_parameters(arm: Arm, baseline: Arm) -> str:
    """The same in words."""
    return signed_change(delta_parameters(arm, baseline))


def signed_change(change: float) -> str:
    """`+12.5 %`; small changes keep the digits that tell them from none."""
    return signed(change, 1 if change == 0 or abs(change) >= 1 else 2 if abs(change) >= 0.1 else 3, "%")


def utilisation_in_words(arm: Arm, run: Run) -> str:
    """Share of its GPUs' stated peak that a run's matrix products are; `n/a` where no peak is known, as of CPUs."""
    gpu, precision, processes = (run.environment.get(key) for key in ("gpu", "precision", "processes"))
    if run.tokens_per_s is None or not isinstance(gpu, str) or not isinstance(processes, int) or processes < 1:
        return "n/a"
    share = utilisation(gpu, run.tokens_per_s * arm.flops_per_token / processes, str(precision))
    return "n/a" if share is None else f"{100 * share:.1f} %"


def terminal_table(results: StudyResults) -> Group:
    """What `rich` prints at the end of a comparison: one row per arm, then the verdict in words."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, title=Text(results.title), title_justify="left", padding=(0, 0, 0, 1))
    table.add_column("arm", overflow="fold")
    for name in (
        "seeds",
        "N.E.\nparams",
        f"{results.split} loss",
        "diff\n[95 %]",
        "p\nHolm\nflip",
        "ΔLL\nΔPPX",
        "tokens/s",
    ):
        table.add_column(name, justify="right", no_wrap=True)  # 80 columns must not cost a digit
    for arm, row in zip(results.arms, summary_rows(results), strict=True):
        if arm in results.matched[:1]:
            table.add_section()
            table.add_row(f"{AT_BASELINE}:")
        diff = signed(row["diff"], 4)
        if row["diff_low"] is not None:
            diff += f"\n[{signed(row['diff_low'], 4)},\n{signed(row['diff_high'], 4)}]"
        cells = (
            arm.label,
            f"{row['seeds_n']}/{len(results.seeds)}",
            f"{row['non_embedding']:,}",
            loss_in_words(arm).replace(" (", "\n("),
            diff,
            "\n".join(chance(row[key]) for key in ("p", "p_holm", "p_signflip")) if row["p"] is not None else NONE,
            "\n".join(signed(row[key], 2, "%") for key in ("dll_percent", "dppx_percent"))
            if row["diff"] is not None
            else NONE,
            plain(row["tokens_per_s"], 0),
        )
        table.add_row(*(Text(cell) for cell in cells))  # Text, not markup: a label may hold brackets
    matches = [Text(f"{arm.label}: {arm.match}.") for arm in results.arms if arm.match]
    return Group(table, *matches, Text(overall_verdict(results)))


def csv_table(results: StudyResults) -> str:
    """`summary_rows` as CSV, numbers in full, an empty cell where a number is not defined.

    An arm without a loss has what became of it in the loss's place, `diverged` counts its runs that did, and the last
    columns are its `SETTINGS`.
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_KEYS, lineterminator="\n")
    writer.writeheader()
    for arm, row in zip(results.arms, summary_rows(results), strict=True):
        if row["final_loss"] is None:
            row |= dict.fromkeys(("val_loss", "final_loss"), loss_in_words(arm))
        settings = {path.removeprefix("train."): arm.setting(path) for path in SETTINGS}
        writer.writerow({**row, "diverged": arm.diverged, **settings})
    return out.getvalue()


# --------------------------------------------------------------------------------------------------------------- LaTeX

_TEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "[": "{[}",  # after a line's \\ a bracket would be read as its argument
    "−": r"$-$",
    "–": "--",
    "Δ": r"$\Delta$",
}


def tex_escape(text: str) -> str:
    return "".join(_TEX.get(char, char) for char in text)


def tex_table(results: StudyResults) -> str:
    r"""Table 1's columns, seeds, differences with their intervals and p, for `\input` in a document that uses booktabs.

    Below an arm that is one of the paper's stand the paper's own figures.
    """
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{tabular}{lrrrrrrrrrr}",
        r"\toprule",
        r"Config & $\Delta$ N.E. params & $\lambda$ (WD) & $\eta_{\max}$ & $\eta_{\min}$ & Seeds"
        rf" & {results.split.title()} loss & Diff.\ {{[}}95\,\%{{]}} & $p$ (Holm) & $\Delta$ LL & $\Delta$ PPX \\",
        r"\midrule",
    ]
    for arm, row in zip(results.arms, summary_rows(results), strict=True):
        reference = arm.name == results.baseline.name
        if arm in results.matched[:1]:
            lines += [r"\midrule", rf"\multicolumn{{11}}{{l}}{{{tex_escape(AT_BASELINE)}}} \\"]
        cells: list[Any] = [
            arm.label,
            "ref." if reference else signed_parameters(arm, results.baseline),
            *(rate(arm.setting(path)) for path in SETTINGS),
            f"{row['seeds_n']}/{len(results.seeds)}",
            loss_in_words(arm),
            "ref." if reference else difference_in_words(row),
            "ref." if reference else chance(row["p_holm"]),
            "ref." if reference else signed(row["dll_percent"], 2, "%"),
            "ref." if reference else signed(row["dppx_percent"], 2, "%"),
        ]
        lines.append(_tex_row(tex_escape(cells[0]), cells[1:]))
        if arm.paper:
            printed = {key: arm.paper.get(key, NONE) for key in PRINTED}
            beside = [*(printed[key] for key in PRINTED[:4]), NONE, printed["val_loss"], NONE, NONE]
            lines.append(_tex_row(r"\quad in the paper", [*beside, printed["dll"], printed["dppx"]]))
    if any(arm.paper for arm in results.arms):
        lines += [
            r"\midrule",
            rf"\multicolumn{{11}}{{l}}{{{tex_escape(PAPER_SCALE[:1].upper() + PAPER_SCALE[1:])}.}} \\",
        ]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


PRINTED = ("delta_params", "weight_decay", "lr", "min_lr", "val_loss", "dll", "dppx")
"""What an arm may have of the paper's."""


def difference_in_words(row: Mapping[str, Any]) -> str:
    """`−0.0512 [−0.0600, −0.0424]`, or as much of it as there is."""
    ends = [signed(row[key], 4) for key in ("diff_low", "diff_high")]
    return signed(row["diff"], 4) + ("" if row["diff_low"] is None else f" [{', '.join(ends)}]")


def _tex_row(label: str, cells: Sequence[str]) -> str:
    return " & ".join([label, *(_tex_number(tex_escape(cell)) for cell in cells)]) + r" \\"


def _tex_number(text: str) -> str:
    """`6e-4` as a power of ten."""
    return re.sub(r"^([\d.]+)e(-?\d+)$", r"$\1\\cdot10^{\2}$", text)
