"""One run on many processes is the run of one process, and goes on on any other number of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from processes import together
from qurve.data.loader import TokenData
from qurve.runfolder import RunFolder
from qurve.train.loop import train
from tiny import tiny

# Twenty steps of eight sequences, in micro-batches of one: two to eight parts a process. With dropout, since its
# numbers belong to the micro-batch and not to the process.
SETTINGS = (
    "train.steps=20",
    "train.tokens_per_step=256",
    "train.micro_batch=1",
    "train.lr=3e-3",
    "eval.every=8",
    "eval.windows=7",
    "eval.attention_logits=true",
    "train.dynamics_every=10",
    "model.query=bottleneck",
    "model.dropout=0.1",
)


@pytest.fixture(scope="module")
def alone(data: TokenData, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(tiny(*SETTINGS), tmp_path_factory.mktemp("alone") / "run", data)


def spread(size: int, data: TokenData, *jobs: tuple[object, ...]) -> None:
    described = json.dumps([[str(folder), *SETTINGS, *settings] for folder, *settings in jobs])
    script = Path(__file__).parents[1] / "spread_training.py"
    for process in together(size, str(script), str(data.folder), described):
        assert process.returncode == 0, process.stderr


def assert_same_run(run: RunFolder, alone: RunFolder) -> None:
    ours, theirs = run.train_lines(), alone.train_lines()
    for key in ("step", "lr", "tokens", "batch_sha"):
        assert [line[key] for line in ours] == [line[key] for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-4)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5 if mine["step"] == 1 else 1e-2)
    due = {line["step"]: line["loss"] for line in alone.eval_lines()}
    measured = {line["step"]: line["loss"] for line in run.eval_lines() if line["step"] in due}
    assert measured == pytest.approx(due, abs=1e-4)
    logits = [line["max_logit"] for r in (run, alone) for line in r.eval_lines() if line["step"] == 20]
    assert logits[0] == pytest.approx(logits[1], rel=1e-3)
    seen = [{line["step"]: line["dynamics"] for line in r.train_lines() if "dynamics" in line} for r in (run, alone)]
    assert seen[0].keys() == seen[1].keys() == {1, 10, 20}
    for step, measures in seen[1].items():
        assert seen[0][step].keys() == measures.keys()
        for measure, values in measures.items():
            assert seen[0][step][measure] == pytest.approx(values, rel=1e-4 if step == 1 else 2e-2, abs=1e-3), measure
    for name in ("model", "optimizer"):
        ours, theirs = (load_file(r.latest_checkpoint() / f"{name}.safetensors") for r in (run, alone))
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[key], theirs[key], rtol=1e-3, atol=1e-3) for key in ours)
    assert run.status()["status"] == "finished"


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_many_processes_make_the_run_of_one(size: int, data: TokenData, alone: RunFolder, tmp_path: Path) -> None:
    modes = ("ddp", "fsdp")
    begun = [(tmp_path / mode, f"train.parallel={mode}", "train.stop_at=9") for mode in modes]
    bound = (tmp_path / "bound", "train.parallel=ddp", "train.loss_bound=0.1", "train.loss_bound_steps=3")
    stopped = (tmp_path / "stopped", "train.parallel=fsdp", "asked to stop in an evaluation")
    spread(size, data, *begun, *(job[:2] for job in begun), (*bound, "train.stop_at=2"), bound, stopped)
    for mode in modes:
        run = RunFolder(tmp_path / mode)
        assert_same_run(run, alone)
        assert run.environment()["processes"] == size
        assert [entry["step"] for entry in run.environment()["resumed"]] == [9]
    assert RunFolder(tmp_path / "stopped").status()["why"] == "stopped before the first step"
    # Every process knows of the two steps before the stop.
    status = RunFolder(tmp_path / "bound").status()
    assert (status["status"], status["step"]) == ("diverged", 2)
    assert "step 3: the loss was above 0.1 for 3 steps in a row" in status["why"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "counts",
    [
        [(1, "none"), (2, "fsdp"), (4, "ddp")],
        [(4, "fsdp"), (1, "none"), (2, "ddp")],
        [(2, "ddp"), (4, "fsdp"), (1, "none")],
    ],
    ids=str,
)
def test_a_run_goes_on_on_another_number_of_processes(
    counts: list[tuple[int, str]], data: TokenData, alone: RunFolder, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for (size, mode), stop in zip(counts, (6, 13, 20), strict=True):
        if size == 1:
            train(tiny(*SETTINGS, f"train.stop_at={stop}"), folder, data, resume="auto")
        else:
            spread(size, data, (folder, f"train.parallel={mode}", f"train.stop_at={stop}"))
    assert_same_run(RunFolder(folder), alone)
