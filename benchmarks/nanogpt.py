"""nanoGPT's model as the other side of a benchmark: from a checkout of it, whose own `model.py` is imported."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from qurve.convert import load_checkpoint
from qurve.model.config import ModelConfig

TOLERANCE = 1e-5


def load(checkout: Path) -> ModuleType:
    """Its `model.py`. `SystemExit` where there is none."""
    file = checkout / "model.py"
    if not file.is_file():
        raise SystemExit(f"{checkout} is no checkout of nanoGPT: it has no model.py")
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


def build(nanogpt: ModuleType, config: ModelConfig) -> nn.Module:
    """Its model of the shape that `config` has, without biases and dropout."""
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        model: nn.Module = nanogpt.GPT(nanogpt.GPTConfig(**_arguments(config)))
    return model


def optimizer(model: nn.Module, device: str) -> torch.optim.Optimizer:
    """The one that its training script configures."""
    with contextlib.redirect_stdout(io.StringIO()):
        found: torch.optim.Optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device)  # type: ignore[operator]
    return found


def same_loss(nanogpt: ModuleType, config: ModelConfig, batch: tuple[Tensor, Tensor]) -> float:
    """How much its loss and ours differ, given equal weights, in float32 on the CPU. `SystemExit` where too much."""
    theirs = build(nanogpt, config)
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"model": theirs.state_dict(), "model_args": _arguments(config)}, f"{folder}/ckpt.pt")
        ours = load_checkpoint(f"{folder}/ckpt.pt")
    with torch.no_grad():
        difference = abs(theirs(*batch)[1].item() - ours.loss(*batch).item())
    if difference > TOLERANCE:
        raise SystemExit(f"the two models do not compute the same: their losses differ by {difference}")
    return difference


def _arguments(config: ModelConfig) -> dict[str, object]:
    return {
        "block_size": config.context,
        "vocab_size": config.vocab_size,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "n_embd": config.d_model,
        "dropout": 0.0,
        "bias": False,
    }
