"""Refusals of llguidance name the keyword and its place, in the words of JSON Schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pypto_serving.api.chat.parsers.families import FAMILIES
from pypto_serving.api.grammars.json_schema import SchemaError
from pypto_serving.api.grammars.schema_errors import checked
from pypto_serving.api.grammars.structured import ANY_OBJECT, grammar_of, json_options
from pypto_serving.api.grammars.tag_format import FormatWriter
from pypto_serving.api.grammars.tool_grammar import forced_calls
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.guidance import GrammarError
from pypto_serving.types.guide import Grammar
from pypto_serving.types.structured import StructuredOutputsParams

CASES: list[tuple[dict[str, Any], str]] = [
    ({"type": "string", "format": "iri"}, "format cannot be enforced: the format iri is not supported"),
    (
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "oneOf cannot be enforced: its cases may overlap; use anyOf",
    ),
    (
        {"type": "object", "patternProperties": {"^x": {}, "x$": {}}},
        "patternProperties cannot be enforced: the patterns ^x and x$ may overlap",
    ),
    (
        {"type": "object", "properties": {"x": {}}, "maxProperties": 1},
        "maxProperties cannot be enforced beside properties that are not required",
    ),
    (
        {"type": "string", "pattern": "\\bab"},
        "pattern cannot be enforced: a regex may have no lookarounds or word boundaries",
    ),
]


@pytest.mark.parametrize(("schema", "words"), CASES, ids=str)
def test_a_refusal_names_the_place(schema: dict[str, Any], words: str) -> None:
    inside = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}, "c": {}}, "required": ["a"]}
    for whole, place in ((schema, "#"), ({**inside, "$defs": {"b": schema}}, "#/$defs/b")):
        with pytest.raises(GrammarError) as caught:
            checked(grammar_of(StructuredOutputsParams(json=whole), None))  # type: ignore[arg-type]
        assert (str(caught.value), caught.value.code) == (f"{place}/{words}", "unsupported_schema")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"allOf": [{"anyOf": []}]}, "#/allOf/0/anyOf is an empty list, which nothing satisfies"),
        (
            {"type": "string", "pattern": "^ab$", "maxLength": 1},
            "nothing satisfies this schema: no text has both its length",
        ),
        ({**ANY_OBJECT, "properties": {"a": False}, "required": ["a"]}, "nothing satisfies this schema: required prop"),
    ],
)
def test_a_schema_that_nothing_satisfies(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(GrammarError) as caught:
        checked(grammar_of(StructuredOutputsParams(json=schema), None))  # type: ignore[arg-type]
    assert str(caught.value).startswith(words)


def test_a_reference_to_itself_beside_other_keywords() -> None:
    schema = {"$defs": {"p": {"type": "object", "properties": {"n": {"$ref": "#/$defs/p", "maxProperties": 3}}}}}
    with pytest.raises(GrammarError) as caught:
        checked(Grammar("json_schema", json.dumps({**schema, "$ref": "#/$defs/p"})))
    assert str(caught.value) == (
        "the $ref to #/$defs/p, which refers to itself, cannot be enforced beside other keywords"
    )


def test_what_is_too_long_to_show_has_no_place() -> None:
    for keyword in ("format", "minimum", "type", "patternProperties"):
        value = {f"^x{'a?' * 200}": {}, "^x": {}} if keyword == "patternProperties" else "x" * 1000
        with pytest.raises(GrammarError) as caught:
            checked(Grammar("json_schema", json.dumps({"items": {"type": "string", "required": True}, keyword: value})))
        assert len(str(caught.value)) < 500


def test_a_regex_has_no_places_that_nobody_wrote() -> None:
    with pytest.raises(GrammarError, match=r'^invalid regex "\["'):
        checked(Grammar("regex", "["))


@pytest.mark.parametrize(("schema", "words"), CASES, ids=str)
def test_a_schema_in_other_grammars_names_the_place_too(schema: dict[str, Any], words: str) -> None:
    lark = f'start: a\na: "x" %json {json.dumps({"type": "array", "items": schema})} "y"'
    with pytest.raises(GrammarError) as caught:
        checked(Grammar("lark", lark))
    assert (str(caught.value), caught.value.code) == (f"#/items/{words}", "unsupported_schema")


def test_other_errors_of_lark_stay() -> None:
    for lark in ("start: %json", "start: a", 'start: %json {"type": "string"'):
        with pytest.raises(GrammarError):
            checked(Grammar("lark", lark))


OVERLAP = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
PARTS: list[tuple[Any, str]] = [
    (OVERLAP, "/oneOf cannot be enforced: its cases may overlap"),
    ({"type": "array", "items": {"format": "iri"}}, "/items/format cannot be enforced"),
    (
        {"type": "array", "items": {"type": "string", "pattern": "[z-a]"}},
        "/items/pattern cannot be enforced",
    ),
    ({"type": "integer", "minimum": 5, "maximum": 2}, ": nothing satisfies this schema: minimum"),
]


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "pythonic", "deepseek_v4"])
@pytest.mark.parametrize(("part", "words"), PARTS, ids=lambda value: str(value)[:30])
def test_errors_of_tools_name_the_function_and_its_parameter(family: str, part: Any, words: str) -> None:
    """Each form writes its own grammar; a client with many tools must know which one to mend."""
    tools = [
        {"name": f"f{i}", "parameters": {**ANY_OBJECT, "properties": {"a": a}, "required": ["a"]}}
        for i, a in enumerate(({"type": "integer"}, part, {"type": "null"}))
    ]
    with pytest.raises(GrammarError) as caught:
        checked(forced_calls(FAMILIES[family], tools, False, lambda text: None, json_options()))
    told = words[2:] if family == "hermes" and words[0] == ":" else f"#/properties/a{words}"
    assert str(caught.value).startswith(f"the parameters of f1: {told.removesuffix('minimum')}")


def test_errors_without_a_line_name_the_function() -> None:
    """llguidance says of its limits no place, so each part is compiled alone."""
    costly = {"type": "string", "pattern": "(a{1000}){1000}"}
    parameters = {**ANY_OBJECT, "properties": {"a": costly}, "required": ["a"]}
    tools = [{"name": "now"}, {"name": "f", "parameters": parameters}, {"name": "g"}]
    with pytest.raises(GrammarError, match=r"^the parameters of f: #/properties/a: fuel exhausted"):
        checked(forced_calls(FAMILIES["qwen3_coder"], tools, False, lambda text: None, json_options()))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"type": "regex", "pattern": "(a"}, 'pattern: invalid regex "'),
        ({"type": "regex", "pattern": "a\\"}, "pattern: a pattern ends with a backslash"),
        ({"type": "json_schema", "json_schema": {"items": OVERLAP}}, "json_schema: #/items/oneOf cannot be enforced"),
        (
            {"type": "qwen_xml_parameter", "json_schema": {"properties": {"a": OVERLAP}}},
            "json_schema: #/properties/a/oneOf cannot be enforced",
        ),
        ({"type": "grammar", "grammar": 'root ::= a\na ::= "b" a{2,1}'}, "grammar: "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_of_structural_tags_name_the_format(content: Any, words: str, tokenizer: Tokenizer) -> None:
    tag = {"type": "tag", "begin": "x", "content": content, "end": "</x>"}
    given = {
        "type": "sequence",
        "elements": [{"type": "regex", "pattern": "y"}, tag, {"type": "regex", "pattern": "z"}],
    }
    with pytest.raises((GrammarError, SchemaError)) as caught:
        checked(FormatWriter(json_options(), tokenizer).grammar(given))
    assert str(caught.value).startswith(f"format.elements[1].content.{words}")
