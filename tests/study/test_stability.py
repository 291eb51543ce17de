"""Maps and sensitivities: on cases whose answers are known beforehand."""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, arm, config, write_study
from hypothesis import given
from hypothesis import strategies as st

from qurve.errors import BadInput
from qurve.runfolder import RunFolder
from qurve.study.results import load
from qurve.study.stability import (
    SPIKE,
    SPIKE_WINDOW,
    WORSE,
    Ending,
    Map,
    endings_of,
    maps_of,
    spikes,
)

START = 7.0


def ending(lr: float, decay: float, loss: float | None, **more: Any) -> Ending:
    """A finished run; one without a loss diverged."""
    status = "finished" if loss is not None else "diverged"
    found = Ending("res-gelu", lr, decay, 1, status, 400 if loss is not None else 140, START, loss, 0, 3.0)
    return dataclasses.replace(found, **more)


def map_of(*endings: Ending) -> Map:
    (found,) = maps_of(endings).values()
    return found


# ----------------------------------------------------------------------------------------------------------------- map


def test_a_cell_is_the_mean_over_its_seeds() -> None:
    found = map_of(
        ending(1e-3, 0.1, 5.0, spikes=4, max_logit=7.0),
        ending(1e-3, 0.1, 5.2, seed=2, spikes=1, max_logit=None),
        ending(2e-3, 0.1, None),
        ending(2e-3, 0.1, 5.1, seed=2),
    )
    whole, broken = found.cells[1e-3, 0.1], found.cells[2e-3, 0.1]
    assert whole.loss == pytest.approx(5.1)
    assert (whole.spikes, whole.max_logit, whole.diverged, whole.diverged_after) == (2.5, 7.0, 0.0, ())
    assert (broken.loss, broken.diverged, broken.diverged_after) == (None, 0.5, (140,))
    assert found.best is whole


def test_what_is_stable() -> None:
    found = map_of(
        ending(1e-3, 0.1, 5.0 + 3 * WORSE),  # slow, not unstable
        ending(2e-3, 0.1, 5.0),
        ending(4e-3, 0.1, 5.0 + 0.9 * WORSE),
        ending(8e-3, 0.1, 5.0 + 1.1 * WORSE),
        ending(1.6e-2, 0.1, None),
        ending(2e-3, 0.0, 5.0 + 0.5 * WORSE),
        ending(4e-3, 0.0, None, status="running"),
        ending(8e-3, 0.0, 5.0),
        ending(1e-3, 0.05, None),
    )
    assert [found.state(lr, 0.1) for lr in found.rates] == ["stable", "stable", "stable", "plateau", "diverged"]
    assert [found.state(lr, 0.0) for lr in (1e-3, 2e-3, 4e-3)] == [None, "stable", None]
    assert [found.trained_up_to(decay) for decay in (0.1, 0.0, 0.05)] == [8e-3, 2e-3, None]
    assert [found.stable_up_to(decay) for decay in (0.1, 0.0, 0.05)] == [4e-3, 2e-3, None]
    assert found.stable_beyond(0.1) == []
    assert found.stable_beyond(0.0) == [8e-3]  # the one below it is not known to be


def test_what_is_stable_beyond_a_rate_that_is_not_is_told_apart() -> None:
    """Else one page says that a rate holds, and that the largest stable one is lower."""
    losses = {0.0: 5.0 + 2 * WORSE, 1e-3: 5.0, 2e-3: 5.0 + 2 * WORSE, 4e-3: 5.0 + 0.9 * WORSE, 8e-3: 5.0}
    found = map_of(*(ending(lr, 0.1, loss) for lr, loss in losses.items()))
    assert (found.stable_up_to(0.1), found.stable_beyond(0.1)) == (1e-3, [4e-3, 8e-3])
    found = map_of(*(ending(lr, 0.1, loss) for lr, loss in {**losses, 0.0: None}.items()))
    assert (found.stable_up_to(0.1), found.stable_beyond(0.1)) == (None, [1e-3, 4e-3, 8e-3])
    still = map_of(ending(0.0, 0.1, 5.0), ending(1e-3, 0.1, 5.0 + 2 * WORSE))
    assert (still.stable_up_to(0.1), still.stable_beyond(0.1)) == (0.0, [])


def test_what_ends_no_lower_than_it_started_has_learned_nothing() -> None:
    """However near it lies to the best of its map, and with whichever seed."""
    found = map_of(
        ending(1e-3, 0.1, START),
        ending(2e-3, 0.1, START - 0.01),
        ending(4e-3, 0.1, START - 0.05),
        ending(4e-3, 0.1, START + 0.03, seed=2),
        ending(8e-3, 0.1, START + 3.0, start_loss=None),
        ending(1.6e-2, 0.1, START + 3.0),
        ending(1.6e-2, 0.1, None, seed=2),
    )
    nothing = "learned nothing"
    assert [found.state(lr, 0.1) for lr in found.rates] == [nothing, "stable", nothing, "plateau", "diverged"]
    assert (found.stable_up_to(0.1), found.trained_up_to(0.1)) == (None, None)
    everywhere = map_of(ending(1e-3, 0.1, 9.05), ending(2e-3, 0.1, 9.0))
    assert {everywhere.state(lr, 0.1) for lr in everywhere.rates} == {nothing}


def test_what_is_slow_is_decided_at_the_same_decay() -> None:
    """Where the best point of the whole map lies says nothing of the rates at another decay."""
    low, high = ending(1e-3, 0.1, 3.0), ending(4e-3, 0.1, 2.99)
    found = map_of(low, high, ending(1e-3, 0.0, 3.0), ending(4e-3, 0.0, 6.9))
    assert (found.state(1e-3, 0.0), found.state(4e-3, 0.0)) == ("stable", "plateau")
    assert (found.stable_up_to(0.0), found.trained_up_to(0.0)) == (1e-3, 4e-3)
    slow = map_of(low, high, ending(1e-3, 0.0, 6.9), ending(4e-3, 0.0, 3.0), ending(8e-3, 0.0, 3.0 + 3 * WORSE))
    assert [slow.state(lr, 0.0) for lr in slow.rates] == ["stable", "stable", "plateau"]
    burst = map_of(ending(1e-3, 0.1, 3.1), ending(2e-3, 0.1, 6.9), ending(4e-3, 0.1, 2.99))
    assert [burst.state(lr, 0.1) for lr in burst.rates] == ["plateau", "plateau", "stable"]
    assert (burst.stable_up_to(0.1), burst.stable_beyond(0.1)) == (None, [4e-3])


@pytest.mark.parametrize("losses", [{4e-3: 6.9}, {1e-3: 6.9, 4e-3: 6.8}, {1e-3: 6.8, 4e-3: 6.9}])
def test_the_best_point_of_a_decay_at_which_nothing_works_is_not_stable(losses: dict[float, float]) -> None:
    found = map_of(ending(4e-3, 0.1, 3.0), *(ending(lr, 0.0, loss) for lr, loss in losses.items()))
    assert {found.state(lr, 0.0) for lr in losses} == {"plateau"}
    assert (found.stable_up_to(0.0), found.trained_up_to(0.0)) == (None, 4e-3)


def test_one_seed_that_diverges_is_enough_and_one_that_runs_is_not() -> None:
    good, running = ending(1e-3, 0.1, 5.0), ending(1e-3, 0.1, None, seed=2, status="running")
    assert map_of(good, running).state(1e-3, 0.1) is None
    assert map_of(ending(1e-3, 0.1, None), running).state(1e-3, 0.1) == "diverged"
    assert map_of(ending(1e-3, 0.1, None, status="failed"), good).state(1e-3, 0.1) is None


# --------------------------------------------------------------------------------------------------------- sensitivity


def test_sensitivity_by_hand() -> None:
    """Rates that end at 5.5, 5.0, above the start (cut to 7) and nowhere (7): 0.5, 0, 2 and 2 above the best."""
    losses = {1e-3: 5.5, 2e-3: 5.0, 4e-3: 9.0, 8e-3: None}
    found = map_of(*(ending(lr, 0.1, loss) for lr, loss in losses.items()), ending(1e-3, 0.0, 3.0))
    assert found.sensitivity(0.1) == pytest.approx(4.5 / 4)
    assert found.sensitivity(0.0) == 0.0


def test_sensitivity_needs_every_rate_and_one_that_works() -> None:
    assert map_of(ending(1e-3, 0.1, 5.0), ending(2e-3, 0.1, None, status="stopped")).sensitivity(0.1) is None
    assert map_of(ending(1e-3, 0.1, None)).sensitivity(0.1) is None
    assert map_of(ending(1e-3, 0.1, 5.0, start_loss=None)).sensitivity(0.1) is None


losses = st.lists(st.one_of(st.none(), st.floats(1.0, 20.0)), min_size=1, max_size=6)


@given(losses, st.randoms(use_true_random=False))
def test_sensitivity_is_bounded_and_knows_no_order(found: list[float | None], shuffler: random.Random) -> None:
    rates = [1e-3 * 2**i for i in range(len(found))]
    shuffled = found.copy()
    shuffler.shuffle(shuffled)
    one, other = (
        map_of(*(ending(lr, 0.1, loss) for lr, loss in zip(rates, values, strict=True))).sensitivity(0.1)
        for values in (found, shuffled)
    )
    if all(loss is None for loss in found):
        assert one is other is None
        return
    assert one == pytest.approx(other)
    best = min(START, *(loss for loss in found if loss is not None), START)
    assert -1e-9 <= one <= START - best + 1e-9
    worse = map_of(*(ending(lr, 0.1, loss) for lr, loss in zip(rates, found, strict=True)), ending(1.0, 0.1, None))
    assert worse.sensitivity(0.1) >= one - 1e-9  # one more rate, which diverges


# -------------------------------------------------------------------------------------------------------------- spikes


def test_spikes_are_judged_by_the_steps_before_alone() -> None:
    norms = [1.0] * 150
    norms[20] = 50.0  # too early: there are not enough before it
    norms[SPIKE_WINDOW] = SPIKE + 0.01
    norms[120] = SPIKE  # no more than
    norms[149] = 1e6
    assert spikes(norms) == [SPIKE_WINDOW, 149]
    assert spikes(norms[:SPIKE_WINDOW]) == spikes([]) == []


@given(st.lists(st.floats(1e-3, 1e3), min_size=0, max_size=160))
def test_spikes_are_the_rules(norms: list[float]) -> None:
    expected = [
        step
        for step in range(SPIKE_WINDOW, len(norms))
        if norms[step] > SPIKE * statistics.median(norms[step - SPIKE_WINDOW : step])
    ]
    assert spikes(norms) == expected


# ------------------------------------------------------------------------------------------------------------- reading


def written(folder: Path, **changes: Any) -> Path:
    """Two architectures at two rates, one decay; `changes` to the model of the last arm."""
    arms = [
        arm(f"{name}@{lr:g}-0.05", name, config=config(train__lr=lr, train__weight_decay=0.05, **(model | more)))
        for name, model in (("baseline", {}), ("res-gelu", {"model__query": {"kind": "bottleneck"}}))
        for lr, more in ((2e-3, {}), (1e-2, changes if name == "res-gelu" else {}))
    ]
    return write_study(folder, tuple(arms), seeds=(1, 2), search=False, fates={("res-gelu@0.01-0.05", 2): "diverged"})


def test_a_folder_becomes_maps(tmp_path: Path) -> None:
    run = RunFolder(written(tmp_path) / "runs" / "baseline@0.01-0.05" / "seed-1")
    lines = list(run.metrics())
    for line in lines:
        if line.get("split") == "val":
            line["max_logit"] = [None, 40.0 if line["step"] == 200 else 2.0]
        elif line["step"] in (50, 200, 300):
            line["grad_norm"] = 9.0
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    results = load(tmp_path)
    maps = maps_of(endings_of(results))
    assert list(maps) == ["baseline", "res-gelu"]
    assert maps["baseline"].rates == [2e-3, 1e-2]
    cell = maps["baseline"].cells[1e-2, 0.05]
    assert cell.loss == results.arms[1].val_loss
    assert (cell.spikes, cell.max_logit) == (1.0, 40.0)  # two spikes with one seed, none with the other
    assert maps["baseline"].start_loss == pytest.approx(statistics.fmean(r.val[0][1] for r in results.runs[:4]))
    assert maps["res-gelu"].cells[1e-2, 0.05].diverged_after == (140,)


def test_arms_without_a_rate_are_refused(tmp_path: Path) -> None:
    bare = config()
    del bare["train"]["lr"]
    write_study(tmp_path, (arm("baseline", "Baseline", config=bare),), search=False)
    with pytest.raises(BadInput, match=r"study\.json is damaged: .*train\.lr of baseline = None, no number"):
        load(tmp_path)


def test_one_name_is_one_architecture(tmp_path: Path) -> None:
    results = load(written(tmp_path, model__d_ff=600))
    with pytest.raises(BadInput, match=r"res-gelu@0.002-0.05 and res-gelu@0.01-0.05 are one architecture by their"):
        endings_of(results)


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        (
            {"train__min_lr": 1e-5},
            "one architecture by their names, at one rate and decay; a map has one arm at each point",
        ),
        ({"train__lr": 5e-3, "train__steps": 200}, "one architecture, and of different lengths of training"),
    ],
)
def test_a_point_is_one_arms_and_a_map_of_one_length(more: dict[str, Any], refusal: str, tmp_path: Path) -> None:
    base = {"train__lr": 2e-3, "train__weight_decay": 0.05}
    arms = (
        BASELINE,
        arm("other@a", "A", config=config(**base)),
        arm("other@b", "B", config=config(**{**base, **more})),
    )
    with pytest.raises(BadInput, match=refusal):
        endings_of(load(write_study(tmp_path, arms, search=False)))


def test_an_a_a_arm_is_no_seed_of_a_point(tmp_path: Path) -> None:
    arms = (BASELINE, arm("baseline@again", "A/A", seed_offset=100))
    found = endings_of(load(write_study(tmp_path, arms, search=False)))
    assert [ending.seed for ending in found] == [1, 2, 3]


def test_runs_that_are_missing_or_damaged_are_no_points(tmp_path: Path) -> None:
    written(tmp_path)
    for name, seed in (("baseline@0.002-0.05", 1), ("baseline@0.01-0.05", 2)):
        (tmp_path / "runs" / name / f"seed-{seed}" / "metrics.jsonl").write_text("{broken\n")
    (map_, _) = maps_of(endings_of(load(tmp_path))).values()
    assert map_.state(2e-3, 0.05) is None
    assert map_.stable_up_to(0.05) is None
    assert map_.sensitivity(0.05) is None
