"""The data of a run: the folder it names, or the embedded corpus, prepared beside the run."""

from __future__ import annotations

from pathlib import Path

from qurve.data.corpus import embedded_corpus
from qurve.data.loader import MANIFEST, TokenData
from qurve.data.prepare import prepare
from qurve.errors import BadInput
from qurve.train.config import DataConfig

EMBEDDED_SPLIT = 0.05
"""Share of the embedded corpus's documents that validation and test take each."""


def open_data(config: DataConfig, beside: Path) -> TokenData:
    """Open `config.path`; without one, prepare the embedded corpus into `beside` (once) and open that."""
    if config.path is not None:
        return TokenData.open(config.path)
    if config.corpus != "embedded":
        raise BadInput(
            f"this configuration is made for {config.corpus}, which is not at hand: prepare it "
            "(qurve prepare hf:Skylion007/openwebtext --tokenizer gpt2 --out data/openwebtext, about 36 GB, needs a "
            "network), then pass --data data/openwebtext. nanoGPT's train.bin and val.bin are read as they are"
        )
    is_new = not (beside / MANIFEST).exists()
    prepare([embedded_corpus()], beside, tokenizer=config.tokenizer, split=EMBEDDED_SPLIT, progress=is_new)
    return TokenData.open(beside)
