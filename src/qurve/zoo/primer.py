"""Primer's attention: a short convolution over time after the projections. Configuration; no torch at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qurve.errors import BadInput
from qurve.model.mixers import MixerConfig, Softmax

if TYPE_CHECKING:
    from torch import nn

    from qurve.model.config import ModelConfig


@MixerConfig.register("primer")
@dataclass(frozen=True)
class Primer(Softmax):
    """Softmax attention whose queries, keys and values are convolved over time (So et al., arXiv 2109.08668).

    The convolution is causal and depthwise: each channel of each head is a weighted sum of itself in the last `width`
    tokens. It comes right after the projections, before QK-norm and rotations, and starts as the identity. It looks
    back alone whatever `model.attends` says; a window limits attention, whose keys and values have each taken in up to
    `width - 1` tokens before it.

    Parameters added: `width * (H + 2 G) * E`. Its FLOPs, elementwise, are not counted, like those of norms. Decoding
    keeps keys and values, and the last `width - 1` projected tokens. Primer's other part, squared ReLU, is
    `model.mlp.activation = relu2`.
    """

    width: int = 3
    """Tokens that one weighted sum takes in, the present one included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width < 1:
            raise BadInput(f"mixer.width = {self.width}: it must be at least 1")

    def build(self, config: ModelConfig, layer: int) -> nn.Module:
        from qurve.zoo.primer_modules import PrimerAttention

        return PrimerAttention(config, layer, self.width)

    def state(self, config: ModelConfig, batch: int, length: int, **factory: Any) -> Any:
        from qurve.zoo.primer_modules import ProjectedKeysValues

        rows = (batch, self.width - 1, self.channels(config))
        return ProjectedKeysValues(config, batch, length, rows, **factory)

    def channels(self, config: ModelConfig) -> int:
        """Of queries, keys and values together."""
        return (config.n_heads + 2 * config.kv_heads) * config.head_width

    def num_params(self, config: ModelConfig) -> int:
        return super().num_params(config) + self.width * self.channels(config)

    def state_numbers(self, config: ModelConfig, length: int) -> int:
        return super().state_numbers(config, length) + (self.width - 1) * self.channels(config)
