"""The documentation: its numbers are those of the evidence, its links lead somewhere, its commands exist."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from qurve import presets
from qurve.cli import COMMANDS
from qurve.study.definition import Study
from qurve.study.statistics import ROW_KEYS

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
PAGES = [*sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]), *NOTEBOOKS]
INTERNAL = {"cli", "files", "ops"}
"""Parts of the package that are nobody's to import."""


def test_the_guides_numbers_are_the_evidences() -> None:
    checked = subprocess.run([sys.executable, "tools/passages.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("tool", ["zoo", "performance", "results"])
def test_a_generated_page_is_its_evidences(tool: str) -> None:
    checked = subprocess.run([sys.executable, f"tools/{tool}.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    files = re.findall(r"`((?:results|experiments|benchmarks|docs|tools|src|tests)/[\w./-]+)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [file for file in files if not (ROOT / file).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_presets_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    commands = set(re.findall(r"\bqurve (\w+) ?", " ".join(re.findall(r"`qurve [^`]+`", text))))
    assert commands <= set(COMMANDS)
    assert {f"{a}/{b}" for a, b in re.findall(r"\b(paper|small)/([a-z]+-?[\w.-]*\w)", text)} <= set(presets.names())


def test_every_piece_of_evidence_is_explained() -> None:
    said = (ROOT / "REPRODUCE.md").read_text(encoding="utf-8")
    assert [file.name for file in (ROOT / "results").glob("*.json") if f"results/{file.name}" not in said] == []


def test_the_guide_explains_every_figure_of_a_row() -> None:
    text = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    keys = re.findall(r"^\| (`.*?) \| ", text.partition("### A row's figures")[2], flags=re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(keys)) == [*ROW_KEYS, "diverged"]


def test_the_guides_own_studies_work(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    codes = re.findall(r"((?:    .*\n|\n)*    STUDY = (?:.*\n)(?:    .*\n|\n)*)", text)
    assert len(codes) == 2
    for code in codes:
        file = tmp_path / "my_study.py"
        file.write_text("\n".join(line[4:] for line in code.splitlines()))
        assert isinstance(runpy.run_path(str(file))["STUDY"], Study)


def test_the_reference_has_every_part_of_the_package() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/api/*.md"))
    named = re.findall(r"^::: (\S+)$", pages, flags=re.MULTILINE)
    sources = {name: ROOT.joinpath("src", *name.split(".")) for name in named}
    assert [name for name, file in sources.items() if not (file.with_suffix(".py").exists() or file.is_dir())] == []
    assert len(set(named)) == len(named)
    parts = {path.stem for path in ROOT.glob("src/qurve/*") if not path.name.startswith("_") and path.suffix != ".json"}
    assert parts - INTERNAL - {"py"} <= {name.split(".")[1] for name in named}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_committed_without_what_it_prints(notebook: Path) -> None:
    tree = json.loads(notebook.read_text(encoding="utf-8"))
    codes = [cell for cell in tree["cells"] if cell["cell_type"] == "code"]
    assert codes
    assert [cell["source"] for cell in codes if cell["outputs"] or cell["execution_count"] is not None] == []
