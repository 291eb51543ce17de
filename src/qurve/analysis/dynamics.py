"""What a model's blocks are like while it trains: weights, `f`, attention and units, seen in one forward pass.

    norm, stable rank   ||W||_F  and  ||W||_F^2 / ||W||_2^2  of the query, key and value weight (the two stages of a
                        training that Li et al. see in them: arXiv 2603.13381, section 1)
    f to x, cosine      E[|f| / |x|]  and  E[cos(f, x)]  where a projection is  Q(x) = c (x + f(x))   (equation 2)
    entropy             E[-sum_s a_ts ln a_ts]  of the attention weights a, in nats
    largest logit       max |scale * q . k|, before a soft-cap
    dead units          share of the GELU (or other) units whose activation is next to zero at every token

A nonlinear query has no W_Q. What stands in its place here is the linear map that it is on average, its mean Jacobian

    W_Q := E[dQ/dx],        which is the weight itself where Q is linear,

so that norms and ranks of all kinds of projection can be laid side by side. The matrices that it is made of (`w1`,
`w2`) are measured as well.

Legend: B batch, T tokens, N tokens of all sequences, D input width, O output width, R of its rows, E head width, G
key/value heads, H query heads, F units.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qurve.analysis.attention_logits import has_logits, visible_logits
from qurve.model.attention import Attention
from qurve.model.gpt import GPT
from qurve.model.view import View
from qurve.projections import Bottleneck, Linear
from qurve.projections.functional import wide
from qurve.projections.module import Projection

PATHWAYS = ("query", "key", "value")

JACOBIAN_TOKENS, JACOBIAN_SPACING = 64, 32
"""A Jacobian is averaged over so many tokens at most, evenly spread, at least so far apart."""

ROWS_AT_A_TIME = 16
"""Of a Jacobian: more would take more memory, and no less time."""

DEAD = 0.01
"""A unit is dead whose activation is no further than this from zero at every token: of a GELU, whose input is below
-2.68 (or within 0.02 of zero) throughout; below, its slope is within 0.03 of zero."""

SQUARINGS = 9
"""In `spectral_norm`: of 1,000 singular values that are all equal, the worst case, it is a third of a per cent off."""


class Dynamics:
    """What was seen in the last forward pass, by measure and block."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._found: dict[str, dict[int, Tensor]] = {}

    def see(self, layer: int, measure: str, value: Tensor) -> None:
        self._found.setdefault(measure, {})[layer] = value

    def by_measure(self) -> dict[str, list[float | None]]:
        """`{"query.norm": [of the first block, of the second, …], …}`; None where a block has no such thing, or where
        it is not finite. Waits for the device, once."""
        places = [(measure, layer) for measure, values in self._found.items() for layer in values]
        values = (
            torch.stack([self._found[measure][layer].float() for measure, layer in places]).tolist() if places else []
        )
        found: dict[str, list[float | None]] = {measure: [None] * self._layers for measure in self._found}
        for (measure, layer), value in zip(places, values, strict=True):
            found[measure][layer] = value if math.isfinite(value) else None
        return found


@contextlib.contextmanager
def recording(model: GPT) -> Iterator[Dynamics]:
    """Measure every block in the forward pass of the `with` block.

        with recording(model) as dynamics, torch.no_grad():
            model(ids_BT)
        dynamics.by_measure()["query.f_to_x"]  # [0.31, 0.44, …]

    The measures, P being `query`, `key` and `value`: `P.norm`, `P.stable_rank`, and where P is not linear the same of
    its matrices (`query.w1.norm`); `P.f_to_x`, `P.cosine` where the projection is the input plus something;
    `P.dead_units` of a bottleneck, `mlp.dead_units`; `attention.entropy`, `attention.max_logit` of softmax attention.

    Projections are measured by their own definition, in float32 (or wider) outside of autocast, attention with queries
    and keys as they come. Outputs stay as they are; hooks are set on this model's modules alone, not on projections,
    and are gone afterwards. Call the plain model: a compiled one passes hooks by. Projections that somebody has
    replaced by a module of another kind are left out. Raises `ValueError` in a forward pass with a cache.
    """
    found, handles = Dynamics(model.config.n_layers), []
    passes = [range(model.config.n_layers)] if model.config.share_blocks else [[i] for i in range(len(model.blocks))]
    for layers, block in zip(passes, model.blocks, strict=True):
        mixer, mlp = block.get_submodule("attention"), block.get_submodule("mlp")
        handles.append(mixer.register_forward_pre_hook(partial(_see_attention, found, itertools.cycle(layers))))
        handles.append(mlp.register_forward_hook(partial(_see_units, found, itertools.cycle(layers))))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------------------------------------------------- quantities


def stable_rank(weight: Tensor) -> Tensor:
    """`||W||_F^2 / ||W||_2^2`: 1 for a matrix of rank one, the number of rows for an orthogonal one."""
    ratio: Tensor = wide(weight).norm() / spectral_norm(weight)
    return ratio.square()


def spectral_norm(weight: Tensor) -> Tensor:
    """`||W||_2`, too large by a factor of at most `r^(1 / 2^(SQUARINGS + 2))`, r the smaller of both sides.

    By squaring `G = W W^T` again and again: `||G^n||_F^(1/n)` falls to the largest eigenvalue as n grows. A few
    products and no decomposition, alike on every device.
    """
    w_RC = wide(weight)
    gram = w_RC @ w_RC.T if w_RC.shape[0] <= w_RC.shape[1] else w_RC.T @ w_RC
    size: Tensor = gram.norm()
    log: Tensor = size.log()
    for n in range(1, SQUARINGS + 1):
        gram = gram / size
        gram = gram @ gram
        size = gram.norm()
        log = log + size.log() / 2**n
    return (log / 2).exp()


def mean_jacobian(projection: Projection, x_ND: Tensor, *other: Tensor) -> Tensor:
    """`E[dQ/dx]` over N tokens, `[O, D]`: the derivative of `E[Q(x + d)]` by d at zero. The weight of a linear one.

    A few rows at a time, each with a `d` of its own: `torch.func` would do with one, and takes seconds to import.
    """
    rows = list[Tensor]()
    basis_OO = torch.eye(projection.dims.d_out, dtype=x_ND.dtype, device=x_ND.device)
    for pick_RO in torch.split(basis_OO, ROWS_AT_A_TIME):
        with torch.enable_grad():
            d_R1D = x_ND.new_zeros(len(pick_RO), 1, x_ND.shape[1], requires_grad=True)
            mean_RO = wide(projection.config.forward(projection, x_ND + d_R1D, *other)).mean(1)
        rows += torch.autograd.grad(mean_RO, d_R1D, pick_RO, materialize_grads=True)
    return torch.cat(rows)[:, 0]


def dead_share(h_NF: Tensor) -> Tensor:
    """The share of the units that are within `DEAD` of zero at every token."""
    return (h_NF.abs().amax(0) <= DEAD).float().mean()


def logits_and_entropy(
    q_BHTE: Tensor, k_BGTE: Tensor, view: View, window: int | None, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The largest `|scale * q . k|` over the visible pairs, and the mean entropy of the weights in nats: over all heads
    and all tokens that see something."""
    largest = total = q_BHTE.new_zeros((), dtype=torch.float32)
    rows = 0
    for logits, visible in visible_logits(q_BHTE, k_BGTE, view, window, scale):
        seen = logits if visible is None else logits.masked_fill(~visible, 0.0)
        largest = torch.maximum(largest, seen.abs().amax())
        capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        if visible is not None:
            capped = capped.masked_fill(~visible, -torch.inf)
        entropy = torch.special.entr(capped.softmax(-1)).sum(-1)  # not a number where a token of padding sees nothing
        total, rows = total + entropy.nansum(), rows + (~entropy.isnan()).sum()
    return largest, total / rows


# --------------------------------------------------------------------------------------------------------------- hooks


@torch.no_grad()
def _see_attention(found: Dynamics, layers: Iterator[int], mixer: nn.Module, arguments: tuple[Any, ...]) -> None:
    inputs, view, hidden, state = arguments
    if state is not None:
        raise ValueError("dynamics are recorded of whole sequences: call the model without a cache")
    layer = next(layers)
    for place, name in enumerate(PATHWAYS):
        projection = mixer._modules.get(name)
        if isinstance(projection, Projection):
            x_BTD = inputs[0 if len(inputs) == 1 else place]
            reads = () if projection.config.also_reads is None else (hidden,)
            with torch.autocast(x_BTD.device.type, enabled=False):
                for measure, value in _projection(projection, *(wide(t).flatten(0, 1) for t in (x_BTD, *reads))):
                    found.see(layer, f"{name}.{measure}", value)
    if has_logits(mixer):
        assert isinstance(mixer, Attention)
        q_BHTE, k_BGTE, _ = mixer.enter(inputs, view, hidden, None)
        config = mixer.config
        largest, entropy = logits_and_entropy(
            q_BHTE, k_BGTE, view, config.window, config.scale, config.attention_softcap
        )
        found.see(layer, "attention.max_logit", largest)
        found.see(layer, "attention.entropy", entropy)


def _projection(projection: Projection, x_ND: Tensor, *other: Tensor) -> Iterator[tuple[str, Tensor]]:
    config = projection.config
    matrices = {name: p for name, p in projection.named_parameters() if p.dim() == 2}
    if isinstance(config, Linear):
        weight_OD: Tensor = matrices.pop("weight")
    else:
        every = max(JACOBIAN_SPACING, len(x_ND) // JACOBIAN_TOKENS)
        weight_OD = mean_jacobian(projection, *(t[::every][:JACOBIAN_TOKENS] for t in (x_ND, *other)))
    yield "norm", wide(weight_OD).norm()
    yield "stable_rank", stable_rank(weight_OD)
    for name, matrix in matrices.items():
        yield f"{name}.norm", wide(matrix).norm()
        yield f"{name}.stable_rank", stable_rank(matrix)
    if config.identity_term and matrices:
        f_ND = wide(config.forward(projection, x_ND, *other)) / config.identity_term - x_ND
        yield "f_to_x", (f_ND.norm(dim=-1) / x_ND.norm(dim=-1)).mean()
        yield "cosine", torch.cosine_similarity(f_ND, x_ND, dim=-1).mean()
    if isinstance(config, Bottleneck):
        yield "dead_units", dead_share(config.units(projection, x_ND))


@torch.no_grad()
def _see_units(found: Dynamics, layers: Iterator[int], mlp: nn.Module, arguments: Any, output: Any) -> None:
    layer, (_, hidden_BTF) = next(layers), output
    if hidden_BTF is not None:  # each token of a mixture of experts has units of its own
        found.see(layer, "mlp.dead_units", dead_share(hidden_BTF.flatten(0, 1)))
