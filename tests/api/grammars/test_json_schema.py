"""What a schema allows is valid under it: cases for each keyword, and models that like to write escapes."""

from __future__ import annotations

import json
import random
from typing import Any
from urllib.parse import unquote

import jsonschema
import pytest

from pypto_serving.api.grammars import json_schema
from pypto_serving.api.grammars.json_schema import SchemaError, prepare
from pypto_serving.guidance import GrammarError
from tests.api.generation.following import accepts, matcher_of, walk

Schema = dict[str, Any]
NUMBER: Schema = {"type": "integer"}
ODD = {"type": "object", "properties": {"a": NUMBER}, "required": ["a"]}


def tagged(i: int) -> Schema:
    return {"type": "object", "properties": {"kind": {"const": i}}, "required": ["kind"]}


PETS: Schema = {
    "cat": {"type": "object", "properties": {"kind": {"const": "cat"}, "n": NUMBER}, "required": ["kind"]},
    "dog": {
        "type": "object",
        "properties": {"kind": {"$ref": "#/$defs/name"}, "of": {"$ref": "#/$defs/pet"}, "n": NUMBER},
        "required": ["kind"],
    },
    "pet": {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]},
    "name": {"enum": ["dog"]},
}
CASES: dict[str, tuple[Schema, list[Any], list[Any]]] = {
    "type": ({"type": ["integer", "null"]}, [3, -1, None], [1.5, "3", [], {}, True]),
    "enum": ({"enum": [1, "a", None, [2], {"b": 3}]}, [1, "a", None, [2], {"b": 3}], [2, "b", [], [2, 2], {"b": 4}]),
    "const": ({"const": {"a": [1.5, "\t\\"]}}, [{"a": [1.5, "\t\\"]}], [{"a": [1.5]}, {"a": [1.5, "\\"]}, {}]),
    "const of a float": ({"const": 2.0}, [2], [3, "2"]),
    "bounds": ({"type": "number", "minimum": -1.5, "exclusiveMaximum": 10}, [-1.5, 0, 9.99], [-1.51, 10, 11, 1e2]),
    "bounds of draft 4": ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3, 2]),
    "two of multipleOf": ({"type": "integer", "allOf": [{"multipleOf": 0.6}, {"multipleOf": 4}]}, [12, -24], [3, 4, 6]),
    "minus zero": ({"type": "number", "exclusiveMinimum": -0.0, "maximum": 0.25}, [0.25, 0.1], [0, -0.1, -0.0]),
    "bounds in one unit": (
        {"type": "number", "anyOf": [{"exclusiveMinimum": 2}, {"exclusiveMaximum": 0, "minimum": -5}], "maximum": 2.5},
        [2.1, 2.5, -0.1, -5],
        [2, 2.6, 0, -0.0, -5.1],
    ),
    "bounds on both sides of a unit": ({"minimum": -0.5, "exclusiveMaximum": 0}, [-0.5, -0.1], [0, -0.0, -1]),
    "bounds of many digits": (
        {"minimum": 1.0000000000000002, "exclusiveMaximum": 184.27100000000002},
        [1.1, 184.1],
        [1, 184.27100000000002],
    ),
    "bounds of 64 bits": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        [2**53 - 1, 1 - 2**53],
        [2**63, -(2**63) - 1],
    ),
    "multipleOf": ({"type": "number", "multipleOf": 0.25}, [0.75, -0.25, 3], [0.3, 1.1]),
    "lengths": ({"type": "string", "minLength": 2.0, "maxLength": 3}, ["ab", "äöü", "😀😀"], ["a", "abcd", 5]),
    "pattern": ({"type": "string", "pattern": "^a|b$"}, ["ax", "xb"], ["xax", ""]),
    "pattern without anchors": ({"pattern": "[0-9]{2}"}, ["x12y", 5], ["x1y"]),
    "items": ({"type": "array", "items": NUMBER, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], ["a"], [1, 2, 3]]),
    "prefixItems": ({"prefixItems": [NUMBER, {}], "items": False}, [[], [1, None]], [["a"], [1, None, 2]]),
    "items of draft 7": ({"items": [NUMBER], "allOf": [{}], "additionalItems": False}, [[1]], [["a"], [1, 2]]),
    "additionalItems alone": ({"prefixItems": [NUMBER], "items": False, "additionalItems": {}}, [[1]], [["a"], [1, 2]]),
    "properties": (ODD, [{"a": 1}, {"a": 1, "b": "x"}], [{}, {"a": "x"}, {"b": 1}]),
    "additionalProperties": ({**ODD, "additionalProperties": {"const": 0}}, [{"a": 1, "b": 0}], [{"a": 1, "b": 1}]),
    "closed": ({**ODD, "additionalProperties": False}, [{"a": 1}], [{"a": 1, "b": 1}]),
    "patternProperties": (
        {"type": "object", "patternProperties": {r"^\d": NUMBER}, "additionalProperties": False},
        [{}, {"1": 2}],
        [{"1": "x"}, {"a": 1}],
    ),
    "patterns and names": (
        {"type": "object", "properties": {"ab": {}}, "patternProperties": {"^a": NUMBER}},
        [{"ab": 1, "b": "x"}],
        [{"ab": "x"}, {"ac": "x"}],
    ),
    "required": ({"type": "object", "required": ["x"]}, [{"x": 1}, {"x": 1, "y": 2}], [{}, {"y": 1}]),
    "minProperties": ({"type": "object", "required": ["x"], "minProperties": 2}, [{"x": 1, "y": 2}], [{"x": 1}, {}]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    "allOf": ({"allOf": [ODD, {"required": ["b"]}]}, [{"a": 1, "b": 2}], [{"a": 1}]),
    "anyOf": ({"anyOf": [{"type": "string", "maxLength": 1}, {"const": 12}]}, ["a", 12], ["ab", 13]),
    "oneOf": ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ["a", None], [1]),
    "oneOf of references": (
        {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": PETS},
        [{"kind": "cat", "n": 1}, {"kind": "dog", "of": {"kind": "cat"}}],
        [{"kind": "dog", "n": "x"}, {"kind": "cow"}, {}],
    ),
    "oneOf beside anyOf": (
        {"anyOf": [{"type": "string"}, {"const": 1}], "oneOf": [{"const": 1}, {"enum": ["a", 2]}]},
        ["a", 1],
        [2, "b"],
    ),
    "oneOf of many values": (
        {"oneOf": [{"const": i, "title": f"number {i}"} for i in range(300)] + [{"enum": ["a", None]}]},
        [0, 299, "a", None],
        [300, "b"],
    ),
    "oneOf of closed objects": (
        {"oneOf": [{**ODD, "additionalProperties": False}, {"type": "object", "required": ["b"]}, {"type": "null"}]},
        [{"a": 1}, {"b": 1}, None],
        [{"a": 1, "b": 1}, {"a": "x"}, {}, 1],
    ),
    "oneOf of some properties": (
        {"properties": {"x": NUMBER}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]},
        [{"a": 1}, {"x": 1, "b": 1, "d": 2}],
        [{}, {"a": 1, "b": 2}, {"x": "y", "a": 1}, 5],
    ),
    "anyOf beside others": (
        {"anyOf": [{"required": ["b"]}, {"maxProperties": 1}], **ODD},
        [{"a": 1, "b": 1}, {"a": 1}],
        [{"b": 1}, {"a": 1, "c": 1}],
    ),
    "$ref": (
        {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "array", "items": {"$ref": "#/$defs/a~1b%25"}}}},
        [[], [[], [[]]]],
        [1, [[1]]],
    ),
    "$ref to a place": ({"properties": {"a": NUMBER, "b": {"$ref": "#/properties/a"}}}, [{"b": 2}], [{"b": "x"}]),
    "$ref with a base": (
        {"$id": "http://x/", "$ref": "http://x/#/$defs/a", "$defs": {"a": {"type": "null"}}},
        [None],
        [1],
    ),
    "$ref in a part with $id": (
        {"$defs": {"a": {"$id": "/a", "$ref": "#/$defs/b", "$defs": {"b": NUMBER}}, "b": {}}, "$ref": "#/$defs/a"},
        [1],
        ["x"],
    ),
    "annotations": ({"title": "T", "deprecated": True, "x-y": 1, "$comment": "c", **NUMBER}, [1], ["x"]),
    "orphans": ({"then": False, "else": False, "minContains": 9, "maxContains": 0, **NUMBER}, [1], ["x"]),
    "neutral values": ({"uniqueItems": False, "dependentRequired": {}, "propertyNames": True}, [[1, 1], {"a": 1}], []),
    "date": ({"type": "string", "format": "date"}, ["2024-02-29", "2000-02-29", "2023-12-31", "1900-02-28"], [
        "2023-02-29", "1900-02-29", "2024-02-30", "2024-04-31", "0000-01-01", "2024-13-01", "2024-02-29x",
    ]),
    "date-time": ({"format": "date-time"}, ["2024-02-29T23:59:59.5Z", "1996-02-29t00:00:00+01:00"], [
        "2100-02-29T00:00:00Z", "2024-02-29T00:00:60Z", "2024-02-29T00:00:00", "2024-02-29",
    ]),
    "time": ({"format": "time", "pattern": "Z$"}, ["00:00:00Z"], ["00:00:00+00:00", "00:00:60Z", "24:00:00Z"]),
    "hostname": ({"format": "hostname"}, ["a", "ab-c.d--e", "ab.c-d"], [
        "ab--c", "xn--x", "a.", "-a", "a" * 64, "a." * 127 + "a",
    ]),
    "$schema": ({"$schema": "http://json-schema.org/draft-07/schema#", "const": "x"}, ["x"], ["y"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_taken_is_valid(name: str) -> None:
    schema, valid, invalid = CASES[name]
    matcher = matcher_of(schema)
    for instance in valid:
        assert accepts(matcher, json.dumps(instance, ensure_ascii=False)), instance
    for instance in invalid:
        assert not accepts(matcher, json.dumps(instance, ensure_ascii=False)), instance


REFUSED: list[tuple[Schema, str]] = [
    ({"items": {"not": {}}}, "#/items/not cannot be enforced: the keyword not"),
    ({"$ref": "#/$defs/b", "$defs": {"b": {"uniqueItems": True}}}, "#/$defs/b/uniqueItems"),
    ({"$ref": "#/$defs/c"}, "#/$ref cannot be enforced: '#/$defs/c' is not in this schema"),
    ({"$ref": "other.json#/a"}, "'other.json#/a' is not in this schema"),
    ({"$ref": "#anchor", "$defs": {"a": {"$anchor": "anchor"}}}, "'#anchor' is not in this schema"),
    ({"enum": ["a", "b\x00"]}, "a text with U+0000"),
    ({"pattern": "a(?!b)"}, "a regex with look-around"),
    ({"patternProperties": {"[": {}}}, "a bracket that does not close"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
    ({"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}]}, "oneOf"),
    ({"oneOf": [{"required": ["a"]}, {"required": ["a"]}]}, "oneOf"),
    ({"oneOf": [{"required": ["a"]}, ODD]}, "oneOf"),
    ({"oneOf": [{"const": 1}, {"enum": [1, "a"]}]}, "oneOf"),
    (
        {"items": {"oneOf": [{"required": [str(i)]} for i in range(65)]}},
        "#/items/oneOf cannot be enforced: it has 65 cases, but may have 64 if they do not all list their values",
    ),
    (
        {"anyOf": [{"oneOf": [tagged(i) for i in range(64)]} for _ in range(3)]},
        "#/anyOf/2/oneOf cannot be enforced: the cases of all oneOf take more than 8192 comparisons; use anyOf",
    ),
    ({"patternProperties": {r"^\d": {}, "^[0-9]": {"type": "null"}}}, "two of the patterns are the same"),
    ({"patternProperties": {"^a": {}, "b$": {}}}, "not disjoint"),
    ({"minProperties": 2}, "more than one above the required"),
    ({"minimum": 2**60}, "is not below 2**53"),
    ({"minimum": 1e300}, "is not below 2**53"),
    ({"const": [9.065662071724665]}, "more than 15 digits"),
    ({"maximum": 1.5e-300}, "more than 15 digits"),
    ({"exclusiveMinimum": 0, "maximum": 0.5, "minimum": "a"}, "#/minimum is 'a', but must be a number"),
    ({"properties": {"a": {"type": "strin"}}}, "#/properties/a/type is 'strin', but must be one or more of array"),
    ({"enum": []}, "#/enum is [], but must be a list that is not empty"),
    ({"items": {"required": "a"}}, "#/items/required is 'a', but must be a list of texts"),
    ({"properties": {"a": 3}}, "#/properties/a is 3, but must be a schema"),
    ({"multipleOf": 0}, "#/multipleOf is 0, but must be a number above 0"),
    ({"minLength": -1}, "#/minLength is -1, but must be a whole number of at least 0"),
    ({"anyOf": {}}, "#/anyOf is {}, but must be a list"),
    ({"allOf": [{"multipleOf": 65536}, {"multipleOf": 65537}]}, "65537 and another one are too large together"),
]


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_enforced_is_named(schema: Schema, words: str) -> None:
    with pytest.raises((SchemaError, GrammarError)) as caught:
        matcher_of(schema)
    assert words in str(caught.value)


def test_a_reference_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often cases of a `oneOf` are compared: a long one, again and again, would take seconds."""
    seen: list[str] = []
    monkeypatch.setattr(json_schema, "unquote", lambda ref: seen.append(ref) or unquote(ref))
    long = {"x": {"$ref": "#/$defs/" + "%41" * 100}, "A" * 100: {"$ref": "#/$defs/x"}}
    properties = [{"a": {"$ref": "#/$defs/x"}, "k": {"const": k}} for k in range(30)]
    cases = [{"type": "object", "required": ["a", "k"], "properties": each} for each in properties]
    prepare({"$defs": long, "oneOf": cases}, {})
    assert 0 < len(seen) == len(set(seen))


def test_definitions_that_nothing_refers_to_may_say_anything() -> None:
    assert accepts(matcher_of({"$defs": {"a": {"not": {}}}, "definitions": {"b": {"if": {}}}, "type": "null"}), "null")


OPEN: list[Schema] = [
    ODD,
    {**ODD, "additionalProperties": {"type": "string"}},
    {"type": "object", "patternProperties": {"^a": NUMBER}},
    {"type": "object", "additionalProperties": {"type": "string"}, "required": ["a"]},
    {"type": "object", "required": ["a"], "minProperties": 2},
    {"type": "object", "properties": {"a\nb": NUMBER}, "patternProperties": {"^1": NUMBER}},
    {"type": "object", "required": ["a"], "maxProperties": 2, "properties": {"a": {"const": "\\u0061"}}},
]
SPELLED = [r'{"a": 1, "\u0061": "x"}', r'{"\u0061b": "x"}', r'{"a": 1, "\u0061": 2}', r'{"a\nb": 1, "a\u000ab": "x"}']


@pytest.mark.parametrize("schema", OPEN, ids=str)
def test_no_key_is_another_one_in_disguise(schema: Schema) -> None:
    """Models that like to write escapes find none that spells a named key, nor one for a pattern."""
    matcher = matcher_of(schema)
    assert not any(accepts(matcher, text) for text in SPELLED)
    ended = 0
    for seed in range(15):
        text = walk(matcher, random.Random(seed), liked=b'\\u061a"')
        if text is not None:
            pairs = json.loads(text, object_pairs_hook=list)
            keys = [key for key, _ in pairs]
            assert keys.count("a") <= 1 and keys.count("a\nb") <= 1, text
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            ended += 1
    assert ended > 10
