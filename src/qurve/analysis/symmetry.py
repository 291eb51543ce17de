"""How many directions in the space of a model's parameters leave its function as it is.

Counted from the configuration (`symmetries`): the changes of basis that hidden states and heads allow, and the smaller
redundancies of norms, embeddings and feed-forward units. Measured on tiny models (`functional_dimension`): the rank of
the Jacobian `d logits / d parameters`, which the counted symmetries bound from above:

    rank  <=  parameters - sum of the symmetries

Without skips every hidden state has a basis of its own; a skip ties the bases of the two states that it joins, so that
a residual network has one. RMSNorm lets orthogonal changes through alone, LayerNorm those that also keep the mean
apart. Sources: arXiv 2603.13381, equation 1; M. Karbevski, "A Note on Residual Networks: Skip Connections are Gauge
Fixes" (2026); functional dimension after Grigsby et al., arXiv 2209.04036.

Legend: B batch, T tokens, D model width, H query heads, G key/value heads, E head width, R bottleneck width, F
feed-forward width, V vocabulary, L layers, N logits of a batch (or queries that share a key head), M some of them, P
parameters.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qurve.errors import BadInput
from qurve.model.config import ModelConfig
from qurve.model.feed_forward import Dense, Gated
from qurve.model.gpt import GPT
from qurve.model.mixers import Softmax
from qurve.model.positions import Learned, Rope
from qurve.model.residual import Skip
from qurve.projections import Bottleneck, Dims, Identity, Linear

MOST_ENTRIES = 2**26
"""Of a Jacobian, 512 MiB: larger ones are refused."""
PASSES = 256
"""Rows of it that are computed together."""


WHAT = {
    "hidden states": "a change of basis: what writes the state; what reads it",
    "tied ends": "the embedding's columns and the last norm's gain, where both are read without their mean",
    "token table": "embeddings that a norm alone reads; the queries, keys and values",
    "queries and keys": "per key head, W_Q A; W_K A^-T",
    "values and outputs": "per value head, W_V B; B^-1 W_O",
    "shaping": "per head, the weights of A, I and C; the output's columns",
    "feed-forward units": "per hidden unit, a scale before; its inverse after",
    "norm gains": "per channel, a norm's gain; the rows of what it feeds",
    "zero mean read": "a LayerNorm's output has no mean: per column that reads it, one direction",
    "mean written": "LayerNorm takes the mean off: per row that writes, one direction",
    "query bottleneck": "its norm's gain; W1. The mean of W2's output, taken off",
    "final norm": "its gain, and the direction that it never has; the head",
    "embedding means": "per row of the embeddings, the mean that every LayerNorm takes off",
    "tokens and positions": "one vector, from all positions to all tokens",
}
"""Each kind of symmetry: what is changed; what undoes it."""


@dataclass(frozen=True)
class Symmetry:
    """One way to change a model's parameters and not its logits."""

    name: str
    dimension: int

    @property
    def what(self) -> str:
        """What is changed, and what undoes it."""
        return WHAT[self.name]


@dataclass(frozen=True)
class FunctionalDimension:
    """The rank of `d logits / d parameters` at one point."""

    parameters: int
    rank: int
    gap: float
    """By how much the singular value after the last that counts is smaller: the rank is clear from about 1e4 on."""

    @property
    def redundancy(self) -> int:
        return self.parameters - self.rank


def functional_dimension(model: GPT, ids_BT: Tensor) -> FunctionalDimension:
    """The rank of `d logits / d parameters` on a batch, in float64: a lower bound on the functional dimension.

    Read at the largest gap of the singular values. Meant for tiny models with generic weights (`generic`): at its
    initialisation a model is too close to special points, and the smallest true singular values of a trained one may
    drown in rounding. Raises `ValueError` where the batch has fewer logits than the model has parameters, and for
    Jacobians above `MOST_ENTRIES`.
    """
    jacobian_NP = jacobian(model, ids_BT)
    return FunctionalDimension(jacobian_NP.shape[1], *_rank(torch.linalg.svdvals(jacobian_NP)))


@torch.enable_grad()
def jacobian(model: GPT, ids_BT: Tensor) -> Tensor:
    """`d logits / d parameters` `[N, P]` in float64 and evaluation; parameters in their order, tied ones once."""
    wide = copy.deepcopy(model).double().eval()
    parameters = list(wide.parameters())
    n, p = ids_BT.numel() * model.config.vocab_size, sum(parameter.numel() for parameter in parameters)
    if n < p:
        least = -(-p // (ids_BT.shape[1] * model.config.vocab_size))
        raise ValueError(f"{n} logits cannot tell {p} parameters apart: give at least {least} sequences")
    if n * p > MOST_ENTRIES:
        raise ValueError(f"a Jacobian of {n} logits by {p} parameters is too large: take a smaller model or batch")
    with sdpa_kernel(SDPBackend.MATH):  # the others are not differentiated in batches
        logits_N = wide(ids_BT).flatten()
        rows = []
        for place_M in torch.split(torch.arange(n, device=logits_N.device), PASSES):
            which_MN = F.one_hot(place_M, n).to(logits_N.dtype)
            parts = torch.autograd.grad(logits_N, parameters, which_MN, retain_graph=True, is_grads_batched=True)
            rows.append(torch.cat([part.flatten(1) for part in parts], dim=1))
    return torch.cat(rows)


def _rank(values: Tensor) -> tuple[int, float]:
    """The place of the largest gap in descending singular values, and its size. What is below rounding counts as it."""
    floor = torch.finfo(values.dtype).eps
    above = torch.cat([(values / values[0]).clamp(min=floor), values.new_tensor([floor])])
    gaps = above[:-1] / above[1:]
    place = int(gaps.argmax())
    return place + 1, gaps[place].item()


@torch.no_grad()
def generic(config: ModelConfig, seed: int = 0) -> GPT:
    """A model in float64 whose weights are as good as any: none special, as at the start, and signals of unit size."""
    model, generator = GPT(config, seed).double().eval(), torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.empty_like(parameter).normal_(generator=generator)
        if parameter.dim() < 2:
            drawn = 1 + 0.3 * drawn  # gains
        elif "embedding" not in name:
            drawn /= parameter.shape[-1] ** 0.5
        parameter.copy_(drawn)
    return model


def hidden_states(config: ModelConfig) -> list[list[int]]:
    """The hidden states that share one basis, in groups: what a skip joins, and what shared weights read or write.

    State `2 l` is what block `l`'s attention reads, `2 l + 1` what its feed-forward reads, `2 L` what the head reads.
    """
    layers, residual = config.n_layers, config.residual
    group = list(range(2 * layers + 1))

    def tie(i: int, j: int) -> None:
        old, new = group[j], group[i]
        group[:] = [new if g == old else g for g in group]

    for layer in range(layers):
        if residual.attention_skip:
            tie(2 * layer, 2 * layer + 1)
        if residual.mlp_skip:
            tie(2 * layer + 1, 2 * layer + 2)
        if config.share_blocks and layer:
            tie(0, 2 * layer)
            tie(1, 2 * layer + 1)
    if config.share_blocks and layers > 1:
        tie(2, 2 * layers)  # both written by the one feed-forward
    return [[i for i, g in enumerate(group) if g == which] for which in dict.fromkeys(group)]


def symmetries(config: ModelConfig) -> list[Symmetry]:
    """Every continuous symmetry that is known of such a model, for generic weights; those of dimension 0 left out.

    Of the logits, not of their softmax, and of sequences as long as the context. Their sum is at most the redundancy;
    where units die (ReLU) there can be more. Models that are not counted here are refused with `BadInput`, which names
    what they have.
    """
    _check(config)
    found = {"hidden states": _bases(config), "tied ends": _tied_ends(config), "token table": _table(config)}
    for layer in range(1 if config.share_blocks else config.n_layers):
        for name, dimension in _in_block(config.at(layer)).items():
            found[name] = found.get(name, 0) + dimension
    found |= _around(config)
    return [Symmetry(name, dimension) for name, dimension in found.items() if dimension]


def _bases(config: ModelConfig) -> int:
    """Dimension of the changes of basis at the hidden states."""
    groups = hidden_states(config)
    last, dimension = 2 * config.n_layers, 0
    for group in groups:
        ends = config.tie_embeddings and (0 in group or last in group)
        if not ends:
            dimension += _basis(config, group)
        elif config.residual.norm_place == "none" and 0 in group:
            # the head E^T reads the last state: its basis is the inverse transpose of the first one's
            if last in group:
                dimension += _basis(config, group, orthogonal=True)
            else:
                dimension += _basis(config, group + next(other for other in groups if last in other))
    return dimension


def _tied_ends(config: ModelConfig) -> int:
    """Where both ends of a skipless model read one matrix E through LayerNorms, with Z taking the mean off: rotations
    P and Q, a matrix M and a gain g' with `M Z = Z P` and `M g' Z = g Z Q`, `D (D - 1)` equations for two more
    unknowns."""
    groups, last = hidden_states(config), 2 * config.n_layers
    apart = not any(0 in group and last in group for group in groups)
    first = next(group for group in groups if 0 in group)
    free = apart and _basis(config, first) == rotations(config.d_model - 1)
    return 2 if free and config.tie_embeddings and _is_pre_layernorm(config) else 0


def _is_pre_layernorm(config: ModelConfig) -> bool:
    return config.residual.norm_place == "pre" and config.norm == "layernorm"


def _basis(config: ModelConfig, states: list[int], orthogonal: bool = False) -> int:
    """Dimension of the changes of one basis that the norms and the queries reading these states let through."""
    d, e = config.d_model, config.head_width
    heads = config.kv_heads
    kinds = {config.at(state // 2).query.kind for state in states if state % 2 == 0 and state < 2 * config.n_layers}
    if "bottleneck" in kinds:
        return 0
    pinned = "identity" in kinds  # then each head's channels stay its own, and its keys turn with them
    if config.residual.norm_place == "none":
        if orthogonal:
            return heads * rotations(e) if pinned else rotations(d)
        return heads * e * e if pinned else d * d
    if pinned and heads != config.n_heads:
        return 0  # queries of one key head would need one change, and each has gains of its own
    if config.norm == "rmsnorm":
        return heads * rotations(e) if pinned else rotations(d)
    return heads * rotations(e - 1) if pinned else rotations(d - 1)


def rotations(width: int) -> int:
    """Dimension of the orthogonal group."""
    return width * (width - 1) // 2


def _table(config: ModelConfig) -> int:
    """What an embedding table allows beyond a rotation where nothing but a norm reads it.

    RMSNorm maps onto an open ball: near each matrix M there is for every row `e` one `e'` with `norm(e') = norm(e) M`.
    """
    if not _read_by_norm_alone(config):
        return 0
    layernorm, e, rotated = config.norm == "layernorm", config.head_width, _basis(config, [0])
    if config.at(0).query.kind == "identity":
        # M within heads; the gain is free beside it, or, where the norm's output has no mean, follows but for its scale
        return config.kv_heads * (e * e - e) + (1 if layernorm else config.d_model) - rotated
    return (config.d_model - layernorm) ** 2 - rotated


def _read_by_norm_alone(config: ModelConfig) -> bool:
    table = not config.tie_embeddings and not isinstance(config.positions, Learned)
    return table and hidden_states(config)[0] == [0] and config.residual.norm_place == "pre"


def _in_block(here: ModelConfig) -> dict[str, int]:
    """The symmetries inside one block."""
    d, e, f, heads, kv_heads = here.d_model, here.head_width, here.d_ff, here.n_heads, here.kv_heads
    kind, rank = here.query.kind, here.query.rank(Dims(d, d)) if isinstance(here.query, Bottleneck) else 0
    units = {"gelu": 0, "silu": 0, "relu": f, "relu2": f}[here.mlp.activation]
    gates = isinstance(here.mlp, Gated)
    found = {
        "queries and keys": _queries_keys(here) if kind == "linear" else 0,
        "values and outputs": kv_heads * _head_basis(here),
        "shaping": 0 if here.residual.attention_skip else heads,
        "feed-forward units": units + (f if gates else 0),
        "query bottleneck": d + rank if rank else 0,
    }
    if here.residual.norm_place == "pre":
        found["norm gains"] = d + {"linear": d, "identity": kv_heads * e, "bottleneck": 0}[kind]
        if _is_pre_layernorm(here):
            queries = {"linear": heads * e, "identity": 0, "bottleneck": rank}[kind]
            found["zero mean read"] = queries + 2 * kv_heads * e + f * (2 if gates else 1)
            found["mean written"] = heads * e + f
    return found


def _queries_keys(here: ModelConfig) -> int:
    """Per key head any invertible A; with rotary positions one that turns and scales each pair of channels."""
    return here.kv_heads * (here.head_width if isinstance(here.positions, Rope) else _head_basis(here))


def _head_basis(here: ModelConfig) -> int:
    """Dimension of what leaves the two factors' product in one key or value head: `E^2`, the changes of its basis.

    Where a head is wider than the W channels that its norm leaves, not all of these change the factors, and others do:
    the parameters of both, `N W E + W E`, less those of their product, which is any `[N W, W]`.
    """
    n, e, w = here.n_heads // here.kv_heads, here.head_width, here.d_model - _is_pre_layernorm(here)
    return e * e if e <= w else n * w * (e - w) + w * e


def _around(config: ModelConfig) -> dict[str, int]:
    """The symmetries of embeddings, final norm and head."""
    d, v, layernorm = config.d_model, config.vocab_size, _is_pre_layernorm(config)
    learned, untied = isinstance(config.positions, Learned), not config.tie_embeddings
    found = {}
    if config.residual.norm_place == "pre" and untied:
        found["final norm"] = d + (v if layernorm else 0)
    if layernorm:
        found["embedding means"] = (v if untied else 0) + (config.context if learned else 0)
    if learned and untied:
        found["tokens and positions"] = d - layernorm
    elif learned and layernorm:
        found["tokens and positions"] = 1  # the vector 1 / g, which the head's norm g never has
    return found


def _check(config: ModelConfig) -> None:
    """Refuse what is not counted here."""
    wrong = _uncounted(config)
    for layer, _ in config.distinct_layers():
        wrong = wrong or _uncounted_block(config.at(layer))
    if wrong is not None:
        raise BadInput(f"the symmetries of this model are not counted: {wrong}")


def _uncounted(config: ModelConfig) -> str | None:
    d, kind = config.d_model, config.at(0).query.kind
    if not isinstance(config.residual, Skip) or config.residual.norms == "post":
        return "its residual scheme (model.residual) is neither of skips with pre-norms nor of skips without norms"
    if config.bias:
        return "biases (model.bias) add translations"
    if config.qk_norm:
        return "model.qk_norm lets other changes through"
    if config.subspaces.total:
        return "model.subspaces reach past the hidden states"
    if min(config.vocab_size, config.d_ff, config.n_heads * config.head_width) < d:
        return f"its vocabulary, feed-forward or heads together are narrower than model.d_model = {d}"
    if _read_by_norm_alone(config) and kind == "bottleneck":
        return "nonlinear queries and a norm are all that reads its token table"
    return None


def _uncounted_block(here: ModelConfig) -> str | None:
    if type(here.mixer) is not Softmax:
        return f"model.mixer = {here.mixer.kind}"
    if not isinstance(here.mlp, (Dense, Gated)) or here.mlp.activation == "identity":
        return f"model.mlp = {here.mlp.kind} with the activation {here.mlp.activation}"
    if not all(isinstance(p, Linear) for p in (here.key, here.value, here.output)):
        return "its keys, values and outputs are not all linear"
    if not (isinstance(here.query, (Linear, Identity)) or _is_papers(here.query)):
        return f"model.query = {here.query.kind} is neither linear, nor the identity, nor the paper's layer"
    if here.query.kind != "linear" and isinstance(here.positions, Rope):
        return "rotary positions beside queries that are not linear"
    if here.query.kind == "identity" and here.n_heads == 1 and _is_pre_layernorm(here):
        return "one head whose query is a LayerNorm's output"
    if isinstance(here.query, Bottleneck) and min(here.n_heads, here.query.rank(Dims(here.d_model, here.d_model))) == 1:
        return "nonlinear queries of one head, or of one unit, leave more free than is known"
    if min(here.context, here.window or here.context) < 3:
        return "attention over fewer than three tokens"
    return None


def _is_papers(query: object) -> bool:
    """Whether a query is the paper's layer, of any width and step size."""
    return isinstance(query, Bottleneck) and query == Bottleneck(width=query.width, eps=query.eps, scale=query.scale)
