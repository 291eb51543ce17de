"""Other ways to run a projection's head, and the choice among them. The projection's plain head is the specification.

`reference` is that plain head, as it stands. `compiled` is `torch.compile` of it alone, for models that are not
compiled as a whole. `triton` is one kernel (`qurve.ops.triton_head`). `auto` takes what was measured to be fastest. All
give the same numbers to rounding. No torch here: configurations name these too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from qurve.errors import BadInput, did_you_mean

Way = Literal["reference", "compiled", "triton"]
Impl = Literal["auto", "reference", "compiled", "triton"]

FASTEST: dict[str, tuple[Way, ...]] = {"cpu": ("reference",), "cuda": ("reference",)}
"""What `auto` takes by device, outside a compiled model: the first that covers the projection; else `reference`.

Whatever stands before `reference` here has a measurement of `benchmarks/kernel.py` behind it. CPU: compiling the head
alone pays only after many calls of one shape, and nobody has promised those. CUDA: no GPU has measured the kernel."""

WIDEST = 1024
"""The largest output width of the kernel: a program's rows have to fit into the registers of one multiprocessor."""


def choose(impl: Impl, device: str, refusal: Callable[[], str | None], *, compiling: bool) -> Way:
    """The way to run a head on this kind of device. `refusal` tells why Triton cannot, or None.

    Inside a compiled model the plain head is compiled with all the rest: `auto` and `compiled` both mean that. Raises
    `BadInput` where Triton was asked for and cannot be.
    """
    if impl == "triton":
        check_impl(impl, refusal())
        return impl
    if compiling:
        return "reference"
    if impl != "auto":
        return impl
    return next((way for way in FASTEST.get(device, ()) if way != "triton" or not refusal()), "reference")


def check_impl(impl: str, refusal: str | None, name: str = "impl") -> None:
    """Raise `BadInput` for a word that is none of `Impl`, and for `triton` where there is a reason against it."""
    if impl not in get_args(Impl):
        raise BadInput(f"{name} = {impl!r} is unknown{did_you_mean(impl, get_args(Impl))}")
    if impl == "triton" and refusal:
        raise BadInput(f"{name} = 'triton': {refusal}; {name} = 'auto' takes what there is")


def no_triton(device: str) -> str | None:
    """Why no kernel can run on this kind of device, or None."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "the package triton is missing (CUDA builds of torch bring it; else: pip install --no-deps triton)"
    from qurve.ops.triton_kernels import INTERPRETED

    if device != "cuda" and not INTERPRETED:
        return f"it needs a CUDA device, not {device}"
    return None
