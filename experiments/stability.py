"""Where does training hold? Rate x weight decay for the baseline, QK-norm, the paper's layer and `W_Q = I`.

Every point of the grid is an arm, `NAME@RATE-DECAY`. Decays are those of the published claims, and rates the multiples
of the baseline's at which they were made, with one far beyond; the floor is a tenth of the peak for all. Half as long
as the other small studies, with one seed: 96 runs of about 25 s. `PAPER` is the same at the paper's scale.

    qurve compare experiments/stability.py --out runs/stability
    python experiments/stability.py --study runs/stability
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from qurve import presets
from qurve.files import write_atomic
from qurve.projections import Bottleneck, Identity
from qurve.study.claims import PAPER_RATE, evidence
from qurve.study.definition import Arm, Study
from qurve.study.evidence import machine, origin
from qurve.study.results import load
from qurve.train.config import RunConfig

MULTIPLES = (1.0, 2.7, 4.0, 5.0, 20 / 3, 16.0)
"""Of the baseline's rate. 3.7, of which one claim speaks, is near enough to 4."""
DECAYS = (0.1, 0.05, 2**-5, 0.0)
FLOOR = 0.1
SMALL_RATE = 2e-3
"""What an equal search chose for the small baseline (`results/small-search.json`)."""
STEPS, EVERY, WINDOWS = 240, 60, 128
EVIDENCE = Path(__file__).parents[1] / "results" / "stability.json"


def architectures(baseline: RunConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    """Label and what is changed in the baseline's model. With `W_Q = I` the authors halve the attention scale."""
    return {
        "baseline": ("Baseline", {}),
        "res-gelu": ("Res. GELU", {"query": Bottleneck()}),
        "identity": ("W_Q = I", {"query": Identity(), "attention_scale": baseline.model.scale / 2}),
        "qk-norm": ("QK-norm", {"qk_norm": True}),
    }


def grid(name: str, title: str, baseline: RunConfig, base_rate: float) -> Study:
    """Every architecture at every rate and decay; the baseline's published point is the study's baseline."""
    arms = []
    for arm, (label, changes) in architectures(baseline).items():
        model = dataclasses.replace(baseline.model, **changes)
        for multiple in MULTIPLES:
            for decay in DECAYS:
                lr = float(f"{multiple * base_rate:.3g}")
                train = dataclasses.replace(baseline.train, lr=lr, min_lr=FLOOR * lr, weight_decay=decay)
                config = dataclasses.replace(baseline, model=model, train=train)
                arms.append(Arm(f"{arm}@{lr:g}-{decay:g}", f"{label}, rate {lr:g}, decay {decay:g}", config))
    return Study(name, title, tuple(arms), seeds=(1,), baseline=f"baseline@{base_rate:g}-0.1")


def small() -> RunConfig:
    config = presets.small("baseline", SMALL_RATE, FLOOR * SMALL_RATE)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=STEPS),
        eval=dataclasses.replace(config.eval, every=EVERY, windows=WINDOWS, attention_logits=True),
    )


def paper() -> RunConfig:
    config = presets.get("paper/baseline")
    return dataclasses.replace(config, eval=dataclasses.replace(config.eval, attention_logits=True))


TITLE = "Stability over learning rate and weight decay"
STUDY = grid("stability", f"{TITLE}, at about a million parameters", small(), SMALL_RATE)
PAPER = grid("stability-paper", f"{TITLE}, at the paper's scale", paper(), PAPER_RATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=Path("runs/stability"), help="folder of the finished study")
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    args = parser.parse_args()
    results = load(args.study)
    found = {"machine": machine(results), **origin(results), **evidence(results)}
    write_atomic(args.out, json.dumps(found, indent=1) + "\n")
    for standing in ("published", "disputed", "our inference"):
        print(f"{standing}:")
        for claim in (claim for claim in found["claims"] if claim["standing"] == standing):
            print(
                f"  {claim['verdict']}: {claim['arm']}, {claim['multiple']:.3g} x the baseline's rate, decay "
                f"{claim['weight_decay']:g}, {claim['says_in_words']} ({claim['text']}; {claim['source']}): "
                f"{claim['why']}"
            )
    print(f"{found['scale']}, seeds {found['seeds']}. {found['note']}")


if __name__ == "__main__":
    main()
