"""A tiny model of every family, randomly initialised, and what its query weight is when one writes to it by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

D, H, E, LAYERS, VOCABULARY = 32, 4, 8, 2, 61

Write = Callable[[nn.Module, Tensor], None]


class Family(NamedTuple):
    model: str
    config: str
    fields: dict[str, Any]
    paths: str
    write: Write
    """Adds a matrix [query entries, D] to the query weight of the layer at the path."""


def linear(layer: nn.Module, delta_QD: Tensor) -> None:
    layer.weight += delta_QD


def conv1d(layer: nn.Module, delta_QD: Tensor) -> None:
    layer.weight[:, : H * E] += delta_QD.T


def per_head(layer: nn.Module, delta_QD: Tensor) -> None:
    layer.weight.view(H, 3, E, D)[:, 0] += delta_QD.view(H, E, D)


def first_rows(layer: nn.Module, delta_QD: Tensor) -> None:
    layer.weight[: H * E] += delta_QD


_TEXT = {
    "hidden_size": D,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": H,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDE = _TEXT | {"head_dim": 16}  # queries are wider than the model
_EXPERTS = _TEXT | {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_MODEL = "model.layers.{}.self_attn."
_MANY = {key: value for key, value in _TEXT.items() if key != "num_key_value_heads"}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": D, "n_layer": LAYERS, "n_head": H, "vocab_size": VOCABULARY, "n_positions": 64, "pad_token_id": 0}
        | {"bos_token_id": 1, "eos_token_id": 2},
        "transformer.h.{}.attn.c_attn",
        conv1d,
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", _MANY, "gpt_neox.layers.{}.attention.query_key_value", per_head
    ),
    "llama": Family("LlamaForCausalLM", "LlamaConfig", _TEXT, _MODEL + "q_proj", linear),
    "mistral": Family("MistralForCausalLM", "MistralConfig", _TEXT, _MODEL + "q_proj", linear),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", _TEXT, _MODEL + "q_proj", linear),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", _WIDE, _MODEL + "q_proj", linear),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", _WIDE, _MODEL + "q_proj", linear),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", _WIDE, _MODEL + "q_proj", linear),
    "phi": Family("PhiForCausalLM", "PhiConfig", _TEXT, _MODEL + "q_proj", linear),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", _TEXT, _MODEL + "qkv_proj", first_rows),
    "olmo2": Family("Olmo2ForCausalLM", "Olmo2Config", _TEXT, _MODEL + "q_proj", linear),
    "smollm3": Family("SmolLM3ForCausalLM", "SmolLM3Config", _TEXT, _MODEL + "q_proj", linear),
    "mixtral": Family(
        "MixtralForCausalLM", "MixtralConfig", _TEXT | {"num_local_experts": 4}, _MODEL + "q_proj", linear
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        _EXPERTS | {"shared_expert_intermediate_size": 24},
        _MODEL + "q_proj",
        linear,
    ),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _EXPERTS | _WIDE, _MODEL + "q_proj", linear),
    "bert": Family("BertForMaskedLM", "BertConfig", _MANY, "bert.encoder.layer.{}.attention.self.query", linear),
    "vit": Family(
        "ViTForImageClassification",
        "ViTConfig",
        {"hidden_size": D, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": H}
        | {"image_size": 8, "patch_size": 4},
        "vit.layers.{}.attention.q_proj",
        linear,
    ),
}


def tiny(name: str, attention: str | None = None, **fields: Any) -> transformers.PreTrainedModel:
    """A model of a family, with weights large enough that attention matters."""
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**family.fields | fields)
    if attention is not None:
        config._attn_implementation = attention
    torch.manual_seed(1)
    model = getattr(transformers, family.model)(config).eval()
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if p.dim() == 2 and "embed" not in parameter_name:
                p.mul_(8)
    return model


def batch(name: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    return {"input_ids": torch.randint(3, VOCABULARY, (2, 7), generator=generator)}
