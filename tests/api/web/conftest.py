"""A browser for these tests, and pages in it that must load nothing from elsewhere and complain of nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.api.web.browser import Browser, Page, find_browser
from tests.e2e.server import Server

AXE = "axe-core@4.14.1"
AXE_FILE = "package/axe.min.js"
FETCH_S = 60

OpenPage = Callable[..., Page]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium: install Debian's package chromium")
    browser = Browser(path, tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def bundled() -> Iterator[Server]:
    """The bundled model, with a host tier and drafts."""
    options = ("--max-model-len", "2048", "--kv-memory", "8M", "--kv-host-memory", "16M", "--spec-method", "ngram")
    with Server(*options) as server:
        yield server


@contextlib.contextmanager
def opened(browser: Browser) -> Iterator[OpenPage]:
    """Open each URL in a page of its own."""
    pages: list[tuple[Page, str]] = []

    def open_one(url: str, width: int = 1280, height: int = 800) -> Page:
        page = browser.open(url, width, height)
        pages.append((page, urlsplit(url).netloc))
        return page

    yield open_one
    for page, host in pages:
        outside = [url for url in page.requests if urlsplit(url).netloc != host]
        complaints = page.complaints
        page.close()
        assert (outside, complaints) == ([], [])


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    with opened(browser) as open_one:
        yield open_one


@pytest.fixture(scope="session")
def axe(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, fetched once with npm and kept in pytest's cache."""
    assert pytestconfig.cache is not None
    file = Path(pytestconfig.cache.mkdir(AXE.replace("@", "-"))) / "axe.min.js"
    if not file.exists():
        fetched = _fetch(tmp_path_factory.mktemp("axe"))
        fresh = file.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(fetched)
        fresh.replace(file)
    return file.read_text(encoding="utf-8")


def _fetch(folder: Path) -> bytes:
    try:
        subprocess.run(["npm", "pack", "--silent", AXE], cwd=folder, check=True, timeout=FETCH_S, capture_output=True)
    except (OSError, subprocess.SubprocessError):
        pytest.skip(f"npm cannot fetch {AXE}: install Debian's package npm, and let it reach a registry")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        source = archive.extractfile(AXE_FILE)
        assert source is not None
        return source.read()


@pytest.fixture
def is_accessible(axe: str) -> Callable[[Page], None]:
    """Assert that axe-core finds nothing serious in a page, in light and in dark."""

    def check(page: Page) -> None:
        page.run(axe + "; true")
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            found = page.run(
                "axe.run().then(found => found.violations"
                ".filter(each => each.impact === 'serious' || each.impact === 'critical')"
                ".map(each => `${each.id}: ${each.nodes.map(n => n.html).join(' ').slice(0, 600)}`))"
            )
            assert found == [], scheme

    return check
