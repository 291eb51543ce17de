"""What the site adds to `docs/`, as hooks of MkDocs (`mkdocs.yml`): the pages beside it, and the notebooks, executed.

Pages of `docs/` are written for a reader of the repository, and their links are of its files; here they are turned into
links of the site. A link to what the site does not have stays as it is, and fails the build.
"""

from __future__ import annotations

import base64
import re
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ABOVE = {"README.md": "index.md"} | {name: name for name in ("REPRODUCE.md", "CHANGELOG.md", "CONTRIBUTING.md")}
"""Pages that stand beside `docs/`, and their places in the site."""
SECONDS = 600
"""A cell of a notebook may take so long: far more than it takes, on a busy machine too."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, place in ABOVE.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for place, content in pages_of(notebook).items():
            files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    place = page.file.src_uri
    source = next((name for name, target in ABOVE.items() if target == place), None)
    here = PurePosixPath(source or (place if place.startswith("notebooks/") else f"docs/{place}")).parent

    def turned(match: re.Match[str]) -> str:
        link, anchor = match[2], match[3] or ""
        if "://" in link or not link:
            return match[0]
        target = in_site(normal(here / link))
        up = "../" * (len(PurePosixPath(place).parts) - 1)
        return match[0] if target is None else f"{match[1]}{up}{target}{anchor})"

    return re.sub(r"(\]\()([^)#\s]*)(#[^)\s]*)?\)", turned, markdown)


def in_site(path: str) -> str | None:
    """Where a file of the repository stands in the site; None where it does not."""
    if path in ABOVE:
        return ABOVE[path]
    if path.startswith("notebooks/"):
        return re.sub(r"\.ipynb$", ".md", path)
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def normal(path: PurePosixPath) -> str:
    """A path without `..`."""
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts[-1:] = []
        else:
            parts.append(part)
    return "/".join(parts)


def pages_of(file: Path) -> dict[str, str | bytes]:
    """The notebook, executed, as a page with its figures: content by place in the site."""
    notebook = executed(file)
    lines, figures = [], {}
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            lines += [cell.source, ""]
            continue
        lines += ["```python", cell.source, "```", ""]
        for output in cell.outputs:
            data = output.get("data", {})
            if output.get("name") == "stderr":
                continue  # progress and warnings, with paths of the machine
            if "image/png" in data:
                name = f"{file.stem}-{number}.png"
                figures[f"notebooks/{name}"] = base64.b64decode(data["image/png"])
                lines += [f"![{cell.metadata['alt']}]({name})", ""]  # a figure without words for it fails the build
            elif "text/markdown" in data:
                lines += [data["text/markdown"], ""]
            else:
                lines += ["```text", output.get("text", data.get("text/plain", "")).rstrip("\n"), "```", ""]
    return {f"notebooks/{file.stem}.md": "\n".join(lines), **figures}


def executed(file: Path) -> Any:
    """The notebook with its outputs. Raises `CellExecutionError` where a cell fails."""
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook = nbformat.read(file, as_version=4)
    where = {"metadata": {"path": str(file.parent)}}
    with tempfile.TemporaryDirectory() as folder:  # for sockets in place of ports, which others could listen at
        talking = Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}})
        client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=where, config=talking)
        return client.execute()
