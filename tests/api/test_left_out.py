"""Images of earlier turns, hosted tools and what they left in a history end no session, in any of the three APIs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pypto_serving.api.chat.leaving_out import newest_words
from pypto_serving.api.text.tokenizer import Tokenizer
from tests.api.chat_events import prompt_of
from tests.api.checkpoint import write_checkpoint
from tests.api.running import CHAT, RunningServer
from tests.api.templates import HERMES

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
IGNORED = "x-ignored-fields"
Json = dict[str, Any]
Ask = Callable[..., Any]
HELLO: Json = {"role": "user", "content": "hello"}
ANSWER: Json = {"role": "assistant", "content": "yes"}
IMAGE = "[image left out: this model reads only text]"
PICTURES: dict[str, Json] = {
    CHAT: {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    MESSAGES: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    RESPONSES: {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
}
NAMES = {CHAT: "messages.image_url", MESSAGES: "messages.image", RESPONSES: "input.input_image"}
APIS = list(PICTURES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_checkpoint(tmp_path_factory.mktemp("hermes"), template=HERMES)


@pytest.fixture
def ask(start: Callable[..., RunningServer], folder: Any) -> Iterator[Ask]:
    server = start(folder, config={"max_model_len": 4096})

    def post(path: str, said: list[Json], **fields: Any) -> Any:
        body = {"input" if path == RESPONSES else "messages": said, **fields}
        return server.http.post(path, json=body | ({"max_tokens": 9} if path == MESSAGES else {}))

    post.server = server  # type: ignore[attr-defined]
    yield post


def text_of(ask: Any, tokenizer: Tokenizer) -> str:
    return prompt_of(ask.server, tokenizer)


def picture(path: str, text: str = "look") -> Json:
    words = {"type": "input_text" if path == RESPONSES else "text", "text": text}
    return {"role": "user", "content": [words, PICTURES[path]]}


def called(path: str, result: Any) -> list[Json]:
    """A call and its result."""
    if path == RESPONSES:
        call: Json = {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"}
        return [call, {"type": "function_call_output", "call_id": "c", "output": result}]
    if path == MESSAGES:
        use = {"type": "tool_use", "id": "c", "name": "view", "input": {}}
        back = {"type": "tool_result", "tool_use_id": "c", "content": result}
        return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [back]}]
    call = {"id": "c", "type": "function", "function": {"name": "view", "arguments": "{}"}}
    return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": result}]


@pytest.mark.parametrize("path", APIS)
def test_images_in_results_and_earlier_turns(ask: Ask, tokenizer: Tokenizer, path: str) -> None:
    text = {"type": "input_text" if path == RESPONSES else "text", "text": "seen"}
    for said, wanted in (
        ([HELLO, *called(path, [PICTURES[path]])], f"tool\n{IMAGE}<"),
        ([HELLO, *called(path, [text, PICTURES[path]])], f"tool\nseen\n{IMAGE}<"),
        ([picture(path), ANSWER, HELLO], f"user\nlook\n{IMAGE}<"),
        ([picture(path), ANSWER, HELLO, *called(path, "done")], f"user\nlook\n{IMAGE}<"),
        ([HELLO, *called(path, [PICTURES[path]]), HELLO], f"tool\n{IMAGE}<"),
        ([HELLO, *called(path, "done"), picture(path), ANSWER, HELLO], f"look\n{IMAGE}<"),
    ):
        answer = ask(path, said)
        assert answer.status_code == 200, answer.text
        assert answer.headers[IGNORED] == NAMES[path]
        assert wanted in text_of(ask, tokenizer)


@pytest.mark.parametrize("path", APIS)
def test_an_image_that_a_person_sends_is_refused_and_the_session_goes_on(ask: Ask, path: str) -> None:
    after_result = [*called(path, [PICTURES[path]]), picture(path)]
    later = {"role": "developer" if path == RESPONSES else "system", "content": "be brief"}
    for said in ([picture(path)], [HELLO, ANSWER, picture(path)], [HELLO, *after_result], [picture(path), later]):
        answer = ask(path, said)
        assert answer.status_code == 400 and PICTURES[path]["type"] in answer.json()["error"]["message"]
    assert ask(path, [picture(path), HELLO]).status_code == 200


@pytest.mark.parametrize(
    ("roles", "place"),
    [
        ("", -1),
        ("user", 0),
        ("user user", 1),
        ("user system", 0),
        ("user assistant user", 2),
        ("user assistant", -1),
        ("user assistant tool", -1),
        ("user assistant tool user", 3),
        ("user assistant tool user developer", 3),
        ("user assistant tool system", -1),
        ("user assistant tool assistant user", 4),
    ],
)
def test_newest_words(roles: str, place: int) -> None:
    assert newest_words(roles.split()) == place


def test_results_beside_a_document_and_words(ask: Ask, tokenizer: Tokenizer) -> None:
    """As Claude Code sends a PDF that it read, and a text that a person dropped in."""
    use, back = called(MESSAGES, "read")
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    back["content"].append(pdf)
    answer = ask(MESSAGES, [HELLO, use, back])
    assert answer.status_code == 200 and answer.headers[IGNORED] == "messages.document"
    assert "[document left out: this model reads only text]" in text_of(ask, tokenizer)
    back["content"].append(PICTURES[MESSAGES])
    answer = ask(MESSAGES, [HELLO, use, back])
    assert answer.status_code == 400 and "content[2] is a block of type 'image'" in answer.text
    plain = {
        "type": "document",
        "title": "notes",
        "source": {"type": "text", "media_type": "text/plain", "data": "abc"},
    }
    found = {
        "type": "search_result",
        "title": "page",
        "source": "http://x",
        "content": [{"type": "text", "text": "def"}],
    }
    answer = ask(MESSAGES, [{"role": "user", "content": [plain, found]}])
    assert answer.status_code == 200 and IGNORED not in answer.headers
    assert "notes\nabc\npage\nhttp://x\ndef<" in text_of(ask, tokenizer)


def test_images_in_documents_and_search_results(ask: Ask, tokenizer: Tokenizer) -> None:
    inner = [{"type": "text", "text": "abc"}, PICTURES[MESSAGES]]
    document = {"type": "document", "source": {"type": "content", "content": inner}}
    found = {"type": "search_result", "title": "page", "source": "http://x", "content": inner}
    for block in (document, found):
        said = {"role": "user", "content": [block]}
        answer = ask(MESSAGES, [said, ANSWER, HELLO])
        assert answer.status_code == 200 and answer.headers[IGNORED] == "messages.image"
        assert f"abc\n{IMAGE}<" in text_of(ask, tokenizer)
        answer = ask(MESSAGES, [said])
        assert answer.status_code == 400 and "content[1] is a block of type 'image'" in answer.text


def test_a_tool_that_was_searched_for_is_told(ask: Ask, tokenizer: Tokenizer) -> None:
    """As Claude Code's ToolSearch answers."""
    tool = {"name": "now", "input_schema": {"type": "object"}, "defer_loading": True}
    said = [HELLO, *called(MESSAGES, [{"type": "tool_reference", "tool_name": "now"}])]
    answer = ask(MESSAGES, said, tools=[tool, {"type": "tool_search_tool_regex_20251119", "name": "find"}])
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == "tools[0].defer_loading, tools.tool_search_tool_regex_20251119"
    assert "The tool now can be called now." in text_of(ask, tokenizer)


LEFT_BY_MESSAGES = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result", "url": "u"}]},
    {"type": "mcp_tool_use", "id": "m", "name": "n", "server_name": "s", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "m", "content": []},
    {"type": "bash_code_execution_tool_result", "tool_use_id": "b", "content": {}},
    {"type": "redacted_thinking", "data": "x"},
    {"type": "text", "text": "yes"},
]
LEFT_BY_RESPONSES: list[Json] = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "AAAA"},
    {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
    {"type": "mcp_approval_request", "id": "m", "server_label": "s", "name": "n", "arguments": "{}"},
    {"type": "local_shell_call_output", "id": "l", "output": "x"},
    {"type": "compaction", "encrypted_content": "x"},
    {"type": "tool_search_output", "tools": []},
]


def test_what_hosted_tools_left_behind_is_dropped_and_named(ask: Ask, tokenizer: Tokenizer) -> None:
    answer = ask(MESSAGES, [HELLO, {"role": "assistant", "content": LEFT_BY_MESSAGES}, HELLO])
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == ", ".join(f"messages.{block['type']}" for block in LEFT_BY_MESSAGES[:5])
    plain = text_of(ask, tokenizer)
    assert ask(MESSAGES, [HELLO, ANSWER, HELLO]).status_code == 200
    assert text_of(ask, tokenizer) == plain
    answer = ask(RESPONSES, [HELLO, *LEFT_BY_RESPONSES, ANSWER, HELLO])
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == ", ".join(f"input.{item['type']}" for item in LEFT_BY_RESPONSES)
    assert text_of(ask, tokenizer) == plain
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "yes"}]}
    assert ask(CHAT, [HELLO, refused, HELLO]).status_code == 200
    assert text_of(ask, tokenizer) == plain


OWN: dict[str, Json] = {
    CHAT: {"type": "function", "function": {"name": "now"}},
    MESSAGES: {"name": "now", "input_schema": {"type": "object"}},
    RESPONSES: {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(
    ("path", "hosted", "choices"),
    [
        (CHAT, "web_search", ["required", {"type": "web_search"}]),
        (CHAT, "code_interpreter", []),
        (RESPONSES, "web_search_preview_2025_03_11", ["required", {"type": "web_search_preview"}]),
        (
            RESPONSES,
            "web_search_2027_01_01",
            [{"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}],
        ),
        (MESSAGES, "web_search_20250305", [{"type": "any"}, {"type": "tool", "name": "web_search"}]),
        (MESSAGES, "bash_20250124", []),
        (COUNT, "web_fetch_20250910", [{"type": "any"}]),
    ],
)
def test_hosted_tools_are_left_out_alike(
    ask: Ask, tokenizer: Tokenizer, path: str, hosted: str, choices: list[Any]
) -> None:
    tool = {"type": hosted, "name": "web_search"} if path in (MESSAGES, COUNT) else {"type": hosted}
    for choice in (None, *choices):
        answer = ask(path, [HELLO], tools=[tool], tool_choice=choice)
        assert answer.status_code == 200, answer.text
        assert answer.headers[IGNORED] == f"tools.{hosted}"
    if path != COUNT:
        assert not any(request.params.guide for request in ask.server.engine.requests)  # type: ignore[attr-defined]
        answer = ask(path, [HELLO], tools=[OWN[path], tool])
        assert answer.status_code == 200 and '"now"' in text_of(ask, tokenizer)


def test_the_tokens_of_a_chat_with_hosted_tools_are_counted(ask: Ask) -> None:
    said = [HELLO, *called(CHAT, [PICTURES[CHAT]])]
    answer = ask("/tokenize", said, tools=[OWN[CHAT], {"type": "web_search"}])
    assert answer.status_code == 200 and answer.json()["count"] > 10
    assert answer.headers[IGNORED] == "tools.web_search, messages.image_url"
