"""The contract of a projection, and the registry of its kinds. No torch here: configurations stay light.

A projection maps the block's normalised input `x_BTD` to queries, keys or values, each token alone. It knows nothing of
heads, positions or the cache. A kind is ONE frozen dataclass in one file: it declares its parameters, says in `forward`
what it computes (the specification, which a reader can hold against the paper), and offers the same computation cut in
two for speed: a linear `stem`, whose rows are stacked with those of other projections into one matrix product, and a
`head` for the rest. `qurve.projections.module.Projection` turns it into an `nn.Module`.

Legend of the shape suffixes: B batch, T tokens, D model width, R bottleneck width, O output width, S stem rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from qurve.config import Choice, check_values

if TYPE_CHECKING:
    from torch import Tensor

    from qurve.projections.module import Projection

STD = 0.02
"""Standard deviation of every matrix at the start."""


class Dims(NamedTuple):
    """What a projection's owner fixes: the widths, and whether linear maps and norms carry biases."""

    d_in: int
    """D: channels of the input."""
    d_out: int
    """O: channels of the output."""
    bias: bool = False
    """Whether linear maps and layer norms add one."""
    d_other: int = 0
    """Width of what a projection reads besides its input (`also_reads`); 0 where there is no such thing."""


class ParameterSpec(NamedTuple):
    """Shape of a parameter and how it starts: `normal` (std 0.02), `ones` or `zeros`."""

    shape: tuple[int, ...]
    """`[out, in]` of a matrix, one number of a vector."""
    init: Literal["normal", "ones", "zeros"] = "normal"
    """How it is drawn, unless the model's depth or topology asks for another size."""


class Reach(NamedTuple):
    """Where outputs can lie: `W x + c + g(x)`, with a linear term or without, and a rest `g` that spans few dimensions.

    The paper's appendix B.2 asks for it: a linear term costs queries, keys and values together no more dimensions than
    their input has, whatever is not linear costs its own.
    """

    linear: bool
    """Whether there is a linear term."""
    beyond: int
    """At most how many dimensions `g` spans, of which nothing else is assumed."""


class Moments(NamedTuple):
    """Mean squares of the entries that a projection reads."""

    input: float = 1.0
    """Of the block's normalised input."""
    other: float = 1.0
    """Of what it also reads."""


@dataclass(frozen=True)
class ProjectionConfig(Choice):
    """Base class of all projections; register a kind with `@ProjectionConfig.register("name")`.

    Fields are the kind's options, of plain types with defaults: a value of another type raises `BadInput`.
    """

    registry: ClassVar[dict[str, type[ProjectionConfig]]]
    also_reads: ClassVar[Literal["mlp_hidden", "block_input"] | None] = None
    """A second source, given after the input: hidden activations of the previous block's feed-forward `[B, T, F]` (to
    queries, keys and values), or the block's normalised input `[B, T, D]` (to the output projection)."""
    heavy_head: ClassVar[bool] = False
    """Whether the head is so much work that another way to run it (`qurve.ops.heads`) may be worth something."""

    def __post_init__(self) -> None:
        check_values(self)

    def check(self, dims: Dims) -> None:
        """Raise `ValueError`, naming the way out, when this projection cannot have these widths."""

    def parameters(self, dims: Dims) -> Mapping[str, ParameterSpec]:
        """Every learnable parameter by name; matrices are `[out, in]`, as in `nn.Linear`."""
        raise NotImplementedError

    def forward(self, p: Projection, x_BTD: Tensor, *other: Tensor) -> Tensor:
        """The specification: `[B, T, D]` to `[B, T, O]`. `p` carries the parameters as attributes, `other` is what
        `also_reads` names."""
        raise NotImplementedError

    def stem_rows(self, dims: Dims) -> int:
        """S: rows of the linear stem; 0 when there is none."""
        raise NotImplementedError

    def stem(self, p: Projection) -> Tensor:
        """The stem's weight `[S, D]`, gains folded in float32. Not called when there are no rows."""
        raise NotImplementedError

    def head(self, p: Projection, stem_BTS: Tensor, x_BTD: Tensor, *other: Tensor) -> Tensor:
        """From the stem's output (and the input) to `[B, T, O]`: equal to `forward` for every input and gradient."""
        raise NotImplementedError

    def triton_refusal(self, dims: Dims) -> str | None:
        """Why no Triton kernel can run a heavy head of these widths, or None."""
        return f"there is no kernel for the kind {self.kind!r}"

    def triton_head(self, p: Projection, stem_BTS: Tensor, x_BTD: Tensor, *other: Tensor) -> Tensor:
        """`head` as one Triton kernel, with the same shapes; not called where `triton_refusal` has a reason."""
        raise NotImplementedError

    def at_first(self) -> ProjectionConfig:
        """What stands in its place in the first block, which has no block before it."""
        return self

    def writers(self) -> tuple[str, ...]:
        """The parameters that the output is proportional to: smaller at the start where it joins a residual stream."""
        return ("weight",)

    def preserving(self, dims: Dims, moments: Moments) -> Mapping[str, float]:
        """How parameters start where no skip carries the signal past, so that the output's entries have mean square 1.

        Standard deviations of matrices drawn `normal`, values of gains that start as `ones`; what is not named starts
        as ever. `moments` are the mean squares of the entries of the input and of what is also read.
        """
        return {"weight": 1 / math.sqrt(dims.d_in * moments.input)}

    @property
    def identity_term(self) -> float:
        """`c`, where the output is `c x` plus something else; 0 where the input is no term of its own."""
        return 0.0

    def reach(self, dims: Dims) -> Reach:
        """Where its outputs can lie, for any weights; of a kind that does not say, anywhere."""
        return Reach(False, dims.d_out)

    def num_params(self, dims: Dims) -> int:
        """Learnable numbers, those of gains and biases included."""
        return sum(math.prod(spec.shape) for spec in self.parameters(dims).values())

    def flops_per_token(self, dims: Dims) -> int:
        """Forward FLOPs of one token's matrix products; norms and activations are not counted, as is customary."""
        return sum(2 * math.prod(spec.shape) for spec in self.parameters(dims).values() if len(spec.shape) == 2)

    def build(self, d_in: int, d_out: int, *, bias: bool = False, d_other: int = 0) -> Projection:
        """The module, `[B, T, d_in]` to `[B, T, d_out]`, with weights just drawn, in torch's default dtype and device.

        `d_other` is the width of what it also reads. Raises `ValueError` for widths that cannot be.
        """
        from qurve.projections.module import Projection

        return Projection(self, Dims(d_in, d_out, bias, d_other))
