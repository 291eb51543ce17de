"""The quarter of an hour on a GPU, rehearsed: an equal search, seeds in turn, an end in time, going on after a cut."""

from __future__ import annotations

import dataclasses
import json
import runpy
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurve.accounting import count
from qurve.errors import BadInput
from qurve.study.paired import holm, paired_interval, paired_p

FILE = Path(__file__).parents[2] / "experiments" / "quarter_hour_gpu.py"


@pytest.fixture
def script() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(FILE)))


def run(job: Any, val: float | None = 3.0) -> dict[str, Any]:
    """What `made` returns, invented."""
    losses = {"val": val, "test": val}
    return {"arm": job.arm, "lr": job.lr, "seed": job.seed, "seconds": 1.0, **losses} | {
        "diverged": None if val else "the loss is not finite"
    }


def all_runs(script: SimpleNamespace, loss: Any) -> list[Any]:
    done: list[Any] = []
    while (job := script.to_do(script.REHEARSAL, done)) is not None:
        done.append(run(job, loss(job)))
    return done


def test_arms_are_of_the_sizes_that_are_said(script: SimpleNamespace) -> None:
    sizes = {name: count(model).non_embedding for name, model in script.arms(script.GPU.base.model).items()}
    assert 10e6 < sizes["baseline"] < 50e6
    assert sizes["mlp-4.75"] / sizes["baseline"] == pytest.approx(1.125, rel=1e-3)
    for name in ("identity-mlp-4.5", "qk-norm", "res-gelu"):
        assert sizes[name] == pytest.approx(sizes["baseline"], rel=1e-3)


def test_an_equal_search_comes_first_and_then_whole_seeds(script: SimpleNamespace) -> None:
    best = {"baseline": 1e-3, "res-gelu": 1e-2}

    def loss(job: Any) -> float:
        return 3.0 + (job.lr != best.get(job.arm, 1e-3))

    done, names = all_runs(script, loss), list(script.arms(script.REHEARSAL.base.model))
    searched = [(r["arm"], r["lr"]) for r in done if r["seed"] == script.SEARCH_SEED]
    assert searched == [(arm, lr) for lr in script.REHEARSAL.rates for arm in names]
    rest = done[len(searched) :]
    assert [(r["arm"], r["seed"]) for r in rest] == [(arm, seed) for seed in (1, 2) for arm in names]
    assert {r["arm"]: r["lr"] for r in rest} == dict.fromkeys(names, 1e-3) | best


def test_seeds_count_once_every_arm_has_them(script: SimpleNamespace) -> None:
    done = all_runs(script, lambda job: 3.0 - 0.1 * (job.arm == "res-gelu") - 0.01 * job.seed)
    found = script.summary(script.REHEARSAL, done[:-1])
    assert found["seeds"] == [1]
    assert found["arms"]["res-gelu"]["test_differences"] == [pytest.approx(-0.1)]
    assert script.summary(script.REHEARSAL, done)["seeds"] == [1, 2]


@given(st.lists(st.floats(-1, 1).map(lambda x: round(x, 3)), min_size=2, max_size=9))
def test_interval_and_p_are_those_of_a_study_without_scipy(differences: list[float]) -> None:
    found = SimpleNamespace(**runpy.run_path(str(FILE))) if not PAIRED else PAIRED[0]
    PAIRED[:] = [found]
    of = found.paired(differences)
    assert (of["diff"], of["low"], of["high"]) == pytest.approx(paired_interval(differences), abs=1e-6)
    assert of["p"] == pytest.approx(paired_p(differences), abs=1e-9)


PAIRED: list[Any] = []
"""The script, read once."""


def test_one_seed_has_no_interval_and_two_no_p(script: SimpleNamespace) -> None:
    done = all_runs(script, lambda job: 3.0 - 0.1 * (job.arm == "res-gelu") - 0.01 * job.seed)
    one = script.summary(script.REHEARSAL, done[:-1])["arms"]["res-gelu"]
    assert (one["low"], one["high"], one["p"], one["p_holm"]) == (None, None, None, None)
    two = script.summary(script.REHEARSAL, done)["arms"]["res-gelu"]
    assert two["low"] is not None
    assert (two["p"], two["p_holm"]) == (None, None)


def test_p_is_corrected_for_all_arms_and_an_arm_that_broke_has_none(
    script: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = dataclasses.replace(script.REHEARSAL, most_seeds=4)

    def loss(job: Any) -> float | None:
        if (job.arm, job.seed) == ("qk-norm", 4):
            return None
        return 3.0 - 0.1 * (job.arm == "res-gelu") + zlib.crc32(f"{job}".encode()) % 97 / 5_000 + (job.lr > 5e-3)

    done: list[Any] = []
    while (job := script.to_do(plan, done)) is not None:
        done.append(run(job, loss(job)))
    found = script.summary(plan, done)
    assert (found["seeds"], found["diverged"]) == ([1, 2, 3], ["qk-norm, seed 4"])
    ps = {arm: of["p"] for arm, of in found["arms"].items() if arm != "baseline"}
    assert ps["qk-norm"] is None
    assert [found["arms"][arm]["p_holm"] for arm in ps] == holm(list(ps.values()))
    script.show(plan, done)
    told = capsys.readouterr().out
    of = found["arms"]["res-gelu"]
    assert f"{of['diff']:+.4f} [{of['low']:+.4f}, {of['high']:+.4f}]  p (Holm) {of['p_holm']:.4f}" in told
    assert "diverged: qk-norm, seed 4" in told


def test_an_optimum_at_the_edge_of_the_rates_is_flagged(
    script: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = dataclasses.replace(script.REHEARSAL, rates=(1e-3, 2e-3, 4e-3))
    best = {"baseline": 1e-3, "mlp-4.75": 4e-3}
    done: list[Any] = []
    while (job := script.to_do(plan, done)) is not None:
        done.append(run(job, 3.0 + (job.lr != best.get(job.arm, 2e-3))))
    assert script.summary(plan, done)["edges"] == ["baseline", "mlp-4.75"]
    script.show(plan, done)
    assert "best at the edge of the rates tried: baseline; mlp-4.75" in capsys.readouterr().out


def test_an_arm_that_always_diverges_holds_up_nobody(script: SimpleNamespace) -> None:
    done = all_runs(script, lambda job: None if job.arm == "mlp-4.75" else 3.0)
    found = script.summary(script.REHEARSAL, done)
    assert found["chosen"]["mlp-4.75"] is None
    assert found["seeds"] == [1, 2]
    assert "mlp-4.75" not in found["arms"]


@pytest.fixture
def tokens(script: SimpleNamespace, tmp_path: Path) -> Any:
    folder = tmp_path / "data"
    folder.mkdir()
    return script.unpacked(script.invented(), folder)


def test_it_ends_in_time_and_goes_on_after_a_cut(
    script: SimpleNamespace, tokens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, made, inside = tmp_path / "found.json", [], script.go.__globals__

    def invented(plan: Any, job: Any, data: Any) -> dict[str, Any]:
        made.append(job)
        if len(made) == 4:
            while True:  # a run that is cut off
                time.sleep(0.01)
        return run(job)

    monkeypatch.setitem(inside, "made", invented)
    script.go(script.REHEARSAL, tokens, out, time.monotonic() - 1)
    assert made == []
    assert not out.exists()
    monkeypatch.setitem(inside, "MARGIN", 0.0)
    script.go(script.REHEARSAL, tokens, out, time.monotonic() + 1)
    assert len(made) == 4
    assert len(json.loads(out.read_text())["runs"]) == 3
    done = script.go(script.REHEARSAL, tokens, out, time.monotonic() + 60)
    assert made[4] == made[3], "the run that was cut off is made anew"
    assert len(done) == len(made) - 1 == 20
    assert json.loads(out.read_text())["summary"]["seeds"] == [1, 2]


def test_a_run_that_would_not_fit_is_not_begun(
    script: SimpleNamespace, tokens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(script.go.__globals__, "made", lambda plan, job, data: run(job) | {"seconds": 1e6})
    assert len(script.go(script.REHEARSAL, tokens, tmp_path / "found.json", time.monotonic() + 60)) == 1


def test_the_file_of_another_measurement_is_refused(
    script: SimpleNamespace, tokens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "found.json"
    monkeypatch.setitem(script.go.__globals__, "made", lambda plan, job, data: run(job) | {"seconds": 1e6})
    script.go(script.REHEARSAL, tokens, out, time.monotonic() + 60)
    out.write_text(json.dumps(json.loads(out.read_text()) | {"steps": 7}))
    with pytest.raises(BadInput, match="its steps differs"):
        script.go(script.REHEARSAL, tokens, out, time.monotonic() + 60)
    out.write_text("{}")
    with pytest.raises(BadInput, match="no evidence of this script"):
        script.go(script.REHEARSAL, tokens, out, time.monotonic() + 60)


def test_a_real_run_says_what_came_of_it(script: SimpleNamespace, tokens: Any) -> None:
    job = script.Job("res-gelu", 1e-3, 1)
    found = script.made(script.REHEARSAL, job, tokens)
    assert (found["arm"], found["lr"], found["seed"], found["diverged"]) == ("res-gelu", 1e-3, 1, None)
    assert 9 < found["test"] < 12
    assert [step for step, _ in found["curves"]["val"]] == [0, 2]
    assert found["val"] == found["curves"]["val"][-1][1]


def test_data_is_one_file_that_may_be_carried(
    script: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(60):
        (texts / f"{n}.txt").write_text(f"This is document {n}. " * 40)
    monkeypatch.setitem(script.make_data.__globals__, "MOST_BYTES", 40_000)
    monkeypatch.setitem(script.make_data.__globals__, "HELD_OUT", 200)
    file = tmp_path / "tokens.safetensors"
    script.make_data([str(texts)], file)
    assert file.stat().st_size < 40_000
    tensors = script.load_file(file)
    assert {name: len(ids) for name, ids in tensors.items()} == {"train": 9_600, "val": 200, "test": 200}
    assert all(ids.dtype == np.uint16 for ids in tensors.values())
    folder = tmp_path / "data"
    folder.mkdir()
    data = script.unpacked(tensors, folder)
    assert (data.tokenizer, data.splits, len(data.split("train"))) == ("gpt2", ("train", "val", "test"), 9_600)


ALLOWED = ["torch", "numpy", "safetensors", "triton", "qurve"]
TORCHS = ["torchgen", "functorch", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools"]
TORCHS += ["sympy", "typing_extensions"]
BARE = f"""
import runpy, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

class Bare:
    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target)
        foreign = path is None and "site-packages" in repr(spec) and "_vendor" not in repr(spec)
        return None if foreign and name not in {ALLOWED + TORCHS} else spec

sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Bare()]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_rehearsal_passes_where_torch_numpy_and_safetensors_are_all_there_is(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, "-c", BARE, str(FILE), "--rehearsal", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["rehearsal"]
    assert len(found["runs"]) == 20
    assert found["summary"]["seeds"] == [1, 2]
    assert "20 runs; seeds that every arm has finished: 2" in done.stdout


def test_wrong_calls_are_refused(
    script: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, said in (
        ([], "either --data FILE or --rehearsal"),
        (["--rehearsal"], "give it an --out of its own"),
        (["--make-data", "text"], "needs --data"),
    ):
        monkeypatch.setattr(sys, "argv", ["quarter_hour_gpu.py", *arguments])
        with pytest.raises(SystemExit):
            script.main()
        assert said in capsys.readouterr().err
