"""Best against best: the paper's arms and its controls, each given the same search, then five fresh seeds.

The grid holds the rates and floors at which the others were found best, so that no arm is judged at a rate that was
tuned for another. Chosen on validation, reported on test; at the baseline's point too. `PAPER` is the same at the
paper's scale, with its peaks and its floors; it is planned, and was not run.

    qurve compare experiments/fair_search.py --out runs/fair-search --pool runs/pool
    python experiments/fair_search.py --study runs/fair-search
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from qurve import presets
from qurve.files import write_atomic
from qurve.projections import Bottleneck, Identity
from qurve.study.definition import Arm, Study
from qurve.study.evidence import compact_evidence
from qurve.study.results import load
from qurve.study.search import Search
from qurve.study.study_json import read_study
from qurve.train.config import RunConfig

SEEDS = (1, 2, 3, 4, 5)
SMALL_SPACE = {"train.lr": (1e-3, 2e-3, 4e-3), "train.min_lr/train.lr": (0.01, 0.1, 0.3, 1.0)}
"""The lowest floor is where the paper has its variant's, at 0.25 to 1.25 % of the peak; the baseline's is a tenth."""
PAPER_SPACE = {"train.lr": (6e-4, 1.2e-3, 2.4e-3, 3.6e-3, 4e-3), "train.min_lr": (1e-5, 2e-5, 3e-5, 6e-5)}
"""The paper's peaks, its baseline's among them, and its floors."""
EVIDENCE = Path(__file__).parents[1] / "results" / "fair-search.json"


def arms(baseline: RunConfig) -> tuple[Arm, ...]:
    """With `W_Q = I` the authors halve the attention scale; its larger MLP gets back what the queries gave up."""
    model = baseline.model
    identity = {"query": Identity(), "attention_scale": model.scale / 2}
    changes = {
        "baseline": ("Baseline", {}),
        "mlp-4.75": ("MLP 4.75", {"d_ff": model.d_ff * 19 // 16}),
        "res-gelu": ("Res. GELU", {"query": Bottleneck()}),
        "identity": ("W_Q = I", identity),
        "identity-mlp-4.5": ("W_Q = I, MLP 4.5", {**identity, "d_ff": model.d_ff * 9 // 8}),
        "qk-norm": ("QK-norm", {"qk_norm": True}),
    }
    return tuple(
        Arm(name, label, dataclasses.replace(baseline, model=dataclasses.replace(model, **change)))
        for name, (label, change) in changes.items()
    )


def small() -> RunConfig:
    config = presets.small("baseline", 2e-3, 2e-4)
    evaluation = dataclasses.replace(config.eval, splits=("val", "test"), attention_logits=True)
    return dataclasses.replace(config, eval=evaluation)


def paper() -> RunConfig:
    """In order `epochs`: the authors' own evaluation tables have no test split."""
    config = presets.get("paper/baseline")
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, order="epochs", order_seed=None),
        eval=dataclasses.replace(config.eval, splits=("val", "test"), attention_logits=True),
    )


STUDY = Study(
    "fair-search",
    "Best against best, at about a million parameters",
    arms(small()),
    SEEDS,
    search=Search(SMALL_SPACE, extensions=1),
)
PAPER = Study(
    "fair-search-paper", "Best against best, at the paper's scale", arms(paper()), SEEDS, search=Search(PAPER_SPACE)
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=Path("runs/fair-search"), help="the finished study's folder")
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    options = parser.parse_args()
    found = {**compact_evidence(load(options.study)), "search": read_study(options.study / "study.json")["search"]}
    write_atomic(options.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
