"""Condition numbers of attention's and the feed-forward's Jacobians, with and without their skips.

Attention is said to be ill-conditioned by itself and to train because of the skip around it, where the feed-forward is
not (Ji et al., arXiv 2505.01996). With n the normalised input of a sublayer F, of all tokens of a sequence at once,

    without   cond(dF/dn)                with   cond(I + dF/dn)                in the stream   cond(ds'/ds)

where `s -> s'` is what the network does: read the stream (norm and all), F, write it back. The first two leave the norm
out, because it flattens directions of every token (its own, and under a LayerNorm the mean's too): a sublayer behind it
has no finite condition number, whatever it is itself.

Legend: T tokens of one sequence, D model width, S = T D.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qurve.analysis.pathways import no_prefix
from qurve.errors import BadInput
from qurve.model.gpt import GPT, Block
from qurve.model.residual import Skip, Sublayer
from qurve.model.view import View
from qurve.projections.module import set_impl

MOST_ROWS = 1024
"""S of the Jacobians, if four tokens have no more: attention over fewer shows little of it."""
ROWS_AT_A_TIME = 64
"""Rows of a Jacobian that are taken at a time."""
SINGULAR = 1e12
"""A condition number above this is as good as infinite in float64."""


@dataclass(frozen=True)
class Conditioning:
    """One sublayer of one block, on one sequence: ratios of largest to smallest singular value, or infinity."""

    layer: int
    sublayer: Sublayer
    tokens: int
    without: float
    """Of the sublayer on its normalised input."""
    with_skip: float
    """Of the same plus the identity."""
    in_stream: float
    """Of what the network does to its residual stream, in its own topology."""


def sequence_length(d_model: int, context: int) -> int:
    """T of the sequences that Jacobians are taken of: as many as `MOST_ROWS` allow, four at least."""
    return min(context, max(4, MOST_ROWS // d_model))


def condition_numbers(model: GPT, ids_T: Tensor) -> list[Conditioning]:
    """Every sublayer's, on the sequence `ids_T`, in evaluation; exact Jacobians, singular values in float64.

    Work grows as `(T D)^3`: see `sequence_length`. (Rotary positions turn queries and keys in float32, so that numbers
    above 1e6 are not to be believed there.) Raises `BadInput` for residual schemes other than `skip`, and for
    concept subspaces, which attention reads beside its input.
    """
    if not isinstance(model.config.residual, Skip):
        raise BadInput(f"model.residual = {model.config.residual.kind!r} has no skip that could be left out")
    if model.config.subspaces.total:
        raise BadInput("with model.subspaces attention has several inputs, and no one Jacobian")
    model = copy.deepcopy(model).double().requires_grad_(False).eval()
    set_impl(model, "reference")
    # torch's fused attention has no rule for many rows of a Jacobian at once
    with sdpa_kernel(SDPBackend.MATH):
        return list(_walk(model, ids_T[None]))


class _Sublayer(NamedTuple):
    """How one reads the stream, what it computes, and how that is written back; `[1, T, D]` throughout."""

    read: Callable[[Tensor], Tensor]
    act: Callable[[Tensor], Tensor]
    write: Callable[[Tensor, Tensor], Tensor]

    def whole(self, stream_1TD: Tensor) -> Tensor:
        return self.write(stream_1TD, self.act(self.read(stream_1TD)))


def _walk(model: GPT, ids_1T: Tensor) -> Iterator[Conditioning]:
    view = model.view(ids_1T, prefix_B=no_prefix(model, ids_1T))
    stream_1TD, hidden_1TF = model.embedded(ids_1T, view), None
    for layer in range(model.config.n_layers):
        block = model.blocks[0 if model.config.share_blocks else layer]
        assert isinstance(block, Block)
        for name, sublayer in _sublayers(block, view, hidden_1TF).items():
            n_1TD = sublayer.read(stream_1TD)
            alone_SS = _jacobian(sublayer.act, n_1TD)
            identity_SS = torch.eye(len(alone_SS), dtype=alone_SS.dtype, device=alone_SS.device)
            whole_SS = _jacobian(sublayer.whole, stream_1TD)
            numbers = (condition(j_SS) for j_SS in (alone_SS, identity_SS + alone_SS, whole_SS))
            yield Conditioning(layer, name, ids_1T.shape[1], *numbers)
            if name == "mlp":
                hidden_1TF = block.mlp(n_1TD)[1]
            stream_1TD = sublayer.whole(stream_1TD)


def _sublayers(block: Block, view: View, hidden_1TF: Tensor | None) -> dict[Sublayer, _Sublayer]:
    def attend(n_1TD: Tensor) -> Tensor:
        y_1TD: Tensor = block.attention((n_1TD,), view, hidden_1TF)
        return y_1TD

    def feed_forward(n_1TD: Tensor) -> Tensor:
        y_1TD: Tensor = block.mlp(n_1TD)[0]
        return y_1TD

    def around(residual: Any, norm: Any, act: Callable[[Tensor], Tensor]) -> _Sublayer:
        return _Sublayer(lambda s: residual.read(s, norm)[0], act, lambda s, y: residual.write(s, y, norm))

    return {
        "attention": around(block.attention_residual, block.attention_norm, attend),
        "mlp": around(block.mlp_residual, block.mlp_norm, feed_forward),
    }


def _jacobian(step: Callable[[Tensor], Tensor], x_1TD: Tensor) -> Tensor:
    """`[S, S]`, outputs by inputs."""
    jacobian: Tensor = torch.func.jacrev(step, chunk_size=ROWS_AT_A_TIME)(x_1TD)
    return jacobian.reshape(x_1TD.numel(), x_1TD.numel()).detach()


def condition(matrix: Tensor) -> float:
    """Largest over smallest singular value; infinity beyond what float64 tells from singular."""
    values = torch.linalg.svdvals(matrix)
    number = (values[0] / values[-1]).item() if values[-1] else math.inf
    return number if number <= SINGULAR else math.inf
