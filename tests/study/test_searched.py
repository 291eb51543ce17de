"""What a search has found: what is chosen, at which edge, and what was offered, with made-up losses."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played import CONFIGS, RATES, Loss, best_at, played

from qurve.study.axes import Range, is_near_end
from qurve.study.search import Search, Trial
from qurve.study.searched import Searched, evidence, read_evidence


def searched(search: Search, loss: Loss) -> Any:
    scores = played(search, loss)
    return read_evidence(json.loads(json.dumps(evidence(search, CONFIGS, scores))))


def test_the_lowest_mean_over_the_seeds_is_chosen_and_a_point_that_diverged_with_any_seed_is_out() -> None:
    losses = {
        (1e-3, 101): 3.0,
        (1e-3, 102): 3.4,
        (2e-3, 101): 2.0,
        (2e-3, 102): None,
        (4e-3, 101): 3.1,
        (4e-3, 102): 3.2,
    }
    search = Search(RATES, seeds=(101, 102))
    found = searched(search, lambda t: losses[dict(t.point)["train.lr"], t.seed])  # type: ignore[index]
    for arm in CONFIGS:
        assert found.chosen[arm].lr == 4e-3
        assert found.chosen[arm].val_loss == pytest.approx(3.15)
        assert found.points(arm)[("train.lr", 2e-3),] is None


def test_an_arm_of_which_every_point_diverged_is_an_outcome() -> None:
    found = searched(Search(RATES), lambda t: None if t.arm == "wide" else 3.0)
    assert found.chosen["wide"].point is None
    assert found.chosen["baseline"].lr == 1e-3  # equal losses: the first point


def test_halving_chooses_at_the_full_length_alone() -> None:
    search = Search({"train.lr": (1e-3, 2e-3, 4e-3, 8e-3)}, "halving", rungs=2)

    def loss(trial: Trial) -> float:  # short runs like high rates, long ones low ones, and look worse throughout
        lr = float(dict(trial.point)["train.lr"])  # type: ignore[arg-type]
        return 3 - lr if trial.steps < 90 else 5 + lr

    found = searched(search, loss)
    assert [dict(p)["train.lr"] for p in found.points("wide")] == [4e-3, 8e-3]
    assert found.chosen["wide"].lr == 4e-3


def test_what_arms_are_offered_is_the_same_where_their_own_results_lead_them_apart() -> None:
    loss = best_at(baseline=1e-3, wide=8e-3)
    found = searched(Search({"train.lr": (1e-3, 2e-3, 4e-3, 8e-3)}, "halving", rungs=2), loss)
    assert found.tried("baseline") != found.tried("wide")
    assert found.offered("baseline") == found.offered("wide")
    less = dataclasses.replace(
        found, scores=tuple(s for s in found.scores if s.trial.arm != "wide" or s.trial.steps == 90)
    )
    assert less.offered("baseline") != less.offered("wide")


def halved(loss: Loss, factor: int = 3) -> Searched:
    """Nine points at 10 steps, three at 30 and one at 90; or as many as another factor makes of them."""
    rates = tuple(1e-3 * 2**place for place in range(9))
    return searched(Search({"train.lr": rates}, "halving", rungs=3, factor=factor), loss)


def test_a_halving_is_what_its_shortest_trials_call_for_at_every_length() -> None:
    found = halved(best_at(baseline=1e-3, wide=1.6e-2))
    assert [len(found.tried(arm)) for arm in CONFIGS] == [13, 13]
    assert [found.halved_apart(arm) for arm in CONFIGS] == [None, None]
    wide = {
        steps: [s for s in found.scores if s.trial.arm == "wide" and s.trial.steps == steps] for steps in (10, 30, 90)
    }
    chosen, runner_up = wide[90][0], wide[30][1]
    one_more = dataclasses.replace(runner_up, trial=dataclasses.replace(runner_up.trial, steps=90))
    for scores, said in (
        (
            [s for s in found.scores if s is not chosen],
            "of the 1 points that were best at 30 steps 0 went on to 90, and 0",
        ),
        ([*found.scores, one_more], "of the 1 points that were best at 30 steps 1 went on to 90, and 1 others"),
        ([s for s in found.scores if s is not runner_up], "of the 3 points that were best at 10 steps 2 went on to 30"),
        ([s for s in found.scores if s not in wide[30]], "of the 3 points that were best at 10 steps 1 went on to 90"),
    ):
        changed = dataclasses.replace(found, scores=tuple(scores))
        assert changed.halved_apart("baseline") is None
        apart = changed.halved_apart("wide")
        assert apart is not None
        assert apart.startswith(said)


def test_points_that_broke_go_no_further_in_a_halving() -> None:
    loss = best_at(baseline=1e-3, wide=1e-3)
    found = halved(lambda trial: None if trial.arm == "wide" and dict(trial.point)["train.lr"] > 3e-3 else loss(trial))
    assert [len(found.tried(arm)) for arm in CONFIGS] == [13, 12]
    assert [found.halved_apart(arm) for arm in CONFIGS] == [None, None]


def test_the_factor_of_a_halving_is_read_and_else_told_from_its_lengths() -> None:
    loss = best_at(baseline=1e-3, wide=1e-3)
    for factor in (2, 3):
        found = halved(loss, factor)
        assert found.factor == factor
        assert dataclasses.replace(found, factor=None).halved_apart("wide") is None
    assert "of the 3 points" in str(dataclasses.replace(halved(loss, 2), factor=3).halved_apart("wide"))
    assert searched(Search(RATES), loss).factor is None


def test_a_trial_that_failed_is_no_try() -> None:
    found = searched(Search(RATES, seeds=(101, 102)), lambda trial: 3.0)
    scores = [dataclasses.replace(s, status="failed", val_loss=None) for s in found.scores[:1]]
    failed = dataclasses.replace(found, scores=(*scores, *found.scores[1:]))
    assert (failed.failed("baseline"), failed.failed("wide")) == (1, 0)
    assert (len(failed.tried("baseline")), len(failed.tried("wide"))) == (5, 6)
    assert failed.offered("baseline") != failed.offered("wide")
    diverged = dataclasses.replace(found, scores=(dataclasses.replace(scores[0], status="diverged"), *found.scores[1:]))
    assert diverged.failed("baseline") == 0
    assert diverged.offered("baseline") == diverged.offered("wide")


def test_nothing_is_chosen_before_the_search_is_over() -> None:
    search = Search(RATES)
    scores = played(search, lambda trial: 3.0)
    for there in (scores[:0], scores[:-1]):
        assert evidence(search, CONFIGS, there)["chosen"] == {}


def test_an_optimum_at_an_edge_is_told_and_a_closed_edge_is_none() -> None:
    search = Search({**RATES, "train.min_lr/train.lr": (0.1, 0.3, 1.0)})
    loss = best_at(baseline=2e-3, wide=1.0)
    found = searched(search, lambda t: loss(t) - dict(t.point)["train.min_lr"])  # type: ignore[operator]
    assert found.edges("baseline") == []
    assert found.edges("wide") == [("train.lr", 4e-3, 1e-3, 4e-3)]


DRAWN_RATE = Range(1e-3, 1e-2)


@given(value=st.floats(1e-3, 1e-2))
def test_a_range_knows_where_a_value_lies(value: float) -> None:
    for range_ in (DRAWN_RATE, Range(1e-3, 1e-2, log=False)):
        assert range_.at(range_.share(value)) == pytest.approx(value, rel=1e-3)


@settings(max_examples=40)
@given(n=st.integers(2, 12), draw_seed=st.integers(0, 99), best=st.floats(5e-4, 2e-2))
@pytest.mark.parametrize("sampler", ["random", "halving"])
def test_the_edge_of_values_that_were_drawn_is_that_of_their_range(
    n: int, draw_seed: int, best: float, sampler: Any
) -> None:
    """The outermost value that happened to be drawn has the rest of its range beyond it."""
    search = Search({"train.lr": DRAWN_RATE}, sampler, trials=n, draw_seed=draw_seed, rungs=1)
    found = searched(search, best_at(baseline=best, wide=best))
    assert read_evidence(json.loads(json.dumps(evidence(search, CONFIGS, found.scores)))) == found
    lr = found.chosen["wide"].lr
    near = lr < 1.2589e-3 or lr > 7.943e-3  # a tenth of the way, in the logarithm
    assert found.edges("wide") == ([("train.lr", lr, 1e-3, 1e-2)] if near else [])


def test_an_end_of_a_range_that_nothing_lies_beyond_is_no_edge() -> None:
    share = "train.min_lr/train.lr"
    assert not is_near_end(share, Range(0.1, 1.0), 1.0)
    assert is_near_end(share, Range(0.1, 0.5), 0.5)
    assert is_near_end(share, Range(0.1, 1.0), 0.1)
    assert not is_near_end("train.weight_decay", Range(0.0, 0.2, log=False), 0.0)


def test_of_values_that_a_draw_may_pass_over_the_edge_is_that_of_what_was_offered() -> None:
    search = Search({"train.lr": (1e-3, 2e-3, 4e-3), "train.weight_decay": Range(0.01, 1)}, "random", trials=1)
    found = searched(search, lambda trial: 3.0)
    lr = found.chosen["wide"].lr
    assert [edge for edge in found.edges("wide") if edge[0] == "train.lr"] == (
        [] if lr == 2e-3 else [("train.lr", lr, 1e-3, 4e-3)]
    )


def test_a_search_that_did_not_write_down_what_it_offered_is_read() -> None:
    search = Search(RATES)
    scores = played(search, best_at(baseline=2e-3, wide=1.0))
    tree = evidence(search, CONFIGS, scores)
    del tree["space"]
    assert read_evidence(tree).edges("wide") == [("train.lr", 4e-3, 1e-3, 4e-3)]


def test_rates_are_told_with_the_best_of_whatever_else_was_searched() -> None:
    search = Search({**RATES, "train.weight_decay": (0.0, 0.1)})
    found = searched(search, lambda t: 3 + dict(t.point)["train.weight_decay"])  # type: ignore[operator]
    assert found.grid("wide") == {(lr, None): 3.0 for lr in RATES["train.lr"]}
