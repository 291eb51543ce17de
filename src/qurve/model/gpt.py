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
from qurve.model.attention import Attention
from qurve.model.cache import KVCache
from qurve.model.config import ModelConfig
from qurve.model.init import initialize
from qurve.projections import Linear
from qurve.runfolder import RunFolder


class FeedForward(nn.Module):
    """`GELU(x W_up) W_down`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = Linear().build(config.d_model, config.d_ff, bias=config.bias)
        self.down = Linear().build(config.d_ff, config.d_model, bias=config.bias)
        self.dropout = config.dropout

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(x_BTD))), self.dropout, self.training)


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model, config.norm_eps, bias=config.bias)
        self.attention = Attention(config, layer)
        self.mlp_norm = nn.LayerNorm(config.d_model, config.norm_eps, bias=config.bias)
        self.mlp = FeedForward(config)

    def forward(self, x_BTD: Tensor, cache: KVCache | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cache)
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
        self.position_embedding = nn.Embedding(config.context, config.d_model)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.final_norm = nn.LayerNorm(config.d_model, config.norm_eps, bias=config.bias)
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
        return logits_BTV

    def hidden(self, ids_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """The final norm's output `[B, T, D]`: all but the head."""
        start, length = (0 if cache is None else cache.filled), ids_BT.shape[1]
        if start + length > self.config.context:
            raise ValueError(f"{start + length} tokens do not fit the model's context of {self.config.context}")
        positions_T = torch.arange(start, start + length, device=ids_BT.device)
        x_BTD = self.token_embedding(ids_BT) + self.position_embedding(positions_T)
        x_BTD = F.dropout(x_BTD, self.config.dropout, self.training)
        for block in self.blocks:
            x_BTD = block(x_BTD, cache)
        if cache is not None:
            cache.advance(length)
        y_BTD: Tensor = self.final_norm(x_BTD)
        return y_BTD

    def loss(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross-entropy over the targets, in nats per token; softmax in float32."""
        logits_BTV = self.forward(ids_BT)
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())

    @property
    def head_weight(self) -> Tensor:
        return self.token_embedding.weight if self.head is None else self.head.weight
