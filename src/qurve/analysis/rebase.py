"""A model with its hidden states in other bases (see `qurve.analysis.absorb`).

Legend: D model width, V vocabulary, I and O input and output width of a weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qurve.analysis.reparametrize import Basis, affine
from qurve.analysis.topology import Topology, feed_forward
from qurve.model.config import LayerOverride, ModelConfig
from qurve.model.gpt import GPT
from qurve.projections import Identity, Linear, ProjectionConfig
from qurve.projections.base import STD

Weight = Literal["query", "key", "value", "output"]
WEIGHTS: tuple[Weight, ...] = ("query", "key", "value", "output")

Kinds = dict[tuple[Weight, ProjectionConfig], list[int]]
"""The blocks whose projection of that name becomes of that kind."""


@torch.no_grad()
def rebased(
    model: GPT,
    bases: Sequence[Basis | None],
    identities: Collection[str] = (),
    triangles: Collection[str] = (),
    unties: bool = False,
) -> GPT:
    """A copy of `model`, in evaluation mode, with state s written as `x Θ_s` for `bases[s]`; None leaves one as it is.

    Gains are folded into what reads such a state, where they can be. The projections named in `identities` are replaced
    by it, and what rounding leaves below the diagonal of those in `triangles` (above, of an output) is cleared: the
    bases have to be right for that. `unties`: a tied head gets a weight of its own. The logits are the same where the
    topology lets these bases be.
    """
    topology, kinds = Topology(model, unties), Kinds()
    weights = {name: p.detach().clone() for name, p in model.state_dict().items()}

    def put(name: str, projection: nn.Module, reads: int | None, writes: int | None) -> bool:
        """One projection in the bases of the states that it reads and writes; says whether it has become another."""
        if (reads is None or bases[reads] is None) and (writes is None or bases[writes] is None):
            return False
        w_IO, b_O = affine(projection)
        if reads is not None:
            w_IO = _read(w_IO, topology, bases, reads)
        if writes is not None and (basis := bases[writes]) is not None:
            w_IO, b_O = basis.writing(w_IO), None if b_O is None else basis.writing(b_O)
        if name in triangles:
            w_IO = w_IO.tril() if name.endswith(".output") else w_IO.triu()
        weights[f"{name}.weight"] = w_IO.T
        if b_O is not None:
            weights[f"{name}.bias"] = b_O
        return True

    blocks: list[Any] = list(model.blocks)
    for layer, block in enumerate(blocks):
        before, between, after = 2 * layer, 2 * layer + 1, 2 * layer + 2
        for weight in WEIGHTS:
            name, projection = f"blocks.{layer}.attention.{weight}", getattr(block.attention, weight, None)
            if name in identities:
                for parameter in ("weight", "bias"):
                    weights.pop(f"{name}.{parameter}", None)
                kinds.setdefault((weight, Identity()), []).append(layer)
            elif projection is not None:
                states = (None, between) if weight == "output" else (before, None)
                if put(name, projection, *states) and not isinstance(projection.config, Linear):
                    kinds.setdefault((weight, Linear()), []).append(layer)
        readers, writers = feed_forward(block.mlp) or ([], [])
        for inner in (*readers, *writers):
            states = (between, None) if inner in readers else (None, after)
            put(f"blocks.{layer}.mlp.{inner}", block.mlp.get_submodule(inner), *states)

    head_VD = weights.get("head.weight")
    if model.head is None and unties:
        size = STD / model.config.embedding_std  # a tied head is scaled, one of its own is not
        head_VD = size * weights["token_embedding.weight"].double()
    if head_VD is not None:
        weights["head.weight"] = _read(head_VD.double().T, topology, bases, topology.last).T
    if (basis := bases[0]) is not None:
        for name in ("token_embedding.weight", "position_embedding.weight"):
            if name in weights:
                weights[name] = basis.writing(weights[name].double())
    for state, basis in enumerate(bases):
        norm = topology.norm(state)
        if basis is not None and norm is not None and topology.folded_gain(state) is not None:
            weights[f"{norm[0]}.weight"] = torch.ones_like(weights[f"{norm[0]}.weight"])

    with torch.device("meta"):
        changed = GPT(_configured(model.config, kinds, len(model.blocks), unties and model.head is None))
    like = model.token_embedding.weight
    changed.load_state_dict({n: p.to(like.device, like.dtype).contiguous() for n, p in weights.items()}, assign=True)
    return changed.eval()


def _read(w_DO: Tensor, topology: Topology, bases: Sequence[Basis | None], state: int) -> Tensor:
    """What reads a state in its new basis, `Θ^-1 diag(g) W`."""
    basis, gain_D = bases[state], topology.folded_gain(state)
    if basis is None:
        return w_DO
    return basis.reading(w_DO if gain_D is None else gain_D.double()[:, None] * w_DO)


def _configured(config: ModelConfig, kinds: Mapping[Any, list[int]], n_blocks: int, unties: bool) -> ModelConfig:
    """The configuration with other projections in some blocks."""
    changes: dict[str, Any] = {"tie_embeddings": False} if unties else {}
    overrides = [*config.overrides]
    for (weight, kind), layers in kinds.items():
        if len(layers) == n_blocks and all(getattr(override, weight) is None for override in overrides):
            changes[weight] = kind
        else:
            overrides.append(LayerOverride(tuple(layers), **{weight: kind}))
    return dataclasses.replace(config, **changes, overrides=tuple(overrides))
