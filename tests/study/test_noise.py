from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path

import pytest
from fake_study import BASELINE, arm, config, write_study
from hypothesis import given
from hypothesis import strategies as st

from qurve.errors import BadInput
from qurve.study.evidence import compact_evidence, evidence_json
from qurve.study.noise import floor_of, known_from, noise_floor
from qurve.study.pace import pace_of
from qurve.study.results import load

TWO = (BASELINE, arm("new", "New"))
LOSSES = {"baseline": {1: 3.0, 2: 3.1, 3: 2.9}, "new": {1: 3.01, 2: 3.09, 3: 2.91}}


def test_noise_known_by_hand():
    floor = floor_of(LOSSES, "baseline")
    assert floor.base_loss == pytest.approx(3.0)
    assert (floor.baseline.value, floor.baseline.n) == (pytest.approx(0.1), 3)
    # chi-square of two degrees of freedom: -2 ln(1 - p)
    low, high = (0.1 * math.sqrt(2 / (-2 * math.log(tail))) for tail in (0.025, 0.975))
    assert (floor.baseline.low, floor.baseline.high) == (pytest.approx(low), pytest.approx(high))
    (new,) = floor.arms
    assert new.differences.value == pytest.approx(statistics.stdev([0.01, -0.01, 0.01]))
    assert new.correlation == pytest.approx(statistics.correlation([3.01, 3.09, 2.91], [3.0, 3.1, 2.9]))
    assert floor.differences == new.differences


def test_arms_are_pooled_by_their_degrees_of_freedom_and_the_interval_counts_one():
    losses = LOSSES | {"other": {1: 3.2, 2: 3.1}}
    floor = floor_of(losses, "baseline")
    first, second = (one.differences for one in floor.arms)
    assert floor.differences.value == pytest.approx(math.sqrt((2 * first.value**2 + second.value**2) / 3))
    assert floor.differences.n == 3


@given(st.lists(st.floats(1, 5), min_size=2, max_size=8), st.floats(-1, 1))
def test_an_arm_that_is_the_baseline_and_a_constant_has_no_noise_left(base, shift):
    losses = {"baseline": dict(enumerate(base)), "new": {seed: loss + shift for seed, loss in enumerate(base)}}
    assert floor_of(losses, "baseline").arms[0].differences.value == pytest.approx(0, abs=1e-12)


def test_what_pairing_buys_is_what_the_correlation_says():
    """With equal deviations the variance of a difference is 2 sd^2 (1 - correlation)."""
    draw = random.Random(2)
    shared = [draw.gauss(3, 0.04) for _ in range(4000)]
    losses = {
        name: {seed: loss + draw.gauss(0, 0.01) for seed, loss in enumerate(shared)} for name in ("baseline", "a")
    }
    floor = floor_of(losses, "baseline")
    left = floor.arms[0].differences.value ** 2 / (2 * floor.baseline.value**2)
    assert left == pytest.approx(1 - floor.arms[0].correlation, rel=0.05)


def test_too_little_shows_no_noise():
    assert floor_of({"baseline": {1: 3.0}, "new": {1: 3.0}}, "baseline") is None
    alone = floor_of({"baseline": {1: 3.0, 2: 3.1}, "new": {1: 3.0, 9: 3.1}}, "baseline")
    assert (alone.arms, alone.differences) == ((), None)
    assert floor_of({"baseline": {1: 3.0, 2: 3.0}, "new": {1: 3.0, 2: 3.1}}, "baseline").arms[0].correlation is None


def test_a_studys_noise_is_of_its_finished_and_paired_runs(tmp_path: Path):
    finals = {(name, seed): loss for name, of in LOSSES.items() for seed, loss in of.items()}
    floor = noise_floor(load(write_study(tmp_path / "whole", TWO, finals=finals)))
    assert floor == floor_of(LOSSES, "baseline")
    fates = {("new", 3): "diverged"}
    floor = noise_floor(load(write_study(tmp_path / "broken", TWO, finals=finals, fates=fates)))
    assert (floor.baseline.n, floor.arms[0].differences.n) == (3, 2)
    fates = {("new", 3): "other-batches"}
    assert noise_floor(load(write_study(tmp_path / "apart", TWO, finals=finals, fates=fates))).arms == ()


def test_an_a_a_arm_is_noise_and_an_arm_at_the_baselines_point_is_another_question(tmp_path: Path):
    """Known by hand: the deviations of (1, -1, 1) and (3, -3, 0) hundredths, pooled; of (90, -90, 0) nothing."""
    twin, matched = (
        arm("a-a", "A/A", seed_offset=1000),
        arm("new@baseline", "New, there", matched="new", config=TWO[1]["config"]),
    )
    apart = {"new": (0.01, -0.01, 0.01), "a-a": (0.03, -0.03, 0.0), "new@baseline": (0.9, -0.9, 0.0)}
    finals = {("baseline", seed): 3.0 + seed / 10 for seed in (1, 2, 3)}
    finals |= {(n, seed): finals["baseline", seed] + of[seed - 1] for n, of in apart.items() for seed in (1, 2, 3)}
    other = arm("new", "New", config=config(train__lr=1e-3))
    folder = write_study(tmp_path / "study", (BASELINE, other, twin, matched), finals=finals)
    file, compact = tmp_path / "evidence.json", tmp_path / "compact.json"
    file.write_text(evidence_json(load(folder)))
    compact.write_text(json.dumps(compact_evidence(load(folder))))
    for known in (known_from(folder), known_from(file), known_from(compact)):
        floor = known.floor
        assert ([one.arm for one in floor.arms], [one.arm for one in floor.a_a]) == (["new"], ["a-a"])
        assert floor.a_a[0].differences.value == pytest.approx(0.03)
        assert floor.differences.value == pytest.approx(math.sqrt((0.04 / 3 + 0.09) / 2) / 10)
        assert floor.differences.n == 3
        assert "new@baseline" in known.speeds


# ------------------------------------------------------------------------------------------------------------- evidence


def test_a_folder_and_its_evidence_know_the_same(tmp_path: Path):
    folder = write_study(tmp_path / "study", fates={("mlp-4.75", 2): "diverged"})
    file = tmp_path / "evidence.json"
    file.write_text(evidence_json(load(folder)))
    there, kept = known_from(folder), known_from(file)
    assert (kept.floor, kept.speeds, kept.config, kept.machine) == (
        there.floor,
        there.speeds,
        there.config,
        "a made-up processor",
    )
    assert kept.source == str(file)


def test_compact_evidence_knows_what_its_folder_does_but_for_paths(tmp_path: Path):
    folder = write_study(tmp_path / "study", fates={("mlp-4.75", 2): "diverged"})
    file = tmp_path / "compact.json"
    file.write_text(json.dumps(compact_evidence(load(folder))))
    there, kept = known_from(folder), known_from(file)
    assert (kept.floor, kept.speeds, kept.machine) == (there.floor, there.speeds, there.machine)
    assert pace_of(kept).timed == pace_of(there).timed


def test_the_committed_noise_floor_is_known_from_its_file():
    known = known_from(Path(__file__).parents[2] / "results" / "noise-floor.json")
    stored = json.loads(Path(known.source).read_text())["noise"]
    assert known.floor.differences.value == pytest.approx(stored["differences"]["value"])
    assert known.floor.base_loss == pytest.approx(stored["base_loss"])


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"rows": [{"arm": "a", "verdict": "x"}]}', '{"rows": 5}'])
def test_what_is_no_evidence_is_refused(tmp_path: Path, damage: str):
    file = tmp_path / "evidence.json"
    file.write_text(damage)
    with pytest.raises(BadInput, match=r"evidence\.json is no study's evidence"):
        known_from(file)
    with pytest.raises(BadInput, match="gone is not there"):
        known_from(tmp_path / "gone")


def test_evidence_whose_runs_are_not_finite_numbers_is_refused_or_left_out(tmp_path: Path):
    tree = json.loads(evidence_json(load(write_study(tmp_path / "study", TWO))))
    file = tmp_path / "evidence.json"
    tree["runs"][0]["val"][-1][1] = float("nan")
    file.write_text(json.dumps(tree))
    assert known_from(file).floor.baseline.n == 2
    tree["runs"][0]["val"] = []
    file.write_text(json.dumps(tree))
    with pytest.raises(
        BadInput, match=r"evidence\.json is no study's evidence: .*list index out of range.*; give a study's folder"
    ):
        known_from(file)
