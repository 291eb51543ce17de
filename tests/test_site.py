"""The documentation as a site: it builds strictly, notebooks run, links lead somewhere, and nobody else is asked."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
SCREENS = {"desktop": (1280, 900), "phone": (390, 844)}
SHOWN = ("index.html", "compare.html", "results.html", "api/model.html", "notebooks/compare.html")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


class Html(HTMLParser):
    """What a page points at, what it loads, and the places in it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.places |= {values[name] for name in ("id", "name") if name in values}
        if "href" in values:
            (self.links if tag == "a" else self.loads).append(values["href"])
        if "src" in values:
            self.loads.append(values["src"])


def test_links_and_anchors_lead_somewhere(site: Path) -> None:
    pages = {file: Html(file) for file in site.rglob("*.html") if file.name != "404.html"}
    assert len(pages) > 30
    broken = []
    for file, page in pages.items():
        for link in {*page.links, *page.loads}:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in pages[target].places):
                broken.append(f"{file.relative_to(site)}: {link}")
    assert broken == []


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loads = {load for file in site.rglob("*.html") for load in Html(file).loads}
    loads |= {url for file in site.rglob("*.css") for url in re.findall(r"url\(([^)]*)\)", file.read_text())}
    assert [load for load in loads if urlsplit(load.strip("'\"")).scheme not in ("", "data")] == []


@pytest.mark.parametrize("notebook", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda file: file.stem)
def test_a_notebooks_page_has_what_it_prints_and_draws(site: Path, notebook: Path) -> None:
    page = site / "notebooks" / f"{notebook.stem}.html"
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    blocks = page.read_text(encoding="utf-8").count('<div class="highlight">')
    assert blocks >= len(codes) + 2  # what they print
    figures = [load for load in Html(page).loads if load.startswith(f"{notebook.stem}-")]
    assert len(figures) == sum("alt" in cell["metadata"] for cell in codes) > 0
    assert all((page.parent / figure).read_bytes().startswith(b"\x89PNG") for figure in figures)


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("screen", SCREENS)
def test_pages_fit_a_screen_and_can_be_searched(browser: Any, address: str, screen: str) -> None:
    width, height = SCREENS[screen]
    context = browser.new_context(viewport={"width": width, "height": height})
    page = context.new_page()
    elsewhere, errors = [], []
    page.on("request", lambda request: elsewhere.append(request.url) if address not in request.url else None)
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    for name in SHOWN:
        page.goto(address + name)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
    page.goto(address)
    if screen == "phone":
        page.click("label[for=__search].md-header__button")
    page.fill(".md-search__input", "NonlinearQuery")
    page.wait_for_selector(".md-search-result__item")
    assert page.locator(".md-search-result__link[href*='api/layer.html']").count()
    assert [url for url in elsewhere if not url.startswith(("data:", "blob:"))] == []
    assert errors == []
    context.close()
