"""`QurveConfig`: our `ModelConfig` inside of a Hugging Face configuration."""

from __future__ import annotations

import functools
import json
from typing import Any

from transformers import PreTrainedConfig

from qurve.config import FORMAT, from_dict, to_dict
from qurve.errors import BadInput
from qurve.model.config import ModelConfig

STUB = "modeling_qurve"
"""The file of an exported folder that names our classes to those who trust it (see `qurve.hf.export`)."""
AUTO_MAP = {"AutoConfig": f"{STUB}.QurveConfig", "AutoModelForCausalLM": f"{STUB}.QurveForCausalLM"}


class QurveConfig(PreTrainedConfig):  # type: ignore[misc]
    """`QurveConfig(qurve=ModelConfig(...))`; what the hub's tools ask for under their own names is derived from that.

    `qurve` is the JSON tree of the `ModelConfig`, with its format: the one place where anything about the architecture
    is written down. `.model` is the `ModelConfig` itself. Raises `BadInput` where there is none, or it is not one.
    """

    model_type = "qurve"
    keys_to_ignore_at_inference = ("cache",)

    qurve: dict[str, Any] | ModelConfig | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.qurve, ModelConfig):
            self.qurve = {"format": FORMAT, **to_dict(self.qurve)}
        elif self.qurve is None:
            self.qurve = {"format": FORMAT, **to_dict(ModelConfig())}
        self.model  # noqa: B018  refused here and now, if it is to be refused
        for name in ("auto_map", *_DERIVED):  # those are ours to say
            kwargs.pop(name, None)
        self.auto_map = dict(AUTO_MAP)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if config_dict.get("model_type") != cls.model_type or "qurve" not in config_dict:
            raise BadInput(
                f"this is the configuration of a {config_dict.get('model_type')!r} model, not of ours: it has no "
                "model_type 'qurve' with a field 'qurve'"
            )
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: a saved folder names our classes by itself (`AUTO_MAP`), and no code is copied into it."""

    @property
    def model(self) -> ModelConfig:
        return _parsed(json.dumps(self.qurve))

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @vocab_size.setter
    def vocab_size(self, rows: int) -> None:  # by whoever resizes the embedding
        assert isinstance(self.qurve, dict)
        self.qurve = {**self.qurve, "vocab_size": rows}

    @property
    def tie_word_embeddings(self) -> bool:
        return self.model.tie_embeddings

    @property
    def hidden_size(self) -> int:
        return self.model.d_model

    @property
    def intermediate_size(self) -> int:
        return self.model.d_ff

    @property
    def num_hidden_layers(self) -> int:
        return self.model.n_layers

    @property
    def num_attention_heads(self) -> int:
        return self.model.n_heads

    @property
    def num_key_value_heads(self) -> int:
        return self.model.kv_heads

    @property
    def head_dim(self) -> int:
        return self.model.head_width

    @property
    def max_position_embeddings(self) -> int:
        return self.model.context


_DERIVED = tuple(name for name, value in vars(QurveConfig).items() if isinstance(value, property))


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> ModelConfig:
    tree = json.loads(text)
    if tree.pop("format", None) != FORMAT:
        raise BadInput(f"qurve: not a model configuration of format {FORMAT}")
    return from_dict(ModelConfig, tree, "qurve")
