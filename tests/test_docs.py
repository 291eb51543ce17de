"""The documentation: its numbers are those of the evidence, its links lead somewhere, its commands exist."""

from __future__ import annotations

import json
import pydoc
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from qurve import plugins, presets
from qurve.accounting import PEAK_FLOPS
from qurve.cli import COMMANDS
from qurve.study.definition import Study
from qurve.study.plan import make_plan, plan_ladder
from qurve.study.tables import CSV_KEYS

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


def test_what_is_planned_takes_what_is_said() -> None:
    """Runs and FLOPs of every planned study are counted anew; every experiment with a plan is in the table."""
    text = (ROOT / "REPRODUCE.md").read_text(encoding="utf-8")
    table = text.partition("| `PAPER` of |")[2].partition("\n\n")[0]
    said = {
        line.split("`")[1]: line.strip(" |").split(" | ")[-3:] for line in table.splitlines() if "`experiments/" in line
    }
    plugins.make_importable(ROOT / "experiments")
    planned = {}
    for file in sorted((ROOT / "experiments").glob("*.py")):
        found = runpy.run_path(str(file))
        wanted = found.get("PAPER") or (found.get("STUDY") if file.stem == "ten_million" else None)
        if wanted is not None:
            plan = make_plan(wanted, 0.01, None) if isinstance(wanted, Study) else plan_ladder(wanted, None)
            days = plan["flops"] / (0.4 * PEAK_FLOPS["NVIDIA H200"]["bf16"]) / 86400
            figures = [f"{plan['runs']:,}", f"{plan['flops']:.3g}", f"{days:.0f}" if days > 1 else f"{days:.2g}"]
            planned[f"experiments/{file.name}"] = figures
    assert said == planned


def test_the_guide_explains_every_figure_of_a_row() -> None:
    text = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    keys = re.findall(r"^\| (`.*?) \| ", text.partition("### A row's figures")[2], flags=re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(keys)) == list(CSV_KEYS)


def test_each_statement_of_the_theory_has_its_function_and_its_test() -> None:
    text = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| statement \| function \| test \|\n\|[-|]*\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for table in tables for row in table.splitlines()]
    assert len(rows) > 90
    defined = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    for statement, functions, tests in rows:
        for name in spans(functions, statement):
            assert pydoc.locate(f"qurve.analysis.{name}") or pydoc.locate(f"qurve.{name}"), name
        assert set(spans(tests, statement)) <= defined


def spans(cell: str, row: str) -> list[str]:
    """What stands in a cell as code, one thing at least."""
    found = re.findall(r"`([\w.]+)`", cell)
    assert found, row
    return found


def snippets(text: str) -> list[str]:
    """The blocks of Python on a page."""
    blocks = re.findall(r"(?:^    .*\n|^\n(?=(?:\n)*    ))+", text, flags=re.MULTILINE)
    found = ["\n".join(line[4:] for line in block.splitlines()) + "\n" for block in blocks]
    return [code for code in found if re.search(r"^(?:from|import) \w", code, flags=re.MULTILINE)]


@pytest.mark.parametrize("page", ["compare", "scaling"])
def test_a_piece_of_python_defines_what_it_uses(page: str) -> None:
    codes = snippets((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    assert len(codes) > 1
    for code in codes:
        ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"]
        checked = subprocess.run(ruff, input=code, capture_output=True, text=True)
        assert checked.returncode == 0, code + checked.stdout


def test_the_guides_own_studies_work(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    codes = [code for code in snippets(text) if "STUDY = " in code]
    assert len(codes) == 3
    for code in codes:
        file = tmp_path / "my_study.py"
        file.write_text(code)
        assert isinstance(runpy.run_path(str(file))["STUDY"], Study)


def test_the_reference_has_every_part_of_the_package() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/api/*.md"))
    named = re.findall(r"^::: (\S+)$", pages, flags=re.MULTILINE)
    sources = {name: ROOT.joinpath("src", *name.split(".")) for name in named}
    assert [name for name, file in sources.items() if not (file.with_suffix(".py").exists() or file.is_dir())] == []
    assert len(set(named)) == len(named)
    parts = {path.stem for path in ROOT.glob("src/qurve/*") if not path.name.startswith("_") and path.suffix != ".json"}
    assert parts - INTERNAL - {"py"} <= {name.split(".")[1] for name in named}
    theory = {f"qurve.analysis.{file.stem}" for file in ROOT.glob("src/qurve/analysis/[a-z]*.py")}
    assert theory <= set(named), "the guide to the theory names its functions"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_committed_without_what_it_prints(notebook: Path) -> None:
    tree = json.loads(notebook.read_text(encoding="utf-8"))
    codes = [cell for cell in tree["cells"] if cell["cell_type"] == "code"]
    assert codes
    assert [cell["source"] for cell in codes if cell["outputs"] or cell["execution_count"] is not None] == []
