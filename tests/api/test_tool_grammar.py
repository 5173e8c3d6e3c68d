"""Grammars of calls: whatever they allow is read back as calls that match their schemas."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from pypto_serving.api.chat.parsers.families import FAMILIES
from pypto_serving.api.chat.tools import parameter_types
from pypto_serving.api.grammars.structured import json_options
from pypto_serving.api.grammars.tool_grammar import calls_beside_json, either, forced_calls, strict_calls
from pypto_serving.errors import RequestError
from pypto_serving.guidance import Compiler, GrammarError
from tests.api.random_tools import FIND, LOOSE, NOT_NORMAL, Function, random_tool, read
from tests.api.walking import TEMPTING, after, walk

NOW: Function = {"name": "now"}
BEGINNINGS = (
    *('{"name"', '{"name": "find", "', '{ "parameters": {', '{"n\\u0061me": "find"', '{"id": "3", "name": "look", '),
    *('[{"name": "find', "```json\n{", "[find(", '[look(z="x")', "[1, 2", '{"x": 1}', "<|python_tag|>"),
    *("<tool_call>\n", "<tool_call>\n<function=find>\n", "[TOOL_CALLS]", "<｜tool▁calls▁begin｜>"),
    *('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="find">\n', *TEMPTING),
)
"""How calls begin in some form, and what looks like it."""


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler.of_bytes()


def no_special(text: str) -> int | None:
    return None


def test_types_of_parameters_behind_references() -> None:
    """Those that a form writes as plain texts are read as what their schema says."""
    shared = {"a/b": {"type": "integer"}, "A": {"properties": {"n": {"$ref": "#/$defs/a~1b"}}}}
    both = {"$ref": "#/$defs/A", "$defs": shared, "definitions": {"A": {"properties": {"n": {"type": "string"}}}}}
    assert parameter_types(both) == {"n": ["integer"]}
    assert parameter_types({**both, "$ref": "#/definitions/A"}) == {"n": ["string"]}
    assert parameter_types({"$ref": "#", "properties": 5}) == {}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_forced_calls_are_read_back(compiler: Compiler, family: str) -> None:
    """Random calls of random tools; some tools a form cannot write."""
    num_read = 0
    for seed in range(40):
        rng = random.Random(f"{family} {seed}")
        functions, one = [random_tool(rng, i) for i in range(rng.randrange(1, 3))], rng.random() < 0.5
        try:
            grammar = forced_calls(FAMILIES[family], functions, one, no_special, json_options())
            text = walk(compiler, grammar, rng)
        except GrammarError as error:
            assert re.search("nsatisfiable|oneOf", str(error))
            continue
        except RequestError as error:
            assert error.param == "tools"
            continue
        if text is None:
            continue
        message = read(family, functions, text)
        assert (message.reasoning, message.content) == ("", ""), text
        assert len(message.tool_calls) == 1 or (message.tool_calls and not one), text
        for call in message.tool_calls:
            schema = next(f["parameters"] for f in functions if f["name"] == call.name)
            jsonschema.Draft202012Validator(schema).validate(json.loads(call.arguments))
            num_read += 1
    assert num_read > 20


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_named_function_is_the_only_one(compiler: Compiler, family: str) -> None:
    grammar = forced_calls(FAMILIES[family], [NOW], True, no_special, json_options())
    text = walk(compiler, grammar, random.Random(0))
    assert text is not None
    assert [(call.name, json.loads(call.arguments)) for call in read(family, [NOW], text).tool_calls] == [("now", {})]


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("one", [False, True])
def test_calls_or_structured_content(compiler: Compiler, family: str, one: bool) -> None:
    calls = calls_beside_json(FAMILIES[family], [FIND, NOW], one, no_special, json_options())
    properties = {"x": {"type": "integer"}, "name": {"type": "string", "maxLength": 5}, "nail": {"const": 1}}
    content = {"type": "object", "properties": properties, "additionalProperties": False}
    grammar = either(calls, json.dumps(content))
    matcher = compiler.compile(grammar)
    for text in ('{"x": 1}', '{"name": "nop"}', '{"name": "find"}', '{"nail": 1}', '{"x": 1, "name": "now"}'):
        assert after(matcher, text) is not None, text
    for seed in range(10):
        text = walk(compiler, calls, random.Random(seed))
        assert text is not None and after(matcher, text) is not None
        for call in read(family, [FIND, NOW], text).tool_calls:
            schema = FIND["parameters"] if call.name == "find" else {"maxProperties": 0}
            jsonschema.validate(json.loads(call.arguments), schema)
        text = walk(compiler, grammar, random.Random(seed))
        if text is not None and not read(family, [FIND, NOW], text).tool_calls:
            jsonschema.validate(json.loads(text), content)


def test_special_tokens_stand_for_themselves(compiler: Compiler) -> None:
    ids = {"<tool_call>": 7}
    grammar = forced_calls(FAMILIES["hermes"], [NOW], True, ids.get, json_options())
    assert grammar.text.startswith("start: <[7]> ")
    assert '"</tool_call>' not in grammar.text.replace("}\\n</tool_call>", "")
    strict = strict_calls(FAMILIES["hermes"], [{**NOW, "strict": True}], False, ids.get, json_options())
    assert " <[7]>" in strict.text and '"<tool_call>' not in strict.text
    for family, mark in (
        ("deepseek_v4", "｜DSML｜"),
        ("pythonic", "<|python_start|>"),
        ("llama3_json", "<|python_tag|>"),
    ):
        for one in (False, True):
            special = {mark: 7}.get
            strict = strict_calls(FAMILIES[family], [FIND, LOOSE], one, special, json_options())
            assert "<[7]>" in strict.text and mark not in strict.text
            compiler.compile(strict)


MARK = 1
"""A byte that stands for a special token."""


def test_a_text_before_a_special_token_may_hold_what_begins_the_mark(compiler: Compiler) -> None:
    form = FAMILIES["deepseek_v4"]
    tool = {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}, "required": ["x"]}}
    matcher = compiler.compile(forced_calls(form, [tool], True, {"｜DSML｜": MARK}.get, json_options()))
    begun = '<\x01tool_calls>\n<\x01invoke name="f">\n<\x01parameter name="x" string="true">'
    for text, fits in (
        ("a</b></\x01parameter>\n</\x01invoke>\n</\x01tool_calls>", True),
        ("</</\x01parameter>\n", True),
        ("a</\x01invoke", False),
        ("</｜DSML｜", False),
    ):
        assert (after(matcher, begun + text) is not None) is fits, text


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ("7", True),
        ("false", True),
        ("abc", True),
        ("-x", True),
        ("not", True),
        (" a ", True),
        *(("12", False), (" 7", False), ("-1e5", False), ("7x", False), ("abcd", False), ("True", False)),
    ],
)
def test_a_text_that_is_read_as_another_type_is_none(compiler: Compiler, value: str, fits: bool) -> None:
    small = {"type": "integer", "minimum": 5, "maximum": 9}
    schema = {"anyOf": [{"type": "string", "maxLength": 3}, small, {"const": False}]}
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}
    matcher = compiler.compile(forced_calls(FAMILIES["qwen3_coder"], [tool], True, no_special, json_options()))
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n"
    assert (after(matcher, text) is not None) is fits


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("hermes", "f", {"x": {"type": "string", "not": {}}}, "parameters of f: #/properties/x/not"),
    (
        "qwen3_coder",
        "f",
        {"x": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}},
        "x: format of a text",
    ),
    (
        "qwen3_coder",
        "f",
        {"x": {"oneOf": [{"type": "string"}, {"maxLength": 2}]}},
        "x: oneOf with texts that may overlap",
    ),
    ("qwen3_coder", "f", {"x": {"type": "string", "not": {}}}, "parameters of f: #/properties/x/not"),
    ("qwen3_coder", "f", {"x": {"enum": ["a</parameter>b"]}}, "x: a text with </parameter>"),
    ("qwen3_coder", "f", {"x": {"type": "string", "pattern": "(^|x)y"}}, r"x: the pattern '\(\^[|]x\)y' has \^ or"),
    ("qwen3_coder", "f", {"x": {"type": "string", "minLength": 5, "maxLength": 2}}, "x: nothing satisfies minLength 5"),
    ("qwen3_coder", "f", {"x": {"enum": ["5", 7]}}, "'5' is read as another type"),
    ("qwen3_coder", "f", {"x": {"type": "string", "format": "date"}}, "x: format of a text"),
    ("qwen3_coder", "f", {"x": {"$ref": "other#/properties/y"}}, "is not in this schema"),
    ("deepseek_v4", "f", {"x": {"$ref": "#/properties/y"}}, "is not in this schema"),
    ("pythonic", "f", {"x": {"$ref": "#/$defs/A"}}, "'#/[$]defs/A' is not in this schema"),
    ("pythonic", "get-weather", {}, "cannot write the name"),
    ("pythonic", "2d", {}, "cannot write the name"),
    ("pythonic", "f", {"a-b": {}}, "cannot write the name"),
    ("qwen3_coder", "f", {"a>b": {}}, "cannot write the name"),
    ("qwen3_coder", "f", {"a\nb": {}}, "cannot write the name"),
    ("qwen3_coder", "f", {" a": {}}, "cannot write the name"),
    ("qwen3_coder", "f", {"a" * 300: {}}, "cannot write the name"),
    ("deepseek_v4", "f", {'a"b': {}}, "cannot write the name"),
    ("deepseek_v4", "f", {"": {}}, "cannot write the name"),
]


def test_formats_are_refused_without_strict() -> None:
    """What a function calls strict says only where `auto` holds: a forced call is enforced."""
    tool = {"name": "f", "parameters": {"properties": {"x": {"type": "string", "format": "date"}}}}
    with pytest.raises(RequestError, match="parameters of f: #/properties/x: format of a text"):
        forced_calls(FAMILIES["qwen3_coder"], [tool], True, no_special, json_options())


@pytest.mark.parametrize(("family", "function", "properties", "message"), REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(
    family: str, function: str, properties: dict[str, Any], message: str
) -> None:
    """The parser of the form would not read it back."""
    tool = {"name": function, "strict": True, "parameters": {"type": "object", "properties": properties}}
    for write in (forced_calls, strict_calls):
        with pytest.raises(RequestError, match=message) as caught:
            write(FAMILIES[family], [tool], True, no_special, json_options())
        assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("family", "schema", "message"),
    [
        ("hermes", {"type": "string"}, "arguments are an object"),
        ("qwen3_coder", {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, "anyOf of all parameters"),
        ("deepseek_v4", {"required": ["a"], "additionalProperties": False}, "'a' is required"),
        ("deepseek_v4", {"required": ["a"], "additionalProperties": {"type": "integer"}}, "'a' is required"),
        ("pythonic", {"type": "object", "not": {"required": ["a"]}}, "#/not cannot be enforced"),
        ("qwen3_coder", {"properties": {"a": {}}, "dependentRequired": {"a": ["b"]}}, "#/dependentRequired cannot be"),
        ("qwen3_coder", {"properties": {"a": {}}, "const": {"a": "1"}}, "const of all parameters"),
        *(
            (family, {"additionalProperties": {"type": "integer"}}, "additionalProperties of all parameters")
            for family in ("deepseek_v4", "pythonic", "qwen3_coder")
        ),
        (
            "qwen3_coder",
            {"$ref": "#/$defs/F", "required": ["b"], "$defs": {"F": FIND["parameters"]}},
            "required of all parameters beside [$]ref",
        ),
        (
            "hermes",
            {"properties": {"a": {"pattern": "a++"}}},
            "#/properties/a/pattern cannot be enforced: 'a[+][+]' is a regex",
        ),
    ],
)
def test_parameters_that_are_no_plain_object_are_refused(family: str, schema: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        forced_calls(FAMILIES[family], [{"name": "f", "parameters": schema}], True, no_special, json_options())


@pytest.mark.parametrize("family", ["qwen3_coder", "pythonic", "deepseek_v4"])
def test_definitions_stand_with_those_who_refer_to_them(family: str) -> None:
    shared = {f"d{i}": {"const": i} for i in range(1000)} | {"B": {"$ref": "#/$defs/C"}, "C": {"type": "integer"}}
    properties: dict[str, Any] = {f"p{i}": {"type": "integer"} for i in range(300)}
    properties["ref"] = {"$ref": "#/$defs/B"}
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties, "$defs": shared}}
    text = forced_calls(FAMILIES[family], [tool], True, no_special, json_options()).text
    assert len(text) < 100_000 and '"d7"' not in text
    assert '"B": {' in text and '"C": {' in text


@pytest.mark.parametrize("family", ["qwen3_coder", "pythonic", "deepseek_v4"])
def test_definitions_are_not_copied_without_end(family: str) -> None:
    """However little of them gets into the grammar."""
    large = {"type": "string", "properties": {f"x{i}": {} for i in range(1000)}}
    properties = {f"p{i}": {"$ref": "#/$defs/A"} for i in range(300)}
    tool = {"name": "f", "parameters": {"properties": properties, "$defs": {"A": large}}}
    with pytest.raises(RequestError, match="have more than 262144 values in all; refer to fewer"):
        forced_calls(FAMILIES[family], [tool], True, no_special, json_options())


@pytest.mark.parametrize("kinds", [["string"], ["string", "null"]])
def test_definitions_that_refer_to_each_other_end(kinds: list[str]) -> None:
    shared = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 9} for i in range(12)} | {"d12": {"type": kinds}}
    for name in ("d0", "loop"):
        loop = {"type": kinds, "anyOf": [{"$ref": "#/$defs/loop"}]}
        properties = {"x": {"$ref": f"#/$defs/{name}", "type": kinds}}
        tool = {"name": "f", "parameters": {"properties": properties, "$defs": {**shared, "loop": loop}}}
        with pytest.raises(RequestError, match="more than 256 schemas"):
            forced_calls(FAMILIES["qwen3_coder"], [tool], True, no_special, json_options())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_names_come_back_as_the_schema_has_them(compiler: Compiler, family: str) -> None:
    """Python's own parser would make one name of some of them, and not read others."""
    properties = {name: {"type": "boolean"} for name in (*NOT_NORMAL, "\u00e9", "fix")}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    grammar = forced_calls(FAMILIES[family], [{"name": "f", "parameters": schema}], True, no_special, json_options())
    text = walk(compiler, grammar, random.Random(0))
    assert text is not None
    (call,) = read(family, [{"name": "f", "parameters": schema}], text).tool_calls
    assert list(json.loads(call.arguments)) == list(properties)


def test_a_parameter_that_refers_to_nothing_allowed_has_no_value() -> None:
    schema = {"properties": {"x": {"$ref": "#/$defs/none"}}, "$defs": {"none": False}}
    with pytest.raises(RequestError, match="#/properties/x: no value is allowed for it"):
        forced_calls(FAMILIES["qwen3_coder"], [{"name": "f", "parameters": schema}], True, no_special, json_options())


def test_a_pattern_of_a_plain_text_is_ecmascripts(compiler: Compiler) -> None:
    tool = {"name": "f", "parameters": {"properties": {"x": {"type": "string", "pattern": r"^\d.$"}}}}
    matcher = compiler.compile(forced_calls(FAMILIES["qwen3_coder"], [tool], True, no_special, json_options()))
    for value, fits in (("1a", True), ("\u0663a", False), ("1\u2028", False)):
        text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n"
        assert (after(matcher, text) is not None) is fits, value


def test_many_names_are_too_much_for_a_grammar() -> None:
    tools = [{"name": f"{i:0128}", "strict": True} for i in range(1024)]
    for write in (forced_calls, strict_calls):
        with pytest.raises(RequestError, match="the grammar has more than 262144 characters") as caught:
            write(FAMILIES["hermes"], tools, False, no_special, json_options())
        assert caught.value.param == "tools"


def test_the_root_may_be_a_definition(compiler: Compiler) -> None:
    schema = {"$ref": "#/$defs/F", "$defs": {"F": FIND["parameters"]}}
    for family in sorted(FAMILIES):
        tool = {"name": "find", "parameters": schema}
        grammar = forced_calls(FAMILIES[family], [tool], True, no_special, json_options())
        text = walk(compiler, grammar, random.Random(1))
        assert text is not None
        (call,) = read(family, [FIND], text).tool_calls
        jsonschema.validate(json.loads(call.arguments), FIND["parameters"])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_references_may_lead_anywhere_in_the_parameters(compiler: Compiler, family: str) -> None:
    """To all of them, to another one, or to a part of a definition, also through each other."""
    properties = {
        "a": {"type": "integer", "minimum": 3, "maximum": 5},
        "b": {"$ref": "#/properties/a"},
        "c": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        "d": {"$ref": "#/$defs/part0/properties/e"},
    }
    shared = {"part0": {"type": "object", "properties": {"e": {"$ref": "#/properties/b"}}}}
    schema = {"type": "object", "properties": properties, "required": ["b", "c", "d"], "$defs": shared}
    tool = {"name": "f", "parameters": {**schema, "additionalProperties": False}}
    grammar, num_read = forced_calls(FAMILIES[family], [tool], True, no_special, json_options()), 0
    for seed in range(5):
        text = walk(compiler, grammar, random.Random(seed))
        for call in [] if text is None else read(family, [tool], text).tool_calls:
            jsonschema.Draft202012Validator(tool["parameters"]).validate(json.loads(call.arguments))
            num_read += 1
    assert num_read > 0


def test_parts_that_references_lead_to_are_bounded() -> None:
    """Parts of each other are copied each."""
    deep: dict[str, Any] = {"type": "integer", **{f"x{i}": 0 for i in range(10_000)}}
    paths = ["#/properties/deep"]
    for _ in range(28):
        deep = {"type": "object", "properties": {"k": deep}}
        paths.append(f"{paths[-1]}/properties/k")
    properties = {"deep": deep, **{f"p{i}": {"$ref": path} for i, path in enumerate(paths)}}
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    with pytest.raises(RequestError, match="its references lead to more than 262144 values"):
        forced_calls(FAMILIES["pythonic"], [tool], True, no_special, json_options())
