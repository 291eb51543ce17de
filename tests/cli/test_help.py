"""The command line itself: help, refusals, terminals."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest

from commands import apart, call, snapshot, words
from qurve.cli import COMMANDS, main


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
        (
            "generate",
            "RUN PROMPT… --prompt-file --max-new-tokens --samples --temperature --top-k --top-p --min-p "
            "--repetition-penalty --seed --stop --beyond --data --precision --device --json",
        ),
        ("prepare", "--out --tokenizer --split --workers --json"),
        ("report", "--json"),
        (
            "eval",
            "RUN|HF_DIR|STUDY --tasks --text --split --context --stride --limit --batch --data --precision --device "
            "--json",
        ),
        ("study", "status plan documents ladder"),
        ("study status", "FOLDER --json"),
        ("study plan", "STUDY --effect --from --json"),
        ("study documents", "FOLDER --data --device --json"),
        ("study ladder", "LADDER --data --out --workers --json"),
        ("analyze", "redundancy symmetry geometry mechanism"),
        ("analyze redundancy", "RUN|HF_DIR --weight --untie --data --out --json"),
        ("analyze symmetry", "RUN --data --out --json"),
        ("analyze geometry", "RUN --tokens --every-checkpoint --data --out --device --json"),
        ("analyze mechanism", "RUN --against --windows --data --out --device --json"),
        ("watch", "RUN|STUDY"),
        ("presets", "--json"),
        ("plan", "--steps --device --set --json"),
        ("export", "RUN --to --out --data --json"),
        ("import", "HF_DIR --out --json"),
    ],
)
def test_help_of_a_command_names_its_flags(command: str, flags: str) -> None:
    told = call(*command.split(), "--help")
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
        ("study ladder smal --out NEW", "no ladder 'smal'; did you mean 'small'?"),
        ("study ladder missing.py --out NEW", "there is no file missing.py"),
        ("study ladder small --out NEW --workers 0", "--workers 0: it must be at least 1"),
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
        ("eval missing --tasks TASK", "missing does not exist; give a run's folder, or a model's"),
        ("eval missing --split val", "missing does not exist; give a run's folder, or a model's"),
        ("eval missing", "missing does not exist; give a run's folder, or a model's"),
        ("eval .", "holds no model: it is neither a run's folder (metrics.jsonl) nor a Hugging Face model's"),
        ("eval missing --tasks none.jsonl", "none.jsonl does not exist; a task is a file"),
        ("eval missing --tasks TASK TASK", "two files have the name task; rename one of them"),
        ("eval missing --batch 0", "--batch 0: it must be at least 1"),
        ("eval missing --limit 0 --tasks TASK", "--limit 0: it must be at least 1"),
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
    (tmp_path / "task.jsonl").write_text('{"context": "a", "target": "b"}')
    before = snapshot(tmp_path)
    places = {"NEW": "deep/new", "EMPTY": "empty.txt", "LATIN": "latin.txt", "TASK": "task.jsonl"}
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


def test_a_reader_that_has_gone_is_no_error_to_tell_of() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    err = io.StringIO()
    with contextlib.redirect_stdout(Gone()), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(["presets", "--json"])
    assert left.value.code == 1
    assert err.closed  # so that Python says nothing at its end either


def test_eighty_columns_cost_no_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = call("presets")
    assert "…" not in told.out
    for row in call("presets", "--json").json:
        (line,) = (line for line in told.out.splitlines() if line.split()[:1] == [row["name"]])
        assert line.split()[1] == f"{row['non_embedding']:,}"
        assert line.split()[-1] == f"{row['steps']:,}"


def test_what_the_system_refuses_ends_in_its_words(tmp_path: Path) -> None:
    refused = call("train", "smoke", "--out", tmp_path / ("x" * 300))
    assert refused.code == 2
    assert "no file can have so long a name" in refused.err
    assert "Traceback" not in refused.err
