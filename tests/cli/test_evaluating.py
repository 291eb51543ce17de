"""`qurve eval`: a run, a model of `transformers`, a study."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_study import BASELINE, NONLINEAR, write_study_around

from commands import call, words
from qurve.runfolder import RunFolder
from qurve.study.evaluated import FILE

ITEMS = [{"context": "Of the", "choices": [" Senate", " b"], "label": i % 2} for i in range(4)]


@pytest.fixture
def quiz(tmp_path: Path) -> Path:
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    return tmp_path / "quiz.jsonl"


def test_a_run_alone_has_its_validation_loss(undisturbed: RunFolder) -> None:
    found = call("eval", undisturbed.path, "--json")
    assert found.code == 0
    (loss,) = found.json["losses"].items()
    assert loss[0] == "val"
    assert (loss[1]["context"], loss[1]["stride"]) == (16, 16)
    assert found.json["tasks"] == []
    shown = words(call("eval", undisturbed.path, "--split", "test", "--stride", 4).out)
    assert "bits per byte perplexity tokens context stride test" in shown
    assert shown.endswith("16 4")


def test_tasks_and_text_together(undisturbed: RunFolder, quiz: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Fellow-Citizens of the Senate")
    found = call("eval", undisturbed.path, "--tasks", quiz, "--text", text, "--limit", 3, "--batch", 2, "--json")
    assert found.json["losses"][str(text)]["n_bytes"] == 29
    (task,) = found.json["tasks"]
    assert (task["task"], task["items"], found.json["limit"]) == ("quiz", 3, 3)
    assert task["accuracy"] in (pytest.approx(1 / 3), pytest.approx(2 / 3))  # labels 0 1 0, one answer for all
    shown = words(call("eval", undisturbed.path, "--tasks", quiz, "--limit", 3).out)
    assert "the first 3 items of each task" in shown
    assert f"{100 * task['accuracy']:.1f}" in shown
    assert "bits per byte" not in shown


def test_a_terminal_sees_how_far_it_is_and_a_log_does_not(
    undisturbed: RunFolder, quiz: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("eval", undisturbed.path, "--split", "test", "--tasks", quiz, "--json")
    assert call(*command).err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    found = call(*command)
    assert found.json["losses"]["test"]["tokens"] > 0  # standard output is the document alone
    shown = words(found.err)
    assert "test: tokens" in shown
    assert "quiz: choices" in shown


def test_a_model_without_data_is_asked_for_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    for options, said in (([], "say what to evaluate it on: --tasks TASK…"), (["--split", "val"], "give --text PATH…")):
        refused = call("eval", tmp_path, *options)
        assert (refused.code, said in words(refused.err)) == (2, True)


def test_a_long_path_leaves_the_table_whole(undisturbed: RunFolder, tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 20)
    folder.mkdir()
    files = [folder / f"{name}.txt" for name in "abc"]
    for file in files:
        file.write_text("Fellow-Citizens of the Senate")
    lines = call("eval", undisturbed.path, "--text", files[0]).out.splitlines()
    assert [line.split()[0] for line in lines] == ["text", "a.txt"]
    assert "a.txt and 2 more" in call("eval", undisturbed.path, "--text", *files).out


def test_a_window_belongs_to_a_loss(undisturbed: RunFolder, quiz: Path) -> None:
    for option in ("--stride", "--context"):
        refused = call("eval", undisturbed.path, "--tasks", quiz, option, 0)
        assert (refused.code, f"{option} is for a loss" in words(refused.err)) == (2, True)


def test_a_study_gets_a_report(undisturbed: RunFolder, quiz: Path, tmp_path: Path) -> None:
    study = write_study_around(undisturbed, tmp_path / "study", (BASELINE, NONLINEAR), seeds=(1,))
    refused = call("eval", study, "--tasks", "arc_easy")
    assert (refused.code, "is a study: its runs are evaluated with --tasks FILE" in words(refused.err)) == (2, True)
    assert not (study / FILE).exists()
    found = call("eval", study, "--tasks", quiz, "--json")
    assert found.code == 0, found.err
    assert [run["tasks"]["quiz"]["sha256"] for run in found.json["runs"]] == [
        json.loads((study / FILE).read_text())["runs"][0]["tasks"]["quiz"]["sha256"]
    ] * 2
    assert "quiz: Baseline" in Path(found.json["report"]).read_text()
    assert {file.suffix for file in (study / "report").glob("errors-quiz.*")} == {".svg", ".png"}
    assert "2 of 2: res-gelu, seed 1: quiz" in found.err
