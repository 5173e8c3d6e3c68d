"""Turn errors into HTTP responses: a status, OpenAI's JSON, and Retry-After if waiting helps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from pypto_serving.errors import PyptoError, RequestError
from pypto_serving.util import cut

RETRY_UNAVAILABLE_S = 5
MAX_DROPPED_BODIES = 4
"""Receive and drop up to this multiple of the body limit, since clients read no answer while they send."""
MAX_CHARS, MAX_PARAM_CHARS = 2000, 200
"""Cut messages, and names of fields in them, to these lengths: clients may have sent parts of them."""
_HEADERS = {401: (("www-authenticate", "Bearer"),)}
"""Of answers by status."""
_PASSING = (408, 409, 429)
"""Statuses below 500 that may change if a request comes again as it is."""
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    **_TYPES,
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PATH = "/api/"


class BodyTooLargeError(RequestError):
    """The request body exceeds the limit."""

    status = 413
    code = "request_too_large"

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body has more than {limit} bytes, this server's max-body-bytes; send less")


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error in the form that is sent to the client."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def type(self) -> str:
        """Return the `type` that OpenAI's API gives this error."""
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def payload(self) -> bytes:
        """Return the JSON body, also the payload of an error event in a stream. Long messages are cut."""
        param = None if self.param is None else cut(self.param, MAX_PARAM_CHARS)
        error = {"message": cut(self.message, MAX_CHARS), "type": self.type, "param": param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def ollama_payload(self) -> bytes:
        """Return the JSON body in the form of Ollama's API."""
        return msgspec.json.encode({"error": cut(self.message, MAX_CHARS)})

    def anthropic_payload(self, request_id: str) -> bytes:
        """Return the JSON body in the form of Anthropic's API."""
        kind = "api_error" if self.status >= 500 else "invalid_request_error"
        error: dict[str, Any] = {
            "type": _ANTHROPIC_TYPES.get(self.status, kind),
            "message": cut(self.message, MAX_CHARS),
        }
        if self.code is not None:
            error["details"] = {"error_code": self.code}
        return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})

    def all_headers(self) -> dict[str, str]:
        """Return the headers, with those that say whether it helps to send the request again.

        Agents and official clients do so after a 504, and some after a 401, unless they are told that it does not.
        """
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if (self.status < 500 and self.status not in _PASSING) or self.status == 504:
            headers["x-should-retry"] = "false"
        return headers

    def response(self, scope: Scope) -> Response:
        """Make the HTTP response, in the form of the API that the request's path belongs to."""
        content = self.payload()
        if scope["path"].startswith(ANTHROPIC_PATH):
            content = self.anthropic_payload(scope["state"]["request_id"])
        elif scope["path"].startswith(OLLAMA_PATH):
            content = self.ollama_payload()
        return Response(content, self.status, self.all_headers(), "application/json")


def internal_error(name: str) -> ApiError:
    """Describe an unexpected error, without details, but with `name`, under which the log has them."""
    return ApiError(500, f"the server failed on this request; its log says why under {name}", "internal_error")


def describe(error: PyptoError) -> ApiError:
    """Describe `error` to a client."""
    status = error.status if 400 <= error.status <= 599 else 500
    retry: Any = getattr(error, "retry_after_s", RETRY_UNAVAILABLE_S if status in (429, 503) else None)
    headers = _HEADERS.get(status, ())
    return ApiError(status, str(error), error.code, getattr(error, "param", None), retry, headers)
