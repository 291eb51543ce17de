"""At home in Hugging Face's libraries. Everything is imported on first use; what needs one of them says so.

from qurve import hf

report = hf.retrofit(model)             a nonlinear part beside every query weight of a pretrained model
hf.save(model, folder)                  and, in another process, hf.load(folder)
hf.restore(model)                       the original, bit for bit
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qurve.hf.families import FAMILIES as FAMILIES
    from qurve.hf.families import Place as Place
    from qurve.hf.peft_method import NonlinearQueryConfig as NonlinearQueryConfig
    from qurve.hf.retrofitting import Report as Report
    from qurve.hf.retrofitting import fold as fold
    from qurve.hf.retrofitting import merge as merge
    from qurve.hf.retrofitting import restore as restore
    from qurve.hf.retrofitting import retrofit as retrofit
    from qurve.hf.saving import load as load
    from qurve.hf.saving import save as save

_OBJECTS = {
    "FAMILIES": "families",
    "NonlinearQueryConfig": "peft_method",
    "Place": "families",
    "Report": "retrofitting",
    "fold": "retrofitting",
    "load": "saving",
    "merge": "retrofitting",
    "restore": "retrofitting",
    "retrofit": "retrofitting",
    "save": "saving",
}

__all__ = [
    "FAMILIES",
    "NonlinearQueryConfig",
    "Place",
    "Report",
    "fold",
    "load",
    "merge",
    "restore",
    "retrofit",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _OBJECTS:
        raise AttributeError(f"module 'qurve.hf' has no attribute {name!r}")
    return getattr(importlib.import_module(f"qurve.hf.{_OBJECTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_OBJECTS])
