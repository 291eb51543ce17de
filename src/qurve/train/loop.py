"""The training loop: flat, top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qurve.analysis.attention_logits import recording
from qurve.config import content_hash, to_json
from qurve.data import order
from qurve.data.loader import TokenData
from qurve.errors import BadInput, Diverged, QurveError, Stopped
from qurve.files import claimed
from qurve.model.gpt import GPT
from qurve.model.init import stream_seed
from qurve.projections.module import set_impl
from qurve.runfolder import RunFolder, Status
from qurve.train.checkpoint import load_checkpoint, prune, save_checkpoint
from qurve.train.config import ABOVE_BOUND, RunConfig
from qurve.train.distributed import (
    ALONE,
    World,
    accumulating,
    all_finite,
    first_non_finite,
    gradient_norm,
    lost_connection,
    spread,
)
from qurve.train.dynamics import measure_dynamics
from qurve.train.optim import build_optimizer
from qurve.train.progress import Progress
from qurve.train.resume import Resume, decide, find_checkpoint
from qurve.train.runtime import (
    autocast,
    describe,
    forget_peak_memory,
    machine_settings,
    no_compiler,
    peak_memory,
)
from qurve.train.schedule import learning_rate
from qurve.train.stopping import StopRequest, how_it_ended, listening
from qurve.train.trackers import Mirror
from qurve.train.windows import Batch, batch, counted, evaluation_windows, training_stream, training_windows

LossFunction = Callable[..., Tensor]

LOGIT_WINDOWS = 8
"""Windows of an evaluation on which attention's logits are measured."""


@dataclass
class Training:
    """What a training works with."""

    config: RunConfig
    run: RunFolder
    data: TokenData
    world: World
    progress: Progress
    model: GPT
    loss_module: nn.Module
    optimizer: torch.optim.Optimizer
    mirror: Mirror

    def record(self, line: dict[str, Any]) -> None:
        """A line of the metrics, written by the first process alone."""
        if self.world.main:
            self.run.append(line)
            self.mirror.log(line)


def train(
    config: RunConfig,
    out: str | Path,
    data: TokenData,
    progress: Progress | None = None,
    *,
    resume: Resume = "never",
    changed: Sequence[str] = (),
    world: World = ALONE,
) -> RunFolder:
    """Train one model into a run folder and return the folder.

    `config` is resolved against this machine and `data` first. `resume="auto"` continues what the folder holds from its
    newest complete checkpoint, bit by bit as if it had never stopped; `changed` names the fields that may have changed.
    Every process of `world` calls this with the same arguments.

    Raises `BadInput` before anything is created or changed; `Diverged` when a loss, a gradient or a weight stops being
    finite or the loss stays above its bound, before that touches weights or checkpoints; `Stopped` after a SIGTERM or a
    Ctrl-C, with a checkpoint of the last step. `status.json` says which.
    """
    wanted, run, progress = config, RunFolder(out), progress or Progress()
    with contextlib.ExitStack() as held:
        if resume == "never":
            run.refuse_used()
        is_there = run.path.is_dir()
        if is_there and world.main:
            held.enter_context(claimed(run.path))  # from here on, what is found there stays as it is
        config, changes = decide(wanted, run, data, resume, changed, world)
        is_new, step, above = not run.is_begun(), 0, 0
        world.wait()
        if not is_new and run.status()["status"] == "finished" and run.last_step() >= config.train.updates:
            progress.note(f"{run.path} is finished: it made {run.last_step()} steps")
            return run
        if not is_new and world.main:
            try:
                step, above = find_checkpoint(run, config, changes, data, progress.note)
            except QurveError:
                world.from_main(-1)
                world.from_main(0)
                raise
        step, above = world.from_main(step), world.from_main(above)
        if step < 0:
            raise QurveError("the first process refuses to go on; its message says why")
        if step > config.train.updates:
            progress.note(f"{run.path} is past step {config.train.updates}: its checkpoint is of step {step}")
            return run

        written = to_json(config), content_hash(config), describe(config, world)
        begun = is_new
        if is_new and world.main:
            run.make()
            if not is_there:
                held.enter_context(claimed(run.path))
            run.create(*written)
        status: Status = "failed"
        try:
            held.enter_context(machine_settings(config))
            stop = held.enter_context(listening(say=world.main and progress.speaks))
            measures_memory = forget_peak_memory(config.train.device)
            model = GPT(config.model, seed=config.train.seed).to(config.train.device)
            set_impl(model, config.train.head_impl)
            loss_module = spread(model, config.train, world)
            optimizer = build_optimizer(model, config.train)
            if step:
                load_checkpoint(run.checkpoint(step), model, optimizer)
            if not is_new and world.main:
                run.go_on(step, *written, changes)
                progress.note(f"continuing {run.path} after step {step}")
            begun = True
            world.wait()
            if wanted.train.compile and not config.train.compile:
                progress.note(no_compiler())
            trackers, first = config.train.trackers if world.main else (), step + 1 if step else 0
            mirror = Mirror.open(trackers, run, config, first, progress.note)
            held.callback(lambda: mirror.close(status))
            training = Training(config, run, data, world, progress, model, loss_module, optimizer, mirror)
            _train(training, step, above, stop)
            status = "finished"
            if world.main:
                if measures_memory:  # of this process alone, and of the part of the run that it made
                    run.add_to_environment({"peak_memory_bytes": peak_memory(config.train.device)})
                last, planned = config.train.updates, config.train.steps
                why = f"stopped at step {last} of {planned}, as --stop-at asked" if last < planned else ""
                run.set_status(status, step=last, why=why)
            world.wait()
        except BaseException as raised:
            error = in_words(raised, run, world)
            status = how_it_ended(error)
            if begun and world.main:
                _set_status(run, status, error)
            if error is not raised:
                raise error from raised
            raise
        finally:
            progress.finish()
    return run


def _train(training: Training, step: int, above: int, stop: StopRequest) -> None:
    """Go on after `step`; `above` counts the steps in a row, up to it, whose loss was above the bound.

    Each round settles a step (evaluation, checkpoint), then makes the next update.
    """
    config, run, data, world = training.config, training.run, training.data, training.world
    model, optimizer = training.model, training.optimizer
    settings, train_split = config.train, data.split("train")
    example = training_windows(config, data, 0)[1][0]
    loss_of = prepare_loss(training, batch(config, train_split, example, training_stream(config, 1)))
    last = run.train_lines()[-1] if step and world.main else {"seconds": 0.0, "tokens": 0}
    seconds, tokens = last["seconds"], last["tokens"]
    saved = step
    training.progress.start(settings.updates, settings.log_every, step)

    while True:
        is_last = step == settings.updates
        stopping = stop.agreed(world)
        if not stopping and (is_last or step % config.eval.every == 0):
            evaluate(training, loss_of, step, stop)
            stopping = stop.agreed(world)
        if step > saved and (is_last or stopping or step % config.checkpoint_every == 0):
            for name, parameter in model.named_parameters():
                if not all_finite(parameter):
                    raise Diverged(f"step {step}: the weight {name} is not finite")
            measured = {line["step"]: line["loss"] for line in run.eval_lines()}
            facts = {"order_position": step, "loss_above_bound": above, "val_loss": measured.get(step)}
            facts |= {"config_hash": run.config_json()[1], "data_fingerprint": data.fingerprint}
            save_checkpoint(run, step, model, optimizer, facts, world)
            if world.main:
                prune(run, settings)
            saved = step
        if stopping:
            raise Stopped(f"stopped after step {step}, which is saved" if step else "stopped before the first step")
        if is_last:
            return
        step += 1
        started = time.perf_counter()

        # The step's windows, in micro-batches, dealt to the processes in turn. Each part's mean is weighted by its
        # share of the counted targets, so that the accumulated gradient, which is averaged over the processes, is that
        # of the whole step.
        starts, micro_batches = training_windows(config, data, step - 1)
        stream = training_stream(config, step)
        counts = [counted(config, part, stream) for part in micro_batches]
        mine = range(world.rank, len(micro_batches), world.size)
        loss = torch.zeros((), device=settings.device)
        for place in mine:
            # Random numbers (dropout) are a function of seed, step and place: there is no state to lose.
            torch.manual_seed(stream_seed(settings.seed, f"dropout/{step}/{place}"))
            given = batch(config, train_split, micro_batches[place], stream)
            with accumulating(training.loss_module, last=place == mine[-1]):
                with autocast(config):
                    part = loss_of(*given) * (counts[place] / sum(counts) * world.size)
                torch.autograd.backward(part)
            loss += part.detach()
        loss = world.total(loss) / world.size

        # Checked before clipping: a norm that is not finite would spoil every gradient and hide whose it was.
        grad_norm = gradient_norm(model)
        if not (torch.isfinite(loss) and torch.isfinite(grad_norm)):
            raise Diverged(f"step {step}: {first_non_finite(model, loss)}")
        above = above + 1 if settings.loss_bound is not None and loss > settings.loss_bound else 0
        if above >= settings.loss_bound_steps:
            raise Diverged(f"step {step}: {ABOVE_BOUND} {settings.loss_bound} for {above} steps in a row")
        dynamics = {}
        if settings.dynamics_every and (step == 1 or step % settings.dynamics_every == 0):
            paused = time.perf_counter()  # the device is at rest: it was asked for the loss
            dynamics["dynamics"] = measure_dynamics(config, data, model, training.loss_module)
            started += time.perf_counter() - paused
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), settings.grad_clip or math.inf, grad_norm)

        rate = learning_rate(settings, step - 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()

        line: dict[str, Any] = {"step": step, "loss": loss.item(), "lr": rate, "grad_norm": grad_norm.item()}
        seconds += time.perf_counter() - started
        tokens += settings.tokens_per_step
        line |= {"tokens": tokens, "seconds": seconds}
        line |= {"batch_sha": order.batch_sha(starts, data.fingerprint), **dynamics}
        training.record(line)
        training.progress.updated(line)


# ---------------------------------------------------------------------------------------------------------- evaluation


def evaluate(training: Training, loss_of: LossFunction, step: int, stop: StopRequest) -> None:
    """Measure the loss after `step` on every split that was not measured yet; leaves off when asked to stop."""
    run, world, splits = training.run, training.world, training.config.eval.splits
    measured = {line["split"] for line in run.metrics() if "split" in line and line["step"] == step}
    done = world.from_main(sum(1 << place for place, split in enumerate(splits) if split in measured))
    for place, split in enumerate(splits):
        if not done >> place & 1:
            found = evaluate_loss(training, loss_of, split, step, stop)
            if found is None:
                return
            if not math.isfinite(found["loss"]):
                what = first_non_finite(training.model, torch.tensor(found["loss"]))
                raise Diverged(f"evaluation on {split} after step {step}: {what}")
            line: dict[str, Any] = {"step": step, "split": split, **found}
            if split == "val" and training.config.eval.attention_logits:
                line["max_logit"] = largest_attention_logits(training, step)
            training.record(line)
            training.progress.evaluated(line)


@torch.no_grad()
def evaluate_loss(
    training: Training, loss_of: LossFunction, split: str, step: int, stop: StopRequest
) -> dict[str, Any] | None:
    """Mean loss over the targets of the evaluation's windows, and each expert's share of their tokens, by block.

    Weights, gradients, random numbers stay as they were. None when this process is alone and was asked to stop (several
    would have to agree on it at every pass).
    """
    config, data, world, model = training.config, training.data, training.world, training.model
    starts, context = evaluation_windows(config, data, split, step), config.model.context
    size = config.train.micro_batch or config.sequences
    parts = [starts[begin : begin + size] for begin in range(0, len(starts), size)]
    # Summed on the device, in float64: to ask for each part's loss would have a GPU wait for the next part's launch.
    total, usage = torch.zeros((), dtype=torch.float64, device=config.train.device), dict[int, Tensor]()
    model.eval()
    try:
        for place in range(world.rank, -(-len(parts) // world.size) * world.size, world.size):
            if stop.requested and world.size == 1:
                return None
            # Weights that are sharded are gathered by all processes together: those without a part left go along.
            part = parts[min(place, len(parts) - 1)]
            with autocast(config):
                loss = loss_of(*batch(config, data.split(split), part, split))
            is_mine = place < len(parts)
            total += loss.double() * (counted(config, part, split) / context) * is_mine
            for layer, usage_N in model.expert_usage.items():  # of all tokens, whichever the loss is on
                usage[layer] = usage.get(layer, 0) + usage_N.double() * (len(part) / len(starts) * is_mine)
    finally:
        model.train()
    summed = world.total(total).item()
    targets = counted(config, starts, split)
    found: dict[str, Any] = {"loss": summed / (targets / context), "tokens": targets}
    if usage:
        by_layer = {layer: world.total(usage_N).tolist() for layer, usage_N in usage.items()}
        found["expert_usage"] = [by_layer.get(layer, []) for layer in range(config.model.n_layers)]
    return found


@torch.no_grad()
def largest_attention_logits(training: Training, step: int) -> list[float | None]:
    """The largest attention logit of each block over the first windows of the evaluation on `val`, in its precision.

    Every process measures the same, along the way that gathers sharded weights; nothing here is compiled.
    """
    config, data, model = training.config, training.data, training.model
    starts = evaluation_windows(config, data, "val", step)[:LOGIT_WINDOWS]
    size = config.train.micro_batch or len(starts)
    model.eval()
    try:
        with recording(model) as largest, autocast(config):
            for begin in range(0, len(starts), size):
                training.loss_module(*batch(config, data.split("val"), starts[begin : begin + size], "val"))
    finally:
        model.train()
    most = torch.finfo(torch.float32).max  # what JSON can hold; the loss, which comes before, was finite
    return [None if logit is None else min(logit, most) for logit in largest.by_layer()]


# ------------------------------------------------------------------------------------------------------- loss, machine


def prepare_loss(training: Training, example: Batch) -> LossFunction:
    """The loss, compiled when the configuration says so; falls back to eager, and says it, when that fails.

    One forward and backward pass on `example` pays for the compilation here, apart from the training time; it leaves no
    gradient behind.
    """
    config, loss_module, progress = training.config, training.loss_module, training.progress
    if not config.train.compile:
        return loss_module
    from torch._inductor.exc import InductorError

    progress.note("compiling …")
    started = time.perf_counter()
    _forget_graphs_of_others(dataclasses.replace(config, train=dataclasses.replace(config.train, seed=0)))
    # Static shapes: which graph runs then never depends on what was compiled before in this process.
    compiled: LossFunction = torch.compile(loss_module, dynamic=False)
    outcome: dict[str, object] = {"compiled": True}
    try:
        with autocast(config):
            torch.autograd.backward(compiled(*example))
    except (torch._dynamo.exc.TorchDynamoException, InductorError) as error:
        if training.world.size > 1:
            raise  # the others may have compiled theirs: they would not run the same code
        compiled = loss_module
        reason = str(error).strip().splitlines()[0]
        outcome = {"compiled": False, "compile_error": reason}
        progress.note(f"torch.compile failed ({reason}); training runs eager, which is slower")
    training.model.zero_grad()
    if training.world.main:
        seconds = round(time.perf_counter() - started, 3)
        training.run.add_to_environment({**outcome, "compile_seconds": seconds})
    return compiled


@functools.lru_cache(maxsize=1)
def _forget_graphs_of_others(config: RunConfig) -> None:
    """Drop what this process compiled for another configuration; the next seed of the same one compiles nothing.

    torch compiles a function at most eight times in a process, and then runs it eager with no more than a warning. An
    arm takes two or three, for training, for evaluation and for its last part: the fourth of a study would go eager.
    """
    torch.compiler.reset()


def in_words(error: BaseException, run: RunFolder, world: World) -> BaseException:
    """What the user is told of an error that is not our own: what happened, what is left, and how to go on."""
    steps = run.checkpoint_steps()
    left = f"the newest checkpoint is of step {steps[-1]}" if steps else "there is no checkpoint yet"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return QurveError(f"{run.path}: the disk is full ({error}); {left}. Make room, then go on with --resume auto")
    if world.size > 1 and isinstance(error, RuntimeError) and lost_connection(error):
        reason = str(error).strip().splitlines()[0]
        return QurveError(f"another process of this run has ended or cannot be reached; {left} ({reason})")
    return error


def _set_status(run: RunFolder, status: Status, error: BaseException) -> None:
    why = str(error) or ("interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__)
    try:
        run.set_status(status, step=run.last_step(), why=why)
    except (OSError, BadInput) as trouble:  # what went wrong first is the error, and it is on its way
        error.add_note(f"{run.status_file} could not be written: {trouble}")
