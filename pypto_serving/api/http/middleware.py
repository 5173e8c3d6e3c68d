"""ASGI middleware around the application. It never wraps `receive`, so handlers notice a disconnect at once."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterable

from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pypto_serving.api.http.allowance import ALLOWANCE
from pypto_serving.api.http.errors import ANTHROPIC_PATH, describe, internal_error
from pypto_serving.api.http.keys import ApiKeys, sent_key
from pypto_serving.api.http.tracing import Tracing
from pypto_serving.engine.metrics import ServerMetrics
from pypto_serving.errors import SHUTTING_DOWN, RequestError, UnavailableError
from pypto_serving.logs import REQUEST_ID, with_fields
from pypto_serving.setup.host import is_loopback
from pypto_serving.util import brief

logger = logging.getLogger("pypto_serving.api")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
SERVER_SEND = "pypto.server_send"
"""Scope key of the server's own `send`, with which streams write their bodies without any middleware."""
WRITE_PART = "pypto.write_part"
"""Scope key of a WriteNow: it writes a part of a body at once, or returns False if `send` must be used."""
BODY_PARSED = "pypto.body_parsed"
"""Scope key of a function to call when the bytes of the request's body are no longer in memory."""
ANSWERED = "pypto.answered"
"""Scope key that is set when the connection has answered the request itself."""
VERSION = "/v1"
_SLASHES = re.compile(r"/{2,}")
_VERSIONS = re.compile(rf"^(?:{VERSION})+(?={VERSION}/)")


class RequestScope:
    """Outermost middleware: normalize the path, add an x-request-id to every response, count it, log it if enabled.

    Log lines of the request's task have the same id. With tracing, the request's state has a `trace`.
    """

    def __init__(
        self, app: ASGIApp, metrics: ServerMetrics, paths: Paths, access_log: bool, tracing: Tracing | None
    ) -> None:
        self.app = app
        self._paths = paths
        self._tracing = tracing
        self._metrics = metrics
        self._logs = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["path"] = self._paths.find(scope["path"])
        request_id = request_id_of(scope["headers"])
        started_s = time.monotonic()
        ids = [(b"x-request-id", request_id)]
        if scope["path"].startswith(ANTHROPIC_PATH):
            ids.append((b"request-id", request_id))
        name = request_id.decode()
        trace = None if self._tracing is None else self._tracing.begin(scope, name)
        state = {"request_id": name, "arrival_s": started_s, "trace": trace}
        scope["state"] = dict(scope.get("state") or {}) | state
        REQUEST_ID.set(name)
        status = 0

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                nonlocal status
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *ids]
                if ANSWERED not in scope:
                    self._metrics.count_response(status)
                if trace is not None:
                    trace.answer(status)
                if self._logs:
                    _log_access(scope, status, time.monotonic() - started_s)
            await send(message)

        asked = {**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope  # the connection drops the body
        try:
            await self.app(asked, receive, send_with_id)
        finally:
            if trace is not None:
                trace.end()
            if status:
                elapsed_s, handler = time.monotonic() - started_s, self._paths.template(scope["path"])
                self._metrics.observe_http(handler, scope["method"], status, elapsed_s)


class FaultHandler:
    """Innermost middleware: if a handler fails, log the error and answer with a 500 that names the request.

    If a handler is cancelled because the server is ending, answer with a 503.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noted_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, noted_send)
        except (Exception, asyncio.CancelledError) as error:
            if started:
                raise
            request_id = scope["state"]["request_id"]
            answer = internal_error(request_id)
            if isinstance(error, asyncio.CancelledError):  # the server is ending, and no longer waits
                answer = describe(UnavailableError(SHUTTING_DOWN))
            else:
                logger.exception("request %s failed", request_id)
            await answer.response(scope)(scope, receive, send)


class OriginGuard:
    """Refuse requests that web pages of other sites send through a user's browser, for servers without an API key.

    - `Origin` names the page's site. It must be this server, under an address or localhost, or one of `allowed`.
    - Browsers send no `Origin` with a page's GETs to its own site, and a site can point its name at this machine (DNS
      rebinding). On plain HTTP, nothing else shows that a browser sent the request. So over loopback, `Host` of every
      request must be a name that no site on the internet can have, or the host of one of `allowed`.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self.app = app
        self._allowed = frozenset(origin.encode() for origin in allowed)
        self._hosts = frozenset(_name(origin.partition("://")[2]) for origin in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal:
            error = RequestError(refusal, code="origin_not_allowed", status=403)
            await describe(error).response(scope)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> str:
        """Return the reason to refuse the request, or ""."""
        headers = dict(scope["headers"])
        origin, host = headers.get(b"origin"), headers.get(b"host", b"").lower()
        if b"*" in self._allowed or origin in self._allowed:
            return ""
        name = _name(host.decode("latin-1"))
        if origin is not None:
            if origin in (b"http://" + host, b"https://" + host) and _is_own_name(name):
                return ""
            return "web pages of this origin may not call this server; its option allowed-origins names those that may"
        own_host, _ = scope.get("server") or ("", None)
        if name in self._hosts or _is_private_name(name) or not is_loopback(own_host):
            return ""
        return (
            f"this server is asked under the name {brief(name)}, which any site can point at this machine; use its "
            f"address or localhost, or give it the option allowed-origins with the origin of that name, or an API key"
        )


def _name(host: str) -> str:
    """Return the name in a `Host` header, without the port."""
    return re.sub(r":\d*$", "", host)


def _is_own_name(name: str) -> bool:
    """Return whether `name` is an address or localhost."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return True


def _is_private_name(name: str) -> bool:
    """Return whether no site on the internet can have `name`: it has no dot, or an ending of local networks."""
    return "." not in name or name.endswith((".local", ".internal", ".home.arpa")) or _is_own_name(name)


class ApiKeyGuard:
    """Refuse requests without a valid API key, except for public paths (`is_public`)."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, is_public: Callable[[str], bool]) -> None:
        self.app = app
        self._is_public = is_public
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_public(scope["path"]):
            await self.app(scope, receive, send)
            return
        key = sent_key(scope["headers"])
        allowance = None if key is None else self._keys.find(key)
        if allowance is None:
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            error = RequestError(message, code="invalid_api_key", status=401)
            await describe(error).response(scope)(scope, receive, send)
            return

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *allowance.headers()]
            await send(message)

        ALLOWANCE.set(allowance)
        await self.app(scope, receive, send_with_limits)


def _log_access(scope: Scope, status: int, elapsed_s: float) -> None:
    """Log the beginning of an answer, without the URL's query, which may contain secrets."""
    host, port = scope.get("client") or ("", 0)
    client = f"{host}:{port}" if host else "a Unix socket"
    method, path, elapsed_ms = scope["method"], scope["path"], round(elapsed_s * 1e3, 1)
    fields = {"client": client, "method": method, "path": path, "status": status, "first_byte_ms": elapsed_ms}
    line = (client, method, path, status, elapsed_ms)
    logger.info("%s %s %r %d, first byte after %.1f ms", *line, extra=with_fields(**fields))


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the client's request id if it is valid, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return bytes(value)
    return uuid.uuid4().hex.encode()


class Paths:
    """The paths of an application. Each can be used with or without `/v1`, and with superfluous slashes."""

    def __init__(self, known: Iterable[str]) -> None:
        paths = [*known]
        self._versioned = {_first(path.removeprefix(VERSION)) for path in paths if path.startswith(VERSION + "/")}
        self._plain = {_first(path) for path in paths if not path.startswith(VERSION + "/")} - {""}
        self._fixed = {path for path in paths if "{" not in path}
        self._templates = [compile_path(path) for path in paths if "{" in path]

    def find(self, path: str) -> str:
        """Return the application's form of `path`; for an unknown path, its shortest form."""
        path = _VERSIONS.sub("", _SLASHES.sub("/", path).rstrip("/")) or "/"
        bare = path.removeprefix(VERSION) if path.startswith(VERSION + "/") else path
        first = _first(bare)
        if first in self._versioned:
            return VERSION + bare
        return bare if first in self._plain else path

    def template(self, path: str) -> str:
        """Return the template that `path` follows, such as `/v1/models/{model_id}`, or "none"."""
        if path in self._fixed:
            return path
        return next((template for regex, template, _ in self._templates if regex.match(path)), "none")


def _first(path: str) -> str:
    return path.split("/", 2)[1] if "/" in path else ""
