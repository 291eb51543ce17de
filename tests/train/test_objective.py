"""What is predicted, of which windows, with which random numbers, and how much of it counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from interrupted import assert_same, cut_short, smallest
from processes import together
from qurve import presets
from qurve.config import apply_settings, content_hash, from_json, to_json
from qurve.data.loader import TokenData
from qurve.errors import BadInput
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.train import windows
from qurve.train.config import RunConfig, TrainConfig
from qurve.train.distributed import Loss
from qurve.train.loop import train
from qurve.train.objective import IGNORED, Causal, MaskedTokens, ObjectiveConfig, Prefix, loss_is_on
from qurve.train.runtime import resolve
from tiny import tiny

MLM = ("train.objective=mlm", "model.attends=bidirectional")
PREFIX = ("train.objective=prefix", "model.attends=prefix")
CAUSAL = ("train.objective=causal",)
SETTINGS = {"causal": CAUSAL, "mlm": MLM, "prefix": PREFIX}
every_objective = pytest.mark.parametrize("kind", SETTINGS)


def batch_of(
    config: RunConfig, data: TokenData, starts: Any = (0, 64, 4000), stream: str = "1 5", split: str = "train"
) -> tuple[Tensor, ...]:
    return windows.batch(config, data.split(split), np.array(starts), stream)


def parts_of(config: RunConfig, data: TokenData, step: int) -> Iterator[tuple[Tensor, ...]]:
    """The windows of a step, one by one."""
    for start in windows.training_windows(config, data, step - 1)[0]:
        yield batch_of(config, data, [start], windows.training_stream(config, step))


def test_every_objective_is_tried_here() -> None:
    assert SETTINGS.keys() == ObjectiveConfig.registry.keys()


# -------------------------------------------------------------------------------------------------------------- batches


@hypothesis_settings(max_examples=20)
@given(st.integers(2, 40), st.floats(0.001, 0.999), st.integers(0, 5), st.integers(1, 4))
def test_counts_are_those_of_the_prepared_targets(context: int, rate: float, step: int, number: int) -> None:
    shape = {"n_layers": 1, "d_model": 2, "n_heads": 1, "d_ff": 1, "context": context, "vocab_size": 100}
    for objective in (Causal(), MaskedTokens(rate), Prefix()):
        model = ModelConfig(**shape, attends=objective.attends)
        config = RunConfig(model, train=TrainConfig(objective=objective))
        tokens_NT = np.arange(number * (context + 1)).reshape(number, -1) % 97
        starts, stream = np.arange(number) * context, windows.training_stream(config, step)

        def draw(words: int, stream: str = stream, starts: Any = starts) -> Any:
            return windows._draw(stream, starts, words)

        prepared = objective.prepare(tokens_NT[:, :-1].copy(), tokens_NT[:, 1:].copy(), model, draw)
        is_counted_NT = prepared[1] != IGNORED
        assert windows.counted(config, starts, stream) == is_counted_NT.sum() > 0
        if isinstance(objective, MaskedTokens):
            assert (is_counted_NT.sum(1) == max(1, round(rate * context))).all()


def test_causal_windows_are_those_of_the_data(data: TokenData) -> None:
    inputs, targets = batch_of(tiny(), data)
    plain = data.split("train").windows(np.array([0, 64, 4000]), 32)
    assert torch.equal(inputs, torch.from_numpy(plain[0]))
    assert torch.equal(targets, torch.from_numpy(plain[1]))


def test_masked_tokens_are_predicted_in_their_place(data: TokenData) -> None:
    inputs, targets = batch_of(tiny(*MLM, "model.vocab_size=300"), data)
    original = torch.from_numpy(data.split("train").windows(np.array([0, 64, 4000]), 32)[0])
    masked = inputs == 299
    assert masked.sum(1).tolist() == [round(0.15 * 32)] * 3
    assert torch.equal(inputs[~masked], original[~masked])
    assert torch.equal(targets[masked], original[masked])
    assert set(targets[~masked].tolist()) == {IGNORED}
    assert len({tuple(row.nonzero().flatten().tolist()) for row in masked}) == 3
    other = batch_of(tiny(*MLM, "train.objective.mask_id=270", "train.objective.rate=0.5"), data)[0]
    assert (other == 270).sum(1).tolist() == [16] * 3


def test_every_place_is_masked_equally_often(data: TokenData) -> None:
    config = tiny(*MLM, "train.objective.rate=0.25")
    masked = batch_of(config, data, np.arange(4000))[0] == config.model.vocab_size - 1
    assert (masked.float().mean(0) - 0.25).abs().max() < 4.5 * (0.25 * 0.75 / 4000) ** 0.5


def test_targets_within_the_prefix_do_not_count(data: TokenData) -> None:
    inputs, targets, prefix = batch_of(tiny(*PREFIX), data, np.arange(3000))
    plain = data.split("train").windows(np.arange(3000), 32)
    assert torch.equal(inputs, torch.from_numpy(plain[0]))
    for row, wanted, length in zip(targets[:50].tolist(), plain[1].tolist(), prefix.tolist(), strict=False):
        assert row == [IGNORED] * (length - 1) + wanted[length - 1 :]
    shares = torch.bincount(prefix, minlength=33) / 3000
    assert shares[[0, 32]].tolist() == [0, 0]
    assert (shares[1:32] - 1 / 31).abs().max() < 4.5 * (1 / 31 / 3000) ** 0.5


@pytest.mark.parametrize("kind", ["mlm", "prefix"])
def test_choices_are_of_seed_step_and_window_alone(kind: str, data: TokenData) -> None:
    config = tiny(*SETTINGS[kind])
    whole = batch_of(config, data)
    for place, start in enumerate((0, 64, 4000)):  # in whatever micro-batch, on whatever process
        alone = batch_of(config, data, [start])
        assert all(torch.equal(one[0], many[place]) for one, many in zip(alone, whole, strict=True))
    arm = apply_settings(config, ["model.query=bottleneck", "train.micro_batch=1", "train.lr=1"])
    assert all(torch.equal(a, b) for a, b in zip(batch_of(arm, data), whole, strict=True))
    many = np.arange(100) * 32
    streams = [windows.training_stream(tiny(f"train.seed={seed}"), step) for seed, step in ((1, 5), (1, 6), (2, 5))]
    assert streams[0] == "1 5"
    targets = [batch_of(config, data, many, stream)[1] for stream in streams]
    assert not any(torch.equal(targets[0], other) for other in targets[1:])


def test_random_words_are_those_of_every_version() -> None:
    """Pinned: with other words, a run that goes on would see other masks than one that was left alone."""
    drawn = windows._draw("1 5", np.array([0, 4096]), 2)
    assert drawn.tolist() == PINNED


PINNED = [[4206097201189964435, 1332329470938836942], [7551082117080176633, 13091277453666486923]]


# ----------------------------------------------------------------------------------------------------- what it can see


@every_objective
def test_what_counts_cannot_be_seen_and_the_rest_can(kind: str, data: TokenData) -> None:
    config = tiny(*SETTINGS[kind], "model.context=13")
    model = GPT(config.model, seed=2).eval()
    start, stream = 640, "1 1"
    inputs, targets, *prefix = batch_of(config, data, [start], stream)
    logits = model(inputs, prefix_B=prefix[0] if prefix else None)[0]
    seen_by = torch.zeros(13, 13, dtype=torch.bool)
    for place in range(13):
        changed = inputs.clone()
        changed[0, place] = (inputs[0, place] + 7) % 256
        seen_by[:, place] = (model(changed, prefix_B=prefix[0] if prefix else None)[0] != logits).any(-1)
    if kind == "mlm":
        assert seen_by.all()  # both sides; and what is masked is not there
        assert (inputs[0] == 319)[targets[0] != IGNORED].all()
    else:
        length = prefix[0].item() if prefix else 1
        expected = torch.ones(13, 13, dtype=torch.bool).tril()
        expected[:length, :length] = True
        assert torch.equal(seen_by, expected)
        for place in range(12):
            if targets[0, place] != IGNORED:
                assert not seen_by[place, place + 1]  # its target
        if prefix:
            assert 1 < length < 12
            assert targets[0, length - 2] == IGNORED
            assert seen_by[length - 2, length - 1]
            assert targets[0, length - 1] != IGNORED


@pytest.mark.parametrize("kind", [pytest.param("mlm", marks=pytest.mark.slow), "prefix"])
def test_the_loss_compiles_whole(kind: str, data: TokenData) -> None:
    config = tiny(*SETTINGS[kind])
    loss = Loss(GPT(config.model, seed=1))
    compiled = torch.compile(loss, fullgraph=True, dynamic=False, backend="eager")
    given = batch_of(config, data)
    assert compiled(*given).item() == pytest.approx(loss(*given).item(), rel=1e-6)


# ------------------------------------------------------------------------------------------------------------- training


@pytest.fixture(scope="module")
def trained(data: TokenData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    folder = tmp_path_factory.mktemp("trained")
    changes = ("train.steps=25", "eval.every=25")
    return {kind: train(tiny(*SETTINGS[kind], *changes), folder / kind, data) for kind in SETTINGS}


@every_objective
def test_every_objective_is_learned(kind: str, trained: dict[str, RunFolder]) -> None:
    losses = [line["loss"] for line in trained[kind].eval_lines()]
    assert losses[0] == pytest.approx(np.log(320), abs=0.15)
    assert losses[-1] < losses[0] - 1.5


@every_objective
def test_a_step_is_the_mean_over_all_counted_targets(
    kind: str, data: TokenData, trained: dict[str, RunFolder], tmp_path: Path
) -> None:
    config = tiny(*SETTINGS[kind])
    model, total, count = GPT(config.model, seed=1), torch.zeros(()), 0
    for inputs, targets, *prefix in parts_of(config, data, step=1):
        number = int((targets != IGNORED).sum())
        total, count = total + model.loss(inputs, targets, *prefix) * number, count + number
    torch.autograd.backward(total / count)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    for run in (trained[kind], train(tiny(*SETTINGS[kind], "train.micro_batch=1"), tmp_path / "run", data)):
        line = run.train_lines()[0]
        assert line["loss"] == pytest.approx((total / count).item(), rel=1e-6)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert line["tokens"] == 128


@every_objective
def test_an_evaluation_is_the_mean_over_all_counted_targets(
    kind: str, data: TokenData, trained: dict[str, RunFolder]
) -> None:
    config, line = tiny(*SETTINGS[kind]), trained[kind].eval_lines()[-1]
    model, total, count = GPT.from_run(trained[kind].path), 0.0, 0
    for start in windows.evaluation_windows(config, data, "val", 0):
        inputs, targets, *prefix = batch_of(config, data, [start], "val", split="val")
        number = int((targets != IGNORED).sum())
        total, count = total + model.loss(inputs, targets, *prefix).item() * number, count + number
    assert line["tokens"] == count
    assert line["loss"] == pytest.approx(total / count, rel=1e-6)


@pytest.mark.parametrize("kind", ["mlm", "prefix"])
def test_evaluation_is_alike_for_every_seed_and_step(kind: str, data: TokenData, tmp_path: Path) -> None:
    still = ("train.lr=0", "train.min_lr=0", "train.micro_batch=1", *SETTINGS[kind])
    lines = list(train(tiny(*still), tmp_path / "a", data).eval_lines())
    assert len({line["loss"] for line in lines}) == 1  # the weights stand still, and so do the masks
    seeds = [train(tiny(*still, f"train.seed={seed}", "train.steps=1"), tmp_path / str(seed), data) for seed in (1, 2)]
    assert len({run.eval_lines()[0]["tokens"] for run in seeds}) == 1


@pytest.mark.parametrize("kind", ["mlm", "prefix"])
def test_a_resumed_run_is_the_undisturbed_one_bit_by_bit(
    kind: str, little: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = smallest(*SETTINGS[kind])
    alone = train(config, tmp_path / "alone", little)
    for how, step in (("stop-at", 3), ("lost", 5), ("evaluation", 6), ("stop-at", 10)):
        cut_short(config, tmp_path / "run", little, how, step, monkeypatch.context)
    assert_same(RunFolder(tmp_path / "run"), alone)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("ddp", "prefix"), *(pytest.param("fsdp", kind, marks=pytest.mark.slow) for kind in ("mlm", "prefix"))],
)
def test_two_processes_make_the_run_of_one(mode: str, kind: str, data: TokenData, tmp_path: Path) -> None:
    shape = ("train.steps=2", "train.tokens_per_step=256", "train.micro_batch=2", "eval.windows=5", "train.lr=3e-3")
    settings = (*shape, *SETTINGS[kind], "model.mlp=moe", "model.mlp.experts=3", "model.share_blocks=true")
    one, many = train(tiny(*settings), tmp_path / "one", data), RunFolder(tmp_path / "many")
    jobs = json.dumps([[str(many.path), *settings, f"train.parallel={mode}"]])
    script = Path(__file__).parents[1] / "spread_training.py"
    for process in together(2, str(script), str(data.folder), jobs):
        assert process.returncode == 0, process.stderr
    for ours, theirs in zip(many.metrics(), one.metrics(), strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert ours["tokens"] == theirs["tokens"]
        assert ours.get("grad_norm", 0) == pytest.approx(theirs.get("grad_norm", 0), rel=1e-2)
    # Of the same weights: later ones differ in their last bits, and may choose otherwise.
    ours, theirs = (run.eval_lines()[0]["expert_usage"] for run in (many, one))
    assert ours == [pytest.approx(shares, abs=1e-9) for shares in theirs]


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["train.objective=mlm"],
            "train.objective = mlm is for model.attends = bidirectional, and that is causal; "
            "add --set model.attends=bidirectional, or --set train.objective=causal",
        ),
        (["train.objective=prefix"], "add --set model.attends=prefix, or --set train.objective=causal"),
        (["model.attends=prefix"], "add --set model.attends=causal, or --set train.objective=prefix"),
        (["model.attends=bidirectional"], "add --set model.attends=causal, or --set train.objective=mlm"),
        ([*MLM, "train.objective.rate=0"], "train.objective.rate = 0.0: it must be above 0 and below 1"),
        ([*MLM, "train.objective.rate=1"], "train.objective.rate = 1.0"),
        ([*MLM, "train.objective.mask_id=320"], "mask_id = 320 is no row of a vocabulary of 320; leave it out"),
        ([*MLM, "train.objective.mask_id=-1"], "mask_id = -1 is no row"),
        ([*PREFIX, "model.context=1"], "model.context of 2 or more"),
    ],
)
def test_what_cannot_be_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(BadInput) as raised:
        tiny(*settings)
    assert message in str(raised.value)


def test_the_mask_needs_an_id_of_its_own(data: TokenData) -> None:
    ids = data.n_ids
    for settings, way_out in (
        ((f"model.vocab_size={ids}",), "add --set model.vocab_size=320"),
        (("train.objective.mask_id=32",), "add --set train.objective.mask_id=none"),
        (
            (f"model.vocab_size={ids}", "train.objective.mask_id=32"),
            "add --set train.objective.mask_id=none --set model.vocab_size=320",
        ),
    ):
        with pytest.raises(BadInput, match=f"the data has the ids 0 to {ids - 1}; {way_out}$"):
            resolve(tiny(*MLM, *settings), data)
        named = [word for word in way_out.split() if "=" in word]
        assert resolve(tiny(*MLM, *settings, *named), data).train.objective.rate == 0.15
    assert resolve(tiny(*MLM, f"model.vocab_size={ids + 1}"), data).model.vocab_size == ids + 1


# --------------------------------------------------------------------------------------------------------------- config


def test_an_objective_is_part_of_the_hash_and_of_the_file() -> None:
    configs = [tiny(*SETTINGS[kind]) for kind in SETTINGS]
    configs += [tiny(*MLM, "train.objective.rate=0.3"), tiny(*MLM, "train.objective.mask_id=300")]
    assert len({content_hash(config.train) for config in configs}) == 5
    for config in configs:
        assert from_json(RunConfig, to_json(config)) == config


def test_objective_and_mask_may_be_set_in_either_order() -> None:
    for preset in ("smoke", "small/baseline", "small/res-gelu"):
        for settings in (MLM, MLM[::-1], PREFIX, PREFIX[::-1]):
            config = apply_settings(presets.get(preset), settings)
            assert config.train.objective.attends == config.model.attends


def test_words_for_what_the_loss_is_on() -> None:
    found = [loss_is_on(kind) for kind in (*SETTINGS, None, "other", 5)]
    assert found == [None, "masked tokens", "tokens after the prefix", None, None, None]
