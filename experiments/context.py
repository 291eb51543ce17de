"""Does the gain hold elsewhere? {linear, nonlinear} x {learned, rotary} x {no gate, output gate}, and the modern block.

The modern block is Llama's: RMSNorm, gated feed-forward, grouped queries, rotary positions. The yardstick is one that
the paper cites: rotary in place of learned positions were worth 1.78 % of the log-loss. Linear queries train at the
baseline's rate and nonlinear ones at the layer's, wherever they stand: no search was made for other surroundings. At
the small scale no rate decays (`min_lr` = `lr`).

12 arms with three seeds: 36 runs of about 50 s. `PAPER` is the same at the paper's scale.

    qurve compare experiments/context.py --out runs/context
    python experiments/context.py --study runs/context
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qurve import presets
from qurve.files import write_atomic
from qurve.model.feed_forward import Gated
from qurve.model.positions import Rope
from qurve.projections import Bottleneck, Linear
from qurve.study.definition import Arm, Study
from qurve.study.evidence import compact_evidence
from qurve.study.results import StudyResults, load
from qurve.study.statistics import rows_between
from qurve.study.tables import chance, difference_in_words, signed
from qurve.train.config import RunConfig
from qurve.zoo.projections import GatedOutput

EVIDENCE = Path(__file__).parents[1] / "results" / "context.json"

YARDSTICK = {
    "what": "rotary in place of learned positions, 125 M parameters, about 30 B tokens of OpenWebText2",
    "dll_percent": 1.78,
    "losses": [2.809, 2.759],
    "source": "arXiv 2603.13381, section 2.2, after EleutherAI",
}
QUERIES = {"linear": ("Linear", Linear()), "nonlinear": ("Res. GELU", Bottleneck())}
LLAMA_768: dict[str, Any] = {
    "n_kv_heads": 4,
    "norm": "rmsnorm",
    "mlp": Gated(),
    "d_ff": 2048,
    "positions": Rope(theta=5e5),
}


def surroundings(modern: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """What is around the query, by the end of an arm's name: label and changes to the model."""
    gate = {"output": GatedOutput()}
    blocks = {"": ("", {}), "+rope": ("rotary", {"positions": Rope()}), "+modern": ("modern block", modern)}
    return {
        block + gated: (
            ", ".join(filter(None, (label, gated and "output gate"))),
            {**changes, **(gate if gated else {})},
        )
        for block, (label, changes) in blocks.items()
        for gated in ("", "+gate")
    }


def contexts(name: str, title: str, runs: dict[str, RunConfig], modern: dict[str, Any]) -> Study:
    """The study; `runs` has the training of each query, `modern` the modern block."""
    arms = []
    for end, (where, changes) in surroundings(modern).items():
        for query, (label, projection) in QUERIES.items():
            model = dataclasses.replace(runs["linear"].model, query=projection, **changes)
            config = dataclasses.replace(runs[query], model=model)
            arms.append(Arm(query + end, f"{label}, {where}" if where else label, config))
    return Study(name, title, tuple(arms), baseline="linear")


STUDY = contexts(
    "context",
    "The nonlinear query in other surroundings, at about a million parameters",
    {"linear": presets.get("small/baseline"), "nonlinear": presets.get("small/res-gelu")},
    presets.MODERN_MODELS["llama"],
)
PAPER = contexts(
    "context-paper",
    "The nonlinear query in other surroundings, at the paper's scale",
    {"linear": presets.get("paper/baseline"), "nonlinear": presets.get("paper/res-gelu-best")},
    LLAMA_768,
)


def gains(results: StudyResults) -> list[dict[str, Any]]:
    """The nonlinear query, rotary positions and the gate, each where all else is alike: one family of tests."""
    arms = {arm.name: arm for arm in results.arms}
    changes = [
        (what, name, other)
        for name in arms
        for what, old, new in (("query", "linear", "nonlinear"), ("rotary", "", "+rope"), ("gate", "", "+gate"))
        if (other := _with(name, what, old, new)) in arms
    ]
    rows = rows_between(results, [(arms[before], arms[after]) for _, before, after in changes])
    left_out = ("arm", "flops_per_token")
    return [
        {"of": what, "from": before, "to": after, **{key: row[key] for key in row if key not in left_out}}
        for (what, before, after), row in zip(changes, rows, strict=True)
    ]


def _with(name: str, what: str, old: str, new: str) -> str | None:
    """The name of the arm in which `new` takes the place of `old`; None where it has no place."""
    query, *around = name.split("+")
    if what == "query":
        return "+".join([new, *around]) if query == old else None
    if new.strip("+") in around or (what == "rotary" and "modern" in around):
        return None
    return "+".join([query, *sorted([*around, new.strip("+")], key=("rope", "modern", "gate").index)])


def in_words(found: list[dict[str, Any]]) -> Iterator[str]:
    """The gains for the terminal."""
    yield "Relative log-loss: plus is a gain. Difference in nats per token with its own 95 % interval: minus is a gain."
    for gain in found:
        dll, difference = signed(gain["dll_percent"], 2, "%"), difference_in_words(gain)
        of = f"{gain['of']}: {gain['from']} -> {gain['to']}"
        p = f"p = {chance(gain['p_holm'])} (Holm)"
        yield f"{of}: {dll}, {difference}, n = {gain['seeds_n']}, {p}; {gain['verdict']}"
    yield f"yardstick: {signed(YARDSTICK['dll_percent'], 2, '%')}, {YARDSTICK['what']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=Path("runs/context"), help="folder of the finished study")
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    args = parser.parse_args()
    results = load(args.study)
    found = {**compact_evidence(results), "gains": gains(results), "yardstick": YARDSTICK}
    write_atomic(args.out, json.dumps(found, indent=1) + "\n")
    print("\n".join(in_words(found["gains"])))


if __name__ == "__main__":
    main()
