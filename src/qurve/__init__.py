"""qurve: nonlinear query projections in transformers, and a fair referee for architecture claims.

    from qurve import NonlinearQuery        the layer, for anybody's model
    from qurve import GPT                   the paper's model
    qurve compare                           is the gain real?

Everything is imported on first use, so that `import qurve` costs nothing; it registers the kinds of the zoo alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import qurve.zoo  # noqa: F401  registers its kinds, so that a configuration can name them whatever was imported first

__version__ = "0.1.0"

if TYPE_CHECKING:
    from qurve import accounting as accounting
    from qurve import convert as convert
    from qurve import data as data
    from qurve import generate as generate
    from qurve import presets as presets
    from qurve.model.gpt import GPT as GPT
    from qurve.projections.query import NonlinearQuery as NonlinearQuery

_OBJECTS = {"NonlinearQuery": "qurve.projections.query", "GPT": "qurve.model.gpt"}
_MODULES = ("accounting", "convert", "data", "generate", "presets")

__all__ = ["GPT", "NonlinearQuery", "accounting", "convert", "data", "generate", "presets"]


def __getattr__(name: str) -> Any:
    if name in _OBJECTS:
        return getattr(importlib.import_module(_OBJECTS[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"qurve.{name}")
    raise AttributeError(f"module 'qurve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_OBJECTS, *_MODULES])
