"""What a training writes, and what its numbers depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from qurve.config import content_hash, from_dict
from qurve.data import order
from qurve.data.loader import TokenData
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.train import loop, windows
from qurve.train.config import RunConfig
from qurve.train.loop import train
from qurve.train.progress import Progress
from qurve.train.runtime import resolve
from qurve.train.schedule import learning_rate
from tiny import PAPER_ORDER, tiny

Lines = list[dict[str, Any]]


def without_seconds(lines: Iterable[dict[str, Any]]) -> Lines:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def weights(run: RunFolder, step: int | None = None) -> dict[str, torch.Tensor]:
    folder = run.latest_checkpoint() if step is None else run.checkpoint(step)
    return load_file(folder / "model.safetensors")


def same_weights(a: RunFolder, b: RunFolder) -> bool:
    left, right = weights(a), weights(b)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def mean_loss(model: GPT, data: TokenData, split: str, starts: Sequence[int]) -> float:
    """Mean over the windows one by one, in evaluation mode."""
    model.eval()
    losses = []
    with torch.no_grad():
        for start in starts:
            inputs, targets = data.split(split).windows(np.array([start]), model.config.context)
            losses.append(model.loss(torch.from_numpy(inputs), torch.from_numpy(targets)).item())
    return sum(losses) / len(losses)


# ------------------------------------------------------------------------------------------------------ what it writes


def test_training_lines_have_the_fields_of_the_format(finished: RunFolder, data: TokenData) -> None:
    lines = finished.train_lines()
    for line in lines:
        assert list(line) == ["step", "loss", "lr", "grad_norm", "tokens", "seconds", "batch_sha"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["tokens"] for line in lines] == [128, 256, 384, 512]
    assert [line["lr"] for line in lines] == [learning_rate(tiny().train, k) for k in range(4)]


def test_seconds_add_up_over_training_alone(data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def tick() -> float:
        nonlocal now
        now += 1
        return now

    class Slow(Progress):
        def evaluated(self, line: dict[str, Any]) -> None:
            nonlocal now
            now += 1_000

    monkeypatch.setattr(loop.time, "perf_counter", tick)
    run = train(tiny("eval.every=1"), tmp_path / "run", data, Slow())
    assert [line["seconds"] for line in run.train_lines()] == [1.0, 2.0, 3.0, 4.0]


def test_update_k_uses_order_index_k_minus_1(finished: RunFolder, data: TokenData) -> None:
    for line in finished.train_lines():
        starts = order.epoch_windows(len(data.split("train")), line["step"] - 1, context=32, sequences=4, seed=1)
        expected = hashlib.sha256(starts.astype("<i8").tobytes() + data.fingerprint.encode()).hexdigest()
        assert line["batch_sha"] == expected


def test_first_update_is_of_the_seeded_weights_on_the_first_windows(finished: RunFolder, data: TokenData) -> None:
    model = GPT(tiny().model, seed=1)
    starts = order.epoch_windows(len(data.split("train")), 0, context=32, sequences=4, seed=1)
    inputs, targets = data.split("train").windows(starts, 32)
    loss = model.loss(torch.from_numpy(inputs), torch.from_numpy(targets))
    torch.autograd.backward(loss)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    first = finished.train_lines()[0]
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert first["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_evaluations_come_before_training_at_intervals_and_at_the_end(data: TokenData, tmp_path: Path) -> None:
    run = train(tiny("train.steps=5", "eval.every=2"), tmp_path / "run", data)
    assert [line["step"] for line in run.eval_lines()] == [0, 2, 4, 5]
    for line in run.eval_lines():
        assert list(line) == ["step", "split", "loss", "tokens"]
        assert line["tokens"] == 6 * 32


def test_loss_is_learned(data: TokenData, tmp_path: Path) -> None:
    losses = [line["loss"] for line in train(tiny("train.steps=30"), tmp_path / "run", data).eval_lines()]
    assert losses[0] == pytest.approx(np.log(320), abs=0.1)
    assert losses[-1] < losses[0] - 1.5


def test_finished_run_says_so_and_stores_its_resolved_configuration(finished: RunFolder, data: TokenData) -> None:
    assert finished.status() == {"format": 1, "status": "finished", "step": 4, "why": ""}
    tree, stored = finished.config_json()
    del tree["format"]
    config = from_dict(RunConfig, tree)
    assert config == resolve(tiny(), data)
    assert stored == content_hash(config)
    assert config.data.fingerprint == data.fingerprint
    facts = finished.environment()
    assert (facts["torch"], facts["device"], facts["threads"], facts["compiled"]) == (
        torch.__version__,
        "cpu",
        1,
        False,
    )


def test_hash_sees_what_changes_the_numbers_and_nothing_else() -> None:
    same = ("data.path=elsewhere", "train.stop_at=3", "train.checkpoint_every=1", "train.log_every=3")
    assert content_hash(tiny(*same)) == content_hash(tiny())
    changes = (
        "train.lr=0.02",
        "train.min_lr=0",
        "train.seed=2",
        "train.steps=5",
        "train.weight_decay=0",
        "train.threads=2",
        "train.precision=bf16",
        "train.compile=true",
        "train.head_impl=reference",
        "train.micro_batch=2",
        "train.schedule=wsd",
        "data.fingerprint=other",
        "data.order=paper",
        "data.order_seed=1",
        "model.dropout=0.1",
        "model.query=bottleneck",
        "eval.windows=7",
        "eval.every=1",
    )
    assert len({content_hash(tiny(change)) for change in ("train.seed=1", *changes)}) == 1 + len(changes)


# --------------------------------------------------------------------------------------------------------- checkpoints


def test_checkpoint_holds_every_tensor_once_and_its_state(finished: RunFolder) -> None:
    folder = finished.latest_checkpoint()
    assert folder.name == "step-00000004"
    assert sorted(entry.name for entry in folder.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    state = json.loads((folder / "state.json").read_text())
    assert state == {
        "format": 2,
        "step": 4,
        "order_position": 4,
        "loss_above_bound": 0,
        "val_loss": finished.eval_lines()[-1]["loss"],
        "config_hash": finished.config_json()[1],
        "data_fingerprint": finished.config_json()[0]["data"]["fingerprint"],
    }
    saved, model = weights(finished), GPT(tiny().model)
    assert {k: v.shape for k, v in saved.items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())


def test_model_from_a_run_gives_its_last_evaluation_again(finished: RunFolder, data: TokenData) -> None:
    model = GPT.from_run(finished.path)
    starts = order.fixed_eval_windows(len(data.split("val")), context=32, count=6).tolist()
    assert not model.training
    assert mean_loss(model, data, "val", starts) == pytest.approx(finished.eval_lines()[-1]["loss"], rel=1e-6)


def test_checkpoints_at_intervals_are_those_of_their_step(data: TokenData, tmp_path: Path) -> None:
    run = train(tiny("train.steps=5", "train.checkpoint_every=2", "train.keep=9"), tmp_path / "run", data)
    assert run.checkpoint_steps() == [2, 4, 5]
    stopped = train(tiny("train.steps=5", "train.stop_at=2"), tmp_path / "stopped", data)
    assert [line["step"] for line in stopped.train_lines()] == [1, 2]
    ours, theirs = weights(run, 2), weights(stopped, 2)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# ------------------------------------------------------------------------------------------------- what decides numbers


@pytest.mark.parametrize("size", [1, 2])
def test_accumulated_micro_batches_train_as_the_whole_step(
    size: int, finished: RunFolder, data: TokenData, tmp_path: Path
) -> None:
    parts = train(tiny(f"train.micro_batch={size}"), tmp_path / "run", data)
    for part, whole in zip(parts.train_lines(), finished.train_lines(), strict=True):
        assert part["batch_sha"] == whole["batch_sha"]
        assert part["loss"] == pytest.approx(whole["loss"], rel=1e-5)
        assert part["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
    for part_eval, whole_eval in zip(parts.eval_lines(), finished.eval_lines(), strict=True):
        assert part_eval["loss"] == pytest.approx(whole_eval["loss"], rel=1e-5)


def test_accumulation_hands_each_part_of_the_step_on_once(data: TokenData) -> None:
    whole, parts = windows.training_windows(resolve(tiny("train.micro_batch=1"), data), data, 3)
    assert [len(part) for part in parts] == [1, 1, 1, 1]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert len(set(whole.tolist())) == 4


def test_same_run_twice_gives_the_same_bits(data: TokenData, tmp_path: Path) -> None:
    config = tiny("model.dropout=0.2", "model.query=bottleneck")
    runs = []
    for name in ("first", "second"):
        torch.manual_seed(len(runs))  # whatever state the process is in
        runs.append(train(config, tmp_path / name, data))
    first, second = runs
    assert without_seconds(first.metrics()) == without_seconds(second.metrics())
    assert same_weights(first, second)


def test_evaluation_changes_nothing_in_training(data: TokenData, tmp_path: Path) -> None:
    often = train(tiny("model.dropout=0.2", "eval.every=1", "eval.windows=9"), tmp_path / "often", data)
    seldom = train(tiny("model.dropout=0.2", "eval.every=1000"), tmp_path / "seldom", data)
    assert len(often.eval_lines()) == 5
    assert len(seldom.eval_lines()) == 2
    assert without_seconds(often.train_lines()) == without_seconds(seldom.train_lines())
    assert same_weights(often, seldom)


def test_dropout_acts_in_training_and_not_in_evaluation(finished: RunFolder, data: TokenData, tmp_path: Path) -> None:
    dropped = train(tiny("model.dropout=0.5"), tmp_path / "run", data)
    assert dropped.eval_lines()[0] == finished.eval_lines()[0]
    assert dropped.train_lines()[0]["loss"] != finished.train_lines()[0]["loss"]
    assert dropped.train_lines()[0]["batch_sha"] == finished.train_lines()[0]["batch_sha"]


def test_seed_varies_dropout(data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "GPT", lambda config, seed: GPT(config, seed=1))  # the weights and the order stay

    def first_loss(dropout: float, seed: int) -> float:
        settings = ("train.steps=1", "data.order_seed=1", f"model.dropout={dropout}", f"train.seed={seed}")
        run = train(tiny(*settings), tmp_path / f"{dropout}-{seed}", data)
        loss: float = run.train_lines()[0]["loss"]
        return loss

    assert first_loss(0.0, 1) == first_loss(0.0, 2)
    assert first_loss(0.5, 1) != first_loss(0.5, 2)


def test_seed_varies_weights_and_order(finished: RunFolder, data: TokenData, tmp_path: Path) -> None:
    other = train(tiny("train.seed=2"), tmp_path / "run", data)
    assert other.eval_lines()[0]["loss"] != finished.eval_lines()[0]["loss"]
    assert not {x["batch_sha"] for x in other.train_lines()} & {x["batch_sha"] for x in finished.train_lines()}


def test_order_seed_fixes_the_order_alone(finished: RunFolder, data: TokenData, tmp_path: Path) -> None:
    same_order = train(tiny("train.seed=2", "data.order_seed=1"), tmp_path / "same", data)
    assert [x["batch_sha"] for x in same_order.train_lines()] == [x["batch_sha"] for x in finished.train_lines()]
    assert same_order.eval_lines()[0]["loss"] != finished.eval_lines()[0]["loss"]
    other_order = train(tiny("data.order_seed=2"), tmp_path / "other", data)
    assert other_order.eval_lines()[0] == finished.eval_lines()[0]
    assert other_order.train_lines()[0]["batch_sha"] != finished.train_lines()[0]["batch_sha"]


def test_bf16_trains_close_to_float32_with_float32_weights(
    finished: RunFolder, data: TokenData, tmp_path: Path
) -> None:
    half = train(tiny("train.precision=bf16"), tmp_path / "run", data)
    ours, exact = ([line["loss"] for line in run.metrics()] for run in (half, finished))
    assert ours == pytest.approx(exact, rel=2e-3)
    assert ours != pytest.approx(exact, rel=1e-7)
    assert all(tensor.dtype == torch.float32 for tensor in weights(half).values())


def test_evaluation_weighs_every_token_alike_when_the_last_batch_is_smaller(data: TokenData, tmp_path: Path) -> None:
    run = train(tiny("eval.windows=7", 'eval.splits=["val","test"]', "train.steps=1"), tmp_path / "run", data)
    model = GPT(tiny().model, seed=1)
    for split in ("val", "test"):
        starts = order.fixed_eval_windows(len(data.split(split)), context=32, count=7).tolist()
        assert run.eval_lines(split)[0]["loss"] == pytest.approx(mean_loss(model, data, split, starts), rel=1e-6)
        assert run.eval_lines(split)[0]["tokens"] == 7 * 32


def test_evaluation_asks_for_one_number_however_many_parts_it_has(
    data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question would have a GPU wait."""
    item, asked = torch.Tensor.item, 0

    def asking(tensor: torch.Tensor) -> Any:
        nonlocal asked
        asked += 1
        return item(tensor)

    monkeypatch.setattr(torch.Tensor, "item", asking)
    counts = {}
    for count in (4, 24):
        asked = 0
        train(tiny(f"eval.windows={count}", "train.steps=2", "eval.every=1"), tmp_path / str(count), data)
        counts[count] = asked
    assert counts[4] == counts[24] > 0


def test_batch_goes_to_a_gpu_from_pinned_memory_and_waits_for_nothing(
    data: TokenData, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned, moved = [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *to, **how: moved.append((to, how)) or tensor)
    starts = np.array([0, 32])
    on_gpu = windows.batch(tiny("train.device=cuda"), data.split("train"), starts, "1 1")
    assert len(pinned) == 2
    assert moved == [(("cuda",), {"non_blocking": True})] * 2
    on_cpu = windows.batch(tiny(), data.split("train"), starts, "1 1")
    assert len(pinned) == len(moved) == 2
    assert all(torch.equal(a, b) for a, b in zip(on_gpu, on_cpu, strict=True))


def test_gradient_is_clipped_to_its_norm(data: TokenData, tmp_path: Path) -> None:
    """Adam forgets the gradients' scale but not how it changes from one update to the next."""
    finals = {}
    for clip in ("0", "1000", "0.01"):
        run = train(tiny(f"train.grad_clip={clip}"), tmp_path / clip, data)
        finals[clip] = [line["loss"] for line in run.train_lines()]
        assert run.train_lines()[0]["grad_norm"] > 0.5  # the norm before clipping
    assert finals["0"] == finals["1000"]
    assert finals["0"] != finals["0.01"]


def test_without_clipping_a_gradient_of_any_size_is_used_as_it_is(
    data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    build = loop.build_optimizer

    def watched(model: GPT, config: Any) -> Any:
        optimizer = build(model, config)
        model.blocks[0].attention.output.weight.register_hook(lambda gradient: 1e15 * gradient)

        def look(*_: Any) -> None:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            used.append(torch.nn.utils.get_total_norm(gradients).item())

        optimizer.register_step_pre_hook(look)
        return optimizer

    monkeypatch.setattr(loop, "build_optimizer", watched)
    run = train(tiny("train.grad_clip=0", "train.steps=1"), tmp_path / "run", data)
    assert used == [run.train_lines()[0]["grad_norm"]]
    assert used[0] > 1e10


# --------------------------------------------------------------------------------------------------------- paper order


def test_paper_order_draws_the_papers_windows(data: TokenData, tmp_path: Path) -> None:
    config = tiny(*PAPER_ORDER, 'eval.splits=["train","val"]', "train.steps=2")
    run = train(config, tmp_path / "run", data)
    n_train, n_val = len(data.split("train")), len(data.split("val"))
    for line in run.train_lines():
        starts = order.paper_windows(n_train, line["step"] - 1, context=32, sequences=4, seed=42)
        assert line["batch_sha"] == order.batch_sha(starts, data.fingerprint)
    trained = GPT.from_run(run.path)
    for evaluation, model in ((0, GPT(config.model, seed=1)), (1, trained)):
        for split in ("train", "val"):
            starts = order.paper_eval_windows(n_train, n_val, evaluation, split, context=32)[:6].tolist()
            measured = run.eval_lines(split)[evaluation]["loss"]
            assert measured == pytest.approx(mean_loss(model, data, split, starts), rel=1e-6)


@pytest.mark.parametrize("setting", [(), PAPER_ORDER], ids=["epochs", "paper"])
def test_evaluation_countare_the_same_for_every_arm_and_seed(setting: Sequence[str], data: TokenData) -> None:
    changes: tuple[tuple[str, ...], ...] = (
        (),
        ("train.seed=5",),
        ("model.query=bottleneck", "train.lr=1"),
        ("train.micro_batch=1",),
    )
    for split in ("val", "train"):
        tables = [windows.evaluation_windows(tiny(*setting, *more), data, split, 4).tolist() for more in changes]
        assert len(tables[0]) == 6
        assert all(table == tables[0] for table in tables)


def test_paper_evaluates_on_new_counteach_time_and_other_orders_on_the_same(data: TokenData) -> None:
    fixed = [windows.evaluation_windows(tiny(), data, "val", step).tolist() for step in (0, 2)]
    paper = [windows.evaluation_windows(tiny(*PAPER_ORDER), data, "val", step).tolist() for step in (0, 2)]
    assert fixed[0] == fixed[1]
    assert paper[0] != paper[1]


def random_states(run: Path, data: TokenData, monkeypatch: pytest.MonkeyPatch, *settings: str) -> list[bytes]:
    """torch's random state as each micro-batch of training finds it."""
    states: list[bytes] = []
    loss = GPT.loss

    def looking(self: GPT, *batch: torch.Tensor) -> torch.Tensor:
        if self.training:
            states.append(torch.get_rng_state().numpy().tobytes())
        return loss(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(GPT, "loss", looking)
        train(tiny("model.dropout=0.1", "train.steps=2", *settings), run, data)
    return states


def test_random_numbers_depend_on_seed_step_and_place_alone(
    data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = random_states(tmp_path / "halves", data, monkeypatch, "train.micro_batch=2")
    assert len(set(halves)) == 4
    for arm in ("model.query=bottleneck", "model.d_ff=96", "model.n_layers=3", "eval.every=1"):
        assert random_states(tmp_path / arm, data, monkeypatch, "train.micro_batch=2", arm) == halves
    whole = random_states(tmp_path / "whole", data, monkeypatch)
    assert whole == [halves[0], halves[2]]
    assert set(random_states(tmp_path / "seed", data, monkeypatch, "train.seed=2")).isdisjoint(halves)
