"""Reasoning over real HTTP, in the habits of the models that mark it with `<think>`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.api.chat.parsers.scanner import AssistantMessage, read_output
from pypto_serving.api.prompting.template import TemplateEncoder
from pypto_serving.api.text.tokenizer import Tokenizer
from tests.api.chat_events import PATH, join_events
from tests.api.running import RunningServer
from tests.api.templates import BARE, OPENED, SWITCHED, THINKS, with_tools
from tests.api.tool_samples import HELLO
from tests.api.tool_samples import WEATHER_TOOL as WEATHER

Says = Callable[..., RunningServer]

HABITS: list[tuple[str, dict[str, Any], str, str, str]] = [
    (THINKS, {}, "<think>why</think>so", "why", "so"),
    (THINKS, {}, "\n<think>\nwhy\n</think>\n\nso", "\nwhy\n", "so"),
    (THINKS, {}, "so", "", "so"),
    (THINKS, {}, "so <think>x</think>", "", "so <think>x</think>"),
    (THINKS, {}, "<think>never", "never", ""),
    (OPENED, {}, "why</think>so", "why", "so"),
    (OPENED, {}, "<think>why</think>so", "why", "so"),
    (OPENED, {}, "never </thi", "never </thi", ""),
    (SWITCHED, {}, "<think>why</think>so", "why", "so"),
    (SWITCHED, {"chat_template_kwargs": {"enable_thinking": False}}, "so</think>", "", "so</think>"),
    (SWITCHED, {"reasoning_effort": "none"}, "so", "", "so"),
    (SWITCHED, {"reasoning_effort": "low"}, "<think>why</think>so", "why", "so"),
    (BARE, {}, "why</think>so", "why", "so"),
    (BARE, {}, "<think>why</think>so", "why", "so"),
]


@pytest.mark.parametrize(("template", "fields", "text", "reasoning", "content"), HABITS)
def test_habits(
    says: Says,
    tokenizer: Tokenizer,
    template: str,
    fields: dict[str, Any],
    text: str,
    reasoning: str,
    content: str,
) -> None:
    server, body = says(text), {"messages": [HELLO], "chat_template": template, **fields}
    reply = server.post(PATH, body).json()
    message = reply["choices"][0]["message"]
    assert (message.get("reasoning", ""), message["content"]) == (reasoning, content)
    assert message.get("reasoning_content") == message.get("reasoning")
    for seed in range(3):
        server.engine.seed = seed
        events = server.events(PATH, {**body, "stream_options": {"include_usage": True}})
        streamed = join_events(events)
        assert (streamed["reasoning"], streamed["reasoning_content"]) == (reasoning, reasoning)
        assert streamed["content"] == content
        assert events[-1]["usage"] == reply["usage"]
    hidden = {**body, "include_reasoning": False}
    assert "reasoning" not in server.post(PATH, hidden).json()["choices"][0]["message"]
    assert join_events(server.events(PATH, hidden))["reasoning"] == ""


@pytest.mark.parametrize("seed", range(4))
def test_reasoning_is_counted_in_tokens(says: Says, tokenizer: Tokenizer, seed: int) -> None:
    """Tokens without text count, and so does the beginning of an end mark that is no token of its own."""
    server = says("the fox 😀</think>the dog")
    server.engine.seed = seed
    usage = server.post(PATH, {"messages": [HELLO], "chat_template": OPENED, "n": 2}).json()["usage"]
    expected = len(tokenizer.encode("the fox 😀</think>")) - 1
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 2 * expected
    usage = says("plain").post(PATH, {"messages": [HELLO], "chat_template": THINKS}).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_no_token_ids_are_lost_where_text_is_parsed(says: Says, tokenizer: Tokenizer) -> None:
    server, text = says("<think>why</think>the fox 😀"), "<think>why</think>the fox 😀"
    body = {"messages": [HELLO], "chat_template": THINKS, "return_token_ids": True}
    server.engine.largest_portion = 1
    try:
        events = server.events(PATH, body)
    finally:
        server.engine.largest_portion = 1000
    streamed = [i for event in events for choice in event["choices"] for i in choice.get("token_ids") or []]
    assert streamed == server.post(PATH, body).json()["choices"][0]["token_ids"] == tokenizer.encode(text)


def test_reasoning_before_calls(says: Says) -> None:
    template = with_tools("<tool_call> <function= <think> </think>")
    body = {"messages": [HELLO], "chat_template": template, "tools": [WEATHER]}
    call = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    for text in (f"<think>why</think>\n\n{call}", f"<think>why{call}"):
        message = says(text).post(PATH, body).json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("why", None)
        assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}


def test_a_budget_and_a_structure_know_where_reasoning_ends(says: Says, tokenizer: Tokenizer) -> None:
    server = says("x")
    body = {"messages": [HELLO], "chat_template": THINKS}
    end, begin = (tuple(tokenizer.encode(mark)) for mark in ("</think>", "<think>"))

    def guide(**fields: Any) -> Any:
        assert server.post(PATH, {**body, **fields}).status_code == 200
        return server.engine.requests[-1].params.guide

    found = guide(thinking_token_budget=5)
    assert (found.grammar, found.max_reasoning_tokens) == (None, 5)
    marks = found.reasoning
    assert (marks.begin, marks.end, marks.begin_ids, marks.end_ids) == ("<think>", "</think>", begin, end)
    found = guide(chat_template=OPENED, response_format={"type": "json_object"})
    marks = found.reasoning
    assert (marks.begin, marks.end, marks.begin_ids, marks.end_ids) == ("", "</think>", (), end)
    assert found.grammar.syntax == "json_schema"
    closed = {"chat_template": SWITCHED, "reasoning_effort": "none"}
    assert guide(**closed, thinking_token_budget=5) is None
    assert guide(**closed, response_format={"type": "json_object"}).reasoning is None
    assert guide() is None
    coder = with_tools("<tool_call> <function= <think> </think>")
    found = guide(chat_template=coder, tools=[WEATHER], thinking_token_budget=5)
    assert found.reasoning.calls == ("<tool_call>\n<function=",)


def test_a_continued_answer_may_be_within_its_reasoning() -> None:
    def thinks(text: str) -> bool:
        messages = [HELLO, {"role": "assistant", "content": text}]
        form = TemplateEncoder(THINKS, {}).encode(messages, {"continue_final_message": True}).new_parser
        return form is not None and form.thinking is not None and form.thinking.opened

    assert [thinks(text) for text in ("<think>why", "<think>why</think>so", "so")] == [True, False, False]


def test_a_user_cannot_open_the_reasoning() -> None:
    messages = [{"role": "user", "content": "what is <think>"}]
    form = TemplateEncoder(THINKS, {}).encode(messages, {}).new_parser
    assert form is not None
    assert read_output(form(), ["so"]) == AssistantMessage("", "so")


@given(st.text("<think>/ \na", max_size=30), st.booleans())
def test_any_text_is_reasoning_or_content(text: str, opened: bool) -> None:
    form = TemplateEncoder(OPENED if opened else THINKS, {}).encode([HELLO], {}).new_parser
    assert form is not None
    read = read_output(form(), text)
    assert read.tool_calls == []
    lost = len(text) - len(read.reasoning) - len(read.content)
    assert lost in (0, 7, 8, 15) or text.lstrip().startswith("<think>")
