"""Which changes of basis a network's hidden states allow, and what stands in the way of the others.

State 2l is what block l's attention reads, state 2l + 1 what its feed-forward reads, state 2L what the head reads; half
block s (attention where s is even) leads from state s to state s + 1. See `qurve.analysis.absorb`.

Legend: D model width, L blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from qurve.analysis.reparametrize import is_linear, kind_of, not_linear_in_its_input
from qurve.model.feed_forward_modules import DenseFeedForward, ExpertFeedForward, GatedFeedForward
from qurve.model.gpt import GPT
from qurve.model.residual import Skip

Freedom = Literal["any", "orthogonal", "none"]
"""The changes of basis that a state allows: every invertible one, orthogonal ones, none but the identity."""
FREEDOMS: tuple[Freedom, ...] = ("none", "orthogonal", "any")
HALVES = ("attention", "mlp")


@dataclass(frozen=True)
class Obstacle:
    """What limits the changes of basis."""

    kind: Literal["norm", "gain", "skip", "tie", "reader", "writer", "residual", "shape", "bias", "rounding"]
    where: str
    """The module, or the skips."""
    why: str
    leaves: Freedom = "none"
    """What it leaves of the changes of basis."""


def least(freedoms: Iterable[Freedom]) -> Freedom:
    return FREEDOMS[min((FREEDOMS.index(freedom) for freedom in freedoms), default=2)]


class Topology:
    """A model's hidden states. `unties`: whether a tied head counts as one of its own."""

    def __init__(self, model: GPT, unties: bool = False) -> None:
        config = model.config
        self.model, self.last = model, 2 * config.n_layers
        self.tied = config.tie_embeddings and not unties
        self.shared = config.share_blocks and config.n_layers > 1
        self.place = config.residual.norm_place
        self.skips = [config.residual.attention_skip, config.residual.mlp_skip] * config.n_layers
        self.class_of = self._classes()
        self.limits = [self._limits(state) for state in range(self.last + 1)]

    def _classes(self) -> list[int]:
        """The first state that shares its basis with each one."""
        found = list(range(self.last + 1))
        joined = [(s, s + 1) for s, skip in enumerate(self.skips) if skip]
        joined += [(s, s + 2) for s in range(self.last - 1) if self.shared]
        for one, other in joined:
            first, second = sorted((found[one], found[other]))
            found = [first if at == second else at for at in found]
        return found

    @property
    def is_dual(self) -> bool:
        """Whether a tied head ties two bases that are free of each other: `Θ_0 Θ_2L^T = I`."""
        return self.tied and self.class_of[0] != self.class_of[self.last]

    def block(self, state: int) -> tuple[str, Any]:
        """The block that reads a state before the last, and its name."""
        index = 0 if self.model.config.share_blocks else state // 2
        return f"blocks.{index}", self.model.blocks[index]

    # -------------------------------------------------------------------------------------------------------- norms

    def norm(self, state: int) -> tuple[str, nn.Module] | None:
        """The norm right before what reads a state, if there is one."""
        if self.place == "pre":
            if state == self.last:
                return "final_norm", self.model.final_norm
            name, block = self.block(state)
            norm = f"{HALVES[state % 2]}_norm"
        elif self.place == "post" and state > 0:
            name, block = self.block(state - 1)
            norm = f"{HALVES[(state - 1) % 2]}_norm"
        else:
            return None
        return f"{name}.{norm}", getattr(block, norm)

    def gain(self, state: int) -> Tensor | None:
        """The gain `[D]` before what reads a state, unless it is one number, which commutes with everything."""
        found = self.norm(state)
        gain_D: Tensor | None = None if found is None else getattr(found[1], "weight", None)
        return None if gain_D is None or bool((gain_D == gain_D[0]).all()) else gain_D.detach()

    def folded_gain(self, state: int) -> Tensor | None:
        """The same, where it can be folded into what reads the state."""
        return None if self.not_foldable(state) else self.gain(state)

    def not_foldable(self, state: int) -> str | None:
        """Why a gain cannot be folded into what reads the state; None where it can."""
        if state == self.last and self.tied:
            return "into the head, which is the token embedding"
        if self.place == "post" and state < self.last and self.skips[state]:
            return f"into what reads it: the skip over {HALVES[state % 2]} carries it on"
        if self.place == "post" and self.shared:
            return "into what reads it: the shared block reads the embeddings too, which have passed no norm"
        return None

    # ---------------------------------------------------------------------------------------------------- obstacles

    def _limits(self, state: int) -> list[Obstacle]:
        """What limits the basis of one state, skips and the tie aside."""
        found = [*self._norm_limits(state), *self._reader_limits(state), *self._writer_limits(state)]
        if not isinstance(self.model.config.residual, Skip):
            why = f"= {self.model.config.residual.kind} reads and writes several streams"
            found.append(Obstacle("residual", "model.residual", why))
        return found

    def is_linear_at(self, state: int) -> bool:
        """Whether what reads and writes a state is known and linear, so that it can be written in another basis."""
        return not any(obstacle.kind in ("reader", "writer", "residual") for obstacle in self.limits[state])

    def _norm_limits(self, state: int) -> list[Obstacle]:
        found = self.norm(state)
        if found is None:
            return []
        name, norm = found
        if not isinstance(norm, nn.RMSNorm):
            why = "is a LayerNorm: it lets no change of basis pass but orthogonal ones that leave the mean alone"
            return [Obstacle("norm", name, why)]
        limits = [Obstacle("norm", name, "is an RMSNorm: it lets orthogonal changes of basis alone pass", "orthogonal")]
        if self.gain(state) is not None and (where := self.not_foldable(state)):
            kind: Literal["tie", "gain"] = "tie" if state == self.last and self.tied else "gain"
            limits.append(Obstacle(kind, name, f"has a gain that cannot be folded {where}"))
        return limits

    def _reader_limits(self, state: int) -> list[Obstacle]:
        if state == self.last:
            return []
        name, block = self.block(state)
        if state % 2 == 0:
            reason = not_linear_in_its_input(block.attention)
            return [Obstacle("reader", f"{name}.attention", f"is in the way: {reason}")] if reason else []
        return [] if feed_forward(block.mlp) else [Obstacle("reader", f"{name}.mlp", _UNKNOWN)]

    def _writer_limits(self, state: int) -> list[Obstacle]:
        if state == 0:
            return []
        name, block = self.block(state - 1)
        if state % 2 == 0:
            return [] if feed_forward(block.mlp) else [Obstacle("writer", f"{name}.mlp", _UNKNOWN)]
        output = getattr(block.attention, "output", None)
        if output is not None and is_linear(output):
            return []
        kind = "not there" if output is None else kind_of(output)
        return [Obstacle("writer", f"{name}.attention.output", f"is {kind}, which is not linear")]

    def obstacles(self, state: int) -> list[Obstacle]:
        """What limits the basis of a state, all that share it included: of each kind the nearest, and how many."""
        states = [other for other, at in enumerate(self.class_of) if at == self.class_of[state]]
        nearest = sorted(states, key=lambda other: (abs(other - state), other))
        found: dict[tuple[str, Freedom], dict[str, Obstacle]] = {}
        for obstacle in (o for other in nearest for o in self.limits[other]):
            found.setdefault((obstacle.kind, obstacle.leaves), {}).setdefault(obstacle.where, obstacle)
        told = []
        for alike in found.values():
            first, more = next(iter(alike.values())), len(alike) - 1
            where = f"{first.where} (and {more} more on its stream)" if more else first.where
            told.append(Obstacle(first.kind, where, first.why, first.leaves))
        if self.tied and not self.is_dual and self.class_of[0] == self.class_of[state]:
            why = "is the head too: what it writes and what it reads have one basis, which leaves orthogonal changes"
            told.append(Obstacle("tie", "token_embedding", why, "orthogonal"))
        return told

    def freedom(self, state: int) -> Freedom:
        """What changes of basis a state allows, the head's tie to another state aside."""
        return least(obstacle.leaves for obstacle in self.obstacles(state))

    def between(self, state: int, other: int) -> str:
        """In words, what gives two states one basis."""
        if state == other:
            return f"{self.block(state)[0]}.attention"
        first, second = sorted((state, other))
        over = range(first, second) if all(self.skips[first:second]) else ()
        if not over:
            return "model.share_blocks"
        halves = " and ".join(name for i, name in enumerate(HALVES) if any(s % 2 == i for s in over))
        blocks = (
            f"block {first // 2}" if first // 2 == (second - 1) // 2 else f"blocks {first // 2} to {(second - 1) // 2}"
        )
        return f"the skip over {halves} of {blocks}"


_UNKNOWN = "is no feed-forward of this package as it was built: what reads and writes in it is not known"


def feed_forward(mlp: nn.Module) -> tuple[list[str], list[str]] | None:
    """The names of the projections that read a feed-forward's input, and of those that write its output; None where
    they are not known to be linear."""
    if type(mlp) is ExpertFeedForward:
        experts = range(len(mlp.experts))
        readers = ["router", *(f"experts.{n}.{name}" for n in experts for name in ("gate", "up"))]
        writers = [f"experts.{n}.down" for n in experts]
    elif type(mlp) in (DenseFeedForward, GatedFeedForward):
        readers, writers = [name for name in ("gate", "up") if name in mlp._modules], ["down"]
    else:
        return None
    linear = all(is_linear(mlp.get_submodule(name)) for name in (*readers, *writers))
    return (readers, writers) if linear else None
