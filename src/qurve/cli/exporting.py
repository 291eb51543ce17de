"""The commands that hand models over: export, import."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from qurve.cli.shared import Json, console_for, option, plain
from qurve.errors import BadInput

if TYPE_CHECKING:
    from qurve.hf.export import Moved


def export(
    run: Annotated[Positional[Path], arg(metavar="RUN", help="A run's folder: its newest checkpoint is taken.")],
    to: Annotated[
        Literal["hf", "safetensors", "stock"],
        arg(
            metavar="hf|safetensors|stock",
            help="hf: a QurveForCausalLM, for any arm. stock: GPT-2 or Llama, where they are the same. safetensors: "
            "our own names.",
        ),
    ],
    out: Annotated[Path, arg(metavar="DIR", help="The new folder.")],
    data: Annotated[
        Path | None, option(metavar="DIR", help="Where the run's data is now: its tokenizer goes along.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Write a trained model for others, with its tokenizer; its logits are compared before it gets its name."""
    return _tell(hub().export(run, out, to, data), as_json)


def import_(
    folder: Annotated[
        Positional[Path], arg(metavar="HF_DIR", help="What `qurve export` wrote, or a GPT-2 or Llama of transformers.")
    ],
    out: Annotated[Path, arg(metavar="DIR", help="The new run's folder.")],
    as_json: Json = False,
) -> int:
    """Make a run's folder of a Hugging Face model, to generate with and to evaluate."""
    return _tell(hub().import_folder(folder, out), as_json)


def hub() -> ModuleType:
    """`qurve.hf.export`. Raises `BadInput` where its extra is not installed."""
    try:
        return importlib.import_module("qurve.hf.export")
    except ImportError as error:
        raise BadInput(f"this needs the extra hf ({error}): pip install 'qurve[hf]'") from None


def _tell(moved: Moved, as_json: bool) -> int:
    if as_json:
        print(json.dumps(dataclasses.asdict(moved)))
        return 0
    tokenizer = moved.tokenizer or "none: its ids are not those of a tokenizer of ours"
    plain(console_for(as_json=False))(
        f"{moved.folder}: {moved.kind}, {moved.rows:,} ids, tokenizer {tokenizer}; logits differ by {moved.logits:.2g}"
    )
    return 0
