"""Ask for responses; each answer and event must be as described, and of OpenAI's published types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from pypto_serving.api.responses.answers import ResponseEvent, ResponseObject
from tests.api.running import RunningServer

PATH = "/v1/responses"
Thinks = Callable[..., RunningServer]


def unpublished(value: Any, where: str = "") -> list[str]:
    """The fields that no published type has."""
    if isinstance(value, BaseModel):
        found = [f"{where}.{name}" for name in value.model_extra or ()]
        return found + [one for name in type(value).model_fields for one in unpublished(getattr(value, name), name)]
    return [one for item in value for one in unpublished(item, where)] if isinstance(value, list) else []


def create(server: RunningServer, **fields: Any) -> dict[str, Any]:
    response = server.http.post(PATH, json={"model": "tiny", "input": "hello", **fields})
    assert response.status_code == 200, response.text
    msgspec.json.decode(response.content, type=ResponseObject)
    assert unpublished(Response.model_validate(response.json(), strict=True)) == []
    found: dict[str, Any] = response.json()
    return found


def stream(server: RunningServer, path: str = PATH, **fields: Any) -> list[dict[str, Any]]:
    response = server.http.post(path, json={"model": "tiny", "input": "hello", "stream": True, **fields})
    assert response.status_code == 200, response.text
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    described: msgspec.json.Decoder[Any] = msgspec.json.Decoder(ResponseEvent)
    events = []
    for i, event in enumerate(response.text.split("\n\n")[:-1]):
        name, data = event.split("\n")
        described.decode(data.removeprefix("data: "))
        events.append(msgspec.json.decode(data.removeprefix("data: ")))
        assert unpublished(adapter.validate_python(events[-1], strict=True)) == []
        assert (name, events[-1]["sequence_number"]) == (f"event: {events[-1]['type']}", i)
    return events


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
