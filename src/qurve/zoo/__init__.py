"""The comparators: what other papers put in the place of a block's parts. Importing this registers their kinds.

Each kind stands in one file, its modules in another: `primer`, `linear_attention` and `mlp_attention` are mixers,
`hyper_connections` a residual scheme.
"""

from qurve.zoo import hyper_connections, linear_attention, mlp_attention, primer

__all__ = ["hyper_connections", "linear_attention", "mlp_attention", "primer"]
