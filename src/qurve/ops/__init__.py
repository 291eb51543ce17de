"""Faster ways to compute what is written out plainly elsewhere; each is tested against that. No torch at import."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@functools.cache
def compiled(function: Callable[P, T], *, dynamic: bool = False) -> Callable[P, T]:
    """`torch.compile(function)`, made once; for static shapes or for any: which graph runs never depends on history."""
    import torch

    return torch.compile(function, dynamic=dynamic)
