"""The few tensor functions that projections are written with.

Precision: norms and activations run in float32, matrix products in the compute dtype (autocast's, else the weight's).
torch is imported on the first call, so that the configurations beside these functions stay light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Activation = Literal["gelu", "relu", "relu2", "silu", "identity"]
Norm = Literal["rmsnorm", "layernorm", "none"]

SECOND_MOMENT: dict[Activation, float] = {"gelu": 0.4252, "relu": 0.5, "relu2": 1.5, "silu": 0.3557, "identity": 1.0}
"""Mean of the squared activation over standard normal inputs."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b` in the compute dtype: `[…, in]`, `[out, in]` -> `[…, out]`."""
    import torch
    import torch.nn.functional as F

    bias = None if bias is None else bias.to(weight.dtype)
    if weight.device.type == "cpu" and not torch.is_grad_enabled():
        if torch.compiler.is_compiling():
            if x.numel() == x.shape[-1]:
                return _summed(x, weight, bias)
        elif torch.is_inference_mode_enabled() and (weight.is_mkldnn or _plain_float32(weight)):
            found: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(weight.dtype), weight, bias, "none", [], "")
            return found
    return F.linear(x.to(weight.dtype), weight, bias)


def _summed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same for one row, written as a sum: the compiler makes one pass over the weight of it, as fast as memory is;
    libraries' products take up to twice as long."""
    y = (wide(weight) * wide(x).reshape(-1)).sum(-1).to(weight.dtype).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def _plain_float32(weight: Tensor) -> bool:
    """Whether oneDNN's product, faster on a CPU than the one behind `F.linear`, can be had without packing. (In the
    half precisions both are one.)"""
    import torch

    return weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu") and has_onednn()


def has_onednn() -> bool:
    """Whether this build of torch carries oneDNN's products with packed weights."""
    import torch

    return bool(torch.backends.mkldnn.enabled) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def activate(kind: Activation, x: Tensor) -> Tensor:
    """`a(x)`, entry by entry, in the dtype of `x`. GELU is the exact one (erf), `relu2` the square of ReLU."""
    import torch.nn.functional as F

    if kind == "gelu":
        return F.gelu(x)
    if kind == "relu":
        return F.relu(x)
    if kind == "relu2":
        return F.relu(x).square()
    if kind == "silu":
        return F.silu(x)
    return x


def normalize(kind: Norm, x: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square or layer norm over the last axis, in float32 or wider; `none` returns `x` as it is.

    `[…, D]` to `[…, D]`; `gain` and `bias` are `[D]`, and an RMSNorm takes no bias.
    """
    import torch.nn.functional as F

    if kind == "none":
        return x
    x = wide(x)
    gain = None if gain is None else gain.to(x.dtype)
    if kind == "rmsnorm":
        return F.rms_norm(x, x.shape[-1:], gain, eps)
    return F.layer_norm(x, x.shape[-1:], gain, None if bias is None else bias.to(x.dtype), eps)


def inverse_deviation(kind: Norm, x: Tensor, eps: float) -> Tensor:
    """What the norm multiplies each row by, `[…, 1]`, in float32 or wider (its centring and gain left out)."""
    x = wide(x)
    if kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def fold(kind: Norm, weight: Tensor, gain: Tensor) -> Tensor:
    """The weight after which dividing each row by its deviation gives `norm(x) W`: `[out, in]`, folded in float32.

    `gain` is `[in]`. `RMSNorm(x) W = (x (g W)) / rms(x)`; for a layer norm the centring of `x` is one of the weight.
    """
    folded = wide(weight) * wide(gain)
    if kind == "layernorm":
        folded = folded - folded.mean(-1, keepdim=True)
    return folded.to(weight.dtype)


def wide(x: Tensor) -> Tensor:
    """float32 for half-precision input; float32 and float64 stay. A packed weight is laid out plainly again."""
    import torch

    if x.is_mkldnn:
        return x.to_dense(torch.float32)
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
