from __future__ import annotations

import argparse
from typing import Any, get_args

import prices
import pytest
import torch
from torch import Tensor, nn

from qurve.projections import Bottleneck, Linear
from qurve.projections.bottleneck import Anchor
from qurve.projections.functional import Activation, Norm
from qurve.projections.module import project

SHAPE = argparse.Namespace(width=32, tokens=8, batch=2, precision="float32", rounds=2)


def block(query: Any) -> nn.ModuleList:
    return nn.ModuleList(kind.build(32, 32) for kind in (query, Linear(), Linear()))


def test_every_choice_is_listed() -> None:
    listed = [kind for kind in prices.choices(32).values() if isinstance(kind, Bottleneck)]
    assert {kind.activation for kind in listed} == set(get_args(Activation))
    assert {kind.anchor for kind in listed} == set(get_args(Anchor))
    assert {kind.pre_norm for kind in listed} == {kind.post_norm for kind in listed} == set(get_args(Norm))
    assert {kind.rank(kind.build(32, 32).dims) for kind in listed} == {4, 8, 16, 32}


def test_price_is_a_row_of_times_and_ratios() -> None:
    (row,) = prices.price({"the paper's": Bottleneck()}, SHAPE, compiled=False)
    assert row["choice"] == "the paper's"
    for part in ("forward", "backward", "decode"):
        assert row["ms"][part]["median"] > 0 < row["linear_ms"][part]["median"]
        assert row["ratio"][part]["low"] <= row["ratio"][part]["median"] <= row["ratio"][part]["high"]
    assert 0 < row["largest_error"]["fused"] < 1e-5


def test_fused_path_that_computes_something_else_is_not_timed() -> None:
    x_BTD, parts = torch.randn(2, 8, 32), block(Bottleneck())
    prices.check(parts, lambda x: project(list(parts), x), x_BTD, "float32")

    def slightly_off(x: Tensor) -> list[Tensor]:
        q, k, v = project(list(parts), x)
        return [q, k * 1.0001, v]

    with pytest.raises(SystemExit, match="keys"):
        prices.check(parts, slightly_off, x_BTD, "float32")
