"""What the theory's measures find in trained models: redundancy, symmetry, geometry, dynamics and mechanism.

The paper's three architectures and `W_Q = I` at about a million parameters, and a norm-free baseline with a skip over
attention alone, where theorems let every query be absorbed: 15 runs of about a minute, which keep checkpoints and
record dynamics. Then every `qurve analyze` command looks into them, and leaves pages and figures in the run's folder,
to which the report leads.

    qurve compare experiments/theory.py --out runs/theory
    python experiments/theory.py --study runs/theory
    qurve report runs/theory
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from qurve import presets
from qurve.analysis.logit_growth import growth_by_arm
from qurve.cli.analyze.geometry import geometry
from qurve.cli.analyze.mechanism import mechanism
from qurve.cli.analyze.redundancy import redundancy
from qurve.cli.analyze.symmetry import symmetry
from qurve.files import write_atomic
from qurve.model.residual import Skip
from qurve.projections import Identity
from qurve.study.curves import band, thinned
from qurve.study.definition import LABELS, Arm, Study
from qurve.study.dynamics import curves_of, panels
from qurve.study.evidence import compact_evidence
from qurve.study.page.sections import ANALYSIS
from qurve.study.provenance import folder_of
from qurve.study.results import Run, StudyResults, load

RESULTS = Path(__file__).parents[1] / "results"
LAYER = "res-gelu"
STEPS_SHOWN = 6
"""Of the recorded dynamics."""
Tree = dict[str, Any]


def small(arm: str, preset: str, label: str, **model: Any) -> Arm:
    config = presets.get(preset)
    train = dataclasses.replace(config.train, keep_every=80, dynamics_every=20)
    return Arm(arm, label, dataclasses.replace(config, model=dataclasses.replace(config.model, **model), train=train))


HALVED = presets.get("small/baseline").model.scale / 2  # as the authors do with W_Q = I
STUDY = Study(
    "theory",
    "What the theory's measures find, at about a million parameters",
    (
        *(small(arm, f"small/{arm}", LABELS[arm]) for arm in ("baseline", "mlp-4.75", LAYER)),
        small("identity", "small/baseline", "W_Q = I", query=Identity(), attention_scale=HALVED),
        small(
            "attention-skip", "small/baseline", "Norm-free, one skip", residual=Skip("none", attention=True, mlp=False)
        ),
    ),
)


def analysed(command: Callable[..., int], folder: Path, out: Path, **options: Any) -> Tree:
    """What one of the commands leaves of a run or study."""
    command(folder, out=out, **options)
    found: Tree = json.loads((out / f"{command.__name__}.json").read_text(encoding="utf-8"))
    return found


def of_run(results: StudyResults, run: Run) -> Tree:
    """Every command's findings, without what only a page needs."""
    folder, out = folder_of(results, run), folder_of(results, run) / ANALYSIS
    seeds = [seed for seed in results.seeds if seed != run.seed]
    beside = (results.folder / "runs" / run.arm / f"seed-{seeds[0]}",) if seeds else ()
    base = results.folder / "runs" / results.baseline.name / f"seed-{run.seed}"
    against = beside + ((base,) if run.arm == LAYER else ())
    return {
        "redundancy": _redundancy(analysed(redundancy, folder, out)),
        "symmetry": _symmetry(analysed(symmetry, folder, out)),
        "geometry": _geometry(analysed(geometry, folder, out, every_checkpoint=run.arm == LAYER)),
        "mechanism": _mechanism(analysed(mechanism, folder, out, against=against)),
    }


def _redundancy(tree: Tree) -> Tree:
    for verdict in tree["verdicts"]:
        verdict["obstacles"] = [obstacle["kind"] for obstacle in verdict["obstacles"]]
    worst = {one["kind"]: one for one in sorted(tree.pop("violations"), key=lambda one: one["size"])}
    return {**_without(tree, "run"), "worst_violations": worst}


def _symmetry(tree: Tree) -> Tree:
    """By block: means over the heads."""
    for block in tree["blocks"]:
        for pair in ("logits", "values"):
            known = [head["excess"] for head in block.pop(pair) or [] if head["excess"] is not None]
            block[f"{pair}_excess"] = fmean(known) if known else None
        for name in ("asymmetry", "logit_asymmetry"):
            block[name] = None if block[name] is None else fmean(block[name])
    return _without(tree, "run", "symmetries")


def _geometry(tree: Tree) -> list[Tree]:
    for layer in (layer for checkpoint in tree["checkpoints"] for layer in checkpoint["layers"]):
        for spectrum in (layer["qkv"], layer["input"], layer["query"], *layer["f"].values()):
            del spectrum["deviations"]
        for linear in ("key", "value"):
            layer.pop(linear, None), layer["curvature"].pop(linear, None)
    return list(tree["checkpoints"])


def _mechanism(tree: Tree) -> Tree:
    """Of conjunctions and of reweighting: means over pairs and concepts, by block."""
    for model in tree.get("probes", {}).values():
        model["conjunctions"] = [
            {
                "layer": layer,
                "pairs": len(pairs),
                **{name: fmean(pair[name] for pair in pairs) for name in ("x", "q", "q_shuffled", "gain")},
                "q_random": fmean(fmean(pair["q_random"]) for pair in pairs),
                "gained": sum(pair["low"] > 0 and pair["q"] > max(pair["q_random"]) for pair in pairs),
            }
            for layer, pairs in _by_layer(model["conjunctions"])
        ]
        model["reweighting"] = [
            {
                "layer": layer,
                **{name: fmean(one[name] for one in found) for name in ("spread", "turned", "by_concepts")},
                **{n: fmean(fmean(one[n]) for one in found) for n in ("random_matrices", "random_directions")},
            }
            for layer, found in _by_layer(model["reweighting"])
        ]
    for other in tree["attention"]:
        other["against"] = "/".join(Path(other["against"]).parts[-2:])
        keys = ("layer", "mean", "low", "high", "entropy", "partner_entropy")
        other["blocks"] = [{key: block[key] for key in keys} for block in other["blocks"]]
        for block in other["blocks"]:
            block |= {name: fmean(block[name]) for name in ("entropy", "partner_entropy")}
    return _without(tree, "run")


def _by_layer(rows: list[Tree]) -> Iterator[tuple[int, list[Tree]]]:
    for layer, group in itertools.groupby(rows, key=lambda row: row["layer"]):
        yield layer, list(group)


def _without(tree: Tree, *names: str) -> Tree:
    return {name: value for name, value in tree.items() if name not in names}


def dynamics(results: StudyResults) -> Tree:
    """arm -> measure -> block -> (step, mean over the finished seeds), at some steps; empty where it has none."""
    shown = panels(results)
    measures = {name for run in results.runs for _, record in run.dynamics for name in record}
    return {
        arm.name: {
            name: [thinned(band(curves_of(arm.finished, name, block)).mean, STEPS_SHOWN) for block in shown]
            for name in sorted(measures)
            if any(name in record for run in arm.finished for _, record in run.dynamics)
        }
        for arm in results.arms
    }


def logit_growth(stability: Path) -> Tree:
    """Of every architecture of `experiments/stability.py`: the power of the rate with which its largest logit grows,
    over all decays, from what did not diverge."""
    maps = json.loads(stability.read_text(encoding="utf-8"))["maps"]
    cells = [(one["arm"], cell) for one in maps for cell in one["cells"] if not cell["diverged"]]
    found = growth_by_arm((arm, cell["lr"], cell["max_logit"]) for arm, cell in cells)
    return {arm: dataclasses.asdict(growth) for arm, growth in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=Path("runs/theory"), help="folder of the finished study")
    parser.add_argument("--stability", type=Path, default=RESULTS / "stability.json", help="that study's evidence")
    parser.add_argument("--out", type=Path, default=RESULTS / "theory.json")
    args = parser.parse_args()
    results, growth = load(args.study), logit_growth(args.stability)  # what can be missing, before a long computing
    runs = {arm.name: {run.seed: of_run(results, run) for run in arm.finished} for arm in results.arms}
    found = {
        **compact_evidence(results),
        "runs": runs,
        "against_gains": _without(analysed(geometry, args.study, args.study / ANALYSIS), "study"),
        "dynamics": dynamics(results),
        "logit_growth": growth,
    }
    write_atomic(args.out, json.dumps(found, indent=1) + "\n")
    print(f"wrote {args.out}; pages and figures are in the runs' folders")


if __name__ == "__main__":
    main()
