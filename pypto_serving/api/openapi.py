"""Make the document that GET /openapi.json answers with."""

from __future__ import annotations

import re
from typing import Any, get_args

import msgspec
from pydantic import BaseModel

from pypto_serving.api.anthropic import answers as anthropic
from pypto_serving.api.anthropic.schemas import RULES as MESSAGES_RULES
from pypto_serving.api.anthropic.schemas import CountTokensBody, MessagesBody
from pypto_serving.api.batch import answers as batch
from pypto_serving.api.batch.schemas import RULES as BATCH_RULES
from pypto_serving.api.batch.schemas import BatchBody
from pypto_serving.api.decisions import answers as decisions
from pypto_serving.api.decisions.schemas import RULES as DECISION_RULES
from pypto_serving.api.decisions.schemas import DecisionBody
from pypto_serving.api.openai import answers as openai
from pypto_serving.api.openai.answers import Answer, Error
from pypto_serving.api.openai.fields import CHAT_RULES, COMPLETION_RULES, DETOKENIZE_RULES, TOKENIZE_RULES, FieldRules
from pypto_serving.api.openai.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from pypto_serving.api.responses import answers as response_answers
from pypto_serving.api.responses.events import ResponseEvent
from pypto_serving.api.responses.schemas import RULES as RESPONSES_RULES
from pypto_serving.api.responses.schemas import ResponsesBody
from pypto_serving.api.status import PROBES
from pypto_serving.types.tier import TIERS

REFERENCE = "#/components/schemas/{name}"
BODIES: dict[type[BaseModel], FieldRules] = {
    CompletionBody: COMPLETION_RULES,
    ChatBody: CHAT_RULES,
    TokenizeBody: TOKENIZE_RULES,
    DetokenizeBody: DETOKENIZE_RULES,
    MessagesBody: MESSAGES_RULES,
    CountTokensBody: MESSAGES_RULES,
    ResponsesBody: RESPONSES_RULES,
    DecisionBody: DECISION_RULES,
    BatchBody: BATCH_RULES,
}
ANSWERS = (
    *openai.ANSWERS,
    *anthropic.ANSWERS,
    *decisions.ANSWERS,
    *response_answers.ANSWERS,
    ResponseEvent,
    *batch.ANSWERS,
)
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
TIER_PARAMETER = {
    "name": "tier",
    "in": "query",
    "description": "A tier to forget; may repeat. Default: all.",
    "schema": {"type": "array", "items": {"type": "string", "enum": list(TIERS)}},
}
PAGE = [
    {"name": "after", "in": "query", "description": "Begin behind this id.", "schema": {"type": "string"}},
    {
        "name": "limit",
        "in": "query",
        "description": "Most entries; there are at most 100.",
        "schema": {"type": "integer", "minimum": 1, "maximum": 10_000},
    },
]
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
MODEL_PARAMETER = {
    "name": "model_id",
    "in": "path",
    "required": True,
    "description": "A name of the served model; it may contain slashes.",
    "schema": {"type": "string"},
}


def reference(kind: type[Answer] | type[BaseModel]) -> dict[str, str]:
    """Refer to the schema of an answer or a body."""
    return {"$ref": REFERENCE.format(name=kind.__name__)}


def body(kind: type[BaseModel]) -> dict[str, Any]:
    """Describe a request body, which the handler parses itself."""
    return {"required": True, "content": {"application/json": {"schema": reference(kind)}}}


def path_parameters(path: str, described: dict[str, Any]) -> dict[str, Any]:
    """Describe the ids in a path, beside the parameters that are `described`."""
    ids = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    return {"parameters": [*described.get("parameters", ()), *ids]}


def responses(
    answer: type[Answer] | str | dict[str, Any],
    *errors: int,
    event: dict[str, Any] | None = None,
    error: type[Answer] = Error,
    busy: type[Answer] | None = None,
) -> dict[int | str, dict[str, Any]]:
    """Describe the responses of an endpoint: its `answer`, its media type, or its schema, and its errors.

    `event` is the schema of an event of a stream, `error` what errors have, and `busy` what a 503 has.
    """
    good: dict[str, Any]
    if isinstance(answer, str):
        good = {answer: {"schema": {"type": "string"}}}
    else:
        good = {"application/json": {"schema": answer if isinstance(answer, dict) else reference(answer)}}
    if event is not None:
        good["text/event-stream"] = {"schema": event}
    described: dict[int | str, dict[str, Any]] = {
        status: {"description": _ERRORS[status], "content": _json(error)} for status in sorted({*ALWAYS, *errors})
    }
    described[503]["content"] = _json(busy or error)
    return {200: {"description": "The answer.", "content": good}, **described}


def complete(document: dict[str, Any], needs_key: bool) -> dict[str, Any]:
    """Add the schemas that the document refers to, and the API key if there is one."""
    components = document.setdefault("components", {})
    components["schemas"] = msgspec.json.schema_components(ANSWERS, ref_template=REFERENCE)[1]
    for kind, rules in BODIES.items():
        schema = kind.model_json_schema(ref_template=REFERENCE.replace("{name}", "{model}"))
        for name, values in rules.neutral.items():
            schema["properties"][name] = {
                "description": "Not supported; these change nothing.",
                "enum": [*values, None],
            }
        components["schemas"] |= schema.pop("$defs", {}) | {kind.__name__: schema}
    for schema in components["schemas"].values():
        for field in schema.get("properties", {}).values():
            if field.get("default", ...) is None:
                del field["default"]  # a field that is not given; where it is required, null is no value of it
    paths = document["paths"]
    open_paths = PROBES & paths.keys()
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for path in open_paths:
            paths[path]["get"]["security"] = []
    for operations in [paths[path] for path in open_paths] if needs_key else paths.values():
        for operation in operations.values():
            del operation["responses"]["401"]
    return document


def event(kind: type[Answer]) -> dict[str, Any]:
    """Describe each event of a stream of OpenAI's API."""
    parts = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [reference(kind), reference(Error)]}}
    data = {"type": "string", "anyOf": [parts, {"const": "[DONE]"}]}
    text = "A server-sent event; an Error may be the last one before [DONE]."
    return {"description": text, "type": "object", "properties": {"data": data}, "required": ["data"]}


def named_event(kinds: Any) -> dict[str, Any]:
    """Describe each event of a stream of Anthropic's API, or of a response: one of `kinds`, a union."""
    parts = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [reference(kind) for kind in get_args(kinds)]},
    }
    text = "A server-sent event, named by the type of its data."
    properties = {"event": {"type": "string"}, "data": parts}
    return {"description": text, "type": "object", "properties": properties, "required": ["event", "data"]}


def _json(kind: type[Answer]) -> dict[str, Any]:
    return {"application/json": {"schema": reference(kind)}}
