"""Studies with a search, made: trials first, then the finals, whatever was made already."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from commands import call
from qurve.data.loader import TokenData
from qurve.errors import BadInput
from qurve.runfolder import RunFolder
from qurve.study import execute, local
from qurve.study.definition import Arm, Study
from qurve.study.doubts import doubts
from qurve.study.execute import made_already, run_search, run_study
from qurve.study.jobs import Job, run_path
from qurve.study.results import load
from qurve.study.search import Search
from qurve.study.statistics import compare
from qurve.study.watch import Watched
from tiny import InProcess, tiny

BOTH = 'eval.splits=["val","test"]'
SETTINGS = (BOTH, "train.steps=3", "train.min_lr=0")


def make_study(*settings: str, search: Search | None = None) -> Study:
    arms = (
        Arm("baseline", "Baseline", tiny(*SETTINGS, *settings)),
        Arm("wide", "Wide", tiny("model.d_ff=96", *SETTINGS, *settings)),
    )
    search = search or Search({"train.lr": (1e-3, 1e-2)})
    return Study("tiny", "A tiny study", arms, (1, 2), search=search)


class Made:
    """Trainings that are made up where they would run, and counted: each ends at once with the loss that it is given.

    `losses` maps an arm's width and rate to its loss on val; on test it is 1 more. None diverges.
    """

    def __init__(self, losses: dict[tuple[int, float], float | None]) -> None:
        self.losses = losses
        self.made: list[str] = []
        self.breaks_at: int | None = None

    def __call__(self, jobs: list[Job], workers: Any, data: str, retries: int, say: Any, later: int) -> dict[str, str]:
        for job in jobs:
            if len(self.made) == self.breaks_at:
                raise KeyboardInterrupt
            self.made.append(job.name)
            self.write(job)
        return {}

    def write(self, job: Job) -> None:
        from qurve.config import content_hash, to_json

        run, config = RunFolder(job.folder), job.config
        run.create(to_json(config), content_hash(config), {"cpu": "made up", "threads": 1})
        loss = self.losses[config.model.d_ff, config.train.lr]
        if loss is None:
            run.set_status("diverged", step=1, why="planted")
            return
        for step in range(1, config.train.updates + 1):
            line = {"step": step, "loss": loss, "lr": config.train.lr, "grad_norm": 1.0, "tokens": step}
            run.append({**line, "seconds": 1.0 * step, "batch_sha": f"{config.train.seed}/{step}"})
        for place, split in enumerate(config.eval.splits):
            own = loss + place + config.train.seed / 1000
            run.append({"step": config.train.updates, "split": split, "loss": own, "tokens": 1})
        run.set_status("finished", step=config.train.updates)


WIDE_LIKES_MORE = {(64, 1e-3): 3.0, (64, 1e-2): 3.5, (96, 1e-3): 2.9, (96, 1e-2): 2.5}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    made = Made(dict(WIDE_LIKES_MORE))
    monkeypatch.setattr(execute, "_execute", made)
    return made


def run(study: Study, folder: Path, data: TokenData, **more: Any) -> tuple[dict[str, str], list[str]]:
    said: list[str] = []
    return run_study(study, folder, data, command="qurve compare", say=said.append, workers=1, **more), said


TRIALS = [f"{arm}@lr={lr}, seed 101" for arm in ("baseline", "wide") for lr in ("0.001", "0.01")]
FINALS = [f"{arm}, seed {seed}" for arm in ("baseline", "wide", "wide@baseline") for seed in (1, 2)]


def test_trials_come_first_then_each_arm_at_its_own_point_and_at_the_baselines(
    made: Made, data: TokenData, tmp_path: Path
) -> None:
    failed, said = run(make_study(), tmp_path, data)
    assert failed == {}
    assert made.made == [*TRIALS, *FINALS]
    assert said[0] == "a search of 4 runs, then at most 6 runs of the chosen points"
    rates = {arm: RunFolder(run_path(tmp_path, arm, 1)).config_json()[0]["train"]["lr"] for arm in ("baseline", "wide")}
    assert rates == {"baseline": 1e-3, "wide": 1e-2}
    assert RunFolder(run_path(tmp_path, "wide@baseline", 2)).config_json()[0]["train"]["lr"] == 1e-3
    trial = RunFolder(run_path(tmp_path / "search", "wide@lr=0.01", 101)).config_json()[0]
    assert (trial["eval"]["splits"], trial["train"]["seed"]) == (["val"], 101)


def test_the_report_is_on_test_and_tells_which_arms_are_matched(made: Made, data: TokenData, tmp_path: Path) -> None:
    run(make_study(), tmp_path, data)
    results = load(tmp_path)
    assert results.split == "test"
    assert [(arm.name, arm.matched) for arm in results.arms] == [
        ("baseline", None),
        ("wide", None),
        ("wide@baseline", "wide"),
    ]
    one = results.arms[1].runs[2]
    assert (one.val_loss, one.final_loss) == (2.502, 3.502)
    assert results.arms[2].final_loss == pytest.approx(3.9015)
    assert results.best is results.arms[1]
    assert compare(results, results.arms[1]).diff == pytest.approx(2.5 - 3.0)
    assert results.search is not None
    assert results.search.chosen["wide"].lr == 1e-2
    text = " ".join(doubts(results))
    assert "Baseline: the chosen peak rate 0.001 is at the edge" in text
    assert "has chosen no rate" not in text
    assert "not searched over the same" not in text
    tree = json.loads((tmp_path / "study.json").read_text())
    assert tree["search"]["machine"] == {"cpu": "made up", "threads": 1}
    assert tree["search"]["data_fingerprint"] == data.fingerprint


def test_matched_arms_are_left_out_where_the_points_are_the_same(made: Made, data: TokenData, tmp_path: Path) -> None:
    made.losses[96, 1e-3] = 1.0
    run(make_study(), tmp_path, data)
    assert made.made == [*TRIALS, *FINALS[:4]]


@pytest.mark.parametrize("breaks_at", [0, 1, len(TRIALS), len(TRIALS) + 3, len(TRIALS) + len(FINALS)])
def test_a_study_that_is_cut_short_anywhere_goes_on_to_the_same_end(
    breaks_at: int, made: Made, data: TokenData, tmp_path: Path
) -> None:
    made.breaks_at = breaks_at
    if breaks_at < len(TRIALS) + len(FINALS):
        with pytest.raises(KeyboardInterrupt):
            run(make_study(), tmp_path, data)
        load(tmp_path)  # it can be reported as it stands
    made.breaks_at = None
    run(make_study(), tmp_path, data)
    assert made.made == [*TRIALS, *FINALS]
    assert all(run.finished for run in load(tmp_path).runs)
    again = (tmp_path / "study.json").read_bytes()
    run(make_study(), tmp_path, data)
    assert len(made.made) == len(TRIALS) + len(FINALS)
    assert (tmp_path / "study.json").read_bytes() == again


def test_a_failed_trial_ends_the_search_and_nothing_is_chosen(made: Made, data: TokenData, tmp_path: Path) -> None:
    del made.losses[96, 1e-2]
    write = made.write
    made.write = lambda job: None if job.name == TRIALS[3] else write(job)  # type: ignore[method-assign]
    failed, _ = run(make_study(), tmp_path, data)
    assert failed == {TRIALS[3]: "it was not made"}
    assert made.made == TRIALS
    tree = json.loads((tmp_path / "study.json").read_text())
    assert (tree["search"]["chosen"], [arm["name"] for arm in tree["arms"]]) == ({}, ["baseline", "wide"])
    assert "Wide: the search has chosen no rate for it." in doubts(load(tmp_path))


def test_an_arm_that_diverges_everywhere_is_reported_so_and_still_run_at_the_baselines_point(
    made: Made, data: TokenData, tmp_path: Path
) -> None:
    made.losses |= {(96, 1e-3): None, (96, 1e-2): None}
    failed, _ = run(make_study(), tmp_path, data)
    assert failed == {}
    assert made.made == [*TRIALS, *FINALS[:2], *FINALS[4:]]
    results = load(tmp_path)
    assert [run.status for run in results.arms[1].runs.values()] == ["diverged", "diverged"]
    assert "seed 1 diverged" in compare(results, results.arms[1]).verdict
    assert any("no point of its search was finished with every seed" in doubt for doubt in doubts(results))
    run(make_study(), tmp_path, data)


def test_a_baseline_that_diverges_everywhere_leaves_the_arms_at_their_own_points(
    made: Made, data: TokenData, tmp_path: Path
) -> None:
    made.losses |= {(64, 1e-3): None, (64, 1e-2): None}
    failed, _ = run(make_study(), tmp_path, data)
    assert failed == {}
    assert made.made == [*TRIALS, *FINALS[2:4]]


def test_extended_points_are_trials_of_every_arm(made: Made, data: TokenData, tmp_path: Path) -> None:
    made.losses |= {(64, 1e-1): 9.0, (96, 1e-1): None, (64, 1e-4): 9.0, (96, 1e-4): 9.0}
    run(make_study(search=Search({"train.lr": (1e-3, 1e-2)}, extensions=1)), tmp_path, data)
    added = [f"{arm}@lr={lr}, seed 101" for arm in ("baseline", "wide") for lr in ("0.0001", "0.1")]
    assert made.made[4:8] == added
    assert not any("edge" in doubt for doubt in doubts(load(tmp_path)))


@pytest.mark.parametrize(
    ("search", "said"),
    [
        (Search({"train.lr": (1e-3, 1e-2)}, extensions=1), "at least 4 runs"),
        (Search({"train.lr": (1e-3, 1e-2)}, "halving", rungs=1), "at most 4 runs"),
    ],
)
def test_a_search_says_whether_it_may_take_more_or_less(
    search: Search, said: str, made: Made, data: TokenData, tmp_path: Path
) -> None:
    made.losses |= {(width, rate): 9.0 for width in (64, 96) for rate in (1e-4, 1e-1)}
    assert run(make_study(search=search), tmp_path, data)[1][0].startswith(f"a search of {said}, then")


def test_a_search_needs_a_test_split_to_report_on(made: Made, data: TokenData, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"""not in eval\.splits; add it .* --set 'eval\.splits=\["val","test"\]'"""):
        run(make_study('eval.splits=["val"]'), tmp_path / "study", data)
    assert not (tmp_path / "study").exists()


def test_a_search_in_the_papers_order_is_refused_and_told_the_way_out(
    made: Made, data: TokenData, tmp_path: Path
) -> None:
    way_out = ("data.order=epochs", BOTH)
    for splits in ('eval.splits=["val"]', BOTH):
        study = make_study("data.order=paper", splits)
        with pytest.raises(BadInput, match=r"no evaluation table; take --set data\.order=epochs") as refusal:
            run(study, tmp_path / "study", data)
        assert all(setting in str(refusal.value) for setting in way_out)
        assert not (tmp_path / "study").exists()
    assert run(study.change(way_out), tmp_path / "study", data)[0] == {}


def test_an_a_a_arm_is_trained_at_the_point_that_the_baseline_gets(made: Made, data: TokenData, tmp_path: Path) -> None:
    study = make_study()
    twin = Arm("a-a", "A/A", study.arms[0].config, seed_offset=1000)
    run(dataclasses.replace(study, arms=(*study.arms, twin)), tmp_path, data)
    assert made.made == [*TRIALS, *FINALS[:4], "a-a, seed 1", "a-a, seed 2", *FINALS[4:]]
    results = load(tmp_path)
    assert results.arms[2].setting("train.lr") == 1e-3
    config = RunFolder(run_path(tmp_path, "a-a", 2)).config_json()[0]
    assert (config["train"]["seed"], config["data"]["order_seed"]) == (1002, 2)
    assert not any("A/A" in doubt for doubt in doubts(results))


def test_an_a_a_arm_is_out_where_the_baseline_is(made: Made, data: TokenData, tmp_path: Path) -> None:
    made.losses |= {(64, 1e-3): None, (64, 1e-2): None}
    study = make_study()
    twin = Arm("a-a", "A/A", study.arms[0].config, seed_offset=1000)
    run(dataclasses.replace(study, arms=(*study.arms, twin)), tmp_path, data)
    assert made.made == [*TRIALS, *FINALS[2:4]]


@pytest.mark.parametrize("breaks_at", [1, len(TRIALS), len(TRIALS) + 3, len(TRIALS) + len(FINALS)])
def test_what_a_pool_holds_of_a_study_is_counted(breaks_at: int, made: Made, data: TokenData, tmp_path: Path) -> None:
    pool, study, is_over = tmp_path / "pool", make_study(), breaks_at >= len(TRIALS)
    made.breaks_at = breaks_at
    if breaks_at < len(TRIALS) + len(FINALS):
        with pytest.raises(KeyboardInterrupt):
            run(study, tmp_path / "study", data, pool=pool)
    else:
        run(study, tmp_path / "study", data, pool=pool)
    before = sorted(tmp_path.rglob("*"))
    found = made_already(study, data, pool)
    assert sorted(tmp_path.rglob("*")) == before
    assert found.trials == min(breaks_at, len(TRIALS))
    assert sum(found.runs.values()) == breaks_at - found.trials
    assert [arm.name for arm in found.study.arms] == ["baseline", "wide", *(["wide@baseline"] if is_over else [])]


def test_a_search_alone_makes_its_trials_and_no_final(made: Made, data: TokenData, tmp_path: Path) -> None:
    found, failed = run_search(make_study(), tmp_path, data, workers=1, say=lambda text: None)
    assert failed == {}
    assert made.made == TRIALS
    assert {arm: item["point"] for arm, item in found["chosen"].items()} == {
        "baseline": {"train.lr": 1e-3},
        "wide": {"train.lr": 1e-2},
    }
    bare = dataclasses.replace(make_study(), search=None)
    with pytest.raises(BadInput, match="has no search"):
        run_search(bare, tmp_path, data, workers=1)


def test_another_studys_folder_is_refused_before_its_search_is_made(
    made: Made, data: TokenData, tmp_path: Path
) -> None:
    run(make_study(), tmp_path, data)
    with pytest.raises(BadInput, match="holds the study 'tiny' with the arms baseline, wide; give another"):
        run(dataclasses.replace(make_study(), name="other"), tmp_path, data)


def test_the_trials_of_a_search_are_watched_beside_the_runs(made: Made, data: TokenData, tmp_path: Path) -> None:
    made.breaks_at = 3
    with pytest.raises(KeyboardInterrupt):
        run(make_study(), tmp_path, data)
    states = {state.run: state.status for state in Watched(tmp_path).look()}
    assert states == dict.fromkeys(TRIALS[:3], "finished") | dict.fromkeys(FINALS[:4], "waiting")


def test_a_searched_study_is_compared_from_the_command_line(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only one here that trains: everything together, with halving and a pool."""
    monkeypatch.setattr(local, "ProcessPoolExecutor", InProcess)
    file = tmp_path / "searched.py"
    file.write_text(
        "from tiny import tiny\n"
        "from qurve.study.definition import Arm, Study\n"
        "from qurve.study.search import Range, Search\n"
        "arms = (Arm('baseline', 'Baseline', tiny()), Arm('wide', 'Wide', tiny('model.d_ff=96')))\n"
        "search = Search({'train.lr': Range(1e-3, 1e-1)}, 'halving', trials=2, rungs=2, factor=2)\n"
        "STUDY = Study('searched', 'Searched', arms, (1,), search=search)\n"
    )
    folder, pool = tmp_path / "study", tmp_path / "pool"
    more = ("--data", data_folder, "--out", folder, "--pool", pool, "--workers", 1, "--set", BOTH, "--json")
    done = call("compare", file, *more)
    assert done.code == 0, done.err
    assert "a search of at most 6 runs, then at most 3 runs" in done.err
    results = load(folder)
    assert results.search is not None
    steps = [score.trial.steps for score in results.search.scores]
    assert (sorted(steps), results.split) == ([2, 2, 2, 2, 4, 4], "test")
    assert all(run.finished for run in results.runs)
    for arm in results.arms[:2]:
        assert arm.setting("train.lr") == results.search.chosen[arm.name].lr
    assert (folder / "report" / "report.html").exists()
    assert (folder / "runs" / "wide" / "seed-1").is_symlink()
