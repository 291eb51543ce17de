"""Where does training hold? Maps over learning rate and weight decay, and what they show of the published claims.

A map is of one architecture: a study that makes one names its arms `NAME@POINT` (`res-gelu@0.008-0.1`), all arms of one
NAME alike but for peak rate, floor and decay. Rates are compared across scales as multiples of the baseline's, which is
the rate of the study's baseline arm; the paper's is 6e-4.

A point is in one of three states. It has *diverged* when a seed has. It is *stable* when every seed finished, and the
mean final loss is at most `WORSE` nats above the architecture's best in the map; a rate below the best one at its own
decay may end higher, which is slow, where that best one is as near and the losses fall up to this one and on to it.
Else it is on a *plateau*: that is quality, no divergence. This holds for the study's size, data and length alone.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qurve.errors import BadInput
from qurve.study.results import Arm, Run, StudyResults

WORSE = 0.1
"""Nats per token above the architecture's best final loss, beyond which a point counts as on a plateau."""
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
    schedule: int
    """Updates of the full schedule."""


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


State = Literal["stable", "plateau", "diverged"]


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

    def state(self, lr: float, weight_decay: float) -> State | None:
        """By the rule at the top of this file; None where the point was not run to an end (or at all)."""
        cell = self.cells.get((lr, weight_decay))
        if cell is None or not (cell.ended or cell.diverged):
            return None
        if cell.diverged:
            return "diverged"
        losses = {point: loss for point, one in self.cells.items() if (loss := one.loss) is not None}
        here = {rate: loss for (rate, decay), loss in losses.items() if decay == weight_decay}
        best, bound = min(here, key=here.__getitem__), min(losses.values()) + WORSE
        towards_best = [here[rate] for rate in sorted(here) if lr <= rate <= best]
        is_falling = towards_best == sorted(towards_best, reverse=True) and here[lr] <= min(
            loss for rate, loss in here.items() if rate <= lr
        )
        is_slow = lr < best and here[best] <= bound and is_falling
        return "stable" if here[lr] <= bound or is_slow else "plateau"

    def largest_stable(self, weight_decay: float) -> float | None:
        """The largest rate up to which every rate tried at this decay is stable; None where the lowest is not.

        Where it is the largest tried, a larger one may be stable too.
        """
        return self._largest(weight_decay, ("stable",))

    def largest_finished(self, weight_decay: float) -> float | None:
        """The same, where a plateau counts as well: nothing diverged."""
        return self._largest(weight_decay, ("stable", "plateau"))

    def _largest(self, weight_decay: float, states: Sequence[State]) -> float | None:
        largest = None
        for lr in self.rates:
            if (lr, weight_decay) in self.cells:
                if self.state(lr, weight_decay) not in states:
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
            found.append(dataclasses.replace(ending_of(arm, run), arm=name))
    return found


def architecture(arm: str) -> str:
    """What stands before the `@` of an arm's name."""
    return arm.partition("@")[0]


def ending_of(arm: Arm, run: Run) -> Ending:
    """One run as it ended, under its own arm's name."""
    return Ending(
        arm=arm.name,
        lr=arm.setting("train.lr"),
        weight_decay=arm.setting("train.weight_decay"),
        seed=run.seed,
        status=run.status,
        step=run.step,
        start_loss=next((loss for step, loss in run.val if step == 0), None),
        loss=run.final_loss,
        spikes=len(spikes(run.grad_norms)) if run.grad_norms else None,
        max_logit=run.max_logit,
        schedule=arm.setting("train.steps"),
    )


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
    """What was published of one architecture at one rate and decay, or what we infer from that."""

    text: str
    """What was published, in our words; of an inference, from what it follows."""
    source: str
    """Where."""
    arm: str
    lr: float
    """At the paper's scale."""
    weight_decay: float
    says: Literal["stable", "diverges"]
    standing: Literal["published", "disputed", "our inference"] = "published"
    """`disputed` where the sources do not agree. An inference is ours: whatever is found speaks for or against it, and
    not the paper."""
    before_step: int | None = None
    """The step that it speaks of; None where it is the end of the training."""

    @property
    def multiple(self) -> float:
        """Its rate in multiples of the paper's baseline's."""
        return self.lr / PAPER_RATE

    @property
    def says_in_words(self) -> str:
        what = "to be stable" if self.says == "stable" else "to diverge"
        return f"{'inferred' if self.standing == 'our inference' else 'said'} {what}"


NOTE = (
    "Seen at this study's scale alone. A run of so few steps can show a divergence, and cannot rule out one that comes "
    f"late in a training hundreds of times as long. A plateau (finished more than {WORSE:g} nats per token above the "
    "best loss, and not for a rate below the best one) is no divergence, and no sound training either."
)
PAPER = "arXiv 2603.13381"
FEWER = "no statement of the source: if the baseline diverges at decay 0.05 and less decay is no cure"
CLAIMS: tuple[Claim, ...] = (
    Claim("its loss at step 60,000 is printed", f"{PAPER}, table 1", "baseline", PAPER_RATE, 0.1, "stable"),
    Claim(
        "diverges before step 20,000 of 60,000 at this decay",
        f"{PAPER}, section 2.2",
        "baseline",
        PAPER_RATE,
        0.05,
        "diverges",
        before_step=20_000,
    ),
    Claim(FEWER, f"{PAPER}, section 2.2", "baseline", PAPER_RATE, 2**-5, "diverges", "our inference", 20_000),
    Claim(FEWER, f"{PAPER}, section 2.2", "baseline", PAPER_RATE, 0.0, "diverges", "our inference", 20_000),
    Claim("its loss at step 60,000 is printed", f"{PAPER}, table 1", "res-gelu", 4e-3, 0.1, "stable"),
    Claim(
        "the largest rate that is stable at this decay; its loss at step 60,000 is printed",
        f"{PAPER}, section 2.2 and table 1",
        "res-gelu",
        2.4e-3,
        0.05,
        "stable",
    ),
    Claim(
        "no statement of this rate: at this decay the source calls rates up to 2.4e-3 stable, and none beyond",
        f"{PAPER}, section 2.2",
        "res-gelu",
        3e-3,
        0.05,
        "diverges",
        "our inference",
    ),
    Claim(
        "stable at this decay and at 5 times the baseline's rate, by the first version; by the second, less decay asks "
        "for lower rates",
        f"{PAPER}, versions 1 and 2",
        "res-gelu",
        3e-3,
        2**-5,
        "stable",
        "disputed",
    ),
    Claim("tolerates 2.7 times the baseline's rate", "arXiv 2510.23912", "identity", 2.7 * PAPER_RATE, 0.1, "stable"),
    Claim("tolerates 3.7 times the baseline's rate", "arXiv 2510.23912", "identity", 3.7 * PAPER_RATE, 0.1, "stable"),
    Claim("stable at a third of the usual decay", "arXiv 2510.23912", "identity", PAPER_RATE, 2**-5, "stable"),
)
"""To be looked at at each scale. `identity` is `W_Q = I`."""

Verdict = Literal[
    "holds here",
    "does not hold here (diverged)",
    "seen here",
    "not seen here",
    "plateau here",
    "not tested: shorter",
    "not run",
]
"""`seen`: of a divergence; `holds`: of stability. A plateau is neither. `shorter`: none diverged, and they were not as
long as the claim speaks of."""


@dataclass(frozen=True)
class Judgement:
    """A claim beside one study, at its scale alone: what its runs show, and no more."""

    claim: Claim
    verdict: Verdict
    lr: float
    """The rate looked at: the point's, or the one wanted where there is none."""
    seeds: int
    steps: int | None
    """Updates that every run looked at has made; None where there is none."""
    why: str


def judge(claim: Claim, map_: Map | None, base_rate: float) -> Judgement:
    """What the map of its architecture shows of a claim.

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
        return Judgement(claim, "not run", wanted, 0, None, "no point of the map is near it")
    cell = min(near, key=lambda cell: abs(cell.lr - wanted))
    state, n, steps = map_.state(cell.lr, cell.weight_decay), len(cell.endings), min(e.step for e in cell.endings)
    if state is None:
        return Judgement(claim, "not run", cell.lr, n, steps, "its runs have not come to an end")
    return Judgement(claim, _verdict(claim, cell, state), cell.lr, n, steps, _why(claim, map_, cell))


def _verdict(claim: Claim, cell: Cell, state: State) -> Verdict:
    if state == "diverged":
        return "seen here" if claim.says == "diverges" else "does not hold here (diverged)"
    if state == "plateau":
        return "plateau here"
    if _is_shorter(claim, cell):
        return "not tested: shorter"
    return "not seen here" if claim.says == "diverges" else "holds here"


def _is_shorter(claim: Claim, cell: Cell) -> bool:
    """Whether some run was shorter than the claim speaks of: a step, or else the whole of a schedule."""
    return any(ending.step < (claim.before_step or ending.schedule) for ending in cell.endings)


def _why(claim: Claim, map_: Map, cell: Cell) -> str:
    if cell.diverged:
        after = ", ".join(f"{step:,}" for step in cell.diverged_after)
        late = claim.before_step is not None and min(cell.diverged_after) >= claim.before_step
        said = f"{len(cell.diverged_after)} of {len(cell.endings)} seeds diverged, after step {after}"
        return said + (", later than was said" if late else "")
    assert map_.best is not None
    assert map_.best.loss is not None
    assert cell.loss is not None
    above, steps = cell.loss - map_.best.loss, max(ending.step for ending in cell.endings)
    said = f"finished {steps:,} steps {above:.3f} nats above its best, which is at rate {map_.best.lr:g}"
    if not _is_shorter(claim, cell):
        return said
    spoken = f"step {claim.before_step:,}" if claim.before_step else "the end of the schedule"
    return f"{said}; it speaks of {spoken}"


def judgements(results: StudyResults, maps: dict[str, Map]) -> list[Judgement]:
    """Every claim beside a study. The unit of rates is its baseline arm's."""
    return [judge(claim, maps.get(claim.arm), results.baseline.setting("train.lr")) for claim in CLAIMS]


def scale_of(results: StudyResults) -> str:
    """What the judgements hold for, in words."""
    base = results.baseline
    steps, tokens = (base.setting(f"train.{name}") for name in ("steps", "tokens_per_step"))
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
        "base_rate": results.baseline.setting("train.lr"),
        "rules": {"worse_nats": WORSE, "spike": SPIKE, "spike_window": SPIKE_WINDOW, "near": NEAR},
        "maps": [_map_tree(map_) for map_ in maps.values()],
        "claims": [_claim_tree(judgement) for judgement in judgements(results, maps)],
    }


def _claim_tree(judgement: Judgement) -> dict[str, Any]:
    claim = judgement.claim
    keys = ("standing", "arm", "lr", "multiple", "weight_decay", "says", "says_in_words", "before_step")
    return {
        **{key: getattr(claim, key) for key in (*keys, "text", "source")},
        "verdict": judgement.verdict,
        "judged_at": judgement.lr,
        "seeds": judgement.seeds,
        "steps": judgement.steps,
        "why": judgement.why,
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
                "largest_finished_lr": (finished := map_.largest_finished(decay)),
                "largest_finished_tried": finished == map_.rates[-1],
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
                "state": map_.state(cell.lr, cell.weight_decay),
            }
            for cell in map_.cells.values()
        ],
    }
