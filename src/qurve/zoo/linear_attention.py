"""Linear attention: kernel feature maps in place of the softmax. Configuration; no torch at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from qurve.model.mixers import MixerConfig

if TYPE_CHECKING:
    from torch import nn

    from qurve.model.config import ModelConfig

FeatureMap = Literal["elu", "relu", "softmax"]


@MixerConfig.register("linear_attention")
@dataclass(frozen=True)
class LinearAttention(MixerConfig):
    """`sum_s (phi(q_t) psi(k_s)) v_s / sum_s phi(q_t) psi(k_s)` (Katharopoulos et al., arXiv 2006.16236).

    Decoding keeps two sums, of `psi(k) v^T` and of `psi(k)`, in float32 and of one size however long the text.
    A causal model is trained with the masked product `phi(Q) psi(K)^T`, at softmax attention's cost; a bidirectional
    one with the sums. Rotary positions turn the features, in the numerator alone (Su et al., arXiv 2104.09864, section
    3.3). Dropout acts on the output only: no weights are there to drop.

    No parameters are added.
    """

    query_map: FeatureMap = "elu"
    """phi, per head: `elu(q) + 1` (theirs), `relu(q)`, or the softmax over the head's channels."""
    key_map: FeatureMap = "elu"
    """psi, likewise."""

    def check(self, config: ModelConfig) -> None:
        way_out = "; use the mixer 'softmax', or leave that setting"
        if config.attends == "prefix":
            raise ValueError(f"linear attention sums over all tokens, or those before: it knows no prefix{way_out}")
        if config.window is not None:
            raise ValueError(f"linear attention's sums forget nothing: it has no window{way_out}")
        for name in ("attention_scale", "attention_softcap"):
            if getattr(config, name) is not None:
                raise ValueError(f"linear attention has no logits that model.{name} could act on{way_out}")
        if not config.residual.attention_skip:
            raise ValueError(
                "linear attention has no start at which a missing skip keeps the signal; "
                "keep model.residual.attention, or use the mixer 'softmax'"
            )

    def build(self, config: ModelConfig, layer: int) -> nn.Module:
        from qurve.zoo.linear_attention_modules import FeatureAttention

        return FeatureAttention(config, layer, self)

    def state(self, config: ModelConfig, batch: int, length: int, **factory: Any) -> Any:
        from qurve.zoo.linear_attention_modules import Sums

        return Sums(config, batch, **factory)

    def num_params(self, config: ModelConfig) -> int:
        return 0

    def mixing_flops(self, config: ModelConfig, seen: int) -> int:
        width = config.head_width
        if config.attends == "bidirectional":  # psi(k) v^T, and phi(q)'s product with their sum
            return 2 * (config.kv_heads + config.n_heads) * width * width
        return 4 * config.n_heads * width * seen  # phi(q) psi(k)^T, and its product with v

    def decoding_flops(self, config: ModelConfig, held: int, new: int) -> int:
        """Forward FLOPs per token of mixing `new` tokens with each other and with the sums, whatever those hold."""
        width = config.head_width
        return 4 * config.n_heads * width * new + 2 * (config.kv_heads + config.n_heads) * width * width

    def state_numbers(self, config: ModelConfig, length: int) -> int:
        return config.kv_heads * config.head_width * (config.head_width + 1)

    def state_bytes(self, config: ModelConfig, length: int, dtype_bytes: int) -> int:
        return max(dtype_bytes, 4) * self.state_numbers(config, length)
