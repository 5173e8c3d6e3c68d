"""Tool calls in each family's form: every split of an output gives what the whole output gives, and no text is lost."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.api.chat.formats import Calls, OutputFormat
from pypto_serving.api.chat.parsers.families import FAMILIES
from pypto_serving.api.chat.parsers.scanner import (
    AssistantMessage,
    OutputPart,
    Thinking,
    ToolCallStart,
    read_output,
)
from pypto_serving.api.chat.parsers.scanner import (
    ParsedCall as Call,
)
from pypto_serving.setup.rules import TOOL_CALL_PARSERS
from tests.api.tool_samples import (
    ARGUMENTS,
    CITY,
    CODER,
    CODER_CALL,
    CODER_NOW,
    HERMES,
    HERMES_NOW,
    KIMI,
    LITERALS,
    NOW,
    PARAMETERS,
    TYPES,
    V3,
    V31,
    WEATHER,
)

BIG = "9" * 4400
"""More digits than Python converts."""
UNUSUAL = [Call("f", '{"a": true, "e\u0301": null}'), Call("\ufb01.x", '{"\ufb01": 1}')]
"""Calls with names that Python would normalize."""
FOLDER = r'{"path": "C:\\", "deep": "a\\\"}"}'
"""Texts that end behind an escaped backslash and hold an escaped quote."""
V3_BEGIN = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
FOLDER_CALL = Call("now", FOLDER)
CALLS: list[tuple[str, str, str, list[Call]]] = [
    ("hermes", f'<tool_call>{{"name": "now", "arguments": {FOLDER}}}</tool_call>', "", [FOLDER_CALL]),
    ("llama3_json", f'{{"name": "now", "parameters": {FOLDER}}}', "", [FOLDER_CALL]),
    ("mistral", f"[TOOL_CALLS]now{FOLDER}", "", [FOLDER_CALL]),
    ("deepseek_v3", f"{V3_BEGIN}now<｜tool▁sep｜>{FOLDER}<｜tool▁call▁end｜>", "", [FOLDER_CALL]),
    ("json", f'{{"name": "now", "arguments": {FOLDER}}}', "", [FOLDER_CALL]),
    ("pythonic", r'[now(path="C:\\", deep="a\\\"}")]', "", [FOLDER_CALL]),
    ("hermes", HERMES, "", [WEATHER]),
    ("hermes", f"\n\n{HERMES}", "", [WEATHER]),
    ("hermes", f"Let me see.\n{HERMES}\n{HERMES_NOW}\n", "Let me see.", [WEATHER, NOW]),
    ("hermes", f"1{HERMES}2{HERMES_NOW}3", "123", [WEATHER, NOW]),
    ("hermes", f"<tool_call>{ARGUMENTS}\n{ARGUMENTS}</tool_call>", "", [WEATHER, WEATHER]),
    ("hermes", f'<tool_call>{{"arguments": {CITY}, "name": "get_weather"}}</tool_call>', "", [WEATHER]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "n\\u006fw", "arguments": {}, "id": "x"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"id": "x", "name": "now", "arguments": {}}</tool_call>', "", [NOW]),
    ("qwen3_coder", CODER, "", [CODER_CALL]),
    ("qwen3_coder", f"I will.\n\n{CODER}\n{CODER_NOW}", "I will.", [CODER_CALL, NOW]),
    ("qwen3_coder", "<function=now>\n</function>", "", [NOW]),
    ("qwen3_coder", "<tool_call><function=f><parameter=x>1</parameter></tool_call>", "", [Call("f", '{"x": "1"}')]),
    (
        "qwen3_coder",
        "<function=get_weather><parameter=days>three</parameter><parameter=where>null</parameter></function>",
        "",
        [Call("get_weather", '{"days": "three", "where": null}')],
    ),
    (
        "qwen3_coder",
        '<function=get_weather><parameter=where>\n{"a": "</parameter></function>"}\n</parameter></function>',
        "",
        [Call("get_weather", '{"where": {"a": "</parameter></function>"}}')],
    ),
    ("qwen3_coder", f"<function=get_weather><parameter=days>{BIG}</parameter></function>", "", [
        Call("get_weather", f'{{"days": {BIG}}}')
    ]),
    ("llama3_json", PARAMETERS, "", [WEATHER]),
    ("llama3_json", f"<|python_tag|>{PARAMETERS}; {PARAMETERS}", "", [WEATHER, WEATHER]),
    ("llama3_json", f"Sure.\n<|python_tag|>{ARGUMENTS}", "Sure.", [WEATHER]),
    ("llama3_json", f'\n{{"type": "function", {PARAMETERS[1:]}', "", [WEATHER]),
    ("pythonic", '[get_weather(city="Paris \\"é\\" {"), now()]', "", [WEATHER, NOW]),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", [NOW]),
    ("pythonic", "Sure.\n<|python_start|>[ now( ) ]", "Sure.", [NOW]),
    ("pythonic", "[a.b(x=-1, y=[True, null], z={'k': (1.5,)})]", "", [Call("a.b", LITERALS)]),
    ("pythonic", f"[f(a={BIG}, from=[true,1e999]),]", "", [Call("f", f'{{"a": {BIG}, "from": [true,1e999]}}')]),
    ("pythonic", '[f(a="\\/", b={"\\"": "\\n"})]', "", [Call("f", '{"a": "\\/", "b": {"\\"": "\\n"}}')]),
    ("pythonic", "[f(a='1', b=True,)]", "", [Call("f", '{"a": "1", "b": true}')]),
    ("pythonic", "[f(e\u0301=1, class={})]", "", [Call("f", '{"e\u0301": 1, "class": {}}')]),
    ("pythonic", "[f(a=True,\r\n e\u0301=None), \ufb01.x(\ufb01=1)]", "", UNUSUAL),
    ("mistral", f"[TOOL_CALLS][{ARGUMENTS}]", "", [WEATHER]),
    ("mistral", f'[TOOL_CALLS] [{ARGUMENTS}, {{"name": "now", "arguments": {{}}, "id": "A3"}}]', "", [WEATHER, NOW]),
    ("mistral", f"Sure.[TOOL_CALLS]get_weather[ARGS]{CITY}[TOOL_CALLS]now[ARGS]{{}}", "Sure.", [WEATHER, NOW]),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]abc123XYZ[ARGS]{CITY}", "", [WEATHER]),
    ("mistral", f"[TOOL_CALLS]get_weather{CITY}", "", [WEATHER]),
    ("deepseek_v3", V3, "", [WEATHER, NOW]),
    ("deepseek_v3", f"Let me see.\n\n{V31}", "Let me see.", [WEATHER, NOW]),
    ("json", ARGUMENTS, "", [WEATHER]),
    ("json", f" [{PARAMETERS}, {ARGUMENTS}]", "", [WEATHER, WEATHER]),
    ("json", f"```json\n{ARGUMENTS}\n```\n", "", [WEATHER]),
]  # fmt: skip

NO_CALLS: list[tuple[str, str]] = [
    ("hermes", "Use <tool_call> to call."),
    ("hermes", "<tool_call>\nhello\n</tool_call>\n"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": []}</tool_call>'),
    ("hermes", '<tool_call>{"city": "Paris"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "no'),
    ("hermes", '<tool_call>{"name" @ "now", "arguments": {}}</tool_call>'),
    ("hermes", "text \n\n<tool_ca"),
    ("hermes", PARAMETERS),
    ("qwen3_coder", "<tool_call>\nnow\n</tool_call>"),
    ("qwen3_coder", "In XML you write <function=f>.</function>"),
    ("qwen3_coder", "<tool_call><function=a\nb></function></tool_call>"),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=exact>\nfa\nlse\n</parameter></function></tool_call>"),
    ("llama3_json", '{"name": "Bob", "parameters": {}}'),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", '{"name": "now"}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("pythonic", "[link](http://x)"),
    ("pythonic", "[now(1)]"),
    ("pythonic", "[now(**x), f(a=b)]"),
    ("pythonic", "[now(a=1, b="),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[now(a=1 b=2)]"),
    ("pythonic", "[now(a=NaN)]"),
    ("pythonic", "[now(a=1) now()]"),
    ("pythonic", "[now(a=" + "(" * 300 + "1" + ")" * 300 + ")]"),
    ("mistral", "[TOOL_CALLS] and so on"),
    ("mistral", "[TOOL_CALLS][1]"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>now"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now {}"),
    ("json", '{"name": "unknown", "arguments": {}}'),
    ("json", "```json\n[1]\n```"),
    ("json", "See " + ARGUMENTS),
    ("granite", "<|tool_call|> and so on"),
    ("granite", ARGUMENTS),
    ("lfm2", "[now()]"),
    ("lfm2", "<|tool_call_start|>[now(1)]<|tool_call_end|>"),
    ("kimi_k2", "<|tool_calls_section_begin|>now"),
    ("functools", "functools is a module"),
    ("functools", 'functools[{"name": "unknown", "arguments": {}}]'),
]

LONG = "x" * 2000
BROKEN: list[tuple[str, str, AssistantMessage]] = [
    ("llama3_json", f"{PARAMETERS}; and", AssistantMessage("", "; and", [WEATHER])),
    (
        "hermes",
        f'<tool_call>{{"name": "now", "arguments": {{"a": "{LONG}", b}}}}</tool_call>!',
        AssistantMessage("", "!", [Call("now", f'{{"a": "{LONG}", b}}}}')], broken=True),
    ),
    (
        "qwen3_coder",
        f"<tool_call><function=f><parameter=x>{LONG}\n",
        AssistantMessage("", "", [Call("f", f'{{"x": "{LONG}\\n')], broken=True),
    ),
    ("mistral", f'[TOOL_CALLS]f[ARGS]{{"a": "{LONG}', AssistantMessage("", "", [Call("f", f'{{"a": "{LONG}')], True)),
]
"""Calls after which text follows, or that break off when they have begun to be given out."""
CUT = [
    (
        "qwen3_coder",
        '<function=get_weather><parameter=where>{"a": "b</parameter><parameter=days>1</parameter></function>',
    ),
    ("hermes", HERMES[: HERMES.index('\\" {')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1 </tool_call>b'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "x": 1}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": {"b": 1, "c": 2}}</tool_call>'),
    ("qwen3_coder", CODER[: CODER.index('\n"é"')]),
    ("qwen3_coder", "<tool_call><function=f><parameter=x>1</parameter> what? </tool_call>"),
    ("mistral", f"[TOOL_CALLS][{ARGUMENTS}, 1]"),
    ("llama3_json", '{"type": "' + LONG + '", "answer": 1}'),
]
NO_CALLS += CUT
CALLS += [
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=s>\nx\n<parameter=i>\n2\n</parameter></function>",
        "",
        [Call("f", '{"s": "x", "i": "2"}')],
    ),
    ("qwen3_coder", "<tool_call><function=f><parameter=s>\nx\n</function></tool_call>", "", [Call("f", '{"s": "x"}')]),
    (
        "deepseek_v4",
        '<｜DSML｜toolcalls><｜DSML｜invoke name="f"></｜DSML｜invoke></｜DSML｜tool_calls>',
        "",
        [Call("f", "{}")],
    ),
    ("deepseek_v4", 'So.\n\n<｜DSML｜invoke name="now"></｜DSML｜invoke>', "So.", [NOW]),
    ("olmo3", "Well.\n<function_calls>\nf(a=1)\nnow()\n</function_calls>", "Well.", [Call("f", '{"a": 1}'), NOW]),
    ("olmo3", '<function_calls>f(a=")\nb(")</function_calls>', "", [Call("f", '{"a": ")\\nb("}')]),
    ("lfm2", "Sure.<|tool_call_start|>[f(a=1), now()]<|tool_call_end|>", "Sure.", [Call("f", '{"a": 1}'), NOW]),
    ("granite", f'<|tool_call|>[{ARGUMENTS}, {{"name": "now", "arguments": {{}}}}]', "", [WEATHER, NOW]),
    ("granite", f"Sure.<|tool_call|>{ARGUMENTS}", "Sure.", [WEATHER]),
    ("kimi_k2", f"Sure.{KIMI}", "Sure.", [WEATHER, NOW]),
    ("kimi_k2", "<|tool_call_begin|>now<|tool_call_argument_begin|>{}", "", [NOW]),
    ("functools", f" functools[{ARGUMENTS}, {PARAMETERS}]", "", [WEATHER, WEATHER]),
    ("functools", ARGUMENTS, "", [WEATHER]),
    ("hermes", '<tool_cal>{"name": "now", "arguments": {"a": True}</tool_call>', "", [Call("now", '{"a": true}')]),
    ("hermes", 'So.\n{"name": "now", "arguments": None}\n</tool_call>', "So.", [NOW]),
]


def parts_of(
    family: str, pieces: Sequence[str], one: bool = False, thinking: Thinking | None = None
) -> list[OutputPart]:
    parser = OutputFormat(thinking, Calls(family, TYPES, one))()
    return [part for piece in pieces for part in parser.push(piece)] + parser.finish()


def read(family: str, *pieces: str, **options: Any) -> AssistantMessage:
    given = {**options}
    thinking = given.pop("thinking", None)
    return read_output(OutputFormat(thinking, Calls(family, TYPES, **given))(), pieces)


@pytest.mark.parametrize(("family", "text", "content", "calls"), CALLS)
def test_calls(family: str, text: str, content: str, calls: list[Call]) -> None:
    message = read(family, text)
    assert message == AssistantMessage("", content, calls)
    assert all(isinstance(json.loads(call.arguments, parse_int=float), dict) for call in message.tool_calls)


@pytest.mark.parametrize(("family", "text"), NO_CALLS)
def test_what_is_no_call_is_content(family: str, text: str) -> None:
    assert read(family, text) == AssistantMessage("", text)


@pytest.mark.parametrize(("family", "text", "message"), BROKEN)
def test_a_call_that_breaks_off_stays_a_call(family: str, text: str, message: AssistantMessage) -> None:
    assert read(family, text) == message


SAMPLES = [(family, text) for family, text, *_ in CALLS] + NO_CALLS + [(family, text) for family, text, _ in BROKEN]


@pytest.mark.parametrize(("family", "text"), SAMPLES)
def test_every_cut_in_two_and_every_character_alone(family: str, text: str) -> None:
    whole = read(family, text)
    assert read(family, *text) == whole
    for cut in range(len(text)):
        assert read(family, text[:cut], text[cut:]) == whole


MARKS = sorted({mark for family in FAMILIES.values() for mark in family.marks})
PIECES = (
    [text for _, text in SAMPLES] + MARKS + list('{}[]":, \n<a\\') + ["</function>", "<parameter=city>", "</think>"]
)
PIECES += ["functools[", '{"name": "now", "arguments": ', "[now(", "```json", "```", "<think>", "<｜DSML｜tool_calls>"]


@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(st.sampled_from(PIECES), max_size=6).map("".join),
    st.lists(st.integers(0, 600), max_size=12),
    st.sampled_from([None, Thinking("<think>", "</think>"), Thinking("<think>", "</think>", True, ("<tool_call>",))]),
    st.booleans(),
)
def test_any_split_of_any_text(family: str, text: str, cuts: list[int], thinking: Thinking | None, one: bool) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    split = read(family, *pieces, thinking=thinking, one=one)
    assert split == read(family, text, thinking=thinking, one=one)
    assert len(split.tool_calls) <= 1 or not one


MARKUP = re.compile(
    "|".join(map(re.escape, [*MARKS, "```json", "```"]))
    + r'|\{\s*("(id|type)"\s*:\s*"[^"]*"\s*,\s*)*("name"\s*:\s*")?|("\s*,\s*)?"(arguments|parameters)"\s*:|functools'
    + r"|functions\.|:\d(?=<)|function"
    + r'|"|,\s*"id"\s*:\s*"[^"]*"|[\s{}\[\],;>]'
)


@pytest.mark.parametrize(("family", "text"), [s for s in SAMPLES if FAMILIES[s[0]].arguments == "json"])
def test_no_text_is_lost(family: str, text: str) -> None:
    """What the parts do not hold is markup: their texts are found in the output one after the other."""
    rest, left = text, ""
    for part in parts_of(family, [text]):
        piece = part.name if isinstance(part, ToolCallStart) else part.text
        if piece not in rest:  # written anew: the call had another order
            assert family == "hermes", piece
            return
        before, _, rest = rest.partition(piece)
        left += before
    assert MARKUP.sub("", left + rest) in ("", "get_weather", "abc123XYZ"), left + rest


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"pythonic", "lfm2", "olmo3"}))
def test_the_arguments_of_long_calls_come_as_they_are_generated(family: str) -> None:
    """No more is held back than what a call may have before it is sent, and what may be the end of a text."""
    form, text = FAMILIES[family], "so long " * 500
    arguments = {
        "json": f'{{"city": "{text}"}}',
        "xml": f"<parameter=city>\n{text}\n</parameter>\n",
        "dsml": f'<｜DSML｜parameter name="city" string="true">{text}</｜DSML｜parameter>\n',
    }[form.arguments]
    call = f"{form.begin}{form.head}get_weather{form.middle}{arguments}{form.tail}{form.end}"
    parser = OutputFormat(None, Calls(family, TYPES))()
    sizes = [sum(len(part.text) for part in parser.push(char) if not isinstance(part, ToolCallStart)) for char in call]
    assert max(sizes) <= 1024 and len([size for size in sizes if size]) > 2500
    assert read(family, call).tool_calls == [Call("get_weather", f'{{"city": "{text}"}}')]


def test_the_names_are_those_of_the_option() -> None:
    assert {*FAMILIES, "auto", "none"} == set(TOOL_CALL_PARSERS)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_deep_and_long_outputs_end(family: str) -> None:
    for text in (
        "[" * 20_000,
        '{"a":' * 20_000,
        '{"name": "now", "arguments": ' + '{"a":' * 5000,
        "\\" * 9999,
        "\n" * 9999,
    ):
        for mark in ("", *FAMILIES[family].marks[:1]):
            assert read(family, mark + text, "x").content.endswith("x") or read(family, mark + text).tool_calls
