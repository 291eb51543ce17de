"""Data: preparing text (`prepare`), reading it back (`loader`), the order of windows (`order`), tokenizers, a corpus.

The submodules are imported on first use: `qurve.data.order.paper_windows(...)` works after `import qurve` alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qurve.data import corpus as corpus
    from qurve.data import loader as loader
    from qurve.data import order as order
    from qurve.data import prepare as prepare
    from qurve.data import tokenizers as tokenizers

__all__ = ["corpus", "loader", "order", "prepare", "tokenizers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"qurve.data.{name}")
    raise AttributeError(f"module 'qurve.data' has no attribute {name!r}")
