"""Bare projections made ready for inference: gains folded once, stems stacked, matrices in the compute dtype."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qurve.projections.functional import has_onednn
from qurve.projections.module import Projection, stacked

ROWS = 64
"""Rows of input that matrices are packed for. The layout for one is slow with eight; this one is as fast with one."""


@torch.no_grad()
def prepare(projections: Sequence[Projection], dtype: torch.dtype, pack: bool = False) -> list[Projection]:
    """Copies of bare projections of one input, with which `project` computes the same, faster; without gradients.

    Gains are folded in the parameters' own dtype, then matrices are cast to `dtype`; vectors stay. What needs no change
    is shared with the originals. `pack`: on a CPU with oneDNN, lay matrices out as it likes them.
    """
    fused = [p for p in projections if p.config.stem_rows(p.dims)]
    weight = stacked(fused)
    stems = [] if weight is None else [id(p.config.stem(p)) for p in fused]
    copies = []
    for projection in projections:
        ready = copy.copy(projection)
        ready._parameters = dict(projection._parameters)
        for name, p in projection._parameters.items():
            if p is not None and p.dim() == 2 and id(p) not in stems:  # a stem itself is in the stacked weight
                ready._parameters[name] = nn.Parameter(matrix(p, dtype, pack), requires_grad=False)
        copies.append(ready)
    if weight is not None:
        first = next(c for c, p in zip(copies, projections, strict=True) if p is fused[0])
        first.stacked = matrix(weight, dtype, pack)
    return copies


@torch.no_grad()
def matrix(weight: Tensor, dtype: torch.dtype, pack: bool = False) -> Tensor:
    """A weight `[out, in]` in `dtype`, packed as `prepare` says."""
    weight = weight.detach().to(dtype).contiguous()
    if pack and weight.device.type == "cpu" and has_onednn() and _is_product_of_onednn(dtype):
        weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return weight


def _is_product_of_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of this dtype on this processor."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))
