"""What the commands that look into a trained model have in common: its text, and where they leave what they found."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table as Shown

from qurve.errors import BadInput
from qurve.files import check_folders, write_atomic
from qurve.runfolder import RunFolder

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from qurve.model.config import ModelConfig
    from qurve.model.gpt import GPT
    from qurve.study.worth import Table


PROSE = 26
"""Characters of a cell from which on it is words, whatever digits are among them."""


SHAPES_THE_START = ("model.", "train.seed")


def validation_windows(run: Path, data: Path | None, length: int, count: int) -> np.ndarray[Any, Any]:
    """So many evenly spread stretches of the run's validation data, or all there are: ids `[B, T]`.

    Raises `BadInput` as `run_data` does.
    """
    from qurve.data.order import fixed_eval_windows
    from qurve.generate.text import run_data

    split = run_data(run, data).split("val")
    return split.windows(fixed_eval_windows(len(split), context=length, count=count), length)[0]


def untrained(run: RunFolder) -> GPT:
    """The model that a run began with, in evaluation: initial weights follow from its configuration and seed.

    Raises `BadInput` where the run went on with another one of these, so that its folder does not tell the first.
    """
    from qurve.model.gpt import GPT
    from qurve.train.resume import earlier_config

    config = earlier_config(run)
    for entry in run.resumed():
        changed = [name for name in entry["changed"] if name.startswith(SHAPES_THE_START) and name != "model.dropout"]
        if entry["step"] and changed:
            raise BadInput(
                f"{run.path} went on after step {entry['step']} with another {', '.join(changed)}: the model that it "
                "began with is not known"
            )
    return GPT(config.model, seed=config.train.seed).eval()


def finite(model: GPT, where: Path) -> GPT:
    """The model, or `BadInput` that names the first of its weights that is not finite: it computes nothing."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise BadInput(f"{where}: its {name} is not finite, so that nothing can be measured; name another run")
    return model


def embedded_windows(folder: Path, config: ModelConfig, longest: int, count: int) -> np.ndarray[Any, Any]:
    """The beginnings of the embedded corpus's first documents by a Hugging Face model's own tokenizer: ids `[B, T]`, T
    the context or `longest`.

    Raises `BadInput` for a folder whose tokenizer cannot be loaded, or is another model's.
    """
    import itertools

    import numpy as np
    from transformers import AutoTokenizer

    from qurve.data.corpus import embedded_corpus
    from qurve.data.sources import Sources

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        texts = list(itertools.islice(Sources([embedded_corpus()]).documents(), count))
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    except BadInput:
        raise
    except Exception as error:  # a file that is missing or torn, a class that is unknown: no common base
        why = " ".join(str(error).split())[:200]
        raise BadInput(
            f"{folder}: its tokenizer cannot be loaded ({type(error).__name__}: {why}), and logits are compared on text"
        ) from error
    length = min(config.context, longest, *map(len, encoded))
    if not length:
        raise BadInput(
            f"{folder} holds no tokenizer, or one that makes nothing of text, and logits are compared on text"
        )
    ids_BT = np.array([ids[:length] for ids in encoded], dtype=np.int64)
    if ids_BT.max() >= config.vocab_size:
        raise BadInput(
            f"{folder}: its tokenizer is another model's: it gives the id {ids_BT.max():,}, and the vocabulary here "
            f"has {config.vocab_size:,}"
        )
    return ids_BT


def check_out(out: Path | None) -> None:
    """Raise `BadInput` where `leave` could make no folder `out`: it, or one that it would be in, is a file."""
    if out is not None:
        check_folders(next(place for place in (out, *out.parents) if os.path.lexists(place)))


def as_text(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, allow_nan=False, indent=1) + "\n"


def name_of(folder: Path) -> str:
    """What a page calls the model or study in `folder`: a seed of a study by its arm's name too."""
    parts = folder.resolve().parts
    return "/".join(parts[-2:] if re.fullmatch(r"seed-\d+", parts[-1]) else parts[-1:])


def leave(out: Path | None, files: Mapping[str, str], say: Callable[[str], None]) -> None:
    """The files by name, in the folder `out`, if there is one."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomic(out / name, text)
        say(f"wrote {out / name}")


def show(table: Table, console: Console) -> None:
    """A table on the terminal, and its notes below. Numbers stand on the right."""
    shown = Shown(box=None, padding=(0, 1, 0, 0), pad_edge=False, title=table.title, title_justify="left")
    for place, title in enumerate(table.head):
        cells = [row[place] for row in table.rows]
        is_text = not place or all(len(cell) > PROSE or not any(map(str.isdigit, cell)) for cell in cells)
        shown.add_column(title, justify="left" if is_text else "right")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)
    for note in table.notes:
        console.print(note, style="dim", markup=False, highlight=False)
