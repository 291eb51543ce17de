"""Preparing data from the command line."""

from __future__ import annotations

import json
from pathlib import Path

from commands import call


def test_prepare_says_what_it_made_and_prints_its_manifest(tmp_path: Path) -> None:
    for name in "abcdefgh":
        (tmp_path / f"{name}.txt").write_text(f"A short document called {name}. " * 20)
    (tmp_path / "void.txt").touch()
    made = call("prepare", tmp_path, "--tokenizer", "bytes", "--split", 0.2, "--out", tmp_path / "data")
    assert made.code == 0
    assert "257 ids, 1 documents dropped" in made.out
    again = call("prepare", tmp_path, "--tokenizer", "bytes", "--split", 0.2, "--out", tmp_path / "data", "--json")
    assert again.json == json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert "nothing to do" in again.err
