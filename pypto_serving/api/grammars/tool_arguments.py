"""Return patterns of a call's arguments in each form of calls, so that the form's parser reads valid arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pypto_serving.api.chat.parsers import dsml, qwen3_coder
from pypto_serving.api.chat.parsers.tagged import MAX_TAG, as_json
from pypto_serving.api.chat.tools import MAX_HOPS, parameter_types, types_of
from pypto_serving.api.grammars.grammar_text import ANY, GrammarText, any_of, joined, regex, without
from pypto_serving.api.grammars.json_schema import Definitions, SchemaError, prepare_parts
from pypto_serving.util import brief

Schema = Mapping[str, Any]
XML_END, DSML_END = qwen3_coder.PARAMETER_END, dsml.PARAMETER_END
MAX_VISITS = 256
"""Limit of schemas read to find the texts that a parameter allows."""
_BRANCHES = ("anyOf", "oneOf", "allOf", "enum", "const")
_UNREADABLE = (*_BRANCHES, "patternProperties", "minProperties", "maxProperties", "$ref")
_OF_OBJECTS = {"properties", "required", "additionalProperties"}
_ASSERTIONS = ("pattern", "minLength", "maxLength", "format")
_WORDS = {"null": "null", "true": "boolean", "false": "boolean"}
_COUNTS_OF_CASES: Mapping[str, Callable[[int, int], bool]] = {
    "anyOf": lambda count, cases: count > 0,
    "oneOf": lambda count, cases: count == 1,
    "allOf": lambda count, cases: count == cases,
}
"""For each keyword: whether it holds, given the number of cases that hold and the number of cases."""
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
"""For each type: pattern of the beginning of texts that Qwen3-Coder's parser reads as this type, and of their rest.

Numbers, lists and objects are recognized by their beginning, since a grammar cannot go back to read them as text.
"""


class Property(NamedTuple):
    """One parameter.

    `schema` is prepared, and contains the definitions that it refers to; `types` are the types that parsers expect.
    """

    name: str
    schema: Schema
    types: Sequence[str]
    required: bool


class ParameterText(NamedTuple):
    """Texts that a parameter allows: one of `values`, or any text for which the assertions hold."""

    values: tuple[str, ...] | None = None
    pattern: str | None = None
    least: int = 0
    most: int | None = None
    format: str | None = None

    @property
    def is_free(self) -> bool:
        """Return whether any text is allowed."""
        return self == ParameterText()


def prepare_object(schema: Schema) -> tuple[Schema, Definitions]:
    """Prepare an object's schema like `prepare_parts`. Raises SchemaError also if it does not describe an object."""
    if (kinds := types_of(schema, schema)) and "object" not in kinds:
        raise SchemaError(f"#/type is {kinds[0]}, but arguments are an object")
    return prepare_parts(schema)


def check_name(name: str, is_readable: bool) -> None:
    """Raise SchemaError about `name` unless `is_readable` by the form's parser."""
    if not is_readable:
        raise SchemaError(f"this form of calls cannot write the name {brief(name)}")


def as_object(schema: Schema) -> Schema:
    """Return the schema of the values of `schema` that are objects."""
    if {"anyOf", "oneOf", "allOf", "$ref"} & schema.keys():
        return {"allOf": [schema, {"type": "object"}]}
    return {**schema, "type": "object"}


def read_parameters(schema: Schema) -> list[Property] | None:
    """Return the parameters that an object's schema allows, or None if all names are allowed.

    Raises SchemaError for keywords that cannot be enforced, or that concern several parameters together.
    """
    whole, definitions = prepare_object(schema)
    for _ in range(MAX_HOPS):
        target = definitions.target(whole)
        if not isinstance(target, Mapping):
            break
        beside = {key: whole[key] for key in whole if key != "$ref"}
        if lost := _OF_OBJECTS & beside.keys():
            raise SchemaError(f"{min(lost)} of all parameters beside $ref is not supported in this form of calls")
        whole = {**target, **beside}
    for word in _UNREADABLE:
        if word in whole:
            raise SchemaError(f"{word} of all parameters together is not supported in this form of calls")
    found, needed = dict(whole.get("properties", {})), dict.fromkeys(whole.get("required", ()))
    others = whole.get("additionalProperties", True)
    if others in (True, {}):
        if not needed and "properties" not in whole:
            return None
        found |= {name: {} for name in needed if name not in found}
    if missing := [name for name in needed if found.get(name, False) is False]:
        raise SchemaError(f"{brief(missing[0])} is required, but properties allows no value for it")
    if not found and others not in (True, False, {}):
        raise SchemaError("additionalProperties of all parameters is not supported in this form of calls; name them")
    types = parameter_types(schema)
    return [
        Property(name, {} if one is True else definitions.with_those_of(one), types.get(name, ()), name in needed)
        for name, one in found.items()
        if one is not False
    ]


class _ValueReader:
    """Reads which texts and which of null, true and false a parameter allows. Reads at most MAX_VISITS schemas."""

    def __init__(self, schema: Schema) -> None:
        self._definitions = Definitions(schema.get("$defs", {}))
        self._left = MAX_VISITS

    def read_texts(self, schema: Any) -> list[ParameterText]:
        """Return the texts that a schema allows, or []. Raises SchemaError for unsupported combinations of keywords."""
        if not isinstance(schema, Mapping):
            return [ParameterText()] if schema else []
        kinds = schema.get("type", "string")
        if "string" not in ([kinds] if isinstance(kinds, str) else kinds):
            return []
        self._visit()
        if "$ref" in schema:
            own, target = {**schema}, self._definitions.target(schema)
            del own["$ref"]
            return [] if target is False else self.read_texts(_merged([target, own]))
        words = sorted(schema.keys() & {*_BRANCHES, *_ASSERTIONS})
        branch = next((word for word in words if word in _BRANCHES), None)
        if branch is None:
            pattern, least, most, form = (schema.get(word) for word in _ASSERTIONS)
            return [ParameterText(None, pattern, least or 0, most, form)]
        if len(words) > 1:
            raise SchemaError(f"{' beside '.join(words)} for a text is not supported in this form of calls")
        value = schema[branch]
        if branch in ("enum", "const"):
            texts = tuple(each for each in (value if branch == "enum" else [value]) if isinstance(each, str))
            return [ParameterText(texts)] if texts else []
        if branch == "allOf":
            own = {key: each for key, each in schema.items() if key != "allOf"}
            return self.read_texts(_merged([own, *value]))
        cases = [found for one in value if (found := self.read_texts(one))]
        if branch == "oneOf" and len(cases) > 1 and not _are_apart(cases):
            raise SchemaError("oneOf with texts that may overlap is not supported in this form of calls; use anyOf")
        return [text for found in cases for text in found]

    def read_words(self, schema: Any) -> list[str]:
        """Return which of null, true and false a schema allows, as JSON."""
        if not isinstance(schema, Mapping):
            return list(_WORDS) if schema else []
        self._visit()
        found = set(_WORDS if "$ref" not in schema else self.read_words(self._definitions.target(schema)))
        kinds = schema.get("type", [*_WORDS.values()])
        found &= {word for word, kind in _WORDS.items() if kind == kinds or (isinstance(kinds, list) and kind in kinds)}
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            found &= {json.dumps(value) for value in values if value is None or isinstance(value, bool)}
        for word, fits in _COUNTS_OF_CASES.items():
            cases = [self.read_words(one) for one in schema.get(word, ())]
            found = {each for each in found if not cases or fits(sum(each in case for case in cases), len(cases))}
        return [word for word in _WORDS if word in found]

    def _visit(self) -> None:
        """Count a schema, since schemas that refer to each other have no end."""
        self._left -= 1
        if self._left < 0:
            raise SchemaError(f"a text has more than {MAX_VISITS} schemas that refer to each other; use fewer")


def _are_apart(cases: list[list[ParameterText]]) -> bool:
    """Return whether all texts are listed, and each in only one case."""
    values = [{value for text in texts for value in text.values or ()} for texts in cases]
    listed = all(text.values is not None for texts in cases for text in texts)
    return listed and len(set().union(*values)) == sum(map(len, values))


def _merged(schemas: list[Any]) -> Schema:
    """Merge schemas that must all hold. Raises SchemaError if they have different values for a keyword."""
    made: dict[str, Any] = {}
    for schema in schemas:
        for word, value in schema.items() if isinstance(schema, Mapping) else ():
            if word in made and made[word] != value and word in {"type", "$ref", *_BRANCHES, *_ASSERTIONS}:
                raise SchemaError(f"{word} twice for a text is not supported in this form of calls")
            made[word] = value
    return made


def json_arguments(rules: GrammarText, schema: Schema) -> str:
    """Return the pattern of a JSON object."""
    whole, definitions = prepare_object(schema)
    return rules.prepared(definitions.with_those_of(as_object(whole)))


def python_arguments(rules: GrammarText, schema: Schema) -> str:
    """Return the pattern of `a=1, b="x"`: required arguments first, then any of the others."""
    parts = _parts(rules, schema, _python_parameter)
    if parts is None:
        one = rules.new(rf'/[^\W\d]\w{{0,60}}/ "=" {rules.json({})}')
        return f'({one} (", " {one})*)?'
    needed = [part for part, required in parts if required]
    tail = alone = ""
    for part in [part for part, required in reversed(parts) if not required]:
        alone = rules.new(" | ".join(filter(None, [joined(part, tail), alone])))
        tail = rules.new(f'(", " {part})? {tail}'.strip())
    if needed:
        return joined(' ", " '.join(needed), tail)
    return f"{alone}?" if alone else ""


def xml_arguments(rules: GrammarText, schema: Schema, gap: str = '"\\n"') -> str:
    """Return the pattern of `<parameter=a>`, a line with the value, `</parameter>` and `gap` for each argument."""
    parts = _parts(rules, schema, lambda rules, one: _xml_parameter(rules, one, gap))
    if parts is None:
        name = regex(qwen3_coder.NAME.pattern)
        return f'("<parameter=" {name} ">" {rules.until([XML_END])} {gap})*'
    return _each(parts)


def dsml_arguments(rules: GrammarText, schema: Schema) -> str:
    """Return the pattern of DSML arguments: plain text with `string="true"`, other values as JSON."""
    parts = _parts(rules, schema, _dsml_parameter)
    if parts is None:
        name, value = regex(r'[^"<>]{1,60}'), f'"\\" string=" ({_dsml_text(rules)} | {_dsml_json(rules, {})})'
        return f"({rules.text(_dsml_head())} {name} {value})*"
    return _each(parts)


def _parts(
    rules: GrammarText, schema: Schema, write: Callable[[GrammarText, Property], str]
) -> list[tuple[str, bool]] | None:
    """Return the pattern of each parameter and whether it is required; None if all names are allowed."""
    parameters = read_parameters(schema)
    if parameters is None:
        return None
    parts = []
    for one in parameters:
        with rules.at(f"#/properties/{one.name}"):
            parts.append((write(rules, one), one.required))
    return parts


def _each(parts: Sequence[tuple[str, bool]]) -> str:
    return joined(*(part if needed else f"({part})?" for part, needed in parts))


def _python_parameter(rules: GrammarText, one: Property) -> str:
    check_name(one.name, one.name.isidentifier())
    return rules.new(f"{rules.text(one.name + '=')} {rules.prepared(one.schema)}")


def _xml_parameter(rules: GrammarText, one: Property, gap: str) -> str:
    check_name(one.name, qwen3_coder.NAME.fullmatch(one.name) is not None)
    others = [kind for kind in one.types if kind != "string"]
    if others and "string" not in one.types:
        values = [f'{rules.prepared(one.schema)} "\\n{XML_END}"']
    else:
        texts = _ValueReader(one.schema).read_texts(one.schema)
        if any(text.format is not None for text in texts):
            raise SchemaError("format of a text is not supported in this form of calls; leave it out")
        values = [_xml_text(rules, text, one.types) for text in texts]
        words = _ValueReader(one.schema).read_words(one.schema) if others else []
        values += [f'"{word}\\n{XML_END}"' for word in words]
        if begun := [kind for kind in others if kind not in ("null", "boolean")]:
            values.append(f'{rules.prepared(_only(one.schema, begun))} "\\n{XML_END}"')
    if not values:
        raise SchemaError("no value is allowed for it")
    head = json.dumps(f"<parameter={one.name}>\n")
    return rules.new(f"{head} {any_of(values)} {gap}")


def _xml_text(rules: GrammarText, text: ParameterText, kinds: Sequence[str]) -> str:
    """Write a text, which must not look like another of the `kinds` that the parameter may have."""
    if text.values is not None:
        for value in text.values:
            if XML_END in value:
                raise SchemaError(f"a text with {XML_END} cannot stand in this form of calls")
            if set(kinds) != {"string"} and not (as_json(value, kinds) or "").startswith('"'):
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
        parts.append(regex(_whole(text.pattern)))
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
    own = {key: value for key, value in schema.items() if key != "$defs"}
    made = {"allOf": [own, {"type": kinds}]}
    return {**made, "$defs": schema["$defs"]} if "$defs" in schema else made


def _dsml_head(name: str = "") -> str:
    return f'<{dsml.MARK}parameter name="{name}' + ('" string=' if name else "")


def _dsml_text(rules: GrammarText) -> str:
    return rules.new(f'"\\"true\\">" {rules.until([DSML_END], spelled=dsml.MARK)} "\\n"')


def _dsml_json(rules: GrammarText, schema: Schema) -> str:
    return f'"\\"false\\">" {rules.prepared(schema)} {rules.text(DSML_END + chr(10))}'


def _dsml_parameter(rules: GrammarText, one: Property) -> str:
    fits = dsml.NAME.fullmatch(one.name) is not None and len(one.name) <= MAX_TAG // 2
    check_name(one.name, fits)
    others = [kind for kind in one.types if kind != "string"]
    texts = _dsml_texts(one.schema) if not others or "string" in one.types else None
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
        texts = _ValueReader(schema).read_texts(schema)
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
