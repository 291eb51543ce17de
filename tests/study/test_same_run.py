"""A study takes no verdict from a folder that holds another run than the one it means."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_study import BASELINE, NONLINEAR, THREE_ARMS, arm, write_study

from qurve import presets
from qurve.config import content_hash, from_dict, hashed_leaves, to_dict, to_json
from qurve.errors import BadInput
from qurve.runfolder import RunFolder
from qurve.study.doubts import doubts
from qurve.study.results import StudyResults, load
from qurve.study.same_run import OPEN, check_run, ended_by_another_bound, seeded
from qurve.study.statistics import comparisons
from qurve.train.config import ABOVE_BOUND, RunConfig

SEEDS = (1, 2, 3)
CONFIG = seeded(presets.get("small/res-gelu"), 2)


def edit(file: Path, path: str, value: Any) -> None:
    tree = json.loads(file.read_text())
    node, *names = tree, *path.split(".")
    for name in names[:-1]:
        node = node[int(name) if isinstance(node, list) else name]
    node[names[-1]] = value
    file.write_text(json.dumps(tree))


def outcomes(results: StudyResults) -> dict[str, str]:
    return {pair.arm: pair.outcome for pair in comparisons(results)}


# ---------------------------------------------------------------------------------------------------- a study's folder


def test_swapped_folders_have_no_verdict_and_are_named(tmp_path: Path) -> None:
    write_study(tmp_path, THREE_ARMS, seeds=SEEDS)
    for seed in SEEDS:
        a, b = (tmp_path / "runs" / name / f"seed-{seed}" for name in ("mlp-4.75", "res-gelu"))
        a.rename(tmp_path / "aside")
        b.rename(a)
        (tmp_path / "aside").rename(b)
    results = load(tmp_path)
    assert outcomes(results) == {"mlp-4.75": "none", "res-gelu": "none"}
    assert any("runs/mlp-4.75/seed-1: it holds another run: model.d_ff is 512" in doubt for doubt in doubts(results))


@pytest.mark.parametrize("copied", [(BASELINE, NONLINEAR), (BASELINE,), (NONLINEAR,)])
def test_one_run_under_several_seeds_is_one_run(copied: tuple[dict[str, Any], ...], tmp_path: Path) -> None:
    write_study(tmp_path, (BASELINE, NONLINEAR), seeds=SEEDS)
    for one in copied:
        runs = tmp_path / "runs" / one["name"]
        for seed in SEEDS[1:]:
            shutil.rmtree(runs / f"seed-{seed}")
            shutil.copytree(runs / "seed-1", runs / f"seed-{seed}")
    results = load(tmp_path)
    assert outcomes(results) == {"res-gelu": "none"}
    assert any("train.seed is 1 in it and 3 in study.json" in doubt for doubt in doubts(results))


@pytest.mark.parametrize("of", ["baseline", "res-gelu"])
@pytest.mark.parametrize(
    ("path", "value"), [("model.d_model", 4096), ("train.lr", 1.0), ("model.query.kind", "scalar")]
)
def test_another_configuration_on_either_side_has_no_verdict(path: str, value: Any, of: str, tmp_path: Path) -> None:
    write_study(tmp_path / "run", (BASELINE, NONLINEAR), seeds=SEEDS)
    edit(tmp_path / f"run/runs/{of}/seed-2/config.json", path, value)
    write_study(tmp_path / "study", (BASELINE, NONLINEAR), seeds=SEEDS)
    edit(tmp_path / "study/study.json", f"arms.{int(of == 'res-gelu')}.config.{path}", value)
    for folder, damaged in (("run", 1), ("study", len(SEEDS))):
        results = load(tmp_path / folder)
        assert [run.arm for run in results.runs if run.status == "damaged"] == [of] * damaged
        assert outcomes(results) == {"res-gelu": "none"}


def test_an_a_a_run_has_the_weights_of_its_own_seed_and_the_batches_of_the_studys(tmp_path: Path) -> None:
    a_a = arm("a-a", "A/A", seed_offset=1000)
    assert all(run.finished for run in load(write_study(tmp_path, (BASELINE, a_a), seeds=SEEDS)).runs)
    edit(tmp_path / "runs/a-a/seed-3/config.json", "data.order_seed", 1)
    edit(tmp_path / "runs/a-a/seed-1/config.json", "train.seed", 1)
    runs = load(tmp_path).others[0].runs
    assert {seed: run.status for seed, run in runs.items()} == {1: "damaged", 2: "finished", 3: "damaged"}


# ------------------------------------------------------------------------------------------------------- one run folder


def folder(path: Path, config: RunConfig = CONFIG, stored: str | None = None) -> RunFolder:
    run = RunFolder(path)
    run.create(to_json(config), content_hash(config) if stored is None else stored, {})
    return run


def pinned() -> RunConfig:
    """The arm with everything decided that a run would decide."""
    data = dataclasses.replace(CONFIG.data, fingerprint="f" * 64)
    decided = {"device": "cpu", "precision": "bf16", "compile": False, "threads": 2, "micro_batch": 4}
    return dataclasses.replace(CONFIG, data=data, train=dataclasses.replace(CONFIG.train, **decided))


@pytest.mark.parametrize("path", hashed_leaves(CONFIG))
def test_no_setting_that_changes_the_numbers_may_be_another_one(path: str, tmp_path: Path) -> None:
    run = folder(tmp_path, pinned())
    check_run(run, to_dict(pinned()), 2)
    value = hashed_leaves(pinned())[path]
    is_number = isinstance(value, int | float)
    other = 5 if value is None else not value if isinstance(value, bool) else value + 1 if is_number else "another"
    edit(run.config_file, path, other)
    with pytest.raises(BadInput, match="it holds another run: "):
        check_run(run, to_dict(pinned()), 2)


def test_what_a_run_decides_where_it_is_made_is_its_own(tmp_path: Path) -> None:
    decided = {"train.device": "cpu", "train.precision": "bf16", "train.threads": 2, "train.micro_batch": 4}
    decided |= {"data.fingerprint": "f" * 64, "train.compile": False}
    assert set(decided) == set(OPEN)
    tree = to_dict(CONFIG)
    for path, value in decided.items():
        part, name = path.split(".")
        tree[part][name] = value
    open_arm = to_dict(CONFIG)
    open_arm["train"]["compile"] = True
    check_run(folder(tmp_path / "open", from_dict(RunConfig, tree)), open_arm, 2)
    tree["train"]["threads"] = 3
    with pytest.raises(BadInput, match=r"train\.threads is 2 in it and 3 in study\.json"):
        check_run(RunFolder(tmp_path / "open"), tree, 2)


def test_where_and_how_a_run_is_kept_is_its_own(tmp_path: Path) -> None:
    tree = to_dict(CONFIG)
    tree["data"]["path"], tree["train"]["keep"] = "/elsewhere", 7
    check_run(folder(tmp_path), tree, 2)


def test_a_configuration_is_what_was_written_there(tmp_path: Path) -> None:
    check_run(folder(tmp_path / "whole"), to_dict(CONFIG), 2)
    with pytest.raises(BadInput, match="not what was written there"):
        check_run(folder(tmp_path / "edited", stored="0" * 64), to_dict(CONFIG), 2)
    older = folder(tmp_path / "older", stored="0" * 64)
    tree = json.loads(older.config_file.read_text())
    del tree["train"]["head_impl"]
    older.config_file.write_text(json.dumps(tree))
    check_run(older, to_dict(CONFIG), 2)


def test_an_order_seed_of_its_own_is_kept() -> None:
    """An A/A arm of an arm whose batches are the same for every seed has these, and not those of the study's seed."""
    fixed = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, order_seed=42))
    assert [seeded(one, 3, 1000).data.order_seed for one in (fixed, CONFIG)] == [42, 3]
    assert [seeded(one, 3).data.order_seed for one in (fixed, CONFIG)] == [42, None]


NOT_FINITE = "step 4: the loss is not finite"
BOUNDS: dict[str, tuple[str, tuple[float, int] | None, tuple[float, ...], bool]] = {
    "as often as is allowed": ("", (5.0, 2), (6, 6, 4), True),
    "at the end": ("", (5.0, 2), (4, 6, 6), True),
    "once less": ("", (5.0, 3), (6, 6, 4), False),
    "as often, but not in a row": ("", (5.0, 2), (6, 4, 6), False),
    "at the bound": ("", (5.0, 1), (5, 5, 5), False),
    "no bound": ("", None, (6, 6, 6), False),
    "diverged by its own bound": (f"step 4: {ABOVE_BOUND} 99 for 9 steps in a row", (5.0, 2), (6, 4, 6), True),
    "diverged of itself": (NOT_FINITE, (5.0, 2), (6, 6, 6), False),
    "diverged of itself, and no bound": (NOT_FINITE, None, (6, 6, 6), False),
}


@pytest.mark.parametrize(("why", "bound", "losses", "ended"), BOUNDS.values(), ids=BOUNDS)
def test_another_bound_would_have_ended_it_otherwise_or_not(
    why: str, bound: tuple[float, int] | None, losses: tuple[float, ...], ended: bool, tmp_path: Path
) -> None:
    def bounded(bound: tuple[float, int] | None) -> RunConfig:
        train = {} if bound is None else {"loss_bound": bound[0], "loss_bound_steps": bound[1]}
        return dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, **train))

    run = folder(tmp_path, bounded((99.0, 9)))
    for step, loss in enumerate(losses, 1):
        numbers = {"lr": 1e-3, "grad_norm": 1.0, "tokens": step, "seconds": 1.0, "batch_sha": "0"}
        run.append({"step": step, "loss": float(loss), **numbers})
    run.set_status("diverged" if why else "finished", step=len(losses), why=why)
    assert ended_by_another_bound(run, bounded(bound)) == ended
    assert not ended_by_another_bound(run, bounded((99.0, 9)))


def test_a_projection_that_is_not_at_hand_is_compared_as_it_stands(tmp_path: Path) -> None:
    run, tree = folder(tmp_path), to_dict(CONFIG)
    edit(run.config_file, "model.query.kind", "of-mine")
    tree["model"]["query"]["kind"] = "of-mine"
    tree["train"]["keep"] = 7
    check_run(run, tree, 2)
    with pytest.raises(BadInput, match=r"train\.seed is 2 in it and 3 in study\.json"):
        check_run(run, tree, 3)
    tree["model"]["query"]["width"] = 5
    with pytest.raises(BadInput, match=r"model\.query\.width is .* in it and 5 in study\.json"):
        check_run(run, tree, 2)
