"""Join the events of a streamed chat, as clients do."""

from __future__ import annotations

import json
from typing import Any

from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.types.arrays import unpack_ids
from tests.api.running import RunningServer

PATH = "/v1/chat/completions"


def join_events(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that the deltas of a choice make, and how it ended; each call as its first delta, joined."""
    message: dict[str, Any] = {"role": None, "content": "", "reasoning_content": "", "reasoning": "", "calls": []}
    for choice in (choice for event in events for choice in event["choices"] if choice["index"] == index):
        for name, value in choice["delta"].items():
            if name == "role":
                message["role"] = value
            elif name == "tool_calls":
                _add_calls(message["calls"], value)
            else:
                message[name] += value
        message["finish_reason"] = choice["finish_reason"]
    return message


def _add_calls(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    for delta in deltas:
        if "id" in delta:
            assert delta["index"] == len(calls)
            assert delta["function"]["arguments"] == ""
            calls.append(delta)
        else:
            assert set(delta) == {"index", "function"}
            assert delta["index"] == len(calls) - 1
            calls[-1]["function"]["arguments"] += delta["function"]["arguments"]


def calls_of(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Names and arguments of calls, whose ids must differ."""
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["type"] == "function" for call in calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def prompt_of(server: RunningServer, tokenizer: Tokenizer) -> str:
    """The prompt of the last request."""
    return tokenizer.decode(unpack_ids(server.engine.requests[-1].token_ids).tolist(), skip_special_tokens=False)
