"""Read what a request body says of the structure of the output, in any of its forms."""

from __future__ import annotations

from typing import Any

from pypto_serving.api.common.schemas import GenerationBody
from pypto_serving.errors import RequestError
from pypto_serving.types.structured import StructuredOutputsParams
from pypto_serving.util import brief

_GUIDED: dict[str, tuple[str, Any]] = {
    "guided_json": ("json", {}),
    "guided_regex": ("regex", ""),
    "guided_choice": ("choice", []),
    "guided_grammar": ("grammar", ""),
    "structural_tag": ("structural_tag", {}),
}
"""Older names of vLLM, with those in structured_outputs and with values that ask for nothing."""


def structured_outputs(body: GenerationBody) -> StructuredOutputsParams | None:
    """Return the structure that the output must have, None for any. Raises RequestError that names the field."""
    given: list[tuple[str, dict[str, Any]]] = []
    if (found := _of_response_format(body.response_format)) is not None:
        given.append(("response_format", found))
    if body.structured_outputs is not None:
        if not isinstance(body.structured_outputs, dict):
            raise _refusal("structured_outputs", body.structured_outputs, "an object", "invalid_type")
        given.append(("structured_outputs", body.structured_outputs))
    for field, (name, nothing) in _GUIDED.items():
        if (value := getattr(body, field)) not in (None, "", nothing):
            given.append((field, {name: value}))
    if len(given) > 1:
        names = " and ".join(field for field, _ in given)
        raise RequestError(f"{names} are given, but an output has one structure; send one", param=given[1][0])
    if not given and body.guided_whitespace_pattern is not None:
        name = "guided_whitespace_pattern"
        raise RequestError(f"{name} is given, but no JSON is asked for; leave it out", param=name)
    if not given:
        return None
    field, values = given[0]
    if body.guided_whitespace_pattern is not None:
        values = {"whitespace_pattern": body.guided_whitespace_pattern, **values}
    return StructuredOutputsParams.read(values, field)


def _of_response_format(wanted: Any) -> dict[str, Any] | None:
    """Read OpenAI's `response_format`; `strict` and `name` change nothing, since a schema is always enforced."""
    if wanted is None:
        return None
    field = "response_format"
    if not isinstance(wanted, dict):
        raise _refusal(field, wanted, "an object with a type", "invalid_type")
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": {name: value for name, value in wanted.items() if name != "type"}}
    if kind != "json_schema":
        raise _refusal(f"{field}.type", kind, "text, json_object, json_schema or structural_tag")
    described = wanted.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise _refusal(f"{field}.json_schema.schema", schema, "a JSON schema")
    return {"json": schema}


def _refusal(name: str, value: object, allowed: str, code: str | None = None) -> RequestError:
    field = name.partition(".")[0]
    return RequestError(f"{name} is {brief(value)}, but must be {allowed}", param=field, code=code)
