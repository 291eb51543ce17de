"""Peak and floor apart: what do the baseline and wider MLPs do at the variant's rates?

The paper's variant was trained at other peaks and other floors than its baseline. Here every arm is tried at each of
the paper's peaks with each of its floors: all multiplied by the factor of `experiments/table1.py`, which brings the
baseline's peak to its best here. The controls are the paper's MLP 4.75, and an MLP whose training step takes as long as
the layer's, as measured once on one thread (`--measure`). The baseline itself takes as many FLOPs as the layer, and has
as many parameters but for the layer's biases and norms: it is the control for both.

64 runs of the search and at most 35 after it, of about 45 s. Where each arm is best at this scale, with a wider choice
of floors, is `experiments/fair_search.py`. `PAPER` is the same at the paper's scale, without the time-matched control:
seconds are to be measured on the machine that trains.

    qurve compare experiments/controls.py --out runs/controls --pool runs/pool
    python experiments/controls.py --study runs/controls
    python experiments/controls.py --measure                # writes results/time-match.json, which makes another study
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from noise_floor import measured_alike, paper

from qurve import presets
from qurve.accounting import mlp_widened
from qurve.files import write_atomic
from qurve.model.config import ModelConfig
from qurve.projections import Bottleneck
from qurve.study.definition import Arm, Study
from qurve.study.evidence import compact_evidence
from qurve.study.results import load
from qurve.study.search import Search
from qurve.study.study_json import read_study
from qurve.train.config import RunConfig
from qurve.train.step_time import match_time

SEEDS = (1, 2, 3, 4, 5)
PEAKS = (6e-4, 2.4e-3, 3.6e-3, 4e-3)
"""The baseline's, and the three at which the paper prints its variant."""
FLOORS = (1e-5, 2e-5, 3e-5, 6e-5)
"""The variant's three, and the baseline's."""
FACTOR = presets.small_search()["chosen"]["baseline"]["point"]["train.lr"] / PEAKS[0]
"""Of the small scale's rates to the published ones, peaks and floors alike."""
ROUNDS = 61
"""Of the measured steps."""
RESULTS = Path(__file__).resolve().parents[1] / "results"
EVIDENCE = RESULTS / "controls.json"
TIME_MATCH = RESULTS / "time-match.json"


def space(factor: float) -> dict[str, tuple[float, ...]]:
    axes = {"train.lr": PEAKS, "train.min_lr": FLOORS}
    return {axis: tuple(float(f"{factor * rate:.3g}") for rate in rates) for axis, rates in axes.items()}


def arms(baseline: RunConfig, time_matched: int | None) -> tuple[Arm, ...]:
    """`time_matched` is the `d_ff` that takes as long as the layer, where it was measured."""
    base = baseline.model

    def arm(name: str, label: str, model: ModelConfig) -> Arm:
        return Arm(name, label, dataclasses.replace(baseline, model=model))

    wider = mlp_widened(base, match="params", by=0.125)
    found = [
        arm("baseline", "Baseline", base),
        dataclasses.replace(arm("mlp-4.75", "MLP 4.75", wider.config), match=wider.match),
        arm("res-gelu", "Res. GELU", dataclasses.replace(base, query=Bottleneck())),
    ]
    if time_matched is not None:
        found.insert(2, arm("mlp-time", "MLP, same seconds", dataclasses.replace(base, d_ff=time_matched)))
    return tuple(found)


def measure() -> dict[str, Any]:
    """The width whose step takes as long as the layer's, as the runs of the study are made: eager, on one thread."""
    config = presets.get("small/baseline")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, device="cpu", threads=1))
    model, found = match_time(dataclasses.replace(config.model, query=Bottleneck()), config, rounds=ROUNDS)
    return {**dataclasses.asdict(found), "said": str(found), "baseline_d_ff": config.model.d_ff, "d_ff": model.d_ff}


def time_matched_width() -> int:
    return int(json.loads(TIME_MATCH.read_text(encoding="utf-8"))["d_ff"])


TITLE = "Peak and floor apart"
STUDY = Study(
    "controls",
    f"{TITLE}, at about a million parameters",
    arms(
        measured_alike(presets.small("baseline", 2e-3, 2e-4)),
        time_matched_width(),
    ),
    SEEDS,
    search=Search(space(FACTOR)),
)
PAPER = Study("controls-paper", f"{TITLE}, at the paper's scale", arms(paper(), None), SEEDS, search=Search(space(1.0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=Path("runs/controls"), help="the finished study's folder")
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    parser.add_argument("--measure", action="store_true", help="only measure the time-matched control's width anew")
    options = parser.parse_args()
    if options.measure:
        write_atomic(TIME_MATCH, json.dumps(measure(), indent=1) + "\n")
        return
    found = {**compact_evidence(load(options.study)), "search": read_study(options.study / "study.json")["search"]}
    write_atomic(options.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
