"""A control that takes as long as an arm: found by measured steps, here of invented times, and once of real ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from qurve.errors import BadInput
from qurve.model.config import ModelConfig
from qurve.projections import Bottleneck
from qurve.train import step_time
from qurve.train.step_time import match_time, take_turns
from tiny import TINY

ARM = dataclasses.replace(TINY.model, query=Bottleneck())
Seconds = Callable[[ModelConfig, int], float]


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Seconds], list[int]]:
    """`takes(seconds)`: a model's step takes `seconds(model, round)`. Returns the widths measured, as they come."""

    def invent(seconds: Seconds) -> list[int]:
        measured: list[int] = []

        def turns(models: dict[int, ModelConfig], config: object, rounds: int) -> dict[int, list[float]]:
            measured.extend(width for width in models if width)
            return {name: [seconds(model, turn) for turn in range(rounds)] for name, model in models.items()}

        monkeypatch.setattr(step_time, "take_turns", turns)
        return measured

    return invent


def linear(model: ModelConfig, turn: int) -> float:
    """1 ms, and 10 µs for each column; the arm's queries take as long as 13 columns. Every other round is twice as
    slow, for everyone."""
    extra = 13 if isinstance(model.query, Bottleneck) else 0
    return (1e-3 + 1e-5 * (model.d_ff + extra)) * (1 + turn % 2)


def test_the_width_is_the_one_that_takes_as_long(takes: Callable[[Seconds], list[int]]) -> None:
    measured = takes(linear)
    model, found = match_time(ARM, TINY)
    assert model == dataclasses.replace(TINY.model, d_ff=64 + 13)
    assert measured == [64, 96, 77]
    assert (found.ratio, found.low, found.high, found.d_ff) == (1, 1, 1, (64, 77))
    assert f"a step takes 1.000 times the arm's {1e3 * found.seconds:.3g} ms" in str(found)
    assert "1 thread), by d_ff 77 in place of 64" in str(found)


def test_a_bent_line_takes_more_tries(takes: Callable[[Seconds], list[int]]) -> None:
    measured = takes(lambda model, _: 80.0**2 if model.query != TINY.model.query else float(model.d_ff**2))
    model, found = match_time(ARM, TINY)
    assert abs(found.ratio - 1) <= step_time.TOLERANCE
    assert model.d_ff == pytest.approx(80, abs=1)
    assert len(measured) > 3


def test_what_cannot_be_matched_is_refused(takes: Callable[[Seconds], list[int]]) -> None:
    takes(lambda *_: 1.0)
    with pytest.raises(BadInput, match="does not take longer with a wider feed-forward"):
        match_time(ARM, TINY)
    takes(lambda model, _: 0.5 if model.query != TINY.model.query else 1.0 + 1e-3 * model.d_ff)
    with pytest.raises(BadInput, match="hardly any d_ff"):
        match_time(ARM, TINY)
    takes(lambda model, _: 1.5 if model.query != TINY.model.query else 1.0 + (model.d_ff >= 80))
    with pytest.raises(BadInput, match=r"within 2 %; the nearest: a step takes .* on a quiet machine"):
        match_time(ARM, TINY)


def test_real_steps_are_made_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = step_time._step

    def noted(model: ModelConfig, config: object) -> Callable[[], float]:
        step = real(model, config)

        def counted() -> float:
            made.append(model.d_ff)
            return step()

        return counted

    monkeypatch.setattr(step_time, "_step", noted)
    models = {0: dataclasses.replace(ARM, d_ff=8), 1: dataclasses.replace(TINY.model, d_ff=16)}
    seconds = take_turns(models, TINY, rounds=3)
    assert made == [8, 8, 16, 16, 8, 16, 16, 8, 8, 16]
    assert all(len(found) == 3 and min(found) > 0 for found in seconds.values())
