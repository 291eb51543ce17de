from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, NONLINEAR, THREE_ARMS, arm, config, searched, write_study

from qurve.errors import BadInput
from qurve.runfolder import RunFolder
from qurve.study.batches import identical_batches
from qurve.study.doubts import ON_ONE_SPLIT, doubts, searched_alike
from qurve.study.results import StudyResults, load
from qurve.study.statistics import comparisons


def change(folder: Path, **fields) -> Path:
    file = folder / "study.json"
    tree = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in tree.items() if value != "gone"}))
    return folder


# ------------------------------------------------------------------------------------------------------------- loading


def test_a_whole_study(tmp_path):
    results = load(write_study(tmp_path))
    assert [arm.name for arm in results.arms] == ["baseline", "mlp-4.75", "res-gelu"]
    assert results.baseline.name == "baseline"
    assert [arm.name for arm in results.others] == ["mlp-4.75", "res-gelu"]
    assert all(run.finished for run in results.runs)
    run = results.arms[1].runs[2]
    lines = RunFolder(tmp_path / "runs/mlp-4.75/seed-2").eval_lines("val")
    assert run.val_loss == lines[-1]["loss"]
    assert run.val[0] == (0, lines[0]["loss"])
    assert len(run.train) == len(run.batch_digests) == run.step == 400
    assert results.best is results.arms[2]
    assert doubts(results) == [ON_ONE_SPLIT]


@pytest.mark.parametrize(
    ("fate", "words"),
    [
        ("missing", "not run"),
        ("running", "running (step 140)"),
        ("diverged", "diverged (after step 140: the loss is not finite)"),
        ("failed", "failed (after step 140: out of memory)"),
        ("stopped", "stopped (after step 140: interrupted)"),
    ],
)
def test_what_did_not_finish_has_a_word_and_no_loss(tmp_path, fate, words):
    results = load(write_study(tmp_path, fates={("res-gelu", 2): fate}))
    run = results.arms[2].runs[2]
    assert run.in_words == words
    assert run.val_loss is None
    assert [run.seed for run in results.arms[2].finished] == [1, 3]
    assert results.best is results.arms[1]  # the better arm is not whole
    assert any(words in doubt for doubt in doubts(results))


def test_a_finished_run_needs_a_finite_last_loss(tmp_path):
    write_study(tmp_path, finals={("mlp-4.75", 1): 3.0})
    for seed in (1, 2):
        file = tmp_path / f"runs/mlp-4.75/seed-{seed}/metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        if seed == 1:
            max((line for line in lines if "split" in line), key=lambda line: line["step"])["loss"] = math.nan
        else:
            lines = [line for line in lines if "split" not in line]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = load(tmp_path).arms[1].runs
    assert (runs[1].status, runs[1].val_loss) == ("diverged", None)
    assert (runs[2].status, runs[2].val_loss) == ("damaged", None)
    assert "finished without a validation loss" in runs[2].in_words
    assert all(math.isfinite(loss) for _, loss in runs[1].val)


@pytest.mark.parametrize("lost", ["val", "test"])
@pytest.mark.parametrize("which", ["baseline", "new"])
@pytest.mark.parametrize("seeds", [(2,), (1, 2, 3, 4, 5)])
def test_a_lost_last_loss_is_damage_and_no_earlier_loss_stands_in_for_it(
    lost: str, which: str, seeds: tuple[int, ...], tmp_path: Path
) -> None:
    """Of whichever split, arm and number of seeds: of all of them, no two runs would end apart."""
    write_study(tmp_path, searched(BASELINE, arm("new", "New")), seeds=(1, 2, 3, 4, 5))
    for seed in seeds:
        file = tmp_path / f"runs/{which}/seed-{seed}/metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        del lines[max(place for place, line in enumerate(lines) if f'"{lost}"' in line)]
        file.write_text("".join(lines))
    results = load(tmp_path)
    assert {run.seed for run in results.runs if run.arm == which and run.status == "damaged"} == set(seeds)
    assert [pair.outcome for pair in comparisons(results)][:1] == ["none"]
    assert any("finished after step 400, and its last" in doubt for doubt in doubts(results))


def test_of_a_resumed_step_the_last_line_counts_and_other_splits_do_not(tmp_path):
    write_study(tmp_path)
    run = RunFolder(tmp_path / "runs/baseline/seed-1")
    run.append({"step": 400, "split": "val", "loss": 1.25, "tokens": 1})
    run.append({"step": 400, "split": "train", "loss": 9.0, "tokens": 1})
    assert load(tmp_path).baseline.runs[1].val_loss == 1.25


def test_a_run_that_has_only_begun_its_folder_is_missing(tmp_path):
    write_study(tmp_path, fates={("baseline", 1): "missing"})
    (tmp_path / "runs/baseline/seed-1").mkdir()
    assert load(tmp_path).baseline.runs[1].status == "missing"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": 2}, "format 1"),
        ({"arms": "gone"}, "'arms' is missing"),
        ({"seeds": 3}, "wrong type"),
        ({"baseline": "basline"}, "did you mean 'baseline'"),
    ],
)
def test_a_broken_study_is_refused_by_name(tmp_path, fields, message):
    with pytest.raises(BadInput, match=message):
        load(change(write_study(tmp_path, fates={}), **fields))


@pytest.mark.parametrize("name", ["../outside", "a/b", "..", "", "a\\b"])
def test_an_arm_cannot_lead_out_of_the_study(tmp_path, name):
    with pytest.raises(BadInput, match="an arm's name becomes a folder"):
        load(change(write_study(tmp_path), arms=[json.loads(json.dumps({**BASELINE, "name": name}))]))


def test_two_arms_of_one_name_are_refused(tmp_path):
    tree = json.loads((write_study(tmp_path) / "study.json").read_text())
    with pytest.raises(BadInput, match="same name"):
        load(change(tmp_path, arms=tree["arms"] * 2))


def test_not_a_study(tmp_path):
    with pytest.raises(BadInput, match=r"no study\.json; give the folder"):
        load(tmp_path)
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(BadInput, match="not JSON"):
        load(tmp_path)


def test_labels_become_one_printable_line(tmp_path):
    results = load(write_study(tmp_path, (BASELINE, arm("new", "two\nlines\x1b[31m\x00 ")), fates={}))
    assert results.others[0].label == "two lines[31m"


# ------------------------------------------------------------------------------------------------------------- batches


def test_batches_are_shown_identical(tmp_path):
    proof = identical_batches(load(write_study(tmp_path)))
    assert proof.identical
    assert proof.complete
    assert [(seed.seed, seed.steps, len(seed.arms)) for seed in proof.seeds] == [(1, 400, 3), (2, 400, 3), (3, 400, 3)]
    assert len({seed.digest for seed in proof.seeds}) == 3


def test_the_first_differing_step_is_named(tmp_path):
    proof = identical_batches(load(write_study(tmp_path, fates={("res-gelu", 2): "other-batches"})))
    assert not proof.identical
    assert proof.differences == ["seed 2: baseline and res-gelu did not see the same batch at step 7"]
    assert proof.difference_of("res-gelu", "baseline") == proof.differences[0]
    assert proof.difference_of("mlp-4.75", "baseline") is None


def test_a_step_that_one_run_did_not_record_is_not_shown(tmp_path):
    write_study(tmp_path, fates={("mlp-4.75", 1): "stopped"})
    file = tmp_path / "runs/mlp-4.75/seed-1/metrics.jsonl"
    lines = [line for line in file.read_text().splitlines() if '"step": 9,' not in line]
    file.write_text("\n".join(lines) + "\n")
    assert identical_batches(load(tmp_path)).differences == [
        "seed 1: baseline and mlp-4.75 did not see the same batch at step 9"
    ]


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_last_loss_that_is_not_finite_is_a_divergence_on_either_split(split: str, tmp_path: Path) -> None:
    write_study(tmp_path, searched(BASELINE, arm("new", "New")), every=100)
    run = RunFolder(tmp_path / "runs/new/seed-2")
    text = "".join(
        json.dumps(line | ({"loss": math.nan} if line.get("split") == split and line["step"] == 400 else {})) + "\n"
        for line in run.metrics()
    )
    run.metrics_file.write_text(text)
    results = load(tmp_path)
    found = results.others[0].runs[2]
    words = {"val": "validation", "test": "test"}[split]
    assert (found.status, found.why) == ("diverged", f"its last {words} loss is not finite")
    assert found.final_loss is None
    assert comparisons(results)[0].outcome == "none"


@pytest.mark.parametrize("of", [("new",), ("baseline",), ("new", "baseline"), ("twin",)])
def test_other_data_have_no_verdict_whatever_their_batches_say(of: tuple[str, ...], tmp_path: Path) -> None:
    """Of one seed alone, too, and of both arms."""
    open_ = config(data__fingerprint=None)
    twin = arm("twin", "Twin", seed_offset=1000, config=open_)
    arms = (arm("baseline", "Baseline", config=open_), arm("new", "New", 0.05, config=open_), twin)
    write_study(tmp_path, arms, search=False, every=100)
    assert [pair.outcome for pair in comparisons(load(tmp_path))] == ["lower", "noise"]  # nobody tells
    for file in tmp_path.glob("runs/*/*/config.json"):
        tree = json.loads(file.read_text())
        is_other = file.parts[-3] in of and file.parts[-2] == "seed-2"
        tree["data"]["fingerprint"] = ("e" if is_other else "f") * 64
        file.write_text(json.dumps(tree))
    results = load(tmp_path)
    refused = "no verdict: its runs and the baseline's were made from different data"
    said = {pair.arm: pair.verdict for pair in comparisons(results)}
    assert {name for name, verdict in said.items() if verdict == refused} == (
        {"new", "twin"} if "baseline" in of else set(of)
    )
    assert f"The runs were made from different data ({'e' * 16}, {'f' * 16})." in doubts(results)
    assert not results.batches.identical


LOST = {
    "all": (lambda step: True, 1),
    "the first": (lambda step: step == 1, 1),
    "one": (lambda step: step == 9, 9),
    "the last": (lambda step: step == 400, 400),
    "all after the sixth": (lambda step: step > 6, 7),
}


@pytest.mark.parametrize("is_emptied", [True, False])
@pytest.mark.parametrize("which", [("baseline", "new"), ("new",), ("baseline",)])
@pytest.mark.parametrize(("is_lost", "first"), LOST.values(), ids=LOST)
def test_a_finished_run_without_the_batch_of_every_step_is_damaged(
    is_lost: Any, first: int, which: tuple[str, ...], is_emptied: bool, tmp_path: Path
) -> None:
    """Whatever is lost could hide other batches, which are there from the seventh step on."""
    fates = {("new", seed): "other-batches" for seed in (1, 2, 3)}
    write_study(tmp_path, (BASELINE, arm("new", "New", 0.05)), fates=fates, every=100)
    for name in which:
        for seed in (1, 2, 3):
            file = tmp_path / f"runs/{name}/seed-{seed}/metrics.jsonl"
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            lost = [line for line in lines if "split" not in line and is_lost(line["step"])]
            kept = [({**line, "batch_sha": ""} if line in lost else line) for line in lines]
            kept = kept if is_emptied else [line for line in lines if line not in lost]
            file.write_text("".join(json.dumps(line) + "\n" for line in kept))
    results = load(tmp_path)
    assert {run.arm for run in results.runs if run.status == "damaged"} == set(which)
    assert comparisons(results)[0].outcome == "none"
    assert not results.batches.identical
    assert any(f"without a record of its batch at step {first:,}; remove its folder" in one for one in doubts(results))


@pytest.mark.parametrize("which", [("baseline", "new"), ("new",), ("baseline",)])
@pytest.mark.parametrize(("end", "ends"), [(140, 400), (139, 140), (400, 140), (400, 399)])
def test_a_run_that_did_not_make_its_arms_updates_is_no_run_of_it(
    end: int, ends: int, which: tuple[str, ...], tmp_path: Path
) -> None:
    """Neither where all arms ended alike, nor where one did."""
    write_study(tmp_path, (BASELINE, arm("new", "New", 0.05)), steps=end, search=False)
    tree = json.loads((tmp_path / "study.json").read_text())
    for one in tree["arms"]:
        one["config"]["train"] |= {"steps": end if one["name"] not in which else max(end, ends)}
        one["config"]["train"] |= {"stop_at": ends} if one["name"] in which and ends < end else {}
    change(tmp_path, arms=tree["arms"])
    for name in which if ends > end else ():
        for file in tmp_path.glob(f"runs/{name}/*/config.json"):
            run = json.loads(file.read_text())
            run["train"]["steps"] = ends
            file.write_text(json.dumps(run))
    results = load(tmp_path)
    assert {run.arm for run in results.runs if run.status == "damaged"} == set(which)
    assert all(f"finished after step {end}, and its arm makes {ends}" in run.why for run in results.runs if run.why)
    assert comparisons(results)[0].outcome == "none"


@pytest.mark.parametrize("line", ["train", "val"])
def test_a_line_beyond_the_end_is_damage(line: str, tmp_path: Path) -> None:
    write_study(tmp_path, (BASELINE, arm("new", "New")))
    run = RunFolder(tmp_path / "runs/new/seed-2")
    of = {"train": run.train_lines, "val": run.eval_lines}[line]
    run.append({**of()[-1], "step": 401, "loss": 1.0})
    assert load(tmp_path).others[0].runs[2].status == "damaged"


def test_a_step_that_neither_run_has_a_digest_of_is_not_shown(tmp_path):
    write_study(tmp_path, fates={(name, 1): "stopped" for name in ("baseline", "mlp-4.75")})
    for name in ("baseline", "mlp-4.75"):
        file = tmp_path / f"runs/{name}/seed-1/metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            if line["step"] == 9 and "split" not in line:
                line["batch_sha"] = ""
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert identical_batches(load(tmp_path)).difference_of("mlp-4.75", "baseline") == (
        "seed 1: baseline and mlp-4.75 did not see the same batch at step 9"
    )


def test_runs_without_digests_are_not_shown(tmp_path):
    write_study(tmp_path, (BASELINE, NONLINEAR), seeds=(1,))
    for name in ("baseline", "res-gelu"):
        file = tmp_path / f"runs/{name}/seed-1/metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        lines = [line if "split" in line else {**line, "batch_sha": ""} for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not identical_batches(load(tmp_path)).identical


def test_a_shorter_run_is_compared_as_far_as_it_came(tmp_path):
    proof = identical_batches(load(write_study(tmp_path, fates={("res-gelu", 1): "diverged"})))
    assert proof.identical
    assert proof.seeds[0].steps == 140


def test_nothing_is_shown_by_one_run_alone(tmp_path):
    fates = {(name, 3): "missing" for name in ("mlp-4.75", "res-gelu")}
    proof = identical_batches(load(write_study(tmp_path, fates=fates)))
    assert not proof.identical
    assert proof.seeds[2].steps == 0
    assert proof.differences == []


# -------------------------------------------------------------------------------------------------------------- doubts


def test_an_optimum_at_the_edge_of_the_grid_is_flagged(tmp_path):
    edge = arm("edge", "Edge", config=config(train__lr=1e-3, train__min_lr=1e-4))
    found = doubts(load(write_study(tmp_path, (BASELINE, edge))))
    assert found == [
        "Edge: the chosen peak rate 0.001 is at the edge of its grid (0.001 to 0.016); a better one may lie outside.",
        ON_ONE_SPLIT,
    ]


def test_a_search_that_was_not_followed_or_not_equal_is_flagged(tmp_path):
    write_study(tmp_path)
    search = json.loads((tmp_path / "study.json").read_text())["search"]
    search["chosen"]["mlp-4.75"] = {"point": {"train.lr": 2e-3, "train.min_lr": 4e-5}, "val_loss": 5.3}
    search["scores"] = [s for s in search["scores"] if s["arm"] != "res-gelu" or s["point"]["train.lr"] != 4e-3]
    found = doubts(load(change(tmp_path, search=search)))
    assert found == [
        "Res. GELU (nonlinear query): its search was another one than the baseline's (8 runs, and 10 of the baseline).",
        "MLP 4.75: the chosen point is not the one of the lowest loss in its search.",
        "MLP 4.75: trained at train.lr = 0.004, though the search chose 0.002.",
        "MLP 4.75: trained at train.min_lr = 0.0004, though the search chose 4e-05.",
        ON_ONE_SPLIT,
    ]


def unequal(folder: Path, points: int, **search: Any) -> StudyResults:
    """The baseline tried at so many of the ten points."""
    tree = json.loads((write_study(folder, searched(BASELINE, NONLINEAR)) / "study.json").read_text())["search"]
    scores = tree["scores"]
    few = [place for place, score in enumerate(scores) if score["arm"] == "baseline"][points:]
    scores = [score for place, score in enumerate(scores) if place not in few]
    return load(change(folder, search={**tree, "scores": scores, **search}))


STEP = 6.0 * 800_000 * 2048
"""FLOPs of one of the baseline's."""


@pytest.mark.parametrize(
    ("points", "search", "refused"),
    [
        (10, {"sampler": "grid"}, ""),
        (2, {"sampler": "grid"}, "no verdict: its search was another one than the baseline's (10 runs, and 2 of the"),
        (2, {"sampler": "random", "trials": 10}, "no verdict: its search was another one"),
        (10, {"sampler": "random", "flops": 11 * 400 * STEP}, ""),
        (9, {"sampler": "random", "flops": 10.5 * 400 * STEP}, "left FLOPs unspent"),
        (10, {"sampler": "random", "flops": 9 * 400 * STEP}, "cost more than its"),
        (10, {"seeds": [0, 3]}, "no verdict: seed 3 is one of the search and of the comparison"),
    ],
)
def test_what_an_unequal_search_chose_has_no_verdict(
    points: int, search: dict[str, Any], refused: str, tmp_path: Path
) -> None:
    results = unequal(tmp_path, points, **search)
    pair = comparisons(results)[0]
    assert refused in pair.verdict
    assert (pair.outcome == "none") == bool(refused)
    assert searched_alike(results) == (not refused)
    assert (any(refused.removeprefix("no verdict: ") in doubt for doubt in doubts(results))) or not refused
    assert any("had the same FLOPs" in doubt for doubt in doubts(results)) == ("flops" in search and not refused)


def test_optunas_different_numbers_of_points_are_told(tmp_path: Path) -> None:
    results = unequal(tmp_path, 2, sampler="optuna", trials=10)
    assert not searched_alike(results)
    assert any("Optuna tried different numbers of points: Baseline 2, Res. GELU" in doubt for doubt in doubts(results))


def test_no_search_and_a_second_machine_are_flagged(tmp_path):
    write_study(tmp_path, THREE_ARMS, search=False)
    file = tmp_path / "runs/res-gelu/seed-3/environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"cpu": "another"}))
    found = doubts(load(tmp_path))
    assert 'The runs differ in cpu: "a made-up processor", "another".' in found
    assert any("No learning-rate search" in doubt for doubt in found)


@pytest.mark.parametrize("key", ["cpu", "gpu", "device", "torch", "precision", "compiled", "commit", "threads"])
def test_whatever_differs_between_the_machines_is_flagged(tmp_path, key):
    write_study(tmp_path)
    file = tmp_path / "runs/mlp-4.75/seed-2/environment.json"
    tree = json.loads(file.read_text())
    usual, other = json.dumps(tree[key]), json.dumps("another")
    file.write_text(json.dumps(tree | {key: "another"}))
    assert doubts(load(tmp_path)) == [f"The runs differ in {key}: {', '.join(sorted((usual, other)))}.", ON_ONE_SPLIT]


def test_different_training_lengths_are_flagged(tmp_path):
    write_study(tmp_path, (BASELINE, arm("longer", "Longer", config=config(train__steps=420))))
    assert "The finished runs were last evaluated at different steps: 400, 420." in doubts(load(tmp_path))


def test_another_length_than_the_searchs_is_flagged(tmp_path):
    write_study(tmp_path)
    file = tmp_path / "study.json"
    tree = json.loads(file.read_text())
    tree["search"]["steps"] = 100
    file.write_text(json.dumps(tree))
    assert "Baseline: trained for 400 steps, though its rate was searched at 100." in doubts(load(tmp_path))


def test_a_schedule_that_was_not_run_to_its_end_is_mentioned(tmp_path: Path) -> None:
    told = "Runs were stopped at step 400 of a schedule of 4,000"
    whole, short = (arm("baseline", "Baseline", config=config(train__steps=s, train__stop_at=400)) for s in (400, 4000))
    assert not any(told in doubt for doubt in doubts(load(write_study(tmp_path / "whole", (whole,)))))
    assert any(told in doubt for doubt in doubts(load(write_study(tmp_path / "short", (short,)))))
