"""The training loop: flat, top to bottom."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qurve.config import content_hash, to_json
from qurve.data import order
from qurve.data.loader import TokenData, TokenSplit
from qurve.errors import BadInput, Diverged
from qurve.model.gpt import GPT
from qurve.model.init import stream_seed
from qurve.runfolder import RunFolder, Status
from qurve.train.checkpoint import save_checkpoint
from qurve.train.config import RunConfig
from qurve.train.optim import build_optimizer
from qurve.train.progress import Progress
from qurve.train.runtime import describe, no_compiler, resolve
from qurve.train.schedule import learning_rate

Starts = npt.NDArray[np.int64]
LossFunction = Callable[[Tensor, Tensor], Tensor]


def train(config: RunConfig, out: str | Path, data: TokenData, progress: Progress | None = None) -> RunFolder:
    """Train one model into a new run folder and return the folder.

    `config` is resolved against this machine and `data` first. Raises `BadInput` before anything is created, and
    `Diverged` when a loss, a gradient or a weight stops being finite: no update and no checkpoint is made from it, and
    `status.json` says what it was.
    """
    wanted, run, progress = config, RunFolder(out), progress or Progress()
    config = resolve(wanted, data)
    check_windows(config, data)
    run.create(to_json(config), content_hash(config), describe(config))
    if wanted.train.compile and not config.train.compile:
        progress.note(no_compiler())
    try:
        with machine_settings(config):
            _train(config, run, data, progress)
    except BaseException as error:
        status: Status = "failed"
        if isinstance(error, (Diverged, KeyboardInterrupt)):
            status = "diverged" if isinstance(error, Diverged) else "stopped"
        run.set_status(status, step=run.last_step(), why=str(error) or type(error).__name__)
        raise
    finally:
        progress.finish()
    run.set_status("finished", step=config.train.updates)
    return run


def _train(config: RunConfig, run: RunFolder, data: TokenData, progress: Progress) -> None:
    settings, device, sequences = config.train, config.train.device, config.sequences
    train_split = data.split("train")

    model = GPT(config.model, seed=settings.seed).to(device)
    # After the model: building it draws numbers, more or fewer by architecture, and dropout starts alike in every arm.
    torch.manual_seed(stream_seed(settings.seed, "dropout"))
    optimizer = build_optimizer(model, settings)
    loss_of = prepare_loss(
        model, config, batch(config, train_split, training_windows(config, data, 0)[0]), run, progress
    )

    def evaluate(step: int) -> None:
        for split in config.eval.splits:
            measured = evaluate_loss(model, loss_of, config, data, split, step)
            if not math.isfinite(measured["loss"]):
                what = first_non_finite(model, torch.tensor(measured["loss"]))
                raise Diverged(f"evaluation on {split} after step {step}: {what}")
            line: dict[str, Any] = {"step": step, "split": split, **measured}
            run.append(line)
            progress.evaluated(line)

    progress.start(settings.updates, settings.log_every)
    evaluate(0)
    seconds = 0.0
    for step in range(1, settings.updates + 1):
        started = time.perf_counter()

        # The step's windows, in micro-batches. Each part's mean is weighted by its share, so that the accumulated
        # gradient is that of the whole step.
        starts, micro_batches = training_windows(config, data, step - 1)
        loss = torch.zeros((), device=device)
        for micro_batch in micro_batches:
            with autocast(config):
                part = loss_of(*batch(config, train_split, micro_batch)) * (len(micro_batch) / sequences)
            torch.autograd.backward(part)
            loss += part.detach()

        # Checked before clipping: a norm that is not finite would spoil every gradient and hide whose it was.
        grad_norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
        if not (torch.isfinite(loss) and torch.isfinite(grad_norm)):
            raise Diverged(f"step {step}: {first_non_finite(model, loss)}")
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), settings.grad_clip or math.inf, grad_norm)

        rate = learning_rate(settings, step - 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()

        line: dict[str, Any] = {"step": step, "loss": loss.item(), "lr": rate, "grad_norm": grad_norm.item()}
        seconds += time.perf_counter() - started
        line |= {"tokens": step * settings.tokens_per_step, "seconds": seconds}
        line |= {"batch_sha": order.batch_sha(starts, data.fingerprint)}
        run.append(line)
        progress.updated(line)

        if step % config.eval.every == 0 or step == settings.updates:
            evaluate(step)
        if step == settings.updates or (settings.checkpoint_every and step % settings.checkpoint_every == 0):
            if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
                raise Diverged(f"step {step}: {first_non_finite(model, loss)}")
            save_checkpoint(run, step, model)


# ------------------------------------------------------------------------------------------------------------- windows


def training_windows(config: RunConfig, data: TokenData, update: int) -> tuple[Starts, list[Starts]]:
    """Window starts of update `update` (from 0), `[sequences]`, and the same cut into micro-batches."""
    n_tokens, context, sequences = len(data.split("train")), config.model.context, config.sequences
    seed = config.train.seed if config.data.order_seed is None else config.data.order_seed
    if config.data.order == "paper":
        starts = order.paper_windows(n_tokens, update, context=context, sequences=sequences, seed=seed)
    else:
        starts = order.epoch_windows(n_tokens, update, context=context, sequences=sequences, seed=seed)
    return starts, np.split(starts, sequences // (config.train.micro_batch or sequences))


def evaluation_windows(config: RunConfig, data: TokenData, split: str, step: int) -> Starts:
    """Window starts of the evaluation after `step`: the same for every arm and seed."""
    context, count = config.model.context, config.eval.windows
    if config.data.order == "paper":
        sizes = len(data.split("train")), len(data.split("val"))
        return order.paper_eval_windows(*sizes, step // config.eval.every, split, context=context)[:count]
    return order.fixed_eval_windows(len(data.split(split)), context=context, count=count)


def check_windows(config: RunConfig, data: TokenData) -> None:
    """Raise `BadInput` now, not hours later, when some step or evaluation would have no windows."""
    for update in (0, config.train.updates - 1):
        training_windows(config, data, update)
    for split in config.eval.splits:
        if config.data.order == "paper" and split == "test":
            raise BadInput("eval.splits: the paper's evaluation tables cover train and val, not test")
        for step in (0, config.train.updates):
            evaluation_windows(config, data, split, step)


def batch(config: RunConfig, split: TokenSplit, starts: Starts) -> tuple[Tensor, Tensor]:
    """Inputs and targets `[N, T]` of the windows, on the run's device. `BadInput` for ids beyond the vocabulary."""
    inputs, targets = split.windows(starts, config.model.context)
    if (largest := max(inputs.max(), targets.max())) >= config.model.vocab_size:
        raise BadInput(
            f"the {split.name} split holds the id {largest}, and the vocabulary has {config.model.vocab_size}: "
            "the data is damaged; prepare it again"
        )
    return torch.from_numpy(inputs).to(config.train.device), torch.from_numpy(targets).to(config.train.device)


# ------------------------------------------------------------------------------------------------------- loss, machine


@torch.no_grad()
def evaluate_loss(
    model: GPT, loss_of: LossFunction, config: RunConfig, data: TokenData, split: str, step: int
) -> dict[str, float]:
    """Token-weighted mean loss over the evaluation's windows. Weights, gradients, random numbers stay as they were."""
    starts = evaluation_windows(config, data, split, step)
    size = config.train.micro_batch or config.sequences
    total = 0.0
    model.eval()
    for begin in range(0, len(starts), size):
        part = starts[begin : begin + size]
        with autocast(config):
            total += loss_of(*batch(config, data.split(split), part)).item() * len(part)
    model.train()
    return {"loss": total / len(starts), "tokens": len(starts) * config.model.context}


def prepare_loss(
    model: GPT, config: RunConfig, example: tuple[Tensor, Tensor], run: RunFolder, progress: Progress
) -> LossFunction:
    """The model's loss, compiled when the configuration says so; falls back to eager, and says it, when that fails.

    One forward and backward pass on `example` pays for the compilation here, apart from the training time; it leaves no
    gradient behind and gives the random numbers back.
    """
    if not config.train.compile:
        return model.loss
    from torch._inductor.exc import InductorError

    progress.note("compiling …")
    started = time.perf_counter()
    compiled: LossFunction = torch.compile(model.loss)
    outcome: dict[str, object] = {"compiled": True}
    try:
        with torch.random.fork_rng(), autocast(config):
            torch.autograd.backward(compiled(*example))
    except (torch._dynamo.exc.TorchDynamoException, InductorError) as error:
        compiled = model.loss
        reason = str(error).strip().splitlines()[0]
        outcome = {"compiled": False, "compile_error": reason}
        progress.note(f"torch.compile failed ({reason}); training runs eager, which is slower")
    model.zero_grad()
    run.add_to_environment({**outcome, "compile_seconds": round(time.perf_counter() - started, 3)})
    return compiled


def autocast(config: RunConfig) -> torch.autocast:
    kind = config.train.device.partition(":")[0]
    return torch.autocast(kind, torch.bfloat16, enabled=config.train.precision == "bf16")


def first_non_finite(model: GPT, loss: Tensor) -> str:
    """What stopped being finite, by name: a weight, else a gradient, else the loss."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            return f"the weight {name} is not finite"
    if not torch.isfinite(loss):
        return f"the loss is {loss.item()}"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            return f"the gradient of {name} is not finite"
    return "the gradient's norm is not finite"


@contextlib.contextmanager
def machine_settings(config: RunConfig) -> Iterator[None]:
    """Threads and, on the CPU, deterministic algorithms: the same run twice gives the same bits."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_num_threads(config.train.threads or threads)
    if config.train.device == "cpu":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
