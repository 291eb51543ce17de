"""Our models as transformers' own classes, GPT-2 and Llama, and back: where both compute the same, and only there.

What is linear in another way than theirs becomes a weight: an identity query, the linear residual `(x + x W) / 2`, an
attention scale of one's own, the interleaved layout of rotations, one block that serves as all. What is nonlinear, or
has no place in their classes, is refused by name.

Legend: D model width, O output width, E head width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from qurve.errors import BadInput
from qurve.model.config import ModelConfig, Subspaces
from qurve.model.feed_forward import Dense, Gated
from qurve.model.gpt import GPT
from qurve.model.mixers import Softmax
from qurve.model.positions import Learned, Rope
from qurve.model.residual import Skip
from qurve.projections import Identity, Linear, Residual
from qurve.projections.module import Projection

State = dict[str, Tensor]
ACTIVATIONS = {name: name for name in ("gelu", "relu", "relu2", "silu")}
"""Ours and theirs. Their `gelu_new` and `gelu_pytorch_tanh` are an approximation of ours."""

_GPT2 = {
    "attention_norm": "ln_1",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_GPT2_OUTSIDE = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
_LLAMA = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_LLAMA_OUTSIDE = {"token_embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}


# ------------------------------------------------------------------------------------------------------------ to theirs


def to_stock(model: GPT, **tokens: int | None) -> PreTrainedModel:
    """The same model as a `GPT2LMHeadModel` or a `LlamaForCausalLM`; `tokens` are ids for its configuration.

    Raises `BadInput` naming all that stands in the way.
    """
    config = model.config
    if reasons := why_not(config):
        raise BadInput(
            f"no stock class can represent this model: {'; '.join(reasons)}. Use --to hf, whose folder names our code"
        )
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        **tokens,
    }
    stock: PreTrainedModel
    if isinstance(config.positions, Learned):
        names = {
            "n_positions": config.context,
            "n_embd": config.d_model,
            "n_layer": config.n_layers,
            "n_head": config.n_heads,
            "n_inner": config.d_ff,
            "activation_function": ACTIVATIONS[config.mlp.activation],
            "layer_norm_epsilon": config.norm_eps,
            **{f"{place}_pdrop": config.dropout for place in ("resid", "embd", "attn")},
        }
        stock = GPT2LMHeadModel(GPT2Config(**common, **names))
        state = _to_gpt2(_linear_state(model), config)
    else:
        assert isinstance(config.positions, Rope)
        names = {
            "hidden_size": config.d_model,
            "intermediate_size": config.d_ff,
            "num_hidden_layers": config.n_layers,
            "num_attention_heads": config.n_heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_width,
            "hidden_act": ACTIVATIONS[config.mlp.activation],
            "max_position_embeddings": config.context,
            "rms_norm_eps": config.norm_eps,
            "attention_bias": config.bias,
            "mlp_bias": config.bias,
            "attention_dropout": config.dropout,
            "rope_parameters": _their_rope(config.positions),
        }
        stock = LlamaForCausalLM(LlamaConfig(**common, **names))
        state = {_renamed(name, "model.layers", _LLAMA, _LLAMA_OUTSIDE): t for name, t in _linear_state(model).items()}
    _load(stock, state, "lm_head.weight" if config.tie_embeddings else None)
    return stock.eval()


def why_not(config: ModelConfig) -> list[str]:
    """What neither class can be, in words; empty where one of them can."""
    learned = isinstance(config.positions, Learned)
    wrong = [
        f"its {name} is {kind.kind!r}, which is not linear"
        for name, (kind, _) in config.projections(config.n_layers - 1).items()
        if type(kind) not in (Linear, Identity, Residual)
    ]
    checks = {
        f"its mixer is {config.mixer.kind!r}, not softmax attention": type(config.mixer) is not Softmax,
        "its residual scheme or the places of its norms are others": config.residual != Skip(),
        "blocks read subspaces of the feed-forward before": config.subspaces != Subspaces(),
        "its blocks are not all alike (model.overrides)": bool(config.overrides),
        "it normalises queries and keys": config.qk_norm,
        f"it attends {config.attends}": config.attends != "causal",
        "it attends within a window": config.window is not None,
        "it caps logits": config.attention_softcap is not None or config.logit_softcap is not None,
        f"its positions are {config.positions.kind!r}": not (learned or isinstance(config.positions, Rope)),
    }
    wrong += [reason for reason, holds in checks.items() if holds]
    if learned:
        same = config.kv_heads == config.n_heads and config.n_heads * config.head_width == config.d_model
        if not (same and config.norm == "layernorm" and isinstance(config.mlp, Dense)):
            wrong.append("with learned positions it needs layer norms, a dense feed-forward, and heads as in GPT-2")
    elif not (config.norm == "rmsnorm" and isinstance(config.mlp, Gated) and config.d_model % config.n_heads == 0):
        wrong.append("with rotary positions it needs RMS norms, a gated feed-forward, and a width that heads divide")
    if config.mlp.activation not in ACTIVATIONS:
        wrong.append(f"its feed-forward's activation is {config.mlp.activation!r}")
    return wrong


@torch.no_grad()
def _linear_state(model: GPT) -> State:
    """Our parameters by name, for blocks of their own whose projections are all plain weights, at the usual scale."""
    config, state = model.config, dict(model.state_dict())
    found = {name: tensor for name, tensor in state.items() if not name.startswith("blocks.")}
    for layer in range(config.n_layers):
        block = model.blocks[0 if config.share_blocks else layer]
        for name, tensor in block.state_dict().items():
            found[f"blocks.{layer}.{name}"] = tensor
        for name in config.projections(layer):
            part: Projection = getattr(block.attention, name)
            linear = dict(part.named_parameters()) | _as_linear(part)
            if name == "query":
                factor = config.scale * math.sqrt(config.head_width)
                linear = {key: tensor if math.isclose(factor, 1) else factor * tensor for key, tensor in linear.items()}
            if name in ("query", "key") and isinstance(config.positions, Rope):
                linear = {key: _halves(tensor, config) for key, tensor in linear.items()}
            found |= {f"blocks.{layer}.attention.{name}.{key}": tensor.detach() for key, tensor in linear.items()}
    return found


def _as_linear(part: Projection) -> State:
    """A projection that is linear in another form, as a weight `[O, D]` (and a bias)."""
    kind, dims = part.config, part.dims
    if isinstance(kind, Identity):
        return {"weight": torch.eye(dims.d_in)} | ({"bias": torch.zeros(dims.d_out)} if dims.bias else {})
    if isinstance(kind, Residual):
        weight = {"weight": kind.scale * (torch.eye(dims.d_in) + part.weight)}
        return weight | ({"bias": kind.scale * part.bias} if dims.bias else {})
    return {}


def _halves(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Rows of queries or keys for rotations of halves, whatever the layout that they were made for."""
    if not isinstance(config.positions, Rope) or config.positions.layout == "half":
        return tensor
    heads = tensor.view(-1, config.head_width, *tensor.shape[1:])
    return torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1).flatten(0, 1)


def _to_gpt2(state: State, config: ModelConfig) -> State:
    """Queries, keys and values side by side, matrices as `[in, out]`, and zeros for biases that ours does without."""
    found = {}
    for layer in range(config.n_layers):
        for kind in ("weight", "bias"):
            parts = [state.pop(f"blocks.{layer}.attention.{n}.{kind}", None) for n in ("query", "key", "value")]
            if parts[0] is not None:
                found[f"transformer.h.{layer}.attn.c_attn.{kind}"] = torch.cat(parts)  # type: ignore[arg-type]
    found |= {_renamed(name, "transformer.h", _GPT2, _GPT2_OUTSIDE): tensor for name, tensor in state.items()}
    return {name: tensor.T.contiguous() if _is_conv(name) else tensor for name, tensor in found.items()}


def _is_conv(name: str) -> bool:
    return name.endswith(".weight") and ".c_" in name


def _renamed(name: str, blocks: str, inside: Mapping[str, str], outside: Mapping[str, str]) -> str:
    module, _, kind = name.rpartition(".")
    if not module.startswith("blocks."):
        return f"{outside[module]}.{kind}"
    _, layer, inner = module.split(".", 2)
    return f"{blocks}.{layer}.{inside[inner]}.{kind}"


@torch.no_grad()
def _load(stock: PreTrainedModel, state: State, tied: str | None) -> None:
    """Into their model; a bias that ours does not have is zero."""
    own = stock.state_dict()
    zeros = {name: torch.zeros_like(t) for name, t in own.items() if name.endswith(".bias") and name not in state}
    loaded = {**state, **zeros}
    if tied is not None:
        loaded[tied] = loaded[next(name for name in own if name.endswith(("wte.weight", "embed_tokens.weight")))]
    stock.load_state_dict(loaded)


def _their_rope(rope: Rope) -> dict[str, Any]:
    kind: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": "default"}
    if rope.scaling == "linear":
        kind |= {"rope_type": "linear", "factor": rope.factor}
    if rope.scaling == "llama3":
        kind |= {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_frequency_factor,
            "high_freq_factor": rope.high_frequency_factor,
            "original_max_position_embeddings": rope.original_context,
        }
    return kind


# ---------------------------------------------------------------------------------------------------------- from theirs


def from_stock(stock: PreTrainedModel) -> GPT:
    """Our model of a `GPT2LMHeadModel` or a `LlamaForCausalLM`: float32, in evaluation mode. Else `BadInput`."""
    if type(stock) not in (GPT2LMHeadModel, LlamaForCausalLM):
        raise BadInput(f"it is a {type(stock).__name__}; GPT2LMHeadModel, LlamaForCausalLM and our own can be imported")
    is_gpt2 = isinstance(stock, GPT2LMHeadModel)
    config = _from_gpt2(stock.config) if is_gpt2 else _from_llama(stock.config)
    with torch.device("meta"):
        model = GPT(config)
    theirs = {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in stock.state_dict().items()}
    state: State = {}
    for name, shape in ((name, tensor.shape) for name, tensor in model.state_dict().items()):
        part = name.rpartition(".")[0].rpartition(".")[2]
        if is_gpt2 and part in ("query", "key", "value"):
            layer, kind = name.split(".")[1], name.rpartition(".")[2]
            stacked = theirs[f"transformer.h.{layer}.attn.c_attn.{kind}"]
            place = ("query", "key", "value").index(part)
            state[name] = stacked.chunk(3, dim=-1)[place].t().contiguous()
        elif is_gpt2:
            key = _renamed(name, "transformer.h", _GPT2, _GPT2_OUTSIDE)
            state[name] = theirs[key].T.contiguous() if _is_conv(key) else theirs[key]
        else:  # biases that theirs does without are zero
            key = _renamed(name, "model.layers", _LLAMA, _LLAMA_OUTSIDE)
            state[name] = theirs[key] if key in theirs else torch.zeros(shape)
    model.load_state_dict(state, assign=True)
    return model.eval()


def _activation(name: str) -> Any:
    if name not in ACTIVATIONS.values():
        about = ", an approximation of GELU, which is exact in ours" if name.startswith("gelu") else ""
        raise BadInput(f"its activation is {name!r}{about}; those that can be imported: {', '.join(ACTIVATIONS)}")
    return name


def _from_gpt2(theirs: PreTrainedConfig) -> ModelConfig:
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if getattr(theirs, name):
            raise BadInput(f"its configuration has {name}, which ours does not know")
    return ModelConfig(
        n_layers=theirs.n_layer,
        d_model=theirs.n_embd,
        n_heads=theirs.n_head,
        d_ff=theirs.n_inner or 4 * theirs.n_embd,
        context=theirs.n_positions,
        vocab_size=theirs.vocab_size,
        mlp=Dense(_activation(theirs.activation_function)),
        attention_scale=None if theirs.scale_attn_weights else 1.0,
        dropout=float(theirs.resid_pdrop),
        bias=True,
        tie_embeddings=theirs.tie_word_embeddings,
        norm_eps=theirs.layer_norm_epsilon,
    )


def _from_llama(theirs: PreTrainedConfig) -> ModelConfig:
    stated = dict(theirs.rope_parameters or {})
    rope = Rope(theta=float(stated.get("rope_theta", 10_000.0)))
    kind = stated.get("rope_type", "default")
    if kind == "linear":
        rope = dataclasses.replace(rope, scaling="linear", factor=float(stated["factor"]))
    elif kind == "llama3":
        rope = dataclasses.replace(
            rope,
            scaling="llama3",
            factor=float(stated["factor"]),
            low_frequency_factor=float(stated["low_freq_factor"]),
            high_frequency_factor=float(stated["high_freq_factor"]),
            original_context=int(stated["original_max_position_embeddings"]),
        )
    elif kind != "default":
        raise BadInput(f"its rotations are of the kind {kind!r}; default, linear and llama3 can be imported")
    return ModelConfig(
        n_layers=theirs.num_hidden_layers,
        d_model=theirs.hidden_size,
        n_heads=theirs.num_attention_heads,
        n_kv_heads=theirs.num_key_value_heads,
        d_head=theirs.head_dim,
        d_ff=theirs.intermediate_size,
        context=theirs.max_position_embeddings,
        vocab_size=theirs.vocab_size,
        mlp=Gated(_activation(theirs.hidden_act)),
        positions=rope,
        norm="rmsnorm",
        bias=bool(theirs.attention_bias or theirs.mlp_bias),
        tie_embeddings=theirs.tie_word_embeddings,
        norm_eps=theirs.rms_norm_eps,
    )
