"""Of a search that was no equal one: what takes the verdict, and what is told. The numbers are invented."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, NONLINEAR, searched, write_study

from qurve.study.doubts import doubts, searched_alike
from qurve.study.results import StudyResults, load
from qurve.study.statistics import comparisons

Tree = dict[str, Any]
STEP = 6.0 * 800_000 * 2048
"""FLOPs of one of the baseline's."""


def with_search(folder: Path, change: Callable[[Tree], Tree], *more: Tree) -> StudyResults:
    """An equal search of ten points, so changed, and arms that it did not try."""
    file = write_study(folder, (*searched(BASELINE, NONLINEAR), *more)) / "study.json"
    study = json.loads(file.read_text())
    tree = study["search"]
    tree["scores"] = [score for score in tree["scores"] if score["arm"] not in {arm["name"] for arm in more}]
    file.write_text(json.dumps({**study, "search": {**tree, **change(tree)}}))
    return load(folder)


def verdicts(results: StudyResults) -> dict[str, str]:
    return {pair.arm: pair.verdict for pair in comparisons(results)}


def failed(tree: Tree, arms: tuple[str, ...] = ("baseline",)) -> Tree:
    """Eight of the ten trials of these arms."""
    of = {arm: [s for s in tree["scores"] if s["arm"] == arm][2:] for arm in arms}
    return {"scores": [{**s, "status": "failed"} if s in of.get(s["arm"], ()) else s for s in tree["scores"]]}


def halved(tree: Tree) -> Tree:
    """All ten points at a quarter of the length; at the whole one the baseline's choice and all of the arm's."""
    choice = tree["chosen"]["baseline"]["point"]
    whole = [s for s in tree["scores"] if s["arm"] != "baseline" or s["point"] == choice]
    return {"sampler": "halving", "scores": [*({**s, "steps": 100} for s in tree["scores"]), *whole]}


def one_length(tree: Tree) -> Tree:
    """The baseline's trials, each as short as no other's."""
    return {"scores": [{**s, "steps": 100} if s["arm"] == "baseline" else s for s in tree["scores"]]}


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda tree: {}, ""),
        (failed, "its search was another one than the baseline's (10 runs, and 2 of the baseline)"),
        (
            lambda tree: {**failed(tree), "sampler": "random"},
            "its search was another one than the baseline's (10 runs, and 2 of the baseline)",
        ),
        (
            lambda tree: {"flops": 100 * 400 * STEP},
            "",
        ),  # a grid with FLOPs to spare has no other point to spend them on
        (lambda tree: failed(tree, ("baseline", "res-gelu")), ""),
        (
            halved,
            "its search was no whole halving: of the 3 points that were best at 100 steps 3 went on to 400, and 7",
        ),
        (one_length, "its search was another one than the baseline's"),
        (lambda tree: {"scores": []}, "nothing is recorded of its search, from which its point is said to come"),
        (
            lambda tree: {"scores": [s for s in tree["scores"] if s["arm"] != "baseline"]},
            "nothing is recorded of the baseline's search",
        ),
        (
            lambda tree: {"scores": [*tree["scores"], *({**s, "seed": 3} for s in tree["scores"])]},
            "seed 3 is one of the search and of the comparison",
        ),
        (
            lambda tree: {"chosen": {"baseline": tree["chosen"]["baseline"]}},
            "its search has chosen no point to train at",
        ),
    ],
)
def test_a_search_that_was_no_equal_one_takes_the_verdict(
    change: Callable[[Tree], Tree], refused: str, tmp_path: Path
) -> None:
    """Of the arm at its own point; at the baseline's point it had no choice to make."""
    results = with_search(tmp_path, change)
    found = verdicts(results)
    assert found["res-gelu"].startswith(f"no verdict: {refused}" if refused else "lower loss")
    assert searched_alike(results) == (not refused)
    assert found["res-gelu@baseline"].startswith("no verdict: seed 3" if "seed" in refused else "lower loss")
    if refused:
        assert any(doubt.startswith(f"Res. GELU (nonlinear query): {refused}") for doubt in doubts(results))


def test_trials_that_failed_are_told_where_every_arm_has_some(tmp_path: Path) -> None:
    results = with_search(tmp_path, lambda tree: failed(tree, ("baseline", "res-gelu")))
    told = [doubt for doubt in doubts(results) if "came to no end" in doubt]
    assert told == [
        f"{label}: 8 trials of its search came to no end, so that it was tried at fewer points."
        for label in ("Baseline", "Res. GELU (nonlinear query)")
    ]


def test_a_study_whose_search_chose_nothing_has_no_verdict_though_it_was_run(tmp_path: Path) -> None:
    write_study(tmp_path, (BASELINE, NONLINEAR))
    file = tmp_path / "study.json"
    tree = json.loads(file.read_text())
    file.write_text(json.dumps({**tree, "search": {**tree["search"], "chosen": {}}}))
    assert verdicts(load(tmp_path)) == {"res-gelu": "no verdict: its search has chosen no point to train at"}


def test_an_a_a_arm_has_the_baselines_point_and_seeds_of_its_own(tmp_path: Path) -> None:
    """The search need not have tried it; a seed of its own weights must be none of the search's."""
    twin = {**searched(BASELINE)[0], "name": "a-a", "label": "A/A", "seed_offset": 1000, "paper": None}
    found = verdicts(with_search(tmp_path / "one", lambda tree: {}, twin))
    assert "an A/A arm should be" in found["a-a"]
    found = verdicts(with_search(tmp_path / "two", lambda tree: {"seeds": [0, 1002]}, twin))
    assert found["a-a"] == "no verdict: seed 1002 is one of the search and of the comparison"
    assert "seed 1002" not in found["res-gelu"]


def test_flops_are_counted_with_every_seed_of_the_search(tmp_path: Path) -> None:
    def twice(tree: Tree) -> Tree:
        scores = [{**score, "seed": seed} for score in tree["scores"] for seed in (0, 9)]
        return {"sampler": "random", "scores": scores, "seeds": [0, 9], "flops": 15 * 400 * STEP}

    found = verdicts(with_search(tmp_path, twice))
    assert found["res-gelu"].startswith("no verdict: the search of res-gelu cost more than its")


@pytest.mark.parametrize(("points", "refused"), [(10, False), (9, True)])
def test_a_schedule_that_is_stopped_early_costs_what_it_trains(points: int, refused: bool, tmp_path: Path) -> None:
    arms = [
        {**one, "config": {**one["config"], "train": {**one["config"]["train"], "stop_at": 200}}}
        for one in (BASELINE, NONLINEAR)
    ]
    file = write_study(tmp_path, searched(*arms)) / "study.json"
    study = json.loads(file.read_text())
    study["search"] |= {"sampler": "random", "flops": 1.001 * points * 200 * STEP}
    file.write_text(json.dumps(study))
    assert verdicts(load(tmp_path))["res-gelu"].startswith("no verdict: the search of") == refused


@pytest.mark.parametrize(
    ("fact", "doubt"),
    [
        ({"tokens_per_step": 2048, "data_fingerprint": "f" * 64}, None),
        ({"tokens_per_step": 64}, "Trained with 2,048 tokens a step, though the rates were searched with 64."),
        ({"data_fingerprint": "0" * 64}, "Trained on other data than the rates were searched on."),
    ],
)
def test_a_search_of_another_training_is_flagged(fact: Tree, doubt: str | None, tmp_path: Path) -> None:
    found = doubts(with_search(tmp_path, lambda tree: fact))
    assert [one for one in found if one.startswith("Trained")] == ([] if doubt is None else [doubt])


@pytest.mark.parametrize(("nats", "told"), [((0.05, 0.06, 0.055), "0.0550"), ((0.05, -0.06, 0.0), None)])
def test_a_choice_that_the_baselines_point_puts_to_shame_is_told(
    nats: tuple[float, ...], told: str | None, tmp_path: Path
) -> None:
    arms = searched(BASELINE, NONLINEAR)
    own = {("res-gelu", seed): 3.0 + seed / 100 for seed in (1, 2, 3)}
    there = {("res-gelu@baseline", seed): own["res-gelu", seed] - nats[seed - 1] for seed in (1, 2, 3)}
    folder = write_study(tmp_path, arms)
    for (name, seed), loss in {**own, **there}.items():
        file = folder / "runs" / name / f"seed-{seed}" / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        last = max(place for place, line in enumerate(lines) if line.get("split") == "test")
        lines[last]["loss"] = loss
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [said for said in doubts(load(folder)) if "the search's seeds misled it" in said]
    assert [f"it ends {told} nats per token lower" in said for said in found] == ([] if told is None else [True])


# ---------------------------------------------------------------------------------------------------------- of the code


def test_code_that_no_commit_holds_is_told(tmp_path: Path) -> None:
    folder = write_study(tmp_path, (BASELINE, NONLINEAR), search=False)
    assert not [said for said in doubts(load(folder)) if "no commit holds" in said]
    for file in folder.glob("runs/*/*/environment.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "commit": "a1+changes"}))
    (said,) = [said for said in doubts(load(folder)) if "no commit holds" in said]
    assert "(a1+changes)" in said
