"""A coding agent's loop, as agents in terminals run it: what they send, and that turns share a prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import msgspec

from pypto_serving.api.text.tokenizer import Tokenizer
from tests.api.anthropic.talking import COUNT, PATH, join, read_events
from tests.api.chat_events import prompt_of
from tests.api.running import RunningServer
from tests.api.scripted_engine import Script

CACHED = {"cache_control": {"type": "ephemeral"}}
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14",
    "x-api-key": "none",
    "x-app": "cli",
    "x-stainless-lang": "js",
}


def tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string", "description": f"the {parameter}"} for parameter in parameters}
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": properties,
        "required": list(parameters[:1]),
        "additionalProperties": False,
    }
    return {"name": name, "description": f"{name} something", "input_schema": schema}


TOOLS = [
    tool("Bash", "command", "description"),
    tool("Read", "file_path"),
    tool("Edit", "file_path", "old_string", "new_string"),
    tool("Grep", "pattern", "path"),
    *(tool(f"mcp__files__{i}", "path") for i in range(20)),
]


def asks(turn: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The body of a turn. Its first system block differs each time; the mark of the cache moves to the last message."""
    *earlier, last = messages
    blocks = [*last["content"][:-1], {**last["content"][-1], **CACHED}]
    return {
        "model": "tiny",
        "max_tokens": 32_000,
        "stream": True,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{turn}; cch={turn:05x};"},
            {"type": "text", "text": "You are an agent in a terminal.", **CACHED},
            {"type": "text", "text": "# Rules\n- be brief\n", **CACHED},
        ],
        "tools": TOOLS,
        "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "messages": [*earlier, {**last, "content": blocks}],
    }


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{msgspec.json.encode({'name': name, 'arguments': arguments}).decode()}\n</tool_call>"


OUTPUTS = [
    f"<think>look</think>I read it.{call('Read', file_path='/a.py')}{call('Grep', pattern='def')}",
    f"<think>edit</think>{call('Edit', file_path='/a.py', old_string='a', new_string='b')}",
    f"<think>run</think>I test it.{call('Bash', command='make')}",
    "<think>fine</think>It works.",
]


def results(message: dict[str, Any], turn: int) -> Iterator[dict[str, Any]]:
    """What the agent answers calls with: text, lists of blocks, and failures."""
    for block in message["content"]:
        if block["type"] == "tool_use":
            content = f"done {block['name']}" if turn else [{"type": "text", "text": f"done {block['name']}"}]
            failed = {"is_error": True} if block["name"] == "Edit" else {}
            yield {"type": "tool_result", "tool_use_id": block["id"], "content": content, **failed}


def test_an_agents_loop(thinks: Callable[..., RunningServer], tokenizer: Tokenizer) -> None:
    server = thinks("")
    said = iter(OUTPUTS)
    server.engine.script = lambda request: Script(tokenizer.encode(next(said)), "stop")
    reminder = {"type": "text", "text": "<system-reminder>\nToday is Tuesday.\n</system-reminder>"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": [reminder, {"type": "text", "text": "mend a.py"}]}]
    prompts = []
    for turn in range(len(OUTPUTS)):
        asked = asks(turn, messages)
        response = server.http.post(f"{PATH}?beta=true", json=asked, headers=HEADERS)
        assert response.status_code == 200, response.text
        message = join(read_events(response.text))
        prompts.append(prompt_of(server, tokenizer))
        counted = {key: asked[key] for key in ("model", "system", "tools", "thinking", "messages")}
        count = server.http.post(f"{COUNT}?beta=true", json=counted, headers=HEADERS).json()
        assert count["input_tokens"] == message["usage"]["input_tokens"]
        messages.append({"role": "assistant", "content": message["content"]})
        if turn < len(OUTPUTS) - 1:
            assert message["stop_reason"] == "tool_use"
            messages.append({"role": "user", "content": list(results(message, turn))})
    assert (message["stop_reason"], message["content"][-1]["text"]) == ("end_turn", "It works.")
    for before, after in pairwise(prompts):
        assert after.startswith(before), "a prefix that the cache has"
    assert "<|im_start|>tool\nError: done Edit<|im_end|>" in prompts[2]
    assert prompts[1].count("<|im_start|>tool\ndone") == 2
