"""Make the document that GET /openapi.json answers with."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pypto_serving import __version__
from pypto_serving.api.common.body import Body
from pypto_serving.api.common.described import Answer, Error
from pypto_serving.api.status import PROBES
from pypto_serving.types.tier import TIERS

REFERENCE = "#/components/schemas/{name}"
_referenced: dict[type[Answer] | type[Body], None] = {}
"""The bodies and answers that routes refer to; the document contains their schemas."""
_ERRORS = {
    400: "The request cannot be served as sent; the message says why.",
    401: "The API key is missing or wrong.",
    403: "A web page of this origin may not call this server.",
    404: "There is no such model.",
    408: "The request came too slowly.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "The queue is full; Retry-After says when to come back.",
    431: "There are too many headers, or they are too long.",
    500: "The server failed on this request.",
    503: "The server cannot serve now; Retry-After says when to come back.",
    507: "The server cannot store files, or cannot read them.",
}
ALWAYS = (401, 403, 408, 431, 503)
GENERATING = (400, 404, 413, 415, 429, 500)


def _parameter(name: str, description: str, schema: dict[str, Any], place: str = "query") -> dict[str, Any]:
    required = {"required": True} if place == "path" else {}
    return {"name": name, "in": place, **required, "description": description, "schema": schema}


_TEXT, _LIMIT = {"type": "string"}, {"type": "integer", "minimum": 1, "maximum": 10_000}
_TIERS = {"type": "array", "items": {"type": "string", "enum": list(TIERS)}}
TIER_PARAMETER = _parameter("tier", "A tier to forget; may repeat. Default: all.", _TIERS)
PAGE = [
    _parameter("after", "Begin after this id.", _TEXT),
    _parameter("limit", "Most entries; there are at most 100.", _LIMIT),
]
MODEL_PARAMETER = _parameter("model_id", "A name of the served model; it may contain slashes.", _TEXT, "path")
UPLOAD = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
                "required": ["file"],
            }
        }
    },
}


class ApiRoute(Route):
    """A route with a description for the document: `answers` by status, `body` and `parameters`."""

    def __init__(
        self,
        method: str,
        path: str,
        handler: Callable[[Request], Awaitable[Response]],
        answers: Mapping[int, Any],
        body: type[Body] | dict[str, Any] | None = None,
        parameters: Iterable[dict[str, Any]] = (),
    ) -> None:
        super().__init__(path, handler)
        self.method, self.methods = method, {method}
        self._answers = answers
        self._body = {"required": True, "content": _json(body)} if isinstance(body, type) else body
        described = {parameter["name"]: parameter for parameter in parameters}
        in_path = {"in": "path", "required": True, "schema": {"type": "string"}}
        self._parameters = {name: {"name": name, **in_path} for name in self.param_convertors} | described

    def operation(self, needs_key: bool) -> dict[str, Any]:
        """Return the route's operation object; `needs_key`: requests to the server need an API key."""
        is_public = self.path in PROBES
        described: dict[str, Any] = {
            "summary": self.name.replace("_", " ").capitalize(),
            "description": inspect.getdoc(self.endpoint),
            "operationId": self.name,
            "responses": {code: one for code, one in self._answers.items() if needs_key > is_public or code != 401},
        }
        if self._parameters:
            described["parameters"] = list(self._parameters.values())
        if self._body is not None:
            described["requestBody"] = self._body
        return described | {"security": []} if needs_key and is_public else described


def reference(kind: type[Answer] | type[Body]) -> dict[str, str]:
    """Return a reference to the schema of an answer or a body, and add the schema to the document."""
    _referenced[kind] = None
    return {"$ref": REFERENCE.format(name=kind.__name__)}


def responses(
    answer: type[Answer] | str | dict[str, Any],
    *errors: int,
    event: dict[str, Any] | None = None,
    error: type[Answer] = Error,
    busy: type[Answer] | None = None,
) -> dict[int, dict[str, Any]]:
    """Describe the responses of an endpoint. `answer`: type, media type or schema of its success.

    `event`: schema of a stream's events. `error`: type of errors. `busy`: type of a 503, if different.
    """
    good: dict[str, Any]
    if isinstance(answer, str):
        good = {answer: {"schema": {"type": "string"}}}
    else:
        good = {"application/json": {"schema": answer if isinstance(answer, dict) else reference(answer)}}
    if event is not None:
        good["text/event-stream"] = {"schema": event}
    described: dict[int, dict[str, Any]] = {
        status: {"description": _ERRORS[status], "content": _json(error)} for status in sorted({*ALWAYS, *errors})
    }
    described[503]["content"] = _json(busy or error)
    return {200: {"description": "The answer.", "content": good}, **described}


def document(routes: Iterable[BaseRoute], needs_key: bool) -> bytes:
    """Describe the endpoints among `routes` in OpenAPI 3.1; `needs_key`: requests need an API key."""
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for route in routes:
        if isinstance(route, ApiRoute):
            paths[route.path_format][route.method.lower()] = route.operation(needs_key)
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "pypto-serving", "version": __version__},
        "paths": paths,
        "components": {"schemas": _schemas()},
    }
    if needs_key:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
    return msgspec.json.encode(described)


def _schemas() -> dict[str, dict[str, Any]]:
    answers = [kind for kind in _referenced if issubclass(kind, Answer)]
    schemas = msgspec.json.schema_components(answers, ref_template=REFERENCE)[1]
    for kind in _referenced:
        if not issubclass(kind, Body):
            continue
        schema = kind.model_json_schema(ref_template=REFERENCE.replace("{name}", "{model}"))
        for name, values in kind.rules.neutral.items():
            schema["properties"][name] = {
                "description": "Not supported; these change nothing.",
                "enum": [*values, None],
            }
        schemas |= schema.pop("$defs", {}) | {kind.__name__: schema}
    for schema in schemas.values():
        for field in schema.get("properties", {}).values():
            if field.get("default", ...) is None:
                del field["default"]  # null only marks a missing field; it may not be a valid value
    return schemas


def event(kind: type[Answer]) -> dict[str, Any]:
    """Describe each event of a stream of OpenAI's API."""
    data = {"type": "string", "anyOf": [_content([kind, Error]), {"const": "[DONE]"}]}
    return _event("A server-sent event; an Error may be the last one before [DONE].", data=data)


def named_event(kinds: Any) -> dict[str, Any]:
    """Describe each event of a stream of Anthropic's API, or of a response: one of `kinds`, a union."""
    data = {"type": "string", **_content(get_args(kinds))}
    return _event("A server-sent event, named by the type of its data.", event={"type": "string"}, data=data)


def _content(kinds: Iterable[type[Answer]]) -> dict[str, Any]:
    return {"contentMediaType": "application/json", "contentSchema": {"anyOf": [*map(reference, kinds)]}}


def _event(text: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "type": "object", "properties": properties, "required": [*properties]}


def _json(kind: type[Answer] | type[Body]) -> dict[str, Any]:
    return {"application/json": {"schema": reference(kind)}}
