"""Queries, keys and values as maps of a block's input, one token at a time: what geometry is measured on.

Legend: B batch, T tokens, M tokens of all sequences, D width of a pathway's input, O its output width, F hidden width.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qurve.model.attention import Attention
from qurve.model.gpt import GPT
from qurve.projections import Bottleneck
from qurve.projections.module import Projection, reads_nothing_else, set_impl

NAMES = ("query", "key", "value")


@dataclass(frozen=True)
class Pathway:
    """One projection with what it was given, both in float64."""

    projection: nn.Module
    x_MD: Tensor
    other: tuple[Tensor, ...]
    """`h_MF`, where it reads the previous block's hidden activations too; they count as given."""
    length: int
    """T: each sequence's tokens stand together."""

    def __call__(self, x_MD: Tensor) -> Tensor:
        """The outputs `[M, O]` for `x_MD` or other inputs in its place."""
        out_MO: Tensor = self.projection(x_MD, *self.other)
        return out_MO

    def f(self, x_MD: Tensor) -> Tensor | None:
        """`f(x)` `[M, O]`: what the projection adds to its anchor, without the scale of both. None where nothing is
        added, or where a separate norm stage mixes the two."""
        if not isinstance(self.projection, Projection):
            return None
        config, c = self.projection.config, self.projection.config.identity_term
        if isinstance(config, Bottleneck):
            if config.norm_stage == "separate" and config.anchor != "none":
                return None
            alone = dataclasses.replace(config, anchor="none", start="usual", scale=1.0)
            return alone.forward(self.projection, x_MD)
        if not c or not config.reach(self.projection.dims).beyond:
            return None
        return self(x_MD) / c - x_MD

    def of(self, tokens_M: Tensor) -> Pathway:
        """The same for some of the tokens, by their numbers; `length` is then no more than their number."""
        rows = (self.x_MD[tokens_M], tuple(h_MF[tokens_M] for h_MF in self.other))
        return Pathway(self.projection, *rows, len(tokens_M))


Block = dict[str, Pathway]
"""The pathways of one block, by the names of its projections; of those it has."""


@contextlib.contextmanager
def visiting(model: GPT, visit: Callable[[int, Block], None]) -> Iterator[None]:
    """Call `visit(layer, block)` for every block of every forward pass of the `with` block.

    Nothing is kept: what `visit` does not store is gone with the pass. Outputs stay as they are; hooks are set on this
    model's modules alone and gone afterwards. Projections are copied, in float64. Call the plain model: a compiled one
    passes hooks by. Raises `ValueError` in a pass with a cache.
    """
    layers = model.config.n_layers
    passes = [range(layers)] if model.config.share_blocks else [[layer] for layer in range(layers)]
    handles = []
    for own, block in zip(passes, model.blocks, strict=True):
        attention = block.get_submodule("attention")
        if isinstance(attention, Attention):
            projections = {name: _wide(p) for name, p in attention.named_children() if name in NAMES}
            seen = partial(_see, visit, itertools.cycle(own), projections)
            handles.append(attention.register_forward_pre_hook(seen))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def read_all(model: GPT, batches: Iterable[Tensor], visit: Callable[[int, Block], None]) -> None:
    """Visit the blocks on every batch of tokens `[B, T]`, in evaluation. The head is not run."""
    was_training = model.training
    try:
        model.eval()
        with visiting(model, visit):
            for ids_BT in batches:
                model.hidden(ids_BT, prefix_B=no_prefix(model, ids_BT))
    finally:
        model.train(was_training)


def no_prefix(model: GPT, ids_BT: Tensor) -> Tensor | None:
    """Prefixes of no tokens, for a model that asks for their lengths: it then reads causally."""
    if model.config.attends != "prefix":
        return None
    return torch.zeros(len(ids_BT), dtype=torch.long, device=ids_BT.device)


def _wide(projection: nn.Module) -> nn.Module:
    wide = copy.deepcopy(projection).double().requires_grad_(False).eval()
    set_impl(wide, "reference")
    return wide


@torch.no_grad()
def _see(
    visit: Callable[[int, Block], None],
    layers: Iterator[int],
    projections: dict[str, nn.Module],
    attention: nn.Module,
    arguments: tuple[Any, ...],
) -> None:
    inputs, _, hidden_BTF, state = arguments
    if state is not None:
        raise ValueError("geometry is measured on whole sequences: call the model without a cache")
    by_name = dict(zip(NAMES, inputs if len(inputs) > 1 else inputs * 3, strict=True))
    flat = {id(x): x.detach().double().flatten(0, 1) for x in by_name.values()}  # one and the same stays so
    h_MF = None if hidden_BTF is None else hidden_BTF.detach().double().flatten(0, 1)
    block = {}
    for name, projection in projections.items():
        other = () if h_MF is None or reads_nothing_else(projection) else (h_MF,)
        block[name] = Pathway(projection, flat[id(by_name[name])], other, inputs[0].shape[1])
    visit(next(layers), block)
