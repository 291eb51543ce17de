"""A run that is cut short, however often and however, ends as if it had been left alone; or it is refused."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from interrupted import (
    After,
    Lost,
    ask_to_stop,
    assert_same,
    assert_whole,
    cut_short,
    little_data,
    lose,
    refuse,
    smallest,
    snapshot,
    stop_after,
)
from qurve.config import content_hash, from_dict, to_json
from qurve.data.loader import TokenData
from qurve.errors import BadInput, Stopped
from qurve.files import claimed, write_manifest
from qurve.runfolder import RunFolder
from qurve.train import checkpoint, loop, resume, runtime
from qurve.train.config import RunConfig
from qurve.train.distributed import World
from qurve.train.loop import train
from qurve.train.schedule import learning_rate

STEPS = smallest().train.steps


def config_of(run: RunFolder) -> RunConfig:
    tree, _ = run.config_json()
    del tree["format"]
    return from_dict(RunConfig, tree)


# --------------------------------------------------------------------------------------------------------------- exact

CUTS = st.tuples(st.sampled_from(["stop-at", "lost", "signal", "evaluation"]), st.integers(1, STEPS))


@settings(max_examples=15)
@example(cuts=[("signal", 1), ("evaluation", 3), ("lost", 5), ("stop-at", 8)], every=2)
@example(cuts=[("lost", 2), ("lost", 2), ("evaluation", 10)], every=3)
@given(cuts=st.lists(CUTS, min_size=1, max_size=4), every=st.integers(1, 5))
def test_whatever_cuts_it_short_it_ends_as_if_nothing_had(
    cuts: list[tuple[str, int]],
    every: int,
    little: TokenData,
    undisturbed: RunFolder,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    out = tmp_path_factory.mktemp("cut") / "run"
    config = smallest(f"train.checkpoint_every={every}")
    for how, step in cuts:
        cut_short(config, out, little, how, step, pytest.MonkeyPatch.context)
        assert_whole(RunFolder(out))
    run = train(config, out, little, resume="auto")
    # A stop at a step of the user's choice is the end of a run, so there is an evaluation after it.
    extra = {step for how, step in cuts if how == "stop-at" and step % 3 and step < STEPS}
    assert_same(run, undisturbed, extra=extra)


@pytest.mark.parametrize("how", ["stop-at", "lost", "signal", "evaluation"])
def test_it_is_cut_short_where_it_should_be(how: str, little: TokenData, tmp_path: Path) -> None:
    """The test above would show nothing if no run of it were cut."""
    run = RunFolder(tmp_path / "run")
    cut_short(smallest(), run.path, little, how, 4, pytest.MonkeyPatch.context)
    step, saved, status = {
        "stop-at": (4, 4, "finished"),
        "lost": (4, 2, "failed"),
        "signal": (4, 4, "stopped"),
        "evaluation": (6, 6, "stopped"),
    }[how]
    assert (run.last_step(), run.checkpoint_steps()[-1], run.status()["status"]) == (step, saved, status)
    assert [line["step"] for line in run.eval_lines()] == ([0, 3, 4] if how == "stop-at" else [0, 3])


@pytest.mark.slow
def test_two_threads_are_as_exact(little: TokenData, tmp_path: Path) -> None:
    config = smallest("train.threads=2", "model.d_model=64", "train.tokens_per_step=512")
    whole = train(config, tmp_path / "whole", little)
    run = stop_after(5, tmp_path / "run", little, config)
    assert_same(train(config, run.path, little, resume="auto"), whole)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which torch.compile calls")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what it imports to compile
@pytest.mark.parametrize("threads", [1, 2])
def test_compiled_training_is_as_exact(threads: int, data: TokenData, tmp_path: Path) -> None:
    """With evaluations whose last part is smaller: which graphs were compiled before must not matter."""
    sizes = ("model.d_model=64", "train.tokens_per_step=256", "train.micro_batch=8", "eval.windows=26")
    config = smallest("train.compile=true", f"train.threads={threads}", *sizes)
    whole = train(config, tmp_path / "whole", data)
    torch.compiler.reset()  # each part is compiled anew, as in a process of its own
    run = stop_after(4, tmp_path / "run", data, config)
    torch.compiler.reset()
    assert_same(train(config, run.path, data, resume="auto"), whole)
    assert run.environment()["compiled"] is True


# ---------------------------------------------------------------------------------------------------- where it goes on


@pytest.mark.parametrize("exists", [False, True])
def test_without_a_run_auto_begins_one(exists: bool, little: TokenData, undisturbed: RunFolder, tmp_path: Path) -> None:
    if exists:
        (tmp_path / "run").mkdir()
    run = train(smallest(), tmp_path / "run", little, resume="auto")
    assert_same(run, undisturbed)
    assert "resumed" not in run.environment()


def test_without_a_checkpoint_it_begins_again_in_place(
    little: TokenData, undisturbed: RunFolder, tmp_path: Path
) -> None:
    with pytest.raises(Lost):
        train(smallest(), tmp_path / "run", little, After(1, lose))
    run = RunFolder(tmp_path / "run")
    assert (run.checkpoint_steps(), run.last_step()) == ([], 1)
    with run.metrics_file.open("a") as file:
        file.write('{"step": 2, "lo')  # and killed in the middle of a line
    assert_same(train(smallest(), run.path, little, resume="auto"), undisturbed)


def test_of_a_changed_model_step_0_is_measured_anew(little: TokenData, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    with pytest.raises(Lost):
        train(smallest(), run.path, little, After(1, lose))
    train(smallest("train.seed=2"), run.path, little, resume="auto", changed=["train.seed"])
    afresh = train(smallest("train.seed=2"), tmp_path / "afresh", little)
    assert_same(run, afresh)


def test_a_finished_run_is_left_as_it_is(little: TokenData, undisturbed: RunFolder) -> None:
    before = snapshot(undisturbed.path)
    progress = After()
    train(smallest(), undisturbed.path, little, progress, resume="auto")
    assert snapshot(undisturbed.path) == before
    assert progress.notes == [f"{undisturbed.path} is finished: it made 10 steps"]


def test_a_run_is_not_taken_back_to_an_earlier_stop(run: RunFolder, little: TokenData) -> None:
    before = snapshot(run.path)
    progress = After()
    train(smallest("train.stop_at=3"), run.path, little, progress, resume="auto")
    assert snapshot(run.path) == before
    assert progress.notes == [f"{run.path} is past step 3: its checkpoint is of step 5"]


def test_what_was_decided_before_is_taken_where_nothing_is_given(
    run: RunFolder, little: TokenData, undisturbed: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ends = smallest("train.threads=null", "train.micro_batch=null", "train.device=auto", "train.precision=auto")
    monkeypatch.setattr("qurve.train.runtime.available_cores", lambda: 64)
    monkeypatch.setattr("qurve.train.runtime.cpu_multiplies_bf16", lambda: True)
    assert_same(train(open_ends, run.path, little, resume="auto"), undisturbed)


def test_where_it_went_on_is_noted(run: RunFolder, little: TokenData) -> None:
    progress = After()
    train(smallest(), run.path, little, progress, resume="auto")
    assert f"continuing {run.path} after step 5" in progress.notes
    (entry,) = run.environment()["resumed"]
    assert (entry["step"], entry["changed"], entry["torch"]) == (5, {}, torch.__version__)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_never_refuses_a_used_folder(run: RunFolder, little: TokenData) -> None:
    refuse(run, little, "holds a run; continue it with --resume auto", resume="never")


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("name", ["thesis.tex", ".hidden", "step-00000001"])
def test_a_folder_of_something_else_is_refused(name: str, resume: str, little: TokenData, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("mine")
    refuse(RunFolder(tmp_path / "run"), little, name if resume == "auto" else "is not empty", resume=resume)


def test_other_data_is_refused(run: RunFolder, little: TokenData, tmp_path: Path) -> None:
    other = little_data(tmp_path / "other", opening=40)
    with pytest.raises(BadInput) as refusal:
        train(smallest(), run.path, other, resume="auto", changed=["data.fingerprint"])
    assert little.fingerprint in str(refusal.value)
    assert other.fingerprint in str(refusal.value)
    refuse(run, other, "was trained on other data")


def test_a_changed_configuration_is_refused_until_each_change_is_named(run: RunFolder, little: TokenData) -> None:
    settings = ("train.lr=0.02", "train.min_lr=0.002", "model.dropout=0.1")
    message = (
        r"model\.dropout \(0\.2 there, 0\.1 now\), train\.lr \(0\.01 there, 0\.02 now\), train\.min_lr .*"
        r"--changed model\.dropout --changed train\.lr --changed train\.min_lr"
    )
    refuse(run, little, message, *settings)
    only = r"configuration: train\.min_lr \([^()]*\); if that is meant, add --changed train\.min_lr$"
    refuse(run, little, only, *settings, changed=["train.lr", "model.dropout"])
    refuse(run, little, r"there is no such field; did you mean 'train\.lr'", *settings, changed=["train.lrr"])

    earlier = run.config_json()[1]
    names = ["train.lr", "train.min_lr", "model.dropout"]
    with pytest.raises(Stopped):
        train(smallest(*settings), run.path, little, After(7, ask_to_stop), resume="auto", changed=names)
    assert config_of(run).train.lr == 0.02
    assert run.config_json()[1] == content_hash(config_of(run)) != earlier
    (entry,) = run.environment()["resumed"]
    assert entry["earlier_hash"] == earlier
    assert entry["changed"]["train.lr"] == [0.01, 0.02]
    assert sorted(entry["changed"]) == sorted(names)

    refuse(run, little, r"configuration: model\.dropout \(0\.1 there, 0\.2 now\)")
    run = train(smallest(*settings), run.path, little, resume="auto")
    before, after = smallest().train, smallest(*settings).train
    expected = [learning_rate(before if step < 5 else after, step) for step in range(STEPS)]
    assert [line["lr"] for line in run.train_lines()] == expected
    assert run.status()["status"] == "finished"


def cut_a_line(run: RunFolder) -> None:
    lines = run.metrics_file.read_text().splitlines(keepends=True)
    run.metrics_file.write_text("".join(line for line in lines if '"step": 3, "loss"' not in line))


def cut_the_end(run: RunFolder) -> None:
    run.metrics_file.write_text("".join(run.metrics_file.read_text().splitlines(keepends=True)[:-1]))


def double_a_line(run: RunFolder) -> None:
    lines = run.metrics_file.read_text().splitlines(keepends=True)
    run.metrics_file.write_text("".join(lines[:2] + lines[1:]))


def another_batch(run: RunFolder) -> None:
    last = run.train_lines()[-1]["batch_sha"]
    run.metrics_file.write_text(run.metrics_file.read_text().replace(last, "0" * 64))


def a_strangers_checkpoint(run: RunFolder) -> None:
    state = json.loads((run.checkpoint(5) / "state.json").read_text())
    (run.checkpoint(5) / "state.json").write_text(json.dumps(state | {"config_hash": "another"}))
    (run.checkpoint(5) / "manifest.json").unlink()
    checkpoint.write_manifest(run.checkpoint(5))


def test_metrics_that_are_no_metrics_are_refused_even_where_none_are_needed(run: RunFolder, little: TokenData) -> None:
    shutil.rmtree(run.checkpoint(5))
    shutil.rmtree(run.checkpoint(4))
    run.metrics_file.write_text("not\n" + run.metrics_file.read_text())
    refuse(run, little, r"metrics\.jsonl, line 1: not JSON")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut_a_line, r"metrics\.jsonl does not hold the steps 1 to 5, each once.*cut or edited"),
        (cut_the_end, r"metrics\.jsonl does not hold the steps 1 to 5, each once"),
        (double_a_line, r"metrics\.jsonl does not hold the steps 1 to 5, each once"),
        (another_batch, r"trained on other batches than this version of qurve takes: that of step 5"),
        (a_strangers_checkpoint, r"step-00000005 is the checkpoint of another run; remove it"),
    ],
)
def test_what_does_not_lead_to_the_checkpoint_is_refused(
    change: Callable[[RunFolder], None], message: str, run: RunFolder, little: TokenData
) -> None:
    change(run)
    refuse(run, little, message)


def test_tensors_of_another_model_are_refused(run: RunFolder, little: TokenData) -> None:
    refuse(run, little, "does not fit this run", "model.d_ff=48", changed=["model.d_ff"])


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize("begun", [False, True])
def test_a_disk_that_is_too_small_is_refused_with_the_numbers(
    begun: bool, run: RunFolder, little: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("model.d_model=256", "model.d_ff=1024")
    out = run.path if begun else tmp_path / "not" / "there"
    _, needed = checkpoint.disk_needed(smallest(*settings))
    message = rf"has 2 MB free, and the checkpoints of this run take {needed / 1e6:,.0f} MB"
    if begun:
        settings, message = (), r"has 0 MB free"
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(10, 5, 0 if begun else 2_000_000))
    before = snapshot(tmp_path)
    with pytest.raises(BadInput, match=message):
        train(smallest(*settings), out, little, resume="auto")
    assert snapshot(tmp_path) == before


# ------------------------------------------------------------------------------------------------------- whatever else


@pytest.mark.parametrize("change", ["data.order_seed=7", "train.seed=2", "train.tokens_per_step=128"])
def test_a_change_of_the_batches_survives_a_kill_before_the_next_checkpoint(
    change: str, little: TokenData, tmp_path: Path
) -> None:
    name = change.partition("=")[0]
    run = stop_after(4, tmp_path / "run", little)
    with pytest.raises(Lost):
        train(smallest(change), run.path, little, After(5, lose), resume="auto", changed=[name])
    done = train(smallest(change), run.path, little, resume="auto")  # named once is enough
    assert done.status()["status"] == "finished"
    assert [entry["step"] for entry in done.resumed()] == [4, 4]


def test_tokens_are_cumulative_whatever_a_step_takes(little: TokenData, tmp_path: Path) -> None:
    change = "train.tokens_per_step=128"
    run = stop_after(3, tmp_path / "run", little)
    before = run.train_lines()[-1]["tokens"]
    run = train(smallest(change), run.path, little, resume="auto", changed=["train.tokens_per_step"])
    assert [line["tokens"] for line in run.train_lines()[3:5]] == [before + 128, before + 256]


def test_data_that_were_changed_in_place_are_refused(tmp_path: Path) -> None:
    data = little_data(tmp_path / "data")
    run = stop_after(4, tmp_path / "run", data)
    shard = np.memmap(data.folder / "train-00000.bin", dtype="<u2", mode="r+")
    shard[:] = shard[0]
    shard.flush()
    before = snapshot(run.path)
    with pytest.raises(BadInput, match=r"train-00000\.bin is not what was prepared"):
        train(smallest(), run.path, TokenData.open(data.folder), resume="auto")
    assert snapshot(run.path) == before


def test_one_folder_has_one_process(little: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another one takes a new folder after this one has looked, and before it takes it itself."""
    run = stop_after(3, tmp_path / "run", little)
    with claimed(run.path), pytest.raises(BadInput, match="another process is working on"):
        train(smallest(), run.path, little, resume="auto")
    other = contextlib.ExitStack()
    decide = loop.decide

    def overtaken(*arguments: Any) -> Any:
        decided = decide(*arguments)
        (tmp_path / "new").mkdir()
        other.enter_context(claimed(tmp_path / "new"))
        return decided

    monkeypatch.setattr(loop, "decide", overtaken)
    with other, pytest.raises(BadInput, match="another process is working on"):
        train(smallest(), tmp_path / "new", little)
    assert not RunFolder(tmp_path / "new").is_begun()


def test_a_checkpoint_of_another_version_is_refused_and_left_where_it_is(little: TokenData, tmp_path: Path) -> None:
    run = stop_after(4, tmp_path / "run", little)
    for step in run.checkpoint_steps():
        file = run.checkpoint(step) / "state.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 3}))
        (file.parent / "manifest.json").unlink()
        write_manifest(file.parent)
    before = snapshot(run.path)
    with pytest.raises(BadInput, match="is of format 3; this version continues format 2"):
        train(smallest(), run.path, little, resume="auto")
    assert snapshot(run.path) == before


def test_threads_are_those_of_the_last_processes_not_of_the_first(
    little: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stop_after(2, tmp_path / "run", little)
    monkeypatch.setattr(runtime, "launched", lambda: True)
    two, open_ended = World(0, 2, 0, 2), smallest("train.threads=none", "train.parallel=ddp")
    config, changes = resume.decide(
        smallest("train.threads=3", "train.parallel=ddp"), run, little, "auto", ["train.threads"], two
    )
    run.go_on(2, to_json(config), content_hash(config), runtime.describe(config, two), changes)
    assert resume.decide(open_ended, run, little, "auto", [], two)[0].train.threads == 3


def test_a_run_in_bf16_goes_on_alike(little: TokenData, tmp_path: Path) -> None:
    config = smallest("train.precision=bf16", "train.activation_checkpointing=true")
    undisturbed = train(config, tmp_path / "whole", little)
    run = stop_after(5, tmp_path / "run", little, config)
    assert_same(train(config, run.path, little, resume="auto"), undisturbed)
