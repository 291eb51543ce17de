"""A short training on any number of processes, with everything that `qurve.train.distributed` promises them.

python shared_training.py FILE MODE…      modes: ddp, fsdp; the main process writes what it found to FILE (JSON)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.projections import Bottleneck
from qurve.train.config import TrainConfig
from qurve.train.distributed import World, accumulating, all_finite, fill, full, joined, leave, spread
from qurve.train.optim import build_optimizer

# Nothing divides by 2 or 4, and with a width of 1 most processes hold an empty part of the query's first matrix.
MODEL = ModelConfig(
    n_layers=2, d_model=30, n_heads=3, d_ff=67, context=13, vocab_size=101, query=Bottleneck(width=1), bias=True
)
SEQUENCES, MICRO_BATCH, STEPS = 16, 2, 20


def settings(mode: str | None, **more: Any) -> TrainConfig:
    return TrainConfig(**{"lr": 3e-3, "precision": "float32", "parallel": mode, **more})


def windows(seed: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(MODEL.vocab_size, (SEQUENCES, MODEL.context + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def backward(loss: nn.Module, world: World, seed: int) -> Tensor:
    """The gradients of a whole step, this process's micro-batches accumulated; returns the loss of the step."""
    inputs, targets = windows(seed)
    mine = range(MICRO_BATCH * world.rank, SEQUENCES, MICRO_BATCH * world.size)
    mean = torch.zeros(())
    for start in mine:
        part = slice(start, start + MICRO_BATCH)
        with accumulating(loss, last=start == mine[-1]):
            share = loss(inputs[part], targets[part]) * (MICRO_BATCH / SEQUENCES)
            (share * world.size).backward()  # the processes' gradients are averaged, and the step's is their sum
        mean += share.detach()
    return world.total(mean)


def train(mode: str | None, world: World) -> tuple[dict[str, Any], GPT, nn.Module, torch.optim.Optimizer]:
    """Losses and gradient norms of some steps, evaluation losses, and the norm of every weight and optimiser state."""
    model = GPT(MODEL, seed=3)
    loss = spread(model, settings(mode), world)
    optimizer = build_optimizer(model, settings(mode))
    found: dict[str, Any] = {"losses": [], "norms": [], "evaluations": []}
    for step in range(STEPS):
        found["losses"].append(backward(loss, world, step).item())
        norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        found["norms"].append(full(norm).item())
        optimizer.step()
        optimizer.zero_grad()
        if step % 8 == 0:
            loss.eval()
            with torch.no_grad():
                found["evaluations"].append(loss(*windows(1000)).item())
            loss.train()
    states = {"weight": dict(model.named_parameters())}
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        states[kind] = {name: optimizer.state[weight][kind] for name, weight in model.named_parameters()}
    found["states"] = {f"{kind}/{name}": full(t).tolist() for kind, all_ in states.items() for name, t in all_.items()}
    return found, model, loss, optimizer


def check_world(world: World) -> None:
    mine = torch.tensor([float(world.rank), 1.0])
    assert world.total(mine).tolist() == [sum(range(world.size)), world.size]
    assert mine.tolist() == [world.rank, 1.0]
    assert world.from_main(10**15 + world.rank) == 10**15
    assert world.main == (world.rank == 0)
    world.wait()


def check_fill(model: GPT, loss: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What is filled in comes back to the bit, and is what the next forward pass computes with."""
    other = GPT(MODEL, seed=4)
    torch.manual_seed(7)  # alike everywhere
    for (name, weight), whole in zip(model.named_parameters(), other.parameters(), strict=True):
        fill(weight, whole)
        assert torch.equal(full(weight), whole), name
        for kind, state in optimizer.state[weight].items():
            wanted = torch.randn(state.shape)
            fill(state, wanted)
            assert torch.equal(full(optimizer.state[weight][kind]), wanted), (kind, name)
    with torch.no_grad():
        torch.testing.assert_close(loss(*windows(0)), other.loss(*windows(0)), rtol=1e-6, atol=0)
    # An evaluation leaves the model with the parameters that the optimiser knows.
    known = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    assert {id(weight) for weight in model.parameters()} == known


def check_precision(mode: str, world: World) -> None:
    """In bf16 nothing is rounded that one process keeps in float32."""
    loss = spread(GPT(MODEL, seed=3), settings(mode, precision="bf16"), world)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(loss(*windows(0)), GPT(MODEL, seed=3).loss(*windows(0)), rtol=1e-6, atol=0)


def check_finite(model: GPT, world: World) -> None:
    for weight in (model.token_embedding.weight, model.blocks[0].attention.query.w1, model.final_norm.weight):
        assert all_finite(weight)
        for place in (0, -1):  # in the first process's part, and in the last one's
            whole = full(weight).clone()
            whole.view(-1)[place] = float("nan")
            fill(weight, whole)
            assert not all_finite(weight)
            whole.view(-1)[place] = 0
            fill(weight, whole)
    last = world.rank == world.size - 1
    assert not all_finite(torch.tensor(float("inf") if last else 0.0))
    assert all_finite(torch.zeros(2))


def check_checkpointing(mode: str | None, world: World) -> None:
    """Activation checkpointing changes no bit of loss or gradient, with dropout, and no parameter's name."""
    found = []
    for again in (False, True):
        model = GPT(ModelConfig(**{**MODEL.__dict__, "dropout": 0.3}), seed=5)
        loss = spread(model, settings(mode, activation_checkpointing=again), world)
        torch.manual_seed(6 + world.rank)
        value = backward(loss, world, 0)
        found.append({"": value} | {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() == {"", *(name for name, _ in GPT(MODEL).named_parameters())}
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def main(file: str, *modes: str) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    results = {}
    with joined("cpu") as world:
        check_world(world)
        for mode in modes:
            results[mode], model, loss, optimizer = train(mode, world)
            check_fill(model, loss, optimizer)
            check_finite(model, world)
            check_precision(mode, world)
            check_checkpointing(mode, world)
        if world.main:
            Path(file).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
