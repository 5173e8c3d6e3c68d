"""Grammars of forced calls: whatever they allow is read back as calls that match their schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from pypto_serving.api.chat.formats import Calls, OutputFormat
from pypto_serving.api.chat.output import AssistantMessage, read_output
from pypto_serving.api.chat.parsers.families import FAMILIES
from pypto_serving.api.chat.tools import parameter_types
from pypto_serving.api.generation.structured import json_options
from pypto_serving.api.generation.tool_grammar import either, forced_calls, strict_calls
from pypto_serving.errors import RequestError
from pypto_serving.guidance import Compiler, Matcher
from pypto_serving.types.guide import Grammar

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "where": {"$ref": "#/$defs/Place"},
        },
        "required": ["city", "days", "where"],
        "additionalProperties": False,
        "$defs": {
            "Place": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
}
NOW: dict[str, Any] = {"name": "now"}
OPTIONAL: dict[str, Any] = {
    "name": "find",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "enum": [1, 2]}, "b": {"type": "boolean"}},
        "additionalProperties": False,
    },
}
FUNCTIONS = [WEATHER, NOW, OPTIONAL]
TYPES = {f["name"]: parameter_types(f.get("parameters", {})) for f in FUNCTIONS}
END = 256


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler.of_bytes()


def no_special(text: str) -> int | None:
    return None


def allowed(matcher: Matcher, compiler: Compiler) -> list[int]:
    mask = np.zeros(compiler.num_words, np.uint32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(i) for i in np.flatnonzero(bits)]


def printable(ids: list[int]) -> list[int]:
    """Ids of printable bytes and ends; of other bytes only if there is nothing else."""
    return [i for i in ids if i >= END or 32 <= i < 127 or i == 10] or ids


def walk(compiler: Compiler, grammar: Grammar, rng: random.Random, most: int = 3000) -> str:
    """A random text of the language: printable characters, and soon an end of each string."""
    matcher, text = compiler.compile(grammar), bytearray()
    while not matcher.is_complete and len(text) < most:
        choices = printable(allowed(matcher, compiler))
        ends = [i for i in choices if i >= END]
        if ends and rng.random() < 0.6:
            break
        choices = [i for i in choices if i < END]
        if len(choices) > 90 and rng.random() < 0.05 and grammar.text.count("</parameter>"):
            for byte in b"</parameter>":  # nothing else ends free text
                matcher.consume(byte)
                text.append(byte)
            continue
        closing = [i for i in choices if chr(i) in '"}<]\n)/']
        token = rng.choice(closing if closing and rng.random() < 0.5 else choices)
        matcher.consume(token)
        text.append(token)
    return text.decode()


def read(family: str, text: str) -> AssistantMessage:
    return read_output(OutputFormat(None, Calls(family, TYPES))(), [text])


def check(name: str, arguments: dict[str, Any]) -> None:
    function = next(f for f in FUNCTIONS if f["name"] == name)
    schema = function.get("parameters", {})
    assert set(schema.get("required", ())) <= set(arguments) <= set(schema.get("properties", ()))
    if name == "get_weather":
        assert isinstance(arguments["city"], str)
        assert 1 <= arguments["days"] <= 14
        assert arguments.get("unit") in (None, "celsius", "kelvin")
        assert arguments.get("exact") in (None, True, False)
        assert set(arguments["where"]) == {"x"}
    if name == "find":
        assert arguments.get("a", 1) in (1, 2)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("one", [False, True])
def test_what_the_grammar_allows_is_read_as_calls(compiler: Compiler, family: str, one: bool) -> None:
    grammar = forced_calls(FAMILIES[family].form, FUNCTIONS, one, no_special, json_options())
    names: set[str] = set()
    for seed in range(12):
        text = walk(compiler, grammar, random.Random(seed))
        message = read(family, text)
        assert (message.reasoning, message.content) == ("", ""), text
        assert len(message.tool_calls) == 1 or (message.tool_calls and not one), text
        for call in message.tool_calls:
            check(call.name, json.loads(call.arguments))
            names.add(call.name)
    assert len(names) > 1


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_named_function_is_the_only_one(compiler: Compiler, family: str) -> None:
    grammar = forced_calls(FAMILIES[family].form, [NOW], True, no_special, json_options())
    text = walk(compiler, grammar, random.Random(0))
    assert [(call.name, json.loads(call.arguments)) for call in read(family, text).tool_calls] == [("now", {})]


@pytest.mark.parametrize("family", sorted(name for name, family in FAMILIES.items() if family.form.mark))
def test_strict_functions_are_enforced_in_free_text(compiler: Compiler, family: str) -> None:
    form = FAMILIES[family].form
    grammar = strict_calls(form, [{**OPTIONAL, "strict": True}, WEATHER], False, no_special, json_options())
    assert grammar is not None
    begin = (form.begin + form.head).encode() if form.mark in form.begin + form.head else b""
    matcher = compiler.compile(grammar)
    for byte in b"Let me see. " + begin + b"find":
        matcher.consume(byte)
    text = bytearray(b"Let me see. " + begin + b"find")
    rng = random.Random(1)
    while not _closed(family, text.decode(errors="replace")):
        token = rng.choice([i for i in printable(allowed(matcher, compiler)) if i < END])
        matcher.consume(token)
        text.append(token)
        assert len(text) < 2000, text
    (call,) = read(family, text.decode()).tool_calls
    check(call.name, json.loads(call.arguments))


def _closed(family: str, text: str) -> bool:
    calls = read(family, text).tool_calls
    try:
        return bool(calls) and isinstance(json.loads(calls[0].arguments), dict)
    except ValueError:
        return False


def test_calls_or_structured_content(compiler: Compiler) -> None:
    calls = forced_calls(FAMILIES["hermes"].form, [NOW], True, no_special, json_options())
    matcher = compiler.compile(either(calls, '{"type": "object"}'))
    assert {chr(i) for i in allowed(matcher, compiler) if i < 128} == {"{", "<"}


def test_special_tokens_stand_for_themselves() -> None:
    ids = {"<tool_call>": 7}
    grammar = forced_calls(FAMILIES["hermes"].form, [NOW], True, ids.get, json_options())
    assert "call_0: <[7]> " in grammar.text
    assert '"</tool_call>' not in grammar.text.replace("}\\n</tool_call>", "")
    strict = strict_calls(FAMILIES["hermes"].form, [{**NOW, "strict": True}], False, ids.get, json_options())
    assert strict is not None
    assert "TEXT <[7]>" in strict.text
    assert strict_calls(FAMILIES["deepseek_v4"].form, [NOW], False, {"｜DSML｜": 5}.get, {}) is None


def test_what_cannot_be_enforced_is_refused_by_name() -> None:
    bad = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string", "not": {}}}}}
    with pytest.raises(RequestError, match="parameters of f: #/properties/x/not"):
        forced_calls(FAMILIES["hermes"].form, [bad], True, no_special, json_options())
    text = {"name": "f", "strict": True, "parameters": {"properties": {"x": {"type": "string", "pattern": "a"}}}}
    with pytest.raises(RequestError, match="pattern of a text"):
        forced_calls(FAMILIES["qwen3_coder"].form, [text], True, no_special, json_options())


@pytest.mark.parametrize(
    ("family", "function", "parameter"),
    [
        ("pythonic", "get-weather", "a"),
        ("pythonic", "2d", "a"),
        ("pythonic", "f", "a-b"),
        ("pythonic", "f", "from"),
        ("qwen3_coder", "f", "a>b"),
        ("deepseek_v4", "f", 'a"b'),
    ],
)
def test_names_that_a_form_cannot_write_are_refused(family: str, function: str, parameter: str) -> None:
    """The parser of the form would not read them back."""
    tool = {"name": function, "parameters": {"type": "object", "properties": {parameter: {"type": "string"}}}}
    with pytest.raises(RequestError, match="cannot write the name"):
        forced_calls(FAMILIES[family].form, [tool], True, no_special, json_options())


def test_a_text_that_ends_its_parameter_is_refused() -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"enum": ["a</parameter>b"]}}}}
    with pytest.raises(RequestError, match="a text with </parameter>"):
        forced_calls(FAMILIES["qwen3_coder"].form, [tool], True, no_special, json_options())
