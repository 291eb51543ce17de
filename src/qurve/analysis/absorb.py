"""A linear query set to the identity, and the change of basis carried through the whole network.

A network has a hidden state before each half of a block and one at its end: state 2l is what block l's attention reads,
state 2l + 1 what its feed-forward reads, state 2L what the head reads. A state x may be written as x Θ: what writes it
(embeddings, W_O, W_down) is multiplied by Θ, what reads it by Θ^-1. Then

    Θ = W_Q     makes the query the identity         (or W_K the key, W_V the value, where they are square)
    Θ = W_O^-1  makes the output projection the identity

and the rest of the network takes the change over: nothing is computed differently. How many Θ are free depends on the
topology:

    a skip          gives its two states one basis
    shared blocks   have one basis in all of them
    a tied head     reads with what the embedding writes, E Θ_0: so Θ_0 Θ_2L^T = I
    RMSNorm         lets orthogonal Θ pass alone, its gain folded into what reads it. Then W_Q = Θ R becomes the
                    triangular R, and the identity only where W_Q was orthogonal
    LayerNorm       lets orthogonal Θ pass that leave the mean alone: none is applied here

Sources: Graef, arXiv 2404.12362 (skipless and norm-free: W_Q and W_O, or W_K or W_V); Karbevski and Mijoski,
arXiv 2510.23912 (one block, a skip over attention alone, shared blocks); arXiv 2603.13381, section 1.

Legend: D model width, I and O input and output width of a weight, L blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from qurve.analysis.rebase import Weight, rebased
from qurve.analysis.reparametrize import WORST_ROUNDING, Basis, affine, condition, is_linear, kind_of
from qurve.analysis.topology import Freedom, Obstacle, Topology, least
from qurve.errors import BadInput
from qurve.model.gpt import GPT
from qurve.projections import Identity

Which = Literal["all", "possible", "forced"]
Outcome = Literal["identity", "triangular", "kept", "none"]

_NONE: Outcome = "none"
IDENTITY = 1e-10
"""How far from the identity, entry by entry, what is set to it may be."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of one weight. Blocks that share their weights are told of once, as block 0."""

    layer: int
    weight: Weight
    outcome: Outcome
    """`none`: there is no such weight, as the projection is the identity already, or not linear."""
    condition: float | None
    """Of the weight, where it is square: rounding errors grow with it."""
    saved: int
    """Numbers that are gone, or zero for good in a triangular matrix."""
    obstacles: tuple[Obstacle, ...]
    """What stands between the weight and the identity."""

    @property
    def name(self) -> str:
        return f"blocks.{self.layer}.attention.{self.weight}"


@dataclass(frozen=True)
class Plan:
    """What becomes of some weights, and the basis of each hidden state with which it does."""

    verdicts: tuple[Verdict, ...]
    bases: tuple[Basis | None, ...]
    """Of the states 0 to 2L; None where the basis stays."""
    unties: bool
    """Whether a tied head becomes one of its own."""

    def names(self, outcome: Outcome) -> set[str]:
        return {verdict.name for verdict in self.verdicts if verdict.outcome == outcome}

    @property
    def saved(self) -> int:
        return sum(verdict.saved for verdict in self.verdicts)

    @property
    def falls_short(self) -> list[Verdict]:
        """Those that do not become the identity."""
        return [verdict for verdict in self.verdicts if verdict.outcome in ("kept", "triangular")]


@dataclass(frozen=True)
class Absorbed:
    model: GPT
    """In evaluation mode: dropout in another basis is another dropout."""
    plan: Plan
    added: int
    """Parameters more than before; below zero where some are saved."""


def absorb_queries(model: GPT, which: Which = "all", untie: bool = False) -> Absorbed:
    """A copy of `model` with every `W_Q` set to the identity: `absorb(model, ["query"], …)`."""
    return absorb(model, ["query"], which, untie)


def absorb(model: GPT, weights: Sequence[Weight], which: Which = "all", untie: bool = False) -> Absorbed:
    """A copy of `model` that computes the same logits with these weights of every block set to the identity.

    `all` of them, or `BadInput` that names what stands in the way; those that are `possible`, under RMSNorm made
    triangular; or all of them `forced`, as if skips, norms and the tie let every change of basis pass, so that the
    logits become others (`qurve.analysis.redundancy` says by how much). `untie`: where a tied head stands in the way,
    give it a weight of its own, V D parameters more; it stays tied where it can.

    Computed in float64 and stored in the model's dtype: exact up to its rounding, times the condition number of what is
    absorbed. Weights that are too nearly singular stay.
    """
    if isinstance(weights, str) or not weights or not set(weights) <= set(get_args(Weight)):
        raise BadInput(f"weights = {weights!r}: give a list of {', '.join(get_args(Weight))}, or some of them")
    if which not in get_args(Which):
        raise BadInput(f"which = {which!r}: it must be one of {', '.join(get_args(Which))}")
    plan = make_plan(model, weights, untie)
    if all(verdict.outcome == "none" for verdict in plan.verdicts):
        raise BadInput(f"no block has a linear {' or '.join(weights)} that is not the identity already")
    if which == "all" and plan.falls_short:
        raise BadInput(_refusal(plan.falls_short))
    if which == "forced" and plan.falls_short:
        plan = forced(model, weights, plan.unties)
        if not plan.names("identity"):
            raise BadInput(_refusal(plan.falls_short))
    return carried_out(model, plan)


def carried_out(model: GPT, plan: Plan) -> Absorbed:
    """A copy of `model` in the plan's bases."""
    changed = rebased(model, plan.bases, plan.names("identity"), plan.names("triangular"), plan.unties)
    before, after = (sum(p.numel() for p in one.parameters()) for one in (model, changed))
    return Absorbed(changed, plan, after - before)


def _refusal(short: Sequence[Verdict], most: int = 2) -> str:
    told = [f"{v.name}: " + "; ".join(f"{o.where} {o.why}" for o in v.obstacles) for v in short[:most]]
    more = f". So it is with {len(short) - most} more" if len(short) > most else ""
    return (
        f"not every weight can become the identity with the same logits. {'. '.join(told)}{more}. "
        "which='possible' does what can be done, which='forced' all of it, with other logits"
    )


# ------------------------------------------------------------------------------------------------------------- planning


@dataclass
class _Wish:
    """A weight that would be the identity in the right basis of its state."""

    layer: int
    weight: Weight
    obstacles: list[Obstacle]
    """Of its own; those of its state come from the topology."""
    is_identity: bool = False
    is_linear: bool = True
    w_DD: Tensor | None = None
    """Where it is square and not the identity already; the gain before it folded in."""
    condition: float | None = None

    @property
    def state(self) -> int:
        return 2 * self.layer + (self.weight == "output")

    def can_be(self, freedom: Freedom) -> bool:
        """Whether nothing of its own is in the way, in a state of that freedom: every matrix can be made triangular."""
        return self.w_DD is not None and (freedom == "orthogonal" or not self.obstacles)

    def basis(self, freedom: Freedom) -> Basis:
        """The Θ with which `Θ^-1 W_Q`, or `W_O Θ`, is the identity; an orthogonal one makes it triangular, its diagonal
        nowhere below zero."""
        assert self.w_DD is not None
        if freedom == "any":
            theta_DD = torch.linalg.inv(self.w_DD) if self.weight == "output" else self.w_DD
            return Basis(theta_DD, self.condition or 1.0)
        q_DD, r_DD = torch.linalg.qr(self.w_DD.T if self.weight == "output" else self.w_DD)
        return Basis(torch.where(r_DD.diagonal() < 0, -q_DD, q_DD), 1.0)

    def becomes(self, freedom: Freedom, basis: Basis) -> Outcome:
        """What it is in the basis that it asked for."""
        assert self.w_DD is not None
        if freedom == "any":
            return "identity"
        in_basis_DD = basis.writing(self.w_DD) if self.weight == "output" else basis.reading(self.w_DD)
        is_eye = torch.allclose(in_basis_DD, torch.eye(len(in_basis_DD)).to(in_basis_DD), rtol=0, atol=IDENTITY)
        return "identity" if is_eye and not self.obstacles else "triangular"

    def verdict(self, outcome: Outcome, obstacles: Sequence[Obstacle]) -> Verdict:
        width = 0 if self.w_DD is None else len(self.w_DD)
        saved = {"identity": width * width, "triangular": width * (width - 1) // 2}.get(outcome, 0)
        told = () if outcome == "identity" else tuple(obstacles)
        return Verdict(self.layer, self.weight, outcome, self.condition, saved, told)


def make_plan(model: GPT, weights: Sequence[Weight], untie: bool = False) -> Plan:
    """What can become of these weights with the same logits; nothing is changed. See `absorb` for `untie`."""
    topology = Topology(model)
    plan = _plan(topology, _wishes(model, topology, weights))
    if untie and any(o.kind == "tie" for v in plan.verdicts for o in v.obstacles):
        topology = Topology(model, unties=True)
        untied = dataclasses.replace(_plan(topology, _wishes(model, topology, weights)), unties=True)
        return untied if untied.saved > plan.saved else plan
    return plan


def _plan(topology: Topology, wishes: Sequence[_Wish]) -> Plan:
    of = topology.class_of
    freedom: dict[int, Freedom] = {at: topology.freedom(at) for at in set(of)}
    freedom |= {of[wish.state]: "none" for wish in wishes if wish.is_identity}
    served: dict[int, _Wish] = {}  # one of each class: what is the identity already, else the best conditioned
    for wish in sorted(wishes, key=lambda w: (not w.is_identity, w.condition or 0.0)):
        if wish.is_identity or wish.can_be(freedom[of[wish.state]]):
            served.setdefault(of[wish.state], wish)

    first, last, tied = of[0], of[topology.last], list[int]()
    if topology.is_dual:
        both = least([freedom[first], freedom[last]])
        tied = [at for at in (first, last) if freedom[at] != both]
        freedom[first] = freedom[last] = both
        if both != "none" and first in served and last in served:  # the last state's basis makes up for the first's
            del served[last]
            tied.append(last)
    bases = {at: wish.basis(freedom[at]) for at, wish in served.items() if freedom[at] != "none"}
    if topology.is_dual:
        bases |= {other: dual(bases[at]) for at, other in ((first, last), (last, first)) if at in bases}

    verdicts = []
    for wish in wishes:
        at, obstacles = of[wish.state], [*wish.obstacles]
        taker, outcome = served.get(at), _NONE
        if wish.is_linear and not wish.is_identity:
            outcome = wish.becomes(freedom[at], bases[at]) if taker is wish and at in bases else "kept"
            obstacles += topology.obstacles(wish.state)
            obstacles += [Obstacle("tie", "token_embedding", _DUAL)] if at in tied else []
            if taker is not None and taker is not wish:
                obstacles.append(_taken(topology, wish, taker))
        verdicts.append(wish.verdict(outcome, obstacles))
    return Plan(tuple(verdicts), tuple(bases.get(at) for at in of), unties=False)


_DUAL = "is the head too: the first state's basis and the last's make up for each other, and one of them is not free"


def dual(basis: Basis) -> Basis:
    """`Θ^-T`: with a tied head, of the last state for the first, and of the first for the last."""
    return Basis(torch.linalg.inv(basis.theta_DD).T, basis.condition)


def _taken(topology: Topology, wish: _Wish, taker: _Wish) -> Obstacle:
    name = f"blocks.{taker.layer}.attention.{taker.weight}"
    why = f"leaves one basis, which {name} {'needs as it is' if taker.is_identity else 'takes'}"
    return Obstacle("skip", topology.between(wish.state, taker.state), why)


def _wishes(model: GPT, topology: Topology, weights: Sequence[Weight]) -> list[_Wish]:
    return [_wish(model, topology, _Wish(layer, name, [])) for layer in range(len(model.blocks)) for name in weights]


def _wish(model: GPT, topology: Topology, wish: _Wish) -> _Wish:
    """The same, with what there is to know of its weight."""
    name = f"blocks.{wish.layer}.attention.{wish.weight}"
    projection = getattr(model.blocks[wish.layer].attention, wish.weight, None)
    if projection is None or not is_linear(projection):
        kind = "not there" if projection is None else f"{kind_of(projection)}, which is not linear"
        obstacle = Obstacle("reader", name, f"is {kind}")
        return dataclasses.replace(wish, is_linear=False, obstacles=[obstacle])
    if isinstance(projection.config, Identity):
        return dataclasses.replace(wish, is_identity=True)
    w_IO, b_O = affine(projection)
    into, out = w_IO.shape
    if into != out:
        obstacle = Obstacle("shape", name, f"is no square matrix: it maps {into} channels to {out}")
        return dataclasses.replace(wish, obstacles=[obstacle])
    gain_D = None if wish.weight == "output" else topology.folded_gain(wish.state)
    w_DD = w_IO if gain_D is None else gain_D.double()[:, None] * w_IO
    found, obstacles = condition(w_DD), []
    if b_O is not None and bool(b_O.any()):
        obstacles.append(Obstacle("bias", f"{name}.bias", "is not zero, and the identity has none"))
    if not found * torch.finfo(projection.weight.dtype).eps <= WORST_ROUNDING:
        why = f"is singular, or too nearly so for its dtype: its condition number is {found:.3g}"
        obstacles.append(Obstacle("rounding", name, why))
    return dataclasses.replace(wish, w_DD=w_DD, condition=found, obstacles=obstacles)


def forced(model: GPT, weights: Sequence[Weight], unties: bool = False) -> Plan:
    """The plan by which every such weight becomes the identity that is square and not too nearly singular, whatever the
    logits: each state has the basis that its own weight asks for; where none does, the one that a skip brings."""
    topology = Topology(model, unties)
    wishes, granted, bases = _wishes(model, topology, weights), dict[int, _Wish](), list[Basis | None]()
    for wish in wishes:
        if wish.can_be("any") and topology.is_linear_at(wish.state):
            granted.setdefault(wish.state, wish)
    for state in range(topology.last + 1):
        if topology.shared and state >= 2:
            basis = bases[state - 2]
        elif state in granted:
            basis = granted[state].basis("any")
        elif state > 0 and topology.skips[state - 1]:
            basis = bases[state - 1]
        else:
            basis = dual(bases[0]) if state == topology.last and topology.tied and bases[0] else None
        bases.append(basis if topology.is_linear_at(state) else None)
    exact = _plan(topology, wishes).verdicts
    verdicts = [
        dataclasses.replace(v, outcome="identity" if granted.get(wish.state) is wish else "kept", saved=0)
        for v, wish in zip(exact, wishes, strict=True)
    ]
    return Plan(tuple(verdicts), tuple(bases), unties)
