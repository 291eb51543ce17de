"""Projections: what maps the block's normalised input to queries, keys or values. The heart of qurve.

`base` holds the contract, each family stands in one file, `module` makes an `nn.Module` of it and fuses several into
one matrix product. A new projection costs one file and one line here.
"""

from qurve.projections.base import Dims, ParameterSpec, ProjectionConfig, Reach
from qurve.projections.bottleneck import Bottleneck
from qurve.projections.identity import Identity, Residual
from qurve.projections.linear import Linear
from qurve.projections.mlp_reuse import MLPReuse

__all__ = [
    "Bottleneck",
    "Dims",
    "Identity",
    "Linear",
    "MLPReuse",
    "ParameterSpec",
    "ProjectionConfig",
    "Reach",
    "Residual",
]
