from __future__ import annotations

import pytest
from dynamics_overhead import measurements, shares


def test_the_first_step_and_every_so_many_are_measured() -> None:
    assert [measurements(40, 10), measurements(9, 10), measurements(3, 1)] == [5, 1, 3]


def test_a_measurement_as_long_as_two_steps_is_two_per_cent_of_a_hundred() -> None:
    """Steps of half a second; five of forty are measured, which takes a second each."""
    assert shares([25.0, 20.0], [20.0, 20.0], 40, 10) == pytest.approx([0.02, 0.0])
