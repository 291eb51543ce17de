"""Self-attention over projections of any kind.

Legend: B batch, T new tokens, S all tokens (cached and new), D model width, H query heads, G key/value heads, E head
width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qurve.model.cache import KeysValues
from qurve.model.config import ModelConfig
from qurve.model.positions import Rope, rotate
from qurve.model.view import View
from qurve.ops.attention import causal_attention
from qurve.projections.functional import normalize, wide
from qurve.projections.module import Projection, project


class HeadNorm(nn.RMSNorm):
    """RMSNorm over each head's channels, in float32 or wider whatever the dtypes of the input and the gain."""

    def forward(self, x_BHTE: Tensor) -> Tensor:
        """`[B, H, T, E]` to the same, in its dtype."""
        return normalize("rmsnorm", x_BHTE, self.weight, None, self.eps or 0.0).to(x_BHTE.dtype)


class Attention(nn.Module):
    """Multi-head attention: `softmax(scale * q k^T + mask) v`, then the output projection.

    Source: Vaswani et al., arXiv 1706.03762; with fewer heads of keys and values than of queries, Ainslie et al., arXiv
    2305.13245.
    """

    together = ("query", "key", "value")
    """Projections of one input, which `project` runs as one product."""

    query: Projection
    key: Projection
    value: Projection
    output: Projection

    attending: Callable[..., Tensor] | None = None
    """What runs in the place of `attend`, with its arguments and its result; set on an instance (see `qurve.hf`)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config.at(layer)
        for name, (kind, dims) in config.projections(layer).items():
            self.add_module(name, kind.build(dims.d_in, dims.d_out, bias=dims.bias, d_other=dims.d_other))
        norms = [HeadNorm(config.head_width, config.norm_eps) if config.qk_norm else nn.Identity() for _ in "qk"]
        self.query_norm, self.key_norm = norms
        self.starts = {}
        if not config.residual.attention_skip:
            self.shaping = nn.Parameter(torch.ones(3 * config.n_heads))  # flat: what has one axis gets no weight decay
            self.starts = {"shaping": 1.0}

    def forward(
        self, inputs: tuple[Tensor, ...], view: View, hidden: Tensor | None = None, state: Any = None
    ) -> Tensor:
        """`[B, T, D]`. `inputs`: one tensor `[B, T, D]`, or one each for queries, keys and values; `hidden`: the hidden
        activations of the block before, `[B, T, F]`; `state`: what decoding keeps of this block, written to here."""
        return self.leave(self.mixed(inputs, view, hidden, state).transpose(1, 2).flatten(2), inputs[0])

    def leave(self, y_BTO: Tensor, x_BTD: Tensor) -> Tensor:
        """From the heads' outputs, side by side, to the model's width; `x_BTD` is the block's input."""
        y_BTD = project([self.output], y_BTO, x_BTD[..., : self.config.d_model])[0]
        return F.dropout(y_BTD, self.config.dropout, self.training)

    # What other mixers replace: the whole way to the heads' outputs, or one stretch of it.

    def mixed(self, inputs: tuple[Tensor, ...], view: View, hidden: Tensor | None, state: Any) -> Tensor:
        """The heads' outputs `[B, H, T, E]`."""
        return self.mix(*self.enter(inputs, view, hidden, state), view, state)

    def enter(
        self, inputs: tuple[Tensor, ...], view: View, hidden: Tensor | None, state: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as they meet, `[B, H or G, T, E]`."""
        q_BHTE, k_BGTE, v_BGTE = (self.heads(t) for t in self.projected(inputs, view, hidden, state))
        q_BHTE, k_BGTE = (self.rotated(t, view) for t in (self.query_norm(q_BHTE), self.key_norm(k_BGTE)))
        return q_BHTE, k_BGTE, v_BGTE

    def projected(self, inputs: tuple[Tensor, ...], view: View, hidden: Tensor | None, state: Any) -> list[Tensor]:
        """Queries, keys and values `[B, T, O]`; one matrix product where they have one input."""
        projections = [self.query, self.key, self.value]
        if len(inputs) == 1:
            return project(projections, inputs[0], hidden)
        return [project([p], x, hidden)[0] for p, x in zip(projections, inputs, strict=True)]

    def heads(self, t_BTO: Tensor) -> Tensor:
        """`[B, T, H E]` -> `[B, H, T, E]`."""
        return t_BTO.view(*t_BTO.shape[:2], -1, self.config.head_width).transpose(1, 2)

    def rotated(self, t_BHTE: Tensor, view: View) -> Tensor:
        """Queries or keys turned to their positions, where those are rotary."""
        if view.rotation is None or not isinstance(self.config.positions, Rope):
            return t_BHTE
        return rotate(self.config.positions, t_BHTE, view.rotation)

    def mix(self, q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor, view: View, state: KeysValues | None) -> Tensor:
        """What each head's query finds, `[B, H, T, E]`."""
        config, v_new_BGTE = self.config, v_BGTE
        if state is not None:
            k_BGTE, v_BGTE = state.extend(view.start, k_BGTE, v_BGTE)
        dropout = config.dropout if self.training else 0.0
        given: dict[str, Any] = {
            "mask": view.mask(config.window),
            "scale": config.scale,
            "softcap": config.attention_softcap,
        }
        attention = partial(self.attending or attend, **given)
        y_BHTE = attention(q_BHTE, k_BGTE, v_BGTE, dropout=dropout)
        if config.residual.attention_skip:
            return y_BHTE
        uniform_BHTE = attention(torch.zeros_like(q_BHTE), k_BGTE, v_BGTE, dropout=0.0)
        return self.shaped(y_BHTE, v_new_BGTE, uniform_BHTE)

    def shaped(self, y_BHTE: Tensor, v_BGTE: Tensor, uniform_BHTE: Tensor) -> Tensor:
        """`a A + b I - c C`: the identity while the logits are small, and the attention A is next to the uniform C."""
        a_H11, b_H11, c_H11 = self.shaping.view(3, -1, 1, 1)
        own_BHTE = v_BGTE.repeat_interleave(self.config.n_heads // self.config.kv_heads, dim=1)
        shaped_BHTE: Tensor = a_H11 * y_BHTE + b_H11 * own_BHTE - c_H11 * uniform_BHTE
        return shaped_BHTE


SHORT = 128
"""Up to this many tokens torch's CPU attention is about twice as fast in float32 as in bf16 (forward and backward). For
one query it is so at any length."""


def attend(
    q_BHTE: Tensor,
    k_BGSE: Tensor,
    v_BGSE: Tensor,
    *,
    mask: tuple[Tensor | None, bool],
    scale: float,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """`softmax(scale * q k^T + mask) v`: queries `[B, H, T, E]`, keys and values `[B, G, S, E]`, to `[B, H, T, E]`.

    `mask` as `View.mask` gives it; `dropout` is a probability; `softcap` bounds the logits, `c * tanh(logits / c)`.
    """
    alike = q_BHTE.dtype == k_BGSE.dtype == v_BGSE.dtype
    if not alike and not torch.is_autocast_enabled(q_BHTE.device.type):  # which gives all three one dtype
        q_BHTE, k_BGSE = q_BHTE.to(v_BGSE.dtype), k_BGSE.to(v_BGSE.dtype)
    if softcap is not None:
        return written_out(q_BHTE, k_BGSE, v_BGSE, mask=mask, scale=scale, dropout=dropout, softcap=softcap)
    mask_TS, is_causal = mask
    is_long, on_cpu = k_BGSE.shape[2] > SHORT, q_BHTE.device.type == "cpu"
    if is_causal and is_long and on_cpu and not dropout and torch.compiler.is_compiling():
        return _attend_in_blocks(q_BHTE, k_BGSE, v_BGSE, scale)
    attention = partial(
        F.scaled_dot_product_attention,
        attn_mask=mask_TS,
        is_causal=is_causal,
        scale=scale,
        dropout_p=dropout,
        enable_gqa=q_BHTE.shape[1] != k_BGSE.shape[1],
    )
    if q_BHTE.device.type == "cpu" and (k_BGSE.shape[2] <= SHORT or q_BHTE.shape[2] == 1):
        with torch.autocast("cpu", enabled=False):
            return attention(wide(q_BHTE), wide(k_BGSE), wide(v_BGSE))
    return attention(q_BHTE, k_BGSE, v_BGSE)


def _attend_in_blocks(q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor, scale: float) -> Tensor:
    groups = q_BHTE.shape[1] // k_BGTE.shape[1]
    k_BHTE, v_BHTE = (t if groups == 1 else t.repeat_interleave(groups, dim=1) for t in (k_BGTE, v_BGTE))
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else q_BHTE.dtype
    return causal_attention(q_BHTE.to(dtype), k_BHTE.to(dtype), v_BHTE.to(dtype), scale)


def written_out(
    q_BHTE: Tensor,
    k_BGSE: Tensor,
    v_BGSE: Tensor,
    *,
    mask: tuple[Tensor | None, bool],
    scale: float,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """The same as products and a softmax, and with `softcap * tanh(logits / softcap)`, which torch's own lacks."""
    groups = q_BHTE.shape[1] // k_BGSE.shape[1]
    k_BHSE = k_BGSE.repeat_interleave(groups, dim=1)
    logits_BHTS = scale * wide(q_BHTE @ k_BHSE.transpose(-1, -2))
    if softcap is not None:
        logits_BHTS = softcap * torch.tanh(logits_BHTS / softcap)
    return average(logits_BHTS, v_BGSE, mask=mask, dropout=dropout)


def average(logits_BHTS: Tensor, v_BGSE: Tensor, *, mask: tuple[Tensor | None, bool], dropout: float = 0.0) -> Tensor:
    """`softmax(logits + mask) v`: `[B, H, T, S]`, in float32 or wider, and `[B, G, S, E]` to `[B, H, T, E]`.

    `mask` as `View.mask` gives it; `dropout` is a probability.
    """
    v_BHSE = v_BGSE.repeat_interleave(logits_BHTS.shape[1] // v_BGSE.shape[1], dim=1)
    visible, is_causal = mask
    if is_causal:
        visible = torch.ones(logits_BHTS.shape[-2:], dtype=torch.bool, device=logits_BHTS.device).tril()
    if visible is not None:
        logits_BHTS = logits_BHTS.masked_fill(~visible, -torch.inf)
    weight_BHTS = F.dropout(logits_BHTS.softmax(-1), dropout)
    return weight_BHTS.to(v_BHSE.dtype) @ v_BHSE
