"""Where does training hold? Maps over learning rate and weight decay; `claims` sets what was published beside them.

A map is of one architecture: a study that makes one names its arms `NAME@POINT` (`res-gelu@0.008-0.1`), all arms of one
NAME alike but for peak rate, floor and decay.

A point is in one of four states. It has *diverged* when a seed has, and has *learned nothing* when a seed finished no
lower than it started. It is *stable* when every seed finished, and the mean final loss is at most `WORSE` nats above
the architecture's best in the map; a rate below the best one at its own decay may end higher, which is slow, where that
best one is as near and the losses fall up to this one and on to it. Else it is on a *plateau*: that is quality, no
divergence. This holds for the study's size, data and length alone, and with one seed a point for that seed.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from qurve.errors import BadInput
from qurve.study.results import Arm, Run, StudyResults
from qurve.study.study_json import updates_of

WORSE = 0.1
"""Nats per token above the architecture's best final loss, beyond which a point counts as on a plateau."""
SPIKE = 5.0
SPIKE_WINDOW = 100
"""A spike is a step whose gradient norm exceeds `SPIKE` times the median of the `SPIKE_WINDOW` steps before it; the
first `SPIKE_WINDOW` steps, which have fewer before them, are not judged."""


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
    def learned_nothing(self) -> bool:
        """Whether a seed finished no lower than it started."""
        ends = [(e.loss, e.start_loss) for e in self.endings]
        return any(loss is not None and start is not None and loss >= start for loss, start in ends)

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


State = Literal["stable", "plateau", "learned nothing", "diverged"]


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
        if cell.learned_nothing:
            return "learned nothing"
        losses = {point: loss for point, one in self.cells.items() if (loss := one.loss) is not None}
        here = {rate: loss for (rate, decay), loss in losses.items() if decay == weight_decay}
        best, bound = min(here, key=here.__getitem__), min(losses.values()) + WORSE
        towards_best = [here[rate] for rate in sorted(here) if lr <= rate <= best]
        is_falling = towards_best == sorted(towards_best, reverse=True) and here[lr] <= min(
            loss for rate, loss in here.items() if rate <= lr
        )
        is_slow = lr < best and here[best] <= bound and is_falling
        return "stable" if here[lr] <= bound or is_slow else "plateau"

    def stable_up_to(self, weight_decay: float) -> float | None:
        """The largest rate up to which every rate tried at this decay is stable; None where the lowest is not.

        Where it is the largest tried, a larger one may be stable too.
        """
        return self._largest(weight_decay, ("stable",))

    def stable_beyond(self, weight_decay: float) -> list[float]:
        """The rates that are stable at this decay although a lower one is not, ascending."""
        first = self.stable_up_to(weight_decay)
        stable = [lr for lr in self.rates if self.state(lr, weight_decay) == "stable"]
        return [lr for lr in stable if first is None or lr > first]

    def trained_up_to(self, weight_decay: float) -> float | None:
        """As `stable_up_to`, where a plateau counts as well: no seed diverged or learned nothing."""
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
    """Every run of a study, by architecture; an A/A arm is none. Raises `BadInput` where one name stands for different
    ones, or two arms of it have the same rate and decay: what else they differ in is no seed."""
    first: dict[str, Arm] = {}
    points: dict[tuple[object, ...], Arm] = {}
    found = []
    for arm in results.arms:
        if arm.seed_offset:
            continue
        name = architecture(arm.name)
        point = (name, arm.setting("train.lr"), arm.setting("train.weight_decay"))
        if (same := points.setdefault(point, arm)) is not arm:
            raise BadInput(
                f"{same.name} and {arm.name} are one architecture by their names, at one rate and decay; a map has one "
                "arm at each point"
            )
        if (other := first.setdefault(name, arm)).config.get("model") != arm.config.get("model"):
            raise BadInput(
                f"{other.name} and {arm.name} are one architecture by their names, and their models differ; "
                "name what stands before the @ after the model"
            )
        if updates_of(other.config) != updates_of(arm.config):
            raise BadInput(f"{other.name} and {arm.name} are one architecture, and of different lengths of training")
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
