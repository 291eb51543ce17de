"""Hugging Face: our models as theirs. Importing this registers them with `AutoConfig` and `AutoModelForCausalLM`.

    import qurve.hf
    model = AutoModelForCausalLM.from_pretrained(folder)        # made by `qurve export RUN --to hf`

Needs the extra `hf` (transformers).
"""

from __future__ import annotations

from qurve.errors import BadInput

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise BadInput(f"qurve.hf needs transformers ({error}); install qurve[hf]") from error

from qurve.hf.configuration import QurveConfig
from qurve.hf.modeling import QurveForCausalLM

__all__ = ["QurveConfig", "QurveForCausalLM"]
