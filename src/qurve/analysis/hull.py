"""The affine hull of queries, keys and values: how many dimensions they can span together, and how many they do.

The map of one token, `x -> (q, k, v)`, is flat where all three are linear: its image lies in a flat of the input's own
dimension. What a nonlinear pathway adds to a linear term can leave that flat, by as many dimensions as it spans itself.
Bounds are for any weights; measured is on activations.

Source: arXiv 2603.13381, appendix B.2; the tighter bound is proved in this project's notes on its theory.

Legend: B batch, T tokens, M points, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from qurve.analysis.pathways import NAMES, Block, read_all
from qurve.analysis.spectrum import Spectrum, StreamingCovariance
from qurve.errors import BadInput
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.model.residual import Skip

ROUNDING = 1e-11
"""A share of the variance that float64 leaves outside of a flat which holds the points: seen are 1e-14."""


@dataclass(frozen=True)
class HullBound:
    """The largest dimension that the affine hull of one block's queries, keys and values can have together."""

    ambient: int
    """Of the space they live in: their widths together, 3 D as a rule."""
    paper: int
    """Linear pathways have the input's dimension together, each nonlinear one its whole width beside them: D, 2 D for
    nonlinear queries, 3 D where all three are (arXiv 2603.13381, appendix B.2)."""
    tight: int
    """Also linear are the anchors of nonlinear pathways, so that only what `f` itself spans comes on top, and the
    input, where a LayerNorm made it, has a dimension less: `D - 1 + min(R, D - 1)` for the paper's layer."""
    flat: int
    """What linear pathways alone would have, of inputs of this kind."""


def hull_bound(config: ModelConfig, layer: int) -> HullBound:
    """The bounds of block `layer`. A mixer without queries or keys has those that it has."""
    kinds = [(kind, dims) for name, (kind, dims) in config.projections(layer).items() if name in NAMES]
    reaches = [(kind.reach(dims), dims.d_out) for kind, dims in kinds]
    ambient = sum(width for _, width in reaches)
    channels = config.subspaces.total if layer else 0
    inputs = 1 if isinstance(config.residual, Skip) else len(NAMES)  # another scheme may give each pathway its own
    whole = inputs * config.d_model + channels
    own = whole - inputs * _loses_one(config, layer)
    straight = sum(width for reach, width in reaches if reach.linear)
    purely_linear = sum(width for reach, width in reaches if reach.linear and not reach.beyond)
    bent = sum(width for reach, width in reaches if not reach.linear or reach.beyond)
    return HullBound(
        ambient=ambient,
        paper=min(ambient, min(whole, purely_linear) + bent),
        tight=min(ambient, min(own, straight) + sum(reach.beyond for reach, _ in reaches)),
        flat=min(own, ambient),
    )


def _loses_one(config: ModelConfig, layer: int) -> bool:
    """Whether the block's input comes out of a LayerNorm: before its gain and bias, its entries sum to zero."""
    place = config.residual.norm_place
    return config.norm == "layernorm" and (place == "pre" or (place == "post" and layer > 0))


@dataclass(frozen=True)
class LayerHull:
    """One block's activations: spectra of its input, of each pathway, of the three together (`qkv`), and of `f`."""

    layer: int
    bound: HullBound
    input: Spectrum
    pathways: dict[str, Spectrum]
    qkv: Spectrum
    f: dict[str, Spectrum]
    """By pathway, of those that have one: `f` without its anchor, where the pathway itself is `anchor + f`."""

    @property
    def bent(self) -> float:
        """Share of the variance of `(q, k, v)` that leaves every flat a linear pathway could have had: 0 where all
        three are linear, however spread they are."""
        share = self.qkv.outside(self.bound.flat)
        return share if share > ROUNDING else 0.0


class HullMeter:
    """Collects the covariances of every block: `11 D^2` numbers each for the paper's layer. `see` is for `read_all`."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._found: dict[int, dict[str, StreamingCovariance]] = {}

    def see(self, layer: int, block: Block) -> None:
        """Take in the activations of one block in one forward pass."""
        found = self._found.setdefault(layer, {})
        outputs = {name: pathway(pathway.x_MD) for name, pathway in block.items()}
        points = {"input": next(iter(block.values())).x_MD, "qkv": torch.cat(list(outputs.values()), dim=-1)}
        points |= {f"f of {n}": f_MO for n, pathway in block.items() if (f_MO := pathway.f(pathway.x_MD)) is not None}
        for name, x_MN in points.items():
            if name not in found:
                found[name] = StreamingCovariance(x_MN.shape[-1], x_MN.device)
            found[name].add(x_MN)

    def layers(self) -> list[LayerHull]:
        """What was found so far. `BadInput` where the points are too few to span what they could."""
        return [self._layer(layer, found) for layer, found in sorted(self._found.items())]

    def _layer(self, layer: int, found: dict[str, StreamingCovariance]) -> LayerHull:
        bound, points = hull_bound(self.config, layer), found["qkv"].points
        if points <= bound.ambient:
            raise BadInput(
                f"{points} tokens span at most {points - 1} dimensions, and queries, keys and values of block {layer} "
                f"have {bound.ambient}: take more tokens, several times as many"
            )
        kinds = self.config.projections(layer)
        pathways, begin = {}, 0
        for name in NAMES:
            if name in kinds:
                end = begin + kinds[name][1].d_out
                pathways[name] = found["qkv"].spectrum(slice(begin, end))
                begin = end
        return LayerHull(
            layer=layer,
            bound=bound,
            input=found["input"].spectrum(),
            pathways=pathways,
            qkv=found["qkv"].spectrum(),
            f={name: found[key].spectrum() for name in NAMES if (key := f"f of {name}") in found},
        )


def measure_hulls(model: GPT, batches: Iterable[Tensor]) -> list[LayerHull]:
    """The hulls of every block on the tokens `[B, T]` of all batches together, in evaluation.

    One pass; memory is that of a forward pass and of the covariances. Raises `BadInput` with too few tokens.
    """
    meter = HullMeter(model.config)
    read_all(model, batches, meter.see)
    return meter.layers()


# ------------------------------------------------------------------------------------ curves of more than one dimension


def helix(points: int, turns: float = 3.0) -> Tensor:
    """`(cos t, sin t, t / 2 pi)`, `[points, 3]`: of one dimension, and in no plane."""
    t_M = torch.linspace(0, 2 * math.pi * turns, points, dtype=torch.float64)
    return torch.stack([t_M.cos(), t_M.sin(), t_M / (2 * math.pi)], dim=-1)


def hilbert_curve(order: int, dimensions: int) -> Tensor:
    """The order-th approximation of Hilbert's curve, `[2^(order dimensions), dimensions]`: every cell of a grid of
    `2^order` a side, each next to the one before. The limit fills the cube.

    A cell's number, read `dimensions` bits at a time, is a walk down a tree of cubes: each level's bits, Gray-coded,
    choose a corner, in the frame of the cube they are in; the levels above mirror and swap its axes (Skilling 2004).
    """
    number_M = torch.arange(2 ** (order * dimensions))
    x_NM = torch.zeros(dimensions, len(number_M), dtype=torch.long)
    for level in range(order):
        for axis in range(dimensions):
            place = (order - level) * dimensions - 1 - axis
            x_NM[axis] = x_NM[axis] << 1 | number_M >> place & 1
    carried_M = x_NM[-1] >> 1
    x_NM[1:] = x_NM[1:] ^ x_NM[:-1]
    x_NM[0] ^= carried_M
    for level in range(1, order):
        below = 2**level - 1
        for axis in reversed(range(dimensions)):
            mirrored_M = (x_NM[axis] >> level & 1).bool()
            swapped_M = torch.where(mirrored_M, 0, (x_NM[0] ^ x_NM[axis]) & below)
            x_NM[axis] ^= swapped_M
            x_NM[0] ^= torch.where(mirrored_M, below, swapped_M)
    return x_NM.T.double()
