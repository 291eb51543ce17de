"""The exact reduction of a trained model: every symmetry that it has left is spent on entries that need no storing.

A change of basis G at a hidden state, `h -> h G`, is undone by what reads it. Without norms G is any invertible matrix,
and turns one block of `D x D` weights into the identity; under RMSNorm it is orthogonal, and makes one triangular (QR).
Without skips that is one block for each hidden state, with them one for the whole model. LayerNorm goes first: behind
its gain it is an RMSNorm of width `D - 1`. The bases of heads, and a vector that positions can leave to the tokens,
are spent likewise. Sources: M. Karbevski, "A Note on Residual Networks: Skip Connections are Gauge Fixes" (2026);
Graef, arXiv 2404.12362; LayerNorm as RMSNorm: Ashkboos et al., arXiv 2401.15024.

Weights are `[out, in]`, transposed against the formulas: writing G is `G^T weight`, reading it `weight G^-T`.

Legend: D model width, C = D - 1, G key/value heads, N queries that share one, E head width, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from qurve.analysis.gauges import change_heads
from qurve.analysis.symmetry import hidden_states
from qurve.errors import BadInput
from qurve.model.attention import Attention
from qurve.model.config import ModelConfig
from qurve.model.feed_forward import MixtureOfExperts
from qurve.model.gpt import GPT, Block
from qurve.model.positions import Learned, Rope
from qurve.model.residual import Skip
from qurve.projections import Linear
from qurve.projections.functional import fold

WORST = 1e10
"""Condition of a matrix, above which no basis is changed by it: the logits would lose ten digits."""


@dataclass
class Reduced:
    """A model with the same logits, and which of its entries are known without storing them."""

    model: GPT
    """In float64; of another width, and with RMSNorm, where LayerNorm stood."""
    given: dict[str, Tensor] = field(default_factory=dict)
    """By parameter, true where an entry is 0 or 1 by construction."""
    spent: dict[str, int] = field(default_factory=dict)
    """Parameters that went, by the name of the symmetry (`symmetry.WHAT`)."""
    condition: float = 1.0
    """The worst condition number of a change of basis: rounding errors grow by about as much."""

    @property
    def removed(self) -> int:
        return sum(self.spent.values())

    def give(self, name: str, parameter: Tensor, where: Tensor, values: Tensor, symmetry: str) -> None:
        """Write entries that hold by construction, and count them."""
        parameter[where] = values.to(parameter.dtype)[where]
        self.given[name] = self.given.get(name, torch.zeros_like(parameter, dtype=torch.bool)) | where
        self.count(symmetry, int(where.sum()))

    def count(self, symmetry: str, number: int) -> None:
        self.spent[symmetry] = self.spent.get(symmetry, 0) + number


def reduce(model: GPT) -> Reduced:
    """Spend the freedom of hidden states, norms, heads and positions; a new model with the same logits.

    Not spent: scales of feed-forward units, shapings, and queries and keys where their heads have no free basis
    (rotary positions, QK-norm). Raises `BadInput` for models whose hidden states have no basis to choose, naming what
    keeps it; a tied head can be untied before (`untied`).
    """
    check_reducible(model.config)
    wide = _with_state(model.config, dict(model.state_dict()), model.training).double()
    with torch.no_grad():
        reduced = Reduced(wide)
        if model.config.residual.norm_place == "pre":
            if model.config.norm == "layernorm":
                reduced = _without_mean(wide)
            _fold_gains(reduced)
        _spend_positions(reduced)
        for states in hidden_states(reduced.model.config):
            _spend_basis(reduced, states)
        for number, block in enumerate(reduced.model.blocks):
            _spend_heads(reduced, number, cast(Block, block))
    return reduced


def untied(model: GPT) -> GPT:
    """A copy whose head is a matrix of its own: `V D` parameters more, the same logits."""
    if not model.config.tie_embeddings:
        raise ValueError("this model's head is not tied to its embedding")
    state = dict(model.state_dict())
    # A tied head is scaled where embeddings start larger than a head would.
    one = model.head_weight.new_ones(model.config.d_model)
    state["head.weight"] = model.head_weight.detach() * model._scaled(one)
    return _with_state(replace(model.config, tie_embeddings=False), state, model.training)


def _with_state(config: ModelConfig, state: dict[str, Tensor], training: bool) -> GPT:
    """A model of copies of these tensors."""
    model = GPT(config)
    model.load_state_dict({name: tensor.detach().clone() for name, tensor in state.items()}, assign=True)
    return model.train(training)


def check_reducible(config: ModelConfig) -> None:
    """`BadInput`, naming the obstacle, where no basis of a hidden state can be changed exactly."""
    obstacle = None
    if not isinstance(config.residual, Skip):
        obstacle = f"model.residual = {config.residual.kind} mixes its streams by weights that depend on them"
    elif config.residual.norms == "post":
        obstacle = "a post-norm's gain stands in the stream itself, channel by channel (model.residual.norms)"
    elif config.bias:
        obstacle = "biases (model.bias) are not carried along here"
    elif config.subspaces.total:
        obstacle = "model.subspaces reach past the hidden states"
    elif config.tie_embeddings:
        obstacle = "the head is tied to the embedding, and one matrix stands at both ends; untie it (`untied`) first"
    for layer, _ in config.distinct_layers():
        for name, (kind, _) in config.at(layer).projections(layer).items():
            if not isinstance(kind, Linear):
                obstacle = obstacle or f"model.{name} = {kind.kind} is not linear, and fixes the basis of what it reads"
        if type(config.at(layer).mixer).__name__ != "Softmax":
            obstacle = obstacle or f"model.mixer = {config.at(layer).mixer.kind} is not softmax attention"
    if config.head_width > config.d_model:
        obstacle = obstacle or f"a head is wider than model.d_model = {config.d_model}, and its weights hold no square"
    if min(config.vocab_size, config.d_ff) < config.d_model:
        obstacle = obstacle or f"the vocabulary or the feed-forward is narrower than model.d_model = {config.d_model}"
    if obstacle is not None:
        raise BadInput(f"the bases of this model's hidden states cannot be changed: {obstacle}")


def reads(model: GPT, state: int) -> dict[str, nn.Parameter]:
    """The weights `[O, D]` that read a hidden state (`symmetry.hidden_states` numbers them), by name."""
    layer, inside = divmod(state, 2)
    if layer == model.config.n_layers:
        return _named(model, ["head"])
    at = f"blocks.{0 if model.config.share_blocks else layer}"
    if not inside:
        return _named(model, [f"{at}.attention.{name}" for name in ("query", "key", "value")])
    return _named(model, [f"{at}.{name}" for name in _mlp_parts(model.config.at(layer), reading=True)])


def writes(model: GPT, state: int) -> dict[str, nn.Parameter]:
    """The weights that write it: `[D, in]`, but for embeddings, which are `[rows, D]`."""
    layer, inside = divmod(state, 2)
    if state == 0:
        names = ["token_embedding"] + (["position_embedding"] if model.position_embedding is not None else [])
        return _named(model, names)
    at = f"blocks.{0 if model.config.share_blocks else layer - (not inside)}"
    if inside:
        return _named(model, [f"{at}.attention.output"])
    return _named(model, [f"{at}.{name}" for name in _mlp_parts(model.config.at(layer - 1), reading=False)])


def _mlp_parts(here: ModelConfig, reading: bool) -> list[str]:
    names = ["down"] if not reading else [name for name in here.mlp.matrices(1, 1) if name != "down"]
    if not isinstance(here.mlp, MixtureOfExperts):
        return [f"mlp.{name}" for name in names]
    experts = [f"mlp.experts.{number}.{name}" for number in range(here.mlp.experts) for name in names]
    return experts + (["mlp.router"] if reading else [])


def _named(model: GPT, modules: list[str]) -> dict[str, nn.Parameter]:
    return {f"{name}.weight": model.get_parameter(f"{name}.weight") for name in modules}


def _fold_gains(reduced: Reduced) -> None:
    """`RMSNorm(h) g W`: the gain becomes part of W, and is one."""
    model, done = reduced.model, set[str]()
    for state in range(2 * model.config.n_layers + 1):
        name, norm = _norm(model, state)
        if name in done:
            continue
        done.add(name)
        for weight in reads(model, state).values():
            weight.copy_(fold("rmsnorm", weight, norm.weight))
        everywhere = torch.ones_like(norm.weight, dtype=torch.bool)
        symmetry = "final norm" if name == "final_norm" else "norm gains"
        reduced.give(f"{name}.weight", norm.weight, everywhere, torch.ones_like(norm.weight), symmetry)


def _norm(model: GPT, state: int) -> tuple[str, nn.LayerNorm | nn.RMSNorm]:
    layer, inside = divmod(state, 2)
    at = f"blocks.{0 if model.config.share_blocks else layer}"
    name = "final_norm" if layer == model.config.n_layers else f"{at}.{'mlp' if inside else 'attention'}_norm"
    norm = model.get_submodule(name)
    assert isinstance(norm, (nn.LayerNorm, nn.RMSNorm))
    return name, norm


def _without_mean(model: GPT) -> Reduced:
    """LayerNorm as an RMSNorm of width C: the stream's mean, which no norm sees, is left out of every write.

    With U `[D, C]` an orthonormal basis of the channels' differences, `h U` has the norm of `h - mean(h)`, so that
    `LN(h) = sqrt(D / C) RMSNorm(h U) U^T g`, with `eps D / C` in it.
    """
    config = model.config
    d = config.d_model
    if d <= config.head_width or config.qk_norm:
        raise BadInput("a LayerNorm as wide as one head, or beside model.qk_norm, is not made an RMSNorm here")
    narrow = replace(
        config, norm="rmsnorm", d_model=d - 1, d_head=config.head_width, norm_eps=config.norm_eps * d / (d - 1)
    )
    ones_D1 = torch.ones(d, 1, dtype=torch.float64)
    u_DC = torch.linalg.qr(ones_D1, mode="complete").Q[:, 1:]
    state = dict(model.state_dict())
    for number in range(2 * config.n_layers + 1):
        name, norm = _norm(model, number)
        for key, weight in reads(model, number).items():
            state[key] = (d / (d - 1)) ** 0.5 * (weight * norm.weight) @ u_DC
        for key, weight in writes(model, number).items():
            state[key] = weight @ u_DC if "embedding" in key else u_DC.T @ weight
        state[f"{name}.weight"] = torch.ones(d - 1, dtype=torch.float64)
    reduced = Reduced(_with_state(narrow, state, model.training))
    for name, parameter in model.named_parameters():
        reduced.count(_meanless(name), parameter.numel() - reduced.model.get_parameter(name).numel())
    return reduced


def _meanless(name: str) -> str:
    """The symmetry that a parameter of a LayerNorm model lost entries to."""
    if name.endswith("norm.weight") or name == "head.weight":
        return "final norm" if name in ("final_norm.weight", "head.weight") else "norm gains"
    if "embedding" in name:
        return "embedding means"
    return "mean written" if name.endswith(("output.weight", "down.weight")) else "zero mean read"


def _spend_positions(reduced: Reduced) -> None:
    """The first position becomes zero: its vector moves to every token."""
    model = reduced.model
    if not isinstance(model.config.positions, Learned):
        return
    assert model.position_embedding is not None
    positions, tokens = model.position_embedding.weight, model.token_embedding.weight
    first = positions[0].clone()
    positions -= first
    tokens += first
    where = torch.zeros_like(positions, dtype=torch.bool)
    where[0] = True
    reduced.give("position_embedding.weight", positions, where, positions.clone(), "tokens and positions")


def _spend_basis(reduced: Reduced, states: list[int]) -> None:
    """Fix the basis of the states that share one: a block of what reads one of them becomes special.

    The block is the first D rows of a feed-forward's reading weights, of the head's, or of what writes the state: none
    of those that a head's basis acts on.
    """
    model = reduced.model
    d, last = model.config.d_model, 2 * model.config.n_layers
    inside = next((state for state in states if state % 2 or state == last), None)
    reading = inside is not None
    name, block = next(iter((reads(model, inside) if inside is not None else writes(model, states[0])).items()))
    w_DD = (block if reading or "embedding" in name else block.T)[:d].T.clone()
    # In the formulas' layout `w_DD` is a read, `G^-1 w` after the change, or the transpose of a write, `G^T w`.
    if model.config.residual.norm_place == "none":
        condition = torch.linalg.cond(w_DD).item()
        if not condition < WORST:
            raise BadInput(f"the first {d} rows or columns of {name} are singular (condition {condition:.1e})")
        reduced.condition = max(reduced.condition, condition)
        g_DD = w_DD if reading else torch.linalg.inv(w_DD).T
        special, where = torch.eye(d, dtype=w_DD.dtype), torch.ones(d, d, dtype=torch.bool)
    else:
        g_DD = torch.linalg.qr(w_DD).Q
        special, where = torch.zeros(d, d, dtype=w_DD.dtype), torch.ones(d, d, dtype=torch.bool).triu(1)
    change_basis(model, states, g_DD)
    where_full, values = torch.zeros_like(block, dtype=torch.bool), torch.zeros_like(block)
    as_rows = reading or "embedding" in name
    (where_full if as_rows else where_full.T)[:d] = where
    (values if as_rows else values.T)[:d] = special
    reduced.give(name, block, where_full, values, "hidden states")


@torch.no_grad()
def change_basis(model: GPT, states: list[int], g_DD: Tensor) -> None:
    """`h -> h G` at hidden states that share one basis, in place: what writes them, and what reads them, change.

    The function stays as it is where `states` is one of `symmetry.hidden_states`, gains are folded (all one), and G is
    orthogonal if there are norms.
    """
    inverse_DD = torch.linalg.inv(g_DD)
    written = {name: weight for state in states for name, weight in writes(model, state).items()}
    read = {name: weight for state in states for name, weight in reads(model, state).items()}
    for name, weight in written.items():
        weight.copy_(weight @ g_DD if "embedding" in name else g_DD.T @ weight)
    for weight in read.values():
        weight.copy_(weight @ inverse_DD.T)


def _spend_heads(reduced: Reduced, number: int, block: Block) -> None:
    """In each key and each value head, the weights of the first E inputs become the identity."""
    attention, config = block.get_submodule("attention"), block.config
    assert isinstance(attention, Attention)
    e = config.head_width
    free = {"values": ("value", "values and outputs")}
    if not config.qk_norm and not isinstance(config.positions, Rope):
        free["logits"] = ("key", "queries and keys")
    for pair, (name, symmetry) in free.items():
        weight = getattr(attention, name).weight
        block_GEE = weight.view(-1, e, weight.shape[1])[:, :, :e].mT.clone()  # `W` of the first E inputs
        condition = torch.linalg.cond(block_GEE).max().item()
        if not condition < WORST:
            raise BadInput(f"the first {e} inputs of a head of block {number}'s {name} are singular")
        reduced.condition = max(reduced.condition, condition)
        inverse_GEE = torch.linalg.inv(block_GEE)
        if pair == "values":
            change_heads(attention, "values", inverse_GEE)
        else:
            change_heads(attention, "logits", block_GEE.mT)
        where = torch.zeros_like(weight, dtype=torch.bool).view(-1, e, weight.shape[1])
        where[:, :, :e] = True
        values = torch.zeros_like(weight).view(where.shape)
        values[:, :, :e] = torch.eye(e, dtype=weight.dtype)
        key = f"blocks.{number}.attention.{name}.weight"
        reduced.give(key, weight, where.view(weight.shape), values.view(weight.shape), symmetry)
