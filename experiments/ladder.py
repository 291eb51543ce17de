"""Does the gain grow or shrink? The paper's arms with two more along model size, and along the length of training.

Primer gains by a bias to the neighbourhood, which larger models learn by themselves: if a ladder is any good, it shows
Primer's gain shrink. QK-norm is the control for whatever tolerates a higher rate. Both train at the baseline's rate.

No rate decays in `LADDER` and `LARGER` (`min_lr` = `lr`), as the searches at 0.8 M chose: the rungs along the length
are nearly one training looked at at several steps, where a schedule that decays would make each of them another one.
`PAPER` decays.

`LADDER` has what one evening's worth of text and an hour of two cores allow: 25,000 to 221,000 non-embedding parameters
at 20 tokens for each, and 60 and 240 for the smallest, five arms, three seeds: 75 runs, 52 minutes at 50,000 (32 wide)
to 22,000 (96 wide) tokens/s a core. `LARGER` goes from 0.1 to 2.7 M with one seed, so that its slopes end in no
verdict: nine hours of two cores, and more text than the embedded corpus has (its largest rung would go through it 16
times). `PAPER` is the same from 124 M to 1.3 B. Neither of these was run.

    qurve study ladder experiments/ladder.py --out runs/ladder
    python experiments/ladder.py --ladder runs/ladder
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from qurve import presets
from qurve.files import write_atomic
from qurve.presets.zoo import ZOO
from qurve.study.definition import Arm, Study
from qurve.study.ladder import LENGTHS, Ladder, ladder, like, load_definition
from qurve.study.ladder_results import load_ladder, to_json
from qurve.study.ladder_tables import lines

EVIDENCE = Path(__file__).parents[1] / "results" / "ladder.json"
CONTROLS = {"primer": ZOO["Mixers"]["primer"], "qk-norm": ZOO["Queries"]["qk-norm"]}


def with_controls(found: Ladder) -> Ladder:
    """The ladder with Primer and QK-norm on every rung: the rung's baseline, so changed."""

    def added(study: Study) -> Study:
        (base,) = (arm.config for arm in study.arms if arm.name == study.baseline)
        more = tuple(
            Arm(name, entry.label, dataclasses.replace(base, model=dataclasses.replace(base.model, **entry.changes)))
            for name, entry in CONTROLS.items()
        )
        return dataclasses.replace(study, arms=(*study.arms, *more))

    rungs = tuple(dataclasses.replace(rung, study=added(rung.study)) for rung in found.rungs)
    return dataclasses.replace(found, rungs=rungs)


ARMS = {arm: like(f"small/{arm}", "small/baseline") for arm in presets.SMALL_MODELS}
BASE = presets.get("small/baseline")
RATES = "at the rates that suit them at 0.8 M"

LADDER = with_controls(
    ladder(
        "ladder",
        f"Gains up to 0.2 M parameters, {RATES}",
        BASE,
        ((2, 32), (2, 64), (2, 96)),
        ARMS,
        lengths=LENGTHS,
    )
)
LARGER = with_controls(
    ladder(
        "ladder-larger",
        f"Gains from 0.1 to 2.7 M parameters, {RATES}",
        BASE,
        ((2, 64), (3, 96), (4, 128), (6, 192)),
        ARMS,
        seeds=(1,),
    )
)
PAPER = with_controls(load_definition("paper"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ladder", type=Path, default=Path("runs/ladder"), help="folder of the finished ladder")
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    args = parser.parse_args()
    results = load_ladder(args.ladder)
    write_atomic(args.out, to_json(results))
    print("\n".join(lines(results)))


if __name__ == "__main__":
    main()
