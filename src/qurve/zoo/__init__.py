"""The comparators: what other papers put in the place of a block's parts. Importing this registers their kinds.

Each kind stands in one file, its modules in another: `primer`, `linear_attention` and `mlp_attention` are mixers.
"""

from qurve.zoo import linear_attention, mlp_attention, primer

__all__ = ["linear_attention", "mlp_attention", "primer"]
