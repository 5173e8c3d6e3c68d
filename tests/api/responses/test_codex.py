"""The loop of an agent in a terminal, whose model calls each kind of tool."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec

from pypto_serving.api.text.tokenizer import Tokenizer
from tests.api.chat_events import prompt_of
from tests.api.responses.answering import PATH, Thinks, call_of, stream
from tests.api.responses.codex import Codex, Item
from tests.api.scripted_engine import Script

PATCH = "*** Begin Patch\n*** Add File: a.txt\n+hello\n*** End Patch\n"
PLAN = '{"plan": [{"step": "look", "status": "completed"}]}'
SAID = (
    "<think>look first</think>I look." + call_of("exec_command", '{"cmd": "ls"}') + call_of("update_plan", PLAN),
    "<think>edit</think>" + call_of("apply_patch", msgspec.json.encode({"input": PATCH}).decode()),
    call_of("mcp__clock__now", '{"zone": "UTC"}'),
    "<think>done</think>It is written.",
    "good day",
)


def test_a_codex_like_loop(thinks: Thinks, tokenizer: Tokenizer) -> None:
    server, said, prompts = thinks(""), iter(SAID), []
    server.engine.script = lambda request: Script(tokenizer.encode(next(said)), "stop")
    called: list[Item] = []

    def post(body: Item) -> list[Item]:
        events = stream(server, **body)
        prompts.append(prompt_of(server, tokenizer))
        output: list[Item] = events[-1]["response"]["output"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == output, "the agent reads only these"
        return output

    def run(call: Item) -> str:
        called.append(call)
        return f"done {len(called)}"

    agent = Codex(post, run)
    agent.items.append({"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAA of a model"})
    assert agent.ask("Write a.txt.") == "It is written."
    assert agent.ask("Thanks!") == "good day"
    assert [(call["name"], call.get("namespace"), call.get("arguments", call.get("input"))) for call in called] == [
        ("exec_command", None, '{"cmd": "ls"}'),
        ("update_plan", None, PLAN),
        ("apply_patch", None, PATCH),
        ("now", "mcp__clock__", '{"zone": "UTC"}'),
    ]
    assert len(prompts) == len(SAID)
    assert all(after.startswith(before) for before, after in pairwise(prompts)), "a prefix that the cache has"
    assert all(f"done {i + 1}" in prompts[-1] for i in range(4)) and "look first" in prompts[-1]
    assert "add_hunk" in prompts[0] and "mcp__clock__now" in prompts[0]
    assert not any(word in prompts[0] for word in ("web_search", "image_generation", "gAAAA"))


def test_what_codex_sends_in_vain_is_named(thinks: Thinks) -> None:
    server, bodies = thinks("good day"), list[Item]()

    def post(body: Item) -> list[Item]:
        bodies.append(body)
        return stream(server, **body)[-1]["response"]["output"]  # type: ignore[no-any-return]

    Codex(post, str).ask("hello")
    response = server.http.post(PATH, json=bodies[0])
    assert response.headers["x-ignored-fields"] == "text.verbosity, tools.image_generation, tools.web_search"


def test_tools_of_a_namespace_are_checked(thinks: Thinks) -> None:
    server, now = thinks("x"), {"type": "function", "name": "now"}
    bad: list[tuple[Any, str]] = [
        ({"name": "a"}, "tools[1]"),
        ({"tools": [now]}, "tools[1]"),
        ({"name": "a", "tools": [{"type": "web_search"}]}, "tools[1].tools[0].type"),
        ({"name": "a", "tools": [now, {**now, "name": "b c"}]}, "tools[1].tools[1].name"),
        ({"name": "a", "tools": [now, {"type": "function"}]}, "tools[1].tools[1].name"),
        ({"name": "a__", "tools": [{**now, "name": "x" * 126}]}, "tools[1].tools[0].name"),
    ]
    for namespace, place in bad:
        tools = [{"type": "web_search"}, {"type": "namespace", **namespace}]
        answer = server.http.post(PATH, json={"model": "tiny", "input": "hello", "tools": tools})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, place)
        assert answer.json()["error"]["message"].startswith(place)
