"""Conversations that a template would refuse reach the model all the same, in all three APIs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pypto_serving.api.prompting.template import TemplateEncoder
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import RequestError
from tests.api.chat_events import join_events, prompt_of
from tests.api.checkpoint import CHATML, write_checkpoint
from tests.api.running import CHAT, RunningServer
from tests.api.scripted_engine import Script
from tests.api.templates import (
    FIREFUNCTION,
    GEMMA,
    GRANITE,
    HERMES,
    HOISTED,
    IN_TURNS,
    KIMI,
    LFM2,
    MACROS,
    NEMO,
    NO_SYSTEM,
    ONE_CALL,
    ONE_SYSTEM,
    PHI,
    PHI_4,
    with_tools,
)
from tests.api.tool_samples import NOW_TOOL, WEATHER_TOOL

Message = dict[str, Any]
Start = Callable[..., RunningServer]
CALLS = {"tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "now", "arguments": "{}"}}]}


def said(role: str, text: Any, **fields: Any) -> Message:
    return {"role": role, "content": text, **fields}


def turns(*texts: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in texts)


LEADING = [said("developer", "a"), said("developer", "b"), said("user", "c"), said("user", "d")]
LATER = [said("system", "a"), said("user", "b"), said("system", "c")]
AFTER_ANSWER = [said("user", "a"), said("assistant", "b"), said("system", "c"), said("system", "d"), said("user", "e")]
CALLED = [said("user", "a"), said("assistant", "b", **CALLS), said("tool", "c", tool_call_id="call00001", name="now")]
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
OTHER = {"id": "call00002", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
BOTH = [*CALLS["tool_calls"], OTHER]
RESULT_1, RESULT_2 = CALLED[2], said("tool", "d", tool_call_id="call00002", name="now")


@pytest.mark.parametrize(
    ("template", "messages", "wanted"),
    [
        (HERMES, LEADING, [("system", "a\n\nb"), ("user", "c"), ("user", "d")]),
        (HERMES, LATER, [("system", "a"), ("user", "b"), ("system", "c")]),
        (ONE_SYSTEM, LEADING, [("system", "a\n\nb"), ("user", "c"), ("user", "d")]),
        (ONE_SYSTEM, LATER, [("system", "a"), ("user", "b\n\nc")]),
        (ONE_SYSTEM, AFTER_ANSWER, [("user", "a"), ("assistant", "b"), ("user", "c\n\nd\n\ne")]),
        (GEMMA, [said("assistant", "a"), said("user", "b")], [("user", ""), ("assistant", "a"), ("user", "b")]),
        (
            NEMO,
            [said("system", "s"), *CALLED],
            [("user", "s\n\na"), ("assistant", "b[TOOL_CALLS]now{}"), ("tool", "c")],
        ),
        (NEMO, [said("system", "s"), said("user", "a")], [("user", "s\n\na")]),
        (
            ONE_CALL,
            [said("user", "a"), said("assistant", "b", tool_calls=BOTH), RESULT_2, RESULT_1, said("user", "e")],
            [
                *[("user", "a"), ("assistant", f"b{CALL}"), ("tool", "c")],
                *[("assistant", CALL.replace("{}", '{"a": 1}')), ("tool", "d"), ("user", "e")],
            ],
        ),
        (ONE_SYSTEM, AFTER_ANSWER[:-1], [("user", "a"), ("assistant", "b"), ("user", "c\n\nd")]),
        (ONE_SYSTEM, [*CALLED, said("system", "d")], [("user", "a"), ("assistant", f"b{CALL}"), ("tool", "c\n\nd")]),
        (
            ONE_SYSTEM,
            [*CALLED[:2], said("system", "d"), CALLED[2]],
            [("user", "a"), ("assistant", f"b{CALL}"), ("tool", "d\n\nc")],
        ),
        (NO_SYSTEM, LEADING, [("user", "a\n\nb\n\nc"), ("user", "d")]),
        (NO_SYSTEM, LATER, [("user", "a\n\nb\n\nc")]),
        (NO_SYSTEM, [said("system", "a"), said("assistant", "b")], [("user", "a"), ("assistant", "b")]),
        (IN_TURNS, LEADING, [("system", "a\n\nb"), ("user", "c\n\nd")]),
        (IN_TURNS, [*CALLED, said("user", "d")], [("user", "a"), ("assistant", f"b{CALL}"), ("tool", "c\n\nd")]),
        (
            IN_TURNS,
            [said("user", "a"), said("assistant", "b"), said("assistant", "c", **CALLS), *CALLED[2:]],
            [("user", "a"), ("assistant", f"b\n\nc{CALL}"), ("tool", "c")],
        ),
    ],
)
def test_what_a_template_gets(template: str, messages: list[Message], wanted: list[tuple[str, str]]) -> None:
    assert TemplateEncoder(template, {}).encode(messages, {"add_generation_prompt": False}).prompt == turns(*wanted)


def test_a_template_that_moves_system_messages_gets_one() -> None:
    options = {"add_generation_prompt": False}
    prompt = TemplateEncoder(HOISTED, {}).encode(LATER, options).prompt
    assert prompt == "a" + turns(("system", ""), ("user", "b\n\nc"))


def test_a_template_that_renders_nothing_is_left_alone() -> None:
    strange = "{{ messages[0].content[1] }}{{ 1 // (messages | length - 3) if messages | length < 4 }}"
    assert TemplateEncoder(strange, {}).encode([said("system", "ab"), *[said("user", "a")] * 4], {}).prompt == "b"


def test_special_tokens_are_known_when_a_template_is_tried() -> None:
    source = "{{ bos_token + '' }}" + ONE_SYSTEM
    prompt = TemplateEncoder(source, {"bos_token": "<s>"}).encode(LATER, {"add_generation_prompt": False}).prompt
    assert prompt == "<s>" + turns(("system", "a"), ("user", "b\n\nc"))


@pytest.fixture
def strict_server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = write_checkpoint(tmp_path_factory.mktemp("strict"), template=IN_TURNS)
    yield start(folder, config={"max_model_len": 4096})


def test_agents_speak_to_a_template_with_one_system_message(strict_server: RunningServer, tokenizer: Tokenizer) -> None:
    server, asks = strict_server, "<|im_start|>assistant\n"
    wanted = turns(("system", "a\n\nb"), ("user", "c\n\nd")) + asks
    item = [{"type": "message", **message} for message in LEADING]
    assert server.http.post("/v1/responses", json={"input": item}).status_code == 200
    assert prompt_of(server, tokenizer) == wanted
    assert server.post(CHAT, {"messages": LEADING}).status_code == 200
    assert prompt_of(server, tokenizer) == wanted
    body = {"max_tokens": 9, "system": "a", "messages": [said("user", "b"), said("system", "c")]}
    assert server.http.post("/v1/messages", json=body).status_code == 200
    assert prompt_of(server, tokenizer) == turns(("system", "a"), ("user", "b\n\nc")) + asks
    result = {"type": "tool_result", "tool_use_id": "x", "content": "r"}
    use = {"type": "tool_use", "id": "x", "name": "now", "input": {}}
    said_after = [said("user", "b"), said("assistant", [use]), said("user", [result]), said("system", "c")]
    body = {"max_tokens": 9, "messages": said_after}
    assert server.http.post("/v1/messages", json=body).status_code == 200
    assert prompt_of(server, tokenizer).endswith(turns(("tool", "r\n\nc")) + asks)


def test_a_system_message_alone_is_nothing_to_answer(strict_server: RunningServer) -> None:
    body = {"max_tokens": 9, "system": "a", "messages": [said("system", "b")]}
    answer = strict_server.http.post("/v1/messages", json=body)
    assert answer.status_code == 400 and "nothing to answer" in answer.json()["error"]["message"]


def test_a_template_of_the_request_is_tried_too(chat_server: RunningServer, tokenizer: Tokenizer) -> None:
    answer = chat_server.post(CHAT, {"messages": LATER, "chat_template": ONE_SYSTEM, "tools": [NOW_TOOL]})
    assert answer.status_code == 200
    assert prompt_of(chat_server, tokenizer).endswith("<|im_start|>user\nb\n\nc<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("template", [CHATML, HERMES, with_tools("[TOOL_CALLS]")])
def test_a_template_that_takes_all_gets_all(template: str) -> None:
    encoder = TemplateEncoder(template, {})
    prompt = encoder.encode([*CALLED, said("user", "d"), said("system", "e"), said("user", "f")], {}).prompt
    assert isinstance(prompt, str) and prompt.index("d<") < prompt.index("system\ne") < prompt.index("f<")


TEXT_ONLY = (
    "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
"""As that of DeepSeek's R1-0528: it joins arguments as text."""
NULL_ONLY = TEXT_ONLY.replace("{% if m.tool_calls %}", "{% if m.content is none %}")
"""As DeepSeek V3's: a null content is the sign of calls."""
MAPPING_ONLY = TEXT_ONLY.replace(
    "{{ c.function.name + ' ' + c.function.arguments }}",
    "{{ c.function.name }}{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}",
)
"""As Qwen3-Coder's."""
NULL_MAPPING = MAPPING_ONLY.replace("{% if m.tool_calls %}", "{% if m.content is none %}")


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (TEXT_ONLY, 'now {"zone": "é"}'),
        (NULL_ONLY, 'now {"zone": "é"}'),
        (MAPPING_ONLY, "now zone=é"),
        (NULL_MAPPING, "now zone=é"),
    ],
)
@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("arguments", ['{"zone": "é"}', {"zone": "é"}])
def test_calls_have_the_form_that_a_template_shows(
    start: Start, tmp_path: Path, tokenizer: Tokenizer, template: str, shown: str, content: Any, arguments: Any
) -> None:
    server = start(write_checkpoint(tmp_path, template=template), config={"max_model_len": 4096})
    calls = [{"id": "call00001", "type": "function", "function": {"name": "now", "arguments": arguments}}]
    messages = [said("user", "a"), said("assistant", content, tool_calls=calls), CALLED[2]]
    answer = server.http.post(CHAT, json={"messages": messages})
    assert answer.status_code == 200, answer.text
    assert prompt_of(server, tokenizer) == f"[user]a[assistant]{shown}[tool]c"


CUT = '{"zone": "é'


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (TEXT_ONLY, f"now {CUT}"),
        (NULL_ONLY, f"now {CUT}"),
        (MAPPING_ONLY, f"now arguments={CUT}"),
        (NULL_MAPPING, f"now arguments={CUT}"),
        (MAPPING_ONLY.replace("arguments | items", "arguments.items()"), f"now arguments={CUT}"),
        (TEXT_ONLY.replace("arguments }}", "arguments | tojson }}"), f"now {json.dumps(CUT, ensure_ascii=False)}"),
    ],
)
def test_a_conversation_goes_on_after_arguments_that_are_no_json(
    start: Start, tmp_path: Path, tokenizer: Tokenizer, template: str, shown: str
) -> None:
    folder = write_checkpoint(tmp_path, template=template + "{# <tool_call> #}")
    server = start(folder, config={"max_model_len": 4096})
    wanted = f"[user]a[assistant]{shown}[tool]c"
    function = {"name": "now", "arguments": CUT}
    called = said("assistant", None, tool_calls=[{"id": "call00001", "type": "function", "function": function}])
    chat = {"messages": [CALLED[0], called, CALLED[2]]}
    called = said("assistant", [{"type": "tool_use", "id": "x", "name": "now", "input": CUT}])
    result = said("user", [{"type": "tool_result", "tool_use_id": "x", "content": "c"}])
    output = {"type": "function_call_output", "call_id": "x", "output": "c"}
    items = [CALLED[0], {"type": "function_call", "call_id": "x", **function}, output]
    for path, body in (
        (CHAT, chat),
        ("/v1/messages", {"max_tokens": 9, "messages": [CALLED[0], called, result]}),
        ("/v1/responses", {"input": items}),
        ("/api/chat", {"model": "tiny", "stream": False, **chat}),
    ):
        answer = server.http.post(path, json=body)
        assert answer.status_code == 200, (path, answer.text)
        assert prompt_of(server, tokenizer) == wanted


def test_chats_with_tools_use_the_template_for_tools() -> None:
    encoder = TemplateEncoder(CHATML, {}, tool_source=HERMES)
    asked = [said("user", "a")]
    assert "tools" in encoder.abilities
    assert (
        encoder.encode(asked, {"tools": [NOW_TOOL]}).prompt
        == TemplateEncoder(HERMES, {}).encode(asked, {"tools": [NOW_TOOL]}).prompt
    )
    assert encoder.encode(asked, {}).prompt == TemplateEncoder(CHATML, {}).encode(asked, {}).prompt


@pytest.mark.parametrize(("template", "system"), [(GEMMA, False), (PHI, True)])
def test_tools_are_described_to_a_template_without_them(
    start: Start, tmp_path: Path, tokenizer: Tokenizer, template: str, system: bool
) -> None:
    server = start(write_checkpoint(tmp_path, template=template), config={"max_model_len": 4096})
    server.engine.script = lambda request: Script(tokenizer.encode(CALL), "stop")
    body = {"messages": [said("system", "s"), *CALLED, said("user", "d")], "tools": [NOW_TOOL]}
    answer = server.post(CHAT, body).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert (answer["finish_reason"], call["function"]) == ("tool_calls", {"name": "now", "arguments": "{}"})
    prompt = prompt_of(server, tokenizer)
    assert prompt.startswith("<|im_start|>system\ns\n\nYou may" if system else "<|im_start|>user\ns\n\nYou may")
    described = json.dumps(NOW_TOOL, ensure_ascii=False)
    assert f"<tools>\n{described}\n</tools>" in prompt and "between <tool_call> and </tool_call>:" in prompt
    result = "<tool_response>\nc\n</tool_response>"
    last = [("user", result), ("user", "d")] if system else [("user", f"{result}\n\nd")]
    assert prompt.endswith(turns(("assistant", f"b\n{CALL}"), *last))
    forced = server.post(CHAT, {**body, "tool_choice": "required"})
    assert forced.status_code == 200 and server.engine.requests[-1].params.guide is not None
    plain = server.post(CHAT, {"messages": body["messages"]})
    assert plain.json()["choices"][0]["message"]["content"] == CALL
    prompt = prompt_of(server, tokenizer)
    assert result in prompt and "You may" not in prompt


def test_a_template_without_tools_that_shows_calls_shows_them_itself() -> None:
    assert "<tool_call>" not in str(TemplateEncoder(TEXT_ONLY, {}).encode(CALLED, {}).prompt)


def test_calls_one_by_one_without_ids_or_with_results_of_others() -> None:
    nameless = [{key: value for key, value in call.items() if key != "id"} for call in BOTH]
    results = [said("tool", "c", name="now"), said("tool", "d", name="now"), said("tool", "z", tool_call_id="lost")]
    first, second = CALL, CALL.replace("{}", '{"a": 1}')
    for calls, given, order in (
        (nameless, results, "cdz"),
        (BOTH, [RESULT_2, results[2], RESULT_2, RESULT_1], "cddz"),
        (BOTH, [], ""),
    ):
        prompt = str(
            TemplateEncoder(ONE_CALL, {}).encode([said("assistant", "b", tool_calls=calls), *given], {}).prompt
        )
        tools = [("tool", text) for text in order.replace("z", "") + "z" * ("z" in order)]
        expected = turns(("assistant", f"b{first}"), *tools[:1], ("assistant", second), *tools[1:])
        assert prompt.startswith(expected), prompt


def test_calls_that_a_template_drops_are_not_written_in_another_form() -> None:
    """Values of the form are not in one line, so no text would teach the model what it writes."""
    encoder = TemplateEncoder(LFM2, {}, tool_parser="qwen3_coder")
    assert "<function=now>" not in str(encoder.encode(CALLED, {"tools": [NOW_TOOL]}).prompt)


def test_tools_in_words_are_in_one_form_only() -> None:
    with pytest.raises(RequestError, match="describes no tools, and the server does so only in the form hermes"):
        TemplateEncoder(GEMMA, {}, tool_parser="pythonic").encode([said("user", "a")], {"tools": [NOW_TOOL]})


LISTED = '[{"name": "now", "arguments": {"zone": "é", "deep": {"x": true}}}]'
WRITTEN: list[tuple[str, str, str]] = [
    (LFM2, "lfm2", "<|tool_call_start|>[now(zone=\"é\", deep={'x': True})]<|tool_call_end|>"),
    (GRANITE, "granite", f"<|tool_call|>{LISTED}"),
    (FIREFUNCTION, "functools", f"functools{LISTED}"),
    (PHI_4, "functools", f"functools{LISTED}"),
    (
        KIMI,
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>"
        '{"zone": "é", "deep": {"x": true}}<|tool_call_end|><|tool_calls_section_end|>',
    ),
]


@pytest.mark.parametrize(("template", "family", "written"), WRITTEN)
def test_official_templates_have_tools_calls_and_results(
    start: Start, tmp_path: Path, tokenizer: Tokenizer, template: str, family: str, written: str
) -> None:
    """The prompt shows all of them, and what the model writes so is a call, in a stream too."""
    encoder = TemplateEncoder(template, {})
    assert encoder.abilities == ("tools",)
    server = start(write_checkpoint(tmp_path, template=template), config={"max_model_len": 4096})
    server.engine.script = lambda request: Script(tokenizer.encode(written), "stop")
    arguments = {"zone": "é", "deep": {"x": True}}
    calls = [{"id": "call00001", "type": "function", "function": {"name": "now", "arguments": json.dumps(arguments)}}]
    asked = [said("system", "s"), said("developer", "t"), said("user", [{"type": "text", "text": "a"}])]
    history = [*asked, said("assistant", None, tool_calls=calls), CALLED[2]]
    body = {"messages": history, "tools": [NOW_TOOL, WEATHER_TOOL]}
    answer = server.post(CHAT, body).json()["choices"][0]
    prompt = prompt_of(server, tokenizer)
    for text in ("s\n\nt", "get_weather", "<|im_start|>user\na", written, "<|im_start|>tool\n", "c"):
        assert text in prompt, text
    (call,) = answer["message"]["tool_calls"]
    assert (answer["message"]["content"], call["function"]["name"]) == (None, "now")
    assert json.loads(call["function"]["arguments"]) == arguments
    streamed = join_events(server.events(CHAT, body))
    assert [one["function"] for one in streamed["calls"]] == [call["function"]]
    forced = server.post(CHAT, {**body, "tool_choice": "required"})
    assert forced.status_code == 200 and server.engine.requests[-1].params.guide is not None
    assert server.post(CHAT, {"messages": history}).status_code == 200


def test_tools_are_described_to_a_template_that_fails_with_them() -> None:
    prompt = TemplateEncoder(MACROS, {}).encode([said("user", "a")], {"tools": [NOW_TOOL]}).prompt
    assert "<tools>" in str(prompt) and "now" in str(prompt)


def test_a_template_that_refuses_developers_gets_a_system_message() -> None:
    template = (
        "{% for m in messages %}{% if m.role not in ('system', 'user') %}{{ raise_exception('bad role') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}{# the developer's tools #}"
    )
    assert TemplateEncoder(template, {}).encode(LEADING[1:3], {}).prompt == "[system]b[user]c"
