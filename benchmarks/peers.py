"""nanoGPT's model, or the paper's authors', as the other side of a benchmark: from a checkout, whose own `model.py` is
imported."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from qurve.convert import load_checkpoint
from qurve.model.config import ModelConfig

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Peer:
    """Whose model it is (`nanogpt` or `authors`), and its `model.py`."""

    name: str
    module: ModuleType


def load(checkout: Path, name: str = "nanogpt") -> Peer:
    """The peer in a checkout. `SystemExit` where there is none."""
    file = checkout / "model.py"
    if not file.is_file():
        raise SystemExit(f"{checkout} is no checkout of that project ({name}): it has no model.py")
    spec = importlib.util.spec_from_file_location(f"{name}_model", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return Peer(name, module)


def build(peer: Peer, config: ModelConfig) -> nn.Module:
    """Its model of the shape that `config` has, without biases and dropout; the authors' with their nonlinear query."""
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        model: nn.Module = peer.module.GPT(peer.module.GPTConfig(**_arguments(peer, config)))
    return model


def optimizer(model: nn.Module, device: str) -> torch.optim.Optimizer:
    """The one that its training script configures."""
    with contextlib.redirect_stdout(io.StringIO()):
        found: torch.optim.Optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device)  # type: ignore[operator]
    return found


def same_loss(peer: Peer, config: ModelConfig, batch: tuple[Tensor, Tensor]) -> float:
    """How much its loss and ours differ, given equal weights, in float32 on the CPU. `SystemExit` where too much."""
    theirs = build(peer, config)
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"model": theirs.state_dict(), "model_args": _arguments(peer, config)}, f"{folder}/ckpt.pt")
        ours = load_checkpoint(f"{folder}/ckpt.pt")
    with torch.no_grad():
        difference = abs(theirs(*batch)[1].item() - ours.loss(*batch).item())
    if difference > TOLERANCE:
        raise SystemExit(f"the two models do not compute the same: their losses differ by {difference}")
    return difference


def _arguments(peer: Peer, config: ModelConfig) -> dict[str, Any]:
    sizes = {
        "block_size": config.context,
        "vocab_size": config.vocab_size,
        "n_layer": config.n_layers,
        "n_embd": config.d_model,
        "dropout": 0.0,
        "bias": False,
    }
    if peer.name == "nanogpt":
        return sizes | {"n_head": config.n_heads}
    return sizes | {
        "num_heads": config.n_heads,
        "head_size": config.head_width,
        "mlp_hidden_size": config.d_ff,
        "query_mode": "residual_gelu",
        "scale": config.head_width**-0.5 / 2,  # the half of the layer's formula stands in the scale there
    }
