"""An equal, small search: which learning rate and floor suit each of the small arms?

Every arm gets the same grid of peak rates and floors and the same seeds, none of which `qurve compare` uses. Each arm's
lowest mean validation loss wins. Writes the evidence that the presets `small/*` read their rates from:

    python experiments/small_search.py --out runs/small-search
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from qurve import presets
from qurve.runfolder import write_atomic
from qurve.study.definition import LABELS, Arm, Study
from qurve.study.execute import run_search
from qurve.study.search import Search
from qurve.train.data import open_data

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
FLOORS = (0.1, 0.3, 1.0)
"""The schedule's floor as a share of the peak."""
EVIDENCE = Path(__file__).parents[1] / "src" / "qurve" / "small-search.json"

STUDY = Study(
    "small-search",
    "Learning rate and floor of the small arms",
    tuple(Arm(arm, LABELS[arm], presets.small(arm, RATES[0], RATES[0])) for arm in presets.SMALL_MODELS),
    search=Search({"train.lr": RATES, "train.min_lr/train.lr": FLOORS}, seeds=(101, 102)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/small-search"))
    out = parser.parse_args().out
    data = open_data(STUDY.arms[0].config.data, out / "data")
    found, failed = run_search(STUDY, out, data)
    if failed:
        raise SystemExit(f"{len(failed)} runs failed: {failed}")
    write_atomic(EVIDENCE, json.dumps({"evidence": "results/small-search.json", **found}, indent=1) + "\n")
    print(json.dumps(found["chosen"], indent=1))


if __name__ == "__main__":
    main()
