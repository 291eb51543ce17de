"""Everybody at the point that the paper found best for its layer: who bears that peak?

`experiments/controls.py` tries each arm at all published peaks and floors with one seed, and tests at each arm's own
best. Here all are at one point, the published 3.6e-3 to 2e-5 times the same factor, six times the baseline's peak; with
five seeds, and with `W_Q = I` and QK-norm beside the wider MLPs. Nothing is searched: the point suits the layer, as
published, and which arm is better at its own best is not asked. `PAPER` is the same at the paper's scale.

30 runs of about 45 s.

    qurve compare experiments/at_the_peak.py --out runs/at-the-peak --pool runs/pool
    python experiments/at_the_peak.py --study runs/at-the-peak
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import controls
from noise_floor import measured_alike, paper

from qurve import presets
from qurve.files import write_atomic
from qurve.projections import Identity
from qurve.study.definition import Arm, Study
from qurve.study.evidence import compact_evidence
from qurve.study.results import load
from qurve.train.config import RunConfig

PUBLISHED = presets.get("paper/res-gelu-best").train
EVIDENCE = controls.RESULTS / "at-the-peak.json"


def arms(baseline: RunConfig, time_matched: int | None) -> tuple[Arm, ...]:
    """With `W_Q = I` the authors halve the attention scale."""
    model = baseline.model
    identity = dataclasses.replace(model, query=Identity(), attention_scale=model.scale / 2)
    more = (("identity", "W_Q = I", identity), ("qk-norm", "QK-norm", dataclasses.replace(model, qk_norm=True)))
    return (
        *controls.arms(baseline, time_matched),
        *(Arm(name, label, dataclasses.replace(baseline, model=model)) for name, label, model in more),
    )


def at_the_point(baseline: RunConfig, factor: float) -> RunConfig:
    lr, min_lr = (float(f"{factor * rate:.3g}") for rate in (PUBLISHED.lr, PUBLISHED.min_lr))
    return dataclasses.replace(baseline, train=dataclasses.replace(baseline.train, lr=lr, min_lr=min_lr))


TITLE = "Everybody at the point that suits the layer, as published"
STUDY = Study(
    "at-the-peak",
    f"{TITLE}, at about a million parameters",
    arms(
        at_the_point(measured_alike(presets.get("small/baseline")), controls.FACTOR),
        controls.time_matched_width(),
    ),
    controls.SEEDS,
)
PAPER = Study("at-the-peak-paper", f"{TITLE}, at its scale", arms(at_the_point(paper(), 1.0), None), (1, 2, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=Path("runs/at-the-peak"), help="the finished study's folder")
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    options = parser.parse_args()
    write_atomic(options.out, json.dumps(compact_evidence(load(options.study)), indent=1) + "\n")


if __name__ == "__main__":
    main()
