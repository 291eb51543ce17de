"""`Projection`, the `nn.Module` of every kind, and `project`, which runs several of them as one matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from qurve.ops import compiled
from qurve.ops.heads import Impl, Way, check_impl, choose, no_triton
from qurve.projections.base import STD, Dims, ProjectionConfig
from qurve.projections.functional import linear


class Projection(nn.Module):
    """A projection's parameters with its configuration. `forward` is the configuration's own, the specification, unless
    `impl` says to run the head in another way.

    Parameters have the names and shapes that `config.parameters(dims)` declares. Raises `ValueError` for widths that
    cannot be.
    """

    impl: Impl = "auto"
    """How the head is run, where it is heavy; `set_impl` changes it."""

    stacked: Tensor | None = None
    """The stems of this projection and of those beside it as one weight, where `qurve.projections.prepared` made it."""

    if TYPE_CHECKING:  # parameters are registered by name; each is a Tensor

        def __getattr__(self, name: str) -> Tensor: ...

    def __init__(
        self,
        config: ProjectionConfig,
        dims: Dims,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for what, width in (("input", dims.d_in), ("output", dims.d_out)):
            if not isinstance(width, int) or width < 1:
                raise ValueError(
                    f"the {what} width of a projection is {width!r}; it must be a whole number, at least 1"
                )
        config.check(dims)
        self.config, self.dims = config, dims
        for name, spec in config.parameters(dims).items():
            self.register_parameter(name, nn.Parameter(torch.empty(spec.shape, device=device, dtype=dtype)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the start anew: matrices normal with std 0.02, gains one, biases zero."""
        for name, spec in self.config.parameters(self.dims).items():
            parameter = self.get_parameter(name)
            if spec.init == "normal":
                parameter.normal_(0.0, STD, generator=generator)
            else:
                parameter.fill_(1.0 if spec.init == "ones" else 0.0)

    def get(self, name: str) -> Tensor | None:
        """A parameter that this configuration may not have."""
        return getattr(self, name, None)

    def forward(self, x_BTD: Tensor, *other: Tensor) -> Tensor:
        """`[B, T, D]` -> `[B, T, O]` (any leading shape). Raises `ValueError` for another width.

        `other` is what the configuration also reads, `[B, T, d_other]`; nothing for most.
        """
        if x_BTD.shape[-1] != self.dims.d_in:
            raise ValueError(f"this projection takes {self.dims.d_in} channels, and the input has {x_BTD.shape[-1]}")
        if len(other) != (self.config.also_reads is not None):
            raise ValueError(f"besides its input this projection reads {self.config.also_reads or 'nothing'}")
        way = self.way(x_BTD)
        if way == "reference" or not is_bare(self):
            return self.config.forward(self, x_BTD, *other)
        stem = self.config.stem(self)
        return self.head(way, linear(x_BTD, stem), x_BTD, *other)

    def way(self, x_BTD: Tensor) -> Way:
        """How the head is to be run on such an input. `BadInput` where Triton was asked for and cannot be."""
        if not self.config.heavy_head:
            return "reference"
        compiling = torch.compiler.is_compiling()
        return choose(self.impl, x_BTD.device.type, lambda: self._triton_refusal(x_BTD), compiling=compiling)

    def head(self, way: Way, stem_BTS: Tensor, x_BTD: Tensor, *other: Tensor) -> Tensor:
        """`config.head`, run in one of several ways: `[B, T, S]` and `[B, T, D]` to `[B, T, O]`."""
        if way == "triton":
            return self.config.triton_head(self, stem_BTS, x_BTD, *other)
        if way == "compiled":
            out_BTO: Tensor = compiled(type(self.config).head)(self.config, self, stem_BTS, x_BTD, *other)
            return out_BTO
        return self.config.head(self, stem_BTS, x_BTD, *other)

    def _triton_refusal(self, x_BTD: Tensor) -> str | None:
        device, dtypes = x_BTD.device.type, {x_BTD.dtype, *(p.dtype for p in self.parameters())}
        if torch.is_autocast_enabled(device):
            dtypes.add(torch.get_autocast_dtype(device))
        if others := dtypes - {torch.float32, torch.bfloat16}:
            return f"the kernel takes float32 and bfloat16, not {', '.join(sorted(map(str, others)))}"
        return self.config.triton_refusal(self.dims) or no_triton(device)

    def extra_repr(self) -> str:
        return f"{self.dims.d_in} -> {self.dims.d_out}, {self.config}"


def project(projections: Sequence[nn.Module], x_BTD: Tensor, other: Tensor | None = None) -> list[Tensor]:
    """Every projection of one input; the bare ones share ONE matrix product over their stacked stems.

    `D -> 3D` for three linear projections, `D -> 2.5D` with the paper's query. A projection that somebody has wrapped,
    hooked, quantised or parametrised takes its own forward, so that an adapter always acts. `other` `[B, T, …]` goes to
    those that read a second source. The outputs, `[B, T, O]` each, are in the projections' order.
    """
    others = [() if other is None or reads_nothing_else(p) else (other,) for p in projections]
    rows = [p.config.stem_rows(p.dims) if is_bare(p) else 0 for p in projections]
    fused = [p for p, n in zip(projections, rows, strict=True) if n and isinstance(p, Projection)]
    weight = stacked(fused)
    if weight is None:
        return [p(x_BTD, *also) for p, also in zip(projections, others, strict=True)]
    stems = torch.split(linear(x_BTD, weight), rows, dim=-1)
    return [
        p.head(p.way(x_BTD), stem, x_BTD, *also) if n and isinstance(p, Projection) else p(x_BTD, *also)
        for p, n, stem, also in zip(projections, rows, stems, others, strict=True)
    ]


def set_impl(model: nn.Module, impl: Impl) -> None:
    """Have every projection of `model` with a heavy head run it so; see `qurve.ops.heads`. It is execution, not
    architecture: no state dict holds it. What somebody has wrapped, hooked, quantised or parametrised takes its own
    forward still.

    Raises `BadInput`, with nothing changed, for an unknown word, and for `triton` where one of them has no kernel.
    """
    heavy = [module for module in model.modules() if isinstance(module, Projection) and module.config.heavy_head]
    check_impl(impl, None)
    for module in heavy if impl == "triton" else ():
        check_impl(impl, module.config.triton_refusal(module.dims) or no_triton("cuda"))
    for module in heavy:
        module.impl = impl


def stacked(projections: Sequence[Projection]) -> Tensor | None:
    """The stems as one weight, `[sum of S, D]`; None where there are fewer than two, or they differ in dtype."""
    if len(projections) < 2:
        return None
    if projections[0].stacked is not None:
        return projections[0].stacked
    weights = [p.config.stem(p) for p in projections]
    return torch.cat(weights) if len({weight.dtype for weight in weights}) == 1 else None


def reads_nothing_else(module: nn.Module) -> bool:
    """Whether a projection, bare or wrapped, takes its input alone."""
    return getattr(getattr(module, "config", None), "also_reads", None) is None


def is_bare(module: nn.Module) -> TypeGuard[Projection]:
    """Whether a module computes what its configuration says and nothing else: no wrapper, hook or parametrisation."""
    return (
        isinstance(module, Projection)
        and module.config.registry.get(module.config.kind) is type(module.config)
        and type(module).forward is Projection.forward
        and "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and module._parameters.keys() == module.config.parameters(module.dims).keys()
        # (a FakeTensor is a plain parameter that has no memory)
        and all(type(p) is nn.Parameter or isinstance(p, FakeTensor) for p in module._parameters.values())
        and not module._modules
    )
