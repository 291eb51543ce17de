"""What is kept of the file that a study comes from: it, what it imports from beside it, and nothing else."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_study import write_study

from qurve.data.loader import TokenData
from qurve.errors import BadInput
from qurve.study.definition import load_study
from qurve.study.execute import run_study
from qurve.study.provenance import commands
from qurve.study.results import load
from qurve.study.source import keep, kept, sources

STUDY = """
import beside_this, package_beside.part
import json, qurve
from qurve import presets
from qurve.study.definition import Arm, Study
STUDY = Study("own", "Own", (Arm("baseline", "Baseline", presets.get("smoke")),))
"""
FILES = {
    "own_study.py": STUDY,
    "beside_this.py": "# é\n",
    "package_beside/__init__.py": "",
    "package_beside/part.py": "NUMBER = 1\n",
    "not_imported.py": "",
    ".venv/lib/site-packages/elsewhere_below.py": "",
}
KEPT = ["beside_this.py", "own_study.py", "package_beside/__init__.py", "package_beside/part.py"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = tmp_path / "place"
    for name, text in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text, encoding="latin-1" if name == "beside_this.py" else "utf-8")
    (place / "beside_this.py").write_bytes("# -*- coding: latin-1 -*-\n# é\n".encode("latin-1"))
    monkeypatch.syspath_prepend(str(place / ".venv" / "lib" / "site-packages"))
    before = set(sys.modules)
    __import__("elsewhere_below")
    load_study(str(place / "own_study.py"))
    yield place / "own_study.py"
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_file_and_what_it_imports_from_beside_it_are_kept(file: Path, tmp_path: Path) -> None:
    assert sorted(path.relative_to(file.parent).as_posix() for path in sources(file)) == KEPT
    folder = write_study(tmp_path / "study", seeds=(1,))
    assert kept(folder) == {}
    keep(file, folder)
    found = kept(folder)
    assert list(found) == [f"definition/{name}" for name in KEPT]
    for name in KEPT:
        content = (file.parent / name).read_bytes()
        assert (folder / "definition" / name).read_bytes() == content
        assert found[f"definition/{name}"] == hashlib.sha256(content).hexdigest()
    told = commands(load(folder))
    assert [line for line in told if "definition/own_study.py in the study's folder" in line]
    assert told[-1] == "qurve compare small --seeds 3"


def test_the_newest_is_kept_even_of_the_copy_itself(file: Path, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study", seeds=(1,))
    (folder / "definition").mkdir()
    (folder / "definition" / "older.py").write_text("")
    keep(file, folder)
    assert "definition/older.py" not in kept(folder)
    copy = folder / "definition" / "own_study.py"
    keep(copy, folder)
    assert copy.read_text() == STUDY
    assert load_study(str(copy)).name == "own"


def test_a_study_that_is_refused_leaves_no_copy(file: Path, data: TokenData, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study", seeds=(1,))
    with pytest.raises(BadInput, match="holds the study 'small'"):
        run_study(load_study(str(file)), folder, data, command="", workers=1, definition=file)
    assert kept(folder) == {}
