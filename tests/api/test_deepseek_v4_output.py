"""Reading DeepSeek V4's outputs: every split of a text gives the parts that the whole text gives."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pypto_serving.api.chat.formats import Calls, OutputFormat
from pypto_serving.api.chat.parsers.dsml import write_calls
from pypto_serving.api.chat.parsers.scanner import (
    AssistantMessage,
    OutputParser,
    ParsedCall,
    Thinking,
    ToolCallStart,
    read_output,
)

START, END = "\n\n<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"
WEATHER = (
    '<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Hangzhou</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
)
WEATHER_CALL = ParsedCall("get_weather", '{"city": "Hangzhou", "days": [1, 2]}')
NOW = '<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n'
NOW_CALL = ParsedCall("now", "{}")


def parameter(value: str, is_string: str = "true", name: str = "x") -> str:
    return f'<｜DSML｜parameter name="{name}" string="{is_string}">{value}</｜DSML｜parameter>\n'


def invoke(*parameters: str) -> str:
    return f'<｜DSML｜invoke name="f">\n{"".join(parameters)}</｜DSML｜invoke>\n'


def new_parser(thinks: bool, reads_calls: bool) -> OutputParser:
    thinking = Thinking("<think>", "</think>", opened=True) if thinks else None
    return OutputFormat(thinking, Calls("deepseek_v4") if reads_calls else None)()


def read(text: str, thinks: bool = False, reads_calls: bool = True) -> AssistantMessage:
    return read_output(new_parser(thinks, reads_calls), [text])


THINKING = [
    ("", AssistantMessage()),
    ("why</think>because", AssistantMessage("why", "because")),
    ("why</think>", AssistantMessage("why")),
    ("</think>because", AssistantMessage("", "because")),
    ("never ends", AssistantMessage("never ends")),
    ("never ends </thi", AssistantMessage("never ends </thi")),
    ("a</th</think>b</think>c", AssistantMessage("a</th", "b</think>c")),
    (f"calls?{START}{NOW}{END}", AssistantMessage(f"calls?{START}{NOW}{END}")),
    (f"calls!</think>{START}{NOW}{END}", AssistantMessage("calls!", "", [NOW_CALL])),
]


@pytest.mark.parametrize(("text", "message"), THINKING)
def test_reasoning_ends_at_its_mark(text: str, message: AssistantMessage) -> None:
    assert read(text, thinks=True) == message


def test_without_thinking_the_mark_is_content() -> None:
    assert read("why</think>because") == AssistantMessage("", "why</think>because")


VALUE_END = "</｜DSML｜parameter>\\n</｜DSML｜invoke>"
MARKS = f'[{{"k": "{VALUE_END}"}}, 1]'
CALLS = [
    (f"Let me see.{START}{WEATHER}{END}", "Let me see.", [WEATHER_CALL]),
    (f"{START}{WEATHER}{NOW}{END}", "", [WEATHER_CALL, NOW_CALL]),
    (f"a\n\n\n<｜DSML｜tool_calls>{NOW}{END}", "a\n", [NOW_CALL]),
    (f"a <｜DSML｜tool_calls>\n{NOW}{END}", "a ", [NOW_CALL]),
    (f"a{START}{NOW}{END} b{START}{WEATHER}{END}", "a b", [NOW_CALL, WEATHER_CALL]),
    (f"a{START}{END}b", "ab", []),
    (f"{START}{invoke(parameter('1'))}{END}", "", [ParsedCall("f", '{"x": "1"}')]),
    (f"{START}{invoke(parameter('1', 'false'))}{END}", "", [ParsedCall("f", '{"x": 1}')]),
    (f"{START}{invoke(parameter('bad', 'false'))}{END}", "", [ParsedCall("f", '{"x": "bad"}')]),
    (START + invoke(parameter(MARKS, "false")) + END, "", [ParsedCall("f", f'{{"x": {MARKS}}}')]),
    (START + invoke(parameter(f'"{VALUE_END}"', "false")) + END, "", [ParsedCall("f", f'{{"x": "{VALUE_END}"}}')]),
    (
        START + invoke(parameter("None", "False", "y"), parameter("NaN", "false")) + END,
        "",
        [ParsedCall("f", '{"y": null, "x": "NaN"}')],
    ),
    (f"{START}{invoke(parameter('1'), parameter('2'))}{END}", "", [ParsedCall("f", '{"x": "1", "x": "2"}')]),
    (f"{START}{invoke(parameter(f'<p>{NOW}{END}{START}'))}{END}", "", None),
    (START + invoke(parameter('ü\n"')) + END, "", [ParsedCall("f", '{"x": "ü\\n\\""}')]),
]


@pytest.mark.parametrize(("text", "content", "calls"), CALLS)
def test_calls(text: str, content: str, calls: list[ParsedCall] | None) -> None:
    message = read(text)
    assert message.content == content
    if calls is None:
        assert [json.loads(call.arguments) for call in message.tool_calls] == [{"x": f"<p>{NOW}{END}{START}"}]
    else:
        assert message.tool_calls == calls


BROKEN = [
    (f"a{START}", f"a{START}", 0),
    (f"a{START}{WEATHER[:-9]}", f"a{START}{WEATHER[:-9]}", 0),
    (f"a{START}{NOW}{WEATHER[:30]}", f"a\n{WEATHER[:30]}", 1),
    (f"a{START}{NOW}\n ", "a", 1),
    (f"a{START}{invoke(parameter('1', 'maybe'))}{END}", None, 0),
    (f"a{START}{invoke(parameter('{bad', 'false'))}{END}", None, 0),
    ("a\n\n<｜DSML｜tool", "a\n\n<｜DSML｜tool", 0),
]


@pytest.mark.parametrize(("text", "content", "num_calls"), BROKEN)
def test_what_is_no_call_is_content(text: str, content: str | None, num_calls: int) -> None:
    message = read(text)
    assert message.content == (text if content is None else content)
    assert len(message.tool_calls) == num_calls


def test_calls_are_read_only_where_there_are_tools() -> None:
    text = f"a{START}{NOW}{END}"
    assert read(text, reads_calls=False) == AssistantMessage("", text)


def test_parts_come_as_soon_as_they_are_certain() -> None:
    assert read_output(new_parser(True, True), []) == AssistantMessage()
    parser = new_parser(True, True)
    texts = ["why", "</", "b>", "</think", ">", "so\n", "\nx", f"{START}{NOW}{NOW}"]
    given = [[getattr(part, "text", part) for part in parser.push(text)] for text in texts]
    assert given == [["why"], [], ["</b>"], [], [], ["so"], ["\n\nx"], [ToolCallStart("now"), "{}"]]


PIECES = ["</think>", START, END, WEATHER, NOW, "\n", "\n\n", "<", "｜DSML｜", "invoke>", "a", "</｜DSML｜parameter>"]
PIECES += [invoke(parameter("1", "false")), invoke(parameter(END)), '<｜DSML｜invoke name="', parameter("</think>")]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=10).map("".join)


@given(TEXTS, st.lists(st.integers(0, 300), max_size=12), st.booleans(), st.booleans())
@example(f"why</think>a{START}{WEATHER}{NOW}{END}", list(range(300)), True, True)
def test_any_split_gives_the_same_parts(text: str, cuts: list[int], thinks: bool, reads_calls: bool) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    split = read_output(new_parser(thinks, reads_calls), pieces)
    assert split == read(text, thinks, reads_calls)
    if not reads_calls:
        assert split.tool_calls == []


WORDS = st.text('a \n\\"{}/>｜é😀', max_size=8)
VALUES = st.recursive(
    st.one_of(WORDS, st.integers(), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=6,
)
NAMES = st.text("abc_-.", min_size=1, max_size=5)


@given(WORDS, WORDS, st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=4)), min_size=1, max_size=4))
def test_what_was_written_is_read_back(reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    message = read(f"{reasoning}</think>{content}\n\n{write_calls(calls)}", thinks=True)
    assert (message.reasoning, message.content) == (reasoning, content.lstrip("\r\n"))
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == calls
