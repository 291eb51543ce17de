"""`experiments/noise_floor.py`: a baseline whose runs the fair search shares, an A/A arm, and what the noise takes."""

from __future__ import annotations

import dataclasses
import json
import runpy
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, WIDER, arm, write_study

from qurve import plugins, presets
from qurve.config import content_hash
from qurve.errors import BadInput
from qurve.study.definition import load_study
from qurve.study.power import power_of, seeds_needed
from qurve.study.results import load
from qurve.study.search import configured

FILE = Path(__file__).parents[2] / "experiments" / "noise_floor.py"
FOUR = (1, 2, 3, 4)
SAME = arm("a-a", "A/A", seed_offset=100)


@pytest.fixture(scope="module")
def module() -> dict[str, Any]:
    plugins.make_importable(FILE.parent)
    return runpy.run_path(str(FILE))


def test_the_a_a_arm_has_the_baselines_batches_and_other_weights(module: dict[str, Any]) -> None:
    for study in (module["STUDY"], module["PAPER"]):
        base, same = study.arms
        assert same.config == base.config
        for seed in study.seeds:
            first, second = (study.run_config(arm, seed) for arm in (base, same))
            assert (first.train.seed, second.train.seed, second.data.order_seed) == (seed, seed + 100, seed)
    assert module["STUDY"].arms[0].config.train == presets.get("small/baseline").train
    assert load_study(str(FILE)) == module["STUDY"]


def test_the_fair_search_shares_its_runs_at_the_same_point(module: dict[str, Any]) -> None:
    study, fair = module["STUDY"], load_study(str(FILE.with_name("fair_search.py")))
    train = study.arms[0].config.train
    point = (("train.lr", train.lr), ("train.min_lr", train.min_lr))
    there = next(arm for arm in fair.arms if arm.name == "baseline")
    there = dataclasses.replace(there, config=configured(there.config, point))
    here, shared = study.run_config(study.arms[0], 1), fair.run_config(there, 1)
    assert content_hash(here) == content_hash(shared)
    assert set(fair.seeds) <= set(study.seeds)


def test_seeds_are_asked_for_by_the_deviation_of_the_a_a_differences(module: dict[str, Any], tmp_path: Path) -> None:
    results = load(write_study(tmp_path, (BASELINE, SAME), seeds=FOUR, search=False))
    found = module["noise"](results)
    base, same = ([results.arms[i].runs[seed].val_loss for seed in FOUR] for i in (0, 1))
    sd = statistics.stdev([a - b for a, b in zip(same, base, strict=True)])
    assert found["baseline"]["value"] == pytest.approx(statistics.stdev(base))
    assert found["differences"]["value"] == pytest.approx(sd)
    assert found["differences"]["low"] < sd < found["differences"]["high"]
    assert [line["effect_percent"] for line in found["seeds_needed"]] == [0.2, 0.5, 1.0, 2.4]
    first = found["seeds_needed"][0]
    assert first["effect_nats"] == pytest.approx(0.002 * statistics.fmean(base))
    assert first["seeds"]["value"] == seeds_needed(first["effect_nats"], sd)
    assert first["seeds"]["low"] <= first["seeds"]["value"] <= first["seeds"]["high"]
    least = found["detectable_percent"] / 100 * found["base_loss"]
    assert power_of(least, sd, 4) == pytest.approx(0.8)


def test_evidence_of_a_folder(
    module: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path / "study", (BASELINE, SAME), seeds=FOUR, search=False)
    out = tmp_path / "evidence.json"
    monkeypatch.setattr(sys, "argv", ["noise_floor.py", "--study", str(tmp_path / "study"), "--out", str(out)])
    module["main"]()
    tree = json.loads(out.read_text())
    assert tree["rows"][1]["verdict"].endswith("as an A/A arm should be")
    assert str(tmp_path) not in out.read_text()
    told = capsys.readouterr().out
    assert f"A/A: {tree['rows'][1]['diff']:+.4f}" in told
    assert f"2.4 %: {tree['noise']['seeds_needed'][3]['seeds']['value']} seeds" in told


def test_one_finished_seed_is_no_noise_floor(module: dict[str, Any], tmp_path: Path) -> None:
    fates = {("a-a", seed): "failed" for seed in FOUR[1:]}
    results = load(write_study(tmp_path, (BASELINE, SAME, WIDER), seeds=FOUR, search=False, fates=fates))
    with pytest.raises(BadInput, match="fewer than two seeds are finished in both"):
        module["noise"](results)
