"""Studies from the command line: compared, reported, watched."""

from __future__ import annotations

import hashlib
import html
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import Outcome, apart, call, snapshot, words
from qurve.data.loader import TokenData
from qurve.data.prepare import prepare
from qurve.runfolder import RunFolder
from qurve.study import local
from tiny import InProcess

STUDY = """
import dataclasses
from deadly import Failing, Killed
from tiny import tiny
from qurve.config import apply_settings
from qurve.study.definition import Arm, Study

def arm(name, **model):
    config = tiny("train.steps=3")
    return Arm(name, name.title(), dataclasses.replace(config, model=dataclasses.replace(config.model, **model)))

"""
GOOD = STUDY + "STUDY = Study('tiny', 'Tiny', (arm('baseline'), arm('wide', d_ff=96)))\n"
BROKEN = (
    STUDY.replace("train.steps=3", "train.steps=60")
    + """
wild = Arm("wild", "Wild", tiny("train.steps=60", "train.lr=1e6", "train.warmup_steps=0"))
arms = (arm("baseline"), arm("failing", query=Failing()), arm("killed", query=Killed()), wild, arm("last", d_ff=96))
STUDY = Study("broken", "Broken", arms, seeds=(1,))
"""
)
ROW_KEYS = (
    "arm seeds_n non_embedding flops_per_token val_loss split final_loss diff diff_low diff_high p p_holm p_signflip "
    "p_signflip_least dll_percent dppx_percent tokens_per_s verdict"
)


@pytest.fixture(scope="session")
def study_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("study") / "tiny_study.py"
    file.write_text(GOOD)
    return file


@pytest.fixture(scope="session")
def compared(study_file: Path, data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A finished study of two arms and three seeds, and what was printed. Tests only read it."""
    folder = tmp_path_factory.mktemp("compared") / "study"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "ProcessPoolExecutor", InProcess)
        done = call("compare", study_file, "--data", data_folder, "--out", folder, "--workers", 2, "--json")
    assert done.code == 0, done.err
    return folder, done


@pytest.fixture
def study(compared: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """A copy of that study."""
    return Path(shutil.copytree(compared[0], tmp_path / "study"))


@pytest.fixture
def again(study_file: Path, data_folder: Path, study: Path) -> Callable[..., Outcome]:
    def compare(*more: object) -> Outcome:
        return call("compare", study_file, "--data", data_folder, "--out", study, "--workers", 2, *more)

    return compare


def test_compare_leaves_runs_and_a_report(compared: tuple[Path, Outcome]) -> None:
    folder, _ = compared
    assert sorted(path.name for path in folder.iterdir()) == ["definition", "report", "runs", "study.json"]
    for arm in ("baseline", "wide"):
        for seed in (1, 2, 3):
            run = RunFolder(folder / "runs" / arm / f"seed-{seed}")
            assert run.status()["status"] == "finished"
            assert run.last_step() == 3
    names = {path.name for path in (folder / "report").iterdir()}
    assert {"report.html", "table.csv", "table.tex"} <= names
    assert {Path(name).suffix for name in names} >= {".svg", ".png"}
    head = (folder / "report" / "table.csv").read_text().splitlines()[0]
    assert head.split(",") == f"{ROW_KEYS} diverged weight_decay lr min_lr".split()


def test_compare_prints_one_document_with_the_agreed_keys(compared: tuple[Path, Outcome]) -> None:
    folder, done = compared
    assert list(done.json) == ["rows", "verdict", "doubts", "report"]
    assert Path(done.json["report"]) == folder / "report" / "report.html"
    base, wide = done.json["rows"]
    assert list(base) == list(wide) == ROW_KEYS.split()
    assert (base["arm"], base["seeds_n"], base["diff"]) == ("baseline", 3, None)
    losses = {
        (arm, seed): RunFolder(folder / "runs" / arm / f"seed-{seed}").eval_lines()[-1]["loss"]
        for arm in ("baseline", "wide")
        for seed in (1, 2, 3)
    }
    mean = {arm: sum(losses[arm, seed] for seed in (1, 2, 3)) / 3 for arm in ("baseline", "wide")}
    assert base["val_loss"] == pytest.approx(mean["baseline"])
    assert wide["diff"] == pytest.approx(mean["wide"] - mean["baseline"])
    assert wide["diff_low"] < wide["diff"] < wide["diff_high"]
    assert "[6/6]" in done.err


def test_a_studys_own_file_is_kept_and_named_where_it_is_made_again(
    study_file: Path, compared: tuple[Path, Outcome]
) -> None:
    copy = compared[0] / "definition" / study_file.name
    assert copy.read_text() == GOOD
    digest = hashlib.sha256(GOOD.encode()).hexdigest()
    for name in ("report.md", "report.html"):
        text = html.unescape((compared[0] / "report" / name).read_text())
        assert f"# definition/{study_file.name} in the study's folder, sha256 {digest}" in text


def test_compare_again_keeps_every_run(again: Callable[..., Outcome], study: Path) -> None:
    before = snapshot(study / "runs")
    done = again()
    assert done.code == 0
    assert "6 of 6 runs are made already and kept" in words(done.out)
    assert f"report: {study / 'report' / 'report.html'}" in done.out
    assert snapshot(study / "runs") == before


def test_compare_with_fewer_seeds_reports_those(again: Callable[..., Outcome]) -> None:
    done = again("--seeds", 1, "--json")
    assert [row["seeds_n"] for row in done.json["rows"]] == [1, 1]
    assert "no verdict" in done.json["rows"][1]["verdict"]


def test_compare_refuses_a_changed_setting_and_touches_nothing(again: Callable[..., Outcome], study: Path) -> None:
    before = snapshot(study)
    for more in (("--set", "train.lr=0.02"), ("--steps", 4)):
        refused = again(*more)
        assert refused.code == 2
        assert "holds a run of another configuration" in words(refused.err)
    assert snapshot(study) == before


def test_compare_continues_an_unfinished_run(
    again: Callable[..., Outcome], study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "ProcessPoolExecutor", InProcess)
    path = study / "runs" / "wide" / "seed-2"
    losses = [line["loss"] for line in RunFolder(path).train_lines()]
    shutil.rmtree(RunFolder(path).checkpoint(3))
    RunFolder(path).set_status("running", step=1)
    done = again("--json")
    assert done.code == 0
    assert "5 of 6 runs are made already and kept" in words(done.err)
    assert "1 that was begun will be continued" in words(done.err)
    assert RunFolder(path).status()["status"] == "finished"
    assert [line["loss"] for line in RunFolder(path).train_lines()] == losses
    assert [row["seeds_n"] for row in done.json["rows"]] == [3, 3]


@pytest.mark.slow
def test_worker_processes_make_the_same_numbers(
    study_file: Path, data_folder: Path, compared: tuple[Path, Outcome], tmp_path: Path
) -> None:
    folder = tmp_path / "study"
    done = call("compare", study_file, "--data", data_folder, "--out", folder, "--workers", 2, "--json")
    assert done.code == 0, done.err
    for row, other in zip(done.json["rows"], compared[1].json["rows"], strict=True):
        assert {**row, "tokens_per_s": 0} == {**other, "tokens_per_s": 0}


def test_runs_that_break_stop_no_other_and_leave_with_1(data_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    folder = tmp_path / "study"
    done = call("compare", file, "--data", data_folder, "--out", folder, "--workers", 1, "--retries", 0)
    assert done.code == 1
    statuses = {
        arm: RunFolder(folder / "runs" / arm / "seed-1").status()
        for arm in ("baseline", "failing", "killed", "wild", "last")
    }
    assert {arm: status["status"] for arm, status in statuses.items()} == {
        "baseline": "finished",
        "failing": "failed",
        "killed": "failed",
        "wild": "diverged",
        "last": "finished",
    }
    assert statuses["failing"]["why"] == "planted failure"
    assert statuses["killed"]["why"] == "its process died"
    told = words(done.out)
    assert "failed: failing, seed 1: planted failure" in told
    assert "failed: killed, seed 1:" in told
    assert "failed: wild" not in told
    rows = [line for line in done.out.splitlines() if line.strip().startswith("Wild")]
    assert len(rows) == 1
    assert "diverged" in rows[0]


def test_report_is_written_anew_from_the_runs(study: Path, compared: tuple[Path, Outcome]) -> None:
    shutil.rmtree(study / "report")
    done = call("report", study, "--json")
    assert done.code == 0
    assert done.json["rows"] == compared[1].json["rows"]
    assert (study / "report" / "report.html").exists()


def test_doubts_are_said_wherever_the_verdict_is(
    study: Path, compared: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qurve.study.report.write_report", lambda folder, against: folder / "report.html")
    shutil.move(study / "runs" / "wide" / "seed-3", study / "runs" / "wide" / "seed-4")
    done = call("report", study, "--json")
    doubts = done.json["doubts"]
    assert any("runs that study.json does not name (wide/seed-4)" in doubt for doubt in doubts)
    assert len(doubts) > len(compared[1].json["doubts"]) >= 1
    told = words(call("report", study).out)
    before, _, said = told.partition("Before you believe it: ")
    assert (
        f"Doubts to be read before it is believed: {len(doubts) - 1}." in before
    )  # but for untuned rates, which it says
    assert all(words(f"- {doubt}") in said for doubt in doubts)
    monkeypatch.setattr("qurve.cli.studies.MOST_DOUBTS", 1)
    assert f"- and {len(doubts) - 1} more in the report" in words(call("report", study).out)


def test_report_sets_another_study_beside(study: Path, tmp_path: Path) -> None:
    done = call("report", study, "--against", study, "--json")
    assert done.code == 0, done.err
    assert (study / "report" / "report.md").read_text().count("the same loss (3 seeds)") == 2
    assert [pair["in_words"] for pair in done.json["against"]] == 2 * ["the same loss (3 seeds)"]
    assert "Wide: the same loss (3 seeds)." in words(call("report", study, "--against", study).out)
    refused = call("report", study, "--against", tmp_path)
    assert refused.code == 2
    assert "is not a study folder" in refused.err


def test_a_grid_is_compared_point_by_point(data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "ProcessPoolExecutor", InProcess)
    small = ["--set", "train.tokens_per_step=128", "--set", "train.precision=float32", "--set", "eval.windows=4"]
    more = ["--grid", "train.lr=1e-3,4e-3", "--seeds", 1, "--steps", 2, "--workers", 1, "--json", *small]
    done = call("compare", "smoke", "--data", data_folder, "--out", tmp_path / "grid", *more, "--set", "train.min_lr=0")
    assert done.code == 0, done.err
    assert [row["arm"] for row in done.json["rows"]] == ["lr=1e-3", "lr=4e-3"]
    rates = [
        RunFolder(tmp_path / "grid" / "runs" / arm / "seed-1").config_json()[0]["train"]["lr"]
        for arm in ("lr=1e-3", "lr=4e-3")
    ]
    assert rates == [1e-3, 4e-3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("small", "--grid", "train.lr=1e-3,2e-3"), "--grid varies a preset, and 'small' is none"),
        (("small", "--cpus-per-run", 2), "--cpus-per-run and --gpus-per-run belong to --ray"),
        (("small", "--ray", "auto", "--workers", 2), "--workers is for this machine"),
        (("small", "--ray", "auto", "--cpus-per-run", 0), "--cpus-per-run 0: it must be at least 1"),
        (("small", "--ray", "auto", "--gpus-per-run", 1.5), "--gpus-per-run 1.5: a share of one GPU, or a whole"),
        (("small", "--retries", -1), "--retries -1: it must be at least 0"),
    ],
)
def test_what_a_comparison_cannot_be_given_is_refused(
    arguments: tuple[object, ...], message: str, tmp_path: Path
) -> None:
    refused = call("compare", *arguments, "--out", tmp_path / "study")
    assert refused.code == 2
    assert message in words(refused.err)
    assert not (tmp_path / "study").exists()


LONG = "a" * 300
IN_THE_WAY = {
    "a pool that is a file": (
        ("compare", "small", "--pool", "{file}", "--out", "{new}"),
        "is a file; give another --pool",
    ),
    "a ladder's pool": (("study", "ladder", "--pool", "{file}", "--out", "{new}"), "is a file; give another --pool"),
    "a plan's pool": (("study", "plan", "--pool", "{file}"), "is a file; give another --pool"),
    "looks that are a folder": (("compare", "small", "--pool", "{looks}", "--out", "{new}"), "looks.jsonl is a folder"),
    **{
        f"{name} that is a file": ((*command, "--out", f"{{{name}}}"), f"{name} is a file; give another --out")
        for name in ("definition", "runs", "rungs")
        for command in ((("study", "ladder"),) if name == "rungs" else (("compare", "small"),))
    },
    "a study that is a folder": (("compare", "small", "--out", "{study}"), "study.json cannot be read"),
    "a long study": (("report", LONG), "no file can have so long a name"),
    "a long file": (("study", "plan", f"{LONG}.py"), "no file can have so long a name"),
    "a long --out": (("compare", "small", "--out", LONG), "no file can have so long a name"),
    "a long --from": (("study", "plan", "--from", LONG), "no file can have so long a name"),
}


@pytest.mark.parametrize(("arguments", "said"), IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_what_lies_in_the_way_is_refused_and_nothing_made(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    places = {name: tmp_path / name for name in ("file", "looks", "study", "definition", "runs", "rungs")}
    for name in ("definition", "runs", "rungs"):
        places[name].mkdir()
        (places[name] / name).write_text("")
    places["file"].write_text("")
    for name, inside in (("looks", "looks.jsonl"), ("study", "study.json")):
        (places[name] / inside).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    refused = call(*(word.format(**places, new=tmp_path / "new") for word in arguments))
    assert (refused.code, refused.out, said in words(refused.err)) == (2, "", True), refused.err
    assert sorted(tmp_path.rglob("*")) == before


def test_status_of_a_study_names_every_run_and_touches_nothing(study: Path) -> None:
    RunFolder(study / "runs" / "wide" / "seed-2").set_status("failed", step=1, why="planted [red]")
    shutil.rmtree(study / "runs" / "wide" / "seed-3")
    before = snapshot(study)
    done = call("study", "status", study, "--json")
    assert done.code == 0
    states = {state["run"]: state for state in done.json["runs"]}
    assert list(states) == [f"{arm}, seed {seed}" for arm in ("baseline", "wide") for seed in (1, 2, 3)]
    assert (states["wide, seed 2"]["status"], states["wide, seed 2"]["why"]) == ("failed", "planted [red]")
    assert states["wide, seed 3"]["status"] == "waiting"
    assert done.json["counts"] == {"finished": 4, "failed": 1, "waiting": 1}
    told = words(call("study", "status", study).out)
    assert "4 finished, 1 failed, 1 waiting" in told
    assert snapshot(study) == before


def test_a_study_is_planned_from_what_another_found(study_file: Path, study: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    done = call("study", "plan", study_file, "--from", study, "--effect", "5%", "--json")
    assert done.code == 0, done.err
    plan = done.json
    assert (plan["runs"], plan["seeds"], plan["other_settings"]) == (6, 3, [])
    assert plan["seeds_needed"] >= 3
    assert plan["hours"] > 0
    evidence = study / "report" / "evidence.json"
    kept = call("study", "plan", study_file, "--from", evidence, "--effect", "5%", "--json").json
    assert {**kept, "source": "", "timed_by": ""} == {**plan, "source": "", "timed_by": ""}
    told = words(call("study", "plan", study_file, "--from", study, "--effect", "5%").out)
    assert f"you need n = {plan['seeds_needed']:,} seeds" in told
    alone = words(call("study", "plan", study_file).out)
    assert "No noise figure is known" in alone
    assert f"qurve compare {study_file} --seeds 3 --out DIR".replace(" ", "") in alone.replace(" ", "")
    assert "An estimate: " in alone
    assert "of what a matrix product reaches on this machine" in alone
    assert snapshot(tmp_path) == before


def test_a_ladder_is_planned_rung_by_rung(study: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from qurve.study.ladder import load_definition\nLADDER = load_definition('paper')\n")
    plan = call("study", "plan", file, "--from", study, "--json").json
    assert [row["rung"] for row in plan["rungs"]][:2] == ["12x768@20", "24x1024@20"]
    assert plan["flops"] == pytest.approx(sum(row["flops"] for row in plan["rungs"]))
    told = words(call("study", "plan", file, "--from", study).out)
    assert "12x768@240" in told
    assert "An estimate: " in told
    done = call("study", "plan", file, "--pool", tmp_path)
    assert done.code == 2
    assert "--pool is for a study" in done.err


def test_a_plan_counts_what_a_pool_holds(
    study_file: Path, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "ProcessPoolExecutor", InProcess)
    pool, out = tmp_path / "pool", tmp_path / "study"
    made = call("compare", study_file, "--data", data_folder, "--out", out, "--pool", pool, "--seeds", 2)
    assert made.code == 0, made.err
    before = snapshot(tmp_path)
    options = ("study", "plan", study_file, "--pool", pool, "--data", data_folder)
    plan = call(*options, "--json").json
    assert (plan["made"], plan["runs"], [arm["made"] for arm in plan["arms"]]) == (4, 6, [2, 2])
    assert "4 of 6 runs are in the pool, 2 are left" in words(call(*options).out)
    assert call(*options, "--set", "train.lr=0.02", "--json").json["made"] == 0
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("small", "--data", "there"), "--data tells one run from another in a pool: it belongs to --pool"),
        (("smal",), "no study 'smal'; did you mean 'small'?"),
        (("small", "--effect", "0.2"), "in per cent of the baseline's loss"),
        (("small", "--from", "missing"), "missing is not there"),
    ],
)
def test_a_plan_without_sense_is_refused(arguments: tuple[str, ...], said: str) -> None:
    refused = call("study", "plan", *arguments)
    assert (refused.code, refused.out) == (2, "")
    assert said in words(refused.err)


def test_a_study_is_evaluated_document_by_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "ProcessPoolExecutor", InProcess)
    folder, file, study = tmp_path / "data", tmp_path / "short.py", tmp_path / "study"
    documents = [json.dumps({"text": f"The {word} of the {place}."}) for word in dir(str) for place in ("sea", "land")]
    (tmp_path / "text.jsonl").write_text("\n".join(documents))
    prepare([tmp_path / "text.jsonl"], folder, tokenizer="bytes", split=0.2, workers=1, progress=False)
    file.write_text(GOOD)
    made = call("compare", file, "--data", folder, "--out", study, "--workers", 1, "--seeds", 2)
    assert made.code == 0, made.err
    before = snapshot(study)
    done = call("study", "documents", study, "--json")
    assert done.code == 0, done.err
    noise, split = done.json, TokenData.open(folder).split("val")
    (wide,) = noise["arms"]
    assert (noise["split"], noise["tokens"], wide["arm"], wide["seeds"]) == ("val", len(split) - 1, "wide", [1, 2])
    assert noise["documents"] > 2
    assert wide["low"] < wide["diff"] < wide["high"]
    folder.rename(tmp_path / "moved")
    assert "name the folder of that data (--data DIR)" in words(call("study", "documents", study).err)
    told = words(call("study", "documents", study, "--data", tmp_path / "moved").out)
    assert "It says nothing of other seeds" in told
    assert snapshot(study) == before
    for run in study.glob("runs/*/*"):
        RunFolder(run).set_status("failed", step=3)
    refused = call("study", "documents", study)
    assert (refused.code, "no run is finished yet" in words(refused.err)) == (2, True)


@pytest.mark.parametrize("command", [("study", "status"), ("watch",)])
def test_what_is_no_run_and_no_study_cannot_be_watched(command: tuple[str, ...], tmp_path: Path) -> None:
    refused = call(*command, tmp_path)
    assert (refused.code, "is neither a study nor a run" in words(refused.err)) == (2, True)


def test_watching_ends_when_nothing_runs_and_ctrl_c_leaves_it_quietly(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = call("watch", study)
    assert (done.code, "6 finished" in done.out) == (0, True)

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    run = RunFolder(study / "runs" / "wide" / "seed-2")
    run.set_status("running", step=1)
    os.utime(run.metrics_file)
    monkeypatch.setattr("time.sleep", interrupted)
    done = call("watch", run.path)
    assert (done.code, done.err) == (0, "")


def test_a_narrow_terminal_without_utf8_shows_what_it_can(study: Path) -> None:
    for command in (("report", study), ("presets",), ("train", "smok", "--out", study), ("prepare", "--help")):
        done = apart(*command, PYTHONIOENCODING="ascii", COLUMNS="40")
        assert done.code == (2 if "smok" in command else 0), done.err
        assert "Traceback" not in done.err
