"""The whole model: embeddings, pre-norm blocks, tied head.

Legend: B batch, T tokens, D model width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qurve.config import FORMAT, from_dict
from qurve.errors import BadInput
from qurve.files import check_manifest
from qurve.model.attention import Attention, Rotation
from qurve.model.cache import KVCache
from qurve.model.config import ModelConfig
from qurve.model.feed_forward import MixtureOfExperts
from qurve.model.feed_forward_modules import ExpertFeedForward
from qurve.model.init import initialize
from qurve.model.positions import Learned, Rope, rotations
from qurve.runfolder import RunFolder


def build_norm(config: ModelConfig) -> nn.Module:
    """The block's norm, over the model's width."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, config.norm_eps)
    return nn.LayerNorm(config.d_model, config.norm_eps, bias=config.bias)


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = Attention(config, layer)
        self.mlp_norm = build_norm(config)
        self.mlp = config.mlp.build(config)

    def forward(self, x_BTD: Tensor, rotation: Rotation | None = None, cache: KVCache | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation, cache)
        x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return x_BTD


class GPT(nn.Module):
    """The paper's model, for any projections.

    `GPT(config)(ids_BT) -> logits_BTV`; `.loss(ids, targets)` is the mean cross-entropy in nats per token;
    `GPT.from_run(folder)` loads a trained one. Initial weights depend on `seed` and each parameter's name alone.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        learned = isinstance(config.positions, Learned)
        self.position_embedding = nn.Embedding(config.context, config.d_model) if learned else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.final_norm = build_norm(config)
        self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        initialize(self, config.n_layers, seed)

    @classmethod
    def from_run(cls, folder: str | os.PathLike[str]) -> GPT:
        """The newest checkpoint of a run's folder, in evaluation mode, on the CPU. `BadInput` if there is none."""
        from safetensors import safe_open
        from safetensors.torch import load_file

        run = RunFolder(folder)
        tree, _ = run.config_json()
        if tree.get("format") != FORMAT:
            raise BadInput(f"{run.config_file} is of format {tree.get('format')!r}; this version reads format {FORMAT}")
        config = from_dict(ModelConfig, tree.get("model"), "model")
        file = run.latest_checkpoint() / "model.safetensors"
        check_manifest(file.parent, file.name)
        try:
            with safe_open(file, framework="pt") as opened:
                blocks = len({name.split(".")[1] for name in opened.keys() if name.startswith("blocks.")})  # noqa: SIM118
            if blocks != config.n_layers:
                raise BadInput(f"{blocks} blocks are in it, and {run.config_file} says {config.n_layers}")
            # Built without memory, so that none is taken for sizes that the file does not bear out.
            with torch.device("meta"):
                model = cls(config)
            model.load_state_dict(load_file(file), assign=True)
        except Exception as error:
            raise BadInput(f"{file} does not hold this run's model: {error}") from error
        return model.eval()

    def forward(self, ids_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits `[B, T, V]`. With a cache, `ids_BT` continues the tokens in it, and the cache grows by T."""
        logits_BTV: Tensor = F.linear(self.hidden(ids_BT, cache), self.head_weight)
        if (cap := self.config.logit_softcap) is not None:
            logits_BTV = cap * torch.tanh(logits_BTV.float() / cap)
        return logits_BTV

    def hidden(self, ids_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """The final norm's output `[B, T, D]`: all but the head."""
        start, length = (0 if cache is None else cache.filled), ids_BT.shape[1]
        if start + length > self.config.context:
            raise ValueError(f"{start + length} tokens do not fit the model's context of {self.config.context}")
        positions_T = torch.arange(start, start + length, device=ids_BT.device)
        x_BTD, rotation = self.token_embedding(ids_BT), None
        if self.position_embedding is not None:
            x_BTD = x_BTD + self.position_embedding(positions_T)
        elif isinstance(self.config.positions, Rope):
            rotation = rotations(self.config.positions, positions_T[None], self.config.head_width)
        x_BTD = F.dropout(x_BTD, self.config.dropout, self.training)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotation, cache)
        if cache is not None:
            cache.advance(length)
        y_BTD: Tensor = self.final_norm(x_BTD)
        return y_BTD

    def loss(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross-entropy over the targets, in nats per token; softmax in float32.

        In training a mixture of experts adds its load-balancing loss, weighted, mean over the blocks.
        """
        logits_BTV = self.forward(ids_BT)
        loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())
        if self.training and isinstance(self.config.mlp, MixtureOfExperts):
            balances = [module.balance_loss for module in self.modules() if isinstance(module, ExpertFeedForward)]
            loss = loss + self.config.mlp.balance * torch.stack(balances).mean()
        return loss

    @property
    def head_weight(self) -> Tensor:
        return self.token_embedding.weight if self.head is None else self.head.weight
