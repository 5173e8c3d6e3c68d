"""A server whose model thinks and calls tools, and what its clients say."""

from __future__ import annotations

from typing import Any

import msgspec

from pypto_serving.api.anthropic.answers import Message, MessageError, MessageEvent
from tests.api.running import RunningServer
from tests.api.templates import HERMES

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TEMPLATE = HERMES.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
)
"""Without thinking it closes the model's thoughts before they begin."""
HELLO = {"role": "user", "content": "hello"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "the weather", "input_schema": CITY}
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
THINKS = {"type": "enabled", "budget_tokens": 64}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris é"}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
SAID = f"<think>\nhm, hello\n</think>\n\nI look.\n{CALL}\n{CALL_NOW}"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 400, "messages": [HELLO], **fields}


def create(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """The message, which must be as described."""
    response = server.http.post(PATH, json=body(**fields))
    assert response.status_code == 200, response.text
    msgspec.json.decode(response.content, type=Message)
    found: dict[str, Any] = response.json()
    return found


def refusal(server: RunningServer, status: int = 400, path: str = PATH, **fields: Any) -> dict[str, Any]:
    """The error, which must be as described."""
    response = server.http.post(path, json=body(**fields))
    assert response.status_code == status, response.text
    found = msgspec.json.decode(response.content, type=MessageError)
    assert found.request_id == response.headers["request-id"] == response.headers["x-request-id"]
    error: dict[str, Any] = response.json()["error"]
    return error


def stream(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each as described, in the published order."""
    response = server.http.post(PATH, json=body(stream=True, **fields))
    assert response.status_code == 200, response.text
    return read_events(response.text)


def read_events(text: str) -> list[dict[str, Any]]:
    events = []
    *found, rest = text.split("\n\n")
    assert rest == ""
    for event in found:
        name, data = event.split("\n")
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(MessageEvent)
        decoder.decode(data.removeprefix("data: "))
        events.append(msgspec.json.decode(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return [event for event in events if event["type"] != "ping"]


ADDS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("thinking", "signature"),
    "input_json_delta": ("tool_use", "partial_json"),
}
"""The block that each delta adds to, and the field."""


def join(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events make, which must come in the published order."""
    first, *middle, delta, stop = events
    assert (first["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    message: dict[str, Any] = first["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in middle:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            is_open = True
            blocks.append(event["content_block"])
            if blocks[-1]["type"] == "tool_use":
                assert blocks[-1].pop("input") == {}
                blocks[-1]["partial_json"] = ""
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(blocks) - 1
            (kind, value), block = event["delta"].items(), blocks[-1]
            of, field = ADDS[kind[1]]
            assert block["type"] == of and not block.get("signature")
            block[field] += value[1]
        else:
            assert (event["type"], event["index"]) == ("content_block_stop", len(blocks) - 1)
            assert is_open and (blocks[-1]["type"] != "thinking" or blocks[-1]["signature"])
            is_open = False
    assert not is_open
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = msgspec.json.decode(block.pop("partial_json") or "{}")
    return {**message, "content": blocks, **delta["delta"], "usage": delta["usage"]}
