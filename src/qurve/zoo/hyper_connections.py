"""Hyper-connections: several residual streams, and learned weights for reading, writing and mixing them.

The stream is `[B, T, N, D]`. With h the N streams of one token, each sublayer F has

    h  <-  M h + w F(norm(r h))            r [1, N] reads, w [N, 1] writes, M [N, N] mixes

Sources: hyper-connections, Zhu et al., arXiv 2409.19606; manifold-constrained, Xie et al., arXiv 2512.24880; separate
reads for queries, keys and values, arXiv 2603.13381.

Legend: B batch, T tokens, N streams, D model width, R inputs of the sublayer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from qurve.errors import BadInput
from qurve.model.residual import ResidualConfig, Sublayer

if TYPE_CHECKING:
    from torch import Tensor

    from qurve.model.config import ModelConfig
    from qurve.model.residual_modules import Residual


@ResidualConfig.register("hyper")
@dataclass(frozen=True)
class HyperConnections(ResidualConfig):
    """`streams` copies of the embedding, carried through the blocks; their mean goes to the final norm.

    - `static`: the weights r, w, M are parameters.
    - `dynamic`: `scale * tanh(norm(h) W)` is added to each, of every stream by itself; `scale` starts at 0.01.
    - `manifold`: the weights are made of all the streams of a token, and r of (0, 1), w of (0, 2), M doubly stochastic:
      what is carried on is an average, which does not grow or vanish over the depth.

    The start computes what a pre-norm residual network computes, to rounding. All w are 1 and each W is zero. Sublayer
    k, counting attention and feed-forward, reads stream k mod N alone and M is the identity; only under `manifold`,
    whose source states no start, the read takes three quarters of that stream (the others share the rest; equal streams
    would stay equal for ever) and the logits of M are 5 on the diagonal and 0 beside it. The mean stands in for the
    sources' sum, which differs by the factor N that the final norm takes out again, but for its epsilon; for the same
    reason no output matrix starts larger.

    Parameters of one sublayer, with R reads (1, or 3 for the pathways of attention) and `W = (R + 1 + N) N`: `W`
    static, `W + W D / N + 2` dynamic, `W + W N D + 3` manifold.

    r, w, M and the scales are stored flat, so that they get no weight decay, as in the source; W gets it. Under
    `manifold` the M of the first and of the last sublayer change nothing: averages of equal streams are equal to them,
    and what sums to one over the columns leaves the mean as it is.
    """

    streams: int = 4
    mode: Literal["static", "dynamic", "manifold"] = "dynamic"
    pathways: bool = False
    """Whether queries, keys and values each read the streams with weights of their own, before one and the same norm.
    What else reads the block's input (an output projection, say) takes that of the queries."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streams < 2:
            raise BadInput(
                f"model.residual.streams = {self.streams}: hyper-connections need at least 2; with one stream use "
                "model.residual = skip"
            )

    def check(self, config: ModelConfig) -> None:
        missing = [name for name in ("query", "key", "value") if name not in config.mixer.projections]
        if self.pathways and missing:
            raise BadInput(
                f"model.residual.pathways: model.mixer = {config.mixer.kind} has no {' and no '.join(missing)} to read "
                "streams for; leave pathways false"
            )

    def inputs(self, sublayer: Sublayer) -> int:
        """R: one input, or three for the pathways of attention."""
        return 3 if self.pathways and sublayer == "attention" else 1

    def weights(self, sublayer: Sublayer) -> int:
        """How many numbers r, w and M are together, for one token."""
        return (self.inputs(sublayer) + 1 + self.streams) * self.streams

    def build(self, config: ModelConfig, layer: int, sublayer: Sublayer) -> Residual:
        from qurve.zoo import hyper_connections_modules as modules

        module = {"static": modules.Static, "dynamic": modules.Dynamic, "manifold": modules.Manifold}[self.mode]
        return module(self, config, layer, sublayer)

    def expand(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unsqueeze(-2).repeat(1, 1, self.streams, 1)

    def collapse(self, stream_BTND: Tensor) -> Tensor:
        return stream_BTND.mean(-2)

    def num_params(self, config: ModelConfig, sublayer: Sublayer) -> int:
        weights = self.weights(sublayer)
        if self.mode == "dynamic":  # W makes the weights of one stream from that stream, and there are two scales
            return weights + weights // self.streams * config.d_model + 2
        if self.mode == "manifold":  # W makes all weights from all streams, and there are three scales
            return weights + weights * self.streams * config.d_model + 3
        return weights

    def flops_per_token(self, config: ModelConfig, sublayer: Sublayer) -> int:
        """The products with r, with M and with W; the write `w F(...)` is elementwise, and so are Sinkhorn's steps."""
        reading_and_mixing = 2 * (self.inputs(sublayer) + self.streams) * self.streams * config.d_model
        if self.mode == "static":
            return reading_and_mixing
        every_stream = self.streams if self.mode == "manifold" else 1
        return reading_and_mixing + 2 * self.weights(sublayer) * every_stream * config.d_model
