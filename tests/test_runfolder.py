from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurve import runfolder
from qurve.errors import BadInput
from qurve.runfolder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "runs" / "one")
    run.create('{"format": 1, "model": {}}', "abc", {"torch": "2"})
    return run


def line(step: int) -> dict[str, object]:
    return {"step": step, "loss": 1 / 3, "lr": 0.1, "grad_norm": 1.0, "tokens": step, "seconds": 0.1, "batch_sha": ""}


# ---------------------------------------------------------------------------------------------------------- writing


def test_a_new_folder_holds_its_files_and_no_leftovers(run: RunFolder) -> None:
    names = sorted(entry.name for entry in run.path.iterdir())
    assert names == ["checkpoints", "config.json", "environment.json", "metrics.jsonl", "status.json"]
    assert run.config_json() == ({"format": 1, "model": {}}, "abc")
    assert run.environment() == {"format": 1, "torch": "2"}
    assert run.status() == {"format": 1, "status": "running", "step": 0, "why": ""}


def test_making_the_object_makes_no_folder(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_facts_are_added_to_the_environment(run: RunFolder) -> None:
    run.add_to_environment({"compiled": True})
    assert run.environment() == {"format": 1, "torch": "2", "compiled": True}


def test_used_folders_are_refused(run: RunFolder, tmp_path: Path) -> None:
    before = run.status_file.read_bytes()
    for refuse in (run.refuse_used, run.refuse_foreign, lambda: run.create("{}", "", {})):
        with pytest.raises(BadInput, match=r"holds a run; continue it with --resume auto, or give another --out"):
            refuse()
    assert run.status_file.read_bytes() == before
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"is a file"):
        RunFolder(tmp_path / "file").create("{}", "", {})
    with pytest.raises(BadInput, match=r"cannot be made \(Not a directory\)"):
        RunFolder(tmp_path / "file" / "below").create("{}", "", {})


def test_a_folder_that_holds_prepared_data_alone_is_taken(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    RunFolder(tmp_path).create("{}", "", {})
    assert RunFolder(tmp_path).status()["status"] == "running"


@pytest.mark.parametrize("foreign", ["notes.txt", "model.safetensors", ".git"])
def test_a_folder_of_something_else_is_refused(foreign: str, tmp_path: Path) -> None:
    (tmp_path / foreign).touch()
    run = RunFolder(tmp_path)
    with pytest.raises(BadInput, match="is not empty"):
        run.refuse_used()
    for refuse in (run.refuse_foreign, lambda: run.create("{}", "", {})):
        with pytest.raises(BadInput, match=f"holds {foreign} and no run"):
            refuse()
    assert [entry.name for entry in tmp_path.iterdir()] == [foreign]


@pytest.mark.parametrize("killed_at", [1, 2, 3, 4])
def test_a_creation_that_was_killed_is_no_run_and_can_be_made_again(
    killed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = []
    write = runfolder.write_atomic

    def killed(path: Path, text: str) -> None:
        writes.append(path)
        if len(writes) == killed_at:
            path.with_name(f".{path.name}.1234.part").write_text(text)  # what a SIGKILL leaves
            raise KeyboardInterrupt
        write(path, text)

    run = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(runfolder, "write_atomic", killed)
        with pytest.raises(KeyboardInterrupt):
            run.create('{"format": 1}', "abc", {"torch": "2"})
    assert not run.is_begun()
    run.create('{"format": 1}', "abc", {"torch": "2"})
    assert run.status()["status"] == "running"


def test_going_on_trims_the_metrics_and_says_so(run: RunFolder) -> None:
    for step in (1, 2, 3):
        run.append(line(step))
        run.append({"step": step, "split": "val", "loss": 2.0, "tokens": 8})
    run.metrics_file.write_bytes(run.metrics_file.read_bytes()[:-3])
    (run.path / ".status.json.99.part").touch()
    run.go_on(2, '{"format": 1, "model": {"d_model": 8}}', "def", {"torch": "3"}, {"model.d_model": [4, 8]})
    assert [(entry["step"], "split" in entry) for entry in run.metrics()] == [
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]
    assert run.config_json() == ({"format": 1, "model": {"d_model": 8}}, "def")
    assert run.environment()["torch"] == "2"
    assert run.environment()["resumed"] == [
        {"step": 2, "earlier_hash": "abc", "changed": {"model.d_model": [4, 8]}, "torch": "3"}
    ]
    assert [entry["earlier_hash"] for entry in run.resumed()] == ["abc"]
    assert run.status() == {"format": 1, "status": "running", "step": 2, "why": ""}
    assert not list(run.path.glob(".*"))


def test_only_a_run_that_says_running_is_marked_dead(run: RunFolder, tmp_path: Path) -> None:
    run.append(line(1))
    run.append(line(2))
    run.mark_dead("failed", "its process died")
    assert run.status() == {"format": 1, "status": "failed", "step": 2, "why": "its process died"}
    run.set_status("diverged", step=1, why="so it is")
    run.mark_dead("failed", "its process died")
    assert run.status()["status"] == "diverged"
    RunFolder(tmp_path / "none").mark_dead("failed", "its process died")
    assert not (tmp_path / "none").exists()


# ---------------------------------------------------------------------------------------------------------- metrics


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_come_back_in_full(tmp_path_factory: pytest.TempPathFactory, number: float) -> None:
    run = RunFolder(tmp_path_factory.mktemp("run"))
    run.append(line(1) | {"loss": number})
    assert list(run.metrics()) == [line(1) | {"loss": number}]


def test_what_is_not_a_number_is_never_written(run: RunFolder) -> None:
    with pytest.raises(ValueError, match="JSON"):
        run.append({"loss": float("nan")})
    assert run.metrics_file.read_text() == ""


def test_lines_are_told_apart(run: RunFolder) -> None:
    val, test = ({"step": 0, "split": split, "loss": 2.0, "tokens": 8} for split in ("val", "test"))
    for one in (val, test, line(1), line(2)):
        run.append(one)
    assert run.train_lines() == [line(1), line(2)]
    assert run.eval_lines() == [val]
    assert run.eval_lines("test") == [test]
    assert run.last_step() == 2


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_torn_last_line_is_left_out(cut: int, run: RunFolder) -> None:
    for step in (1, 2, 3):
        run.append(line(step))
    run.metrics_file.write_bytes(run.metrics_file.read_bytes()[:-cut])
    assert run.train_lines() == [line(1), line(2)]
    assert run.last_step() == 2


def test_damage_before_the_last_line_is_refused_with_its_place(run: RunFolder) -> None:
    run.append(line(1))
    whole = run.metrics_file.read_text()
    val = {"step": 1, "split": "val", "loss": 2.0, "tokens": 8}
    for wrong, message in [
        ('{"st', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"step": ' + "1" * 5000 + "}", "not JSON"),
        *((text, "not a line of metrics") for text in ("{}", "[]", "null", "5", '"step"')),
        *((json.dumps({k: v for k, v in line(2).items() if k != name}), "not a line") for name in line(2)),
        *((json.dumps(line(2) | change), "not a line") for change in ({"step": "2"}, {"loss": None}, {"tokens": True})),
        *((json.dumps(val | change), "not a line") for change in ({"loss": "x"}, {"split": 1}, {"step": 1.5})),
    ]:
        run.metrics_file.write_text(whole + wrong + "\n" + whole)
        for read in (run.train_lines, run.eval_lines, run.last_step):
            with pytest.raises(BadInput, match=rf"metrics\.jsonl, line 2: {message}"):
                read()


# ---------------------------------------------------------------------------------------------------------- reading


def test_folders_that_are_no_runs_are_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for read, file in (
        (run.config_json, "config.json"),
        (run.environment, "environment.json"),
        (run.status, "status.json"),
        (run.train_lines, "metrics.jsonl"),
    ):
        with pytest.raises(BadInput, match=rf"is not a run folder: it has no {file}"):
            read()
    with pytest.raises(BadInput, match="holds no checkpoint"):
        run.latest_checkpoint()
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(BadInput, match=r"no config\.json, it is a study; its runs are .*runs/ARM/seed-N"):
        run.config_json()


@pytest.mark.parametrize("text", ["{}", '{"status": "over", "step": 1}', '{"status": "failed", "step": "x"}'])
def test_a_status_that_is_none_is_named(text: str, run: RunFolder) -> None:
    run.status_file.write_text(text)
    with pytest.raises(BadInput, match=r"status\.json is damaged"):
        run.status()


@pytest.mark.parametrize("resumed", ["5", "null", '"abc"', "[1]", "[{}]"])
def test_a_list_of_resumptions_that_is_none_is_named(resumed: str, run: RunFolder) -> None:
    run.environment_file.write_text(f'{{"format": 1, "resumed": {resumed}}}')
    with pytest.raises(BadInput, match=r"environment\.json is damaged: 'resumed'"):
        run.resumed()


def test_a_full_disk_takes_the_status_where_it_stands(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    run.set_status("running", step=1, why="x" * 500)
    monkeypatch.setattr(runfolder, "write_atomic", full)
    run.set_status("failed", step=2, why="the disk is full")
    assert run.status() == {"format": 1, "status": "failed", "step": 2, "why": "the disk is full"}


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "must hold a JSON object")])
def test_damaged_files_are_named(text: str, message: str, run: RunFolder) -> None:
    run.config_file.write_text(text)
    with pytest.raises(BadInput, match=rf"config\.json: {message}"):
        run.config_json()


def test_latest_checkpoint_is_the_highest_step_and_whole(run: RunFolder) -> None:
    with pytest.raises(BadInput, match="holds no checkpoint"):
        run.latest_checkpoint()
    for name in ("latest", "damaged-9000-1", "step-12", "step-0000900x"):
        (run.checkpoints / name).mkdir()
    assert run.checkpoint_steps() == []
    for step in (900, 1_000, 20):
        run.checkpoint(step).mkdir()
    (run.checkpoints / f".{run.checkpoint(5_000).name}.part").mkdir()
    assert run.latest_checkpoint() == run.checkpoint(1_000)
    run.checkpoint(100_000_000).mkdir()
    assert run.latest_checkpoint() == run.checkpoint(100_000_000)
    assert run.checkpoint_steps() == [20, 900, 1_000, 100_000_000]
