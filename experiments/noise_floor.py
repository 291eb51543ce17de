"""How far do two trainings of the same model part? The noise that every difference has to be seen above.

The small baseline with eight seeds, and an A/A arm: the same configuration on the same batches, from other weights. It
says how losses vary over seeds, what an arm that changes nothing looks like, and how many seeds see which effect. At
the small scale the rate does not decay (`min_lr` = `lr`); a schedule that does may leave another noise.

16 runs of about 45 s; those of the baseline are the fair search's own where that chooses the same point. `PAPER` is the
same at the paper's scale; it was not run.

    qurve compare experiments/noise_floor.py --out runs/noise-floor --pool runs/pool
    python experiments/noise_floor.py --study runs/noise-floor
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from qurve import presets
from qurve.errors import BadInput
from qurve.files import write_atomic
from qurve.study.definition import Arm, Study
from qurve.study.evidence import compact_evidence
from qurve.study.noise import final_losses, floor_of
from qurve.study.power import POWER, minimum_detectable, seeds_needed
from qurve.study.results import StudyResults, load
from qurve.train.config import RunConfig

EVIDENCE = Path(__file__).parents[1] / "results" / "noise-floor.json"
SEEDS = (1, 2, 3, 4, 5, 6, 7, 8)
OTHER_WEIGHTS = 100
"""Added to the A/A arm's seeds."""
EFFECTS_PERCENT = (0.2, 0.5, 1.0, 2.4)
"""Of the baseline's loss. The last is the gain that the paper prints."""


def floor(name: str, title: str, baseline: RunConfig) -> Study:
    arms = (Arm("baseline", "Baseline", baseline), Arm("a-a", "A/A", baseline, seed_offset=OTHER_WEIGHTS))
    return Study(name, title, arms, SEEDS)


def measured_alike(config: RunConfig) -> RunConfig:
    """Evaluated as in the fair search, so that a run of both is one."""
    return dataclasses.replace(
        config, eval=dataclasses.replace(config.eval, splits=("val", "test"), attention_logits=True)
    )


def paper() -> RunConfig:
    """In order `epochs`: the authors' own evaluation tables have no test split."""
    config = presets.get("paper/baseline")
    data = dataclasses.replace(config.data, order="epochs", order_seed=None)
    return measured_alike(dataclasses.replace(config, data=data))


STUDY = floor(
    "noise-floor", "The noise floor, at about a million parameters", measured_alike(presets.get("small/baseline"))
)
PAPER = floor("noise-floor-paper", "The noise floor, at the paper's scale", paper())


def noise(results: StudyResults) -> dict[str, Any]:
    """The deviations over the seeds, and what they ask for: how many seeds each effect takes, at both ends of the
    deviation's interval too, and what the study's own number of seeds sees.

    The differences are those of the A/A arm. Raises `BadInput` with fewer than two seeds finished in both.
    """
    base = results.baseline
    (a_a,) = [arm for arm in results.others if arm.seed_offset]
    found = floor_of({arm.name: final_losses(arm.runs) for arm in (base, a_a)}, base.name)
    if found is None or found.differences is None:
        raise BadInput(f"{results.folder}: fewer than two seeds are finished in both arms")
    spread = found.differences
    needed = []
    for percent in EFFECTS_PERCENT:
        nats = percent / 100 * found.base_loss
        seeds = {name: seeds_needed(nats, getattr(spread, name)) for name in ("value", "low", "high")}
        needed.append({"effect_percent": percent, "effect_nats": nats, "seeds": seeds})
    least = minimum_detectable(spread.n, spread.value)
    return {
        "base_loss": found.base_loss,
        "baseline": dataclasses.asdict(found.baseline),
        "differences": dataclasses.asdict(spread),
        "correlation": found.arms[0].correlation,
        "power": POWER,
        "seeds_needed": needed,
        "detectable_percent": None if least is None else 100 * least / found.base_loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=Path("runs/noise-floor"), help="folder of the finished study")
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    args = parser.parse_args()
    results = load(args.study)
    try:
        found = noise(results)
    except BadInput as error:
        raise SystemExit(str(error)) from None
    tree = {**compact_evidence(results), "noise": found}
    write_atomic(args.out, json.dumps(tree, indent=1) + "\n")
    for what in ("baseline", "differences"):
        spread = found[what]
        print(f"{what}: {spread['value']:.4f} nats ({spread['low']:.4f} to {spread['high']:.4f}), n = {spread['n']}")
    row = tree["rows"][-1]
    print(f"A/A: {row['diff']:+.4f} ({row['diff_low']:+.4f} to {row['diff_high']:+.4f}), p = {row['p']}")
    for line in found["seeds_needed"]:
        seeds = line["seeds"]
        print(f"{line['effect_percent']:g} %: {seeds['value']} seeds ({seeds['low']} to {seeds['high']})")


if __name__ == "__main__":
    main()
