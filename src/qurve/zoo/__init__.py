"""The comparators: what other papers put in the place of a block's parts. Importing this registers their kinds.

Each cites its source and states its size, in a file without torch; modules stand in files of their own. `primer`,
`linear_attention` and `mlp_attention` are mixers, `hyper_connections` a residual scheme.
"""

from qurve.zoo import hyper_connections, linear_attention, mlp_attention, primer, projections

__all__ = ["hyper_connections", "linear_attention", "mlp_attention", "primer", "projections"]
