"""Decoding: logits for the next token, from weights that are prepared once and a cache that grows.

A model whose every part is as it was built is decoded by a copy of it (`ready`) that shares what it can: gains folded,
stems stacked, matrices in the compute dtype, no autocast. Its forward pass is the model's own. What somebody has
wrapped, hooked or replaced takes the given model's own forward pass, under autocast where half precision is asked for.

Legend: B batch, T tokens, D model width, O the heads' outputs side by side, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qurve.model.attention import Attention
from qurve.model.cache import Cache
from qurve.model.feed_forward import Dense, Gated
from qurve.model.gpt import GPT, Block, Carried
from qurve.model.view import View
from qurve.projections.module import Projection, is_bare
from qurve.projections.prepared import matrix, prepare

HALF = (torch.bfloat16, torch.float16)
ONE_ROW = {"realize_opcount_threshold": 0}
"""Options of the compiler for one row: what a product reads is computed once, not anew for each of its columns."""


class Decoder:
    """Reads tokens, in chunks or one by one, and tells the logits of the one to come.

        decoder = Decoder(model, batch=1, padding_B=None, room=600)
        logits_BV = decoder.read(prompt_BT)
        while ...: logits_BV = decoder.read(next_B1)

    `padding_B`: tokens of padding at the left of each sequence. `room`: tokens to make room for at first; more is made
    as it is needed, up to the model's context, and beyond it `read` raises `ValueError`. `dtype`: of the matrix
    products and the cache, the model's own by default. A model that attends to a prefix takes its first read for it.

    `compile` compiles what a single token passes between one block's attention and the next, for one sequence on a CPU
    and for any number on a GPU. That takes some seconds, at once: it pays for long outputs.
    Raises `ValueError` where it cannot be (`why_not_compiled`).

    The model given is not changed. Make a new decoder after changing its weights.
    """

    def __init__(
        self,
        model: GPT,
        batch: int,
        padding_B: Tensor | None,
        room: int,
        dtype: torch.dtype | None = None,
        *,
        compile: bool = False,
    ) -> None:
        config, weight = model.config, next(model.parameters())
        if model.training and config.dropout:
            raise ValueError("the model is in training mode, where its dropout acts; call model.eval() first")
        if room < 1:
            raise ValueError(f"room = {room}: it must be at least 1 token")
        self.batch, self.device, self.dtype = batch, weight.device, dtype or weight.dtype
        if compile and (reason := why_not_compiled(model, batch, self.dtype)):
            raise ValueError(f"compile: {reason}")
        self.compiles = compile
        self.model, self.autocasts = model, self.dtype in HALF and self.dtype != weight.dtype
        if can_be_ready(model, self.dtype):
            # One row in float32 reads a plain weight as fast as a packed one, and a sum cannot read a packed one.
            plain = compile or (batch == 1 and self.dtype == torch.float32)
            self.model, self.autocasts = ready(model, self.dtype, not plain), False
        self.pieces = pieces(self.model, batch, self.dtype) if self.compiles else []
        room = min(room, config.context)
        self.cache = Cache(config, batch, room, padding_B=padding_B, device=self.device, dtype=self.dtype)
        if compile:  # now, and not as the first token comes
            with torch.inference_mode():
                self._one(torch.zeros(batch, 1, dtype=torch.long, device=self.device))
            self.cache.filled = 0

    @property
    def filled(self) -> int:
        """Tokens read so far, padding counted."""
        return self.cache.filled

    @torch.inference_mode()
    def read(self, ids_BT: Tensor) -> Tensor:
        """Logits of the last token `[B, V]` in float32, after all tokens so far and `ids_BT`, at least one each.

        Raises `ValueError` for another batch, for no tokens, and for more than the model's context holds.
        """
        if ids_BT.dim() != 2 or len(ids_BT) != self.batch or not ids_BT.shape[1]:
            raise ValueError(f"ids_BT has the shape {list(ids_BT.shape)}; it needs [{self.batch}, 1 or more]")
        model, cache, needed = self.model, self.cache, self.filled + ids_BT.shape[1]
        limits: dict[str, Tensor] = {}
        if model.config.attends == "prefix" and not self.filled:
            limits["prefix_B"] = torch.full((self.batch,), ids_BT.shape[1], device=self.device)
        if needed <= model.config.context:
            cache.reserve(needed)
        with torch.autocast(self.device.type, self.dtype, enabled=True) if self.autocasts else contextlib.nullcontext():
            if self.compiles and ids_BT.shape[1] == 1:
                logits_BV = self._one(ids_BT)[:, 0]
            else:
                hidden_BTD, _ = model.hidden(ids_BT, cache, **limits)
                # Without the tokens' axis: for the stride that a slice leaves to it torch would copy all of the weight.
                logits_BV = model.logits(hidden_BTD[:, -1])
        return logits_BV.float()

    @torch.inference_mode()
    def select(self, rows_K: Tensor) -> None:
        """Go on with these sequences, in this order: some left out, or some several times (see `Cache.select`)."""
        self.cache.select(rows_K)
        if len(rows_K) != self.batch and self.compiles:
            self.pieces = pieces(self.model, len(rows_K), self.dtype)
        self.batch = len(rows_K)

    def _one(self, ids_B1: Tensor) -> Tensor:
        """The model's forward pass over one token of each sequence, compiled but for the mixing in each block."""
        model, cache = self.model, self.cache
        blocks: list[Any] = [model.blocks[layer % len(model.blocks)] for layer in range(model.config.n_layers)]
        view = model.view(ids_B1, cache)
        enter, *betweens, last = self.pieces
        stream, x_BTD, *heads = enter(blocks[0], model.embedded(ids_B1, view), view)
        for layer, block in enumerate(blocks):
            y_BHTE: Tensor = block.attention.mix(*heads, view, cache.states[layer])
            y_BTO = y_BHTE.transpose(1, 2).flatten(2)
            if layer + 1 < len(blocks):
                stream, x_BTD, *heads = betweens[layer](block, blocks[layer + 1], stream, x_BTD, y_BTO, view)
        cache.filled += 1
        logits_BTV: Tensor = last(model, blocks[-1], stream, x_BTD, y_BTO)
        return logits_BTV


# ------------------------------------------------------------------------------------------- one token, between mixings
# A kind names everything that the code of a piece depends on.


def _enter(block: Any, stream: Tensor, view: View, carried: Carried = (None, None)) -> tuple[Tensor, ...]:
    inputs = block.inputs(stream, carried)
    return stream, inputs[0], *block.attention.enter(inputs, view, carried[0], None)


def _between(
    block: Any, following: Any, stream: Tensor, x_BTD: Tensor, y_BTO: Tensor, view: View
) -> tuple[Tensor, ...]:
    stream, carried = block.leave(stream, block.attention.leave(y_BTO, x_BTD))
    return _enter(following, stream, view, carried)


def _last(model: GPT, block: Any, stream: Tensor, x_BTD: Tensor, y_BTO: Tensor) -> Tensor:
    stream, _ = block.leave(stream, block.attention.leave(y_BTO, x_BTD))
    return model.logits(model.collapsed(stream))


@functools.lru_cache(maxsize=64)
def _compiled(part: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """The code of a piece for one kind, which is compared with nothing when it is called: comparing every tensor and
    setting with those it was made for, as is usual, takes as long as the piece. So each kind has a function of its own,
    as compiled code is kept by function."""
    own = types.FunctionType(part.__code__.replace(), part.__globals__, f"{part.__name__}_{kind}", part.__defaults__)
    options: dict[str, Any] = {**ONE_ROW, "guard_filter_fn": lambda guards: [False] * len(guards)}
    compiled: Callable[..., Any] = torch.compile(own, fullgraph=True, dynamic=False, options=options)
    return compiled


def pieces(model: GPT, batch: int, dtype: torch.dtype) -> list[Callable[..., Any]]:
    """Into the first block, from each block to the next, and out of the last; alike blocks share code."""
    layers = range(model.config.n_layers)
    blocks = [_kind(model.config.at(layer), model.blocks[layer % len(model.blocks)]) for layer in layers]
    weight = model.token_embedding.weight
    shared = _kind(batch, dtype, weight.dtype, weight.device, torch.get_num_threads(), model.final_norm)
    ways = [("", blocks[0]), *itertools.pairwise(blocks), (blocks[-1], "")]
    kinds = [hashlib.sha256(f"{shared}{before} to {after}".encode()).hexdigest()[:16] for before, after in ways]
    parts = [_enter, *[_between] * (len(blocks) - 1), _last]
    return [_compiled(part, kind) for part, kind in zip(parts, kinds, strict=True)]


def _kind(*parts: Any) -> str:
    """The parts in words, with the strides of their parameters, for which code is compiled too."""
    modules = [part for part in parts if isinstance(part, nn.Module)]
    return repr((*parts, [p.stride() for module in modules for p in module.parameters() if not p.is_mkldnn]))


# ----------------------------------------------------------------------------------------------------- which, and ready

PLAIN = (nn.Embedding, nn.Identity, nn.LayerNorm, nn.Linear, nn.ModuleList, nn.RMSNorm)


def is_as_built(model: GPT) -> bool:
    """Whether every module computes what its configuration says and nothing else: nothing wrapped, hooked, replaced,
    quantised, parametrised, sharded or of mixed dtypes, and no kind from outside this package."""
    tensors = list(model.parameters())
    return len({(p.dtype, p.device) for p in tensors}) == 1 and all(
        is_bare(m) and _is_ours(m.config) if isinstance(m, Projection) else _is_untouched(m) for m in model.modules()
    )


def _is_ours(part: object) -> bool:
    return type(part).__module__.partition(".")[0] == __name__.partition(".")[0]


def _is_untouched(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return (
        (_is_ours(module) or type(module) in PLAIN)
        and "forward" not in module.__dict__
        and not any(hooks)
        and all(type(p) is nn.Parameter for p in module._parameters.values() if p is not None)
    )


def can_be_ready(model: GPT, dtype: torch.dtype) -> bool:
    """Whether a copy with products in `dtype` computes what the model would under autocast."""
    return is_as_built(model) and (dtype == model.head_weight.dtype or keeps_a_wide_stream(model))


def keeps_a_wide_stream(model: GPT) -> bool:
    """Whether the residual stream, and so each norm's input and output, is as wide as the embeddings however narrow the
    products are."""
    residual = model.config.residual
    return residual.norm_place == "pre" and residual.attention_skip and residual.mlp_skip


def can_be_split(model: GPT) -> bool:
    """Whether each block is softmax attention as it stands in `qurve.model`, and a feed-forward without choices."""
    return all(
        isinstance(block, Block) and type(block.attention) is Attention and isinstance(block.config.mlp, (Dense, Gated))
        for block in model.blocks
    )


def why_not_compiled(model: GPT, batch: int, dtype: torch.dtype) -> str | None:
    """Why decoding cannot be compiled, and the way out; None where it can be."""
    if model.head_weight.device.type == "cpu" and batch > 1:
        return f"on a CPU it is for one sequence at a time, not for {batch}: leave it out"
    if not can_be_split(model) or not can_be_ready(model, dtype):
        return (
            "it is for softmax attention and feed-forwards without experts, with every module as it was built: leave "
            "it out for this model"
        )
    return None


def ready(model: GPT, dtype: torch.dtype, pack: bool) -> GPT:
    """A copy for inference of a model that is as it was built; what stays as it is, is shared."""
    copied: GPT = _prepared(model, dtype, pack)
    copied.head = nn.Linear(1, 1, bias=False, device="meta")
    copied.head.weight = nn.Parameter(matrix(model.head_weight, dtype, pack), requires_grad=False)
    return copied


def _prepared(module: nn.Module, dtype: torch.dtype, pack: bool) -> Any:
    """A copy of a module and of those in it, their projections prepared, which shares all else."""
    copied, inside = copy.copy(module), dict(module._modules)
    copied.training = False
    projections = {name: part for name, part in inside.items() if isinstance(part, Projection)}
    together = [name for name in getattr(module, "together", ()) if name in projections]
    if len({projections[name].dims.d_in for name in together}) > 1:
        together = []  # each has an input of its own
    for names in [together, *([name] for name in projections if name not in together)]:
        inside |= zip(names, prepare([projections[name] for name in names], dtype, pack), strict=True)
    for name, part in inside.items():
        if part is not None and name not in projections:
            inside[name] = _prepared(part, dtype, pack)
    copied._modules = inside
    return copied
