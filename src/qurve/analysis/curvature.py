"""How far the maps to queries, keys and values are from flat, where activations are.

Two measures, both without a unit and zero for a linear map. With Q the map of one token,

    second difference   |Q(a) - 2 Q((a + b) / 2) + Q(b)| / |Q(b) - Q(a)|         a, b inputs of two tokens
    Jacobian spread     mean |J(x) - mean J|_F^2 / mean |J(x)|_F^2               J = dQ/dx, means over tokens x

The first looks along the straight way between two tokens; squares are summed over the pairs before dividing, so that
near pairs count little. The second is 0 where one linear map serves all tokens, and 1 where their Jacobians cancel.
What a projection reads besides its input is held fixed, so that reused MLP activations count as given.

Legend: M tokens, D input width, O output width, P probes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qurve.analysis.pathways import Block, Pathway, read_all
from qurve.analysis.spectrum import TOLERANCE
from qurve.model.gpt import GPT

PROBES = 16
"""Directions in which Jacobians are taken: `E |J v|^2 = |J|_F^2` for standard normal v (Hutchinson). The same for all
tokens of a pathway, and drawn from a fixed seed."""
STEP = 1e-4
"""Of the central difference, as a share of the inputs' root mean square: its error is about 1e-8, in float64."""


@dataclass(frozen=True)
class Curvature:
    """One pathway of one block."""

    layer: int
    pathway: str
    neighbours: float
    """Second difference between each token and the next one."""
    distant: float
    """Second difference between tokens half of a pass apart: of other sequences, where there are several."""
    jacobian_spread: float
    rank: int
    """Of the Jacobian at a token: the dimension of the image there."""
    rank_f: int | None
    """The same of `f` without its anchor, where there is one."""


@dataclass
class _Sums:
    """What is left of a pathway's passes."""

    probes_PD: Tensor
    ranks: tuple[int, int | None]
    bends: dict[str, list[float]] = field(default_factory=lambda: {"neighbours": [0.0, 0.0], "distant": [0.0, 0.0]})
    """Sums of squares, of second differences and of the ways."""
    tokens: int = 0
    slopes_PO: Tensor | None = None
    """Sum of `J(x) v` over the tokens."""
    squares: float = 0.0
    """Sum of its square."""


class CurvatureMeter:
    """Collects every pathway of every block; give its `see` to `read_all`."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], _Sums] = {}

    def see(self, layer: int, block: Block) -> None:
        """Take in the activations of one block in one forward pass, of two tokens at least."""
        for name, pathway in block.items():
            if (layer, name) not in self._found:
                probes_PD = _probes(pathway.x_MD.shape[-1]).to(pathway.x_MD)
                self._found[layer, name] = _Sums(probes_PD, local_ranks(pathway, pathway.length - 1))
            _take_in(self._found[layer, name], pathway)

    def found(self) -> list[Curvature]:
        """What was found so far, by block, in the order of the pathways."""
        return [_curvature(layer, name, sums) for (layer, name), sums in self._found.items()]


def measure_curvature(model: GPT, batches: Iterable[Tensor]) -> list[Curvature]:
    """The curvature of every pathway of every block on the tokens `[B, T]` of all batches, in evaluation.

    Each token takes some forty evaluations of its projections in float64: a few thousand tokens are plenty.
    """
    meter = CurvatureMeter()
    read_all(model, batches, meter.see)
    return meter.found()


def second_difference(pathway: Pathway, a_M: Tensor, b_M: Tensor) -> tuple[float, float]:
    """Sums of `|Q(a) - 2 Q((a + b) / 2) + Q(b)|^2` and of `|Q(b) - Q(a)|^2` over pairs of tokens, by their numbers."""
    at_a, b_MD = pathway.of(a_M), pathway.x_MD[b_M]
    q_a_MO, q_half_MO, q_b_MO = (at_a(x_MD) for x_MD in (at_a.x_MD, (at_a.x_MD + b_MD) / 2, b_MD))
    bend_MO, way_MO = q_a_MO - 2 * q_half_MO + q_b_MO, q_b_MO - q_a_MO
    return bend_MO.square().sum().item(), way_MO.square().sum().item()


def slope(pathway: Pathway, v_D: Tensor) -> Tensor:
    """`J(x) v` for every token, `[M, O]`, by a central difference."""
    step = STEP * pathway.x_MD.square().mean().sqrt() / v_D.square().mean().sqrt()
    ahead_MO, behind_MO = (pathway(pathway.x_MD + way * step * v_D) for way in (1, -1))
    return (ahead_MO - behind_MO) / (2 * step)


def local_ranks(pathway: Pathway, token: int) -> tuple[int, int | None]:
    """Ranks at one token of the Jacobians of the projection and of `f` (None without one): the dimensions of their
    images near it. `f` goes through R channels, and what it is added to brings the others back (paper, section 1)."""
    here = pathway.of(torch.tensor([token], device=pathway.x_MD.device))

    def rank(step: Callable[[Tensor], Tensor]) -> int:
        jacobian_OD = torch.func.jacrev(lambda x_D: step(x_D[None])[0])(here.x_MD[0])
        return int(torch.linalg.matrix_rank(jacobian_OD.detach(), rtol=TOLERANCE))

    return rank(here), None if here.f(here.x_MD) is None else rank(here.f)  # type: ignore[arg-type]


def _take_in(sums: _Sums, pathway: Pathway) -> None:
    tokens = len(pathway.x_MD)
    number_M = torch.arange(tokens, device=pathway.x_MD.device)
    followed_M = number_M[(number_M + 1) % pathway.length > 0]  # all but the last of each sequence
    half_M = number_M[: tokens // 2]
    for name, a_M, b_M in (("neighbours", followed_M, followed_M + 1), ("distant", half_M, half_M + tokens // 2)):
        for place, more in enumerate(second_difference(pathway, a_M, b_M)):
            sums.bends[name][place] += more
    slopes = [slope(pathway, v_D) for v_D in sums.probes_PD]
    together_PO = torch.stack([slope_MO.sum(0) for slope_MO in slopes])
    sums.slopes_PO = together_PO if sums.slopes_PO is None else sums.slopes_PO + together_PO
    sums.squares += sum(slope_MO.square().sum().item() for slope_MO in slopes)
    sums.tokens += tokens


def _curvature(layer: int, name: str, sums: _Sums) -> Curvature:
    assert sums.slopes_PO is not None
    common = sums.slopes_PO.square().sum().item() / sums.tokens  # M |mean J v|^2, over the probes
    bends = {key: math.sqrt(bend / way) if way else 0.0 for key, (bend, way) in sums.bends.items()}
    # A linear map's squares are equal to rounding, on either side.
    spread = max(0.0, 1 - common / sums.squares) if sums.squares else 0.0
    return Curvature(layer, name, bends["neighbours"], bends["distant"], spread, *sums.ranks)


def _probes(width: int) -> Tensor:
    return torch.randn(PROBES, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
