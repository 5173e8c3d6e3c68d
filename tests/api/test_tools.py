"""Tools over real HTTP, in every family's form: the prompt, the answer, the stream, and what forces calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pypto_serving.api.chat.parsers.families import choose_family
from pypto_serving.api.chat.tools import read_tool_use
from pypto_serving.api.grammars.structured import with_chat_guide
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.prompting.template import TemplateEncoder
from pypto_serving.api.settings import serving_config
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.cli.serve import with_chat
from pypto_serving.errors import RequestError
from pypto_serving.setup.options import make_options
from pypto_serving.setup.prepare import model_spec, prepare
from pypto_serving.types.sampling import SamplingParams
from tests.api.chat_events import PATH, calls_of, join_events, prompt_of
from tests.api.checkpoint import write_checkpoint
from tests.api.running import RunningServer
from tests.api.scripted_engine import Script
from tests.api.templates import HERMES, with_tools
from tests.api.tool_samples import CODER, HELLO, HERMES_NOW, V3, V31
from tests.api.tool_samples import NOW_TOOL as NOW
from tests.api.tool_samples import WEATHER_TOOL as WEATHER
from tests.simulation import null_config

ARGUMENTS = '{"city": "Paris é", "days": 3}'
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
HERMES_TEXT = f"I look.\n<tool_call>\n{CALL}\n</tool_call>\n{HERMES_NOW}\n"

LISTED = f'[{CALL}, {{"name": "now", "arguments": {{}}}}]'
PARAMETERS = CALL.replace("arguments", "parameters")
NOW_PARAMETERS = '{"name": "now", "parameters": {}}'
CODER_TEXT = f"I look.\n{CODER}\n<tool_call><function=now></function>"
NAMED_TEXT = f"I look.[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}"
PYTHON = '[get_weather(city="Paris é", days=3), now()]'

FAMILIES: list[tuple[str, str, str, str | None]] = [
    ("hermes", HERMES, HERMES_TEXT, "I look."),
    ("qwen3_coder", with_tools("<tool_call> <function=f>"), CODER_TEXT, "I look."),
    ("llama3_json", with_tools("<|python_tag|>"), f"{PARAMETERS}; {NOW_PARAMETERS}", None),
    ("llama3_json", with_tools('<|start_header_id|> "parameters"'), f"<|python_tag|>{CALL};{NOW_PARAMETERS}", None),
    ("pythonic", with_tools("[func_name1(params_name1=params_value1)]"), PYTHON, None),
    ("mistral", with_tools("[TOOL_CALLS]"), f"[TOOL_CALLS]{LISTED}", None),
    ("mistral_named", with_tools("[TOOL_CALLS] [ARGS]"), NAMED_TEXT, "I look."),
    ("deepseek_v3", with_tools("<｜tool▁calls▁begin｜> ```json"), V3, None),
    ("deepseek_v31", with_tools("<｜tool▁calls▁begin｜>"), V31, None),
    ("json", with_tools("anything"), LISTED, None),
]  # fmt: skip


def request(template: str = HERMES, **fields: Any) -> dict[str, Any]:
    return {"messages": [HELLO], "tools": [WEATHER, NOW], "chat_template": template, **fields}


@pytest.mark.parametrize(("family", "template", "text", "content"), FAMILIES)
def test_calls_of_every_family(
    says: Callable[..., RunningServer], family: str, template: str, text: str, content: str | None
) -> None:
    server = says(text)
    assert choose_family(template, True)[0] == family
    (choice,) = server.post(PATH, request(template)).json()["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == (content, "tool_calls")
    calls = calls_of(message["tool_calls"])
    assert [name for name, _ in calls] == ["get_weather", "now"]
    assert calls[0][1]["city"].startswith("Paris")
    form = r"[0-9a-zA-Z]{9}" if "mistral" in family else r"call_[0-9a-f]{32}"
    assert all(re.fullmatch(form, call["id"]) for call in message["tool_calls"])
    for seed in range(4):
        server.engine.seed = seed
        streamed = join_events(server.events(PATH, request(template)))
        assert calls_of(streamed["calls"]) == calls
        assert (streamed["content"] or None, streamed["finish_reason"]) == (content, "tool_calls")


def test_arguments_stream(says: Callable[..., RunningServer]) -> None:
    arguments = json.dumps({"city": "Paris " * 300})
    server = says(f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>')
    server.engine.largest_portion = 1
    try:
        events = server.events(PATH, request())
    finally:
        server.engine.largest_portion = 1000
    deltas = [call for e in events for call in e["choices"][0]["delta"].get("tool_calls", [])]
    first = [delta["function"]["arguments"] for delta in deltas if delta["index"] == 0]
    assert first[0] == ""
    assert len(first) > 5
    assert "".join(first) == arguments


def test_the_official_client_streams_calls(says: Callable[..., RunningServer]) -> None:
    client = says(HERMES_TEXT).openai()
    extra = {"chat_template": HERMES}
    with client.chat.completions.stream(model="tiny", messages=[HELLO], tools=[WEATHER], extra_body=extra) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in events
    assert message.tool_calls is not None
    assert [call.function.name for call in message.tool_calls] == ["get_weather", "now"]
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris é", "days": 3}


def test_tools_reach_the_prompt_without_what_is_for_the_server(
    says: Callable[..., RunningServer], tokenizer: Tokenizer
) -> None:
    server = says("x")
    server.post(PATH, request(tools=[{**NOW, "function": {**NOW["function"], "strict": False}}]))  # type: ignore[dict-item]
    assert prompt_of(server, tokenizer).startswith('<tools>{"type": "function", "function": {"name": "now"}}</tools>')


def test_calls_and_results_in_the_history(says: Callable[..., RunningServer], tokenizer: Tokenizer) -> None:
    server = says("x")
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "function_call": None, "reasoning": "why"}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]}
    server.post(PATH, request(messages=[HELLO, answer, result, {"role": "assistant", "tool_calls": []}]))
    prompt = prompt_of(server, tokenizer)
    assert f"<|im_start|>assistant\n<think>why</think><tool_call>\n{CALL}\n</tool_call><|im_end|>" in prompt
    assert prompt.endswith(
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
    )
    call["function"]["arguments"] = "{cut"  # type: ignore[index]
    assert server.post(PATH, request(messages=[HELLO, answer, result])).status_code == 200
    assert '"arguments": "{cut"' in prompt_of(server, tokenizer)


def test_no_calls_are_read_if_none_may_be_made(says: Callable[..., RunningServer], tokenizer: Tokenizer) -> None:
    server = says(HERMES_TEXT)
    (choice,) = server.post(PATH, request(tool_choice="none")).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (HERMES_TEXT, "stop")
    assert "<tools>" not in prompt_of(server, tokenizer)
    assert server.engine.requests[-1].params.guide is None


@pytest.mark.parametrize("stream", [False, True])
def test_calls_after_the_first_are_dropped_if_parallel_ones_are_off(
    says: Callable[..., RunningServer], stream: bool
) -> None:
    server, body = says(HERMES_TEXT), request(parallel_tool_calls=False)
    if stream:
        calls = join_events(server.events(PATH, body))["calls"]
    else:
        calls = server.post(PATH, body).json()["choices"][0]["message"]["tool_calls"]
    assert [name for name, _ in calls_of(calls)] == ["get_weather"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut(says: Callable[..., RunningServer], stream: bool) -> None:
    """It is content, unless it is so long that it was sent already."""
    cut = HERMES_TEXT[: HERMES_TEXT.index(" é")]
    for text, content, arguments in ((cut, cut, []), (cut + "x" * 2000, "I look.", ['{"city": "Paris' + "x" * 2000])):
        for reason in ("length", "stop"):
            server = says(text, reason)
            if stream:
                message = join_events(server.events(PATH, request()))
                calls, ended, said = message["calls"], message["finish_reason"], message["content"]
            else:
                choice = server.post(PATH, request()).json()["choices"][0]
                calls, ended = choice["message"].get("tool_calls", []), choice["finish_reason"]
                said = choice["message"]["content"]
            assert (ended, said or "") == (reason, content)
            assert [call["function"]["arguments"] for call in calls] == arguments


NAMED = {"type": "function", "function": {"name": "now"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
FORCED: list[tuple[dict[str, Any], list[str], bool]] = [
    ({"tool_choice": "required"}, ["get_weather", "now"], True),
    ({"tool_choice": "required", "parallel_tool_calls": False}, ["get_weather", "now"], False),
    ({"tool_choice": NAMED}, ["now"], False),
    ({"tool_choice": ALLOWED}, ["now"], True),
    ({"tool_choice": ALLOWED, "parallel_tool_calls": False}, ["now"], False),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, ["get_weather", "now"], True),
]


@pytest.mark.parametrize(("fields", "names", "several"), FORCED)
def test_forced_calls_have_a_grammar(
    says: Callable[..., RunningServer], fields: dict[str, Any], names: list[str], several: bool
) -> None:
    server = says(HERMES_TEXT)
    assert server.post(PATH, request(**fields)).status_code == 200
    guide = server.engine.requests[-1].params.guide
    assert guide is not None
    assert guide.grammar is not None
    start = guide.grammar.text.splitlines()[0]
    assert list(dict.fromkeys(re.findall(r'\\"name\\": \\"(\w+)', start))) == names
    assert (")*" in start) is several


def test_tools_that_are_not_allowed_are_not_shown(says: Callable[..., RunningServer], tokenizer: Tokenizer) -> None:
    server = says("x")
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    server.post(PATH, request(tool_choice=allowed))
    assert "get_weather" not in prompt_of(server, tokenizer)
    assert server.engine.requests[-1].params.guide is None


def test_strict_functions_and_formats_beside_tools(says: Callable[..., RunningServer]) -> None:
    server = says("x")
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    server.post(PATH, request(tools=[strict, NOW]))
    guide = server.engine.requests[-1].params.guide
    assert guide is not None
    assert guide.grammar is not None
    assert '[lazy]: TEXT "<tool_call>"' in guide.grammar.text
    server.post(PATH, request(response_format={"type": "json_object"}))
    guide = server.engine.requests[-1].params.guide
    assert guide is not None
    assert guide.grammar is not None
    assert re.match(r"start: %json .* \| ", guide.grammar.text)
    server.post(PATH, request(guided_json={"type": "object"}, guided_whitespace_pattern=" *"))
    guide = server.engine.requests[-1].params.guide
    assert guide is not None
    assert guide.grammar is not None
    spaces = re.findall(r'"whitespace_pattern": "([^"]*)"', guide.grammar.text)
    assert len(spaces) > 1
    assert set(spaces) == {" *"}, "calls and contents have the same white space: the grammar could not follow both"


def test_what_cannot_be_enforced_is_refused(says: Callable[..., RunningServer]) -> None:
    server = says("x")
    bad = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"not": {}}}}}}
    error = server.post(PATH, request(tools=[bad], tool_choice="required")).json()["error"]
    assert error["param"] == "tools"
    assert "the parameters of f: #/properties/x/not cannot be enforced" in error["message"]
    error = server.post(PATH, request(tool_choice="required", guided_regex="a")).json()["error"]
    assert "cannot stand beside a choice of tools" in error["message"]


def test_structures_that_leave_no_room_for_calls_are_refused(says: Callable[..., RunningServer]) -> None:
    server = says("x")
    for structure in (
        {"guided_regex": "a"},
        {"guided_choice": ["a"]},
        {"structured_outputs": {"grammar": 'start: "a"'}},
    ):
        error = server.post(PATH, request(**structure)).json()["error"]
        assert error["param"] in structure and "leaves no room for calls" in error["message"]
        assert server.post(PATH, request(**structure, tool_choice="none")).status_code == 200
    tag = {"structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}], "triggers": ["<a>"]}
    assert server.post(PATH, request(structured_outputs={"structural_tag": tag})).status_code == 200
    strict = {"type": "function", "function": {**NOW["function"], "strict": True}}  # type: ignore[dict-item]
    error = server.post(PATH, request(structured_outputs={"structural_tag": tag}, tools=[strict])).json()["error"]
    assert "in place of strict of now" in error["message"]


@pytest.mark.parametrize("template", [template for _, template, _, _ in FAMILIES])
def test_strict_functions_are_enforced_in_every_form(says: Callable[..., RunningServer], template: str) -> None:
    server = says("x")
    strict = {"type": "function", "function": {**NOW["function"], "strict": True}}  # type: ignore[dict-item]
    assert server.post(PATH, request(template, tools=[strict])).status_code == 200
    guide = server.engine.requests[-1].params.guide
    assert guide is not None and guide.grammar is not None


def test_strict_functions_without_a_known_form_are_refused() -> None:
    tools = read_tool_use([{"type": "function", "function": {"name": "now", "strict": True}}], None, None)
    with pytest.raises(RequestError, match="now is strict, but the form"):
        with_chat_guide(SamplingParams(), Prompter(null_config(), None, TemplateEncoder(HERMES, {})), None, tools)


def test_a_grammar_of_calls_is_bounded(says: Callable[..., RunningServer]) -> None:
    """Definitions that refer to themselves are followed once."""
    refers = {"anyOf": [{"$ref": "#/$defs/A"}] * 60}
    schema = {"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": refers}}
    cyclic = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert says("x").post(PATH, request(tools=[cyclic])).status_code == 200
    names = [f"p{i}" for i in range(400)]
    many = {name: {"$ref": "#/$defs/B"} for name in names}
    schema = {"properties": many, "$defs": {"A": {}, "B": {"enum": list(range(500))}}}
    large = {"type": "function", "function": {"name": "f", "parameters": schema}}
    coder = "{# <tool_call> <function= #}{% for t in tools %}{{ t.function.name }}{% endfor %}"
    error = says("x").post(PATH, request(coder, tools=[large], tool_choice="required")).json()["error"]
    assert (error["param"], "the grammar has more than 262144 characters" in error["message"]) == ("tools", True)


def test_template_of_the_request(says: Callable[..., RunningServer], tokenizer: Tokenizer) -> None:
    server = says("x")
    template = "{{ documents | tojson }}{{ messages[0].content }}"
    server.post(PATH, {"messages": [HELLO], "chat_template": template, "documents": [{"text": "d"}]})
    assert prompt_of(server, tokenizer) == '[{"text": "d"}]hello'
    error = server.post(PATH, {"messages": [HELLO], "chat_template": "{% if %}"}).json()["error"]
    assert (error["param"], "not valid Jinja" in error["message"]) == ("chat_template", True)


SHOWN = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
CONTINUED = [
    (SHOWN, "so ", "[hello][so "),
    ("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", "so ", "[hello][so"),
    (SHOWN + "{% if add_generation_prompt %}A{% endif %}", "so", "[hello][so"),
]


@pytest.mark.parametrize(("template", "text", "prompt"), CONTINUED)
def test_a_message_is_continued(template: str, text: str, prompt: str) -> None:
    messages = [HELLO, {"role": "assistant", "content": text}]
    assert TemplateEncoder(template, {}).encode(messages, {"continue_final_message": True}).prompt == prompt


def test_parsers_are_chosen_and_named_at_start(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(HERMES)

    def settings(**options: Any) -> dict[str, tuple[Any, str]]:
        given = make_options({"backend": "null", **options})
        resolved = prepare(given, model_spec(given))
        serving = replace(serving_config(resolved.server, model_spec(given)), model_dir=str(checkpoint))
        return {s.name: (s.value, s.reason) for s in with_chat(resolved, serving).settings}

    chosen = settings(chat_template=str(tmp_path / "t.jinja"))
    assert chosen["tool-call-parser"] == ("hermes", 'the chat template has <tool_call> and "name" and arguments')
    assert chosen["reasoning-parser"] == ("qwen3", "the chat template has </think>")
    given = settings(tool_call_parser="mistral", reasoning_parser="none")
    assert given["tool-call-parser"] == ("mistral", "given by --tool-call-parser")
    assert given["reasoning-parser"] == ("none", "given by --reasoning-parser")


def test_developers_speak_as_the_system_where_a_template_does_not_know_them() -> None:
    messages = [{"role": "developer", "content": "x"}]
    source = "{% for m in messages %}{{ m.role }}{% endfor %}"
    assert TemplateEncoder(source, {}).encode(messages, {}).prompt == "system"
    assert TemplateEncoder(source + "{# developer #}", {}).encode(messages, {}).prompt == "developer"


@pytest.mark.parametrize(("special", "shown"), [("<tool_call>", True), ("<think>", False)])
def test_special_tokens_that_are_marks_stay_in_the_text(special: str, shown: bool) -> None:
    """Only the marks of what is read: without a reasoning parser its marks are none."""
    encoder = TemplateEncoder(HERMES, {}, special.__eq__, reasoning_parser="none")
    form = encoder.encode([HELLO], {"tools": [NOW]}).new_parser
    assert form is not None
    assert form.shows_special is shown
    assert encoder.encode([HELLO], {}).new_parser is None


def test_requests_may_bring_the_only_template(start: Callable[..., RunningServer], tmp_path: Path) -> None:
    server = start(write_checkpoint(tmp_path, template=None), trust_request_chat_template=True)
    error = server.post(PATH, {"messages": [HELLO]}).json()["error"]
    assert (error["param"], "has none of its own" in error["message"]) == ("chat_template", True)
    body = {"messages": [HELLO], "chat_template": "{{ messages[0].content }}"}
    assert server.post(PATH, body).status_code == 200


def test_the_format_of_calls_may_be_turned_off(start: Callable[..., RunningServer], tokenizer: Tokenizer) -> None:
    server = start(trust_request_chat_template=True, tool_call_parser="none", config={"max_model_len": 4096})
    server.engine.script = lambda request: Script(tokenizer.encode(HERMES_TEXT), "stop")
    assert server.post(PATH, request()).json()["choices"][0]["message"]["content"] == HERMES_TEXT
    error = server.post(PATH, request(tool_choice="required")).json()["error"]
    assert (error["param"], "is not known" in error["message"]) == ("tool_choice", True)
