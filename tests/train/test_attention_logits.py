"""Attention's logits at each evaluation: measured on its first windows, and nothing else is changed by it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qurve.analysis.attention_logits import recording
from qurve.data.loader import TokenData
from qurve.errors import BadInput
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.study.watch import Metrics
from qurve.train import loop, windows
from qurve.train.loop import train
from qurve.train.trackers import scalars
from tiny import tiny

LOGITS = ("eval.attention_logits=true", 'eval.splits=["train", "val"]')


@pytest.fixture(scope="module")
def run(data: TokenData, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "LOGIT_WINDOWS", 5)  # of six, in parts of four
        return train(tiny(*LOGITS), tmp_path_factory.mktemp("logits") / "run", data)


def test_the_last_evaluations_are_those_of_the_trained_model(data: TokenData, run: RunFolder) -> None:
    lines, model = run.eval_lines(), GPT.from_run(run.path)
    starts = windows.evaluation_windows(tiny(), data, "val", 4)[:5]
    with recording(model) as largest, torch.no_grad():
        model(torch.from_numpy(data.split("val").windows(starts, 32)[0]))
    assert lines[-1]["max_logit"] == pytest.approx(largest.by_layer(), rel=1e-5)
    assert [len(line["max_logit"]) for line in lines] == [2, 2, 2]
    assert lines[0]["max_logit"] != lines[-1]["max_logit"]
    assert not any("max_logit" in line for line in run.eval_lines("train"))


def test_the_training_is_the_one_without(run: RunFolder, finished: RunFolder) -> None:
    ours, theirs = ([line | {"seconds": 0} for line in r.train_lines()] for r in (run, finished))
    assert ours == theirs
    assert [line["loss"] for line in run.eval_lines()] == [line["loss"] for line in finished.eval_lines()]


def test_readers_of_the_metrics_cope(run: RunFolder) -> None:
    line = run.eval_lines()[-1]
    assert scalars(line)["val/max_logit"] == max(line["max_logit"])
    assert "val/max_logit" not in scalars(line | {"max_logit": [None, None]})
    metrics = Metrics(run.metrics_file)
    metrics.read()
    assert metrics.val == line


def test_a_mixer_without_logits_says_so(data: TokenData, tmp_path: Path) -> None:
    run = train(tiny(*LOGITS, "model.mixer=linear_attention", "train.steps=1"), tmp_path / "run", data)
    assert run.eval_lines()[-1]["max_logit"] == [None, None]


def test_logits_need_the_val_split() -> None:
    with pytest.raises(BadInput, match=r"measured on val, which is not in eval\.splits"):
        tiny("eval.attention_logits=true", 'eval.splits=["train"]')


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what it imports to compile
def test_a_compiled_training_compiles_nothing_anew(data: TokenData, tmp_path: Path) -> None:
    compiled = ("train.compile=true", "train.steps=3", "eval.every=1")
    graphs = []
    for name, settings in (("with", LOGITS), ("without", LOGITS[1:])):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        runs = train(tiny(*compiled, *settings), tmp_path / name, data)
        graphs.append((torch._dynamo.utils.counters["stats"]["unique_graphs"], runs.train_lines()[-1]["loss"]))
    assert graphs[0] == graphs[1]
