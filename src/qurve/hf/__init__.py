"""At home in Hugging Face's libraries: pretrained models retrofitted, and our models as theirs.

    from qurve import hf

    report = hf.retrofit(model)             a nonlinear part beside every query weight of a pretrained model
    hf.save(model, folder)                  and, in another process, hf.load(folder)
    hf.restore(model)                       the original, bit for bit

    AutoModelForCausalLM.from_pretrained(folder)        what `qurve export RUN --to hf` wrote

Where transformers is installed, importing this registers our models with its Auto classes. All else is imported on
first use, and what needs a package of the extra `hf` says so.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from qurve.errors import BadInput

if TYPE_CHECKING:
    from qurve.hf.configuration import QurveConfig as QurveConfig
    from qurve.hf.families import FAMILIES as FAMILIES
    from qurve.hf.families import Place as Place
    from qurve.hf.modeling import QurveForCausalLM as QurveForCausalLM
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
    "QurveConfig": "configuration",
    "QurveForCausalLM": "modeling",
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
    "QurveConfig",
    "QurveForCausalLM",
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
    try:
        return getattr(importlib.import_module(f"qurve.hf.{_OBJECTS[name]}"), name)
    except ImportError as error:
        raise BadInput(f"qurve.hf.{name} needs the extra hf ({error}): pip install 'qurve[hf]'") from None


def __dir__() -> list[str]:
    return sorted([*globals(), *_OBJECTS])


if importlib.util.find_spec("transformers") is not None:
    from qurve.hf import modeling as _registered  # noqa: F401
