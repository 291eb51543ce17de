"""The paper's Figure 2: the relative gain over the baseline, along the training, of every configuration that is known.

`PAPER` has them all: the nonlinear query's 29 configurations of the authors' repository and the two that only Table 1
has, and the wider feed-forwards of the figure's legend (89.6 to 95.6 M parameters), evaluated every 1,000 steps. The
warm-up's gains are part of the figure, so that it begins at step 1,000. `UNKNOWN` says what was not published.

`STUDY` is a handful at about a million parameters: one or two of each decay, and both ends of the wider feed-forwards,
with rates scaled as `experiments/table1.py` scales them, evaluated first within the warm-up. 9 arms with three seeds:
27 runs of about a minute.

    qurve compare experiments/figure2.py --out runs/figure2 --pool runs/pool
    python experiments/figure2.py --study runs/figure2
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from table1 import small

from qurve import presets
from qurve.files import write_atomic
from qurve.projections import Bottleneck
from qurve.study.curves import gains
from qurve.study.definition import Arm, Study
from qurve.study.evidence import compact_evidence
from qurve.study.results import StudyResults, load
from qurve.train.config import RunConfig

EVIDENCE = Path(__file__).parents[1] / "results" / "figure2.json"

DECAYS = {"0.1": 0.1, "0.05": 0.05, "2^-5": 2**-5, "0.025": 0.025, "2^-6": 2**-6}
REPOSITORY: dict[str, tuple[tuple[float, float], ...]] = {
    "0.1": ((8e-4, 8e-5),),
    "0.05": ((8e-4, 8e-5), (1.1e-3, 1.1e-4), (2.4e-3, 3e-5), (3e-3, 3e-5)),
    "2^-5": (
        *((1.2e-3, floor) for floor in (1.2e-4, 3e-4, 7e-5)),
        *((1.5e-3, floor) for floor in (3e-5, 4e-5, 6e-5)),
        *((1.7e-3, floor) for floor in (3e-5, 5e-5)),
        *((peak, 3e-5) for peak in (2e-3, 2.2e-3, 2.4e-3, 2.6e-3, 2.8e-3, 3e-3, 3.2e-3, 3.4e-3)),
    ),
    "0.025": tuple((peak, 3e-5) for peak in (1.7e-3, 2.4e-3, 3e-3)),
    "2^-6": ((1.5e-3, 4e-5), (1.5e-3, 8e-5), (2e-3, 2e-5), (2e-3, 8e-5), (2e-3, 1.2e-4)),
}
"""Decay -> (peak, floor) of the nonlinear query's configurations with tied embeddings in the authors' repository."""
TABLE_1 = ((3.6e-3, 2e-5), (4e-3, 1e-5))
"""(peak, floor) at decay 0.1 of the two rows of Table 1 that are not in the repository."""
# The repository has a 5 d wide one as well; with 99.1 M parameters it is outside the figure's legend.
WIDER = {"mlp-4.33": "MLP 4.33", "mlp-4.5": "MLP 4.5", "mlp-4.625": "MLP 4.625", "mlp-4.75": "MLP 4.75"}
SCALED = {"mlp-4.75-scaled": "MLP 4.75 (scaled rate)"}
UNKNOWN = (
    "Which of the configurations the printed figure shows: about 70 % of those that were run, says its caption.",
    "Configurations that were run and published nowhere: the caption speaks of a complete set in the repository, which "
    "has 29 of the nonlinear query, and not the two best rows of Table 1.",
    "Schedule, batch and warm-up of those two rows: taken to be the others'.",
    "Final losses of all configurations but the three in Table 1, and which of them diverged: the repository has "
    "settings, no losses.",
)
"""What was not published."""


def nonlinear(decay: str, peak: float, floor: float) -> Arm:
    config = presets.get("paper/baseline")
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, query=Bottleneck()),
        train=dataclasses.replace(config.train, lr=peak, min_lr=floor, weight_decay=DECAYS[decay]),
    )
    name = f"wd-{decay.replace('^', '')}@{peak:g}-{floor:g}"
    return Arm(name, f"Res. GELU, decay {decay}, {peak:g} to {floor:g}", config)


def wider(name: str, label: str) -> Arm:
    return Arm(name, label, presets.get(f"paper/{name}"))


def published() -> tuple[Arm, ...]:
    """The baseline, the wider feed-forwards, the nonlinear query's configurations by falling decay."""
    points = {decay: (*points, *(TABLE_1 if decay == "0.1" else ())) for decay, points in REPOSITORY.items()}
    return (
        Arm("baseline", "Baseline", presets.get("paper/baseline")),
        *(wider(*arm) for arm in (WIDER | SCALED).items()),
        *(nonlinear(decay, *point) for decay in points for point in sorted(points[decay])),
    )


FEW = (
    ("0.1", 8e-4, 8e-5),
    ("0.1", 3.6e-3, 2e-5),
    ("0.05", 2.4e-3, 3e-5),
    ("2^-5", 2.4e-3, 3e-5),
    ("0.025", 2.4e-3, 3e-5),
    ("2^-6", 2e-3, 2e-5),
)


def few() -> tuple[Arm, ...]:
    """Some of the published ones at the small scale. The labels keep the published rates."""
    wide = tuple(wider(name, WIDER[name]) for name in ("mlp-4.33", "mlp-4.75"))
    chosen = (Arm("baseline", "Baseline", presets.get("paper/baseline")), *wide, *(nonlinear(*one) for one in FEW))
    return tuple(dataclasses.replace(arm, config=often(small(arm.config))) for arm in chosen)


def often(config: RunConfig) -> RunConfig:
    """Evaluated every 16 of 480 steps, of which 24 are warm-up; on fewer windows, so that it takes no longer."""
    return dataclasses.replace(config, eval=dataclasses.replace(config.eval, every=16, windows=128))


TITLE = "Figure 2 of the paper"
STUDY = Study("figure2", f"{TITLE}, a handful of it at about a million parameters", few())
PAPER = Study("figure2-paper", f"{TITLE}: every published configuration, at its scale", published(), seeds=(1,))


def curves(results: StudyResults) -> dict[str, Any]:
    """Of every arm but the baseline: parameters, and its relative gain in per cent at each evaluation."""
    found = {}
    for arm in results.others:
        band = gains(results, arm)
        low, high = dict(band.low), dict(band.high)
        found[arm.name] = {
            "label": arm.label,
            "non_embedding": arm.non_embedding,
            "seeds": band.n,
            "gain_percent": [
                {"step": step, "mean": mean, "smallest": low[step], "largest": high[step]}
                for step, mean in band.mean
                if step > 0
            ],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=Path("runs/figure2"), help="folder of the finished study")
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    args = parser.parse_args()
    results = load(args.study)
    found = {**compact_evidence(results), "curves": curves(results), "unknown": list(UNKNOWN)}
    write_atomic(args.out, json.dumps(found, indent=1) + "\n")
    for curve in found["curves"].values():
        points = [f"{point['step']:,}: {point['mean']:+.2f} %" for point in curve["gain_percent"]]
        print(f"{curve['label']} ({curve['non_embedding']:,}): {', '.join(points)}")


if __name__ == "__main__":
    main()
