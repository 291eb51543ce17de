"""Where does training hold? Maps over learning rate and weight decay, and the published claims judged by them.

A map is of one architecture: a study that makes one names its arms `NAME@POINT` (`res-gelu@0.008-0.1`), all arms of one
NAME alike but for peak rate, floor and decay. Rates are compared across scales as multiples of the baseline's, which is
the rate of the study's baseline arm; the paper's is 6e-4.

A point is *stable* when every seed finished, none diverged, and the mean final loss is at most `WORSE` nats
above the architecture's best in the map. The last condition is for rates above that best one alone: a lower rate that
ends higher is slow. Whatever is said here holds for the study's size, data and training length alone.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qurve.errors import BadInput
from qurve.runfolder import RunFolder
from qurve.study.jobs import run_path
from qurve.study.results import Arm, Run, StudyResults

WORSE = 0.1
"""Nats per token above the best final loss, from which a rate beyond the best one counts as unstable."""
SPIKE = 5.0
SPIKE_WINDOW = 100
"""A spike is a step whose gradient norm exceeds `SPIKE` times the median of the `SPIKE_WINDOW` steps before it; the
first `SPIKE_WINDOW` steps, which have fewer before them, are not judged."""
NEAR = 1.1
"""Rates within this factor are taken for the same when a claim is judged."""
PAPER_RATE = 6e-4
"""The paper's baseline's: what its rates are multiples of."""


@dataclass(frozen=True)
class Ending:
    """One run as a map takes it: where it was tried, and how it ended."""

    arm: str
    """The architecture."""
    lr: float
    weight_decay: float
    seed: int
    status: str
    """As in `results.Run`."""
    step: int
    """Updates done."""
    start_loss: float | None
    """Validation loss before training."""
    loss: float | None
    """The last loss of a finished run, on the split that the study reports on."""
    spikes: int | None
    max_logit: float | None
    """The largest attention logit of any block at any evaluation; None where none was measured."""


@dataclass(frozen=True)
class Cell:
    """All seeds at one rate and decay."""

    lr: float
    weight_decay: float
    endings: tuple[Ending, ...]

    @property
    def loss(self) -> float | None:
        """Mean final loss; None unless every seed finished."""
        losses = [ending.loss for ending in self.endings]
        return None if None in losses else statistics.fmean(loss for loss in losses if loss is not None)

    @property
    def ended(self) -> bool:
        """Whether every seed finished or diverged."""
        return all(ending.loss is not None or ending.status == "diverged" for ending in self.endings)

    @property
    def diverged(self) -> float:
        """Share of the seeds that diverged."""
        return sum(ending.status == "diverged" for ending in self.endings) / len(self.endings)

    @property
    def diverged_after(self) -> tuple[int, ...]:
        """The last whole step of each run that diverged."""
        return tuple(ending.step for ending in self.endings if ending.status == "diverged")

    @property
    def spikes(self) -> float | None:
        """Gradient-norm spikes a run, mean over the seeds that trained."""
        found = [ending.spikes for ending in self.endings if ending.spikes is not None]
        return statistics.fmean(found) if found else None

    @property
    def max_logit(self) -> float | None:
        return max((e.max_logit for e in self.endings if e.max_logit is not None), default=None)


@dataclass(frozen=True)
class Map:
    """Learning rate x weight decay for one architecture."""

    arm: str
    cells: dict[tuple[float, float], Cell]
    """(lr, weight_decay) -> what came of it."""

    @property
    def rates(self) -> list[float]:
        return sorted({lr for lr, _ in self.cells})

    @property
    def decays(self) -> list[float]:
        return sorted({decay for _, decay in self.cells})

    @property
    def best(self) -> Cell | None:
        """The point of the lowest mean final loss."""
        whole = [(loss, cell.lr, cell) for cell in self.cells.values() if (loss := cell.loss) is not None]
        return min(whole, key=lambda found: found[:2])[2] if whole else None

    @property
    def start_loss(self) -> float | None:
        """Mean validation loss before training, over all runs."""
        found = [e.start_loss for cell in self.cells.values() for e in cell.endings if e.start_loss is not None]
        return statistics.fmean(found) if found else None

    def stable(self, lr: float, weight_decay: float) -> bool | None:
        """By the rule at the top of this file; None where the point was not run to an end (or at all)."""
        cell, best = self.cells.get((lr, weight_decay)), self.best
        if cell is None or not (cell.ended or cell.diverged):
            return None
        if cell.diverged or best is None or best.loss is None or cell.loss is None:
            return False
        return lr <= best.lr or cell.loss <= best.loss + WORSE

    def largest_stable(self, weight_decay: float) -> float | None:
        """The largest rate up to which every rate tried at this decay is stable; None where the lowest is not.

        Where it is the largest tried, a larger one may be stable too.
        """
        largest = None
        for lr in self.rates:
            if (lr, weight_decay) in self.cells:
                if not self.stable(lr, weight_decay):
                    break
                largest = lr
        return largest

    def sensitivity(self, weight_decay: float) -> float | None:
        """Learning-rate sensitivity: the mean over the rates tried of `min(L(lr), L_0) - min L`, in nats per token.

        `L_0` is the loss before training, which a diverged run counts as; `min L` is over the same rates. None unless
        every rate was run to an end and some rate finished with every seed. It depends on the rates: compare it over
        equal ones alone. Source: Wortsman et al., arXiv 2309.14322, section 2.2.
        """
        cells = [cell for cell in self.cells.values() if cell.weight_decay == weight_decay]
        start = self.start_loss
        if start is None or not all(cell.ended for cell in cells) or all(cell.loss is None for cell in cells):
            return None
        capped = [
            statistics.fmean(start if ending.loss is None else min(ending.loss, start) for ending in cell.endings)
            for cell in cells
        ]
        return statistics.fmean(capped) - min(capped)


# ------------------------------------------------------------------------------------------------------------- reading


def maps_of(endings: Iterable[Ending]) -> dict[str, Map]:
    """One map for each architecture, in the order in which they come."""
    points: dict[str, dict[tuple[float, float], list[Ending]]] = {}
    for ending in endings:
        points.setdefault(ending.arm, {}).setdefault((ending.lr, ending.weight_decay), []).append(ending)
    return {
        arm: Map(arm, {point: Cell(*point, tuple(found)) for point, found in sorted(cells.items())})
        for arm, cells in points.items()
    }


def endings_of(results: StudyResults) -> list[Ending]:
    """Every run of a study, by architecture. Raises `BadInput` where one name stands for different ones."""
    first: dict[str, Arm] = {}
    found = []
    for arm in results.arms:
        name = architecture(arm.name)
        if (other := first.setdefault(name, arm)).config.get("model") != arm.config.get("model"):
            raise BadInput(
                f"{other.name} and {arm.name} are one architecture by their names, and their models differ; "
                "name what stands before the @ after the model"
            )
        for run in arm.runs.values():
            found.append(dataclasses.replace(ending_of(results, arm, run), arm=name))
    return found


def architecture(arm: str) -> str:
    """What stands before the `@` of an arm's name."""
    return arm.partition("@")[0]


def ending_of(results: StudyResults, arm: Arm, run: Run) -> Ending:
    """One run as it ended, under its own arm's name."""
    lines = []
    if run.status not in ("missing", "damaged"):
        lines = list(RunFolder(run_path(results.folder, arm.name, run.seed)).metrics())
    norms = {line["step"]: line["grad_norm"] for line in lines if "split" not in line}  # of a repeated step the last
    logits = [logit for line in lines for logit in line.get("max_logit") or () if logit is not None]
    start = [loss for step, loss in run.val if step == 0]
    return Ending(
        arm=arm.name,
        lr=_setting(arm, "train.lr"),
        weight_decay=_setting(arm, "train.weight_decay"),
        seed=run.seed,
        status=run.status,
        step=run.step,
        start_loss=start[0] if start else None,
        loss=run.final_loss,
        spikes=len(spikes([norm for _, norm in sorted(norms.items())])) if norms else None,
        max_logit=max(logits, default=None),
    )


def _setting(arm: Arm, path: str) -> Any:
    if (value := arm.setting(path)) is None:
        raise BadInput(f"the configuration of the arm {arm.name} has no {path}, by which a map is made")
    return value


def spikes(grad_norms: Sequence[float]) -> list[int]:
    """Places (from 0) of the spikes in a run's gradient norms, by the rule at `SPIKE`."""
    import numpy as np

    norms = np.asarray(grad_norms, dtype=np.float64)
    if len(norms) <= SPIKE_WINDOW:
        return []
    before = np.lib.stride_tricks.sliding_window_view(norms[:-1], SPIKE_WINDOW)
    found: list[int] = (
        SPIKE_WINDOW + np.flatnonzero(norms[SPIKE_WINDOW:] > SPIKE * np.median(before, axis=1))
    ).tolist()
    return found


# -------------------------------------------------------------------------------------------------------------- claims


@dataclass(frozen=True)
class Claim:
    """What was published of one architecture at one rate and decay."""

    text: str
    source: str
    arm: str
    lr: float
    """At the paper's scale."""
    weight_decay: float
    says: Literal["stable", "diverges", "disputed"]

    @property
    def multiple(self) -> float:
        """Its rate in multiples of the paper's baseline's."""
        return self.lr / PAPER_RATE


NOTE = (
    "Judged at this study's scale alone: what is said to happen late in a long training cannot be ruled out by a "
    "shorter one."
)
PAPER = "arXiv 2603.13381"
CLAIMS: tuple[Claim, ...] = (
    Claim("trained to the end", f"{PAPER}, table 1", "baseline", PAPER_RATE, 0.1, "stable"),
    Claim("diverges before step 20,000 of 60,000", f"{PAPER}, section 2.2", "baseline", PAPER_RATE, 0.05, "diverges"),
    Claim(
        "follows from the divergence at 0.05, if less decay is no cure",
        f"{PAPER}, section 2.2",
        "baseline",
        PAPER_RATE,
        2**-5,
        "diverges",
    ),
    Claim(
        "follows from the divergence at 0.05, if less decay is no cure",
        f"{PAPER}, section 2.2",
        "baseline",
        PAPER_RATE,
        0.0,
        "diverges",
    ),
    Claim("trained to the end", f"{PAPER}, table 1", "res-gelu", 4e-3, 0.1, "stable"),
    Claim("stable up to this rate", f"{PAPER}, section 2.2", "res-gelu", 2.4e-3, 0.05, "stable"),
    Claim("stable only up to 2.4e-3", f"{PAPER}, section 2.2", "res-gelu", 3e-3, 0.05, "diverges"),
    Claim(
        "stable in the first version at 5 times the baseline's rate; by the second, less decay needs lower rates",
        f"{PAPER}, versions 1 and 2",
        "res-gelu",
        3e-3,
        2**-5,
        "disputed",
    ),
    Claim("tolerates 2.7 times the baseline's rate", "arXiv 2510.23912", "identity", 2.7 * PAPER_RATE, 0.1, "stable"),
    Claim("tolerates 3.7 times the baseline's rate", "arXiv 2510.23912", "identity", 3.7 * PAPER_RATE, 0.1, "stable"),
    Claim("stable at a third of the usual decay", "arXiv 2510.23912", "identity", PAPER_RATE, 2**-5, "stable"),
)
"""To confirm or refute at each scale. `identity` is `W_Q = I`."""


@dataclass(frozen=True)
class Judgement:
    """A claim against one study, at its scale alone."""

    claim: Claim
    verdict: Literal["confirmed", "refuted", "disputed", "not run"]
    """`disputed` where the sources disagree: then `found` takes a side, for this scale."""
    found: Literal["stable", "unstable"] | None
    lr: float
    """The rate looked at: the point's, or the one wanted where there is none."""
    seeds: int
    why: str


def judge(claim: Claim, map_: Map | None, base_rate: float) -> Judgement:
    """Confirm or refute a claim by the map of its architecture.

    `base_rate` is the baseline's rate at the map's scale: looked at is the point nearest to the claim's multiple of it,
    within a factor of `NEAR`, at the claim's decay.
    """
    wanted = claim.multiple * base_rate
    near = [
        cell
        for cell in (map_.cells.values() if map_ else ())
        if math.isclose(cell.weight_decay, claim.weight_decay) and cell.lr <= wanted * NEAR and wanted <= cell.lr * NEAR
    ]
    if map_ is None or not near:
        return Judgement(claim, "not run", None, wanted, 0, "no point of the map is near it")
    cell = min(near, key=lambda cell: abs(cell.lr - wanted))
    stable, n = map_.stable(cell.lr, cell.weight_decay), len(cell.endings)
    if stable is None:
        return Judgement(claim, "not run", None, cell.lr, n, "its runs have not come to an end")
    verdict: Literal["confirmed", "refuted", "disputed"] = "disputed"
    if claim.says != "disputed":
        verdict = "confirmed" if stable == (claim.says == "stable") else "refuted"
    return Judgement(claim, verdict, "stable" if stable else "unstable", cell.lr, n, _why(map_, cell))


def _why(map_: Map, cell: Cell) -> str:
    if cell.diverged:
        after = ", ".join(f"{step:,}" for step in cell.diverged_after)
        return f"{len(cell.diverged_after)} of {len(cell.endings)} seeds diverged, after step {after}"
    assert map_.best is not None
    assert map_.best.loss is not None
    assert cell.loss is not None
    above, steps = cell.loss - map_.best.loss, max(ending.step for ending in cell.endings)
    return f"finished {steps:,} steps {above:.3f} nats above its best, which is at rate {map_.best.lr:g}"


def judgements(results: StudyResults, maps: dict[str, Map]) -> list[Judgement]:
    """Every published claim against a study. The unit of rates is its baseline arm's."""
    return [judge(claim, maps.get(claim.arm), _setting(results.baseline, "train.lr")) for claim in CLAIMS]


def scale_of(results: StudyResults) -> str:
    """What the judgements hold for, in words."""
    base = results.baseline
    steps, tokens = (_setting(base, f"train.{name}") for name in ("steps", "tokens_per_step"))
    return f"{base.non_embedding:,} non-embedding parameters, {steps:,} steps of {tokens:,} tokens"


# ------------------------------------------------------------------------------------------------------------ evidence


def evidence(results: StudyResults) -> dict[str, Any]:
    """Maps, sensitivities, largest stable rates and judgements as a tree for JSON."""
    maps = maps_of(endings_of(results))
    return {
        "study": results.name,
        "command": results.command,
        "scale": scale_of(results),
        "note": NOTE,
        "seeds": list(results.seeds),
        "base_rate": _setting(results.baseline, "train.lr"),
        "rules": {"worse_nats": WORSE, "spike": SPIKE, "spike_window": SPIKE_WINDOW, "near": NEAR},
        "maps": [_map_tree(map_) for map_ in maps.values()],
        "claims": [
            {
                **{key: getattr(j.claim, key) for key in ("arm", "lr", "multiple", "weight_decay", "text", "source")},
                "says": j.claim.says,
                "verdict": j.verdict,
                "found": j.found,
                "judged_at": j.lr,
                "seeds": j.seeds,
                "why": j.why,
            }
            for j in judgements(results, maps)
        ],
    }


def _map_tree(map_: Map) -> dict[str, Any]:
    return {
        "arm": map_.arm,
        "start_loss": map_.start_loss,
        "by_decay": [
            {
                "weight_decay": decay,
                "sensitivity": map_.sensitivity(decay),
                "largest_stable_lr": (largest := map_.largest_stable(decay)),
                "largest_tried": largest == map_.rates[-1],
            }
            for decay in map_.decays
        ],
        "cells": [
            {
                "lr": cell.lr,
                "weight_decay": cell.weight_decay,
                "loss": cell.loss,
                "diverged": cell.diverged,
                "diverged_after": list(cell.diverged_after),
                "spikes": cell.spikes,
                "max_logit": cell.max_logit,
                "stable": map_.stable(cell.lr, cell.weight_decay),
            }
            for cell in map_.cells.values()
        ],
    }
