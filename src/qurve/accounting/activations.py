"""The memory that training needs between the forward and the backward pass, measured without using it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qurve.errors import BadInput
from qurve.model.config import ModelConfig

if TYPE_CHECKING:
    from torch import nn


def activation_bytes(config: ModelConfig, batch: int, length: int, precision: str = "float32") -> int:
    """Bytes that autograd saves for the backward pass of `GPT(config).loss` in training, on `[batch, length]` tokens.

    Every storage counts once and whole. The parameters themselves do not count; copies of them that are saved do:
    several matrices stacked into one, or, with `bf16`, cast by autocast. Gradients, the optimiser, and what a pass
    needs for a moment only are not in it. With `torch.compile` or activation checkpointing, less is saved.

    There is no formula to go wrong: the eager model runs once on tensors that have shapes and no memory, as it would on
    the CPU (fused attention: no matrix of weights is saved; many logits are never held, and the gradients that
    `qurve.ops.cross_entropy` makes at once count instead), and what is saved is added up. Of a mixture of experts the
    sum is the same for every routing.
    """
    if precision not in ("float32", "bf16"):
        raise BadInput(f"precision = {precision!r}: activations are counted in float32 or bf16")
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from qurve.accounting.routing import RoutingWithoutValues
    from qurve.model.gpt import GPT

    with FakeTensorMode(), RoutingWithoutValues():
        model = GPT(config).train()
        ids_BT = torch.zeros(batch, length, dtype=torch.long)
        prefix_B = torch.ones(batch, dtype=torch.long) if config.attends == "prefix" else None
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return saved_bytes(model, ids_BT, ids_BT, prefix_B)


def saved_bytes(model: nn.Module, *inputs: object) -> int:
    """What autograd saves for the backward pass of `model.loss(*inputs)`, beside the parameters and buffers."""
    import torch

    owned = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    saved = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage  # kept, so that no other one takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.loss(*inputs)  # type: ignore[operator]
    return sum(storage.nbytes() for address, storage in saved.items() if address not in owned)
