from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, NONLINEAR, THREE_ARMS, searched, write_study, write_study_around

import qurve.evaluate
from qurve.errors import BadInput
from qurve.runfolder import RunFolder
from qurve.study.evaluated import (
    FILE,
    Answers,
    RunEvaluation,
    StudyEvaluation,
    evaluate_study,
    evaluation_table,
    load_evaluation,
    losses_and_errors,
    task_differences,
)
from qurve.study.markdown import markdown
from qurve.study.page.evaluated import task_figures, tasks_section
from qurve.study.paired import holm, paired_interval, paired_p
from qurve.study.provenance import folder_of
from qurve.study.results import StudyResults, load

BITS = {
    ("baseline", 1): "1100010011",
    ("baseline", 2): "1100010001",
    ("baseline", 3): "1000010011",
    ("mlp-4.75", 1): "1100010011",
    ("mlp-4.75", 2): "1100010101",
    ("mlp-4.75", 3): "1000011011",
    ("res-gelu", 1): "1111010011",
    ("res-gelu", 2): "1111010001",
    ("res-gelu", 3): "1011010111",
}


def answered(
    bits: dict[tuple[str, int], str], *names: str, norm: bool = True, mark: str = f"step-00000400 {'0' * 64}"
) -> StudyEvaluation:
    def answers(row: str) -> Answers:
        return Answers("sha", 0.25, row, row[::-1] if norm else None)

    runs = [RunEvaluation(arm, seed, mark, {name: answers(row) for name in names}) for (arm, seed), row in bits.items()]
    return StudyEvaluation("float32", tuple(runs))


def store(results: StudyResults, evaluation: StudyEvaluation) -> None:
    (results.folder / FILE).write_text(json.dumps(evaluation.to_json()))


@pytest.fixture
def results(tmp_path: Path) -> StudyResults:
    return load(write_study(tmp_path / "study", THREE_ARMS))


def test_differences_are_paired_by_seed_and_by_item(results: StudyResults):
    wider, ours = task_differences(results, answered(BITS, "quiz"))
    assert (ours.task, ours.arm, ours.seeds, ours.items) == ("quiz", "res-gelu", (1, 2, 3), 10)
    per_seed = [0.2, 0.2, 0.3]
    mean, low, high = paired_interval(per_seed)
    assert (ours.diff, ours.low, ours.high) == pytest.approx((mean, low, high))
    per_item = [0, 0, 1, 1, 0, 0, 0, 1 / 3, 0, 0]
    assert (ours.low_items, ours.high_items) == pytest.approx(paired_interval(per_item)[1:])
    assert ours.diff_norm == pytest.approx(mean)  # the same answers, mirrored
    assert ours.p == pytest.approx(paired_p(per_seed))
    assert [wider.p_holm, ours.p_holm] == holm([wider.p, ours.p])


def test_holm_takes_all_arms_and_tasks_of_a_family_together(results: StudyResults):
    one = task_differences(results, answered(BITS, "quiz"))
    three = task_differences(results, answered(BITS, "quiz", "game", "test"))
    assert [pair.task for pair in three] == ["quiz"] * 2 + ["game"] * 2 + ["test"] * 2
    assert [pair.p_holm for pair in three] == holm([pair.p for pair in three])
    assert three[1].p_holm == pytest.approx(3 * one[1].p_holm)


def test_arms_at_the_baselines_point_are_a_family_of_their_own(tmp_path: Path):
    results = load(write_study(tmp_path / "study", searched(BASELINE, NONLINEAR)))
    bits = {key: row for key, row in BITS.items() if key[0] in ("baseline", "res-gelu")}
    bits |= {("res-gelu@baseline", seed): BITS["res-gelu", seed] for seed in (1, 2, 3)}
    own, matched = task_differences(results, answered(bits, "quiz"))
    assert own.p_holm == own.p == matched.p_holm


@pytest.mark.parametrize(
    ("seeds", "fates", "why"),
    [
        ((1, 2), {}, "2 seeds in both decide nothing"),
        ((1, 2, 3), {("res-gelu", 2): "diverged"}, "no verdict: seed 2 diverged"),
        ((1, 2, 3), {("res-gelu", 1): "other-batches"}, "did not see the same batch"),
        ((1, 2, 3), {("baseline", 3): "running"}, "no verdict yet: seed 3 running (baseline)"),
        ((1, 2, 3, 4), {("res-gelu", 4): "running"}, "no verdict yet: seed 4 running"),
    ],
)
def test_no_test_is_made_where_the_study_would_make_none(
    seeds: tuple[int, ...], fates: dict[Any, str], why: str, tmp_path: Path
):
    results = load(write_study(tmp_path / "study", THREE_ARMS, seeds=seeds, fates=fates))
    finished = {(run.arm, run.seed) for run in results.runs if run.finished}
    found = answered({key: row for key, row in BITS.items() if key in finished}, "quiz")
    ours = task_differences(results, found)[-1]
    assert why in ours.why
    assert (ours.p, ours.p_holm) == (None, None)
    told = evaluation_table(results, found)
    assert any(note.startswith("No test for") and why in note for note in told.notes)


def test_other_items_are_not_compared(results: StudyResults):
    found = answered(BITS, "quiz")
    runs = [
        run if run.arm != "res-gelu" else RunEvaluation(run.arm, run.seed, "", {"quiz": Answers("x", None, "10", None)})
        for run in found.runs
    ]
    ours = task_differences(results, StudyEvaluation("float32", tuple(runs)))[-1]
    assert (ours.diff, ours.p, ours.seeds) == (None, None, ())


def test_the_table_says_what_was_found(results: StudyResults):
    told = evaluation_table(results, answered(BITS, "quiz"))
    assert [row[0] for row in told.rows] == [
        "quiz: Baseline",
        "quiz: MLP 4.75",
        "quiz: Res. GELU (nonlinear query)",
    ]
    assert told.rows[0][1:4] == ["3", "43.3", "43.3"]
    assert told.rows[2][2:6] == ["66.7", "66.7", "+23.3 [+9.0, +37.7]", "−6.5 to +53.2"]
    assert "A blind guess: quiz 25.0." in told.notes[2]


# ----------------------------------------------------------------------------------------------------- loss and errors


def test_loss_and_errors_of_every_run(results: StudyResults):
    (found,) = losses_and_errors(results, answered(BITS, "quiz"))
    assert list(found.points) == ["baseline", "mlp-4.75", "res-gelu"]
    assert found.n == 9
    arm = results.arms[2]
    assert found.points["res-gelu"][0] == (arm.runs[1].final_loss, pytest.approx(0.3))
    assert found.rank_correlation is not None
    assert found.rank_correlation == pytest.approx(spearman(found.points), abs=1e-12)


def spearman(points: dict[str, Any]) -> float:
    from scipy.stats import spearmanr

    losses, errors = zip(*(p for arm in points.values() for p in arm), strict=True)
    return float(spearmanr(losses, errors).statistic)


def test_no_correlation_without_a_spread(results: StudyResults):
    (alike,) = losses_and_errors(results, answered(dict.fromkeys(BITS, "10"), "quiz"))
    assert alike.rank_correlation is None
    (two,) = losses_and_errors(results, answered({key: BITS[key] for key in list(BITS)[:2]}, "quiz"))
    assert two.rank_correlation is None


# ---------------------------------------------------------------------------------------------------- files and reports


def test_the_report_has_tables_and_figures_of_the_tasks(results: StudyResults):
    assert (tasks_section(results), task_figures(results)) == (None, {})
    store(results, answered(BITS, "a quiz <b>", "game", norm=False))
    section = tasks_section(results)
    assert section is not None
    assert "a quiz &lt;b&gt;: Baseline" in section
    assert "quiz <b>" not in section
    assert "a point for each of 9 runs. Rank correlation over all of them: " in section
    assert list(task_figures(results)) == ["errors-a-quiz-b-", "errors-game"]
    assert all(f'id="{name}"' in section for name in task_figures(results))
    assert "### Accuracy on likelihood tasks" in markdown(results)


def test_a_damaged_file_is_named(results: StudyResults):
    good = answered(BITS, "quiz")
    store(results, good)
    found = load_evaluation(results)
    assert found is not None
    assert found.to_json() == good.to_json()
    for change in ({"format": 2}, {"runs": [{}]}, {"runs": 3}):
        (results.folder / FILE).write_text(json.dumps({**good.to_json(), **change}))
        with pytest.raises(BadInput, match=r"evaluation.json is damaged: .*; remove it"):
            load_evaluation(results)
    store(results, answered({**BITS, ("baseline", 1): "1102"}, "quiz"))
    with pytest.raises(BadInput, match="answers are no row of 0 and 1"):
        load_evaluation(results)


CHECKPOINTS: dict[str, tuple[str, str, str]] = {
    "the one evaluated": ("400", "400", ""),
    "an earlier one was evaluated": ("20", "400", "Left out"),
    "a later one was evaluated": ("420", "400", "Left out"),
    "another of the same step": ("400 of another training", "400", "Left out"),
    "gone": ("400", "", "The checkpoints are gone"),
    "gone, and an earlier one was evaluated": ("20", "", "Left out"),
}


@pytest.mark.parametrize(("evaluated", "there", "said"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_answers_of_another_checkpoint_than_the_last_are_left_out(
    evaluated: str, there: str, said: str, results: StudyResults
):
    for run in results.runs if there else ():
        checkpoint = RunFolder(folder_of(results, run)).checkpoint(400)
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(there)
    mark = f"step-{int(evaluated.split()[0]):08d} {hashlib.sha256(evaluated.encode()).hexdigest()}"
    store(results, answered(BITS, "quiz", mark=mark))
    found = load_evaluation(results)
    assert found is not None
    assert len(found.runs) == (0 if said.startswith("Left out") else 9)
    table = evaluation_table(results, found)
    assert len(table.rows) == (0 if said.startswith("Left out") else 3)
    assert [note.startswith(said) for note in table.notes[3:]] == ([True] if said else [])
    assert all(
        note.endswith(": baseline seed 1, baseline seed 2, baseline seed 3 and 6 more.") for note in found.reservations
    )
    assert tasks_section(results) is not None
    assert "reservations" not in found.to_json()


def test_answers_of_a_run_that_is_made_again_are_left_out(tmp_path: Path):
    results = load(write_study(tmp_path / "study", THREE_ARMS, fates={("res-gelu", 2): "running"}))
    store(results, answered(BITS, "quiz"))
    found = load_evaluation(results)
    assert found is not None
    assert found.answers("res-gelu", 2, "quiz") is None
    assert found.reservations[0].endswith("evaluate the study again: res-gelu seed 2.")


# ---------------------------------------------------------------------------------------------------------- evaluating


@pytest.fixture
def trained(tmp_path: Path, undisturbed: RunFolder) -> StudyResults:
    """A made-up study in whose folders a real run's checkpoint lies."""
    arms, fates = (BASELINE, NONLINEAR), {("res-gelu", 3): "running"}
    return load(write_study_around(undisturbed, tmp_path / "study", arms, fates=fates))


def test_finished_runs_are_evaluated_once(
    trained: StudyResults, little: Any, task_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    from qurve.evaluate import read_task

    items = [{"context": a, "choices": [" b", " to"], "label": 1} for a in ("we", "in", "of")]
    quiz, game = read_task(task_file(items, "quiz.jsonl")), read_task(task_file(items[:2], "game.jsonl"))
    asked: list[str] = []
    real = qurve.evaluate.evaluate_task

    def counting(model: Any, task: Any, **options: Any) -> Any:
        asked.append(f"{Path(model.name).parent.name} {Path(model.name).name} {task.name}")
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(model, task, **options)

    monkeypatch.setattr(qurve.evaluate, "evaluate_task", counting)
    with pytest.raises(KeyboardInterrupt):
        evaluate_study(trained, [quiz], data=little.folder, device="cpu")
    kept = load_evaluation(trained)
    assert kept is not None
    assert [(run.arm, run.seed) for run in kept.runs] == [("baseline", 1), ("baseline", 2)]
    found = evaluate_study(trained, [quiz], data=little.folder, device="cpu")
    assert asked[2:] == [f"{run} quiz" for run in ["baseline seed-3"] * 2 + ["res-gelu seed-1", "res-gelu seed-2"]]
    assert found == load_evaluation(trained)
    assert len(found.runs) == 5
    assert len(found.runs[0].tasks["quiz"].correct) == 3
    both = evaluate_study(trained, [game], data=little.folder, device="cpu")
    assert both.tasks == ("quiz", "game")
    assert len(asked) == 11
    shorter = read_task(task_file(items[1:], "quiz.jsonl"))
    again = evaluate_study(trained, [shorter], data=little.folder, device="cpu")
    assert len(again.runs[0].tasks["quiz"].correct) == 2
    assert len(asked) == 16


def test_no_earlier_checkpoint_stands_in_for_the_last(trained: StudyResults, little: Any):
    folder = RunFolder(folder_of(trained, trained.baseline.runs[1]))
    folder.latest_checkpoint().rename(folder.checkpoint(1))
    with pytest.raises(BadInput, match="has no checkpoint of step"):
        evaluate_study(trained, [], data=little.folder, device="cpu")


def test_a_study_without_a_finished_run(tmp_path: Path):
    folder = write_study(tmp_path / "study", (BASELINE, NONLINEAR), seeds=(1,), fates={("baseline", 1): "running"})
    shutil.rmtree(folder / "runs" / "res-gelu")
    with pytest.raises(BadInput, match="no run is finished yet"):
        evaluate_study(load(folder), [])


@pytest.fixture
def task_file(tmp_path: Path) -> Callable[..., Path]:
    def write(records: Any, name: str) -> Path:
        file = tmp_path / name
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        return file

    return write
