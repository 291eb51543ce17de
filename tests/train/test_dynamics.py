"""Dynamics in training: measured when asked for, of the weights that the loss is of, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from interrupted import assert_same, smallest, stop_after
from qurve.analysis.dynamics import recording
from qurve.config import content_hash
from qurve.data.loader import TokenData
from qurve.errors import BadInput
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.study.watch import Metrics
from qurve.train import dynamics, loop, windows
from qurve.train.loop import train
from qurve.train.trackers import scalars
from tiny import tiny

SETTINGS = ("model.query=bottleneck", "train.micro_batch=2", "model.dropout=0.1")
EVERY_TWO = (*SETTINGS, "train.dynamics_every=2")
GRADIENTS = ("block.gradient", "query.gradient", "key.gradient", "value.gradient")


@pytest.fixture(scope="module")
def run(data: TokenData, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(tiny(*EVERY_TWO), tmp_path_factory.mktemp("dynamics") / "run", data)


def test_the_training_is_the_one_without(run: RunFolder, data: TokenData, tmp_path: Path) -> None:
    plain = train(tiny(*SETTINGS), tmp_path / "run", data)
    ours, theirs = (
        [{k: v for k, v in line.items() if k not in ("seconds", "dynamics")} for line in r.metrics()]
        for r in (run, plain)
    )
    assert ours == theirs
    assert run.config_json()[1] == plain.config_json()[1]
    assert not any("dynamics" in line for line in plain.metrics())


def test_the_first_step_and_every_second_one(run: RunFolder) -> None:
    assert [line["step"] for line in run.train_lines() if "dynamics" in line] == [1, 2, 4]
    for line in run.train_lines():
        for values in line.get("dynamics", {}).values():
            assert len(values) == 2
            assert all(value == float(f"{value:.5g}") for value in values)


def test_it_is_of_the_weights_that_the_loss_is_of(run: RunFolder, data: TokenData, tmp_path: Path) -> None:
    """Step 1's weights are the initial ones, and step 4's those of a run that stops after step 3."""
    stopped = train(tiny(*SETTINGS, "train.stop_at=3"), tmp_path / "run", data)
    config, lines = tiny(*SETTINGS), {line["step"]: line for line in run.train_lines()}
    starts = windows.training_windows(config, data, 0)[0]
    ids_BT = torch.from_numpy(data.split("train").windows(starts, 32)[0])
    for step, model in ((1, GPT(config.model, seed=1).eval()), (4, GPT.from_run(stopped.path))):
        with recording(model) as found, torch.no_grad():
            model(ids_BT)
        told = {k: v for k, v in lines[step]["dynamics"].items() if k not in GRADIENTS}
        assert told.keys() == found.by_measure().keys()
        for measure, values in found.by_measure().items():
            assert told[measure] == pytest.approx(values, rel=1e-4), measure


def test_gradients_are_of_the_whole_step_before_clipping(data: TokenData, tmp_path: Path) -> None:
    config = tiny("train.dynamics_every=1", "train.steps=1", "train.micro_batch=2", "train.grad_clip=1e-3")
    (line,) = train(config, tmp_path / "run", data).train_lines()
    model = GPT(config.model, seed=1)
    starts = windows.training_windows(config, data, 0)[0]
    model.loss(*windows.batch(config, data.split("train"), starts, "")).backward()
    for layer, block in enumerate(model.blocks):
        parts = (block, *(getattr(block.attention, name) for name in ("query", "key", "value")))
        for measure, part in zip(GRADIENTS, parts, strict=True):
            squares = sum(parameter.grad.square().sum().item() for parameter in part.parameters())
            assert line["dynamics"][measure][layer] == pytest.approx(squares**0.5, rel=1e-4)
    assert line["grad_norm"] > line["dynamics"]["block.gradient"][0] > 1e-3


def test_shared_blocks_have_one_gradient_and_few_windows_are_enough(
    data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured on does not grow with the step."""
    monkeypatch.setattr(dynamics, "MEASURED_TOKENS", 64)
    config = tiny("train.dynamics_every=1", "train.steps=1", "model.share_blocks=true")
    (line,) = train(config, tmp_path / "run", data).train_lines()
    for measure in GRADIENTS:
        first, second = line["dynamics"][measure]
        assert first == second > 0
    starts, model = windows.training_windows(config, data, 0)[0], GPT(config.model, seed=1).eval()
    with recording(model) as found, torch.no_grad():
        model(torch.from_numpy(data.split("train").windows(starts[:2], 32)[0]))
    assert line["dynamics"]["attention.max_logit"] == pytest.approx(found.by_measure()["attention.max_logit"], rel=1e-4)


def test_a_run_without_queries_weights_has_no_gradient_of_theirs(data: TokenData, tmp_path: Path) -> None:
    run = train(tiny("model.query=identity", "train.steps=1", "train.dynamics_every=5"), tmp_path / "run", data)
    (line,) = run.train_lines()
    assert "query.gradient" not in line["dynamics"]
    assert line["dynamics"]["query.norm"] == pytest.approx([32**0.5] * 2, rel=1e-4)


def test_a_run_that_was_cut_short_measures_the_same(little: TokenData, tmp_path: Path) -> None:
    config = smallest("train.dynamics_every=3")
    whole = train(config, tmp_path / "whole", little)
    cut = stop_after(5, tmp_path / "cut", little, config)
    train(config, cut.path, little, resume="auto")
    assert_same(cut, whole, extra={5})
    assert [line["step"] for line in cut.train_lines() if "dynamics" in line] == [1, 3, 6, 9]


def test_it_can_be_switched_on_when_a_run_goes_on(little: TokenData, tmp_path: Path) -> None:
    cut = stop_after(5, tmp_path / "cut", little)
    train(smallest("train.dynamics_every=2"), cut.path, little, resume="auto")
    assert [line["step"] for line in cut.train_lines() if "dynamics" in line] == [6, 8, 10]


def test_its_time_is_not_the_trainings(data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the measurement moves."""
    now = [0.0]

    def measure(*_: Any) -> dict[str, Any]:
        now[0] += 100.0
        return {}

    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(loop, "measure_dynamics", measure)
    run = train(tiny("train.dynamics_every=1"), tmp_path / "run", data)
    assert now[0] == 400.0
    assert [line["seconds"] for line in run.train_lines()] == [0.0] * 4


def test_readers_of_the_metrics_cope(run: RunFolder) -> None:
    line = run.train_lines()[-1]
    told = scalars(line)
    assert told["dynamics/query.f_to_x/1"] == line["dynamics"]["query.f_to_x"][1]
    assert sum(tag.startswith("dynamics/") for tag in told) == sum(len(v) for v in line["dynamics"].values())
    assert "dynamics/key.norm/0" not in scalars(line | {"dynamics": {"key.norm": [None, 2.0]}})
    metrics = Metrics(run.metrics_file)
    metrics.read()
    assert metrics.train == line


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match=r"train\.dynamics_every = 0: it must be at least 1"):
        tiny("train.dynamics_every=0")
    assert content_hash(tiny()) == content_hash(tiny("train.dynamics_every=7"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what it imports to compile
def test_a_compiled_training_compiles_nothing_anew(data: TokenData, tmp_path: Path) -> None:
    compiled = ("model.query=bottleneck", "train.compile=true", "train.steps=3", "eval.every=1")
    graphs = []
    for name, settings in (("with", ("train.dynamics_every=1",)), ("without", ())):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        run = train(tiny(*compiled, *settings), tmp_path / name, data)
        graphs.append((torch._dynamo.utils.counters["stats"]["unique_graphs"], [x["loss"] for x in run.train_lines()]))
    assert graphs[0] == graphs[1]
