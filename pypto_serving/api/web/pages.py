"""Serve the files of the pages, compressed once. They hold no secrets, so they need no API key."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.http.errors import ApiError

FOLDER = Path(__file__).parent / "static"
PAGES = {"/": "playground.html", "/dashboard": "dashboard.html"}
ASSETS = "/web/"
"""The path of all files other than pages."""

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Content security policy: no inline code, no other sites, no strings used as HTML or code."""
_HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "vary": "accept-encoding",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file in the form in which it is sent."""

    content: bytes
    compressed: bytes
    media_type: str
    tag: str


@cache
def files() -> dict[str, PageFile]:
    """Read all files by name, at the first request for one."""
    return {path.name: _read(path) for path in FOLDER.iterdir() if path.suffix in _TYPES}


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    tag = f'"{hashlib.blake2b(content, digest_size=8).hexdigest()}"'
    return PageFile(content, gzip.compress(content, mtime=0), f"{_TYPES[path.suffix]}; charset=utf-8", tag)


def is_page(path: str) -> bool:
    """Return whether `path` belongs to a page or one of its files."""
    return path in PAGES or path.startswith(ASSETS)


async def show_page(request: Request) -> Response:
    """Answer with a page or one of its files, or with 304 if the browser has it already."""
    path = request.url.path
    file = files().get(PAGES.get(path, path.removeprefix(ASSETS)))
    if file is None:
        return ApiError(404, f"there is no file {path[:200]}", "unknown_url").response(request.scope)
    headers = _HEADERS | {"etag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    content = file.content
    if "gzip" in request.headers.get("accept-encoding", ""):
        content, headers["content-encoding"] = file.compressed, "gzip"
    return Response(content, headers=headers, media_type=file.media_type)
