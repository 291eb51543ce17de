"""The whole model: embeddings, blocks, tied head.

Legend: B batch, T tokens, D model width, F feed-forward width, W channels of the concept subspaces, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qurve.config import FORMAT, from_dict
from qurve.errors import BadInput
from qurve.files import check_manifest
from qurve.model.cache import Cache
from qurve.model.config import ModelConfig
from qurve.model.feed_forward_modules import ExpertFeedForward
from qurve.model.init import initialize
from qurve.model.positions import Learned, Rope, rotations
from qurve.model.view import View
from qurve.ops.cross_entropy import capped, linear_cross_entropy
from qurve.projections import Linear
from qurve.projections.base import STD
from qurve.projections.functional import linear
from qurve.runfolder import RunFolder

Carried = tuple[Tensor | None, Tensor | None]
"""What a block hands to the next beside the stream: hidden activations `[B, T, F]`, subspaces' channels `[B, T, W]`."""


def build_norm(config: ModelConfig) -> nn.Module:
    """The block's norm, over the model's width; nothing where the topology has none."""
    if config.residual.norm_place == "none":
        return nn.Identity()
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, config.norm_eps)
    return nn.LayerNorm(config.d_model, config.norm_eps, bias=config.bias)


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`; the residual scheme says what `+` is and where norms stand."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        here = config.at(layer)
        self.config = here
        self.attention_norm = build_norm(config)
        self.attention_residual = config.residual.build(config, layer, "attention")
        self.attention = here.mixer.build(config, layer)
        self.mlp_norm = build_norm(config)
        self.mlp_residual = config.residual.build(config, layer, "mlp")
        self.mlp = here.mlp.build(here)
        width = config.subspaces.total if layer < config.n_layers - 1 else 0
        self.subspaces = Linear().build(here.mlp.hidden_width(config.d_ff), width) if width else None

    def forward(
        self, stream: Tensor, view: View, carried: Carried = (None, None), state: Any = None
    ) -> tuple[Tensor, Carried]:
        """The stream behind this block, and what it hands to the next one. `state` is what decoding keeps of it."""
        inputs = self.inputs(stream, carried)
        return self.leave(stream, self.attention(inputs, view, carried[0], state))

    def inputs(self, stream: Tensor, carried: Carried) -> tuple[Tensor, ...]:
        """What attention reads: one tensor `[B, T, D]`, or one each for queries, keys and values."""
        inputs = self.attention_residual.read(stream, self.attention_norm)
        return inputs if carried[1] is None else self._with_subspaces(inputs, carried[1])

    def leave(self, stream: Tensor, y_BTD: Tensor) -> tuple[Tensor, Carried]:
        """The rest of the block, from attention's output on."""
        stream = self.attention_residual.write(stream, y_BTD, self.attention_norm)
        (x_BTD,) = self.mlp_residual.read(stream, self.mlp_norm)
        y_BTD, hidden_BTF = self.mlp(x_BTD)
        stream = self.mlp_residual.write(stream, y_BTD, self.mlp_norm)
        return stream, (hidden_BTF, None if self.subspaces is None else self.subspaces(hidden_BTF))

    def _with_subspaces(self, inputs: tuple[Tensor, ...], routed_BTW: Tensor) -> tuple[Tensor, ...]:
        """The inputs of queries, keys and values, each with the channels that it sees."""
        widths = self.config.subspaces.widths
        parts = dict(zip(widths, torch.split(routed_BTW, list(widths.values()), dim=-1), strict=True))
        x_q, x_k, x_v = inputs * 3 if len(inputs) == 1 else inputs
        return tuple(
            torch.cat([x, *(part.to(x.dtype) for name, part in parts.items() if pathway in name)], dim=-1)
            for pathway, x in (("q", x_q), ("k", x_k), ("v", x_v))
        )


class GPT(nn.Module):
    """The paper's model, for any projections.

    `GPT(config)(ids_BT) -> logits_BTV`; `.loss(ids, targets)` is the mean cross-entropy in nats per token;
    `GPT.from_run(folder)` loads a trained one. Initial weights depend on `seed` and each parameter's name alone: two
    models share every tensor of the same name and shape. Weights are of torch's default dtype and device.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        learned = isinstance(config.positions, Learned)
        self.position_embedding = nn.Embedding(config.context, config.d_model) if learned else None
        blocks = 1 if config.share_blocks else config.n_layers
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(blocks))
        self.final_norm = build_norm(config) if config.residual.norm_place == "pre" else nn.Identity()
        self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        initialize(self, config, seed)
        self.expert_usage: dict[int, Tensor] = {}
        """Each expert's share of the choices `[N]` in the last forward pass, by block, where there are experts."""

    @classmethod
    def from_run(cls, folder: str | os.PathLike[str], step: int | None = None) -> GPT:
        """The newest checkpoint of a run's folder, or the one of `step`, in evaluation mode, on the CPU. `BadInput` if
        there is none."""
        from safetensors import safe_open
        from safetensors.torch import load_file

        run = RunFolder(folder)
        tree, _ = run.config_json()
        if tree.get("format") != FORMAT:
            raise BadInput(f"{run.config_file} is of format {tree.get('format')!r}; this version reads format {FORMAT}")
        config = from_dict(ModelConfig, tree.get("model"), "model")
        file = (run.latest_checkpoint() if step is None else run.kept_checkpoint(step)) / "model.safetensors"
        check_manifest(file.parent, file.name)
        try:
            with safe_open(file, framework="pt") as opened:
                blocks = len({name.split(".")[1] for name in opened.keys() if name.startswith("blocks.")})  # noqa: SIM118
            if blocks != (1 if config.share_blocks else config.n_layers):
                raise BadInput(f"{blocks} blocks are in it, and {run.config_file} says {config.n_layers}")
            # Built without memory, so that none is taken for sizes that the file does not bear out.
            with torch.device("meta"):
                model = cls(config)
            model.load_state_dict(load_file(file), assign=True)
        except Exception as error:
            raise BadInput(f"{file} does not hold this run's model: {error}") from error
        return model.eval()

    def forward(
        self,
        ids_BT: Tensor,
        cache: Cache | None = None,
        *,
        padding_B: Tensor | None = None,
        prefix_B: Tensor | None = None,
        allowed_BTT: Tensor | None = None,
    ) -> Tensor:
        """Logits `[B, T, V]` of ids `[B, T]`, whole numbers below V. With a cache, `ids_BT` continues the tokens in it,
        and it grows by T.

        `padding_B`: tokens of padding at the left of each sequence (with a cache: given to it). `prefix_B`: how many
        tokens at the beginning all see each other, for a model that attends so; the first call has to hold them.
        `allowed_BTT` `[B or 1, T, T]`: further limits, false where a token (second axis) may not see another.
        Raises `ValueError` for more tokens than the context holds, and for limits that do not fit the ids or the model.
        """
        hidden_BTD, _ = self.hidden(ids_BT, cache, padding_B=padding_B, prefix_B=prefix_B, allowed_BTT=allowed_BTT)
        return self.logits(hidden_BTD)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """The head: `[B, T, D]` -> `[B, T, V]`."""
        logits_BTV = linear(self._scaled(hidden_BTD), self.head_weight)
        return logits_BTV if self.config.logit_softcap is None else capped(logits_BTV, self.config.logit_softcap)

    def _scaled(self, hidden_BTD: Tensor) -> Tensor:
        """What the head multiplies: a tied embedding that starts larger than a head would is scaled back."""
        if self.config.tie_embeddings and self.config.embedding_std != STD:
            return STD / self.config.embedding_std * hidden_BTD
        return hidden_BTD

    def hidden(
        self, ids_BT: Tensor, cache: Cache | None = None, **limits: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """All but the head: `[B, T, D]`, and the weighted load-balancing loss of each block that has one."""
        config = self.config
        view = self.view(ids_BT, cache, **limits)
        if cache is not None:
            cache.reserve(view.start + view.length)
        stream = self.embedded(ids_BT, view)
        carried: Carried = (None, None)
        balances, usage = [], {}
        for layer in range(config.n_layers):
            block = self.blocks[0 if config.share_blocks else layer]
            stream, carried = block(stream, view, carried, None if cache is None else cache.states[layer])
            if isinstance(block.mlp, ExpertFeedForward):
                balances.append(block.mlp.kind.balance * block.mlp.balance_loss)
                usage[layer] = block.mlp.usage_N
        self.expert_usage = usage
        if cache is not None:
            cache.filled += view.length
        return self.collapsed(stream), balances

    def collapsed(self, stream: Tensor) -> Tensor:
        """What the head reads of the last block's stream, `[B, T, D]`."""
        y_BTD: Tensor = self.final_norm(self.config.residual.collapse(stream))
        return y_BTD

    def embedded(self, ids_BT: Tensor, view: View) -> Tensor:
        """The stream that the first block reads."""
        x_BTD = self.token_embedding(ids_BT)
        if self.position_embedding is not None:
            x_BTD = x_BTD + self.position_embedding(view.positions_BT())
        return self.config.residual.expand(F.dropout(x_BTD, self.config.dropout, self.training))

    def view(
        self,
        ids_BT: Tensor,
        cache: Cache | None = None,
        *,
        padding_B: Tensor | None = None,
        prefix_B: Tensor | None = None,
        allowed_BTT: Tensor | None = None,
    ) -> View:
        """Who may see whom. Raises `ValueError` for what does not fit the model or the cache."""
        config, start, length = self.config, 0 if cache is None else cache.filled, ids_BT.shape[1]
        if start + length > config.context:
            raise ValueError(f"{start + length} tokens do not fit the model's context of {config.context}")
        if cache is not None and padding_B is not None:
            raise ValueError("give padding_B to the cache, which keeps it for the tokens to come")
        if (prefix_B is not None) != (config.attends == "prefix" and start == 0):
            why = "is needed" if prefix_B is None else "has no place"
            raise ValueError(
                f"prefix_B {why} here: it is for model.attends = prefix, in the call that holds the prefix"
            )
        for name, lengths_B in (("padding_B", padding_B), ("prefix_B", prefix_B)):
            if lengths_B is not None and lengths_B.shape != ids_BT.shape[:1]:
                shape, batch = list(lengths_B.shape), len(ids_BT)
                raise ValueError(f"{name} has the shape {shape}; it needs one number a sequence, {batch}")
        if cache is not None and prefix_B is not None and not prefix_B.is_meta and prefix_B.max() > length:
            raise ValueError(f"a prefix of {prefix_B.max()} tokens has to be in one call, and this one has {length}")
        if allowed_BTT is not None and (cache is not None or allowed_BTT.shape[-2:] != (length, length)):
            raise ValueError(f"allowed_BTT needs the shape [B or 1, {length}, {length}], and no cache beside it")
        if allowed_BTT is not None and (
            allowed_BTT.dtype != torch.bool or allowed_BTT.shape[0] not in (1, len(ids_BT))
        ):
            given = f"{list(allowed_BTT.shape)} of {allowed_BTT.dtype}"
            raise ValueError(f"allowed_BTT is {given}; it is of torch.bool, one for each sequence or one for all")
        padding_B = padding_B if cache is None else cache.padding_B
        view = View(config.attends, start, length, ids_BT.device, padding_B, prefix_B, allowed_BTT)
        if isinstance(config.positions, Rope):
            rotation = rotations(config.positions, view.positions_BT(), config.head_width)
            view = dataclasses.replace(view, rotation=rotation)
        return view

    def loss(self, ids_BT: Tensor, targets_BT: Tensor, prefix_B: Tensor | None = None) -> Tensor:
        """Mean cross-entropy over the targets, in nats per token; softmax in float32. Targets of -100 do not count.

        In training a mixture of experts adds its load-balancing loss, weighted, mean over the blocks.
        Ids and targets are `[B, T]`; `prefix_B` as in `forward`, which says what it raises.
        """
        hidden_BTD, balances = self.hidden(ids_BT, prefix_B=prefix_B)
        hidden_ND = self._scaled(hidden_BTD).flatten(0, 1)
        loss = linear_cross_entropy(hidden_ND, self.head_weight, targets_BT.flatten(), self.config.logit_softcap)
        if self.training and balances:
            loss = loss + torch.stack(balances).mean()
        return loss

    @property
    def head_weight(self) -> Tensor:
        """`[V, D]`: the token embedding where they are tied."""
        return self.token_embedding.weight if self.head is None else self.head.weight
