"""The nonlinear part of a retrofitted query layer, and how it is put there and taken away.

The layer itself stays: same object, same weights, same class, so that quantisation, adapters and state dicts go on as
before. It gets one child, `nonlinear`, and one forward hook that adds the child's output to the queries.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from qurve.errors import BadInput
from qurve.hf.families import Layout, Site
from qurve.model.init import stream_seed
from qurve.projections.base import STD, Dims
from qurve.projections.bottleneck import Bottleneck
from qurve.projections.module import Projection

NAME = "nonlinear"


class QueryPart(Projection):
    """`scale * f(x)`, which is added to the queries `x W_Q` of a layer; with another anchor than `linear` the whole
    query, which takes their place.

    Parameters are `w1 [R, D]`, `w2 [O, R]` and the norms' gains, `O` being the query entries of a token. They are in
    float32 for a layer in half precision, as trained adapters want it; `x` is cast to their dtype, the output back.
    They hold nothing until `draw` or somebody's weights fill them.
    """

    exact = False
    """Whether it starts at zero."""

    def __init__(
        self,
        config: Bottleneck,
        d_in: int,
        layout: Layout,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype,
    ) -> None:
        beside = config.anchor == "linear"  # the layer's own weight is the anchor
        own = dataclasses.replace(config, anchor="none", start="usual") if beside else config
        super().__init__(own, Dims(d_in, layout.queries), device="meta")
        self.layout, self.beside, self.exact = layout, beside, beside and config.start == "exact"
        self.to(dtype).to_empty(device=device or "cpu")

    @torch.no_grad()
    def draw(self, seed: int, name: str) -> None:
        """Start: gains at one, matrices drawn from the seed and their names, on the CPU, so that every device has the
        same; at the exact start the post-norm's gain is zero."""
        for own, p in self.named_parameters():
            if p.dim() == 1:
                p.fill_(0.0 if self.exact and own == "post_gain" else 1.0)
            elif not p.is_meta:
                generator = torch.Generator().manual_seed(stream_seed(seed, f"init/{name}.{own}"))
                p.copy_(torch.empty(p.shape).normal_(0.0, STD, generator=generator))

    def onto(self, x_BTD: Tensor, y_BTO: Tensor) -> Tensor:
        """The layer's output for the input `x_BTD`, with the queries in it made nonlinear."""
        groups, width, size = self.layout
        own_BTQ: Tensor = self(x_BTD.to(self.w1.dtype)).to(y_BTO.dtype)
        if width == size:
            return y_BTO + own_BTQ if self.beside else own_BTQ
        leading = y_BTO.shape[:-1]
        queries, others = torch.split(y_BTO.reshape(*leading, groups, size), [width, size - width], dim=-1)
        own = own_BTQ.reshape(*leading, groups, width)
        return torch.cat([queries + own if self.beside else own, others], dim=-1).reshape(y_BTO.shape)


def build(site: Site, config: Bottleneck) -> QueryPart:
    """The part for a query layer, on its device. Raises `BadInput` for widths that cannot be."""
    weight = getattr(site.layer, "weight", None)
    dtype = torch.float64 if weight is not None and weight.dtype == torch.float64 else torch.float32
    try:
        return QueryPart(config, site.d_in, site.layout, device=None if weight is None else weight.device, dtype=dtype)
    except ValueError as error:
        raise BadInput(f"{site.name}: {error}") from None


def attach(layer: nn.Module, part: QueryPart) -> None:
    layer.add_module(NAME, part)
    layer.register_forward_hook(_act)


def detach(layer: nn.Module) -> None:
    for handle in [key for key, hook in layer._forward_hooks.items() if hook is _act]:
        del layer._forward_hooks[handle]
    delattr(layer, NAME)


def parts(model: nn.Module) -> dict[str, QueryPart]:
    """The parts in a model, by the names of their layers."""
    return {
        name: part for name, layer in model.named_modules() if isinstance(part := layer._modules.get(NAME), QueryPart)
    }


def _act(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    # A plain function that looks the part up: a copied or pickled model has its own part act.
    part: QueryPart = layer.nonlinear  # type: ignore[assignment]
    if not args:
        raise BadInput(f"a {type(layer).__name__} with a nonlinear part is called by the names of its arguments")
    return part.onto(args[0], output)
