"""Refusals of llguidance name the keyword and its place, in the words of JSON Schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pypto_serving.api.generation.schema_errors import checked
from pypto_serving.api.generation.structured import ANY_OBJECT, grammar_of
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
]


@pytest.mark.parametrize(("schema", "words"), CASES, ids=str)
def test_a_refusal_names_the_place(schema: dict[str, Any], words: str) -> None:
    inside = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}, "c": {}}, "required": ["a"]}
    for whole, place in ((schema, "#"), ({**inside, "$defs": {"b": schema}}, "#/$defs/b")):
        with pytest.raises(GrammarError) as caught:
            checked(grammar_of(StructuredOutputsParams(json=whole), None))  # type: ignore[arg-type]
        assert (str(caught.value), caught.value.error_code) == (f"{place}/{words}", "unsupported_schema")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"allOf": [{"anyOf": []}]}, "#/allOf/0/anyOf is an empty list, which nothing satisfies"),
        ({**ANY_OBJECT, "properties": {"a": False}, "required": ["a"]}, "nothing satisfies this schema: required prop"),
    ],
)
def test_a_schema_that_nothing_satisfies(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(GrammarError) as caught:
        checked(grammar_of(StructuredOutputsParams(json=schema), None))  # type: ignore[arg-type]
    assert str(caught.value).startswith(words)


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
    assert (str(caught.value), caught.value.error_code) == (f"#/items/{words}", "unsupported_schema")


def test_other_errors_of_lark_stay() -> None:
    for lark in ("start: %json", "start: a", 'start: %json {"type": "string"'):
        with pytest.raises(GrammarError):
            checked(Grammar("lark", lark))
