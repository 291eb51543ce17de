"""`benchmarks/time_match.py`: the width at which the linear model takes as long, and the sides that are timed."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from qurve import accounting, presets

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return runpy.run_path(str(BENCHMARKS / "time_match.py"))


@pytest.mark.parametrize(("seconds", "width"), [(5.0, 400.0), (6.0, 500.0), (7.5, 650.0)])
def test_the_width_is_where_the_line_comes_to_the_layers_seconds(
    module: dict[str, Any], seconds: float, width: float
) -> None:
    linear = {w: 1.0 + w / 100 for w in (384, 512, 640)}
    assert module["width_at"](seconds, linear) == pytest.approx(width)


def test_the_layer_runs_against_linear_models_narrower_and_wider(module: dict[str, Any]) -> None:
    baseline = presets.get("small/baseline").model
    sides = module["sides"](baseline)
    layer = sides.pop("res-gelu")
    assert layer.query.kind == "bottleneck"
    assert layer.d_ff == baseline.d_ff
    assert [int(width) for width in sides] == [model.d_ff for model in sides.values()]
    assert min(map(int, sides)) < baseline.d_ff < max(map(int, sides))
    assert all(model.query.kind == "linear" for model in sides.values())
    flops = [accounting.count(model).forward_flops_per_token for model in (*sides.values(), layer)]
    assert flops[0] < flops[-1] < flops[-2], "the layer's cost lies between them: nothing is extrapolated"
