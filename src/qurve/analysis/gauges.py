"""The bases of a head: attention sees queries and keys only as `q . k`, and values only through `W_O`.

    logits    W_Q A,  W_K A^-T        (W_Q A) (W_K A^-T)^T = W_Q W_K^T
    values    W_V B,  B^-1 W_O        (W_V B) (B^-1 W_O)   = W_V W_O

leave the model as it is, one invertible A and B for each key and value head. What depends on the choice is no fact
about the function: weight norms, weight decay, gradient norms, the steps of SGD and Adam. What does not: logits, the
loss, other weights' gradients, singular values of the products, a head's asymmetry. (SGD's steps do not depend on
orthogonal changes, Adam's do.) Source: arXiv 2603.13381, equation 1, applied within a head.

In both pairs, `near` and `far` are the two factors as `[G, rows, E]`, and the product is `near far^T`. Queries that
share a key head, and outputs that share a value head, stand below each other.

Legend: B batch, T tokens, D model width, H query heads, G key/value heads, N queries that share one, E head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from qurve.analysis.attention_logits import has_logits
from qurve.model.attention import Attention
from qurve.model.gpt import GPT, Block
from qurve.model.positions import Rope
from qurve.projections import Identity, Linear, Residual
from qurve.projections.functional import fold
from qurve.projections.module import Projection, is_bare

Pair = Literal["logits", "values"]
"""Queries and keys, or values and the output."""

SINGULAR = 1e-12
"""Smallest over largest eigenvalue of a factor's Gram matrix, below which it counts as singular."""


TINY = torch.finfo(torch.float64).tiny
"""In place of zero below a fraction: a head without weights is symmetric."""


@dataclass(frozen=True)
class HeadNorms:
    """The two factors of one key or value head, with all queries or outputs that share it."""

    near: float
    """Frobenius norm of the queries' weights, or the values'."""
    far: float
    """Of the keys' weights, or the outputs'."""
    nuclear: float
    """Nuclear norm of their product, the same in every basis: half of the least that `near^2 + far^2` can be (with
    rotary positions it cannot be that small)."""

    @property
    def excess(self) -> float:
        """`(near^2 + far^2) / 2` over its least, 1 where the factors are in balance."""
        return (self.near**2 + self.far**2) / (2 * self.nuclear)


def factors(attention: Attention, pair: Pair) -> tuple[Tensor, Tensor]:
    """`near` and `far`, `[G, rows, E]`: the weights of a pair in the heads' channels, biases beside them.

    Raises `ValueError` for projections that are not linear, or that somebody has wrapped, and for other mixers than
    softmax attention.
    """
    if type(attention) is not Attention:
        raise ValueError(f"the mixer {type(attention).__name__} is not softmax attention, whose heads can change basis")
    names = ("query", "key") if pair == "logits" else ("value", "output")
    for name in names:
        projection = attention.get_submodule(name)
        if not is_bare(projection) or not isinstance(projection.config, Linear):
            raise ValueError(f"the {name} is no plain linear projection, so that its heads have no basis to choose")
    groups, e = attention.config.kv_heads, attention.config.head_width
    if pair == "logits":
        return _rows(attention.query, groups, e), _rows(attention.key, groups, e)
    return _rows(attention.value, groups, e), _columns(attention.output, groups, e)


def _rows(projection: Projection, groups: int, e: int) -> Tensor:
    """`weight [G N E, D]` as `[G, N D, E]`."""
    bias = projection.get("bias")
    weight = projection.weight if bias is None else torch.cat([projection.weight, bias[:, None]], dim=1)
    return weight.view(groups, -1, e, weight.shape[1]).transpose(-1, -2).flatten(1, 2)


def _columns(projection: Projection, groups: int, e: int) -> Tensor:
    """`weight [D, G N E]` as `[G, N D, E]`."""
    return projection.weight.view(len(projection.weight), groups, -1, e).permute(1, 2, 0, 3).flatten(1, 2)


@torch.no_grad()
def change_heads(attention: Attention, pair: Pair, a_GEE: Tensor) -> None:
    """Give the heads another basis: `near A`, `far A^-T`, in place. The function stays as it is.

    Raises `ValueError` where it would not: for an A that is singular, and for logits whose queries and keys are
    normalised (QK-norm), or rotated by an angle that A does not commute with.
    """
    factors(attention, pair)  # refuses what has no basis
    config = attention.config
    if a_GEE.shape != (expected := (config.kv_heads, config.head_width, config.head_width)):
        raise ValueError(f"the changes have the shape {list(a_GEE.shape)}; it has to be {list(expected)}")
    a_GEE = a_GEE.double()
    if not torch.linalg.cond(a_GEE).max() < 1 / SINGULAR:
        raise ValueError("a change of a head's basis is singular: it has to be invertible")
    if pair == "logits":
        _check_logits(attention, a_GEE)
        _turn_rows(attention.query, a_GEE)
        _turn_rows(attention.key, _inverse_transpose(a_GEE))
    else:
        _turn_rows(attention.value, a_GEE)
        _turn_columns(attention.output, _inverse_transpose(a_GEE))


def _check_logits(attention: Attention, a_GEE: Tensor) -> None:
    config = attention.config
    if config.qk_norm:
        raise ValueError("model.qk_norm normalises queries and keys, so that their heads have no other basis")
    if isinstance(config.positions, Rope) and not torch.allclose(a_GEE, _as_turns(config.positions, a_GEE), atol=1e-9):
        raise ValueError(
            "rotary positions turn each pair of channels: a change of basis has to turn and scale each pair by itself"
        )


def _as_turns(positions: Rope, a_GEE: Tensor) -> Tensor:
    """The nearest matrices that commute with every rotation: one complex number for each pair of channels."""
    e, found_GEE = a_GEE.shape[-1], torch.zeros_like(a_GEE)
    for i, j in _pairs(positions, e):
        real, imaginary = (a_GEE[:, i, i] + a_GEE[:, j, j]) / 2, (a_GEE[:, i, j] - a_GEE[:, j, i]) / 2
        found_GEE[:, i, i], found_GEE[:, j, j] = real, real
        found_GEE[:, i, j], found_GEE[:, j, i] = imaginary, -imaginary
    return found_GEE


def _pairs(positions: Rope, e: int) -> list[tuple[int, int]]:
    if positions.layout == "interleaved":
        return [(2 * i, 2 * i + 1) for i in range(e // 2)]
    return [(i, i + e // 2) for i in range(e // 2)]


def _inverse_transpose(a_GEE: Tensor) -> Tensor:
    inverse_GEE: Tensor = torch.linalg.inv(a_GEE)
    return inverse_GEE.transpose(-1, -2)


def _turn_rows(projection: Projection, a_GEE: Tensor) -> None:
    """`W A` for each head; with `weight = W^T`, `A^T weight`."""
    for parameter in projection.parameters():
        groups_GNED = parameter.double().view(*a_GEE.shape[:1], -1, a_GEE.shape[-1], parameter[0].numel())
        parameter.copy_((a_GEE.transpose(-1, -2)[:, None] @ groups_GNED).view(parameter.shape))


def _turn_columns(projection: Projection, a_GEE: Tensor) -> None:
    """The same for the columns of `weight`."""
    weight = projection.weight
    heads_DGNE = weight.double().view(len(weight), *a_GEE.shape[:1], -1, a_GEE.shape[-1])
    weight.copy_(torch.einsum("dgne,gef->dgnf", heads_DGNE, a_GEE).reshape(weight.shape))


@torch.no_grad()
def head_norms(attention: Attention, pair: Pair) -> list[HeadNorms]:
    """How large the factors of each key or value head are, and how small they could be."""
    near_GNE, far_GNE = (factor.double() for factor in factors(attention, pair))
    near_GEE, far_GEE = _gram(near_GNE), _gram(far_GNE)
    root_GEE = _root(near_GEE)
    squares_GE = torch.linalg.eigvalsh(root_GEE @ far_GEE @ root_GEE).clamp(min=0)  # of the product's singular values
    found = (near_GNE.norm(dim=(1, 2)), far_GNE.norm(dim=(1, 2)), squares_GE.sqrt().sum(-1))
    return [HeadNorms(*row) for row in zip(*(t.tolist() for t in found), strict=True)]


@torch.no_grad()
def charge(attention: Attention, pair: Pair) -> Tensor:
    """`near^T near - far^T far`, `[G, E, E]`: zero where the factors are in balance.

    Gradient flow keeps it, whatever the loss: that is what the freedom of basis means for training (Noether's theorem),
    since everywhere `near^T dL/dnear = (dL/dfar)^T far`. Weight decay shrinks it; a step of SGD keeps it but for terms
    of second order.
    """
    near_GNE, far_GNE = factors(attention, pair)
    return _gram(near_GNE) - _gram(far_GNE)


@torch.no_grad()
def balance(attention: Attention, pair: Pair) -> None:
    """Choose the basis in which `near^2 + far^2` is least, in place; it is then twice the product's nuclear norm.

    So weight decay on both factors is a nuclear-norm penalty on their product. With `A A^T = P`, the least is where
    `P S P = S'` for the factors' Gram matrices S and S': P is the geometric mean of `S^-1` and `S'`. Rotary positions
    leave one scale for each pair of channels, which takes its best value. Raises `ValueError` where a factor is
    singular, and what `change_heads` raises.
    """
    near_GNE, far_GNE = (factor.double() for factor in factors(attention, pair))
    near_GEE, far_GEE = _gram(near_GNE), _gram(far_GNE)
    positions = attention.config.positions
    if pair == "logits" and isinstance(positions, Rope):
        near_GEE, far_GEE = (_pair_scales(positions, gram_GEE) for gram_GEE in (near_GEE, far_GEE))
    for gram_GEE, name in ((near_GEE, "query" if pair == "logits" else "value"), (far_GEE, "key or output")):
        values_GE = torch.linalg.eigvalsh(gram_GEE)
        if not (values_GE[:, 0] > SINGULAR * values_GE[:, -1]).all():
            raise ValueError(f"the {name} of a head has a channel too many: its weights are singular, so no balance")
    root_GEE = _root(near_GEE)
    inverse_GEE = torch.linalg.inv(root_GEE)
    p_GEE = inverse_GEE @ _root(root_GEE @ far_GEE @ root_GEE) @ inverse_GEE
    change_heads(attention, pair, _root(p_GEE))


def _pair_scales(positions: Rope, gram_GEE: Tensor) -> Tensor:
    """Of Gram matrices, what a scale for each pair of channels can see: the mean of the pair's two squares."""
    found_GEE = torch.zeros_like(gram_GEE)
    for i, j in _pairs(positions, gram_GEE.shape[-1]):
        found_GEE[:, i, i] = found_GEE[:, j, j] = (gram_GEE[:, i, i] + gram_GEE[:, j, j]) / 2
    return found_GEE


def _gram(factor_GNE: Tensor) -> Tensor:
    """`W^T W` of each head."""
    return factor_GNE.transpose(-1, -2) @ factor_GNE


def _root(gram_GEE: Tensor) -> Tensor:
    """The symmetric square root of positive matrices."""
    values_GE, vectors_GEE = torch.linalg.eigh(gram_GEE)
    root_GEE: Tensor = vectors_GEE * values_GE.clamp(min=0).sqrt()[:, None] @ vectors_GEE.transpose(-1, -2)
    return root_GEE


@torch.no_grad()
def asymmetry(model: GPT) -> list[list[float] | None]:
    """How far from symmetric each head's `M = W_Q W_K^T` is: `|M - M^T|^2 / |2 M|^2`, by block and query head.

    0 where `W_Q = W_K`, one half where the two know nothing of each other, 1 where M is antisymmetric. The weights are
    taken behind the norm, whose gain (and, for LayerNorm, centring) is folded into them, so that no change of basis
    matters; without biases, and at equal positions where those are rotary. None for blocks whose queries or keys are
    nonlinear, normalised (QK-norm) or mixed further, or read more than the hidden state; `logit_asymmetry` may be had.
    """
    return [_asymmetry(block) for block in cast("list[Block]", list(model.blocks))]


def _asymmetry(block: Block) -> list[float] | None:
    attention, config = block.get_submodule("attention"), block.config
    if type(attention) is not Attention or config.qk_norm or config.subspaces.total:
        return None
    query_OD, key_OD = (_matrix(attention.get_submodule(name)) for name in ("query", "key"))
    if query_OD is None or key_OD is None:
        return None
    query_OD, key_OD = (_behind_norm(block, weight_OD).double() for weight_OD in (query_OD, key_OD))
    query_HED = query_OD.view(config.n_heads, -1, config.d_model)
    key_GED = key_OD.view(config.kv_heads, -1, config.d_model)
    key_HED = key_GED.repeat_interleave(config.n_heads // config.kv_heads, dim=0)
    squared_H = (_gram(query_HED.mT) * _gram(key_HED.mT)).sum((1, 2))  # |M|^2
    cross_HEE = key_HED @ query_HED.mT
    turned_H = (cross_HEE * cross_HEE.mT).sum((1, 2))  # tr M M
    shares: list[float] = ((squared_H - turned_H) / (2 * squared_H.clamp(min=TINY))).tolist()
    return shares


def _matrix(projection: nn.Module) -> Tensor | None:
    """The weight `[O, D]` of a projection that is linear."""
    if not is_bare(projection):
        return None
    config, width = projection.config, projection.dims.d_in
    if isinstance(config, Linear):
        return projection.weight
    if isinstance(config, Identity):
        return torch.eye(width)
    if isinstance(config, Residual):
        return config.scale * (torch.eye(width, dtype=projection.weight.dtype) + projection.weight)
    return None


def _behind_norm(block: Block, weight_OD: Tensor) -> Tensor:
    """The weight that acts on the normalised input before the gain; that itself where no norm stands before."""
    norm = block.attention_norm
    if block.config.residual.norm_place != "pre":
        return weight_OD
    assert isinstance(norm, (nn.LayerNorm, nn.RMSNorm))
    return fold(block.config.norm, weight_OD, norm.weight.to(weight_OD.dtype))


@torch.no_grad()
def logit_asymmetry(model: GPT, ids_BT: Tensor, prefix_B: Tensor | None = None) -> list[list[float] | None]:
    """The same of the logits `S_ts = q_t . k_s` themselves on a batch, over all pairs of tokens, masked or not.

    `sum (S_ts - S_st)^2 / sum (2 S_ts)^2`, by block and query head; queries and keys as they meet, with positions and
    QK-norm. None for blocks whose mixer has no such logits. `prefix_B` as in `GPT.forward`.
    """
    calls: dict[nn.Module, list[Tensor]] = {}

    def see(attention: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(attention, Attention)
        inputs, view, hidden, _ = arguments
        q_BHTE, k_BGTE, _ = attention.enter(inputs, view, hidden, None)
        k_BHTE = k_BGTE.repeat_interleave(q_BHTE.shape[1] // k_BGTE.shape[1], dim=1)
        logits_BHTT = q_BHTE.double() @ k_BHTE.double().transpose(-1, -2)
        differences_H = (logits_BHTT - logits_BHTT.mT).square().sum((0, 2, 3))
        squares_H = logits_BHTT.square().sum((0, 2, 3))
        calls.setdefault(attention, []).append(differences_H / (4 * squares_H.clamp(min=TINY)))

    mixers = [block.get_submodule("attention") for block in model.blocks]
    handles = [mixer.register_forward_pre_hook(see) for mixer in mixers if has_logits(mixer)]
    was_training = model.training
    try:
        model.eval()(ids_BT, prefix_B=prefix_B)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    passes = range(model.config.n_layers // len(model.blocks))
    return [calls[mixer][i].tolist() if mixer in calls else None for mixer in mixers for i in passes]
