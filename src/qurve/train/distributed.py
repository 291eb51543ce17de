"""One training on many processes: who they are, what they agree on, and how the model is spread over them.

Every function that says *collective* must be called by all processes, in the same order; one that stays away keeps the
others waiting until the timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from qurve.errors import BadInput
from qurve.model.gpt import GPT
from qurve.train.config import TrainConfig

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""What torchrun tells each process, in the order of `World`'s fields."""

TIMEOUT = datetime.timedelta(minutes=10)
"""How long a process waits for the others: longer than any step, evaluation or checkpoint should take."""


@dataclass(frozen=True)
class World:
    """The processes of one training, seen by one of them. The default is a lone process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Place among the processes of this machine; also the index of this process's GPU."""
    local_size: int = 1
    """How many processes this machine runs."""

    @property
    def main(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, the same bits on each. Collective."""
        if self.size == 1:
            return tensor
        summed = tensor.detach().clone()
        dist.all_reduce(summed)
        return summed

    def from_main(self, value: int) -> int:
        """What the main process gave as `value`; the others' is ignored. Collective."""
        if self.size == 1:
            return value
        sent = torch.tensor(value, dtype=torch.int64)
        dist.broadcast(sent, src=0)
        return int(sent)

    def wait(self) -> None:
        """Return when every process has come here. Collective."""
        self.total(torch.zeros(()))  # on the CPU, whatever the run's device: `barrier` would occupy the GPU


ALONE = World()


def lost_connection(error: RuntimeError) -> bool:
    """Whether an error says that another process is gone, or silent for too long."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def launched() -> bool:
    """Whether torchrun started this process."""
    return set(TORCHRUN) <= os.environ.keys()


@contextlib.contextmanager
def joined(device: str) -> Iterator[World]:
    """Meet the other processes that torchrun started, for the time of the block; a lone process is its own world.

    `device` is `cpu` (gloo) or `cuda` (NCCL; each process takes the GPU of its local rank). Raises `BadInput` when the
    machine has no GPU for this process. After an error in the block the process is expected to exit. Collective.
    """
    if not launched():
        yield ALONE
        return
    world = World(*(int(os.environ[name]) for name in TORCHRUN))
    backend = "gloo"
    if device != "cpu":
        _take_gpu(device, world)
        backend = "cpu:gloo,cuda:nccl"  # agreements travel as CPU tensors and leave the GPU alone
    store, _, _ = next(rendezvous("env://", timeout=TIMEOUT))
    if world.local_size == world.size:
        # After a restart torchrun's store still holds the addresses of the dead (torch 2.13): each attempt takes a
        # corner of its own. Restarts are counted by machine, so that several machines cannot go by them.
        store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=TIMEOUT)
    yield world
    # Not after an error: the process's own message must come before the others' "connection closed", whose exit would
    # have torchrun end this one, and NCCL may wait for ever for what the others never sent. Its exit closes everything.
    dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End this process of a job, with this exit code and without the interpreter's teardown.

    Gloo's threads outlive the process group: FSDP's meshes keep it, and so does the import of `torch.distributed.nn`
    that DDP makes. One that lets go of its last message during the teardown aborts the process (exit code -6), and
    torchrun then calls a finished training failed. See https://github.com/pytorch/pytorch/pull/179291.
    """
    atexit._run_exitfuncs()  # what was promised to others, as in a process that multiprocessing forked
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError, ValueError):  # nobody reads it any more, or it is closed
            stream.flush()
    os._exit(code)


def _take_gpu(device: str, world: World) -> None:
    if device != "cuda":
        raise BadInput(f"train.device = {device!r}: torchrun gives each process a GPU of its own; say cuda")
    if world.local_rank >= (found := torch.cuda.device_count()):
        raise BadInput(
            f"process {world.local_rank + 1} of this machine has no GPU: torch finds {found} here; "
            "start at most as many processes (torchrun --nproc-per-node)"
        )
    torch.cuda.set_device(world.local_rank)


# --------------------------------------------------------------------------------------------------------------- model


class Loss(nn.Module):
    """A model's mean loss as a module, so that DDP, FSDP2 and `torch.compile` all wrap one thing."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BT: Tensor, targets_BT: Tensor, prefix_B: Tensor | None = None) -> Tensor:
        return self.model.loss(ids_BT, targets_BT, prefix_B)


def spread(model: GPT, settings: TrainConfig, world: World) -> nn.Module:
    """`Loss(model)`, spread over the processes as `settings.parallel` says. Changes `model` in place. Collective.

    Build the optimiser afterwards, from `model.parameters()`: under `fsdp` they are replaced by sharded ones. Their
    names stay. Take losses, also in evaluation, from the returned module alone, on every process equally often: its
    calls gather the weights. Gradients come out averaged over the processes.
    """
    if settings.activation_checkpointing:
        for block in model.blocks:
            # On the instance, not a wrapping module: parameters keep their names, and checkpoints fit any run.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    loss = Loss(model)
    if world.size == 1:
        return loss
    if settings.parallel == "ddp":
        return DistributedDataParallel(loss, gradient_as_bucket_view=True)

    # No MixedPrecisionPolicy: it would round gains, biases and the residual stream to bf16, which autocast keeps in
    # float32, and a run would depend on the number of its processes. The root holds both embeddings, so that a tied one
    # has both its uses there; it too is resharded after the forward pass, or evaluation would leave it gathered.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(model.token_embedding.weight.device.type, (world.size,))
    for part in (*model.blocks, loss):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    return loss


@contextlib.contextmanager
def accumulating(loss: nn.Module, last: bool) -> Iterator[None]:
    """Around the forward and backward pass of one micro-batch: processes exchange gradients after the `last` alone."""
    if (sync := getattr(loss, "set_requires_gradient_sync", None)) is not None:  # FSDP
        sync(last)
    with contextlib.nullcontext() if last or not isinstance(loss, DistributedDataParallel) else loss.no_sync():
        yield


# ------------------------------------------------------------------------------------------------------------- tensors


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether this process holds a part of `tensor` alone. Asked in this way since a lone process, whose tensors are
    whole, starts a second sooner without the import of `DTensor`.
    """
    return hasattr(tensor, "full_tensor")


@torch.no_grad()
def full(tensor: Tensor) -> Tensor:
    """A parameter, gradient, norm or optimiser state as one whole tensor on the CPU. Collective.

    Memory is shared with `tensor` where that is whole and on the CPU already.
    """
    whole = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole.detach().cpu()


@torch.no_grad()
def fill(tensor: Tensor, whole: Tensor) -> None:
    """The inverse of `full`: copy this process's part of `whole` into `tensor`, in place. Nothing is sent.

    Raises `ValueError` when shape or dtype differ.
    """
    wanted, given = (f"{list(t.shape)} of {t.dtype}" for t in (tensor, whole))
    if wanted != given:
        raise ValueError(f"a tensor {wanted} cannot be filled from one {given}")
    if is_sharded(tensor):
        from torch.distributed.tensor import distribute_tensor

        part = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor, whole = tensor.to_local(), part.to_local()
    tensor.copy_(whole)


@torch.no_grad()
def all_finite(tensor: Tensor) -> bool:
    """Whether every number of `tensor` is finite, in all parts and on all processes. Collective."""
    local = tensor.to_local() if is_sharded(tensor) else tensor
    finite = torch.isfinite(local).all().to("cpu", torch.int64)
    if dist.is_initialized():
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    return bool(finite)


def first_non_finite(model: GPT, loss: Tensor) -> str:
    """What stopped being finite, by name: a weight, else the loss, else a gradient. Collective."""
    for name, parameter in model.named_parameters():
        if not all_finite(parameter):
            return f"the weight {name} is not finite"
    if not torch.isfinite(loss):
        return f"the loss is {loss.item()}"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not all_finite(parameter.grad):
            return f"the gradient of {name} is not finite"
    return "the gradient's norm is not finite"


def gradient_norm(module: nn.Module) -> Tensor:
    """The norm of all gradients together, whole on every process. Collective."""
    norm = torch.nn.utils.get_total_norm(p.grad for p in module.parameters() if p.grad is not None)
    return norm.full_tensor() if is_sharded(norm) else norm
