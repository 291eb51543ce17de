"""The command that prepares data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from qurve.cli.shared import Json, option
from qurve.errors import BadInput

FEW_DOCUMENTS = 10
"""Validation documents below which `prepare` points to another rule."""


def prepare(
    paths: Annotated[
        Positional[tuple[str, ...]],
        arg(
            metavar="PATH…",
            help_behavior_hint="",
            help="Text files, folders, .jsonl(.gz|.zst), .parquet, or hf:NAME for a hub data set (a network).",
        ),
    ],
    out: Annotated[Path, arg(metavar="DIR", help="The new data folder.")],
    tokenizer: Annotated[str, arg(metavar="SPEC", help="gpt2, bytes, or bpe:N (trained on the data).")] = "gpt2",
    split: Annotated[
        float | None,
        option(
            metavar="FRACTION", help="Share of the documents for validation and for test each. Default: nanoGPT's rule."
        ),
    ] = None,
    workers: Annotated[int | None, option(metavar="N", help="Processes. Default: one per core.")] = None,
    as_json: Json = False,
) -> int:
    """Turn text into token shards and a manifest. A call that was cut short is continued by the same call."""
    from qurve.data.prepare import prepare as prepare_data

    if not paths:
        raise BadInput("name at least one file, folder or hf: data set to prepare")
    manifest = prepare_data(paths, out, tokenizer=tokenizer, split=split, workers=workers, progress=True)
    if as_json:
        print(json.dumps(manifest))
        return 0
    table = Table("split", "documents", "tokens", "bytes of text")
    for name, size in manifest["splits"].items():
        table.add_row(name, *(f"{size[key]:,}" for key in ("documents", "tokens", "bytes")))
    Console().print(table)
    documents = manifest["splits"]["val"]["documents"]
    if manifest["split_rule"]["rule"] == "nanogpt" and documents < FEW_DOCUMENTS:
        print(f"note: nanoGPT's rule leaves {documents} for validation, test among them; --split 0.05 takes more")
    dropped = sum(entry["count"] for entry in manifest["dropped"])
    print(f"{out}: tokenizer {manifest['tokenizer']['spec']}, {manifest['n_ids']:,} ids, {dropped} documents dropped")
    return 0
