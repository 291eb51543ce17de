"""What `results/theory.json` says, as the passage of `docs/theory.md` that `tools/passages.py` writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any

LAYER = "res-gelu"
Tree = dict[str, Any]


def passage(found: Tree) -> str:
    """Tables and sentences, figures alone: what to make of them is not for a generator."""
    labels = {arm["arm"]: arm["label"] for arm in found["arms"]}
    seeds = ", ".join(map(str, found["seeds"]))
    parts = [
        f"`results/theory.json`, by `experiments/theory.py`: {found['scale']}; seeds {seeds}. Figures are means over "
        "them. At this scale alone: nothing here is about larger models.",
        *_redundancy(found, labels),
        *_symmetry(found, labels),
        *_geometry(found),
        *_dynamics(found),
        *_mechanism(found, labels),
    ]
    return "\n\n".join(parts)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def mean(values: Iterable[float | None], form: str = ".3f") -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):{form}}" if known else "–"


def runs(found: Tree, arm: str, part: str) -> list[Any]:
    return [run[part] for run in found["runs"].get(arm, {}).values()]


def _redundancy(found: Tree, labels: dict[str, str]) -> Iterator[str]:
    rows = []
    for arm, label in labels.items():
        trees = runs(found, arm, "redundancy")
        if not trees or not (verdicts := [one for one in trees[0]["verdicts"] if one["weight"] == "query"]):
            continue
        outcomes = ", ".join(sorted({one["outcome"] for one in verdicts}))
        before, after = (trees[0]["parameters"][key] for key in ("before", "after"))
        exact = [tree["exact"]["relative"] for tree in trees if tree["exact"]]
        forced = [tree["forced"]["divergence"] for tree in trees if tree["forced"]]
        saved = f"{before - after:,}" if after < before else "–"
        rows.append([label, outcomes, saved, f"{max(exact):.1e}" if exact else "–", mean(forced)])
    head = ["arm", "linear queries", "parameters saved", "logits change by", "forced: nats a token"]
    yield (
        "**Redundancy.** What becomes of the trained models' queries; logits in float64, relative, the worst seed.\n\n"
        + (table(head, rows))
    )


def _symmetry(found: Tree, labels: dict[str, str]) -> Iterator[str]:
    def column(arm: str, name: str) -> str:
        return mean(block[name] for tree in runs(found, arm, "symmetry") for block in tree["blocks"])

    names = ("asymmetry", "logit_asymmetry", "logits_excess", "values_excess")
    yield "**Symmetry.** Means over heads and blocks: asymmetry of weights and of logits, excess norms.\n\n" + table(
        ["arm", "asymmetry", "of logits", "excess, queries and keys", "excess, values"],
        [[label, *(column(arm, name) for name in names)] for arm, label in labels.items() if found["runs"].get(arm)],
    )


def _geometry(found: Tree) -> Iterator[str]:
    by_run = runs(found, LAYER, "geometry")
    rows = []
    for layer in range(len(by_run[0][-1]["layers"])):
        first, last = ([run[place]["layers"][layer] for run in by_run] for place in (0, -1))
        bound = last[0]["bound"]
        rows.append(
            [
                str(layer),
                " / ".join(str(bound[key]) for key in ("flat", "tight", "paper")),
                mean((one["qkv"]["rank"] for one in last), ".0f"),
                mean(one["qkv"]["participation_ratio"] for one in last),
                " → ".join(mean((100 * one["bent"] for one in part), ".2g") for part in (first, last)),
                *(mean(one["curvature"]["query"][key] for one in last) for key in ("neighbours", "jacobian_spread")),
            ]
        )
    steps = f"{by_run[0][0]['step']:,} → {by_run[0][-1]['step']:,}"
    head = ["block", "linear / bound / paper", "rank", "participation ratio", f"bent %, steps {steps}"]
    yield "**Geometry** of the paper's layer, on validation text.\n\n" + table(
        [*head, "second difference", "Jacobian spread"], rows
    )
    words = []
    for name, one in found["against_gains"]["associations"].items():
        said = (
            one.get("why_none")
            or f"correlation {one['correlation']:+.2f} over {len(one['points'])} arms, p = {one['p']:.3f}"
        )
        words.append(f"- {name.replace('_', ' ')}: {said}")
    yield "Against the arms' gains:\n\n" + "\n".join(words)


def _dynamics(found: Tree) -> Iterator[str]:
    shown = ("query.norm", "query.stable_rank", "query.f_to_x", "query.cosine", "query.dead_units", "attention.entropy")
    measures = found["dynamics"].get(LAYER, {})
    rows = [
        [f"`{name}`", *(f"{curve[0][1]:.3g} → {curve[-1][1]:.3g}" if curve else "–" for curve in measures[name])]
        for name in shown
        if name in measures
    ]
    if rows:
        yield "**Dynamics** of the paper's layer, first and last record, block by block.\n\n" + table(
            ["measure", *(f"block {place}" for place in range(len(rows[0]) - 1))], rows
        )


def _mechanism(found: Tree, labels: dict[str, str]) -> Iterator[str]:
    trees = runs(found, LAYER, "mechanism")
    everywhere: dict[str, list[float]] = {}
    for tree in trees:
        most = max(len(row["layers"]) for row in tree["interventions"])
        for row in tree["interventions"]:
            if len(row["layers"]) == most and row["name"] != "swap":
                everywhere.setdefault(row["name"], []).append(row["difference"])
    yield "**Mechanism.** Loss above the untouched model's with something else in place of f in every block: " + (
        "; ".join(
            f"{name} {mean(values, '+.4f')} ({min(values):+.4f} to {max(values):+.4f} over the seeds)"
            for name, values in everywhere.items()
        )
        + " nats per token."
    )
    rows = []
    for layer in range(len(trees[0]["linear_share"])):
        shares = [tree["linear_share"][layer] for tree in trees]
        pairs, concepts = (
            [tree["probes"]["trained"][what][layer] for tree in trees] for what in ("conjunctions", "reweighting")
        )
        rows.append(
            [
                str(layer),
                f"{mean(one['r2'] for one in shares)} ({mean(one['untrained'] for one in shares)})",
                " / ".join(mean(one[key] for one in pairs) for key in ("x", "q", "q_random")),
                f"{sum(one['gained'] for one in pairs)} of {sum(one['pairs'] for one in pairs)}",
                f"{mean(one['spread'] for one in concepts)} ({mean(one['random_matrices'] for one in concepts)})",
            ]
        )
    yield table(
        [
            "block",
            "R² of a linear f (untrained)",
            "conjunctions: input / query / random f",
            "gained",
            "spread (random f)",
        ],
        rows,
    )
    apart: dict[str, list[float]] = {}
    for tree in trees:
        for other in tree["attention"]:
            apart.setdefault(other["against"].split("/")[0], []).append(fmean(b["mean"] for b in other["blocks"]))
    yield (
        "Attention beside other runs', bits: "
        + "; ".join(
            f"{'another seed' if arm == LAYER else labels[arm]} {mean(values)}" for arm, values in apart.items()
        )
        + "."
    )
    degrees = (
        (label, [one["together"] for tree in runs(found, arm, "mechanism") for one in tree["degrees"]])
        for arm, label in labels.items()
    )
    yield (
        "Degree of the largest logit in the weights of queries and keys: "
        + "; ".join(f"{label} {mean(values, '.2f')}" for label, values in degrees if values)
        + "."
    )
    yield (
        "The largest logit of the trainings of `experiments/stability.py` grows with this power of the rate: "
        + "; ".join(
            f"{arm} {one['power']:.2f} ({one['low']:.2f} to {one['high']:.2f})"
            for arm, one in found["logit_growth"].items()
        )
        + " (least squares over all decays, 95 %)."
    )
