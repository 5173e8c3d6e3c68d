"""DeepSeek V4's prompts, to the character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.api.chat.deepseek_v4 import (
    FIRST_EFFORTS,
    LATER_EFFORTS,
    DeepseekV4Encoder,
    Mode,
    load,
    read_mode,
    read_turns,
    write_turns,
)
from pypto_serving.api.chat.parsers.scanner import read_output
from pypto_serving.api.prompting.prompts import ENCODER_OF_ARCHITECTURE, ENCODERS
from pypto_serving.api.settings import load_serving_config
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import ConfigError, ModelError, RequestError
from tests.api.checkpoint import write_checkpoint, write_deepseek_v4

B, E, U, A, R = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
)
Message = dict[str, Any]


def system(text: str, **more: Any) -> Message:
    return {"role": "system", "content": text, **more}


def user(text: str, **more: Any) -> Message:
    return {"role": "user", "content": text, **more}


def developer(text: str, **more: Any) -> Message:
    return {"role": "developer", "content": text, **more}


def reminder(text: str) -> Message:
    return {"role": "latest_reminder", "content": text}


def assistant(text: str | None, reasoning: Any = None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, "reasoning_content": reasoning, **more}


def tool(text: str, call_id: str = "") -> Message:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def call(name: str, arguments: Any, call_id: Any = "") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def prompt(*messages: Message, efforts: dict[str, str] = FIRST_EFFORTS, **kwargs: Any) -> str:
    text = DeepseekV4Encoder(efforts).encode(messages, kwargs).prompt
    assert isinstance(text, str)
    return text


def chat(*messages: Message, **kwargs: Any) -> str:
    return prompt(*messages, thinking=False, **kwargs)


def history(*messages: Message, thinking: bool = True, drop: bool = True) -> str:
    """A conversation that may end with an answer, without BOS."""
    return write_turns(read_turns(messages), Mode(thinking, drop))


Q, R1 = user("Why?"), assistant("So.", "Hm.")


def test_the_last_word_opens_an_answer() -> None:
    assert prompt(user("Hi")) == f"{B}{U}Hi{A}<think>"
    assert chat(user("Hi")) == f"{B}{U}Hi{A}</think>"
    assert prompt(system("Be kind."), user("Hi")) == f"{B}Be kind.{U}Hi{A}<think>"
    assert chat(developer("Hi")) == f"{B}{U}Hi{A}</think>"
    assert prompt(user("Hi"), add_generation_prompt=False) == f"{B}{U}Hi"


def test_a_conversation_that_ends_with_instructions_opens_an_answer_too() -> None:
    assert prompt(user("Hi"), system("Be brief.")) == f"{B}{U}HiBe brief.{A}<think>"
    assert chat(system("Greet.")) == f"{B}Greet.{A}</think>"
    assert chat(system("Greet."), reminder("Noon.")) == f"{B}Greet.{R}Noon.{A}</think>"


def test_reminders() -> None:
    assert chat(system("S"), reminder("Noon."), user("Hi")) == f"{B}S{R}Noon.{U}Hi{A}</think>"
    assert chat(user("Hi"), reminder("Noon.")) == f"{B}{U}Hi{A}</think>{R}Noon."


def test_turns_in_chat_mode_have_no_reasoning() -> None:
    expected = f"{B}{U}Why?{A}</think>So.{E}{U}Why?{A}</think>"
    assert chat(Q, R1, Q) == expected
    assert chat(Q, R1, Q, drop_thinking=False) == expected


def test_reasoning_of_earlier_turns_is_dropped() -> None:
    assert prompt(Q, R1, Q) == f"{B}{U}Why?{A}</think>So.{E}{U}Why?{A}<think>"
    assert history(Q, R1, Q, R1) == f"{U}Why?{A}</think>So.{E}{U}Why?{A}<think>Hm.</think>So.{E}"


def test_reasoning_is_kept_on_demand() -> None:
    expected = f"{B}{U}Why?{A}<think>Hm.</think>So.{E}{U}Why?{A}<think>"
    assert prompt(Q, R1, Q, drop_thinking=False) == expected
    assert prompt(Q, {"role": "assistant", "content": "So.", "reasoning": "Hm."}, Q, drop_thinking=False) == expected


def test_developers_before_the_last_question_go_with_the_reasoning() -> None:
    said = (developer("D"), assistant("Yes.", "Hm."), user("Hi"))
    assert prompt(*said) == f"{B}Yes.{E}{U}Hi{A}<think>"
    assert prompt(*said, drop_thinking=False) == f"{B}{U}D{A}<think>Hm.</think>Yes.{E}{U}Hi{A}<think>"
    assert chat(*said) == f"{B}{U}D{A}</think>Yes.{E}{U}Hi{A}</think>"


def test_words_in_a_row_are_one_turn() -> None:
    assert chat(user("a"), user("b")) == f"{B}{U}a\n\nb{A}</think>"
    assert chat(user("a"), system("S"), user("b")) == f"{B}{U}aS{U}b{A}</think>"


FIRST_MAX = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"  # noqa: E501
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"  # noqa: E501
)
LATER_MAX = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any surface symptom.\n"  # noqa: E501
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n"  # noqa: E501
)
EFFORT_TEXTS = [
    (None, "", FIRST_MAX),
    ("minimal", "", ""),
    ("low", "", ""),
    ("medium", "", FIRST_MAX),
    ("high", "", FIRST_MAX),
    ("xhigh", "", FIRST_MAX),
    ("max", FIRST_MAX, LATER_MAX),
]


@pytest.mark.parametrize(("effort", "first", "later"), EFFORT_TEXTS)
def test_effort_stands_before_everything(effort: str | None, first: str, later: str) -> None:
    said = (system("S"), user("Hi"))
    rest = f"S{U}Hi{A}<think>"
    assert prompt(*said, reasoning_effort=effort) == f"{B}{first}{rest}"
    assert prompt(*said, reasoning_effort=effort, efforts=LATER_EFFORTS) == f"{B}{later}{rest}"
    assert chat(*said, reasoning_effort=effort, efforts=LATER_EFFORTS) == f"{B}S{U}Hi{A}</think>"


MODES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"thinking": True}, True),
    ({"thinking": False}, False),
    ({"thinking": None, "enable_thinking": None}, True),
    ({"enable_thinking": False}, False),
    ({"thinking": {"type": "disabled"}}, False),
    ({"thinking": {"type": "enabled"}}, True),
    ({"thinking": False, "enable_thinking": False}, False),
    ({"reasoning_effort": "none"}, False),
    ({"reasoning_effort": "none", "enable_thinking": True}, True),
    ({"reasoning_effort": "max", "thinking": False}, False),
]


@pytest.mark.parametrize(("options", "thinking"), MODES)
def test_what_is_said_of_thinking_wins(options: dict[str, Any], thinking: bool) -> None:
    assert read_mode(options).thinking is thinking


WEATHER = {
    "name": "get_weather",
    "description": "Wetter für eine Stadt",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]
TOOLS_BLOCK = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{"name": "get_weather", "description": "Wetter für eine Stadt", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
{"name": "now"}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""  # noqa: E501


def test_tools_stand_behind_the_leading_instructions() -> None:
    block = f"\n\n{TOOLS_BLOCK}"
    assert prompt(system("S"), user("Hi"), tools=TOOLS) == f"{B}S{block}{U}Hi{A}<think>"
    assert prompt(system("S", tools=TOOLS), user("Hi")) == f"{B}S{block}{U}Hi{A}<think>"
    assert prompt(system("S", tools=TOOLS[:1]), user("Hi"), tools=TOOLS) == f"{B}S{block}{U}Hi{A}<think>"
    assert prompt(user("Hi"), tools=TOOLS) == f"{B}{block}{U}Hi{A}<think>"
    assert prompt(developer("D"), tools=TOOLS) == f"{B}{U}D{block}{A}<think>"
    assert chat(user("Hi"), tools=[]) == f"{B}{U}Hi{A}</think>"


def test_tools_keep_all_reasoning_and_every_developer() -> None:
    start = f"{B}\n\n{TOOLS_BLOCK}"
    assert prompt(Q, R1, Q, tools=TOOLS) == f"{start}{U}Why?{A}<think>Hm.</think>So.{E}{U}Why?{A}<think>"
    kept = prompt(developer("D"), user("Hi"), tools=TOOLS)
    assert kept == f"{B}{U}D\n\n{TOOLS_BLOCK}{U}Hi{A}<think>"


SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
SCHEMA_BLOCK = (
    "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
    '{"type": "object", "properties": {"é": {"type": "integer"}}}'
)


def test_the_format_of_answers() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    assert chat(user("Hi"), response_format=wanted) == f"{B}{SCHEMA_BLOCK}{U}Hi{A}</think>"
    assert chat(system("S", response_format=SCHEMA), user("Hi")) == f"{B}S{SCHEMA_BLOCK}{U}Hi{A}</think>"
    both = prompt(system("S"), user("Hi"), tools=TOOLS, response_format=wanted)
    assert both == f"{B}S\n\n{TOOLS_BLOCK}{SCHEMA_BLOCK}{U}Hi{A}<think>"
    assert chat(user("Hi"), response_format={"type": "text"}) == f"{B}{U}Hi{A}</think>"
    assert chat(user("Hi"), response_format={"type": "json_object"}) == f"{B}{U}Hi{A}</think>"


CALLS_TEXT = (
    "\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">München "M"</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">[1, {"a": null}]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n'
    "</｜DSML｜tool_calls>"
)
ARGUMENTS = '{"city": "M\\u00fcnchen \\"M\\"", "days": [1, {"a": null}]}'
CALLING = assistant(None, "Look.", tool_calls=[call("get_weather", ARGUMENTS, "1"), call("now", "", "2")])


def test_calls_and_their_results() -> None:
    said = (user("Wie?"), CALLING, tool("rain", "1"), tool("noon", "2"))
    results = "<tool_result>rain</tool_result>\n\n<tool_result>noon</tool_result>"
    dropped = f"{B}{U}Wie?{A}</think>{CALLS_TEXT}{E}{U}{results}{A}<think>"
    assert prompt(*said) == dropped
    kept = f"{B}\n\n{TOOLS_BLOCK}{U}Wie?{A}<think>Look.</think>{CALLS_TEXT}{E}{U}{results}{A}<think>"
    assert prompt(*said, tools=TOOLS) == kept
    assert chat(*said) == f"{B}{U}Wie?{A}</think>{CALLS_TEXT}{E}{U}{results}{A}</think>"


def test_results_stand_in_the_order_of_their_calls() -> None:
    said = (user("Wie?"), CALLING, tool("noon", "2"), user("And?"), tool("rain", "1"), user("Go."))
    words = "<tool_result>rain</tool_result>\n\nAnd?\n\n<tool_result>noon</tool_result>\n\nGo."
    assert prompt(*said).endswith(f"{E}{U}{words}{A}<think>")
    unnamed = (user("Wie?"), CALLING, tool("rain"), tool("noon"))
    in_order = "<tool_result>rain</tool_result>\n\n<tool_result>noon</tool_result>"
    assert prompt(*unnamed).endswith(f"{in_order}{A}<think>")
    later = assistant("", tool_calls=[call("now", "", "3")])
    late = (*said[:3], later, tool("c", "3"), tool("a", "1"))
    assert chat(*late).endswith("<tool_result>a</tool_result>\n\n<tool_result>c</tool_result>" + f"{A}</think>")
    again = (*said, assistant("Hm."), tool("b", "2"), tool("a", "1"))
    assert chat(*again).endswith("<tool_result>a</tool_result>\n\n<tool_result>b</tool_result>" + f"{A}</think>")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"a": 1}, '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>'),
        ('{"a": true}', '<｜DSML｜parameter name="a" string="false">true</｜DSML｜parameter>'),
        ('{"a": tr', '<｜DSML｜parameter name="arguments" string="true">{"a": tr</｜DSML｜parameter>'),
        ("[1]", '<｜DSML｜parameter name="arguments" string="true">[1]</｜DSML｜parameter>'),
        (None, ""),
        ("", ""),
    ],
)
def test_arguments_that_a_model_may_have_written(arguments: Any, text: str) -> None:
    written = history(user("x"), assistant("", tool_calls=[call("f", arguments)]), thinking=False)
    assert f'<｜DSML｜invoke name="f">\n{text}\n</｜DSML｜invoke>' in written


@pytest.mark.parametrize("field", ["prefix", "wo_eos"])
def test_an_unfinished_answer_is_continued(field: str) -> None:
    begun = assistant("```python\n", **{field: True})
    assert chat(user("Code!"), begun) == f"{B}{U}Code!{A}</think>```python\n"
    assert prompt(user("Code!"), begun) == f"{B}{U}Code!{A}<think></think>```python\n"


def test_what_reads_the_answer() -> None:
    encoder, said = DeepseekV4Encoder(), [user("Hi")]
    block = "\n\n<｜DSML｜tool_calls>\n" + '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'

    def read(messages: list[Message], **kwargs: Any) -> tuple[str, str, int]:
        new_parser = encoder.encode(messages, kwargs).new_parser
        if new_parser is None:
            return "", f"a</think>b{block}", 0
        message = read_output(new_parser(), [f"a</think>b{block}"])
        return message.reasoning, message.content, len(message.tool_calls)

    assert read(said) == ("a", f"b{block}", 0)
    assert read(said, tools=TOOLS) == ("a", "b", 1)
    assert read([system("", tools=TOOLS), *said], thinking=False) == ("", "a</think>b", 1)
    assert read([*said, assistant("x", prefix=True)]) == ("", f"a</think>b{block}", 0)
    assert encoder.encode(said, {"add_generation_prompt": False}).new_parser is None


BAD: list[tuple[list[Any], dict[str, Any], str, str]] = [
    ([], {}, "messages", "at least one"),
    (
        [user("a"), {"role": "function", "content": "x"}],
        {},
        "messages[1].role",
        "'function', but must be one of system",
    ),
    ([{"role": None, "content": "x"}], {}, "messages[0].role", "None"),
    ([user("a"), assistant("b")], {}, "messages[1]", "`prefix`"),
    ([{"role": "user", "content": [1]}], {}, "messages[0].content", "must be a string"),
    ([developer("")], {}, "messages[0].content", "is empty"),
    ([assistant("a", 5)], {}, "messages[0].reasoning_content", "must be a string"),
    ([{"role": "assistant", "reasoning": 5}], {}, "messages[0].reasoning", "must be a string"),
    ([assistant("a", tool_calls={})], {}, "messages[0].tool_calls", "must be a list"),
    ([assistant("a", tool_calls=[1])], {}, "messages[0].tool_calls[0]", "'function'"),
    ([assistant("a", tool_calls=[call("", "{}")])], {}, "messages[0].tool_calls[0].function.name", "is ''"),
    ([assistant("a", tool_calls=[call("f", 5)])], {}, "messages[0].tool_calls[0].function.arguments", "JSON object"),
    ([assistant("a", tool_calls=[call("f", "{}", 5)])], {}, "messages[0].tool_calls[0].id", "string"),
    ([user("a"), {"role": "tool", "content": "x", "tool_call_id": 1}], {}, "messages[1].tool_call_id", "string"),
    ([system("a", tools=5), user("b")], {}, "messages[0].tools", "must be a list"),
    ([system("a", response_format=[1]), user("b")], {}, "messages[0].response_format", "JSON schema"),
    ([reminder("a") | {"tools": TOOLS}, user("b")], {}, "messages[0]", "system and developer"),
    ([user("a")], {"tools": "x"}, "tools", "must be a list"),
    ([user("a")], {"tools": [{"type": "function"}]}, "tools[0]", "'function'"),
    ([user("a")], {"tools": [{"type": "web"}]}, "tools[0]", "'function'"),
    ([user("a")], {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing"),
    ([user("a")], {"tools": [{"function": {"name": 5}}]}, "tools[0].function.name", "is 5, but must be a string"),
    ([user("a")], {"tools": [{"function": {"name": ""}}]}, "tools[0].function.name", "is '', but must be a string"),
    ([user("a")], {"tools": [function("x")]}, "tools[0].function.parameters", "is 'x', but must be a JSON schema"),
    ([system("a", tools=[function([])])], {}, "messages[0].tools[0].function.parameters", "is []"),
    ([tool("x", "1")], {}, "messages[0].tool_call_id", "is '1', but the ids of earlier calls are none"),
    (
        [user("a"), CALLING, tool("y", "3")],
        {},
        "messages[2].tool_call_id",
        "is '3', but the ids of earlier calls are [",
    ),
    ([user("a"), CALLING, tool("x", "1"), user("b"), tool("y")], {}, "messages[4].tool_call_id", "or in none of them"),
    ([user("a"), CALLING, tool("x"), tool("y", "2")], {}, "messages[3].tool_call_id", "or in none of them"),
    ([user("a")], {"reasoning_effort": "huge"}, "reasoning_effort", "'huge', but must be one of none, minimal, low"),
    ([user("a")], {"reasoning_effort": 3}, "reasoning_effort", "3"),
    ([user("a")], {"thinking": "on"}, "thinking", "true or false"),
    ([user("a")], {"thinking": {"type": "auto"}}, "thinking", "disabled"),
    ([user("a")], {"enable_thinking": 1}, "chat_template_kwargs.enable_thinking", "1"),
    ([user("a")], {"drop_thinking": "no"}, "chat_template_kwargs.drop_thinking", "'no'"),
    ([user("a")], {"thinking": True, "enable_thinking": False}, "chat_template_kwargs", "different"),
    ([user("a")], {"shout": 1}, "chat_template_kwargs", "has shout, but this model knows only thinking"),
]


@pytest.mark.parametrize(("messages", "kwargs", "param", "words"), BAD, ids=[f"{i}-{b[2]}" for i, b in enumerate(BAD)])
def test_what_cannot_be_written_is_named(
    messages: list[Message], kwargs: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        DeepseekV4Encoder().encode(messages, kwargs)
    assert caught.value.param == param
    assert str(caught.value).startswith(param.split("[")[0].split(".")[0])
    assert words in str(caught.value)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(["", "f", "{}", "text", "max"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["type", "function", "name", "arguments", "schema", "id"]), inner, max_size=3),
    ),
    max_leaves=8,
)
FIELDS = [
    "content",
    "reasoning",
    "reasoning_content",
    "tool_calls",
    "tools",
    "response_format",
    "prefix",
    "tool_call_id",
]
MESSAGES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4).flatmap(
    lambda rest: st.sampled_from(["system", "user", "developer", "assistant", "tool", "latest_reminder", "x"]).map(
        lambda role: {"role": role, **rest}
    )
)
KWARGS = ["tools", "response_format", "thinking", "enable_thinking", "drop_thinking", "reasoning_effort"]


@given(st.lists(MESSAGES, max_size=5), st.dictionaries(st.sampled_from(KWARGS), JSON, max_size=3))
def test_whatever_is_sent_is_written_or_refused(messages: list[Message], kwargs: dict[str, Any]) -> None:
    try:
        text = DeepseekV4Encoder().encode(messages, kwargs).prompt
    except RequestError:
        return
    assert isinstance(text, str)
    assert text.startswith(B)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_deepseek_v4(tmp_path)


def test_the_family_has_its_own_encoder(folder: Path) -> None:
    assert ENCODERS[ENCODER_OF_ARCHITECTURE["DeepseekV4ForCausalLM"]] == load.__module__


def test_the_checkpoint_says_what_efforts_it_knows(folder: Path) -> None:
    def effort_text() -> Any:
        encoder = load(load_serving_config(folder), Tokenizer.load(folder))
        return encoder.encode([user("Hi")], {"reasoning_effort": "max"}).prompt

    assert effort_text() == f"{B}{FIRST_MAX}{U}Hi{A}<think>"
    (folder / "encoding").mkdir()
    module = folder / "encoding" / "encoding_dsv4.py"
    module.write_text("REASONING_EFFORT_MAX = 1\nraise SystemExit\n")
    assert effort_text() == f"{B}{FIRST_MAX}{U}Hi{A}<think>"
    module.write_text("REASONING_EFFORT_PROMPTS = {}\nraise SystemExit\n")
    assert effort_text() == f"{B}{LATER_MAX}{U}Hi{A}<think>"


def test_a_tokenizer_of_another_family_is_refused(folder: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="has no token <｜begin▁of▁sentence｜>"):
        load(load_serving_config(other), Tokenizer.load(other))


def test_a_template_would_have_no_effect(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^the option chat-template has no effect"):
        load(load_serving_config(folder, chat_template="x.jinja"), Tokenizer.load(folder))
