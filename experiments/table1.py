"""The paper's Table 1: its six rows, each at its published rate, floor and decay, with several seeds.

No row is searched for: that is what the paper reports, and `experiments/fair_search.py` is the other question. `PAPER`
is `qurve compare paper`, at the paper's scale; it was not run. `STUDY` has the rows at about a million parameters; a
peak of 6e-4 is far too low for its 480 steps, so every published peak and floor is multiplied by one factor, the one
that brings the baseline's peak to what its own search found best (`results/small-search.json`).

Six arms with five seeds: 30 runs of about 45 s.

    qurve compare experiments/table1.py --out runs/table1 --pool runs/pool
    python experiments/table1.py --study runs/table1
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qurve import accounting, presets
from qurve.files import write_atomic
from qurve.study.definition import LABELS, Arm, Study, load_study
from qurve.study.evidence import compact_evidence
from qurve.study.results import StudyResults, load
from qurve.study.statistics import comparisons
from qurve.train.config import RunConfig

EVIDENCE = Path(__file__).parents[1] / "results" / "table1.json"
SEEDS = (1, 2, 3, 4, 5)
PUBLISHED = presets.get("paper/baseline")
SMALL = presets.small("baseline", 2e-3, 2e-4)
FACTOR = presets.small_search()["chosen"]["baseline"]["point"]["train.lr"] / PUBLISHED.train.lr
"""Of the small scale's rates to the published ones, peaks and floors alike."""


def small(published: RunConfig) -> RunConfig:
    """The small counterpart of one of the paper's configurations: its query, its feed-forward's proportion, its decay,
    its rates times `FACTOR`."""
    d_ff = published.model.d_ff * SMALL.model.d_model // published.model.d_model
    model = dataclasses.replace(SMALL.model, query=published.model.query, d_ff=d_ff)
    lr, min_lr = (float(f"{FACTOR * rate:.3g}") for rate in (published.train.lr, published.train.min_lr))
    train = dataclasses.replace(SMALL.train, lr=lr, min_lr=min_lr, weight_decay=published.train.weight_decay)
    return dataclasses.replace(SMALL, model=model, train=train)


def row(preset: str) -> Arm:
    """A row of the table at the small scale. The control, an eighth larger than the baseline, says how nearly."""
    name, config = preset.removeprefix("paper/"), small(presets.get(preset))
    control = accounting.mlp_widened(SMALL.model, match="params", by=0.125)
    match = control.match if control.config == config.model else None
    return Arm(name, LABELS[name], config, presets.PRINTED[preset], match)


STUDY = Study("table1", "Table 1 of the paper, at about a million parameters", tuple(map(row, presets.PRINTED)), SEEDS)
PAPER = dataclasses.replace(load_study("paper"), seeds=SEEDS)


def beside(results: StudyResults) -> Iterator[dict[str, Any]]:
    """Every row as the paper prints it, and as it came out here."""
    found = {pair.arm: pair for pair in comparisons(results)}
    base = results.baseline
    for arm in results.arms:
        pair = found.get(arm.name)
        ours = {
            "delta_params_percent": 100 * (arm.non_embedding / base.non_embedding - 1),
            **{key: arm.setting(f"train.{key}") for key in ("weight_decay", "lr", "min_lr")},
            "seeds": len(arm.finished),
            "loss": arm.final_loss,
            "dll_percent": pair and pair.dll_percent,
            "dppx_percent": pair and pair.dppx_percent,
            "diff": pair and pair.diff,
            "diff_low": pair and pair.low,
            "diff_high": pair and pair.high,
            "p_holm": pair and pair.p_holm,
        }
        yield {"arm": arm.name, "label": arm.label, "printed": arm.paper, "ours": ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=Path("runs/table1"), help="folder of the finished study")
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    args = parser.parse_args()
    results = load(args.study)
    found = {**compact_evidence(results), "table": list(beside(results))}
    write_atomic(args.out, json.dumps(found, indent=1) + "\n")
    for line in found["table"]:
        printed, ours = line["printed"] or {}, line["ours"]
        print(
            f"{line['label']:24} printed {printed.get('val_loss', '-'):>7} {printed.get('dll', '-'):>7}   "
            f"here {ours['loss']} {ours['dll_percent']}"
        )


if __name__ == "__main__":
    main()
