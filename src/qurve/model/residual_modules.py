"""The modules behind `qurve.model.residual`."""

from __future__ import annotations

from torch import Tensor, nn


class Residual(nn.Module):
    """How one sublayer reads the stream and writes to it."""

    def read(self, stream: Tensor, norm: nn.Module) -> tuple[Tensor, ...]:
        """The sublayer's inputs: one tensor `[B, T, D]`, or, for attention, one each for queries, keys and values."""
        raise NotImplementedError

    def write(self, stream: Tensor, y_BTD: Tensor, norm: nn.Module) -> Tensor:
        """The stream after it."""
        raise NotImplementedError


class SkipConnection(Residual):
    """Pre-norm, post-norm or no norm, with or without the skip."""

    def __init__(self, norms: str, skip: bool) -> None:
        super().__init__()
        self.norms, self.skip = norms, skip

    def read(self, stream_BTD: Tensor, norm: nn.Module) -> tuple[Tensor, ...]:
        x_BTD: Tensor = norm(stream_BTD) if self.norms == "pre" else stream_BTD
        return (x_BTD,)

    def write(self, stream_BTD: Tensor, y_BTD: Tensor, norm: nn.Module) -> Tensor:
        out_BTD: Tensor = stream_BTD + y_BTD if self.skip else y_BTD
        return norm(out_BTD) if self.norms == "post" else out_BTD
