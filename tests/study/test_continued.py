"""A run that was stopped and continued: elsewhere it is told, with other settings it is no run of its arm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, arm, config, write_study

from interrupted import little_data, smallest
from qurve.config import to_dict
from qurve.runfolder import RunFolder
from qurve.study.continued import PLACE, check_settings, in_words, parts_of
from qurve.study.doubts import doubts
from qurve.study.markdown import markdown
from qurve.study.provenance import commands, provenance
from qurve.study.results import StudyResults, load
from qurve.study.statistics import comparisons
from qurve.train.loop import train

HERE = {
    "commit": "a",
    "qurve": "1",
    "torch": "2",
    "cpu": "x",
    "gpu": None,
    "device": "cpu",
    "precision": "bf16",
    "threads": 1,
}


def entry(step: int, changed: dict[str, Any] | None = None, **environment: Any) -> dict[str, Any]:
    return {"step": step, "earlier_hash": "h", "changed": changed or {}, **HERE, **environment}


def resumed(*entries: dict[str, Any], **environment: Any) -> dict[str, Any]:
    return {**HERE, **environment, "resumed": list(entries)}


# ------------------------------------------------------------------------------------------------------------ the parts


def test_a_run_without_a_break_is_one_part() -> None:
    assert [part.after for part in parts_of(HERE)] == [0]
    assert in_words(parts_of(HERE)) == []


def test_what_was_made_after_the_step_that_it_went_back_to_is_gone() -> None:
    def parts(*steps: int) -> list[tuple[int, Any]]:
        entries = [entry(step, commit=str(place)) for place, step in enumerate(steps)]
        return [(part.after, part.environment["commit"]) for part in parts_of(resumed(*entries))]

    assert parts(200, 300) == [(0, "a"), (200, "0"), (300, "1")]
    assert parts(200, 100) == [(0, "a"), (100, "1")]
    assert parts(200, 200) == [(0, "a"), (200, "1")]
    assert parts(200, 0) == [(0, "1")]


def test_settings_are_those_that_a_part_had_whatever_came_between() -> None:
    def otherwise(*entries: dict[str, Any]) -> list[dict[str, Any]]:
        return [part.otherwise for part in parts_of(resumed(*entries))]

    first, back = {"train.lr": [1, 2]}, {"train.lr": [2, 1]}
    assert otherwise(entry(200, first)) == [{"train.lr": 1}, {}]
    assert otherwise(entry(200, first), entry(300, back)) == [{}, {"train.lr": 2}, {}]
    assert otherwise(entry(200, first), entry(100)) == [{"train.lr": 1}, {}]  # the change holds from there on
    assert otherwise(entry(200, first), entry(0)) == [{}]
    assert otherwise(entry(200, first), entry(300, {"train.steps": [5, 6]})) == [
        {"train.lr": 1, "train.steps": 5},
        {"train.steps": 5},
        {},
    ]


@pytest.mark.parametrize("key", PLACE)
def test_each_place_is_told(key: str) -> None:
    (words,) = in_words(parts_of(resumed(entry(200, **{key: "another"}))))
    assert words == f'continued after step 200 elsewhere than it began: {key} {json.dumps(HERE[key])}, then "another"'


def test_what_differs_by_nature_is_not_told() -> None:
    facts = {"started": "later", "compiled": True, "python": "3", "cores": 4}
    assert in_words(parts_of(resumed(entry(200, **facts), compiled=False, compile_error="it broke"))) == []
    (words,) = in_words(
        parts_of(resumed(entry(200, {"train.micro_batch": [4, 2], "train.threads": [1, 2]}, threads=2)))
    )
    assert words.endswith(": threads 1, then 2; another train.micro_batch")


# ----------------------------------------------------------------------------------------------------------- in a study


def study(folder: Path, *entries: Any, of: tuple[tuple[str, int], ...] = (("new", 2),)) -> StudyResults:
    write_study(folder, (BASELINE, arm("new", "New", 0.05)), search=False)
    for name, seed in of:
        run = RunFolder(folder / "runs" / name / f"seed-{seed}")
        there = {key: value for key, value in run.environment().items() if key != "resumed"}
        run.add_to_environment({"resumed": [e if e == "odd" else {**there, **e} for e in entries]})
    return load(folder)


def bare(step: int, changed: dict[str, Any] | None = None, **environment: Any) -> dict[str, Any]:
    return {"step": step, "earlier_hash": "h", "changed": changed or {}, **environment}


def test_a_run_that_was_continued_elsewhere_is_a_doubt(tmp_path: Path) -> None:
    results = study(tmp_path, bare(200, commit="b", torch="1.0"), of=(("new", 2), ("new", 3), ("baseline", 1)))
    was = f'commit "{"0" * 40}", then "b"; torch "2.13.0", then "1.0"'
    found = [doubt for doubt in doubts(results) if "continued" in doubt]
    assert found == [
        f"Baseline, continued after step 200 elsewhere than it began: {was} (seed 1).",
        f"New, continued after step 200 elsewhere than it began: {was} (seeds 2, 3).",
    ]
    assert f'The runs differ in commit: "{"0" * 40}", "b".' in doubts(results)
    assert comparisons(results)[0].outcome == "lower"
    assert "continued after step 200 elsewhere" in markdown(results)
    assert len(provenance(results).code) == len(provenance(results).environments) == 2
    assert not any("git checkout" in line for line in commands(results))


def test_a_run_that_was_continued_where_it_began_is_none(tmp_path: Path) -> None:
    before = doubts(study(tmp_path / "never"))
    results = study(tmp_path / "once", bare(200, started="later"))
    assert doubts(results) == before
    assert len(provenance(results).environments) == 1


def test_a_run_that_was_begun_anew_is_of_where_it_was_begun_last(tmp_path: Path) -> None:
    every = tuple((name, seed) for name in ("baseline", "new") for seed in (1, 2, 3))
    results = study(tmp_path, bare(0, {"train.lr": [1.0, 2e-3]}, commit="b"), of=every)
    assert not any("commit" in doubt or "continued" in doubt for doubt in doubts(results))
    assert commands(results)[0] == "git checkout b"
    assert comparisons(results)[0].outcome == "lower"


@pytest.mark.parametrize("path", ["train.lr", "train.grad_clip", "model.d_ff"])
@pytest.mark.parametrize("of", ["baseline", "new"])
def test_a_run_that_was_continued_with_other_settings_is_no_run_of_its_arm(path: str, of: str, tmp_path: Path) -> None:
    results = study(tmp_path, bare(100, {path: [7.0, 8.0]}), bare(200), of=((of, 2),))
    assert comparisons(results)[0].outcome == "none"
    (damaged,) = [run for run in results.runs if run.status == "damaged"]
    assert (damaged.arm, damaged.seed) == (of, 2)
    assert damaged.why == f"it holds another run: {path} was 7.0 for steps 1 to 100 of it"
    assert any(damaged.why in doubt for doubt in doubts(results))


def test_what_the_arm_leaves_to_the_run_may_change_and_what_it_states_may_not() -> None:
    parts = parts_of(resumed(entry(200, {"train.threads": [1, 2]})))
    check_settings(parts, config(train__threads=None))
    with pytest.raises(ValueError, match=r"train\.threads was 1 for steps 1 to 200"):
        check_settings(parts, config(train__threads=2))


ODD: tuple[Any, ...] = ("odd", {"step": "5"}, {"step": True}, {"step": 5, "changed": []}, {"changed": {"a": 5}})


@pytest.mark.parametrize("damage", ODD)
def test_a_record_that_is_none_is_damage(damage: Any, tmp_path: Path) -> None:
    results = study(tmp_path, damage if damage == "odd" else {**bare(200), **damage})
    assert "'resumed' in its environment.json is not" in results.others[0].runs[2].why


def test_a_real_run_writes_what_is_read_here(tmp_path: Path) -> None:
    data, path = little_data(tmp_path), tmp_path / "run"
    train(smallest("train.stop_at=2"), path, data)
    train(smallest("train.lr=0.5"), path, data, resume="auto", changed=["train.lr"])
    run = RunFolder(path)
    run.add_to_environment({"torch": "1.0"})
    parts = parts_of(run.environment())
    assert [(part.after, list(part.otherwise)) for part in parts] == [(0, ["train.lr"]), (2, [])]
    assert in_words(parts)[0].startswith('continued after step 2 elsewhere than it began: torch "1.0", then')
    with pytest.raises(ValueError, match=r"train\.lr was .* for steps 1 to 2 of it"):
        check_settings(parts, to_dict(smallest("train.lr=0.5")))
