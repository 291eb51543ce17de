"""`ModelConfig`: everything that decides a GPT's shape and function. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from qurve.config import check_values
from qurve.errors import BadInput
from qurve.model.feed_forward import Dense, FeedForwardConfig
from qurve.model.positions import Learned, PositionConfig, Rope
from qurve.projections import Dims, Linear, ProjectionConfig


@dataclass(frozen=True)
class ModelConfig:
    """A pre-norm transformer. The defaults are the paper's baseline: GPT-2 with learned positions and GELU."""

    n_layers: int = 12
    d_model: int = 768
    n_heads: int = 12
    """H: heads of the queries."""
    n_kv_heads: int | None = None
    """G: heads of the keys and values, each shared by `n_heads / n_kv_heads` queries; None takes as many as queries."""
    d_head: int | None = None
    """E: width of a head; None takes `d_model / n_heads`."""
    d_ff: int = 3072
    """Hidden width of the feed-forward, of each expert where there are several."""
    context: int = 1024
    """Positions: the longest sequence, in tokens."""
    vocab_size: int = 50304
    """Rows of the embedding. GPT-2's 50,257 ids padded to a multiple of 64; the padded ids are never real tokens."""
    query: ProjectionConfig = field(default_factory=Linear)
    key: ProjectionConfig = field(default_factory=Linear)
    value: ProjectionConfig = field(default_factory=Linear)
    mlp: FeedForwardConfig = field(default_factory=Dense)
    positions: PositionConfig = field(default_factory=Learned)
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    qk_norm: bool = False
    """RMSNorm over each head's queries and keys, before their rotation, with one gain for all heads (as in Qwen3)."""
    attention_scale: float | None = None
    """What the logits `q k^T` are multiplied by; None means `1 / sqrt(head width)`."""
    window: int | None = None
    """How many tokens back attention looks, itself included; None looks at all."""
    logit_softcap: float | None = None
    """`c * tanh(logits / c)` on the model's logits, as in Gemma 2."""
    dropout: float = 0.0
    bias: bool = False
    tie_embeddings: bool = True
    """Whether the output head is the token embedding."""
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_values(self)
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type in ("int", "int | None") and value is not None and value < 1:
                raise BadInput(f"model.{f.name} = {value}: it must be at least 1")
        if self.d_head is None and self.d_model % self.n_heads:
            raise BadInput(
                f"model.d_model = {self.d_model} does not divide into model.n_heads = {self.n_heads} heads; "
                f"the nearest width that does is {max(1, round(self.d_model / self.n_heads)) * self.n_heads} "
                "(or give model.d_head)"
            )
        if self.n_heads % self.kv_heads:
            raise BadInput(
                f"model.n_kv_heads = {self.kv_heads} does not divide model.n_heads = {self.n_heads}: every key and "
                "value head serves equally many queries"
            )
        if isinstance(self.positions, Rope) and self.head_width % 2:
            raise BadInput(f"heads of width {self.head_width} cannot be rotated in pairs; give an even model.d_head")
        if self.logit_softcap is not None and self.logit_softcap <= 0:
            raise BadInput(f"model.logit_softcap = {self.logit_softcap}: it must be above zero")
        if not 0 <= self.dropout < 1:
            raise BadInput(f"model.dropout = {self.dropout}: it must be at least 0 and below 1")
        if self.norm_eps <= 0:
            raise BadInput(f"model.norm_eps = {self.norm_eps}: it must be above zero")
        for name, projection, dims in zip(("query", "key", "value"), self.qkv, self.qkv_dims, strict=True):
            try:
                projection.check(dims)
            except ValueError as error:
                raise BadInput(f"model.{name}: {error}") from None

    @property
    def qkv(self) -> tuple[ProjectionConfig, ProjectionConfig, ProjectionConfig]:
        return self.query, self.key, self.value

    @property
    def qkv_dims(self) -> tuple[Dims, Dims, Dims]:
        """Widths of the query, key and value projections."""
        q, kv = (Dims(self.d_model, heads * self.head_width, self.bias) for heads in (self.n_heads, self.kv_heads))
        return q, kv, kv

    @property
    def head_width(self) -> int:
        """E, resolved."""
        return self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def kv_heads(self) -> int:
        """G, resolved."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def scale(self) -> float:
        """The attention scale, resolved."""
        return 1 / math.sqrt(self.head_width) if self.attention_scale is None else self.attention_scale
