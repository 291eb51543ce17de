"""`ModelConfig`: everything that decides a model's shape and function. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Literal

from qurve.config import check_values, or_else
from qurve.errors import BadInput
from qurve.model.feed_forward import Dense, FeedForwardConfig
from qurve.model.mixers import MixerConfig, Softmax
from qurve.model.positions import Learned, PositionConfig, Rope
from qurve.model.residual import ResidualConfig, Skip
from qurve.projections import Dims, Linear, ProjectionConfig
from qurve.projections.base import STD


@dataclass(frozen=True)
class Subspaces:
    """Extra outputs of each feed-forward that skip the residual stream: some of the next block's pathways read them.

    `q` channels are seen by the queries alone, `qk` by queries and keys, and so on; each pathway's own matrix reads the
    block's input and its visible channels side by side. The first block, which has none before it, reads its input
    alone, and the last makes none. Source: arXiv 2603.13381, appendix B.1.
    """

    q: int = 0
    k: int = 0
    v: int = 0
    qk: int = 0
    qv: int = 0
    kv: int = 0

    def __post_init__(self) -> None:
        check_values(self)
        for f in fields(self):
            if getattr(self, f.name) < 0:
                raise BadInput(f"model.subspaces.{f.name} = {getattr(self, f.name)}: it must be at least 0")

    @property
    def widths(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def total(self) -> int:
        return sum(self.widths.values())

    def seen_by(self, pathway: str) -> int:
        """Channels that the `query`, `key` or `value` sees."""
        return sum(width for name, width in self.widths.items() if pathway[0] in name)


@dataclass(frozen=True)
class LayerOverride:
    """What is different in some blocks; None leaves the model's own.

    Raises `BadInput` where no block or no change is named.
    """

    layers: tuple[int, ...]
    """The blocks, counted from 0."""
    query: ProjectionConfig | None = None
    key: ProjectionConfig | None = None
    value: ProjectionConfig | None = None
    output: ProjectionConfig | None = None
    mixer: MixerConfig | None = None
    mlp: FeedForwardConfig | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        check_values(self)
        if not self.layers:
            raise BadInput("model.overrides: one of them names no layers; list those that it is for, counted from 0")
        if not self.changes:
            raise BadInput(f"model.overrides: the one for the layers {list(self.layers)} changes nothing")

    @property
    def changes(self) -> dict[str, object]:
        """Fields of `ModelConfig` by name, with what these blocks have in their place."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "layers"}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class ModelConfig:
    """A transformer. The defaults are the paper's baseline: GPT-2 with pre-norms, learned positions and GELU.

    Raises `BadInput`, which names the field and the way out, for what cannot be: numbers that are out of range, widths
    that do not divide, parts that do not go together. Source of the defaults: arXiv 2603.13381, section 2.
    """

    n_layers: int = 12
    """L: blocks."""
    d_model: int = 768
    """D: width of the residual stream."""
    n_heads: int = 12
    """H: heads of the queries."""
    n_kv_heads: int | None = field(default=None, metadata=or_else("n_heads"))
    """G: heads of the keys and values, each shared by `n_heads / n_kv_heads` queries; None takes as many as queries."""
    d_head: int | None = field(default=None, metadata=or_else("d_model / n_heads"))
    """E: width of a head; None takes `d_model / n_heads`."""
    d_ff: int = 3072
    """F: hidden width of the feed-forward, of each expert where there are several."""
    context: int = 1024
    """Positions: the longest sequence, in tokens."""
    vocab_size: int = 50304
    """Rows of the embedding. GPT-2's 50,257 ids padded to a multiple of 64; the padded ids are never real tokens."""
    query: ProjectionConfig = field(default_factory=Linear)
    """From the block's normalised input to queries, D to H E channels; `Bottleneck()` is the paper's layer."""
    key: ProjectionConfig = field(default_factory=Linear)
    """To keys, D to G E channels."""
    value: ProjectionConfig = field(default_factory=Linear)
    """To values, D to G E channels."""
    output: ProjectionConfig = field(default_factory=Linear)
    """W_O: from the heads' outputs, side by side, to the model's width."""
    mixer: MixerConfig = field(default_factory=Softmax)
    """What lets a token read others."""
    residual: ResidualConfig = field(default_factory=Skip)
    """How attention and feed-forward read the residual stream and write to it; where norms stand."""
    mlp: FeedForwardConfig = field(default_factory=Dense)
    """The feed-forward: dense, gated, or a mixture of experts."""
    subspaces: Subspaces = field(default_factory=Subspaces)
    """Channels of the feed-forward that the next block's queries, keys or values alone read; none by default."""
    overrides: tuple[LayerOverride, ...] = ()
    """Blocks that are different; where two speak of one block, the later one counts."""
    share_blocks: bool = False
    """One block's weights serve as all `n_layers`."""
    positions: PositionConfig = field(default_factory=Learned)
    """How a model knows where a token stands."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Of blocks and at the end, over D channels."""
    qk_norm: bool = False
    """RMSNorm over each head's queries and keys, before their rotation: 2 E parameters a block, one gain for all heads
    (as in Qwen3, arXiv 2505.09388; after Henry et al., arXiv 2010.04245)."""
    attention_scale: float | None = field(default=None, metadata=or_else("1 / sqrt(head width)"))
    """What the logits `q k^T` are multiplied by; None means `1 / sqrt(head width)`."""
    window: int | None = field(default=None, metadata=or_else("all tokens"))
    """How many tokens back attention looks, itself included (forward as well, if bidirectional); None looks at all."""
    attends: Literal["causal", "bidirectional", "prefix"] = "causal"
    """Whom a token sees: those before it, all, or those before it and, within a prefix of the sequence, all of that."""
    attention_softcap: float | None = None
    """`c * tanh(logits / c)` on the attention's logits, as in Gemma 2."""
    logit_softcap: float | None = None
    """`c * tanh(logits / c)` on the model's logits, as in Gemma 2."""
    dropout: float = 0.0
    """Probability, of embeddings, attention weights and what each sublayer writes; in training alone."""
    bias: bool = False
    """Whether linear maps and layer norms add one."""
    tie_embeddings: bool = True
    """Whether the output head is the token embedding."""
    norm_eps: float = 1e-5
    """Added to the mean square, or the variance, in every norm."""

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
        for name in ("logit_softcap", "attention_softcap", "attention_scale"):
            if (cap := getattr(self, name)) is not None and cap <= 0:
                raise BadInput(f"model.{name} = {cap}: it must be above zero")
        if not 0 <= self.dropout < 1:
            raise BadInput(f"model.dropout = {self.dropout}: it must be at least 0 and below 1")
        if self.norm_eps <= 0:
            raise BadInput(f"model.norm_eps = {self.norm_eps}: it must be above zero")
        self._check_layers()

    def _check_layers(self) -> None:
        for override in self.overrides:
            for layer in override.layers:
                if not 0 <= layer < self.n_layers:
                    raise BadInput(f"model.overrides: there is no layer {layer}; they are 0 to {self.n_layers - 1}")
            if override.window is not None and override.window < 1:
                raise BadInput(f"model.overrides: window = {override.window}: it must be at least 1")
        distinct = self.distinct_layers()
        if self.share_blocks and len(distinct) > 1:
            raise BadInput(
                "model.share_blocks needs blocks that are all alike; model.overrides, model.subspaces and MLP reuse "
                "make some of them different"
            )
        for layer, _ in distinct:
            here = self.at(layer)
            if self.subspaces.total and not here.mlp.hidden_width(self.d_ff):
                raise BadInput(
                    f"model.subspaces are made of a feed-forward's hidden activations, and model.mlp = {here.mlp.kind} "
                    "has other ones for every token; use a dense or gated one"
                )
            for name, part in (("mixer", here.mixer), ("residual", here.residual)):
                try:
                    part.check(here)
                except BadInput:
                    raise
                except ValueError as error:
                    raise BadInput(f"model.{name}: {error}") from None
            for name, (projection, dims) in self.projections(layer).items():
                allowed = "block_input" if name == "output" else "mlp_hidden"
                if projection.also_reads not in (None, allowed):
                    where = "model.output" if projection.also_reads == "block_input" else "model.query, key or value"
                    raise BadInput(f"model.{name}: {projection.kind!r} has no place here; it is for {where}")
                try:
                    projection.check(dims)
                except ValueError as error:
                    raise BadInput(f"model.{name}: {error}") from None

    def at(self, layer: int) -> ModelConfig:
        """The configuration of block `layer`, with its overrides applied."""
        return _at(self, layer) if self.overrides else self

    def distinct_layers(self) -> list[tuple[int, int]]:
        """Blocks that may differ from each other: one of each sort, and how many there are of it."""
        last = self.n_layers - 1
        named = {layer for override in self.overrides for layer in override.layers}
        named |= {layer + 1 for layer in named if layer < last}  # which read what those have computed
        first_differs = self.projections(0) != self.projections(min(1, last))
        special = {0} if first_differs or self.subspaces.total else set()
        special |= ({last} if self.subspaces.total else set()) | named
        usual = next((layer for layer in range(len(special) + 1) if layer not in special and layer <= last), None)
        found = [(layer, 1) for layer in sorted(special)]
        return found if usual is None else sorted([*found, (usual, self.n_layers - len(special))])

    def projections(self, layer: int) -> dict[str, tuple[ProjectionConfig, Dims]]:
        """Kind and widths of every projection that block `layer` has, by name."""
        here, before = self.at(layer), self.at(max(0, layer - 1))
        q_width, kv_width = (heads * self.head_width for heads in (self.n_heads, self.kv_heads))
        hidden = before.mlp.hidden_width(self.d_ff) if layer else 0
        found: dict[str, tuple[ProjectionConfig, Dims]] = {}
        for name, kind, d_out in (
            ("query", here.query, q_width),
            ("key", here.key, kv_width),
            ("value", here.value, kv_width),
        ):
            kind = kind if layer else kind.at_first()
            d_in = self.d_model + (self.subspaces.seen_by(name) if layer else 0)
            found[name] = kind, Dims(d_in, d_out, self.bias, hidden if kind.also_reads else 0)
        d_other = self.d_model if here.output.also_reads else 0
        found["output"] = here.output, Dims(q_width, self.d_model, self.bias, d_other)
        return {name: found[name] for name in here.mixer.projections}

    @property
    def head_width(self) -> int:
        """E, resolved: channels of a head."""
        return self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def kv_heads(self) -> int:
        """G, resolved: heads of the keys and values."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def scale(self) -> float:
        """What the logits `q k^T` are multiplied by, resolved."""
        return 1 / math.sqrt(self.head_width) if self.attention_scale is None else self.attention_scale

    @property
    def embedding_std(self) -> float:
        """Standard deviation that embeddings start with. Without norms their sum has to enter at unit scale, and a head
        that is tied to them is scaled back to what is usual."""
        if self.residual.norm_place != "none":
            return STD
        return math.sqrt(0.5) if isinstance(self.positions, Learned) else 1.0


@lru_cache(maxsize=1024)
def _at(config: ModelConfig, layer: int) -> ModelConfig:
    changes: dict[str, object] = {}
    for override in config.overrides:
        if layer in override.layers:
            changes |= override.changes
    # Not `replace`, whose checks are of whole models.
    here = object.__new__(ModelConfig)
    here.__dict__.update({**config.__dict__, "overrides": (), **changes})
    return here
