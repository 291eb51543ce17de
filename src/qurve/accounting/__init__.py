"""What a model costs, by asking its configuration, and controls that cost the same. Light: torch comes when asked for.

count(config)                               parameters, FLOPs per token in training, prefill and decoding
state_bytes(config, batch, length)          what decoding keeps (the key/value cache)
activation_bytes(config, batch, length)     what training keeps for the backward pass
mlp_widened(baseline, match="params", by=0.125), match("flops", arm, baseline)      matched controls, solved for
utilisation(gpu, flops_per_second, precision)      share of a known device's peak, None for others
"""

from qurve.accounting.activations import activation_bytes
from qurve.accounting.costs import Count, count, state_bytes
from qurve.accounting.devices import PEAK_FLOPS, utilisation
from qurve.accounting.matching import Match, match, mlp_widened

__all__ = [
    "PEAK_FLOPS",
    "Count",
    "Match",
    "activation_bytes",
    "count",
    "match",
    "mlp_widened",
    "state_bytes",
    "utilisation",
]
