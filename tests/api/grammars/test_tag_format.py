"""Structural tags: which texts each format of XGrammar allows, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pypto_serving.api.grammars import structured
from pypto_serving.api.grammars.json_schema import SchemaError
from pypto_serving.api.grammars.structured import json_options
from pypto_serving.api.grammars.tag_format import MAX_STRUCTURES, MAX_TRIGGERS, lark_of
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.guidance import Compiler, checked
from pypto_serving.types.guide import Grammar
from pypto_serving.types.structured import StructuredOutputsParams
from tests.api.generation.following import COMPILER, accepts

Format = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
ANY = {"type": "any_text"}
DIGIT = {"type": "regex", "pattern": "[0-9]"}


def const(value: str) -> Format:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Format, end: Any) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def parts(*elements: Format, kind: str = "sequence") -> Format:
    return {"type": kind, "elements": list(elements)}


def xml_of(schema: Any) -> Format:
    return {"type": "qwen_xml_parameter", "json_schema": schema}


def xml(**values: Any) -> str:
    return "\n".join(f"<parameter={name}>\n{value}\n</parameter>" for name, value in values.items())


CALLS = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [tag("<f=x>", JSON, "</f>"), tag("<f=y>", const("!"), ["</f>", "</g>"])],
}
LIST = {"type": "tags_with_separator", "tags": CALLS["tags"], "separator": ", "}
GBNF = """root ::= item+  # "x" ::= [
item ::= [^/[\\]] |
  ("[" root
  "]")"""
XML = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}, "required": ["s"]}
STRUCTURES = {"structures": [{"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
FORMATS: dict[str, tuple[Format, list[str], list[str]]] = {
    "const_string": (const('a"\\\n/'), ['a"\\\n/'], ["a", ""]),
    "json_schema": (JSON, ['{"a": 1}'], ['{"a": "x"}', "{}", '{"a": 1, "b": 2}']),
    "open objects": (
        {"type": "json_schema", "json_schema": {**SCHEMA, "additionalProperties": True}},
        ['{"a": 1, "b": "x"}'],
        [r'{"a": 1, "\u0061": "x"}', '{"a": 1, "a": "x"}'],
    ),
    "white space": ({**JSON, "max_whitespace_cnt": 2}, ['{"a":  1}', '{"a":1}'], ['{"a":   1}']),
    "any_text": (ANY, ["", "a\nb"], []),
    "excludes": ({**ANY, "excludes": ["no", "ne"]}, ["n", "nan"], ["a no", "ne"]),
    "regex": ({"type": "regex", "pattern": "[0-9]+/x"}, ["12/x"], ["/x"]),
    "grammar": ({"type": "grammar", "grammar": GBNF}, ["a", "[b]", "[a[b]]c"], ["/", "[]", ""]),
    "grammar of emoji": (
        {"type": "grammar", "grammar": r'root ::= "\U0001F600" [\U0001F600-\U0001F602] "\U00000022\\U00000022"'},
        ['\U0001f600\U0001f601"\\U00000022'],
        ["\\U0001F600"],
    ),
    "sequence": (parts(const("a"), JSON, const("b")), ['a{"a": 1}b'], ["ab"]),
    "text before a const": (parts(ANY, const("END"), JSON), ['x EN END{"a": 1}'], ["END", "x"]),
    "text at last": (parts(const("a"), ANY), ["a", "axy"], ["b"]),
    "or": (parts(const("a"), tag("<", ANY, ">"), kind="or"), ["a", "<x y>"], ["<x", "b", "<x>>"]),
    "optional": ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
    "star": ({"type": "star", "content": const("a")}, ["", "aaa"], ["b"]),
    "plus": ({"type": "plus", "content": const("a")}, ["a", "aaa"], [""]),
    "repeat": ({"type": "repeat", "content": const("a"), "min": 1, "max": 2}, ["a", "aa"], ["", "aaa"]),
    "repeat for ever": ({"type": "repeat", "content": const("a"), "min": 2, "max": -1}, ["aaaa"], ["a"]),
    "tag": (tag("<t>", ANY, "</t>"), ["<t></t>", "<t>a<b</t>"], ["<t>", "<t></t> "]),
    "tag with ends": (tag("<", ANY, ["/>", "]"]), ["<a/>", "<a]"], ["<a>", "<a]]"]),
    "regex in a tag": (tag("<", {"type": "regex", "pattern": ".*"}, ">"), ["<a>", "<>"], ["<a"]),
    "tag without an end": (parts(tag("t:", ANY, ""), const(".")), ["t:abc."], ["t:"]),
    "triggered_tags": (
        CALLS,
        ["", "a <f", '<f=x>{"a": 1}</f>', 'a<f=y>!</g> b <f=x>{"a": 2}</f>'],
        ["<f=z>", "<f=x>", "<f=y>?</f>"],
    ),
    "at least one": ({**CALLS, "at_least_one": True}, ["<f=y>!</f>", "<f=y>!</f> text"], ["", "text", "a<f=y>!</f>"]),
    "stop after first": ({**CALLS, "stop_after_first": True}, ["", "a<f=y>!</f>"], ["<f=y>!</f> "]),
    "just one": ({**CALLS, "stop_after_first": True, "at_least_one": True}, ["<f=y>!</f>"], ["", "a", "<f=y>!</f>b"]),
    "calls without": ({**CALLS, "excludes": ["<g"]}, ["a<f=y>!</f>b"], ["<g", "<f=y>!</f><g"]),
    "calls in a tag": (tag("[", CALLS, "]"), ["[]", "[a<f=y>!</f>b]"], ["[", "[<f=z>]", "[a]b"]),
    "tags_with_separator": (LIST, ["", "<f=y>!</f>", "<f=y>!</f>, <f=y>!</g>"], ["<f=y>!</f>, ", "a"]),
    "one of a list": (
        {**LIST, "at_least_one": True, "stop_after_first": True},
        ["<f=y>!</f>"],
        ["", "<f=y>!</f>, <f=y>!</f>"],
    ),
    "dispatch": ({"type": "dispatch", "rules": [["n=", DIGIT]]}, ["a", "n=1 n=2"], ["n=x"]),
    "dispatch once": ({"type": "dispatch", "rules": [["n=", const("1")]], "loop": False}, ["a", "a n=1"], ["n=1 "]),
    "repeat never": (
        parts(const("a"), {"type": "repeat", "content": const("b"), "min": 0, "max": 0}),
        ["a"],
        ["ab", ""],
    ),
    "tags without types": (
        {"type": "tags_with_separator", "tags": [{"begin": "<", "content": DIGIT, "end": ">"}], "separator": ""},
        ["", "<1>", "<1><2>"],
        ["<"],
    ),
    "dispatch again": ({"type": "dispatch", "rules": [["n=", DIGIT]], "loop": None}, ["n=1 n=2"], ["n=x"]),
    "nothing": (const(""), [""], ["a"]),
    "regex of slashes": ({"type": "regex", "pattern": "a/\\/[/]\\\\\n"}, ["a///\\\n"], ["a"]),
    "regex of nothing": (tag("<", {"type": "regex", "pattern": ""}, ">"), ["<>"], ["<a>"]),
    "qwen_xml_parameter": (
        {"type": "qwen_xml_parameter", "json_schema": XML},
        [xml(n=1, s="a <b") + "\n", xml(s=""), "\n" + xml(s="1")],
        [xml(n=1), xml(n="x", s=""), "<parameter=s></parameter>"],
    ),
    "qwen_xml": ({**JSON, "style": "qwen_xml"}, [xml(a=1), xml(a=1) + "\n"], [xml(a="x"), ""]),
    "qwen_xml of texts": (
        xml_of({"properties": {"a": {"enum": ["x", "y z"]}, "b": {"pattern": "^\\d$"}}}),
        [xml(a="x"), xml(a="y z", b="1"), ""],
        [xml(a='"x"'), xml(b="12"), xml(b="\u0663"), xml(c="x")],
    ),
    "qwen_xml of a definition": (
        xml_of({"$ref": "#/$defs/A", "$defs": {"A": SCHEMA}}),
        [xml(a=1)],
        [xml(a="x"), ""],
    ),
    "qwen_xml of some types": (
        xml_of({"properties": {"a": {"type": ["string", "null"]}}, "required": ["a"]}),
        [xml(a="null"), xml(a="nul")],
        [xml(a="None")],
    ),
    "qwen_xml in a call": (
        tag("<function=f>\n", {**JSON, "style": "qwen_xml"}, "\n</function>"),
        [f"<function=f>\n{xml(a=1)}\n</function>", f"<function=f>\n{xml(a=1)}\n\n</function>"],
        ["<function=f>\n\n</function>"],
    ),
    "structures": (
        STRUCTURES,
        ["a", 'a <f=x>{"a": 1}</f> b'],
        ["<f>", "<f=x>1</f>"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def special(checkpoint: Path) -> Compiler:
    """The compiler of a checkpoint with special tokens."""
    size = Tokenizer.load(checkpoint).size
    return Compiler.of(str(checkpoint), size, (2,))


def grammar_of(given: Any, tokenizer: Tokenizer) -> Grammar:
    tag = given if isinstance(given, dict) and "structures" in given else {"format": given}
    return lark_of(tag, json_options(), tokenizer)


@pytest.mark.parametrize("name", FORMATS)
def test_texts_of_formats(name: str, tokenizer: Tokenizer) -> None:
    given, right, wrong = FORMATS[name]
    matcher = COMPILER.compile(checked(grammar_of(given, tokenizer)))
    for text in right:
        assert accepts(matcher, text), text
    for text in wrong:
        assert not accepts(matcher, text), text


START, STOP = "<|im_start|>", "<|end|>"
SPECIAL: dict[str, tuple[Format, list[str], list[str]]] = {
    "const": (const(f"a{START}b{STOP}"), [f"a{START}b{STOP}"], ["ab", "a", f"a{START}b"]),
    "many": (const(START * 2000), [START * 2000], [START]),
    "ends": (tag("<", ANY, [f"{STOP}x", ">"]), [f"<a{STOP}x", "<a>"], [f"<a{STOP}", "<a"]),
    "tag": (tag(START, ANY, f".{STOP}!"), [f"{START}a.{STOP}!"], [f"{START}a{STOP}!", f"{START}a.{STOP}"]),
    "token": (tag(START, ANY, {"type": "token", "token": STOP}), [f"{START}a{STOP}"], [f"{START}a"]),
    "alone": ({"type": "token", "token": 1}, [START], [STOP, "a"]),
    "trigger": (
        {"type": "triggered_tags", "triggers": [START], "tags": [tag(f"{START}x", const("y"), STOP)]},
        ["a", f"a{START}xy{STOP}b"],
        [f"{START}y{STOP}"],
    ),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_tokens_stand_for_themselves(name: str, tokenizer: Tokenizer, special: Compiler) -> None:
    given, right, wrong = SPECIAL[name]
    matcher = special.compile(checked(grammar_of(given, tokenizer)))
    for text in right:
        assert accepts(matcher, tokenizer.encode(text)), text
    for text in wrong:
        assert not accepts(matcher, tokenizer.encode(text)), text


TOO_LONG = "the grammar has more than 262144 characters up to here; send less"
REFUSED: list[tuple[Any, str]] = [
    (5, "format is 5, but must be an object with one of the types const_string"),
    ({"type": "any_tokens"}, "format is of type 'any_tokens'"),
    (
        parts(parts(const("a"), {"type": "exclude_token"})),
        r"format.elements\[0\].elements\[1\] is of type 'exclude_token'",
    ),
    ({**ANY, "max_tokens": 5}, "format.max_tokens is not supported"),
    ({**ANY, "end": "x"}, "format has 'end', but any_text knows only excludes"),
    ({**JSON, "style": "glm_xml"}, "only json and qwen_xml"),
    ({**JSON, "any_order": True}, "any_order is not"),
    (parts(ANY, JSON), "free text must be the content of a tag"),
    ({"type": "plus", "content": CALLS}, "free text must be"),
    (tag("a", ANY, 5), "format.end is 5"),
    ({"type": "tag", "begin": {"type": "token", "token": 10**6}, "content": ANY, "end": ""}, "a token of this model"),
    ({"type": "repeat", "min": 2, "max": 1, "content": ANY}, "max must not be below min"),
    ({"type": "grammar", "grammar": 'start: "a"'}, "must be GBNF with a rule root"),
    (
        parts(const("a"), {"type": "grammar", "grammar": "root ::= nope"}),
        r"format.elements\[1\].grammar: a grammar refers to a rule 'nope', which it does not have",
    ),
    ({"type": "grammar", "grammar": 'root ::= "\\U00110000"'}, r"has \\U00110000, which is no character"),
    ({"type": "grammar", "grammar": "root ::= " + "[" * 30_000}, "that nothing closes"),
    ({"type": "grammar", "grammar": "root ::= " + '"\\' * 30_000}, "that nothing closes"),
    ({"type": "dispatch", "rules": [["a"]]}, r"format.rules\[0\] is \['a'\]"),
    ({**CALLS, "triggers": ["x"]}, "must begin with one of the triggers"),
    (
        xml_of({"properties": {"a>": {}}}),
        r"format.json_schema: #/properties/a>: this form of calls cannot write the name",
    ),
    (xml_of({"properties": {"a": {"type": "string", "format": "date"}}}), "#/properties/a: format of a text"),
    (
        xml_of({"properties": {"a": {"anyOf": [{"type": "string", "format": "date"}]}}}),
        "#/properties/a: format of a text",
    ),
    (
        xml_of({"properties": {"a": {"oneOf": [{"type": "string"}, {"maxLength": 2}]}}}),
        "oneOf with texts that may overlap",
    ),
    (xml_of({"properties": {"a": 1}}), "#/properties/a is 1, but must"),
    (xml_of({"properties": {"a": {"not": {}}}}), "#/properties/a/not cannot be enforced"),
    (xml_of({"properties": [1]}), "#/properties is"),
    (xml_of({"required": 5}), "#/required is 5"),
    (xml_of({"required": ["a"], "additionalProperties": False}), "'a' is required, but properties allows no value"),
    (xml_of({"required": ["a"], "additionalProperties": {"type": "integer"}}), "'a' is required, but properties"),
    (xml_of({"minProperties": 1}), "minProperties of all parameters"),
    (xml_of({"not": {}}), "#/not cannot be enforced"),
    (xml_of({"type": "object", "if": {}}), "#/if cannot be enforced"),
    (xml_of({"type": "string"}), "#/type is string"),
    (xml_of({"const": {}}), "const of all parameters"),
    (
        xml_of({"$ref": "#/$defs/A", "required": ["b"], "$defs": {"A": SCHEMA}}),
        "required of all parameters beside [$]ref",
    ),
    (xml_of(5), "format.json_schema is 5"),
    ({**JSON, "json_schema": {"not": {}}}, "format.json_schema: #/not cannot"),
    ({**JSON, "json_schema": False}, "format.json_schema is False"),
    ({**JSON, "max_whitespace_cnt": -1}, "max_whitespace_cnt is -1"),
    ({"type": "regex", "pattern": "a\\"}, "ends with a backslash"),
    ({**CALLS, "triggers": ["<f=", 5]}, "format.triggers is"),
    ({**CALLS, "triggers": [f"<f={i}" for i in range(MAX_TRIGGERS + 1)]}, "has 129 triggers, but may have 128"),
    ({**CALLS, "tags": [{**CALLS["tags"][0], "x": 1}]}, r"format.tags\[0\] has 'x'"),
    ({**CALLS, "tags": [const("<f=")]}, r"format.tags\[0\] is of type const_string, but must be a tag"),
    (tag("a", {**ANY, "x": 1}, {"type": "token", "token": 1}), "format.content has 'x'"),
    (tag("a", parts(*[const("b")] * 300, kind="or"), ["c" * 9] * 3000), TOO_LONG),
    (tag("a", parts(*[ANY] * 2000, kind="or"), ["c" * 9] * 2000), TOO_LONG),
    (tag("a", parts(*[const("b")] * 2000, kind="or"), "c" * 2000), TOO_LONG),
    (tag("a", parts(*[ANY] * 2000, kind="or"), f"{START}{'c' * 2000}"), TOO_LONG),
    (const("a" * 300_000), TOO_LONG),
    (xml_of({"properties": {f"p{i}": {"enum": ["x" * 1000]} for i in range(300)}}), TOO_LONG),
    ({**JSON, "style": "qwen_xml", "any_order": True}, "any_order is not"),
    ({**JSON, "style": "qwen_xml", "max_whitespace_cnt": 2}, "format has max_whitespace_cnt, but the style qwen_xml"),
    ({**JSON, "any_order": 1}, "format.any_order is 1, but must be true or false"),
    ({**CALLS, "at_least_one": "false"}, "format.at_least_one is 'false', but must be true or false"),
    ({**CALLS, "stop_after_first": []}, r"format.stop_after_first is \[\], but must be true or false"),
    ({"type": "dispatch", "rules": [["n=", DIGIT]], "loop": "no"}, "format.loop is 'no', but must be true or false"),
    ({**ANY, "excludes": 0}, "format.excludes is 0, but must be a list"),
    ({**STRUCTURES, "x": 1}, "it has 'x', but may have structures, triggers, type"),
    ({**STRUCTURES, "format": ANY}, "it has 'structures', but may have format, type"),
    ({"structures": [{**STRUCTURES["structures"][0], "x": 1}], "triggers": ["<"]}, r"structures\[0\] has 'x', but may"),
    ({"structures": [{"begin": "", "schema": {}, "end": ""}] * (MAX_STRUCTURES + 1), "triggers": []}, "may have 128"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_written_is_named(given: Any, words: str, tokenizer: Tokenizer) -> None:
    with pytest.raises((ValueError, SchemaError), match=words):
        grammar_of(given, tokenizer)


def test_a_grammar_alone_reads_the_same_escapes(tokenizer: Tokenizer) -> None:
    params = StructuredOutputsParams(grammar=r'root ::= "\U0001F600" [\U0001F600-\U0001F602]')
    matcher = COMPILER.compile(checked(structured.grammar_of(params, tokenizer)))
    assert accepts(matcher, "\U0001f600\U0001f602") and not accepts(matcher, "\U0001f600\U0001f603")
