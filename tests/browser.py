"""A browser for the tests of web pages: an installed Chromium, driven by Playwright.

Without one, the tests that ask for the fixture `browser` are deselected, and the run says so at its end.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def installed() -> str | None:
    """The path of the first browser found, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if installed() is None:
        needing = [item for item in items if "browser" in getattr(item, "fixturenames", ())]
        items[:] = [item for item in items if item not in needing]
        config.hook.pytest_deselected(items=needing)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if installed() is None:
        terminalreporter.write_line(f"No browser ({', '.join(NAMES)}) is installed: the browser tests were left out.")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A Playwright browser; make a context of it for each page."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=installed(), args=list(FLAGS))
        yield chromium
        chromium.close()
