"""Effects in useful units: each is what its definition says, and unknown, with the reason, where it cannot be known."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, NONLINEAR, STEPS, THREE_ARMS, arm, config, searched, write_study
from hypothesis import given
from hypothesis import strategies as st

from qurve.study.effects import (
    STEADY,
    Effect,
    Saved,
    Unknown,
    bits_per_byte,
    bytes_per_token,
    costs,
    effect,
    effects,
    sized_baselines,
    speeds_apart,
    step_reaching,
)
from qurve.study.results import StudyResults, load
from qurve.study.scaling import Equivalent, Estimate
from qurve.study.statistics import compare, comparisons
from qurve.study.worth import costs_table

WIDE = arm("wide", "Wide", non_embedding=900_000, config=config(model__d_ff=608))
NEW = arm("new", "New", non_embedding=800_512, config=config(model__query={"kind": "bottleneck"}))
SEEDS = (1, 2, 3)


def study(folder: Path, **losses: list[float]) -> StudyResults:
    """Baseline, wide and new with these final losses by seed; `wide` and `new` may be left out."""
    arms = (BASELINE, *(one for one in (WIDE, NEW) if one["name"] in losses))
    finals = {(name, seed): loss for name, of in losses.items() for seed, loss in enumerate(of, 1)}
    return load(write_study(folder, arms, seeds=tuple(range(1, len(losses["baseline"]) + 1)), finals=finals))


def of(results: StudyResults, name: str) -> Effect:
    return next(found for found in effects(results) if found.arm == name)


BASE = [3.00, 3.04, 2.97]
PAPERS = {"baseline": BASE, "wide": [0.9906 * x for x in BASE], "new": [0.976 * x for x in BASE]}


def test_gains_are_the_statistics_own_with_intervals_that_hold_them(tmp_path: Path) -> None:
    results = load(write_study(tmp_path, THREE_ARMS))
    for one in results.others:
        found, pair = effect(results, one, sized_baselines(results)), compare(results, one)
        for gain, value in ((found.dll_percent, pair.dll_percent), (found.dppx_percent, pair.dppx_percent)):
            assert isinstance(gain, Estimate)
            assert gain.value == pytest.approx(value)
            assert gain.low is not None
            assert gain.high is not None
            assert gain.low < gain.value < gain.high
            assert (gain.low > 0) == (pair.high is not None and pair.high < 0)  # one claim, in three units
        assert found.seeds == pair.seeds


def test_one_seed_has_numbers_and_no_interval(tmp_path: Path) -> None:
    found = of(study(tmp_path, baseline=[3.0], new=[2.94]), "new")
    assert found.dll_percent == Estimate(pytest.approx(2.0), None, None, 1)
    assert found.dppx_percent == Estimate(pytest.approx(100 * (1 - math.exp(-0.06))), None, None, 1)


# --------------------------------------------------------------------------------------------------- size and compute


def test_the_papers_numbers_are_worth_35_per_cent_more_parameters(tmp_path: Path) -> None:
    found = of(study(tmp_path, **PAPERS), "new").parameters
    assert isinstance(found, Equivalent)
    assert found.percent.value == pytest.approx(35.4, abs=0.05)
    assert found.percent.low == pytest.approx(found.percent.high)  # each seed says the same
    assert found.net_percent.value == pytest.approx(100 * (1.354 / (800_512 / 800_000) - 1), abs=0.05)
    assert found.measured_to == 1.125


def test_compute_counts_what_the_arm_itself_takes(tmp_path: Path) -> None:
    slow = {**NEW, "flops_per_token": 1.25 * 6 * 800_000}
    finals = {(name, seed): loss for name, of in PAPERS.items() for seed, loss in zip(SEEDS, of, strict=True)}
    results = load(write_study(tmp_path, (BASELINE, WIDE, slow), finals=finals))
    found = of(results, "new").compute
    assert isinstance(found, Equivalent)
    assert found.percent.value == pytest.approx(35.4, abs=0.05)
    assert found.net_percent.value == pytest.approx(100 * (1.354 / 1.25 - 1), abs=0.05)


def test_of_two_baselines_of_one_size_the_better_one_counts(tmp_path: Path) -> None:
    worse = arm("wide-slow", "Wide, lower rate", non_embedding=900_000, config=config(model__d_ff=608, train__lr=1e-4))
    losses = PAPERS | {"wide-slow": [0.999 * x for x in BASE]}
    finals = {(name, seed): loss for name, of in losses.items() for seed, loss in zip(SEEDS, of, strict=True)}
    results = load(write_study(tmp_path, (BASELINE, worse, WIDE, NEW), finals=finals))
    assert {one.name for one in sized_baselines(results)} == {"wide", "wide-slow"}
    found = of(results, "new").parameters
    assert isinstance(found, Equivalent)
    assert found.percent.value == pytest.approx(35.4, abs=0.05)


def test_no_worth_without_a_baseline_of_another_size(tmp_path: Path) -> None:
    found = of(study(tmp_path, baseline=BASE, new=PAPERS["new"]), "new")
    assert isinstance(found.parameters, Unknown)
    assert found.parameters.why.startswith("no baseline of another size was measured; add one")


def test_no_worth_where_the_wider_one_is_not_better(tmp_path: Path) -> None:
    found = of(study(tmp_path, baseline=BASE, wide=[1.01 * x for x in BASE], new=PAPERS["new"]), "new")
    assert isinstance(found.parameters, Unknown)
    assert "not better" in found.parameters.why


def test_no_worth_where_the_wider_one_is_told_only_without_holm(tmp_path: Path) -> None:
    """Its own interval leaves out zero; between the two arms of its study that is no difference (p = 0.035, twice)."""
    wide = [x - nats for x, nats in zip(BASE, (0.02, 0.03, 0.04), strict=True)]
    new = [x - nats for x, nats in zip(BASE, (0.01, -0.01, 0.0), strict=True)]
    results = study(tmp_path, baseline=BASE, wide=wide, new=new)
    pair = next(one for one in comparisons(results) if one.arm == "wide")
    assert pair.high is not None
    assert pair.high < 0
    assert pair.outcome == "noise"
    found = of(results, "new").parameters
    assert isinstance(found, Unknown)
    assert found.why.startswith("Wide, of another size, cannot be told from the baseline")


def test_the_wider_one_itself_has_no_other_to_be_measured_by(tmp_path: Path) -> None:
    """And is not told to add what it is."""
    one = of(study(tmp_path, **PAPERS), "wide")
    why = "it is itself the only baseline of another size here, which every other arm is measured by"
    assert one.parameters == one.compute == Unknown(why)


# ------------------------------------------------------------------------------------------------------------- savings


@given(
    st.lists(st.floats(1, 10), min_size=2, max_size=12, unique=True),
    st.floats(0.5, 10.5),
)
def test_the_step_is_the_first_at_which_the_loss_is_reached(losses: list[float], target: float) -> None:
    curve = [(10 * place, loss) for place, loss in enumerate(losses)]
    step = step_reaching(curve, target)
    reached = [place for place, loss in enumerate(losses) if loss <= target]
    assert (step is None) == (not reached)
    if step is not None:
        assert 10 * (reached[0] - 1) < step <= 10 * reached[0] or step == 0


def test_the_step_lies_on_a_straight_line_between_evaluations() -> None:
    assert step_reaching([(0, 8.0), (100, 4.0), (200, 3.0)], 3.25) == 175
    assert step_reaching([(0, 8.0), (100, 4.0)], 4.0) == 100
    assert step_reaching([(5, 2.0), (10, 3.0)], 4.0) == 5
    assert step_reaching([], 4.0) is None


def test_what_is_saved_is_in_each_unit_the_same_share(tmp_path: Path) -> None:
    results = load(write_study(tmp_path, (BASELINE, NONLINEAR)))
    (found,) = effects(results)
    assert isinstance(found.saved, Saved)
    base, ours = results.baseline, results.others[0]
    steps = [
        STEPS - (step_reaching(ours.runs[seed].val, base.runs[seed].val[-1][1]) or math.nan) for seed in results.seeds
    ]
    assert found.saved.steps.value == pytest.approx(statistics.fmean(steps))
    assert 0 < found.saved.steps.value < STEPS
    assert found.saved.percent_of_steps.value == pytest.approx(100 * found.saved.steps.value / STEPS)
    assert found.saved.tokens.value == pytest.approx(2048 * found.saved.steps.value)
    left = 2048 * (STEPS - found.saved.steps.value)
    flops = 2048 * STEPS * base.flops_per_token - left * ours.flops_per_token
    assert found.saved.flops.value == pytest.approx(flops)
    assert isinstance(found.saved.seconds, Estimate)
    # The invented runs of one seed are equally fast: 0.1 seconds a step, and 1 per cent more for each seed.
    seconds = [0.1 * (1 + 0.01 * seed) * s for seed, s in zip(results.seeds, steps, strict=True)]
    assert found.saved.seconds.value == pytest.approx(statistics.fmean(seconds))


def test_nothing_is_saved_by_an_arm_of_which_a_seed_never_gets_there(tmp_path: Path) -> None:
    found = of(study(tmp_path, baseline=[2.0, 2.9, 2.9], new=[2.1, 2.8, 2.8]), "new")
    assert found.saved == Unknown("seed 1 never reaches the baseline's last validation loss")


# ------------------------------------------------------------------------------------------------------------ in bytes


def with_data(folder: Path, path: Path) -> StudyResults:
    """The study with its runs made on the data at `path`."""
    for file in folder.glob("runs/*/*/config.json"):
        tree = json.loads(file.read_text())
        tree["data"]["path"] = str(path)
        file.write_text(json.dumps(tree))
    return load(folder)


def manifest(path: Path, fingerprint: str = "f" * 64, **splits: Any) -> Path:
    path.mkdir()
    (path / "manifest.json").write_text(json.dumps({"format": 1, "fingerprint": fingerprint, "splits": splits}))
    return path


def test_bits_per_byte_known_by_hand() -> None:
    assert bits_per_byte(math.log(2), 1.0) == pytest.approx(1)
    assert bits_per_byte(2.8736, 4.5) == pytest.approx(0.92127, abs=1e-5)


def test_bits_per_byte_come_from_the_manifest_of_the_runs_data(tmp_path: Path) -> None:
    study(tmp_path / "study", baseline=BASE, new=[x - 0.03 for x in BASE])
    data = manifest(tmp_path / "data", val={"tokens": 100, "bytes": 400})
    results = with_data(tmp_path / "study", data)
    assert bytes_per_token(results) == 4
    found = of(results, "new").bits_per_byte
    assert isinstance(found, Estimate)
    assert found.value == pytest.approx(-0.03 / math.log(2) / 4)
    assert (found.low, found.high) == (pytest.approx(found.value), pytest.approx(found.value))


def test_a_study_that_was_moved_has_its_data_with_it(tmp_path: Path) -> None:
    study(tmp_path / "study", baseline=BASE, new=[x - 0.03 for x in BASE])
    with_data(tmp_path / "study", tmp_path / "where it was made")
    manifest(tmp_path / "study" / "data", val={"tokens": 100, "bytes": 500})
    assert bytes_per_token(load(tmp_path / "study")) == 5


def test_bits_per_byte_are_by_the_bytes_of_the_split_that_is_reported_on(tmp_path: Path) -> None:
    arms = searched(*({**one, "test": dict.fromkeys(SEEDS, loss)} for one, loss in ((BASELINE, 3.0), (NEW, 2.97))))
    write_study(tmp_path / "study", arms)
    data = manifest(tmp_path / "data", val={"tokens": 100, "bytes": 400}, test={"tokens": 100, "bytes": 500})
    results = with_data(tmp_path / "study", data)
    assert (results.split, bytes_per_token(results, "test")) == ("test", 5)
    found = of(results, "new").bits_per_byte
    assert isinstance(found, Estimate)
    assert found.value == pytest.approx(-0.03 / math.log(2) / 5)


@pytest.mark.parametrize(
    ("splits", "fingerprint", "why"),
    [
        (None, "f" * 64, "the manifest of the data is not at hand"),
        ({"val": {"tokens": 100, "bytes": 400}}, "e" * 64, "holds other data than the runs were made on"),
        ({"val": {"tokens": 100}}, "f" * 64, "states no bytes of the val split"),
        ({"val": {"tokens": 0, "bytes": 4}}, "f" * 64, "states no bytes of the val split"),
    ],
)
def test_bits_per_byte_are_unknown_without_it(splits: Any, fingerprint: str, why: str, tmp_path: Path) -> None:
    study(tmp_path / "study", baseline=BASE, new=BASE)
    data = tmp_path / "data" if splits is None else manifest(tmp_path / "data", fingerprint, **splits)
    found = of(with_data(tmp_path / "study", data), "new").bits_per_byte
    assert isinstance(found, Unknown)
    assert why in found.why


# ----------------------------------------------------------------------------------------------- what is no comparison


@pytest.mark.parametrize(
    ("fate", "who", "why"),
    [
        ("diverged", "new", "no verdict: seed 2 diverged"),
        ("diverged", "baseline", "no verdict: seed 2 diverged (baseline)"),
        ("other-batches", "new", "did not see the same batch"),
    ],
)
def test_an_arm_that_is_no_comparison_has_no_effect(fate: str, who: str, why: str, tmp_path: Path) -> None:
    results = load(write_study(tmp_path, (BASELINE, NEW), fates={(who, 2): fate}))
    (found,) = effects(results)
    assert isinstance(found.dll_percent, Unknown)
    assert why in found.dll_percent.why
    assert found.saved == found.parameters == found.bits_per_byte == found.dll_percent
    assert found.seeds == ()


def test_a_wider_arm_that_broke_is_no_measure(tmp_path: Path) -> None:
    results = load(write_study(tmp_path, (BASELINE, WIDE, NEW), fates={("wide", 1): "failed"}))
    found = of(results, "new").parameters
    assert isinstance(found, Unknown)
    assert "no baseline of another size" in found.why


def test_nothing_finished_says_so(tmp_path: Path) -> None:
    results = load(write_study(tmp_path, (BASELINE, NEW), fates={("new", seed): "missing" for seed in SEEDS}))
    assert effects(results)[0].dppx_percent == Unknown("no verdict yet: seed 1 not run, seed 2 not run, seed 3 not run")


# ---------------------------------------------------------------------------------------------------------------- cost


def test_costs_stand_beside_every_arm(tmp_path: Path) -> None:
    folder = write_study(tmp_path, (BASELINE, NEW))
    for seed, peak in zip(SEEDS, (5, 9, 7), strict=True):
        file = folder / "runs" / "new" / f"seed-{seed}" / "environment.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "peak_memory_bytes": peak}))
    base, new = costs(load(folder))
    assert (base.arm, base.non_embedding, base.total, base.peak_memory_bytes) == ("baseline", 800_000, 1_078_528, None)
    assert (new.peak_memory_bytes, new.flops_per_token) == (9, 6.0 * 800_512)
    assert new.tokens_per_s == pytest.approx(2048 / 0.102)


@pytest.mark.parametrize("slower", [1.2, 2.0])
def test_speeds_are_compared_only_on_a_quiet_machine(slower: float, tmp_path: Path) -> None:
    """One arm's seeds are the same work: where their speeds part, the machine did something else."""
    results = load(write_study(tmp_path, (BASELINE, NONLINEAR)))
    new = results.others[0]
    seed, run = next(iter(new.runs.items()))
    assert run.tokens_per_s is not None
    slow = dataclasses.replace(run, tokens_per_s=run.tokens_per_s / slower)
    arms = (results.baseline, dataclasses.replace(new, runs={**new.runs, seed: slow}))
    results = dataclasses.replace(results, arms=arms)
    assert speeds_apart(results) == pytest.approx(slower, rel=0.03)
    (effect,) = effects(results)
    assert isinstance(effect.saved, Saved)
    rows = costs_table(results).rows
    if slower < STEADY:
        assert isinstance(effect.saved.seconds, Estimate)
        assert "%" in rows[1][4]
    else:
        assert isinstance(effect.saved.seconds, Unknown)
        assert "%" not in rows[1][4]
        assert any("no arm's speed is compared" in note for note in costs_table(results).notes)
