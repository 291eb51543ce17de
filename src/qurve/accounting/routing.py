"""A mixture of experts on tensors without memory, whose router has no values to choose by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RoutingWithoutValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers the two questions whose results have shapes that depend on values, for `[M, K]` choices of experts.

    How often each expert was chosen has one number an expert. Of the places where a token chose expert n, all `M K` go
    to the first expert that asks and none to the others: costs are linear in the number of tokens, so that their sum
    over the experts is that of any routing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unassigned = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.bincount.default:
            self.unassigned = args[0].numel()
            return args[0].new_empty(kwargs.get("minlength", args[-1]))
        if func is torch.ops.aten.nonzero.default:
            found, self.unassigned = self.unassigned, 0
            return args[0].new_empty((found, args[0].dim()), dtype=torch.long)
        return func(*args, **kwargs)
