"""What maps show of the published claims of stability, and what we infer from these; the evidence of a study of maps.

Rates are compared across scales as multiples of the baseline's, which is the rate of the study's baseline arm; the
paper's is 6e-4. A claim of stability and one of divergence are judged alike: a divergence is seen whenever it comes,
and where there was none, a run that is shorter than the claim speaks of has not tested it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from qurve.study.results import StudyResults
from qurve.study.stability import (
    SPIKE,
    SPIKE_WINDOW,
    WORSE,
    Cell,
    Map,
    State,
    endings_of,
    maps_of,
)

NEAR = 1.1
"""Rates within this factor are taken for the same when a claim is judged."""
PAPER_RATE = 6e-4
"""The paper's baseline's: what its rates are multiples of."""
PAPER_STEPS = 60_000
"""A training of the paper: what is claimed of a whole training is claimed of so many steps. The other source's own
length is not known to us, and is taken for the same."""


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
    until_step: int = PAPER_STEPS
    """How far it speaks of a training."""

    @property
    def multiple(self) -> float:
        """Its rate in multiples of the paper's baseline's."""
        return self.lr / PAPER_RATE

    @property
    def says_in_words(self) -> str:
        what = "to be stable" if self.says == "stable" else "to diverge"
        return f"{'inferred' if self.standing == 'our inference' else 'said'} {what}"


NOTE = (
    "Seen at this study's scale alone. Runs that are shorter than a claim speaks of can show a divergence; they test "
    "neither a claim of stability nor one of a divergence that comes later. A plateau (finished more than "
    f"{WORSE:g} nats per token above the best loss, and not for a rate below the best one) is no divergence, and no "
    "sound training either; what ends no lower than it started has learned nothing. With one seed a point the bound "
    "decides on one number, and another seed may end on its other side. Where no step is named, a claim is taken to "
    f"speak of the {PAPER_STEPS:,} steps of the paper's trainings."
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
        until_step=20_000,
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
    "learned nothing here",
    "not tested at its length: stable so far",
    "not tested at its length: a plateau so far",
    "not tested at its length: learned nothing so far",
    "not run",
]
"""`seen`: of a divergence; `holds`: of stability. A plateau is neither, nor is a training that learned nothing. `not
tested at its length`: none diverged, and they were not as long as the claim speaks of, whatever it says."""
ENDED: dict[State, Verdict] = {"plateau": "plateau here", "learned nothing": "learned nothing here"}
SO_FAR: dict[State, Verdict] = {
    "stable": "not tested at its length: stable so far",
    "plateau": "not tested at its length: a plateau so far",
    "learned nothing": "not tested at its length: learned nothing so far",
}


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
    if _is_shorter(claim, cell):
        return SO_FAR[state]
    return ENDED.get(state, "not seen here" if claim.says == "diverges" else "holds here")


def _is_shorter(claim: Claim, cell: Cell) -> bool:
    """Whether some run was shorter than the claim speaks of."""
    return any(ending.step < claim.until_step for ending in cell.endings)


def _why(claim: Claim, map_: Map, cell: Cell) -> str:
    n = len(cell.endings)
    if cell.diverged:
        after = ", ".join(f"{step:,}" for step in cell.diverged_after)
        late = min(cell.diverged_after) >= claim.until_step
        said = f"{len(cell.diverged_after)} of {n} seeds diverged, after step {after}"
        return said + (", later than it speaks of" if late else "")
    assert map_.best is not None
    assert map_.best.loss is not None
    assert cell.loss is not None
    above, steps = cell.loss - map_.best.loss, min(ending.step for ending in cell.endings)
    said = (
        f"{'one seed' if n == 1 else f'{n} seeds, in the mean,'} finished {steps:,} steps {above:.3f} nats above its "
        f"best, which is at rate {map_.best.lr:g}"
    )
    return f"{said}; it speaks of {claim.until_step:,} steps" if _is_shorter(claim, cell) else said


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
    from qurve.study.headline import reservations  # which rests on this

    maps = maps_of(endings_of(results))
    return {
        "study": results.name,
        "command": results.command,
        "doubts": reservations(results),
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
    keys = ("standing", "arm", "lr", "multiple", "weight_decay", "says", "says_in_words", "until_step")
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
                "stable_up_to_lr": (stable := map_.stable_up_to(decay)),
                "stable_to_largest_tried": stable == map_.rates[-1],
                "stable_beyond_lr": map_.stable_beyond(decay),
                "trained_up_to_lr": (trained := map_.trained_up_to(decay)),
                "trained_to_largest_tried": trained == map_.rates[-1],
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
