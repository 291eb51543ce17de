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
from qurve.runfolder import RunFolder, write_atomic
from qurve.study.definition import Arm, Study
from qurve.study.execute import run_study
from qurve.study.jobs import run_path
from qurve.train.data import open_data

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
FLOORS = (0.1, 0.3, 1.0)
"""The schedule's floor as a share of the peak."""
SEEDS = (101, 102)
EVIDENCE = Path(__file__).parents[1] / "src" / "qurve" / "small-search.json"


def points() -> list[tuple[str, float, float]]:
    return [(arm, rate, rate * floor) for arm in presets.SMALL_MODELS for rate in RATES for floor in FLOORS]


def point_name(arm: str, lr: float, min_lr: float) -> str:
    return f"{arm}@{lr:g}-{min_lr:g}"


STUDY = Study(
    "small-search",
    "Learning rate and floor of the small arms",
    tuple(Arm(point_name(*point), point_name(*point), presets.small(*point)) for point in points()),
    SEEDS,
    baseline=point_name(*points()[0]),
)


def evidence(folder: Path) -> dict[str, object]:
    """Every point's validation losses, and each arm's best point by the mean over the seeds."""
    scores = []
    for arm, lr, min_lr in points():
        for seed in SEEDS:
            run = RunFolder(run_path(folder, point_name(arm, lr, min_lr), seed))
            status = run.status()["status"]
            loss = run.eval_lines()[-1]["loss"] if status == "finished" else None
            scores.append(
                {"arm": arm, "train.lr": lr, "train.min_lr": min_lr, "seed": seed, "val_loss": loss, "status": status}
            )
    chosen = {arm: best_point([score for score in scores if score["arm"] == arm]) for arm in presets.SMALL_MODELS}
    environment = run.environment()
    config = STUDY.run_config(STUDY.arms[0], SEEDS[0])
    return {
        "evidence": "results/small-search.json",
        "steps": config.train.steps,
        "tokens_per_step": config.train.tokens_per_step,
        "data_fingerprint": run.config_json()[0]["data"]["fingerprint"],
        "machine": {key: environment[key] for key in ("cpu", "cores", "torch", "precision", "threads", "compiled")},
        "seeds": SEEDS,
        "chosen": chosen,
        "scores": scores,
    }


def best_point(scores: list[dict[str, object]]) -> dict[str, object]:
    """The point of lowest mean loss; one that diverged with any seed is out."""
    means = {}
    for lr, min_lr in dict.fromkeys((score["train.lr"], score["train.min_lr"]) for score in scores):
        losses = [s["val_loss"] for s in scores if (s["train.lr"], s["train.min_lr"]) == (lr, min_lr)]
        if None not in losses:
            means[lr, min_lr] = sum(losses) / len(losses)
    (lr, min_lr), loss = min(means.items(), key=lambda item: item[1])
    return {"train.lr": lr, "train.min_lr": min_lr, "val_loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/small-search"))
    out = parser.parse_args().out
    data = open_data(STUDY.arms[0].config.data, out / "data")
    failed = run_study(STUDY, out, data, command="python experiments/small_search.py")
    if failed:
        raise SystemExit(f"{len(failed)} runs failed: {failed}")
    found = evidence(out)
    write_atomic(EVIDENCE, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["chosen"], indent=1))


if __name__ == "__main__":
    main()
