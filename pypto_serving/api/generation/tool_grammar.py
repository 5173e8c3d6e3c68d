"""Write the grammar of tool calls in a family's form, for outputs that have to be calls."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pypto_serving.api.chat.parsers.families import CallForm
from pypto_serving.api.chat.tools import refuse, types_of
from pypto_serving.api.generation.json_schema import SchemaError, prepare
from pypto_serving.types.guide import MAX_GRAMMAR_CHARS, Grammar
from pypto_serving.util import brief

Function = Mapping[str, Any]
SpecialId = Callable[[str], int | None]
"""Returns the id of a text that is a special token; None for others."""
_ANY_TEXT = "TEXT: /(.|\\n)*/"
_ASSERTIONS = ("pattern", "minLength", "maxLength")


def forced_calls(
    form: CallForm, functions: Sequence[Function], one: bool, special_id: SpecialId, options: Mapping[str, Any]
) -> Grammar:
    """Return the grammar of outputs that are calls of `functions`: only `one`, or one and more.

    `options` are llguidance's for JSON. Raises RequestError that names the tool whose schema cannot be enforced.
    """
    writer = _Writer(form, special_id, options)
    return Grammar("lark", writer.write(functions, [f"start: {writer.block(functions, one)}"]))


def strict_calls(
    form: CallForm, functions: Sequence[Function], one: bool, special_id: SpecialId, options: Mapping[str, Any]
) -> Grammar | None:
    """Return the grammar of free text in which calls follow the schemas of strict functions.

    None if the family has no mark that tells calls from text. Raises like `forced_calls`.
    """
    hidden = [mark for mark in form.marks if mark in form.mark and mark != form.mark and special_id(mark) is not None]
    if not form.mark or hidden:
        return None
    writer = _Writer(form, special_id, options)
    rest = writer.block(functions, one, without_mark=True)
    token_id = special_id(form.mark)
    beginning = f"TEXT <[{token_id}]>" if token_id is not None else "head"
    rules = [f"start: (block){'?' if one else '*'} TEXT\nblock: {beginning} {rest}"]
    if token_id is None:
        rules.append(f"head[lazy]: TEXT {json.dumps(form.mark)}")
    loose = [f if f.get("strict") else {"name": f["name"], "parameters": {"type": "object"}} for f in functions]
    return Grammar("lark", writer.write(loose, rules))


def either(calls: Grammar, content_schema: str) -> Grammar:
    """Return the grammar of outputs that are calls, or JSON of a schema."""
    return Grammar("lark", calls.text.replace("start: ", f"start: %json {content_schema} | ", 1))


class _Writer:
    """Write rules for the calls of one request."""

    def __init__(self, form: CallForm, special_id: SpecialId, options: Mapping[str, Any]) -> None:
        self._form = form
        self._special_id = special_id
        self._options = options
        self._rules: list[str] = []

    def write(self, functions: Sequence[Function], rules: Sequence[str]) -> str:
        for i, function in enumerate(functions):
            try:
                self._add_call(i, function)
                if (size := sum(map(len, self._rules))) > MAX_GRAMMAR_CHARS:
                    raise SchemaError(f"they make {size} characters of grammar, but may make {MAX_GRAMMAR_CHARS}")
            except (SchemaError, RecursionError) as error:
                refuse("tools", f"cannot be enforced: the parameters of {function['name']}: {error}")
        return "\n".join([*rules, _ANY_TEXT, *self._rules])

    def block(self, functions: Sequence[Function], one: bool, without_mark: bool = False) -> str:
        """Return what stands for all calls of an output, with what is around and between them."""
        form = self._form
        calls = "(" + " | ".join(f"call_{i}" for i in range(len(functions))) + ")"
        begin, end = ("", "") if one and form.alone else (form.begin, form.end)
        first = [self._text(begin), calls] if not without_mark else [self._after_mark(functions)]
        more = [] if one or without_mark else [f"({self._text(form.between)} {calls})*"]
        return " ".join(filter(None, [*first, *more, self._text(end)]))

    def _after_mark(self, functions: Sequence[Function]) -> str:
        rest = self._text((self._form.begin + self._form.head).removeprefix(self._form.mark))
        return f"{rest} (" + " | ".join(f"named_{i}" for i in range(len(functions))) + ")"

    def _add_call(self, i: int, function: Function) -> None:
        form, schema = self._form, function.get("parameters") or {"type": "object", "additionalProperties": False}
        _check_names(form, [function["name"], *(name for name, *_ in _properties(schema))])
        arguments = _ARGUMENTS[form.arguments](self, i, schema, bool(function.get("strict")))
        named = f"named_{i}: {self._text(function['name'] + form.middle)} {arguments} {self._text(form.tail)}"
        self._rules += [f"call_{i}: {self._text(form.head)} named_{i}", named]

    def json_arguments(self, i: int, schema: Mapping[str, Any], strict: bool) -> str:
        return self._json(schema if "type" in schema or "$ref" in schema else {"type": "object", **schema})

    def python_arguments(self, i: int, schema: Mapping[str, Any], strict: bool) -> str:
        """Write `a=1, b="x"`: required ones first, and any of the others behind them."""
        parts = [(self._text(f"{name}=") + " " + self._json(one), needed) for name, one, needed in _properties(schema)]
        needed, others = [part for part, must in parts if must], [part for part, must in parts if not must]
        comma = self._text(", ")
        if needed or not others:
            return f" {comma} ".join(needed) + "".join(f" ({comma} {part})?" for part in others)
        tails = ["".join(f" ({comma} {part})?" for part in others[k + 1 :]) for k in range(len(others))]
        return "(" + " | ".join(part + tail for part, tail in zip(others, tails, strict=True)) + ")?"

    def xml_arguments(self, i: int, schema: Mapping[str, Any], strict: bool) -> str:
        parts = []
        for name, one, needed in _properties(schema):
            part = f"{self._text(f'<parameter={name}>')} {self._xml_value(i, one, strict)}"
            parts.append(part if needed else f"({part})?")
        return " ".join(parts)

    def _xml_value(self, i: int, schema: Mapping[str, Any], strict: bool) -> str:
        end = self._text("\n</parameter>\n")
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            if any("</parameter>" in value for value in values):
                raise SchemaError("a text with </parameter> cannot stand in this model's form of calls")
            return f"{self._text(chr(10))} ({' | '.join(map(self._text, values))}) {end}"
        kinds = types_of(schema, schema)
        if kinds and "string" not in kinds:
            return f"{self._text(chr(10))} {self._json(schema)} {end}"
        if strict and (lost := [word for word in _ASSERTIONS if word in schema]):
            raise SchemaError(f"{lost[0]} of a text is not supported in this model's form of calls")
        rule = f"text_{len(self._rules)}"
        self._rules.append(f'{rule}[lazy]: TEXT "</parameter>"')
        return f"{rule} {self._text(chr(10))}"

    def dsml_arguments(self, i: int, schema: Mapping[str, Any], strict: bool) -> str:
        parts = []
        for name, one, needed in _properties(schema):
            opening = self._text(f'<｜DSML｜parameter name="{name}" string="false">')
            part = f"{opening} {self._json(one)} {self._text('</｜DSML｜parameter>' + chr(10))}"
            parts.append(part if needed else f"({part})?")
        return " ".join(parts)

    def _json(self, schema: Mapping[str, Any]) -> str:
        """Write JSON of a schema, without properties that it does not name, which models would add without end."""
        return "%json " + json.dumps(prepare(schema, self._options, close_objects=True, keep_free=True))

    def _text(self, text: str) -> str:
        """Write a text, in which special tokens stand for themselves."""
        for mark in self._form.marks:
            if mark in text and (token_id := self._special_id(mark)) is not None:
                before, _, after = text.partition(mark)
                return " ".join(filter(None, [self._text(before), f"<[{token_id}]>", self._text(after)]))
        return json.dumps(text) if text else ""


_ARGUMENTS: Mapping[str, Callable[[_Writer, int, Mapping[str, Any], bool], str]] = {
    "json": _Writer.json_arguments,
    "python": _Writer.python_arguments,
    "xml": _Writer.xml_arguments,
    "dsml": _Writer.dsml_arguments,
}


_CAN_WRITE: Mapping[str, Callable[[str], bool]] = {
    "json": lambda name: True,
    "python": lambda name: name.isidentifier() and not keyword.iskeyword(name),
    "xml": lambda name: re.fullmatch(r"[^<>\n]+", name) is not None,
    "dsml": lambda name: re.fullmatch(r'[^"<\n]+', name) is not None,
}
"""Which names of functions and parameters each form of arguments can write so that its parser reads them."""


def _check_names(form: CallForm, names: Sequence[str]) -> None:
    for name in names:
        if not _CAN_WRITE[form.arguments](name):
            raise SchemaError(f"this model's form of calls cannot write the name {brief(name)}")


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Return name, schema and whether it is required of each property; shared definitions stay with each."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties, required = schema.get("properties"), schema.get("required")
    found = properties if isinstance(properties, Mapping) else {}
    needed = required if isinstance(required, list) else []
    return [
        (name, {**shared, **one} if isinstance(one, Mapping) else {}, name in needed) for name, one in found.items()
    ]
