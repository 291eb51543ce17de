"""The command line: what it prints, what it creates, what it leaves with."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qurve import presets
from qurve.cli import COMMANDS, main
from qurve.errors import BadInput
from qurve.files import claimed
from qurve.runfolder import RunFolder
from qurve.study import local
from tiny import InProcess

ROOT = Path(__file__).resolve().parent.parent

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
    "arm seeds_n non_embedding flops_per_token val_loss diff diff_low diff_high dll_percent dppx_percent tokens_per_s "
    "verdict"
)


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document that standard output holds."""
        return json.loads(self.out)


def call(*arguments: object) -> Outcome:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return Outcome(int(left.value.code or 0), out.getvalue(), err.getvalue())


def apart(*arguments: object, **environment: str) -> Outcome:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "qurve", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment}
    )
    return Outcome(done.returncode, done.stdout.decode("latin-1"), done.stderr.decode("latin-1"))


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def words(text: str) -> str:
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


# ------------------------------------------------------------------------------------------------------------- help


def test_help_of_every_command_reads_without_loading_torch() -> None:
    script = f"""
import contextlib, io, sys, time
begin = time.perf_counter()
from qurve.cli import main
for arguments in ([], ["--help"], *([command, "--help"] for command in {COMMANDS!r})):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main(arguments)
        except SystemExit as left:
            assert not left.code, left.code
    assert "usage: qurve" in out.getvalue(), arguments
heavy = sorted({{"torch", "scipy", "matplotlib", "tiktoken", "pandas"}} & set(sys.modules))
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_names_every_command_and_the_exit_codes() -> None:
    told = words(call("--help").out)
    assert all(f"{command} " in told for command in COMMANDS)
    assert (
        "0 done; 1 a run failed; 2 the input was refused and nothing was created; 3 the training diverged; 130" in told
    )


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("train", "--out --data --seed --steps --device --precision --set --json"),
        (
            "compare",
            "--grid --out --data --seeds --steps --device --workers --retries --ray --cpus-per-run --gpus-per-run "
            "--set --json",
        ),
        ("prepare", "--out --tokenizer --split --workers --json"),
        ("report", "--json"),
        ("study", "FOLDER status --json"),
        ("watch", "RUN|STUDY"),
        ("presets", "--json"),
        ("plan", "--steps --device --set --json"),
    ],
)
def test_help_of_a_command_names_its_flags(command: str, flags: str) -> None:
    told = call(command, "--help")
    assert told.code == 0
    assert [flag for flag in flags.split() if flag not in told.out] == []


def test_module_and_version() -> None:
    told = apart("--version")
    assert (told.code, told.out) == (0, "0.1.0\n")


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("trian smoke --out NEW", "no command 'trian'; did you mean 'train'?"),
        ("train smok --out NEW", "no preset 'smok'; did you mean 'smoke'?"),
        ("plan paper/res-gelu", "no preset 'paper/res-gelu'; did you mean 'paper/res-gelu-best'?"),
        ("compare smal --out NEW", "no study 'smal'; did you mean 'small'?"),
        ("compare missing.py --out NEW", "there is no file missing.py"),
        ("compare small --out NEW --seeds 0", "--seeds 0: it must be at least 1"),
        ("compare small --out NEW --workers 0", "--workers 0: it must be at least 1"),
        ("compare small --out NEW --set train.lrr=1", "there is no field 'lrr'; did you mean 'lr'?"),
        ("compare small --out NEW --steps 0", "train.steps = 0: it must be at least 1"),
        ("train smoke --out NEW --sed 3", "--seed"),
        ("train smoke --out NEW --seed 8x", "8x"),
        ("train smoke --out NEW --precision fp16", "invalid choice 'fp16'"),
        ("train smoke", "--out DIR"),
        ("train smoke --out NEW --set train.lr=8x", "train.lr = '8x' is not a finite number"),
        ("train smoke --out NEW --set train.steps=2.5", "train.steps = 2.5 is not a whole number"),
        ("train smoke --out NEW --set train.lr=nan", "train.lr = nan is not a finite number"),
        ("train smoke --out NEW --set train.compile=maybe", "train.compile = 'maybe' is not true or false"),
        ("train smoke --out NEW --set model.droput=0.1", "there is no field 'droput'; did you mean 'dropout'?"),
        ("train smoke --out NEW --set modl.dropout=0.1", "there is no field 'modl'; did you mean 'model'?"),
        ("train smoke --out NEW --set train.lr.x=1", "'lr' is a value (0.004) and has no field 'x'"),
        ("train smoke --out NEW --set model.dropout", "write it as path=value"),
        ("train smoke --out NEW --set model.query=linaer", "'linaer' is unknown; did you mean 'linear'?"),
        ("train smoke --out NEW --set model.query={bad", "model.query must be an object"),
        ("train smoke --out NEW --set train.schedule=cosin", "did you mean 'cosine'?"),
        ("train smoke --out NEW --set model.dropout=1", "model.dropout = 1.0: it must be at least 0 and below 1"),
        ("train smoke --out NEW --steps 0", "train.steps = 0: it must be at least 1"),
        ("train smoke --out NEW --set train.tokens_per_step=100", "the nearest number that does is 128"),
        ("train smoke --out NEW --set train.micro_batch=7", "does not divide the step's 32 sequences"),
        ("train smoke --out NEW --set model.vocab_size=200", "add --set model.vocab_size=320"),
        ("train smoke --out NEW --device tpu", "train.device = 'tpu' is not auto, cpu, cuda or cuda:N"),
        ("train smoke --out NEW --data missing", "missing is no prepared data: it is not a folder"),
        ("train paper/baseline --out NEW", "qurve prepare hf:"),
        ("prepare --out NEW", "name at least one file"),
        ("prepare missing.txt --out NEW", "missing.txt does not exist"),
        ("prepare EMPTY --out NEW --tokenizer bytes", "there is no text"),
        ("prepare LATIN --out NEW --tokenizer bytes", "latin.txt"),
        ("prepare LATIN --out NEW --tokenizer gpt3", "gpt2"),
        ("report missing", "missing is not a study folder"),
        ("train smoke --out NEW --set train.threads=100000", "train.threads = 100000: at most"),
        ("train smoke --out NEW --set model.vocab_size=100000000000000", "GB for its weights, gradients and optimiser"),
        (
            "train smoke --out NEW --set train.tokens_per_step=6400000000000000 --set train.micro_batch=7",
            "does not divide",
        ),
        ("train smoke --out NEW --set eval.splits=[]", "name at least one split"),
        ("train smoke --out NEW --set train.min_lr=1", "train.min_lr = 1.0 is above the peak"),
        ("compare small --out NEW --seeds 1000000000", "--seeds 1000000000: at most 1000"),
        ('compare small --out NEW --set eval.splits=["train"]', "compared on val"),
    ],
)
def test_refused_input_leaves_with_2_a_reason_and_nothing_created(
    arguments: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    before = snapshot(tmp_path)
    places = {"NEW": "deep/new", "EMPTY": "empty.txt", "LATIN": "latin.txt"}
    refused = call(*(places.get(word, word) for word in arguments.split()))
    assert refused.code == 2
    assert refused.out == ""
    assert words(said) in words(refused.err)
    assert "Traceback" not in refused.err
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "deep").exists()
    assert not (tmp_path / "runs").exists()


def test_a_folder_in_use_is_refused_and_left_as_it_is(data_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    before = snapshot(tmp_path)
    for command in (["train", "smoke"], ["compare", "small"], ["prepare", tmp_path / "notes.txt"]):
        refused = call(*command, "--out", tmp_path)
        assert refused.code == 2
        assert "give another --out" in words(refused.err)
        refused = call(*command, "--out", tmp_path / "notes.txt")
        assert refused.code == 2
    assert snapshot(tmp_path) == before


def test_data_that_was_there_before_a_refusal_stays(data_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "data").mkdir(parents=True)
    (tmp_path / "run" / "data" / "notes.txt").write_text("mine")
    refused = call("train", "smoke", "--out", tmp_path / "run")
    assert refused.code == 2
    assert (tmp_path / "run" / "data" / "notes.txt").read_text() == "mine"


# -------------------------------------------------------------------------------------------------- presets and plan


def test_presets_are_listed_with_their_figures() -> None:
    rows = {row["name"]: row for row in call("presets", "--json").json}
    assert list(rows) == presets.names()
    assert rows["paper/res-gelu-best"] == {
        "name": "paper/res-gelu-best",
        "non_embedding": 84_972_288,
        "query": "bottleneck",
        "lr": 3.6e-3,
        "min_lr": 2e-5,
        "weight_decay": 0.1,
        "steps": 60_000,
    }
    told = call("presets")
    assert told.code == 0
    assert "84,972,288" in told.out
    assert all(name in told.out for name in presets.names())


def test_plan_of_the_papers_best_arm() -> None:
    plan = call("plan", "paper/res-gelu-best", "--json").json
    assert plan["non_embedding_parameters"] == 84_972_288
    assert plan["tokens"] == 29_491_200_000
    assert (plan["steps"], plan["sequences_per_step"], plan["tokens_per_step"]) == (60_000, 480, 491_520)
    assert plan["flops"] == plan["tokens"] * plan["flops_per_token"]
    assert plan["flops_per_token"] == plan["forward_flops_per_token"] + plan["backward_flops_per_token"]
    assert plan["active_parameters"] == plan["total_parameters"] - plan["embedding_parameters"] == 84_972_288
    assert plan["cache_bytes"] == 12 * 2 * 1024 * 768 * (2 if plan["precision"] == "bf16" else 4)
    assert plan["activation_bytes"] > 12 * plan["micro_batch"] * 1024 * 3072 * 2  # the MLP's hidden activations alone
    hours = plan["flops"] / (plan["measured_matrix_flops_per_s"] * plan["assumed_utilisation"]) / 3600
    assert plan["estimated_hours"] == pytest.approx(hours)
    assert (plan["checkpoints"], plan["disk_bytes"]) == (4, 4 * 12 * plan["total_parameters"])


def test_plan_of_a_model_that_nobody_can_build_comes_at_once() -> None:
    plan = call("plan", "smoke", "--set", "model.n_layers=1000000000", "--json").json
    assert plan["non_embedding_parameters"] > 4e13
    assert "activation_bytes" not in plan


def test_plan_takes_settings_and_creates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ("--set", "train.tokens_per_step=1280", "--set", "model.query=linear")
    plan = call("plan", "smoke", "--steps", 7, *settings, "--json").json
    assert (plan["steps"], plan["tokens"], plan["sequences_per_step"], plan["checkpoints"]) == (7, 8960, 20, 1)
    assert plan["micro_batch"] == 20
    told = call("plan", "smoke")
    assert told.code == 0
    assert "non embedding parameters" in told.out
    assert re.search(r"activation bytes +[\d.]+ MB", told.out)
    both = ("--set", "model.attends=bidirectional", "--set", "train.objective=mlm")
    decoding = {"prefill_flops_per_token", "decode_flops_per_token", "cache_bytes"}
    assert decoding <= plan.keys()
    assert not decoding & call("plan", "smoke", *both, "--json").json.keys()
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------------------- prepare


def test_prepare_says_what_it_made_and_prints_its_manifest(tmp_path: Path) -> None:
    for name in "abcdefgh":
        (tmp_path / f"{name}.txt").write_text(f"A short document called {name}. " * 20)
    (tmp_path / "void.txt").touch()
    made = call("prepare", tmp_path, "--tokenizer", "bytes", "--split", 0.2, "--out", tmp_path / "data")
    assert made.code == 0
    assert "257 ids, 1 documents dropped" in made.out
    again = call("prepare", tmp_path, "--tokenizer", "bytes", "--split", 0.2, "--out", tmp_path / "data", "--json")
    assert again.json == json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert "nothing to do" in again.err


# ------------------------------------------------------------------------------------------------------------- train


def test_train_smoke_from_the_embedded_corpus(tmp_path: Path) -> None:
    done = apart("train", "smoke", "--out", tmp_path / "deep" / "run", "--steps", 3)
    assert done.code == 0, done.err
    run = RunFolder(tmp_path / "deep" / "run")
    assert run.status()["status"] == "finished"
    assert run.last_step() == 3
    assert f"val {run.eval_lines()[-1]['loss']:.4f}" in done.out
    assert run.environment()["compiled"] is False


def test_train_takes_its_flags_and_settings_and_prints_one_document(data_folder: Path, tmp_path: Path) -> None:
    flags = ("--seed", 5, "--steps", 4, "--device", "cpu", "--precision", "bf16", "--data", data_folder)
    settings = (
        "model.dropout=0.1",
        "train.tokens_per_step=256",
        "train.micro_batch=2",
        "train.compile=false",
        "train.threads=1",
        "eval.every=3",
    )
    repeated = [word for setting in settings for word in ("--set", setting)]
    done = call("train", "smoke", "--out", tmp_path / "run", *flags, *repeated, "--json")
    assert done.code == 0
    run = RunFolder(tmp_path / "run")
    last = run.train_lines()[-1]
    assert done.json == {
        "run": str(tmp_path / "run"),
        "steps": 4,
        "tokens": 1024,
        "train_loss": last["loss"],
        "val_loss": run.eval_lines()[-1]["loss"],
        "tokens_per_s": last["tokens"] / last["seconds"],
    }
    tree, _ = run.config_json()
    train = tree["train"]
    assert (train["seed"], train["steps"], train["device"], train["precision"]) == (5, 4, "cpu", "bf16")
    assert (train["tokens_per_step"], train["micro_batch"], train["compile"], train["threads"]) == (256, 2, False, 1)
    assert (tree["model"]["dropout"], tree["eval"]["every"]) == (0.1, 3)
    assert tree["data"]["path"] == str(data_folder)
    assert "step 4/4" in done.err
    assert not (tmp_path / "run" / "data").exists()


def test_a_training_that_diverges_leaves_with_3(data_folder: Path, tmp_path: Path) -> None:
    settings = ("train.lr=1e9", "train.warmup_steps=0", "train.tokens_per_step=128", "train.threads=1")
    repeated = [word for setting in settings for word in ("--set", setting)]
    broken = call("train", "smoke", "--out", tmp_path / "run", "--data", data_folder, *repeated)
    assert broken.code == 3
    assert RunFolder(tmp_path / "run").status()["status"] == "diverged"
    assert words(RunFolder(tmp_path / "run").status()["why"]) in words(broken.err)


def test_an_interrupted_training_leaves_with_130(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qurve.train import loop

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "build_optimizer", interrupted)
    stopped = call("train", "smoke", "--out", tmp_path / "run", "--data", data_folder)
    assert stopped.code == 130
    assert "interrupted" in stopped.err
    assert RunFolder(tmp_path / "run").status()["status"] == "stopped"


# ----------------------------------------------------------------------------------------------------------- compare


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
    assert sorted(path.name for path in folder.iterdir()) == ["report", "runs", "study.json"]
    for arm in ("baseline", "wide"):
        for seed in (1, 2, 3):
            run = RunFolder(folder / "runs" / arm / f"seed-{seed}")
            assert run.status()["status"] == "finished"
            assert run.last_step() == 3
    names = {path.name for path in (folder / "report").iterdir()}
    assert {"report.html", "table.csv", "table.tex"} <= names
    assert {Path(name).suffix for name in names} >= {".svg", ".png"}
    assert (folder / "report" / "table.csv").read_text().splitlines()[0] == f"{ROW_KEYS} diverged".replace(" ", ",")


def test_compare_prints_one_document_with_the_agreed_keys(compared: tuple[Path, Outcome]) -> None:
    folder, done = compared
    assert list(done.json) == ["rows", "verdict", "report"]
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


# ------------------------------------------------------------------------------------------------------ grids, watching


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


# ---------------------------------------------------------------------------------------------------------- terminals


def test_a_reader_that_has_gone_is_no_error_to_tell_of() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    err = io.StringIO()
    with contextlib.redirect_stdout(Gone()), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(["presets", "--json"])
    assert left.value.code == 1
    assert err.closed  # so that Python says nothing at its end either


def test_a_narrow_terminal_without_utf8_shows_what_it_can(study: Path) -> None:
    for command in (("report", study), ("presets",), ("train", "smok", "--out", study), ("prepare", "--help")):
        done = apart(*command, PYTHONIOENCODING="ascii", COLUMNS="40")
        assert done.code == (2 if "smok" in command else 0), done.err
        assert "Traceback" not in done.err


def test_eighty_columns_cost_no_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = call("presets")
    assert "…" not in told.out
    for row in call("presets", "--json").json:
        (line,) = (line for line in told.out.splitlines() if line.split()[:1] == [row["name"]])
        assert line.split()[1] == f"{row['non_embedding']:,}"
        assert line.split()[-1] == f"{row['steps']:,}"


def test_a_refusal_that_comes_late_takes_no_run_with_it(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise BadInput("too late")

    monkeypatch.setattr("qurve.train.loop.save_checkpoint", refuse)
    refused = call("train", "smoke", "--steps", 2, "--data", data_folder, "--out", tmp_path / "run")
    assert (refused.code, "too late" in refused.err) == (2, True)
    run = RunFolder(tmp_path / "run")
    assert run.status()["status"] == "failed"
    assert len(run.train_lines()) == 2


def test_what_the_system_refuses_ends_in_its_words(tmp_path: Path) -> None:
    refused = call("train", "smoke", "--out", tmp_path / ("x" * 300))
    assert refused.code in (1, 2)
    assert "File name too long" in refused.err
    assert "Traceback" not in refused.err


def test_a_refusal_leaves_what_another_process_has_begun(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two start in one new folder: the one that comes second must not clear away what the first one makes."""
    from qurve.train import loop

    other = contextlib.ExitStack()
    decide = loop.decide

    def overtaken(*arguments: Any) -> Any:
        decided = decide(*arguments)
        (tmp_path / "new" / "run" / "data").mkdir(parents=True)
        other.enter_context(claimed(tmp_path / "new" / "run"))
        return decided

    monkeypatch.setattr(loop, "decide", overtaken)
    with other:
        refused = call("train", "smoke", "--data", data_folder, "--out", tmp_path / "new" / "run")
        assert refused.code == 2
        assert "another process is working on" in refused.err
        assert (tmp_path / "new" / "run" / "data").is_dir()


def test_a_folder_of_something_else_is_refused_before_data_is_prepared_in_it(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for resume in ("auto", "never"):
        refused = call("train", "smoke", "--out", tmp_path, "--resume", resume)
        assert refused.code == 2
        assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]
