"""What runs recorded of their blocks on the way (`train.dynamics_every`), as curves: one picture for each question, one
panel for each block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qurve.study.curves import Curve
    from qurve.study.results import Run, StudyResults

Measures = dict[str, tuple[float | None, ...]]
"""A measure's value in each block; None where a block has no such thing."""

MOST_PANELS = 6
"""Blocks that a picture shows: of more, the first, the last and some evenly between them."""


@dataclass(frozen=True)
class Line:
    measure: str
    label: str


@dataclass(frozen=True)
class Picture:
    """Several measures of one kind; the first is drawn solid, the others dashed and dotted."""

    name: str
    axis: str
    lines: tuple[Line, ...]
    says: str
    """What it shows, in a sentence or two."""


def _pathways(measure: str, label: str = "W_{}") -> tuple[Line, ...]:
    return tuple(
        Line(f"{name}.{measure}", label.format(letter))
        for name, letter in (("query", "Q"), ("key", "K"), ("value", "V"))
    )


PICTURES = (
    Picture(
        "dynamics-norms",
        "Frobenius norm",
        _pathways("norm"),
        "Frobenius norm of the query, key and value weight. A nonlinear projection has no one weight: in its place "
        "stands its mean Jacobian, the linear map that it is on average.",
    ),
    Picture(
        "dynamics-ranks",
        "stable rank",
        _pathways("stable_rank"),
        "Stable rank ‖W‖²(Frobenius) / ‖W‖²(spectral) of the same: how many directions a weight acts in.",
    ),
    Picture(
        "dynamics-matrix-norms",
        "Frobenius norm",
        (Line("query.w1.norm", "W1"), Line("query.w2.norm", "W2"), Line("query.weight.norm", "W")),
        "Frobenius norm of the matrices that nonlinear and anchored queries are made of.",
    ),
    Picture(
        "dynamics-matrix-ranks",
        "stable rank",
        (Line("query.w1.stable_rank", "W1"), Line("query.w2.stable_rank", "W2"), Line("query.weight.stable_rank", "W")),
        "Stable rank of the same matrices.",
    ),
    Picture(
        "dynamics-f",
        "|f| / |x|",
        _pathways("f_to_x", "{}"),
        "How large f is beside x in Q(x) = c (x + f(x)), mean over tokens.",
    ),
    Picture(
        "dynamics-cosine",
        "cosine of f and x",
        _pathways("cosine", "{}"),
        "Cosine of the angle between f(x) and x, mean over tokens: 0 where f adds other directions, -1 where it takes "
        "x away.",
    ),
    Picture(
        "dynamics-entropy",
        "entropy (nats)",
        (Line("attention.entropy", "entropy"),),
        "Entropy of the attention weights, mean over heads and tokens. A fall to zero is a collapse to single tokens.",
    ),
    Picture(
        "dynamics-logits",
        "largest logit",
        (Line("attention.max_logit", "largest logit"),),
        "The largest attention logit before the softmax.",
    ),
    Picture(
        "dynamics-dead",
        "share of dead units",
        (Line("query.dead_units", "the query's f"), Line("mlp.dead_units", "MLP")),
        "Share of the hidden units whose activation stays within 0.01 of zero at every token measured.",
    ),
    Picture(
        "dynamics-gradients",
        "gradient norm",
        (Line("block.gradient", "whole block"), *_pathways("gradient", "{}")),
        "Norm of the step's gradient before clipping: of all of the block's parameters, and of its queries', keys' and "
        "values'.",
    ),
)


def measures_of(lines: Mapping[int, Mapping[str, Any]]) -> tuple[tuple[int, Measures], ...]:
    """(step, measures), ascending, of the training lines that have them. Raises `ValueError`, `TypeError` or
    `AttributeError` for what no run writes."""
    return tuple(
        (step, {name: tuple(map(_checked, values)) for name, values in line["dynamics"].items()})
        for step, line in sorted(lines.items())
        if "dynamics" in line
    )


def _checked(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no measure")
    return float(value)


def pictures_of(results: StudyResults) -> list[Picture]:
    """The pictures that the study has something for, each with the measures that some run recorded."""
    recorded, shown = set[str](), panels(results)
    for run in results.runs:
        for _, measures in run.dynamics:
            for measure, values in measures.items():
                if any(value is not None for block in shown for value in values[block : block + 1]):
                    recorded.add(measure)
    lines = {picture: tuple(line for line in picture.lines if line.measure in recorded) for picture in PICTURES}
    return [dataclasses.replace(picture, lines=found) for picture, found in lines.items() if found]


def panels(results: StudyResults) -> list[int]:
    """The blocks that are shown, from 0."""
    lengths = [len(values) for run in results.runs for _, measures in run.dynamics for values in measures.values()]
    blocks = max(lengths, default=0)
    if blocks <= MOST_PANELS:
        return list(range(blocks))
    return [round(i * (blocks - 1) / (MOST_PANELS - 1)) for i in range(MOST_PANELS)]


def curve_of(run: Run, measure: str, block: int) -> Curve:
    """One measure of one block against the steps; empty where it was not recorded."""
    values = ((step, measures.get(measure, ())[block : block + 1]) for step, measures in run.dynamics)
    return [(step, value[0]) for step, value in values if value and value[0] is not None]


def curves_of(runs: Sequence[Run], measure: str, block: int) -> list[Curve]:
    """Of the runs that recorded it."""
    return [found for run in runs if (found := curve_of(run, measure, block))]
