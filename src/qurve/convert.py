"""Other people's checkpoints, read into our model: nanoGPT's `ckpt.pt`, and that of the paper's authors, who extend it.

A `ckpt.pt` is a pickled dict that holds `model` (a state dict, its keys perhaps prefixed by `torch.compile`) and
`model_args` (keyword arguments of the model's configuration, which has defaults for the rest). It is read with
`weights_only`: a file that holds code is refused, never run.
"""

from __future__ import annotations

import math
import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qurve.config import from_dict
from qurve.errors import BadInput
from qurve.model.config import ModelConfig
from qurve.projections import Bottleneck, Identity, Linear, ProjectionConfig, Residual

if TYPE_CHECKING:
    from torch import Tensor

    from qurve.model.gpt import GPT


def load_checkpoint(path: str | os.PathLike[str]) -> GPT:
    """The model of a nanoGPT or authors' `ckpt.pt`: float32, on the CPU, in evaluation mode.

    Its logits are the original model's. Raises `BadInput` naming the file and what is wrong with it: code inside,
    missing, unexpected or misshapen parameters, unknown `model_args`.
    """
    import torch

    from qurve.model.gpt import GPT

    file = Path(path)
    checkpoint = _read(file)
    try:
        config = model_config(checkpoint["model_args"])
        with torch.device("meta"):  # shapes alone: the file's tensors take the place of fresh ones
            model = GPT(config)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        theirs = _parameters(checkpoint["model"], config)
        _check_parameters(theirs, {key: _stacked([shapes[n] for n in ours]) for key, ours in _names(shapes).items()})
    except BadInput as error:
        raise BadInput(f"{file}: {error}") from None
    weights: dict[str, Tensor] = {}
    for key, ours in _names(shapes).items():
        parts = torch.split(theirs[key], [shapes[name][0] for name in ours])
        weights |= {name: part.to(torch.float32, copy=True) for name, part in zip(ours, parts, strict=True)}
    model.load_state_dict(weights, assign=True)
    return model.eval()


# -------------------------------------------------------------------------------------------------------- configuration


@dataclass(frozen=True)
class _NanoGPT:
    """nanoGPT's `model_args` and their defaults."""

    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True


@dataclass(frozen=True)
class _Authors:
    """Those of the authors' `model_args` that shape the model, and their defaults, which follow no other argument."""

    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    num_heads: int = 12
    n_embd: int = 768
    mlp_hidden_size: int = 3072
    dropout: float = 0.0
    bias: bool = False
    tie_weights: bool = True
    scale: float = 0.125
    query_mode: Literal["original", "identity", "residual", "residual_gelu"] = "original"


def model_config(model_args: Mapping[str, Any]) -> ModelConfig:
    """Our configuration of a model that theirs describes; `n_head` marks nanoGPT's, `num_heads` the authors'."""
    if "n_head" in model_args:
        nano = from_dict(_NanoGPT, _known(_NanoGPT, model_args), "model_args")
        return ModelConfig(
            n_layers=nano.n_layer,
            d_model=nano.n_embd,
            n_heads=nano.n_head,
            d_ff=4 * nano.n_embd,
            context=nano.block_size,
            vocab_size=nano.vocab_size,
            dropout=nano.dropout,
            bias=nano.bias,
        )
    args = from_dict(_Authors, _known(_Authors, model_args), "model_args")
    query, scale = _query(args)
    usual = args.n_embd >= args.num_heads >= 1 and math.isclose(scale, (args.n_embd // args.num_heads) ** -0.5)
    return ModelConfig(
        n_layers=args.n_layer,
        d_model=args.n_embd,
        n_heads=args.num_heads,
        d_ff=args.mlp_hidden_size,
        context=args.block_size,
        vocab_size=args.vocab_size,
        query=query,
        attention_scale=None if usual else scale,
        dropout=args.dropout,
        bias=args.bias,
        tie_embeddings=args.tie_weights,
    )


def _query(args: _Authors) -> tuple[ProjectionConfig, float]:
    """The query projection and the attention scale.

    They keep the half of `(x + f(x)) / 2` in the scale; we keep it in the layer, so that the scale is the usual one.
    """
    if args.query_mode == "residual_gelu":
        return Bottleneck(), 2 * args.scale
    if args.query_mode == "residual":
        return Residual(), 2 * args.scale
    return Identity() if args.query_mode == "identity" else Linear(), args.scale


def _known(cls: type[Any], model_args: Mapping[str, Any]) -> dict[str, Any]:
    """What shapes the model; the authors' arguments hold the training's too."""
    return {f.name: model_args[f.name] for f in fields(cls) if f.name in model_args}


# ----------------------------------------------------------------------------------------------------------- parameters

_OUTSIDE_BLOCKS = {"token_embedding": "wte", "position_embedding": "wpe", "final_norm": "ln_f"}
_IN_BLOCK = {
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attention.output": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_BOTTLENECK = {
    "w1": "residual_in.weight",
    "b1": "residual_in.bias",
    "w2": "residual_out.weight",
    "b2": "residual_out.bias",
    "pre_gain": "residual_rmsnorm_input.weight",
    "post_gain": "residual_layernorm_output.weight",
    "post_bias": "residual_layernorm_output.bias",
}


def _names(ours: Iterable[str]) -> dict[str, list[str]]:
    """Their name -> our names: one, or those whose rows theirs stacks (`c_attn`: queries where linear, keys, values).

    Our attention registers its projections in that order, so the order of `ours` is the order of the rows.
    """
    names: dict[str, list[str]] = {}
    for name in ours:
        names.setdefault(_their_name(name), []).append(name)
    return names


def _their_name(name: str) -> str:
    if name == "head.weight":
        return "lm_head.weight"
    module, _, kind = name.rpartition(".")
    if not module.startswith("blocks."):
        return f"transformer.{_OUTSIDE_BLOCKS[module]}.{kind}"
    _, layer, inner = module.split(".", 2)
    if inner in _IN_BLOCK:
        return f"transformer.h.{layer}.{_IN_BLOCK[inner]}.{kind}"
    return f"transformer.h.{layer}.attn.{_BOTTLENECK.get(kind, f'c_attn.{kind}')}"


def _parameters(state: Mapping[str, Any], config: ModelConfig) -> dict[str, Tensor]:
    """The file's parameters by their plain names: no prefix of `torch.compile`, no causal mask, a tied head once."""
    for key, value in state.items():
        if not hasattr(value, "shape"):
            raise BadInput(f"its parameter {key!r} is no tensor but {type(value).__name__}")
    state = {str(key).removeprefix("_orig_mod."): value for key, value in state.items()}
    # Written where torch had no fused attention: the causal mask, which is no parameter.
    state = {key: value for key, value in state.items() if not re.fullmatch(r"transformer\.h\.\d+\.attn\.bias", key)}
    if config.tie_embeddings:
        head, embedding = state.pop("lm_head.weight", None), state.get("transformer.wte.weight")
        if head is not None and embedding is not None and not (head is embedding or head.equal(embedding)):
            raise BadInput("lm_head.weight and transformer.wte.weight differ, yet model_args tie them")
    return state


def _stacked(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _check_parameters(theirs: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a state dict that is not exactly the model that its `model_args` describe."""
    shapes = {key: tuple(tensor.shape) for key, tensor in theirs.items()}
    misshapen = [key for key in expected if key in shapes and shapes[key] != expected[key]]
    problems = {
        "missing": [key for key in expected if key not in shapes],
        "unexpected": [key for key in shapes if key not in expected],
        "of another shape": [f"{key} {list(shapes[key])} instead of {list(expected[key])}" for key in misshapen],
    }
    told = [f"{what}: {_some(keys)}" for what, keys in problems.items() if keys]
    if told:
        raise BadInput(f"its parameters are not those of its model_args; {'; '.join(told)}")


def _some(keys: list[str], most: int = 6) -> str:
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")


# ----------------------------------------------------------------------------------------------------------------- file


def _read(file: Path) -> dict[str, Any]:
    """The checkpoint's dict; the tensors are mapped where the format allows it, so that an optimiser's cost nothing."""
    import pickle

    import torch

    if not file.is_file():
        raise BadInput(f"{file} is a folder; name the ckpt.pt in it" if file.is_dir() else f"{file} does not exist")
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:
        code = re.search(r"GLOBAL ([\w.]+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if code is not None:
            raise BadInput(
                f"{file} holds code besides weights ({code[1]}), which is not run; save it again with tensors, numbers "
                "and texts alone"
            ) from None
        told = " ".join(str(error).split())[:120]
        raise BadInput(
            f"{file} is not a checkpoint that torch can read ({type(error).__name__}: {told}); is it whole?"
        ) from error
    for part in ("model", "model_args"):
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(part), Mapping):
            raise BadInput(f"{file} is not a checkpoint of nanoGPT or the authors: it has no {part!r}")
    return dict(checkpoint)
