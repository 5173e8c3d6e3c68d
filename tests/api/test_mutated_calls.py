"""Calls that are written slightly wrong: read as they were meant, or content; the same in one piece and in many."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from pypto_serving.api.chat.formats import Calls, OutputFormat
from pypto_serving.api.chat.parsers.families import FAMILIES
from pypto_serving.api.chat.parsers.scanner import AssistantMessage, read_output
from tests.api.tool_samples import CITY, TYPES

ARGUMENTS: dict[str, Any] = {"city": 'Paris "é" {', "days": 3, "where": {"a": [1, True], "b": {}}, "exact": False}
SECOND: dict[str, Any] = {"city": "Rome", "exact": True}
KNOWN = {**TYPES, "get_weather": {**TYPES["get_weather"], "id": ["string"]}}


class Sample(NamedTuple):
    """An output: content, then calls with all that is around them."""

    family: str
    before: str
    begin: str
    calls: Sequence[str]
    between: str
    end: str
    arguments: Sequence[dict[str, Any]] = (ARGUMENTS, {}, SECOND)
    after: str = ""


NAMES = ("get_weather", "now", "get_weather")


def objects(key: str) -> list[str]:
    given = (json.dumps(one, ensure_ascii=False) for one in (ARGUMENTS, {}, SECOND))
    return [f'{{"name": "{name}", "{key}": {one}}}' for name, one in zip(NAMES, given, strict=True)]


def coder(name: str, arguments: dict[str, Any]) -> str:
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"


def dsml(name: str, arguments: dict[str, Any]) -> str:
    tags = "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{tags}</｜DSML｜invoke>'


def python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={json.dumps(value, ensure_ascii=False)}' for key, value in arguments.items())})"


def each(write: Callable[[str, dict[str, Any]], str]) -> list[str]:
    return list(map(write, NAMES, (ARGUMENTS, {}, SECOND)))


def v3(name: str, arguments: dict[str, Any]) -> str:
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
        f"{json.dumps(arguments, ensure_ascii=False)}\n```<｜tool▁call▁end｜>"
    )


def v31(name: str, arguments: dict[str, Any]) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments, ensure_ascii=False)}<｜tool▁call▁end｜>"


def kimi(name: str, arguments: dict[str, Any]) -> str:
    given = json.dumps(arguments, ensure_ascii=False)
    return f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{given}<|tool_call_end|>"


def mistral(name: str, arguments: dict[str, Any]) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


V3_BLOCK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DSML_BLOCK = ("<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>")
HERMES = [f"<tool_call>\n{one}\n</tool_call>" for one in objects("arguments")]
FLAT = '{"name": "get_weather", "arguments": {"city": "Rome"}, "id": "x"}'
WITH_ID = '{"name": "get_weather", "arguments": {"city": "Rome", "id": "x"}}'
SAMPLES = [
    Sample("hermes", "Let me see.\n", "", HERMES, "\n", ""),
    Sample("hermes", "", "", HERMES[:1], "", "", [ARGUMENTS], " So."),
    Sample("hermes", "", "<tool_call>\n", [FLAT], "", "\n</tool_call>", [{"city": "Rome"}]),
    Sample("hermes", "", "<tool_call>\n", [WITH_ID], "", "\n</tool_call>", [{"city": "Rome", "id": "x"}]),
    Sample("hermes", "", "<tool_call>\n", [f'{{"arguments": {CITY}, "name": "get_weather"}}'], "", "\n</tool_call>", [
        json.loads(CITY)
    ]),
    Sample("qwen3_coder", "Let me see.\n\n", "", each(coder), "\n", ""),
    Sample("qwen3_coder", "", "", [coder("get_weather", ARGUMENTS)], "\n", "", [ARGUMENTS]),
    Sample("llama3_json", "", "", objects("parameters"), "; ", ""),
    Sample("llama3_json", "Well.", "<|python_tag|>", objects("parameters"), "; ", ""),
    Sample("pythonic", "", "[", each(python), ", ", "]"),
    Sample("pythonic", "Well.\n", "<|python_start|>[", each(python), ", ", "]<|python_end|>"),
    Sample("olmo3", "Well.\n", "<function_calls>\n", each(python), "\n", "\n</function_calls>"),
    Sample("lfm2", "Well.\n", "<|tool_call_start|>[", each(python), ", ", "]<|tool_call_end|>"),
    Sample("granite", "Well.", "<|tool_call|>[", objects("arguments"), ", ", "]"),
    Sample("kimi_k2", "Well.", "<|tool_calls_section_begin|>", each(kimi), "", "<|tool_calls_section_end|>"),
    Sample("functools", "", "functools[", objects("arguments"), ", ", "]"),
    Sample("mistral", "Well.", "[TOOL_CALLS][", objects("arguments"), ", ", "]"),
    Sample("mistral_named", "Well.", "", each(mistral), "", ""),
    Sample("deepseek_v3", "Well.\n", V3_BLOCK[0], each(v3), "\n", V3_BLOCK[1]),
    Sample("deepseek_v31", "", V3_BLOCK[0], each(v31), "", V3_BLOCK[1]),
    Sample("deepseek_v4", "Well.\n\n", DSML_BLOCK[0], each(dsml), "\n", DSML_BLOCK[1]),
    Sample("json", "", "", objects("arguments")[:1], "", "", [ARGUMENTS]),
    Sample("json", "", "```json\n[", objects("arguments"), ", ", "]\n```"),
]  # fmt: skip
MARK = re.compile(
    r"</?(?:tool_call|function|parameter|function_calls)>|<(?:function|parameter)=|</?｜DSML｜\w+>?|<｜tool▁[^｜]*｜>"
    r"|\[(?:TOOL_CALLS|ARGS)\]|<\|(?:python|tool)_\w+\|>|```(?:json)?"
)


def with_slip(rng: random.Random, mark: str) -> str:
    at = rng.randrange(1, len(mark) - 1)
    wrong = rng.choice("xyz_")
    return rng.choice(
        [
            mark[:at] + mark[at + 1 :],
            mark[:at] + wrong + mark[at + 1 :],
            mark[:at] + mark[at] + mark[at:],
            mark[:at] + mark[at + 1] + mark[at] + mark[at + 2 :],
        ]
    )


def at_one(rng: random.Random, pattern: str | re.Pattern[str], text: str, make: Callable[[str], str]) -> str:
    found = [*re.finditer(pattern, text)]
    if not found:
        return text
    one = rng.choice(found)
    return text[: one.start()] + make(one[0]) + text[one.end() :]


def with_control(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + chr(rng.randrange(32)) + text[at:]


MUTATIONS: Sequence[Callable[[random.Random, str], str]] = (
    lambda rng, text: at_one(rng, MARK, text, lambda mark: ""),
    lambda rng, text: at_one(rng, MARK, text, lambda mark: mark * 2),
    lambda rng, text: at_one(rng, MARK, text, lambda mark: with_slip(rng, mark)),
    lambda rng, text: at_one(rng, r"[\"{}\[\]()]", text, lambda char: ""),
    lambda rng, text: at_one(rng, r"[\"{}\[\]()]", text, lambda char: char * 2),
    lambda rng, text: at_one(rng, "true|false|null", text, str.title),
    lambda rng, text: at_one(rng, r"\"[\w ]+\"", text, lambda one: f"'{one[1:-1]}'"),
    with_control,
    lambda rng, text: at_one(rng, r"\{\}|\[\]|\"\"", text, lambda empty: "null"),
)


def mutants(seed: int, sample: Sample) -> tuple[list[str], Sample]:
    """Return the parts of a mutant, begin, calls and end, of which one is changed."""
    rng = random.Random(seed)
    parts = [sample.begin, *sample.calls, sample.end]
    at = rng.randrange(len(parts))
    parts[at] = rng.choice(MUTATIONS)(rng, parts[at])
    return parts, sample


def letters(text: str) -> str:
    return "".join(filter(str.isalnum, text))


def visible(text: str) -> str:
    return "".join(char for char in text if char.isprintable() and not char.isspace())


def essence(value: Any) -> Any:
    """Return a value without what a mutation may change in a text."""
    if isinstance(value, dict) and value:
        return {letters(key): essence(one) for key, one in value.items()}
    if isinstance(value, list) and value:
        return [essence(one) for one in value]
    return letters(value) or None if isinstance(value, str) else None if value in ({}, [], None) else [value]


def read(sample: Sample, pieces: Sequence[str]) -> AssistantMessage:
    return read_output(OutputFormat(None, Calls(sample.family, KNOWN))(), pieces)


def cut(rng: random.Random, text: str) -> list[str]:
    pieces, longest = [], rng.choice([1, 4, 30])
    while text:
        at = rng.randint(1, longest)
        pieces.append(text[:at])
        text = text[at:]
    return pieces


def check(seed: int) -> bool:
    """Check one mutant; return whether all of its calls were recovered."""
    sample = SAMPLES[seed % len(SAMPLES)]
    (begin, *calls, end), _ = mutants(seed, sample)
    text = f"{sample.before}{begin}{sample.between.join(calls)}{end}{sample.after}"
    message = read(sample, [text])
    assert message == read(sample, cut(random.Random(seed), text)), text
    assert not message.broken, text
    missed, given = [], [*message.tool_calls]
    for raw, name, arguments in zip(calls, NAMES, sample.arguments, strict=False):
        read_now = given and (given[0].name, essence(json.loads(given[0].arguments))) == (name, essence(arguments))
        if read_now:
            given.pop(0)
        else:
            missed.append(raw)
    assert not given, (text, message)
    said = visible(message.content)
    if len(missed) == len(calls):
        assert said == visible(text), (text, message)
        return False
    around = [("", ""), (begin, ""), ("", end), (begin, end)] if missed else [("", "")]
    separators = {("", ""), (sample.between, ""), ("", sample.between), (sample.between, sample.between)}
    possible = {
        visible(f"{sample.before}{a}{c}{between.join(missed)}{d}{b}{sample.after}")
        for a, b in around
        for c, d in (separators if missed else [("", "")])
        for between in ("", sample.between)
    }
    last = f"{begin}{calls[-1]}{end}".rpartition("<")[2]
    if f"</{last}" in f"{sample.calls[-1]}{sample.end}":  # it lost its slash, and reads as a start without a call
        possible.add(visible(f"{sample.before}<{last}{sample.after}"))
    assert said in possible, (text, message, possible)
    return not missed


@pytest.mark.parametrize("first", range(0, 4000, 1000))
def test_a_mutant_is_what_was_meant_or_content(first: int) -> None:
    assert sum(map(check, range(first, first + 1000))) > 450


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 100_000, 10_000))
def test_many_mutants(first: int) -> None:
    assert sum(map(check, range(first, first + 10_000))) > 4_500


def test_every_form_has_samples() -> None:
    assert {sample.family for sample in SAMPLES} == set(FAMILIES)
    for sample in SAMPLES:
        text = f"{sample.before}{sample.begin}{sample.between.join(sample.calls)}{sample.end}{sample.after}"
        found = [json.loads(call.arguments) for call in read(sample, [text]).tool_calls]
        assert found == list(sample.arguments), text
