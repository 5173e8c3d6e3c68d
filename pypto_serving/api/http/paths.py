"""Find the one path under which an endpoint is known, whichever of its names a client uses."""

from __future__ import annotations

import re
from collections.abc import Iterable

VERSION = "/v1"
_SLASHES = re.compile(r"/{2,}")
_VERSIONS = re.compile(rf"^(?:{VERSION})+(?={VERSION}/)")


class Paths:
    """The paths of an application. Each is also found with `/v1` or without, and with superfluous slashes."""

    def __init__(self, known: Iterable[str]) -> None:
        paths = [*known]
        self._versioned = {_first(path.removeprefix(VERSION)) for path in paths if path.startswith(VERSION + "/")}
        self._plain = {_first(path) for path in paths if not path.startswith(VERSION + "/")} - {""}

    def find(self, path: str) -> str:
        """Return the path under which the application knows `path`, or `path` in its shortest form."""
        path = _VERSIONS.sub("", _SLASHES.sub("/", path).rstrip("/")) or "/"
        bare = path.removeprefix(VERSION) if path.startswith(VERSION + "/") else path
        first = _first(bare)
        if first in self._versioned:
            return VERSION + bare
        return bare if first in self._plain else path


def _first(path: str) -> str:
    return path.split("/", 2)[1] if "/" in path else ""
