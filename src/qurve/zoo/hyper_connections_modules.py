"""The modules behind `qurve.zoo.hyper_connections`.

The streams and all that is computed with them stay in float32 or wider, under autocast too: rounding them at every
sublayer would be rounding the residual stream.

Legend: B batch, T tokens, N streams, D model width, R inputs of the sublayer (1, or 3: queries, keys, values),
M the numbers of a flattened matrix.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qurve.model.config import ModelConfig
from qurve.model.residual import Sublayer
from qurve.model.residual_modules import Residual
from qurve.projections.functional import Norm, normalize, wide
from qurve.zoo.hyper_connections import HyperConnections

SCALE = 0.01
"""What the dynamic part is multiplied by at the start."""
READ_OWN = 0.75
"""`Manifold`'s weight, at the start, of the stream that a sublayer reads; the others share the rest."""
MIX_OWN = 5.0
"""`Manifold`'s logit, at the start, of a stream's weight in its own next value; those of the others are zero."""
SINKHORN_STEPS = 20
FLOOR = -60.0
"""Smallest logit in `Manifold`'s mix beside the largest of its column."""


class Static(Residual):
    """`h <- M h + w F(norm(r h))` with parameters r, w, M."""

    def __init__(self, scheme: HyperConnections, config: ModelConfig, layer: int, sublayer: Sublayer) -> None:
        super().__init__()
        self.streams, self.inputs, self.d_model = scheme.streams, scheme.inputs(sublayer), config.d_model
        self.norm: Norm = config.norm
        self.norm_eps = config.norm_eps
        # Flat: what has one axis gets no weight decay.
        self.read_weights = nn.Parameter(torch.empty(self.inputs * self.streams))
        self.write_weights = nn.Parameter(torch.empty(self.streams))
        self.mix_weights = nn.Parameter(torch.empty(self.streams * self.streams))
        own = (2 * layer + (sublayer == "mlp")) % self.streams
        # On the CPU, whatever the device that the module is built on: a start has values.
        with torch.device("cpu"):
            self.starts: dict[str, float | Tensor] = {
                "read_weights": self.start_of_read(own).repeat(self.inputs),
                "write_weights": self.start_of_write(),
                "mix_weights": self.start_of_mix().flatten(),
            }

    def start_of_read(self, own: int) -> Tensor:
        return F.one_hot(torch.tensor(own), self.streams).float()

    def start_of_write(self) -> float:
        return 1.0

    def start_of_mix(self) -> Tensor:
        return torch.eye(self.streams)

    def read(self, stream_BTND: Tensor, norm: nn.Module) -> tuple[Tensor, ...]:
        with full_precision(stream_BTND):
            h_BTND = wide(stream_BTND)
            x_BTRD = self.reading(h_BTND) @ h_BTND
        return tuple(norm(x_BTD) for x_BTD in x_BTRD.to(stream_BTND.dtype).unbind(-2))

    def write(self, stream_BTND: Tensor, y_BTD: Tensor, norm: nn.Module) -> Tensor:
        with full_precision(stream_BTND):
            h_BTND = wide(stream_BTND)
            write_N, mix_NN = self.writing(h_BTND)
            out_BTND: Tensor = mix_NN @ h_BTND + write_N[..., None] * wide(y_BTD)[..., None, :]
        return out_BTND.to(stream_BTND.dtype)

    def reading(self, h_BTND: Tensor) -> Tensor:
        """r: `[R, N]`, with B and T before them where each token has its own."""
        return wide(self.read_weights).view(self.inputs, self.streams)

    def writing(self, h_BTND: Tensor) -> tuple[Tensor, Tensor]:
        """w and M: `[N]` and `[N, N]` (to, from), with B and T before them where each token has its own."""
        return wide(self.write_weights), wide(self.mix_weights).view(self.streams, self.streams)


class Dynamic(Static):
    """To each of r, w and M is added `scale * tanh(norm(h) W)`, made of each stream by itself.

    A stream makes its weight in each read, its weight in the write, and its weights in the next values of all streams.
    The norm is the model's, without a gain, which W can take in.
    """

    def __init__(self, scheme: HyperConnections, config: ModelConfig, layer: int, sublayer: Sublayer) -> None:
        super().__init__(scheme, config, layer, sublayer)
        self.read_matrix = nn.Parameter(torch.empty(self.inputs, self.d_model))
        self.write_matrix = nn.Parameter(torch.empty(1 + self.streams, self.d_model))
        self.scales = nn.Parameter(torch.empty(2))  # of r and M, of w
        self.starts |= {"read_matrix": 0.0, "write_matrix": 0.0, "scales": SCALE}

    def reading(self, h_BTND: Tensor) -> Tensor:
        mix_scale, _ = wide(self.scales)
        made_BTRN = self.made_of(h_BTND, self.read_matrix).transpose(-1, -2)
        read_BTRN: Tensor = super().reading(h_BTND) + mix_scale * made_BTRN
        return read_BTRN

    def writing(self, h_BTND: Tensor) -> tuple[Tensor, Tensor]:
        write_N, mix_NN = super().writing(h_BTND)
        mix_scale, write_scale = wide(self.scales)
        write_BTN1, mix_BTNN = torch.split(self.made_of(h_BTND, self.write_matrix), [1, self.streams], dim=-1)
        return write_N + write_scale * write_BTN1.squeeze(-1), mix_NN + mix_scale * mix_BTNN.transpose(-1, -2)

    def made_of(self, h_BTND: Tensor, matrix: Tensor) -> Tensor:
        normed_BTND = normalize(self.norm, h_BTND, None, None, self.norm_eps)
        return torch.tanh(F.linear(normed_BTND, wide(matrix)))


class Manifold(Static):
    """The logits of all weights are made of all streams, `parameter + scale * (norm(h) W)`, and then constrained:

        r = sigmoid(logits)        w = 2 sigmoid(logits)        M = sinkhorn(logits)

    The norm is a root-mean-square norm over the `N D` numbers of a token's streams.
    """

    def __init__(self, scheme: HyperConnections, config: ModelConfig, layer: int, sublayer: Sublayer) -> None:
        super().__init__(scheme, config, layer, sublayer)
        n, r = self.streams, self.inputs
        self.read_matrix = nn.Parameter(torch.empty(r * n, n * self.d_model))
        self.write_matrix = nn.Parameter(torch.empty(n + n * n, n * self.d_model))
        self.scales = nn.Parameter(torch.empty(3))  # of r, of w, of M
        self.starts |= {"read_matrix": 0.0, "write_matrix": 0.0, "scales": SCALE}

    def start_of_read(self, own: int) -> Tensor:
        weights_N = torch.full((self.streams,), (1 - READ_OWN) / (self.streams - 1))
        weights_N[own] = READ_OWN
        return weights_N.logit()

    def start_of_write(self) -> float:
        return 0.0

    def start_of_mix(self) -> Tensor:
        return MIX_OWN * torch.eye(self.streams)

    def reading(self, h_BTND: Tensor) -> Tensor:
        read_scale, _, _ = wide(self.scales)
        made_BTM = self.made_of(h_BTND, self.read_matrix)
        made_BTRN = made_BTM.view(*made_BTM.shape[:2], self.inputs, self.streams)
        return torch.sigmoid(super().reading(h_BTND) + read_scale * made_BTRN)

    def writing(self, h_BTND: Tensor) -> tuple[Tensor, Tensor]:
        n = self.streams
        write_N, mix_NN = super().writing(h_BTND)
        _, write_scale, mix_scale = wide(self.scales)
        write_BTN, mix_BTM = torch.split(self.made_of(h_BTND, self.write_matrix), [n, n * n], dim=-1)
        mix_BTNN = mix_BTM.reshape(*mix_BTM.shape[:2], n, n)
        return 2 * torch.sigmoid(write_N + write_scale * write_BTN), sinkhorn(mix_NN + mix_scale * mix_BTNN)

    def made_of(self, h_BTND: Tensor, matrix: Tensor) -> Tensor:
        return F.linear(normalize("rmsnorm", h_BTND.flatten(-2), None, None, self.norm_eps), wide(matrix))


def sinkhorn(logits_NN: Tensor, steps: int = SINKHORN_STEPS) -> Tensor:
    """`exp(logits)` with its columns and its rows divided by their sums, in turn: towards a doubly stochastic matrix.

    The rows come last and sum to one exactly, the columns as far as the steps have come: to about a hundredth where a
    matrix is close to a permutation, where they come slowly.
    """
    # Each column's largest is taken out, which its sum would take out in any case, and there is a floor: so no sum
    # overflows or is zero. In logarithms neither could be, but compilers then take several times as long.
    mix_NN = (logits_NN - logits_NN.detach().amax(-2, keepdim=True)).clamp(min=FLOOR).exp()
    for _ in range(steps):
        mix_NN = mix_NN / mix_NN.sum(-2, keepdim=True)
        mix_NN = mix_NN / mix_NN.sum(-1, keepdim=True)
    return mix_NN


def full_precision(x: Tensor) -> AbstractContextManager[None]:
    """Without autocast."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
