"""Convert the formats of XGrammar's structural tags to rules of a Lark grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from pypto_serving.api.grammars.gbnf import lark_rules
from pypto_serving.api.grammars.grammar_text import GrammarText, any_of, joined, regex
from pypto_serving.api.grammars.tool_arguments import xml_arguments
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.types.guide import Grammar
from pypto_serving.util import brief

Format = Mapping[str, Any]
Ends = Sequence[str] | None
"""Texts of which one must follow a format directly; the format's rule includes that text.

() if the output ends after the format; None if something follows that cannot be distinguished from free text.
"""
MAX_TRIGGERS, MAX_STRUCTURES = 128, 128
_FIELDS = {"begin", "schema", "end"}
_FREE_TEXT = "free text must be the content of a tag, come right before a const_string, or be last"


def lark_of(tag: Mapping[str, Any], options: Mapping[str, Any], tokenizer: Tokenizer) -> Grammar:
    """Return the grammar of `{"format": {...}}`, or of the older `{"structures": [...], "triggers": [...]}`.

    In the older form, text is free up to a trigger; then a structure that begins with the trigger must follow, then
    free text again. Special tokens are matched as tokens. Raises ValueError, and SchemaError for a schema.
    """
    given = tag["format"] if "format" in tag else _triggered_tags(tag)
    _check_known(tag, "it", {"type", "format"} if "format" in tag else {"type", "structures", "triggers"})
    return FormatWriter(options, tokenizer).grammar(given)


def _triggered_tags(tag: Mapping[str, Any]) -> dict[str, Any]:
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise ValueError("it must have a format, or lists of structures and triggers")
    if len(structures) > MAX_STRUCTURES:
        raise ValueError(f"it has {len(structures)} structures, but may have {MAX_STRUCTURES}")
    return {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": [_tag(i, each) for i, each in enumerate(structures)],
    }


def _tag(i: int, structure: Any) -> dict[str, Any]:
    if not isinstance(structure, Mapping) or not structure.keys() >= _FIELDS:
        raise ValueError(f"structures[{i}] is {brief(structure)}, but must have begin, schema and end")
    _check_known(structure, f"structures[{i}]", _FIELDS)
    content = {"type": "json_schema", "json_schema": structure["schema"]}
    return {"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]}


def _check_known(given: Mapping[str, Any], place: str, fields: set[str]) -> None:
    if unknown := sorted(map(str, given.keys() - fields)):
        raise ValueError(f"{place} has {brief(unknown[0])}, but may have {', '.join(sorted(fields))}")


class FormatWriter:
    """Writes the rules of one grammar. `options` are llguidance's JSON options.

    Methods raise ValueError, and SchemaError for a schema or if the grammar becomes too long.
    """

    def __init__(self, options: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules = GrammarText(tokenizer.split_special, options)

    def grammar(self, given: Any) -> Grammar:
        """Return the grammar of outputs that follow a format."""
        return self._rules.grammar(f"start: {self._write(given, 'format', ())}")

    def _write(self, given: Any, place: str, ends: Ends) -> str:
        """Return the pattern of a format and of its ends."""
        write, _ = _KINDS[_kind_of(given, place)]
        return write(self, given, place, ends)

    def const_string(self, given: Format, place: str, ends: Ends) -> str:
        return self._ended(self._rules.text(_str(given, "value", place)), ends)

    def token(self, given: Format, place: str, ends: Ends) -> str:
        return self._ended(self._token(given, place), ends)

    def json_schema(self, given: Format, place: str, ends: Ends) -> str:
        style, most = given.get("style", "json"), given.get("max_whitespace_cnt")
        if style not in ("json", "qwen_xml") or given.get("any_order"):
            raise ValueError(f"{place}: of the styles only json and qwen_xml are supported, and any_order is not")
        if style == "qwen_xml":
            if most is not None:
                raise ValueError(f"{place} has max_whitespace_cnt, but the style qwen_xml knows none")
            return self.qwen_xml_parameter(given, place, ends)
        if most is not None and (type(most) is not int or most < 0):
            raise ValueError(f"{place}.max_whitespace_cnt is {brief(most)}, but must be a number of characters")
        options = {"whitespace_pattern": rf"[\x20\x09\x0a\x0d]{{1,{most}}}"} if most else {"whitespace_flexible": False}
        with self._schema_of(given, place) as schema:
            written = self._rules.json(schema, None if most is None else options)
        return self._ended(written, ends)

    def qwen_xml_parameter(self, given: Format, place: str, ends: Ends) -> str:
        """Return the pattern of Qwen3-Coder's arguments: `<parameter=name>`, a line with the value, `</parameter>`."""
        line_break = '"\\n"?'
        with self._schema_of(given, place) as schema:
            written = xml_arguments(self._rules, schema, line_break)
        return self._ended(f"{line_break} {written}", ends)

    def regex(self, given: Format, place: str, ends: Ends) -> str:
        """Return a regular expression and its plain ends as one terminal, so that it stops where an end begins."""
        with self._rules.at(f"{place}.pattern"):
            pattern = regex(_str(given, "pattern", place))
            if ends and all(self._rules.split(end) == [end] for end in ends):
                return self._rules.terminal(f"{pattern} {any_of(list(map(json.dumps, ends)))}")
            written = self._rules.terminal(pattern)
        return self._ended(written, ends)

    def gbnf(self, given: Format, place: str, ends: Ends) -> str:
        grammar = _str(given, "grammar", place)
        try:
            with self._rules.at(f"{place}.grammar"):
                prefix = self._rules.include(lambda prefix: lark_rules(grammar, prefix))
        except ValueError as error:
            raise ValueError(f"{place}.grammar: {error}") from None
        return self._ended(f"{prefix}root", ends)

    def any_text(self, given: Format, place: str, ends: Ends) -> str:
        text = self._free_text(given, place)
        if ends is None:
            raise ValueError(f"{place}: {_FREE_TEXT}")
        return self._rules.until(ends, text)

    def sequence(self, given: Format, place: str, ends: Ends) -> str:
        elements = _list(given, "elements", place)
        places = [f"{place}.elements[{i}]" for i in range(len(elements))]
        parts, i = [], 0
        while i < len(elements):
            following = elements[i + 1] if i + 1 < len(elements) else None
            if following is None:
                parts.append(self._write(elements[i], places[i], ends))
            elif _kind_of(following, places[i + 1]) == "const_string" and following.get("value"):
                parts.append(self._write(elements[i], places[i], (_str(following, "value", places[i + 1]),)))
                i += 1
                if i + 1 == len(elements):
                    parts.append(self._ended("", ends))
            else:
                parts.append(self._write(elements[i], places[i], None))
            i += 1
        return joined(*parts)

    def either(self, given: Format, place: str, ends: Ends) -> str:
        elements = _list(given, "elements", place)
        return any_of([self._write(each, f"{place}.elements[{i}]", ends) for i, each in enumerate(elements)])

    def repeat(self, given: Format, place: str, ends: Ends) -> str:
        least, most = given.get("min"), given.get("max")
        if type(least) is not int or type(most) is not int or least < 0 or not (most == -1 or most >= least):
            raise ValueError(f"{place} has min {brief(least)} and max {brief(most)}, but max must not be below min")
        written = self.repeated(given, place, ends, f"{{{least},{'' if most == -1 else most}}}")
        return written if most else self._ended("", ends)

    def tag(self, given: Format, place: str, ends: Ends) -> str:
        begin = given.get("begin")
        opening = (
            self._token(begin, f"{place}.begin")
            if isinstance(begin, Mapping)
            else self._rules.text(_str(given, "begin", place))
        )
        return joined(opening, self._after_begin(given, place, ends))

    def triggered_tags(self, given: Format, place: str, ends: Ends) -> str:
        """Group the tags by trigger: after free text up to a trigger, the rest of one of its tags must follow."""
        triggers = _list(given, "triggers", place)
        if len(triggers) > MAX_TRIGGERS:
            raise ValueError(f"{place} has {len(triggers)} triggers, but may have {MAX_TRIGGERS}")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise ValueError(f"{place}.triggers is {brief(triggers)}, but must be a list of texts that are not empty")
        follow: dict[str, list[str]] = {}
        whole = []
        for where, tag in _tags(given, place):
            begin = _str(tag, "begin", where)
            trigger = next(filter(begin.startswith, triggers), None)
            if trigger is None:
                raise ValueError(f"{where}.begin is {brief(begin)}, but must begin with one of the triggers")
            rule = self._rules.new(self._after_begin(tag, where, None))
            follow.setdefault(trigger, []).append(joined(self._rules.text(begin.removeprefix(trigger)), rule))
            whole.append(joined(self._rules.text(begin), rule))
        first = any_of(whole) if given.get("at_least_one") else None
        return self._dispatched(given, place, ends, follow, first, loop=not given.get("stop_after_first"))

    def dispatch(self, given: Format, place: str, ends: Ends) -> str:
        follow: dict[str, list[str]] = {}
        for i, rule in enumerate(_list(given, "rules", place)):
            if not isinstance(rule, list) or len(rule) != 2 or not isinstance(rule[0], str) or not rule[0]:
                raise ValueError(f"{place}.rules[{i}] is {brief(rule)}, but must be a pattern and a format")
            follow.setdefault(rule[0], []).append(self._write(rule[1], f"{place}.rules[{i}][1]", None))
        return self._dispatched(given, place, ends, follow, None, loop=given.get("loop") is not False)

    def tags_with_separator(self, given: Format, place: str, ends: Ends) -> str:
        tag = self._rules.new(any_of([self._write(tag, where, None) for where, tag in _tags(given, place)]))
        more = "" if given.get("stop_after_first") else f" ({self._rules.text(_str(given, 'separator', place))} {tag})*"
        return self._ended(f"{tag}{more}" if given.get("at_least_one") else f"({tag}{more})?", ends)

    def _dispatched(
        self, given: Format, place: str, ends: Ends, follow: Mapping[str, list[str]], first: str | None, loop: bool
    ) -> str:
        """Return the pattern of `first`, then of free text in which one of `follow[trigger]` follows each trigger."""
        if first is not None and not loop:
            return self._ended(first, ends)
        if ends is None:
            raise ValueError(f"{place}: {_FREE_TEXT}")
        text = self._free_text(given, place)
        blocks = [joined(self._rules.until([trigger], text), any_of(each)) for trigger, each in follow.items()]
        block = self._rules.new(any_of(blocks))
        rest = self._rules.until(ends, text)
        if not loop:
            return f"({self._ended(block, ends)} | {rest})"
        return joined(first or "", f"{block}*", rest)

    def _after_begin(self, tag: Format, place: str, ends: Ends) -> str:
        """Return the pattern of a tag's content and end, and of the ends that must follow."""
        end = tag.get("end")
        if isinstance(end, Mapping):
            end_token = self._token(end, f"{place}.end")
            content, where = tag.get("content", {}), f"{place}.content"
            is_text = _kind_of(content, where) == "any_text"
            written = self._free_text(content, where) if is_text else self._write(content, where, None)
            return self._ended(f"{written} {end_token}", ends)
        texts = [end] if isinstance(end, str) else end
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{place}.end is {brief(end)}, but must be a text, a list of texts, or a token")
        if not all(texts):
            return self._write(tag.get("content"), f"{place}.content", ends)
        return self._ended(self._write(tag.get("content"), f"{place}.content", tuple(texts)), ends)

    def repeated(self, given: Format, place: str, ends: Ends, times: str) -> str:
        return self._ended(f"({self._write(given.get('content'), f'{place}.content', None)}){times}", ends)

    @contextmanager
    def _schema_of(self, given: Format, place: str) -> Iterator[Mapping[str, Any]]:
        """Yield the schema of a format; errors raised in the block name its place."""
        schema = {} if given.get("json_schema") is True else given.get("json_schema")
        if not isinstance(schema, Mapping):
            raise ValueError(f"{place}.json_schema is {brief(schema)}, but must be an object")
        with self._rules.at(f"{place}.json_schema"):
            yield schema

    def _ended(self, written: str, ends: Ends) -> str:
        """Append the ends to a pattern."""
        return joined(written, self._rules.new(any_of(list(map(self._rules.text, ends))))) if ends else written

    def _free_text(self, given: Format, place: str) -> str:
        """Return the terminal of text without the excluded strings."""
        for name in ("max_tokens", "max_chars"):
            if given.get(name) is not None:
                raise ValueError(f"{place}.{name} is not supported")
        excluded = [] if given.get("excludes") is None else given["excludes"]
        if not isinstance(excluded, list) or not all(isinstance(each, str) and each for each in excluded):
            raise ValueError(f"{place}.excludes is {brief(excluded)}, but must be a list of texts")
        if not excluded:
            return "TEXT"
        return self._rules.terminal(f"TEXT & ~(TEXT {any_of(list(map(json.dumps, excluded)))} TEXT)")

    def _token(self, given: Format, place: str) -> str:
        wanted = given.get("token")
        token_id = self._tokenizer.raw.token_to_id(wanted) if isinstance(wanted, str) else wanted
        if given.get("type") != "token" or type(token_id) is not int or not 0 <= token_id < self._tokenizer.size:
            raise ValueError(f"{place} is {brief(given)}, but must be a token of this model, or a text")
        return f"<[{token_id}]>"


_JSON = {"json_schema", "style", "any_order", "max_whitespace_cnt"}
_FREE = {"excludes", "max_tokens", "max_chars"}
_SWITCHES = {"any_order", "at_least_one", "stop_after_first", "loop"}
_KINDS: Mapping[str, tuple[Callable[[FormatWriter, Format, str, Ends], str], set[str]]] = {
    "const_string": (FormatWriter.const_string, {"value"}),
    "json_schema": (FormatWriter.json_schema, _JSON),
    "qwen_xml_parameter": (FormatWriter.qwen_xml_parameter, {"json_schema"}),
    "grammar": (FormatWriter.gbnf, {"grammar"}),
    "regex": (FormatWriter.regex, {"pattern"}),
    "any_text": (FormatWriter.any_text, _FREE),
    "token": (FormatWriter.token, {"token"}),
    "sequence": (FormatWriter.sequence, {"elements"}),
    "or": (FormatWriter.either, {"elements"}),
    "optional": (partial(FormatWriter.repeated, times="?"), {"content"}),
    "plus": (partial(FormatWriter.repeated, times="+"), {"content"}),
    "star": (partial(FormatWriter.repeated, times="*"), {"content"}),
    "repeat": (FormatWriter.repeat, {"content", "min", "max"}),
    "tag": (FormatWriter.tag, {"begin", "content", "end"}),
    "triggered_tags": (
        FormatWriter.triggered_tags,
        {"triggers", "tags", "at_least_one", "stop_after_first", "excludes"},
    ),
    "tags_with_separator": (
        FormatWriter.tags_with_separator,
        {"tags", "separator", "at_least_one", "stop_after_first"},
    ),
    "dispatch": (FormatWriter.dispatch, {"rules", "loop", "excludes"}),
}
"""For each type of format: the method that converts it, and its fields."""


def _kind_of(given: Any, place: str) -> str:
    """Return the type of a format. Raises ValueError for an unknown type or unknown fields."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        found = brief(given) if kind is None else f"of type {brief(kind)}"
        raise ValueError(f"{place} is {found}, but must be an object with one of the types {', '.join(_KINDS)}")
    _, fields = _KINDS[kind]
    if unknown := sorted(map(str, given.keys() - fields - {"type"})):
        raise ValueError(f"{place} has {brief(unknown[0])}, but {kind} knows only {', '.join(sorted(fields))}")
    for name in sorted(_SWITCHES & given.keys()):
        if given[name] is not None and type(given[name]) is not bool:
            raise ValueError(f"{place}.{name} is {brief(given[name])}, but must be true or false")
    return kind


def _tags(given: Format, place: str) -> Iterator[tuple[str, Format]]:
    """Yield the tags of a format, each after its place. Tags need not name their type."""
    for i, tag in enumerate(_list(given, "tags", place)):
        where = f"{place}.tags[{i}]"
        tag = {"type": "tag", **tag} if isinstance(tag, Mapping) else tag
        if _kind_of(tag, where) != "tag":
            raise ValueError(f"{where} is of type {tag['type']}, but must be a tag")
        yield where, tag


def _str(given: Format, name: str, place: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{place}.{name} is {brief(value)}, but must be a text")
    return value


def _list(given: Format, name: str, place: str) -> list[Any]:
    value = given.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place}.{name} is {brief(value)}, but must be a list with something in it")
    return value
