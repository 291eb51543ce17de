"""What the page of results says of each experiment's evidence: tables and sentences, and what those are made of."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from qurve.study.apart import IN_WORDS, apart_tables
from qurve.study.ladder_results import gain as ladder_gain
from qurve.study.ladder_results import load_ladder
from qurve.study.ladder_tables import costs_table, lines, percent
from qurve.study.searched import read_evidence
from qurve.study.tables import AT_BASELINE, sign_flip
from qurve.study.worth import Table

NONE = "–"

Evidence = dict[str, Any]


def wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def read(file: Path) -> Evidence:
    found: Evidence = json.loads(file.read_text(encoding="utf-8"))
    return found


# ---------------------------------------------------------------------------------------------- what tables are made of


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figure(value: float | None, form: str = ".4f") -> str:
    return NONE if value is None else f"{value:{form}}"


def interval(value: float | None, low: float | None, high: float | None, form: str = "+.4f") -> str:
    """`-0.0120 [-0.0150, -0.0090]`, or as much of it as there is."""
    between = "" if low is None or high is None else f" [{low:{form}}, {high:{form}}]"
    return figure(value, form) + between


def probability(p: float | None) -> str:
    return "< 0.0001" if p is not None and p < 1e-4 else figure(p)


def compared(evidence: Evidence) -> Iterator[str]:
    """A study's rows, each with its verdict: its own arms, then those at the baseline's best point, as the statistics
    take them for two families of tests."""
    own, matched = families(evidence, evidence["rows"])
    yield rows_in_table(evidence, own)
    if matched:
        yield f"{AT_BASELINE} (a family of tests of its own):"
        yield rows_in_table(evidence, matched)
    yield from unfinished(evidence)


def families(evidence: Evidence, rows: list[Evidence]) -> tuple[list[Evidence], list[Evidence]]:
    """The rows of the study's own arms, and those of the same architectures at the baseline's best point."""
    end = f"@{evidence['baseline']}"
    return [r for r in rows if not r["arm"].endswith(end)], [r for r in rows if r["arm"].endswith(end)]


def rows_in_table(evidence: Evidence, rows: list[Evidence]) -> str:
    labels = {arm["arm"]: arm["label"] for arm in evidence["arms"]}
    split = evidence.get("split", "val")
    return table(
        ["arm", "seeds", f"{split} loss", "difference", "log-loss", "p", "p (Holm)", "p (sign-flip)", "verdict"],
        [
            [
                labels.get(row["arm"], row["arm"]),
                str(row["seeds_n"]),
                figure(row["final_loss"] if "final_loss" in row else row["val_loss"]),
                interval(row["diff"], row["diff_low"], row["diff_high"]),
                NONE if row["dll_percent"] is None else f"{row['dll_percent']:+.2f} %",
                probability(row["p"]),
                probability(row["p_holm"]),
                sign_flip(row),
                row["verdict"],
            ]
            for row in rows
        ],
    )


def beside(evidence: Evidence) -> Iterator[str]:
    """The report's tables of useful units and of costs, where the evidence has them."""
    for found in evidence.get("beside", ()):
        yield from in_words(Table(**found))


def in_words(found: Table) -> Iterator[str]:
    yield f"**{found.title}.** {' '.join(found.notes)}"
    if found.rows:
        yield table(found.head, found.rows)


def made_again(file: Path) -> Iterator[str]:
    """Of evidence from a tree with changes: what the runs that a clean one made again, hash by hash, came to."""
    evidence = read(file)
    if not any("+changes" in code for code in evidence.get("origin", {}).get("code", ())):
        return
    again: dict[str, list[bool]] = {}
    for other in sorted(file.parent.glob("*.json")):
        clean = read(other)
        code = clean["origin"]["code"] if isinstance(clean.get("origin"), dict) else ["+changes"]
        if any("+changes" in one for one in code) or "arms" not in clean:
            continue
        losses = _by_hash(clean)
        for sha, loss in _by_hash(evidence).items():
            if sha in losses:
                again.setdefault(other.name, []).append(losses[sha] == loss)
    for name, equal in again.items():
        found = "all have the same validation loss to the last digit" if all(equal) else f"{equal.count(False)} differ"
        yield f"{len(equal)} of its runs were made again from a tree without changes (`results/{name}`): {found}."


def _by_hash(evidence: Evidence) -> dict[str, Any]:
    arms = {arm["arm"]: arm["val_loss"] for arm in evidence.get("arms", ())}
    return {
        sha: arms[arm].get(seed)
        for arm, hashes in evidence["origin"]["hashes"].items()
        for seed, sha in hashes.items()
        if arm in arms
    }


def doubted(evidence: Evidence) -> Iterator[str]:
    """What the report says before one believes it."""
    if found := evidence.get("doubts", ()):
        yield "**Before you believe it.**\n\n" + "\n".join(f"- {doubt}" for doubt in found)


def unfinished(evidence: Evidence) -> Iterator[str]:
    broken = [f"{arm['label']}: {'; '.join(arm['unfinished'])}" for arm in evidence["arms"] if arm["unfinished"]]
    if broken:
        yield f"Not finished: {'. '.join(broken)}."


# --------------------------------------------------------------------------------------------------------- the sections


def noise_floor(file: Path) -> Iterator[str]:
    evidence = read(file)
    found = evidence["noise"]
    yield "Standard deviation over the seeds, nats per token, with its 95 % interval; and as a share of the loss."
    yield table(
        ["what varies", "seeds", "deviation", "of the loss"],
        [
            [
                what,
                str(spread["n"]),
                interval(spread["value"], spread["low"], spread["high"], ".4f"),
                f"{100 * spread['value'] / found['base_loss']:.2f} %",
            ]
            for what, spread in (
                ("the baseline's losses", found["baseline"]),
                ("differences, A/A less baseline", found["differences"]),
            )
        ],
    )
    yield wrapped(
        f"The two arms' losses have the correlation {figure(found['correlation'], '.2f')} over the seeds: that is what "
        "the same batches alone take off the noise."
    )
    yield from compared(evidence)
    yield f"What it takes to see an effect of one arm with {100 * found['power']:.0f} % power, by this noise:"
    yield table(
        ["effect", "nats per token", "seeds", "at the ends of the deviation's interval"],
        [
            [
                f"{line['effect_percent']:g} %",
                f"{line['effect_nats']:.4f}",
                seeds_in_words(line["seeds"]["value"]),
                f"{seeds_in_words(line['seeds']['low'])} to {seeds_in_words(line['seeds']['high'])}",
            ]
            for line in found["seeds_needed"]
        ],
    )
    if found["detectable_percent"] is not None:
        yield f"{found['differences']['n']} seeds see {found['detectable_percent']:.2f} % and more."


def seeds_in_words(seeds: int | None) -> str:
    return "more than anybody has" if seeds is None else f"{seeds:,}"


def fair_search(file: Path) -> Iterator[str]:
    evidence = read(file)
    yield from searched(evidence)
    labels = {arm["arm"]: arm["label"] for arm in evidence["arms"]}
    for found in apart_tables(read_evidence(evidence["search"]), labels):
        yield f"{found.title}. {' '.join(found.notes)}"
        yield table(found.head, found.rows)
    yield from compared(evidence)


def at_the_peak(file: Path) -> Iterator[str]:
    yield from compared(read(file))


def searched(evidence: Evidence) -> Iterator[str]:
    """Where each arm was tried, and what was chosen for it."""
    search = read_evidence(evidence["search"])
    seeds = ", ".join(map(str, search.seeds))
    yield f"Chosen on validation, by {search.sampler} over {', '.join(search.axes)}, with seeds {seeds}:"
    yield table(
        ["arm", "points tried", "point chosen", "validation loss there", "at an open edge of its grid"],
        [
            [
                arm,
                str(len(search.points(arm))),
                ", ".join(f"{path} {value}" for path, value in chosen.point or ()) or "none trains",
                figure(chosen.val_loss),
                ", ".join(axis for axis, *_ in search.edges(arm)) or "no",
            ]
            for arm, chosen in search.chosen.items()
        ],
    )


def at_open_edges(evidence: Evidence) -> Iterator[str]:
    """Which arms chose a point at an open edge of what they were offered, if any did."""
    search = evidence.get("search")
    found = read_evidence(search) if search else None
    labels = {arm["arm"]: arm["label"] for arm in evidence["arms"]} if found else {}
    edges = {label: found.edges(arm) for arm, label in labels.items() if found and arm in found.chosen}
    said = [
        f"{label} ({', '.join(f'{IN_WORDS.get(axis, axis)} {value:g}' for axis, value, *_ in at)})"
        for label, at in edges.items()
        if at
    ]
    if said:
        are = "arm chose a point" if len(said) == 1 else "arms chose points"
        yield (
            f"{len(said)} {are} at an open edge of the grid, which was extended no further: {', '.join(said)}. Whether "
            "a better point lies beyond it, and what would have come of that, is not known."
        )


def table1(file: Path) -> Iterator[str]:
    evidence = read(file)

    def printed(line: Evidence, key: str) -> str:
        return (line["printed"] or {}).get(key, NONE)

    yield table(
        ["row", "rates here", "printed loss", "printed gain", "loss here", "gain here", "difference here", "p (Holm)"],
        [
            [
                line["label"],
                f"{ours['lr']:g} to {ours['min_lr']:g}, decay {ours['weight_decay']:g}",
                printed(line, "val_loss"),
                printed(line, "dll"),
                figure(ours["loss"]),
                NONE if ours["dll_percent"] is None else f"{ours['dll_percent']:+.2f} %",
                interval(ours["diff"], ours["diff_low"], ours["diff_high"]),
                probability(ours["p_holm"]),
            ]
            for line in evidence["table"]
            for ours in [line["ours"]]
        ],
    )
    yield from verdicts(evidence)


def verdicts(evidence: Evidence) -> Iterator[str]:
    labels = {arm["arm"]: arm["label"] for arm in evidence["arms"]}
    said = [f"{labels[r['arm']]}: {r['verdict']}" for r in evidence["rows"] if r["arm"] != evidence["baseline"]]
    yield "\n".join(f"- {line}." for line in said)
    yield from unfinished(evidence)


SHOWN = 8
"""Steps of a curve in the page; the evidence has all."""


def figure2(file: Path) -> Iterator[str]:
    evidence = read(file)
    curves = evidence["curves"].values()
    steps = sorted({point["step"] for curve in curves for point in curve["gain_percent"]})
    shown = sorted({steps[round(i * (len(steps) - 1) / (SHOWN - 1))] for i in range(SHOWN)}) if steps else []
    yield (
        "Gain in log-loss over the baseline at the same step, per cent: mean over the seeds (n), and from the smallest "
        "to the largest of them."
    )
    yield table(
        ["configuration", "parameters", "n", *(f"step {step:,}" for step in shown)],
        [
            [
                curve["label"],
                f"{curve['non_embedding']:,}",
                str(curve["seeds"]),
                *(spread({p["step"]: p for p in curve["gain_percent"]}.get(step), curve["seeds"]) for step in shown),
            ]
            for curve in curves
        ],
    )
    yield "At the end:"
    yield from compared(evidence)
    yield "Not published, and so not in the plan for the paper's scale:\n\n" + "\n".join(
        f"- {line}" for line in evidence["unknown"]
    )


def spread(point: Evidence | None, seeds: int) -> str:
    """`+1.20 (+1.00 to +1.40)`; of one seed the number alone."""
    if point is None or seeds < 2:
        return figure(point and point["mean"], "+.2f")
    return f"{point['mean']:+.2f} ({point['smallest']:+.2f} to {point['largest']:+.2f})"


def stability(file: Path) -> Iterator[str]:
    evidence = read(file)
    tried = sorted({cell["lr"] for found in evidence["maps"] for cell in found["cells"]})
    yield f"Tried for each: peak rates {', '.join(f'{rate:g}' for rate in tried)}. Nothing is known below the lowest."
    yield table(
        [
            "arm",
            "decay",
            "stable up to",
            "stable beyond a gap",
            "without divergence up to",
            "sensitivity to the rate",
            "largest attention logit",
            "spikes",
        ],
        [
            [
                found["arm"],
                f"{line['weight_decay']:g}",
                up_to(line["stable_up_to_lr"], line["stable_to_largest_tried"]),
                ", ".join(f"{lr:g}" for lr in line["stable_beyond_lr"]) or NONE,
                up_to(line["trained_up_to_lr"], line["trained_to_largest_tried"]),
                figure(line["sensitivity"], ".3f"),
                figure(max((c["max_logit"] for c in cells if c["max_logit"] is not None), default=None), ".1f"),
                str(sum(cell["spikes"] for cell in cells if cell["spikes"] is not None)),
            ]
            for found in evidence["maps"]
            for line in found["by_decay"]
            for cells in [[c for c in found["cells"] if c["weight_decay"] == line["weight_decay"]]]
        ],
    )
    yield wrapped(
        "Stable up to: every rate tried up to this one is stable. Without divergence up to: every one finished lower "
        "than it started, on a plateau or not. Beyond a gap: stable although a lower rate is not"
        + (", by one seed a point." if len(evidence["seeds"]) == 1 else ".")
        + " The logit is the largest at any rate."
    )
    spreads = [
        (found["arm"], [line["sensitivity"] for line in found["by_decay"] if line["sensitivity"] is not None])
        for found in evidence["maps"]
    ]
    yield wrapped(
        "Sensitivity to the rate over the decays, nats per token: "
        + "; ".join(f"{arm} {min(of):.2f} to {max(of):.2f}" for arm, of in spreads if of)
        + ". The lower, the less a rate beyond the best one costs."
    )
    inferences = [claim for claim in evidence["claims"] if claim["standing"] == "our inference"]
    yield "What was published, and what is seen here:"
    yield claims_in_table([claim for claim in evidence["claims"] if claim not in inferences])
    yield wrapped(
        "What we infer from it, and what is seen here. Nobody published these: whatever is seen of them says nothing "
        "of the paper."
    )
    yield claims_in_table(inferences)
    yield wrapped(evidence["note"])


def up_to(rate: float | None, is_largest: bool) -> str:
    return NONE if rate is None else f"{rate:g}{' (the largest tried)' if is_largest else ''}"


def claims_in_table(claims: list[Evidence]) -> str:
    return table(
        ["point", "claim", "where", "at rate", "seen", "why"],
        [
            [
                f"{claim['arm']}, {claim['multiple']:.3g} x the baseline's rate, decay {claim['weight_decay']:g}",
                f"{claim['says_in_words']}: {claim['text']}",
                claim["source"],
                f"{claim['judged_at']:g}",
                f"**{claim['verdict']}**" + (" (the sources do not agree)" if claim["standing"] == "disputed" else ""),
                claim["why"],
            ]
            for claim in claims
        ],
    )


def ablations(file: Path) -> Iterator[str]:
    evidence = read(file)
    yield from searched(evidence)
    yield "Against the linear query:"
    yield from compared(evidence)
    yield "Against the paper's layer:"
    yield rows_in_table(evidence, families(evidence, evidence["against_the_layer"])[0])


def context(file: Path) -> Iterator[str]:
    evidence = read(file)
    labels = {arm["arm"]: arm["label"] for arm in evidence["arms"]}
    yield table(
        ["gain of", "from", "to", "difference", "log-loss", "p", "p (Holm)", "verdict"],
        [
            [
                gain["of"],
                labels[gain["from"]],
                labels[gain["to"]],
                interval(gain["diff"], gain["diff_low"], gain["diff_high"]),
                NONE if gain["dll_percent"] is None else f"{gain['dll_percent']:+.2f} %",
                probability(gain["p"]),
                probability(gain["p_holm"]),
                gain["verdict"],
            ]
            for gain in evidence["gains"]
        ],
    )
    yield "Every arm against the first, as the study's own report has it: another family of tests than the pairs above."
    yield from compared(evidence)
    yard = evidence["yardstick"]
    yield f"The paper's yardstick is {yard['dll_percent']} %: {yard['what']} ({yard['source']})."


def ladder(file: Path) -> Iterator[str]:
    found = load_ladder(file)
    others = [arm for arm in found.arms if arm != found.baseline]
    yield table(
        ["rung", "parameters", "tokens", "seeds", "baseline's loss", *(f"gain, {found.arms[arm]}" for arm in others)],
        [
            [
                rung.name,
                f"{base.non_embedding:,}",
                f"{rung.tokens:,}",
                str(len(base.losses)),
                figure(sum(base.losses.values()) / len(base.losses) if base.losses else None),
                *(percent(ladder_gain(found, rung, arm)) for arm in others),
            ]
            for rung in found.rungs
            for base in [rung.arms[found.baseline]]
        ],
    )
    yield "\n".join(f"- {line}" for line in lines(found))
    yield from in_words(costs_table(found))


def quarter_hour(file: Path) -> Iterator[str]:
    evidence = read(file)
    if evidence["rehearsal"]:
        raise ValueError("a rehearsal on a CPU is no evidence of a GPU: remove it from results/")
    found, sizes = evidence["summary"], evidence["non_embedding"]
    seeds = found["seeds"]
    yield (
        f"{len(evidence['runs'])} runs of {evidence['steps']:,} steps of {evidence['tokens_per_step']:,} tokens; rates "
        f"{', '.join(f'{rate:g}' for rate in evidence['rates'])} with seed {evidence['search_seed']}, then seeds "
        f"{', '.join(map(str, seeds)) or 'none that every arm was trained with'} at each arm's best."
    )
    yield table(
        ["arm", "parameters", "rate", "validation loss", "test loss", "difference on test", "p (Holm)"],
        [
            [
                arm,
                f"{sizes[arm]:,}",
                f"{found['chosen'][arm]:g}{' (edge)' if arm in found['edges'] else ''}",
                figure(of["val"]),
                figure(of["test"]),
                NONE if arm == "baseline" else interval(of["diff"], of["low"], of["high"]),
                probability(of.get("p_holm")),
            ]
            for arm, of in found["arms"].items()
        ],
    )
    if found["edges"]:
        yield wrapped(
            f"Best at the edge of the rates tried, so that a better one may lie outside: {', '.join(found['edges'])}."
        )
    if found["diverged"]:
        yield wrapped(
            f"Diverged at the chosen rate: {'; '.join(found['diverged'])}. What is left of such an arm is of the seeds "
            "that it survived, and it has no p."
        )
    lost = [arm for arm, rate in found["chosen"].items() if rate is None]
    if lost:
        yield f"Without a rate at which it trains: {', '.join(lost)}."
