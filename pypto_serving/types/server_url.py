"""A client's access to an OpenAI-compatible server: the address, and the API key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from pypto_serving.errors import ConfigError

KEY_VARIABLES = ("PYPTO_SERVING_API_KEY", "OPENAI_API_KEY")
"""Environment variables of clients with the API key. The server also reads the first one."""


class ServerUrl(NamedTuple):
    """The parts of `http[s]://HOST[:PORT][/PATH]`. `path` is the root of the API, with or without `/v1`."""

    tls: bool
    host: str
    port: int
    path: str

    @property
    def origin(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.netloc}"

    @property
    def netloc(self) -> str:
        """Host and port, in the form of the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _default_port(self.tls) else f"{host}:{self.port}"

    def target(self, path: str) -> str:
        """Return the path to request for `path` of the API, such as `/v1/models`; `/v1` is not doubled."""
        base = self.path.removesuffix("/v1") if path.startswith("/v1/") else self.path
        return base + path


def parse_server_url(text: str) -> ServerUrl:
    """Parse the address of a server. Raises ValueError if no request can be sent to it."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"{text} is no address of a server")
    if parts.username is not None or parts.query or parts.fragment or not _is_plain(text):
        raise ValueError(f"{text} has parts that are not sent")
    parts.hostname.encode("idna")
    parts.path.encode("ascii")
    tls = parts.scheme == "https"
    return ServerUrl(tls, parts.hostname, parts.port or _default_port(tls), parts.path.rstrip("/"))


def key_in(environment: Mapping[str, str]) -> str | None:
    """Return the API key in the first of KEY_VARIABLES that is set and not empty, if any. Raises ConfigError."""
    name = next((name for name in KEY_VARIABLES if environment.get(name)), None)
    return None if name is None else require_key(name, environment[name])


def require_key(source: str, key: str) -> str:
    """Check that a key fits into a header; return it. Raises ConfigError that names its `source`, but not the key."""
    if not key.isprintable():
        raise ConfigError(f"{source} is not one line of characters that can be printed, but must be")
    return key


def _is_plain(text: str) -> bool:
    return text.isprintable() and not any(map(str.isspace, text))


def _default_port(tls: bool) -> int:
    return 443 if tls else 80
