from __future__ import annotations

from typing import Any

import pytest
from scaling_cpu import AXES, BASE, summarise


def row(size: int, seconds: float, flops: float) -> dict[str, Any]:
    return {"size": size, "seconds_of_base": {"median": seconds}, "flops": flops}


def test_even_growth_has_its_exponent_and_no_cliff() -> None:
    found = summarise([row(size, 0.1 * size**1.5, 3 * size) for size in (8, 1, 4, 2)])
    assert found["exponent"] == pytest.approx(1.5, abs=1e-3)
    assert found["largest_step"] == pytest.approx(2**0.5, abs=1e-3)


def test_cliff_is_found_where_it_is() -> None:
    found = summarise([row(1, 1, 1), row(2, 2, 2), row(4, 12, 4), row(8, 24, 8)])
    assert found["largest_step"] == 3
    assert found["step_at"] == "2 to 4"


def test_every_axis_goes_through_the_base() -> None:
    for axis, sizes in AXES.items():
        assert getattr(BASE, axis) in sizes
