"""How redundant a model's linear weights are: what can be absorbed exactly, and how far off the rest would be.

    found = redundancy(model, ids_BT)
    found.plan.verdicts         # block by block: identity, triangular or kept, and what stands in the way
    found.exact                 # the logits with all that is exact, against those before
    found.forced                # with every weight the identity
    found.violations            # each norm, skip and tie that does not let the change of basis pass, and by how much

Legend: B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qurve.analysis.absorb import Plan, carried_out, forced, make_plan
from qurve.analysis.rebase import Weight
from qurve.analysis.reparametrize import Basis
from qurve.analysis.topology import HALVES, Topology
from qurve.errors import BadInput
from qurve.model.gpt import GPT, Carried
from qurve.model.residual_modules import SkipConnection
from qurve.projections.functional import normalize


@dataclass(frozen=True)
class Difference:
    """Logits of two models on the same tokens."""

    largest: float
    """Largest absolute difference."""
    relative: float
    """Norm of the difference by that of the first model's logits."""
    divergence: float
    """Mean Kullback-Leibler divergence of the second model's next token from the first's, in nats."""


@dataclass(frozen=True)
class Violation:
    """Where a change of basis does not pass: `size` is the norm of what is wrong by the norm of what should be."""

    kind: Literal["norm", "skip", "tie"]
    where: str
    size: float


@dataclass(frozen=True)
class Redundancy:
    plan: Plan
    exact: Difference | None
    """With all that can be absorbed; None where nothing can."""
    added: int
    """Parameters that this adds; below zero where it saves some."""
    forced: Difference | None
    """With every weight set to the identity; None where that is exact, or cannot be."""
    violations: tuple[Violation, ...]
    """What is wrong in that, along the unchanged model's hidden states."""


def redundancy(
    model: GPT,
    ids_BT: Tensor,
    weights: Sequence[Weight] = ("query",),
    untie: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    **limits: Any,
) -> Redundancy:
    """What of `weights` is redundant in `model`, and what it would be if nothing stood in the way. See `absorb`.

    Take a model in float64: in float32 its rounding would be told as a difference. `limits` as in `GPT.forward`;
    `progress` is told in words what is begun.
    """
    progress("condition numbers of the weights")
    plan = make_plan(model, weights, untie)
    exact, added, off, found = None, 0, None, list[Violation]()
    if plan.names("identity") or plan.names("triangular"):
        progress("logits with all that can be absorbed")
        absorbed = carried_out(model, plan)
        exact, added = difference(model, absorbed.model, ids_BT, **limits), absorbed.added
    if plan.falls_short:
        progress("logits with every one the identity")
        everything = forced(model, weights, plan.unties)
        if everything.names("identity"):
            off = difference(model, carried_out(model, everything).model, ids_BT, **limits)
            progress("each norm, skip and tie")
            found = violations(model, everything, ids_BT, **limits)
    return Redundancy(plan, exact, added, off, tuple(found))


@torch.no_grad()
def difference(before: GPT, after: GPT, ids_BT: Tensor, **limits: Any) -> Difference:
    """How far the second model's logits are from the first's, both in evaluation mode; one sequence at a time."""
    states = [_evaluated(model, ids_BT, limits) for model in (before, after)]
    largest, squares, off_squares, divergence = 0.0, 0.0, 0.0, 0.0
    for x_TD, y_TD in zip(*states, strict=True):
        p_TV, q_TV = before.logits(x_TD).double(), after.logits(y_TD).double()
        off_TV = q_TV - p_TV
        largest = max(largest, off_TV.abs().max().item())
        squares, off_squares = squares + p_TV.square().sum().item(), off_squares + off_TV.square().sum().item()
        log_p_TV = p_TV.log_softmax(-1)
        divergence += (log_p_TV.exp() * (log_p_TV - q_TV.log_softmax(-1))).sum(-1).mean().item()
    return Difference(largest, math.sqrt(off_squares / squares), max(0.0, divergence / len(ids_BT)))


def _evaluated(model: GPT, ids_BT: Tensor, limits: dict[str, Any]) -> Tensor:
    """What the head reads, `[B, T, D]`."""
    was_training = model.training
    try:
        return model.eval().hidden(ids_BT, **limits)[0]
    finally:
        model.train(was_training)


@torch.no_grad()
def violations(model: GPT, plan: Plan, ids_BT: Tensor, **limits: Any) -> list[Violation]:
    """Each norm, skip and tie that the plan's bases do not pass, measured on the unchanged model's hidden states.

        norm    `n(x Θ)` for `n(x) Θ`, the gain folded away where it can be
        skip    `x Θ_s` for `x Θ_(s+1)`, where a skip carries x from state s to state s + 1
        tie     logits with the changed embedding for those with the head that the last basis asks for

    In order of the network; what lets its basis pass is left out. `BadInput` for a scheme other than plain skips.
    """
    topology, found = Topology(model, plan.unties), list[Violation]()

    def tell(kind: Literal["norm", "skip", "tie"], where: str, got: Tensor, wanted: Tensor) -> None:
        size = ((got - wanted).norm() / wanted.norm()).item()
        if size > PASSES:
            found.append(Violation(kind, where, size))

    for state, (summed_BTD, x_BTD) in enumerate(hidden_states(model, ids_BT, **limits)):
        basis = plan.bases[state]
        norm = topology.norm(state)
        if norm is not None and basis is not None:
            z_BTD = summed_BTD if topology.place == "post" else x_BTD
            tell("norm", norm[0], *_around(norm[1], z_BTD, basis, topology.folded_gain(state) is not None))
        if state < topology.last and topology.skips[state]:
            kept, wanted = (_in(b, x_BTD) for b in (basis, plan.bases[state + 1]))
            tell("skip", f"the skip over {HALVES[state % 2]} of block {state // 2}", kept, wanted)
    if topology.tied and plan.bases[0] is not None:
        # of each sequence's last token: the logits of all of them would be many
        read_BD, table_VD = model.final_norm(x_BTD)[:, -1].double(), model.token_embedding.weight.double()
        changed_VD = plan.bases[0].writing(table_VD)
        tell("tie", "token_embedding", _in(plan.bases[topology.last], read_BD) @ changed_VD.T, read_BD @ table_VD.T)
    return found


PASSES = 1e-6
"""A relative size below which it is rounding that is wrong."""


def _in(basis: Basis | None, x_BTD: Tensor) -> Tensor:
    return x_BTD.double() if basis is None else basis.writing(x_BTD.double())


def _around(norm: Any, z_BTD: Tensor, basis: Basis, folds: bool) -> tuple[Tensor, Tensor]:
    """A norm after the change of basis, and before it."""
    kind: Literal["rmsnorm", "layernorm"] = "rmsnorm" if isinstance(norm, nn.RMSNorm) else "layernorm"
    gain, bias = (None if p is None else p.double() for p in (norm.weight, getattr(norm, "bias", None)))
    gain, eps = None if folds else gain, norm.eps
    assert isinstance(eps, float)
    after, before = (normalize(kind, z, gain, bias, eps) for z in (_in(basis, z_BTD), z_BTD.double()))
    return after, _in(basis, before)


@torch.no_grad()
def hidden_states(model: GPT, ids_BT: Tensor, **limits: Any) -> list[tuple[Tensor, Tensor]]:
    """Each state of an unchanged model `[B, T, D]`, 0 to 2L, as the stream has it (a norm before what reads it is still
    to come), and before it what a norm after the sum was given; the same twice where there is no such norm."""
    if not isinstance(model.blocks[0].attention_residual, SkipConnection):
        raise BadInput(f"model.residual = {model.config.residual.kind}: its streams are no states of one basis")
    was_training = model.training
    try:
        model.eval()
        view = model.view(ids_BT, **limits)
        x_BTD = model.embedded(ids_BT, view)
        carried: Carried = (None, None)
        found = [(x_BTD, x_BTD)]
        for layer in range(model.config.n_layers):
            block: Any = model.blocks[0 if model.config.share_blocks else layer]
            y_BTD = block.attention(block.inputs(x_BTD, carried), view, carried[0], None)
            found.append(_written(block.attention_residual, x_BTD, y_BTD, block.attention_norm))
            (inputs_BTD,) = block.mlp_residual.read(found[-1][1], block.mlp_norm)
            found.append(_written(block.mlp_residual, found[-1][1], block.mlp(inputs_BTD)[0], block.mlp_norm))
            _, carried = block.leave(x_BTD, y_BTD)
            x_BTD = found[-1][1]
        return found
    finally:
        model.train(was_training)


def _written(residual: SkipConnection, x_BTD: Tensor, y_BTD: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The sum that a half block leaves, and the state that comes of it."""
    return residual.write(x_BTD, y_BTD, nn.Identity()), residual.write(x_BTD, y_BTD, norm)
