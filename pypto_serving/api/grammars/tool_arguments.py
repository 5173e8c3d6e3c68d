"""Write the arguments of a call as each form of calls has them, so that its parser reads back valid ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pypto_serving.api.chat.parsers import dsml, qwen3_coder
from pypto_serving.api.chat.tools import types_of
from pypto_serving.api.grammars.ecma import to_rust
from pypto_serving.api.grammars.grammar_text import ANY, GrammarText, any_of, joined, regex, without
from pypto_serving.api.grammars.json_schema import SchemaError
from pypto_serving.api.grammars.references import DEFINITIONS
from pypto_serving.api.grammars.tool_schema import (
    ParameterText,
    Property,
    Schema,
    as_object,
    is_any_object,
    properties_of,
    read_texts,
    read_words,
)
from pypto_serving.util import brief

XML_END, DSML_END = qwen3_coder.PARAMETER_END, dsml.PARAMETER_END
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""Escapes, classes and characters of a pattern."""
_SPACE = r"[\s\x1c-\x1f]*"
_LOOKS = {
    "null": ("null|None", ""),
    "boolean": ("true|false|True|False", ""),
    "integer": ("-?[0-9]", ANY),
    "number": ("-?[0-9]", ANY),
    "array": (r"\[", ANY),
    "object": (r"\{", ANY),
}
"""What texts look like that the parser of Qwen3-Coder reads as another type, and what may follow that.

Numbers, lists and objects differ from text in how they begin, since a grammar cannot go back and read a text.
"""


def json_arguments(rules: GrammarText, schema: Schema) -> str:
    """Write a JSON object."""
    own, definitions = _split_definitions(schema)
    return rules.json({**as_object(own), **definitions})


def python_arguments(rules: GrammarText, schema: Schema) -> str:
    """Write `a=1, b="x"`: required ones first, then any of the others."""
    if is_any_object(schema):
        one = rules.new(rf'/[^\W\d]\w{{0,60}}/ "=" {rules.json({})}')
        return f'({one} (", " {one})*)?'
    parts = _parts(rules, schema, lambda one: _python_parameter(rules, one))
    needed = [part for part, required in parts if required]
    tail = alone = ""
    for part in [part for part, required in reversed(parts) if not required]:
        alone = rules.new(" | ".join(filter(None, [joined(part, tail), alone])))
        tail = rules.new(f'(", " {part})? {tail}'.strip())
    if needed:
        return joined(' ", " '.join(needed), tail)
    return f"{alone}?" if alone else ""


def xml_arguments(rules: GrammarText, schema: Schema, gap: str = '"\\n"') -> str:
    """Write `<parameter=a>`, a line with the value, and `</parameter>` for each, with `gap` after them."""
    if is_any_object(schema):
        name = regex(qwen3_coder.NAME.pattern)
        return f'("<parameter=" {name} ">" {rules.until([XML_END])} {gap})*'
    return _each(_parts(rules, schema, lambda one: _xml_parameter(rules, one, gap)))


def dsml_arguments(rules: GrammarText, schema: Schema) -> str:
    """Write texts as they are with `string="true"`, other values as JSON."""
    if is_any_object(schema):
        name, value = regex(r'[^"<>]{1,60}'), _dsml_any(rules)
        return f"({rules.text(_dsml_head())} {name} {value})*"
    return _each(_parts(rules, schema, lambda one: _dsml_parameter(rules, one)))


def _parts(rules: GrammarText, schema: Schema, write: Callable[[Property], str]) -> list[tuple[str, bool]]:
    """Write each property by itself; say which are required. Errors name their places."""
    parts = []
    for one in properties_of(schema):
        with rules.at(f"#/properties/{one.name}"):
            parts.append((write(one), one.required))
    return parts


def _each(parts: Sequence[tuple[str, bool]]) -> str:
    return joined(*(part if needed else f"({part})?" for part, needed in parts))


def _python_parameter(rules: GrammarText, one: Property) -> str:
    _check_name(one, str.isidentifier)
    return rules.new(f"{rules.text(one.name + '=')} {rules.json(one.schema)}")


def _check_name(one: Property, can_write: Callable[[str], Any]) -> None:
    if not can_write(one.name):
        raise SchemaError(f"this form of calls cannot write the name {brief(one.name)}")


def _xml_parameter(rules: GrammarText, one: Property, gap: str) -> str:
    _check_name(one, qwen3_coder.NAME.fullmatch)
    kinds = types_of(one.schema, one.schema)
    others = [kind for kind in kinds if kind != "string"]
    if others == kinds and kinds:
        values = [f'{rules.json(one.schema)} "\\n{XML_END}"']
    else:
        texts = read_texts(one.schema, one.schema)
        if any(text.format is not None for text in texts):
            raise SchemaError("format of a text is not supported in this form of calls; leave it out")
        values = [_xml_text(rules, text, kinds) for text in texts]
        words = read_words(one.schema, one.schema) if others else []
        values += [f'"{word}\\n{XML_END}"' for word in words]
        if begun := [kind for kind in others if kind not in ("null", "boolean")]:
            values.append(f'{rules.json(_only(one.schema, begun))} "\\n{XML_END}"')
    if not values:
        raise SchemaError("no value is allowed for it")
    head = json.dumps(f"<parameter={one.name}>\n")
    return rules.new(f"{head} {any_of(values)} {gap}")


def _xml_text(rules: GrammarText, text: ParameterText, kinds: list[str]) -> str:
    """Write a text, which must not look like another of the `kinds` that the parameter may have."""
    if text.values is not None:
        for value in text.values:
            if XML_END in value:
                raise SchemaError(f"a text with {XML_END} cannot stand in this form of calls")
            if set(kinds) != {"string"} and not qwen3_coder.as_json(value, kinds).startswith('"'):
                raise SchemaError(f"the text {brief(value)} is read as another type in this form of calls")
        return any_of([json.dumps(f"{value}\n{XML_END}") for value in text.values])
    looks = "|".join(
        f"{_SPACE}({look}){more or _SPACE}" for look, more in (_LOOKS[kind] for kind in kinds if kind in _LOOKS)
    )
    if text.is_free and not looks:
        return rules.until([XML_END])
    if text.most is not None and text.least > text.most:
        raise SchemaError(f"nothing satisfies minLength {text.least} beside maxLength {text.most}")
    parts = [without(XML_END)]
    if looks:
        parts.append(f"~{regex(looks)}")
    if text.least or text.most is not None:
        parts.append(regex(f"(?s:.{{{text.least},{'' if text.most is None else text.most}}})"))
    if text.pattern is not None:
        parts.append(regex(_whole(to_rust(text.pattern))))
    return rules.until([f"\n{XML_END}"], rules.terminal(" & ".join(["TEXT", *parts])))


def _whole(pattern: str) -> str:
    """Return a pattern that matches all of a text in which `pattern` is found. Raises SchemaError."""
    found = []
    for branch in _branches(pattern):
        begins, bare = branch.startswith("^"), branch.removesuffix("$")
        ends = bare != branch and not (len(bare) - len(bare.rstrip("\\"))) & 1
        inner = (bare if ends else branch).removeprefix("^")
        if any(part in ("^", "$") for part in _PARTS.findall(inner)):
            raise SchemaError(f"the pattern {brief(pattern)} has ^ or $ in a group; put them around all of a branch")
        found.append(f"{'' if begins else ANY}({inner}){'' if ends else ANY}")
    return "|".join(found)


def _branches(pattern: str) -> list[str]:
    """Split a pattern at each `|` that stands in no group."""
    found, depth = [""], 0
    for part in _PARTS.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            found.append("")
        else:
            found[-1] += part
    return found


def _only(schema: Schema, kinds: list[str]) -> Schema:
    """Return a schema of the values of `schema` that have one of the types `kinds`."""
    own, definitions = _split_definitions(schema)
    return {"allOf": [own, {"type": kinds}], **definitions}


def _split_definitions(schema: Schema) -> tuple[Schema, Schema]:
    """Return a schema without its definitions, and these."""
    definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
    return {key: schema[key] for key in schema if key not in definitions}, definitions


def _dsml_head(name: str = "") -> str:
    return f'<{dsml.MARK}parameter name="{name}' + ('" string=' if name else "")


def _dsml_text(rules: GrammarText) -> str:
    return rules.new(f'"\\"true\\">" {rules.until([DSML_END], spelled=dsml.MARK)} "\\n"')


def _dsml_json(rules: GrammarText, schema: Schema) -> str:
    return f'"\\"false\\">" {rules.json(schema)} {rules.text(DSML_END + chr(10))}'


def _dsml_any(rules: GrammarText) -> str:
    return f'"\\" string=" ({_dsml_text(rules)} | {_dsml_json(rules, {})})'


def _dsml_parameter(rules: GrammarText, one: Property) -> str:
    _check_name(one, dsml.NAME.fullmatch)
    if len(one.name) > dsml.MAX_HEAD // 2:
        raise SchemaError(f"this form of calls cannot write the name {brief(one.name)}")
    kinds = types_of(one.schema, one.schema)
    others = [kind for kind in kinds if kind != "string"]
    texts = _dsml_texts(one.schema) if not others or "string" in kinds else None
    if texts is None:
        values = [_dsml_json(rules, one.schema)]
    else:
        values = [_dsml_value(rules, text) for text in texts]
        if others:
            values.append(_dsml_json(rules, _only(one.schema, others)))
    return rules.new(f"{rules.text(_dsml_head(one.name))} {any_of(values)}")


def _dsml_texts(schema: Schema) -> list[ParameterText] | None:
    """Return the texts that can stand as they are; None if they must be written as JSON, with all it can enforce."""
    try:
        texts = read_texts(schema, schema)
    except SchemaError:
        return None
    plain = all(text.is_free or (text.values and not any(DSML_END in value for value in text.values)) for text in texts)
    return texts if plain and texts else None


def _dsml_value(rules: GrammarText, text: ParameterText) -> str:
    if text.values is None:
        return _dsml_text(rules)
    end = DSML_END + "\n"
    return any_of([f'"\\"true\\">" {rules.text(value + end)}' for value in text.values])


ARGUMENTS: Mapping[str, Callable[[GrammarText, Schema], str]] = {
    "json": json_arguments,
    "python": python_arguments,
    "xml": xml_arguments,
    "dsml": dsml_arguments,
}
FUNCTION_NAME: Mapping[str, Callable[[str], Any]] = {
    "json": lambda name: True,
    "python": lambda name: all(part.isidentifier() for part in name.split(".")),
    "xml": lambda name: True,
    "dsml": lambda name: True,
}
"""Whether each form can write the name of a function so that its parser reads it."""
