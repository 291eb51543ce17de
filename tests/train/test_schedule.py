from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qurve import presets
from qurve.train.config import TrainConfig
from qurve.train.schedule import learning_rate

PAPER = presets.get("paper/res-gelu-best").train


@st.composite
def schedules(draw: st.DrawFn) -> TrainConfig:
    lr = draw(st.floats(1e-6, 1.0))
    return TrainConfig(
        steps=draw(st.integers(1, 300)),
        lr=lr,
        min_lr=draw(st.floats(0, lr)),
        warmup_steps=draw(st.integers(0, 320)),
        schedule=draw(st.sampled_from(["cosine", "constant", "wsd"])),
        horizon=draw(st.none() | st.integers(1, 320)),
        decay_steps=draw(st.none() | st.integers(1, 320)),
    )


def test_paper_warms_up_by_2001_parts_of_the_peak() -> None:
    for update in (0, 1, 999, 1_999):
        assert learning_rate(PAPER, update) == pytest.approx(3.6e-3 * (update + 1) / 2001, rel=1e-12)
    assert learning_rate(PAPER, 2_000) == 3.6e-3


def test_paper_cosine_reaches_its_floor_at_60002_and_not_before() -> None:
    for update in (10_000, 31_001, 59_999):
        progress = (update - 2_000) / (60_002 - 2_000)
        expected = 2e-5 + (3.6e-3 - 2e-5) * (1 + math.cos(math.pi * progress)) / 2
        assert learning_rate(PAPER, update) == pytest.approx(expected, rel=1e-12)
    assert learning_rate(PAPER, 60_001) > 2e-5
    assert learning_rate(PAPER, 60_002) == learning_rate(PAPER, 70_000) == 2e-5


def test_horizon_is_the_number_of_steps_unless_given() -> None:
    config = TrainConfig(steps=100, lr=1.0, min_lr=0.1, warmup_steps=0)
    assert learning_rate(config, 50) == pytest.approx(0.55)
    assert learning_rate(config, 100) == 0.1
    assert learning_rate(dataclasses.replace(config, horizon=200), 100) == pytest.approx(0.55)


def test_stopping_early_leaves_the_schedule_as_it_is() -> None:
    config = TrainConfig(steps=100, lr=1.0, min_lr=0.1, warmup_steps=10)
    stopped = dataclasses.replace(config, stop_at=20)
    assert [learning_rate(stopped, k) for k in range(20)] == [learning_rate(config, k) for k in range(20)]


def test_constant_stays_at_the_peak() -> None:
    config = TrainConfig(steps=100, lr=1.0, min_lr=0.1, warmup_steps=3, schedule="constant")
    assert [learning_rate(config, k) for k in (0, 1, 2, 3, 99, 500)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_wsd_is_stable_then_falls_in_a_line_over_the_last_fifth() -> None:
    config = TrainConfig(steps=100, lr=1.0, min_lr=0.2, warmup_steps=10, schedule="wsd")
    assert [learning_rate(config, k) for k in (10, 50, 80)] == [1.0, 1.0, 1.0]
    assert [learning_rate(config, k) for k in (85, 90, 95, 100)] == pytest.approx([0.8, 0.6, 0.4, 0.2])
    shorter = dataclasses.replace(config, decay_steps=10)
    assert [learning_rate(shorter, k) for k in (90, 95, 100)] == pytest.approx([1.0, 0.6, 0.2])


def test_wsd_falls_only_after_a_warm_up_that_reaches_into_its_last_fifth() -> None:
    config = TrainConfig(steps=100, lr=1.0, min_lr=0.2, warmup_steps=90, schedule="wsd")
    assert [learning_rate(config, k) for k in (90, 95, 100)] == pytest.approx([1.0, 0.6, 0.2])


@given(schedules())
@example(TrainConfig(steps=300, lr=0.9109877835080679, min_lr=0.1940114239129515, warmup_steps=0))
def test_rate_is_never_above_the_peak_nor_after_the_warm_up_below_the_floor(config: TrainConfig) -> None:
    rates = [learning_rate(config, update) for update in range(350)]
    assert all(0 < rate <= config.lr or rate == config.min_lr == 0 for rate in rates)
    assert all(rate >= config.min_lr for rate in rates[config.warmup_steps :])


@given(schedules())
def test_rate_rises_through_the_warm_up_and_never_after_it(config: TrainConfig) -> None:
    rates = [learning_rate(config, update) for update in range(350)]
    assert all(a < b for a, b in pairwise(rates[: config.warmup_steps]))
    assert all(a >= b for a, b in pairwise(rates[config.warmup_steps :]))
    if config.schedule != "constant":
        assert rates[max(config.warmup_steps, config.last_step)] == config.min_lr
