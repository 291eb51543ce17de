"""How often each expert is used is measured over the whole evaluation, and harms no reader of the metrics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from qurve.data.loader import TokenData
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.study.watch import Metrics
from qurve.train import windows
from qurve.train.distributed import Loss
from qurve.train.loop import train
from qurve.train.trackers import scalars
from tiny import tiny

EXPERTS = ("model.mlp=moe", "model.mlp.experts=5", "train.micro_batch=4")


def test_usage_is_each_experts_share_of_all_choices(data: TokenData, tmp_path: Path) -> None:
    """Six windows in parts of four: the last part is smaller, and counts for less."""
    dense = 'model.overrides=[{"layers": [0], "mlp": {"kind": "gated"}}]'
    run = train(tiny(*EXPERTS, dense), tmp_path / "run", data)
    config, model = tiny(*EXPERTS, dense), GPT.from_run(run.path)
    found, chosen = run.eval_lines()[-1]["expert_usage"], np.zeros(5)

    def count(module: torch.nn.Module, args: object, logits: torch.Tensor) -> None:
        chosen[:] += np.bincount(logits.topk(2, dim=-1).indices.flatten(), minlength=5)

    model.blocks[1].mlp.router.register_forward_hook(count)
    for start in windows.evaluation_windows(config, data, "val", 0):
        model(torch.from_numpy(data.split("val").windows(np.array([start]), 32)[0]))
    assert chosen.sum() == 2 * 6 * 32
    assert found == [[], pytest.approx((chosen / chosen.sum()).tolist(), abs=1e-9)]
    assert sum(found[1]) == pytest.approx(1)


def test_blocks_with_shared_weights_are_told_apart(data: TokenData, tmp_path: Path) -> None:
    run = train(tiny(*EXPERTS, "model.share_blocks=true", "train.steps=1"), tmp_path / "run", data)
    first, second = run.eval_lines()[0]["expert_usage"]
    assert len(first) == len(second) == 5
    assert first != second


@pytest.mark.slow
def test_usage_is_seen_through_a_compiled_loss(data: TokenData) -> None:
    config = tiny(*EXPERTS)
    usages = []
    for compiled in (False, True):
        model = GPT(config.model, seed=1).eval()
        loss = Loss(model)
        called = torch.compile(loss, backend="eager", dynamic=False) if compiled else loss
        with torch.no_grad():
            for start in (0, 320):
                called(*windows.batch(config, data.split("val"), np.array([start]), "val"))
                usages.append([usage_N.tolist() for usage_N in model.expert_usage.values()])
    assert usages[:2] == usages[2:]
    assert usages[0] != usages[1]


def test_without_experts_there_is_none(finished: RunFolder) -> None:
    assert not any("expert_usage" in line for line in finished.metrics())


def test_readers_take_it(data: TokenData, tmp_path: Path) -> None:
    line = {"step": 3, "split": "val", "loss": 2.5, "tokens": 64, "expert_usage": [[], [0.25, 0.75], [0.5, 0.5]]}
    assert scalars(line) == {"val/loss": 2.5, "val/largest_expert_share": 0.75}
    assert scalars({**line, "split": "train"}) == {"train/eval_loss": 2.5, "train/largest_expert_share": 0.75}
    run = RunFolder(tmp_path)
    run.metrics_file.write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert list(run.metrics()) == [line]
    watched = Metrics(run.metrics_file)
    watched.read()
    assert watched.val == line
    run.trim_metrics(3)
    assert list(run.metrics()) == [line]
