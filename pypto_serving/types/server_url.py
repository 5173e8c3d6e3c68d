"""How a client reaches an OpenAI-compatible server: its address, and the API key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from pypto_serving.errors import ConfigError

KEY_VARIABLES = ("PYPTO_SERVING_API_KEY", "OPENAI_API_KEY")
"""Environment variables of clients. The first one is the server's, too."""


class ServerUrl(NamedTuple):
    """`http[s]://HOST[:PORT][/PATH]`, in parts. `path` is where the API begins, with or without its `/v1`."""

    tls: bool
    host: str
    port: int
    path: str

    @property
    def origin(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.netloc}"

    @property
    def netloc(self) -> str:
        """Host and port, as in the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _default_port(self.tls) else f"{host}:{self.port}"

    def target(self, path: str) -> str:
        """Return the path to request for `path` of the API, such as `/v1/models`; `/v1` is not doubled."""
        base = self.path.removesuffix("/v1") if path.startswith("/v1/") else self.path
        return base + path


def parse_server_url(text: str) -> ServerUrl:
    """Parse the address of a server; raise ValueError for one that no request can be sent to."""
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
    """Return a key that a header can hold; raise ConfigError that names its `source` and does not show it."""
    if not key.isprintable():
        raise ConfigError(f"{source} is not one line of characters that can be printed, but must be")
    return key


def _is_plain(text: str) -> bool:
    return text.isprintable() and not any(map(str.isspace, text))


def _default_port(tls: bool) -> int:
    return 443 if tls else 80
