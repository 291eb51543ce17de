"""Attention in another basis: why a linear query is redundant.

Attention depends on its input X only through X W_Q, X W_K and X W_V. So for every invertible Θ

    (X, W_Q, W_K, W_V, W_O)  ->  (X Θ, Θ^-1 W_Q, Θ^-1 W_K, Θ^-1 W_V, W_O)

leaves its output as it is, whatever is done to the queries, keys and values afterwards: heads and their grouping,
QK-norm, rotary positions, masks, soft-caps, convolutions over the tokens. With Θ = W_Q the query is the identity.

Source: arXiv 2603.13381, equation 1; Karbevski and Mijoski, arXiv 2510.23912. What of it can be carried through a whole
network is in `qurve.analysis.absorb`.

What does not commute is a matrix between a head's query and key: `q A` and `k A^-T` have the product of `q` and `k`,
but rotated they have it only if A commutes with every rotation, that is, if it turns and scales each pair of channels
by itself. So a W_Q can be taken over by the input of its block under rotary positions, and not by W_K.

Legend: D model width, I and O input and output width of a weight.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from qurve.errors import BadInput
from qurve.model.attention import Attention
from qurve.projections import Dims, Identity, Linear, Residual
from qurve.projections.module import Projection, is_bare

WORST_ROUNDING = 1e-2
"""Largest product of a basis's condition number and the rounding of the weights' dtype: two digits have to be left."""


@dataclass(frozen=True)
class Basis:
    """A change of basis `x -> x Θ`, in float64."""

    theta_DD: Tensor
    condition: float
    """Largest singular value by smallest: how much the change magnifies rounding errors."""

    @classmethod
    def of(cls, theta_DD: Tensor, name: str, dtype: torch.dtype) -> Basis:
        """Θ for weights of `dtype`. `BadInput`, which says `name`, unless it is square, finite and invertible."""
        theta_DD = theta_DD.detach().double()
        if theta_DD.dim() != 2 or theta_DD.shape[0] != theta_DD.shape[1]:
            raise BadInput(f"{name} has the shape {list(theta_DD.shape)}; a change of basis is a square matrix")
        if not theta_DD.isfinite().all():
            raise BadInput(f"{name} has entries that are not finite")
        found = condition(theta_DD)
        if not found * torch.finfo(dtype).eps <= WORST_ROUNDING:
            raise BadInput(
                f"{name} is singular, or too nearly so: its condition number is {found:.3g}, and in "
                f"{str(dtype).removeprefix('torch.')} at most {WORST_ROUNDING / torch.finfo(dtype).eps:.3g} leaves "
                "two digits of what is computed; take another one, or a model in float64"
            )
        return cls(theta_DD, found)

    def reading(self, w_DO: Tensor) -> Tensor:
        """`Θ^-1 W`: what reads `x Θ` as W reads `x`."""
        read_DO: Tensor = torch.linalg.solve(self.theta_DD, w_DO.to(self.theta_DD.device))
        return read_DO

    def writing(self, w_ID: Tensor) -> Tensor:
        """`W Θ`: what writes `y Θ` where W writes `y`. A bias, or a table of embeddings, is written alike."""
        return w_ID.to(self.theta_DD.device) @ self.theta_DD


class Reparametrized(NamedTuple):
    attention: Attention
    condition: float
    """Condition number of Θ: rounding errors grow with it."""


def reparametrize(attention: Attention, theta_DD: Tensor) -> Reparametrized:
    """A copy of `attention` that computes from `x Θ` what the original computes from `x` (equation 1).

    Queries, keys and values become linear where they were not (`identity` and `residual` are linear maps too). Computed
    in float64 and rounded to the weights' own dtype. `BadInput` for a Θ that is not `[D, D]` or too nearly singular,
    and for an attention that does not read its input through linear projections alone.
    """
    config = attention.config
    if reason := not_linear_in_its_input(attention):
        raise BadInput(f"equation 1 does not hold here: {reason}")
    weight = next(attention.parameters())
    if theta_DD.shape != (config.d_model, config.d_model):
        raise BadInput(f"theta has the shape {list(theta_DD.shape)}; the model's width asks for [{config.d_model}] * 2")
    basis = Basis.of(theta_DD.to(weight.device), "theta", weight.dtype)
    changed = copy.deepcopy(attention)
    for name in ("query", "key", "value"):
        w_DO, b_O = affine(attention.get_submodule(name))
        setattr(changed, name, linear_projection(basis.reading(w_DO), b_O, weight.dtype))
    return Reparametrized(changed, basis.condition)


def condition(matrix: Tensor) -> float:
    """The condition number in the 2-norm; infinite where the matrix is singular."""
    singular = torch.linalg.svdvals(matrix.double())
    return float(singular[0] / singular[-1]) if singular[-1] else math.inf  # zero by zero is no number


def not_linear_in_its_input(attention: nn.Module) -> str | None:
    """Why an attention's output depends on its input otherwise than through linear queries, keys and values; None where
    it does not."""
    if not isinstance(attention, Attention) or {"query", "key", "value"} - set(attention.config.mixer.projections):
        return "the mixer does not read its input through queries, keys and values alone"
    for name in ("query", "key", "value"):
        projection = attention.get_submodule(name)
        if not is_linear(projection):
            return f"the {name} is {kind_of(projection)}, which is not linear in the block's input"
        if projection.dims.d_in != attention.config.d_model:
            return f"the {name} reads channels of model.subspaces beside the block's input"
    if getattr(getattr(attention.output, "config", None), "also_reads", None) == "block_input":
        return f"the output projection, {kind_of(attention.output)}, reads the block's input too"
    return None


def kind_of(projection: nn.Module) -> str:
    """A projection's kind, for messages."""
    if is_bare(projection):
        return repr(projection.config.kind)
    return f"a {type(projection).__name__} that somebody has wrapped, hooked or replaced"


def is_linear(projection: nn.Module) -> TypeGuard[Projection]:
    """Whether a projection is `x W (+ b)` for some W."""
    return is_bare(projection) and isinstance(projection.config, Linear | Identity | Residual)


def affine(projection: nn.Module) -> tuple[Tensor, Tensor | None]:
    """`W [D, O]` and `b [O]` of a projection that `is_linear`, in float64."""
    assert isinstance(projection, Projection)
    config, dims = projection.config, projection.dims
    if isinstance(config, Identity):
        return torch.eye(dims.d_in, dtype=torch.float64), None
    w_DO, b_O = projection.weight.detach().double().T, projection.get("bias")
    b_O = None if b_O is None else b_O.detach().double()
    if isinstance(config, Residual):
        eye_DD = torch.eye(dims.d_in, dtype=torch.float64, device=w_DO.device)
        return config.scale * (eye_DD + w_DO), None if b_O is None else config.scale * b_O
    return w_DO, b_O


def linear_projection(w_DO: Tensor, b_O: Tensor | None, dtype: torch.dtype) -> Projection:
    """The linear projection with this weight."""
    d_in, d_out = w_DO.shape
    projection = Projection(Linear(), Dims(d_in, d_out, b_O is not None), device=w_DO.device, dtype=dtype)
    with torch.no_grad():
        projection.weight.copy_(w_DO.T)
        if b_O is not None:
            projection.bias.copy_(b_O)
    return projection
