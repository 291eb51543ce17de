"""Looks before a study's own: what a pool, a folder and its runs remember, and what that takes or widens."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_study import BASELINE, NONLINEAR, WIDER, arm, write_study

from qurve.config import content_hash
from qurve.errors import BadInput
from qurve.runfolder import RunFolder
from qurve.study import jobs, looks
from qurve.study.definition import Arm, Study
from qurve.study.doubts import doubts
from qurve.study.headline import headline
from qurve.study.looks import FILE, Seen, undeclared
from qurve.study.pool import look_again
from qurve.study.power import detectable
from qurve.study.results import load
from qurve.study.same_run import was_seen
from qurve.study.search import Score, Search, trials
from qurve.study.searched import evidence
from qurve.study.statistics import comparisons, overall_verdict
from tiny import tiny

FIVE = (1, 2, 3, 4, 5)


@pytest.fixture(autouse=True)
def every_run_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run is made for most of these."""
    monkeypatch.setattr(looks, "was_seen", lambda run: True)


def make_study(widths: tuple[int, ...], seeds: tuple[int, ...] = FIVE, *settings: str, **more: Any) -> Study:
    arms = tuple(
        Arm(f"w{width}", f"W{width}", tiny("train.steps=2", f"model.d_ff={width}", *settings)) for width in widths
    )
    return Study("s", "S", (Arm("baseline", "Baseline", tiny("train.steps=2", *settings)), *arms), seeds, **more)


def look(pool: Path, study: Study, before: Seen | None = None) -> Seen:
    """What a study is told; no run needs to be made."""
    return look_again(pool, study, jobs.jobs_of(study, pool / "study"), before or Seen())


def apart(job: jobs.Job, **settings: Any) -> jobs.Job:
    train = dataclasses.replace(job.config.train, **settings)
    return dataclasses.replace(job, config=dataclasses.replace(job.config, train=train))


def beside(pool: Path, study: Study) -> int:
    return len(look(pool, study).beside.get("own", ()))


def test_a_study_whose_runs_came_to_no_loss_saw_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a call that was interrupted at once, or had the wrong seeds: the pool keeps its line for ever."""
    monkeypatch.setattr(looks, "was_seen", was_seen)
    ten, one = make_study(TEN), make_study((160,))
    look(tmp_path, ten)
    assert beside(tmp_path, one) == 0
    run = RunFolder(tmp_path / content_hash(jobs.jobs_of(ten, tmp_path)[0].config))
    run.path.mkdir()
    for step, seen in ((0, 0), (2, len(TEN) - (160 in TEN))):
        run.append({"step": step, "split": "val", "loss": 3.0, "tokens": 1})
        assert beside(tmp_path, one) == seen
    lines = (tmp_path / FILE).read_text()
    again = jobs.jobs_of(ten, tmp_path)
    again = [apart(job, threads=2) for job in again]
    look_again(tmp_path, ten, again, Seen())
    assert (tmp_path / FILE).read_text() == lines  # it has its line, wherever its runs are made


# -------------------------------------------------------------------------------------------------------- sets of seeds


@pytest.mark.parametrize(
    ("earlier", "looks", "forbidden"),
    [
        ([(1, 2, 3)], (3, 5), []),
        ([(2, 1, 3)], (3, 5), []),
        ([(1, 2, 3), (1, 2, 3)], (3, 5), []),
        ([(1, 2, 3), (1, 2, 4)], (3, 5), [(1, 2, 3), (1, 2, 4)]),  # two sets of as many seeds: a choice
        ([(1, 2, 3), (1, 2, 4, 5)], (3, 4, 5), [(1, 2, 3), (1, 2, 4, 5)]),  # the second dropped one
        ([(1, 2, 3), (1, 2, 3, 5)], (3, 4, 5), []),
        ([(1, 2), (3, 4)], (), []),
        ([(1, 6)], (), [(1, 6)]),
        ([FIVE], (), []),
        ([(1, 2, 3)], (), [(1, 2, 3)]),
        ([(1, 2, 3), (1, 2, 3, 4)], (3, 5), [(1, 2, 3, 4)]),
    ],
)
def test_declared_looks_are_a_chain_of_sets(earlier: Any, looks: Any, forbidden: Any) -> None:
    assert undeclared(earlier, FIVE, looks) == forbidden


def test_a_pool_compares_sets_too(tmp_path: Path) -> None:
    for seeds in ((1, 2, 3), (1, 2, 4)):
        look(tmp_path, make_study((96,), seeds, looks=(3, 5)))
    assert look(tmp_path, make_study((96,), looks=(3, 5))).in_pool == {"w96": [[1, 2, 3], [1, 2, 4]]}


# ------------------------------------------------------------------------------------------------------ arms in a pool

TEN = tuple(range(96, 96 + 320, 32))


def test_arms_that_were_looked_at_before_stay_in_the_family(tmp_path: Path) -> None:
    assert beside(tmp_path, make_study(TEN)) == 0
    assert beside(tmp_path, make_study(TEN[2:3])) == 9
    assert beside(tmp_path, make_study(TEN[2:3], (1, 2, 3), "train.threads=2")) == 9  # made elsewhere, on fewer seeds
    assert beside(tmp_path, make_study((*TEN[:2], 512))) == 8


def test_ten_studies_of_one_arm_are_a_family_as_well(tmp_path: Path) -> None:
    assert [beside(tmp_path, make_study((width,))) for width in TEN] == list(range(10))


def test_the_honest_cases_are_left_alone(tmp_path: Path) -> None:
    look(tmp_path, make_study(TEN))
    look(tmp_path, make_study((*TEN, 512)))
    assert beside(tmp_path, make_study(TEN)) == 0  # the same one again sees what it saw
    assert beside(tmp_path, make_study((512, *TEN[::-1]))) == 0
    assert beside(tmp_path, make_study((*TEN, 512, 544))) == 0
    assert beside(tmp_path, make_study(TEN[:1], (6, 7, 8))) == 0  # whose runs are all fresh
    assert beside(tmp_path, make_study(TEN[:1], FIVE, "train.lr=0.5")) == 0  # and so is its baseline


def test_the_same_trainings_are_the_same_arms_however_they_are_evaluated(tmp_path: Path) -> None:
    look(tmp_path, make_study(TEN))
    assert beside(tmp_path, make_study(TEN[:1], FIVE, "eval.every=1")) == len(TEN) - 1
    assert beside(tmp_path, make_study((512,), (1, 2, 3), "eval.windows=2")) == len(TEN)


def test_seeds_read_by_another_evaluation_are_no_second_look(tmp_path: Path) -> None:
    look(tmp_path, make_study((96,), (1, 2, 3)))
    assert look(tmp_path, make_study((96,), FIVE, "eval.every=1")).in_pool == {}
    assert look(tmp_path, make_study((96,), FIVE)).in_pool == {"w96": [[1, 2, 3]]}


def test_another_baseline_is_another_comparison(tmp_path: Path) -> None:
    look(tmp_path, make_study((96, 128), (1, 2, 3)))
    other = make_study((96, 128, 160))
    seen = look(tmp_path, dataclasses.replace(other, arms=other.arms[1:], baseline="w160"))
    assert (seen.in_pool, seen.beside["own"]) == ({}, [])


def test_an_a_a_arm_is_compared_with_nobody(tmp_path: Path) -> None:
    one = make_study((96,))
    twin = Arm("a-a", "A/A", one.arms[0].config, seed_offset=1000)
    look(tmp_path, dataclasses.replace(one, arms=(*one.arms, twin)))
    (line,) = map(json.loads, (tmp_path / FILE).read_text().splitlines())
    assert len(line["arms"]) == 1
    assert beside(tmp_path, make_study((128,))) == 1
    assert look(tmp_path, dataclasses.replace(one, arms=(one.arms[0], twin))) == Seen()


def test_arms_at_the_baselines_point_are_a_family_of_their_own(tmp_path: Path) -> None:
    def searched(*widths: int) -> Study:
        one, search = make_study(widths), Search({"train.lr": (0.5,)})
        scores = [Score(trial, 3.0, "finished") for trial in trials(search, one.configs, ())]
        one = dataclasses.replace(one, search=evidence(search, one.configs, scores))
        base, *at = make_study(widths, FIVE, "train.lr=0.5").arms
        at = tuple(dataclasses.replace(arm, name=f"{arm.name}@baseline", matched=arm.name) for arm in at)
        return dataclasses.replace(one, arms=(base, *one.arms[1:], *at))

    assert {family: len(arms) for family, arms in look(tmp_path, searched(*TEN)).beside.items()} == {
        "own": 0,
        "matched": 0,
    }
    seen = look(tmp_path, searched(96, 128))
    assert {family: len(arms) for family, arms in seen.beside.items()} == {"own": 8, "matched": 8}
    assert beside(tmp_path, make_study(TEN)) == 0


def test_what_a_study_saw_stays_with_it_and_its_own_arms_are_no_others(tmp_path: Path) -> None:
    look(tmp_path / "pool", make_study((96, 128)))
    one = make_study((96,))
    seen = look(tmp_path / "pool", one)
    assert look_again(None, one, jobs.jobs_of(one, tmp_path), seen) == seen
    both = make_study((96, 128))
    assert look_again(None, both, jobs.jobs_of(both, tmp_path), seen).beside["own"] == []


# ------------------------------------------------------------------------------------------------------------- the file


def test_a_torn_line_takes_no_other_with_it(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"baseline": "torn')
    look(tmp_path, make_study((96,), (1, 2, 3)))
    assert look(tmp_path, make_study((96,))).in_pool == {"w96": [[1, 2, 3]]}
    text = (tmp_path / FILE).read_text()
    assert text.startswith('{"baseline": "torn\n{')
    assert text.endswith("}\n")
    assert len(text.splitlines()) == 3


LINE = {"baseline": "b", "arms": ["a"], "seeds": [1], "looks": []}


@pytest.mark.parametrize(
    "wrong",
    [{"seeds": [[1]]}, {"seeds": ["x"]}, {"seeds": [True]}, {"seeds": "12"}, {"arms": "abc"}, {"arms": [["a"]]},
     {"looks": None}, {"looks": [3.5]}, {"baseline": 1}, {"matched": [1]}],
)  # fmt: skip
def test_a_line_that_says_something_else_is_named(wrong: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / FILE
    file.write_text(json.dumps(LINE) + "\n\n" + json.dumps(LINE | wrong) + "\n")
    before = file.read_bytes()
    with pytest.raises(BadInput, match=r"looks\.jsonl, line 3 says of no look .*; restore it, or give another --pool"):
        look(tmp_path, make_study((96,)))
    assert file.read_bytes() == before
    file.write_text("[1]\n")
    with pytest.raises(BadInput, match=r"looks\.jsonl, line 1"):
        look(tmp_path, make_study((96,)))


@pytest.mark.parametrize("what", ["a folder", "no pool"])
def test_a_file_that_cannot_be_used_is_named(what: str, tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    (pool / FILE).mkdir(parents=True) if what == "a folder" else pool.write_text("a file")
    with pytest.raises(BadInput, match=r"looks\.jsonl cannot be used \(.*give another --pool"):
        look(pool, make_study((96,)))


# ------------------------------------------------------------------------------------------------------- what it takes


def planted(folder: Path, arms: int = 1, **fields: Any) -> Any:
    """Arms that a test of one would just call lower than the baseline (p about 0.02)."""
    names = [f"n{i}" for i in range(arms)]
    noise = (-0.02, -0.055, -0.03, -0.012, -0.07)
    finals = {("baseline", seed): 3.0 + 0.1 * seed for seed in FIVE}
    finals |= {(name, s): finals["baseline", s] + d for name in names for s, d in zip(FIVE, noise, strict=True)}
    write_study(folder, (BASELINE, *(arm(n, n.upper()) for n in names)), seeds=FIVE, search=False, finals=finals)
    file = folder / "study.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return load(folder)


def test_holm_counts_the_arms_that_were_compared_before(tmp_path: Path) -> None:
    alone = planted(tmp_path / "alone")
    (pair,) = comparisons(alone)
    assert pair.outcome == "lower"
    assert 0.01 < pair.p < 0.04
    picked = planted(tmp_path / "picked", compared_in_pool={"own": [str(i) for i in range(9)], "matched": ["m"]})
    (again,) = comparisons(picked)
    assert (again.p, again.p_holm, again.outcome) == (pair.p, pytest.approx(10 * pair.p), "noise")
    assert "after Holm for 10 arms, 9 of them compared with it before" in again.verdict
    (doubt,) = [doubt for doubt in doubts(picked) if "compared with this baseline before" in doubt]
    assert doubt.startswith("10 other arms were")
    assert "Holm counts them as well" in doubt
    assert detectable(picked)[0] > 1.2 * detectable(alone)[0]
    assert "not corrected for comparing 10 arms with one baseline" in overall_verdict(picked)
    two = planted(tmp_path / "two", 2, compared_in_pool={"own": ["a"]})
    assert "the verdict is corrected for 3 (Holm)" in headline(two).caveat


def test_the_overall_verdict_counts_the_doubts(tmp_path: Path) -> None:
    clean = planted(tmp_path / "clean")
    assert "Doubts" not in overall_verdict(clean)  # it says itself that nothing was tuned
    assert "Doubts to be read before it is believed: 1." in overall_verdict(
        planted(tmp_path / "p", earlier_seeds=[[1]])
    )


# ---------------------------------------------------------------------------------------------------------- run folders


def test_seeds_that_are_dropped_from_the_file_take_the_verdict(tmp_path: Path) -> None:
    results = planted(tmp_path, seeds=[1, 2, 4])
    (pair,) = comparisons(results)
    assert pair.verdict.startswith("no verdict: it was run before with other seeds (1, 2, 3, 4, 5)")
    (doubt,) = [doubt for doubt in doubts(results) if "study.json does not name" in doubt]
    assert "(baseline/seed-3, baseline/seed-5, n0/seed-3, n0/seed-5)" in doubt
    known = planted(tmp_path / "known", seeds=[1, 2, 4], earlier_seeds=[list(FIVE)])
    assert (known.strays, known.earlier_seeds) == ((), (FIVE,))


def test_arms_that_are_dropped_from_the_file_stay_in_the_family(tmp_path: Path) -> None:
    whole = planted(tmp_path, 10)
    file = tmp_path / "study.json"
    tree = json.loads(file.read_text())
    file.write_text(json.dumps(tree | {"arms": tree["arms"][:2]}))
    results = load(tmp_path)
    assert comparisons(results)[0].p_holm == pytest.approx(comparisons(whole)[0].p_holm)
    assert comparisons(results)[0].outcome == comparisons(whole)[0].outcome == "noise"
    (doubt,) = [doubt for doubt in doubts(results) if "study.json does not name" in doubt and "Its folder" in doubt]
    assert doubt.count("/seed-") == 6
    assert " and 39 more)" in doubt
    for i in range(1, 10):
        shutil.move(tmp_path / "runs" / f"n{i}", tmp_path / "runs" / f"n{i}@baseline")
    (tmp_path / "runs" / "n0@baseline").mkdir()  # and nothing begun in it
    assert load(tmp_path).compared_before == {"own": 9, "matched": 0}  # n1 to n9 are no arms any more
    shutil.move(tmp_path / "runs" / "n1@baseline" / "seed-1", tmp_path / "runs" / "n0@baseline" / "seed-1")
    assert load(tmp_path).compared_before == {"own": 9, "matched": 1}


def test_a_file_that_is_removed_forgets_no_look(tmp_path: Path) -> None:
    write_study(tmp_path, (BASELINE, NONLINEAR), seeds=(1, 2, 3), search=False)

    def before(*seeds: int, baseline: str = "baseline") -> Seen:
        arms = [SimpleNamespace(name=arm["name"]) for arm in (BASELINE, NONLINEAR)]
        study = SimpleNamespace(name="small", arms=arms, seeds=seeds, looks=(), baseline=baseline)
        return jobs.seen_before(study, tmp_path)  # type: ignore[arg-type]

    with pytest.raises(BadInput, match="with the baseline baseline, and it is res-gelu now; give another --out"):
        before(1, 2, 3, baseline="res-gelu")
    (tmp_path / "study.json").unlink()
    assert before(1, 2, 3, 4, 5).earlier_seeds == [[1, 2, 3]]
    assert before(3, 2, 1).earlier_seeds == []
    assert before(1, 2).earlier_seeds == [[1, 2, 3]]


def test_a_folder_without_strays_has_no_such_doubt(tmp_path: Path) -> None:
    results = load(write_study(tmp_path, (BASELINE, WIDER)))
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "other" / "seed-one").mkdir(parents=True)
    assert load(tmp_path).strays == results.strays == ()
    assert not math.isnan(results.baseline.final_loss)
