"""The precision policy: norms and activations in float32, matrix products in the compute dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from qurve import NonlinearQuery
from qurve.projections import Bottleneck, Dims
from qurve.projections import functional as F
from qurve.projections.module import Projection, project

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@HALVES
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norms_run_in_float32(kind: Any, dtype: torch.dtype) -> None:
    x, gain, bias = torch.randn(5, 12).to(dtype), torch.randn(12).to(dtype), torch.randn(12).to(dtype)
    bias_or_none = bias if kind == "layernorm" else None
    found = F.normalize(kind, x, gain, bias_or_none, 1e-5)
    wide = F.normalize(kind, x.double(), gain.double(), None if bias_or_none is None else bias.double(), 1e-5)
    assert found.dtype == torch.float32
    assert_close(found.double(), wide, rtol=1e-5, atol=1e-6)
    deviation = F.inverse_deviation(kind, x, 1e-5)
    assert deviation.dtype == torch.float32
    assert_close(deviation.double(), F.inverse_deviation(kind, x.double(), 1e-5), rtol=1e-5, atol=1e-6)


@HALVES
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_gains_fold_in_float32_and_are_rounded_once(kind: Any, dtype: torch.dtype) -> None:
    weight, gain = torch.randn(9, 12).to(dtype), torch.randn(12).to(dtype)
    exact = F.fold(kind, weight.double(), gain.double())
    assert torch.equal(F.fold(kind, weight, gain), F.fold(kind, weight.float(), gain.float()).to(dtype))
    assert_close(F.fold(kind, weight.float(), gain.float()).double(), exact, rtol=1e-5, atol=1e-6)


class Dtypes(TorchDispatchMode):
    """Records the dtype that each norm, activation and matrix product ran in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.setdefault(func._schema.name, set()).update(a.dtype for a in args[:1] if isinstance(a, torch.Tensor))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16-weights", "autocast"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_the_layer_keeps_the_policy(fused: bool, autocast: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    layers, x_BTD = [NonlinearQuery(12, dtype=dtype) for _ in range(2)], torch.randn(2, 7, 12, dtype=dtype)
    with torch.no_grad(), Dtypes() as dtypes, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        project(layers, x_BTD) if fused else layers[0](x_BTD)
    assert dtypes.seen["aten::gelu"] == dtypes.seen["aten::native_layer_norm"] == {torch.float32}
    assert dtypes.seen["aten::mm"] == {torch.bfloat16}
    assert dtypes.seen["aten::rsqrt"] == {torch.float32}


def test_a_fused_layer_norms_bias_goes_through_the_stem_in_float32() -> None:
    """What the plain path does before it rounds: in half precision it would be rounded once more than there."""
    config, dims = Bottleneck(pre_norm="layernorm"), Dims(12, 12, bias=True)
    layers = [Projection(config, dims, dtype=torch.bfloat16) for _ in range(2)]
    with torch.no_grad(), Dtypes() as dtypes:
        project(layers, torch.randn(2, 7, 12, dtype=torch.bfloat16))
    assert dtypes.seen["aten::mv"] == {torch.float32}
