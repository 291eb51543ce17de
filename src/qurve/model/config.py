"""`ModelConfig`: everything that decides a GPT's shape and function. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from qurve.config import check_values
from qurve.errors import BadInput
from qurve.projections import Dims, Linear, ProjectionConfig


@dataclass(frozen=True)
class ModelConfig:
    """GPT-2 style: learned positions, pre-norm blocks, GELU. The defaults are the paper's baseline."""

    n_layers: int = 12
    d_model: int = 768
    n_heads: int = 12
    d_ff: int = 3072
    """Hidden width of the feed-forward."""
    context: int = 1024
    """Positions: the longest sequence, in tokens."""
    vocab_size: int = 50304
    """Rows of the embedding. GPT-2's 50,257 ids padded to a multiple of 64; the padded ids are never real tokens."""
    query: ProjectionConfig = field(default_factory=Linear)
    key: ProjectionConfig = field(default_factory=Linear)
    value: ProjectionConfig = field(default_factory=Linear)
    attention_scale: float | None = None
    """What the logits `q k^T` are multiplied by; None means `1 / sqrt(head width)`."""
    dropout: float = 0.0
    bias: bool = False
    tie_embeddings: bool = True
    """Whether the output head is the token embedding."""
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_values(self)
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "int" and value < 1:
                raise BadInput(f"model.{f.name} = {value}: it must be at least 1")
        if self.d_model % self.n_heads:
            raise BadInput(
                f"model.d_model = {self.d_model} does not divide into model.n_heads = {self.n_heads} heads; "
                f"the nearest width that does is {max(1, round(self.d_model / self.n_heads)) * self.n_heads}"
            )
        if not 0 <= self.dropout < 1:
            raise BadInput(f"model.dropout = {self.dropout}: it must be at least 0 and below 1")
        if self.norm_eps <= 0:
            raise BadInput(f"model.norm_eps = {self.norm_eps}: it must be above zero")
        for name, projection in (("query", self.query), ("key", self.key), ("value", self.value)):
            try:
                projection.check(self.qkv_dims)
            except ValueError as error:
                raise BadInput(f"model.{name}: {error}") from None

    @property
    def qkv_dims(self) -> Dims:
        return Dims(self.d_model, self.d_model, self.bias)

    @property
    def head_width(self) -> int:
        """E."""
        return self.d_model // self.n_heads

    @property
    def scale(self) -> float:
        """The attention scale, resolved."""
        return 1 / math.sqrt(self.head_width) if self.attention_scale is None else self.attention_scale
