"""Which parts of the paper's layer matter? Each of its choices changed alone, searched for alike, then three seeds.

Width, activation, each placement of the norms or none (within `f`, or as a stage around the whole projection), their
kinds and eps, anchor, scale (1 is the form of the paper's abstract), and the layer in keys, in values and in all three.
Arms with more parameters than the baseline have a control: the baseline with so much wider a feed-forward. Every arm
has the same grid of rates, as what suffers at one rate may only want another; the floor is at the peak, so that
no rate decays, where all of them were best in `experiments/fair_search.py`.

29 arms, half as long as the other small studies: 87 runs of about 20 s to search, 87 at the chosen points, and up to 84
more at the baseline's point. Chosen on validation, reported on test. `PAPER` is the same at the paper's scale.

    qurve compare experiments/ablations.py --out runs/ablations --pool runs/pool
    python experiments/ablations.py --study runs/ablations
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from qurve import accounting, presets
from qurve.files import write_atomic
from qurve.presets.zoo import ANCHORED
from qurve.projections import Bottleneck
from qurve.study.definition import Arm, Study
from qurve.study.evidence import compact_evidence
from qurve.study.results import StudyResults, load
from qurve.study.search import Search
from qurve.study.statistics import rows_between, summary_rows
from qurve.study.study_json import read_study
from qurve.train.config import RunConfig

EVIDENCE = Path(__file__).parents[1] / "results" / "ablations.json"

LAYER = "res-gelu"
CONTROLLED = ("width-d", "all-three", "width-2d")
"""D^2, 2 D^2 and 3 D^2 parameters a block more than the baseline. The first one's control is that of `anchor-linear`,
`key` and `value` too."""


STEPS = 240
SMALL_SEARCH = Search({"train.lr": (1e-3, 2e-3, 4e-3), "train.min_lr/train.lr": (1.0,)})
PAPER_SEARCH = Search({"train.lr": (6e-4, 1.2e-3, 2.4e-3, 3.6e-3), "train.min_lr": (2e-5, 6e-5)})


def queries(d: int) -> dict[str, tuple[str, Bottleneck]]:
    """The layer and its variants for queries, by arm: label and projection; `d` is the model's width."""
    widths = {"d8": ("D / 8", d // 8), "d4": ("D / 4", d // 4), "d": ("D", d), "2d": ("2 D", 2 * d)}
    separate: dict[str, Any] = {"norm_stage": "separate"}
    return {
        LAYER: ("Res. GELU", Bottleneck()),
        **{f"width-{name}": (f"R = {label}", Bottleneck(width=width)) for name, (label, width) in widths.items()},
        "act-relu": ("ReLU", Bottleneck(activation="relu")),
        "act-relu2": ("ReLU²", Bottleneck(activation="relu2")),
        "act-silu": ("SiLU", Bottleneck(activation="silu")),
        "act-identity": ("No activation", Bottleneck(activation="identity")),
        "norms-none": ("No norms", Bottleneck(pre_norm="none", post_norm="none")),  # of either stage: the same function
        "norms-pre": ("Pre-norm alone", Bottleneck(post_norm="none")),
        "norms-post": ("Post-norm alone", Bottleneck(pre_norm="none")),
        "separate": ("Norms as a stage of their own", Bottleneck(**separate)),
        "separate-pre": ("Separate stage, pre-norm alone", Bottleneck(post_norm="none", **separate)),
        "separate-post": ("Separate stage, post-norm alone", Bottleneck(pre_norm="none", **separate)),
        "pre-layernorm": ("LayerNorm before W1", Bottleneck(pre_norm="layernorm")),
        "post-rmsnorm": ("RMSNorm after W2", Bottleneck(post_norm="rmsnorm")),
        "eps-1e-6": ("eps 1e-6", Bottleneck(eps=1e-6)),
        "eps-1e-3": ("eps 1e-3", Bottleneck(eps=1e-3)),
        "anchor-linear": ("Linear anchor", ANCHORED),
        "anchor-none": ("No anchor", Bottleneck(anchor="none")),
        "scale-1": ("Scale 1", Bottleneck(scale=1.0)),
    }


def ablations(name: str, title: str, baseline: RunConfig, search: Search) -> Study:
    """The study; the arms differ from `baseline` in the model alone, and in what the search finds for each."""

    def changed(**changes: Any) -> RunConfig:
        return dataclasses.replace(baseline, model=dataclasses.replace(baseline.model, **changes))

    arms = {"baseline": Arm("baseline", "Baseline", baseline)}
    for arm, (label, query) in queries(baseline.model.d_model).items():
        arms[arm] = Arm(arm, label, changed(query=query))
    everywhere = {"query": Bottleneck(), "key": ANCHORED, "value": ANCHORED}
    arms["key"] = Arm("key", "Nonlinear K", changed(key=ANCHORED))
    arms["value"] = Arm("value", "Nonlinear V", changed(value=ANCHORED))
    arms["all-three"] = Arm("all-three", "Nonlinear Q, K and V", changed(**everywhere))
    for arm in CONTROLLED:
        model, match = accounting.match("params", arms[arm].config.model, baseline.model)
        label = f"MLP as large as {arms[arm].label}"
        arms[f"{arm}-mlp"] = Arm(f"{arm}-mlp", label, dataclasses.replace(baseline, model=model), match=match)
    return Study(name, title, tuple(arms.values()), search=search)


def small() -> RunConfig:
    config = presets.get("small/baseline")
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=STEPS),
        eval=dataclasses.replace(config.eval, splits=("val", "test")),
    )


def paper() -> RunConfig:
    """In order `epochs`: the authors' own evaluation tables have no test split."""
    config = presets.get("paper/baseline")
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, order="epochs", order_seed=None),
        eval=dataclasses.replace(config.eval, splits=("val", "test")),
    )


STUDY = ablations(
    "ablations",
    "The layer's choices, each changed alone, at about a million parameters",
    small(),
    SMALL_SEARCH,
)
PAPER = ablations(
    "ablations-paper",
    "The layer's choices, each changed alone, at the paper's scale",
    paper(),
    PAPER_SEARCH,
)


def both_questions(results: StudyResults) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows against the linear query, and of the same arms against the layer: one family of tests, since an arm that is
    tested twice at 5 % has two chances."""
    layer = next(arm for arm in results.primary if arm.name == LAYER)
    others = [arm for arm in results.primary if arm is not layer]
    pairs = [*((results.baseline, arm) for arm in results.primary), *((layer, arm) for arm in others)]
    found = rows_between(results, pairs)
    first = {row["arm"]: row for row in found[: len(results.primary)]}
    as_reference = [row for row in summary_rows(dataclasses.replace(results, baseline=layer)) if row["arm"] == LAYER]
    rows = [first.get(row["arm"], row) for row in summary_rows(results)]
    return rows, [*as_reference, *found[len(results.primary) :]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=Path("runs/ablations"), help="folder of the finished study")
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    args = parser.parse_args()
    results = load(args.study)
    rows, against_layer = both_questions(results)
    search = read_study(args.study / "study.json").get("search")
    found = {**compact_evidence(results), "rows": rows, "against_the_layer": against_layer, "search": search}
    write_atomic(args.out, json.dumps(found, indent=1) + "\n")
    for row in against_layer:
        print(f"{row['arm']:16} {row['final_loss']}  against the layer {row['diff']}: {row['verdict']}")


if __name__ == "__main__":
    main()
