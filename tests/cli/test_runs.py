"""Runs and presets from the command line: what the commands print and create."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

from commands import apart, call, words
from qurve import presets
from qurve.errors import BadInput
from qurve.files import claimed
from qurve.runfolder import RunFolder


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
