"""How much of attention is the term `x . x'` that identity anchors in queries and keys leave without a weight?

Reads the trained arms of `qurve compare zoo` that have both, and their untrained starts, on validation text:

    python experiments/self_similarity.py --zoo runs/zoo
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from qurve.analysis.self_similarity import self_similarity
from qurve.data.loader import TokenData
from qurve.data.order import fixed_eval_windows
from qurve.files import write_atomic
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.study.jobs import run_path

ARMS = ("key-identity", "hyper-pathways")
WINDOWS = 64
EVIDENCE = Path(__file__).parents[1] / "results" / "self-similarity.json"


def measure(model: GPT, ids_BT: torch.Tensor) -> dict[str, object]:
    """Means over all heads, and by block."""
    heads = self_similarity(model.eval(), ids_BT)
    layers = sorted({head.layer for head in heads})
    found: dict[str, object] = {}
    for name in ("share", "correlation", "self_weight"):
        by_layer = [
            sum(values) / len(values)
            for values in ([getattr(head, name) for head in heads if head.layer == layer] for layer in layers)
        ]
        found[name] = {"mean": sum(by_layer) / len(by_layer), "by_layer": by_layer}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", type=Path, required=True, help="folder of `qurve compare zoo`")
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    args = parser.parse_args()
    split = TokenData.open(args.zoo / "data").split("val")
    arms = {}
    for arm in ARMS:
        folder = run_path(args.zoo, arm, 1)
        trained = GPT.from_run(folder)
        context = trained.config.context
        inputs, _ = split.windows(fixed_eval_windows(len(split), context=context, count=WINDOWS), context)
        ids_BT = torch.from_numpy(inputs)
        start = GPT(trained.config, seed=1)
        arms[arm] = {
            "steps": RunFolder(folder).last_step(),
            "start": measure(start, ids_BT),
            "trained": measure(trained, ids_BT),
        }
        print(arm, json.dumps(arms[arm], indent=1))
    evidence = {"windows": WINDOWS, "split": "val", "torch": torch.__version__, "arms": arms}
    write_atomic(args.out, json.dumps(evidence, indent=2) + "\n")


if __name__ == "__main__":
    main()
