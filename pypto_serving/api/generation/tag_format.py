"""Write the formats of structural tags, which are those of XGrammar, as rules of a Lark grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pypto_serving.api.generation.gbnf import lark_rules
from pypto_serving.api.generation.json_schema import SchemaError, prepare
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.types.guide import MAX_GRAMMAR_CHARS
from pypto_serving.util import brief

Format = Mapping[str, Any]
Ends = Sequence[str] | None
"""The texts of which one must follow a format directly, and belongs to what is written for it.

() if the output ends there; None if something else follows, which could not be told from free text.
"""
_TEXT = "TEXT: /(.|\\n)*/"
_OF_OBJECTS = frozenset(
    {"$ref", "allOf", "anyOf", "oneOf", "enum", "const", "minProperties", "maxProperties", "patternProperties"}
)
"""Keywords of an object that parameters cannot honour."""
_TOLD_APART = "free text must be the content of a tag, come right before a const_string, or be last"


class FormatWriter:
    """Write the rules of one grammar. `options` are llguidance's for JSON.

    Methods raise ValueError, and SchemaError for a schema.
    """

    def __init__(self, options: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._rules: list[str] = []
        self._num_chars = 0

    def grammar(self, given: Any) -> str:
        """Return the grammar of outputs that follow a format."""
        return "\n".join([f"start: {self._write(given, 'format', ())}", _TEXT, *self._rules])

    def _write(self, given: Any, place: str, ends: Ends) -> str:
        """Return what stands for a format and what ends it."""
        kind = given.get("type") if isinstance(given, Mapping) else None
        if not isinstance(kind, str) or kind not in _KINDS:
            found = brief(given) if kind is None else f"of type {brief(kind)}"
            raise ValueError(f"{place} is {found}, but must be an object with one of the types {', '.join(_KINDS)}")
        write, fields = _KINDS[kind]
        if unknown := sorted(map(str, given.keys() - fields - {"type"})):
            raise ValueError(f"{place} has {brief(unknown[0])}, but {kind} knows only {', '.join(sorted(fields))}")
        return write(self, given, place, ends)

    def const_string(self, given: Format, place: str, ends: Ends) -> str:
        return self._ended(self._text(_str(given, "value", place)), ends)

    def token(self, given: Format, place: str, ends: Ends) -> str:
        return self._ended(self._token(given, place), ends)

    def json_schema(self, given: Format, place: str, ends: Ends) -> str:
        style = given.get("style", "json")
        if style == "qwen_xml":
            return self.qwen_xml_parameter(given, place, ends)
        if style != "json" or given.get("any_order"):
            raise ValueError(f"{place}: of the styles only json and qwen_xml are supported, and any_order is not")
        return self._ended(self._json(given, place), ends)

    def qwen_xml_parameter(self, given: Format, place: str, ends: Ends) -> str:
        """Write `<parameter=name>value</parameter>` for each property: texts as they are, the others as JSON."""
        schema = given.get("json_schema")
        if not isinstance(schema, Mapping):
            raise ValueError(f"{place}.json_schema is {brief(schema)}, but must be an object")
        self._rule_once("SPACE", r"/[ \n]{0,8}/")
        prepare(schema, self._options)
        if lost := sorted(schema.keys() & _OF_OBJECTS):
            raise SchemaError(f"{place}.json_schema/{lost[0]} cannot be enforced in <parameter=...>")
        required, shared = schema.get("required", ()), {k: schema[k] for k in ("$defs", "definitions") if k in schema}
        if nameless := [name for name in required if name not in schema.get("properties", {})]:
            raise SchemaError(f"{place}: the required {brief(nameless[0])} is none of the properties")
        parts = ["SPACE"]
        for name, one in schema.get("properties", {}).items():
            if one is False and name not in required:
                continue
            if not name or any(mark in name for mark in "<>\n"):
                raise SchemaError(f"{place}: the name {brief(name)} cannot stand in <parameter=...>")
            is_text = (
                isinstance(one, Mapping) and one.get("type", "string") == "string" and one.keys().isdisjoint(_VALUES)
            )
            if is_text and (lost := sorted(one.keys() & _LIMITS)):
                raise SchemaError(f"{place}: {lost[0]} of the text {brief(name)} cannot be enforced in <parameter=...>")
            end = ("</parameter>",)
            alone = {"allOf": [one]} if isinstance(one, bool) else one
            value = (
                self._until(end, "TEXT")
                if is_text
                else f"SPACE {self._json_of({**shared, **alone})} SPACE {self._text(end[0])}"
            )
            part = f"{self._text(f'<parameter={name}>')} {value} SPACE"
            parts.append(part if name in required else f"({part})?")
        return self._ended(" ".join(parts), ends)

    def regex(self, given: Format, place: str, ends: Ends) -> str:
        """Write a regular expression as one terminal with plain ends, so that it stops where they begin."""
        pattern = _slashed(_str(given, "pattern", place))
        if ends and all(map(self._is_plain, ends)):
            return self._terminal(f"/{pattern}/ ({' | '.join(map(json.dumps, ends))})")
        return self._ended(self._terminal(f"/{pattern}/"), ends)

    def gbnf(self, given: Format, place: str, ends: Ends) -> str:
        prefix = f"g{len(self._rules)}-"
        self._rules.append(lark_rules(_str(given, "grammar", place), prefix))
        return self._ended(f"{prefix}root", ends)

    def any_text(self, given: Format, place: str, ends: Ends) -> str:
        text = self._free_text(given, place)
        if ends is None:
            raise ValueError(f"{place}: {_TOLD_APART}")
        return self._until(ends, text)

    def sequence(self, given: Format, place: str, ends: Ends) -> str:
        elements = _list(given, "elements", place)
        parts, i = [], 0
        while i < len(elements):
            following = elements[i + 1] if i + 1 < len(elements) else None
            where = f"{place}.elements[{i}]"
            if following is None:
                parts.append(self._write(elements[i], where, ends))
            elif isinstance(following, Mapping) and following.get("type") == "const_string" and following.get("value"):
                parts.append(self._write(elements[i], where, (_str(following, "value", f"{place}.elements[{i + 1}]"),)))
                i += 1
                if i + 1 == len(elements):
                    parts.append(self._ended("", ends))
            else:
                parts.append(self._write(elements[i], where, None))
            i += 1
        return " ".join(filter(None, parts)) if elements else self._ended("", ends)

    def either(self, given: Format, place: str, ends: Ends) -> str:
        elements = _list(given, "elements", place)
        return _any_of([self._write(each, f"{place}.elements[{i}]", ends) for i, each in enumerate(elements)])

    def optional(self, given: Format, place: str, ends: Ends) -> str:
        return self._repeated(given, place, ends, "?")

    def plus(self, given: Format, place: str, ends: Ends) -> str:
        return self._repeated(given, place, ends, "+")

    def star(self, given: Format, place: str, ends: Ends) -> str:
        return self._repeated(given, place, ends, "*")

    def repeat(self, given: Format, place: str, ends: Ends) -> str:
        least, most = given.get("min"), given.get("max")
        if type(least) is not int or type(most) is not int or least < 0 or not (most == -1 or most >= least):
            raise ValueError(f"{place} has min {brief(least)} and max {brief(most)}, but max must not be below min")
        return self._repeated(given, place, ends, f"{{{least},{'' if most == -1 else most}}}")

    def tag(self, given: Format, place: str, ends: Ends) -> str:
        begin = given.get("begin")
        opening = (
            self._token(begin, f"{place}.begin")
            if isinstance(begin, Mapping)
            else self._text(_str(given, "begin", place))
        )
        return f"{opening} {self._after_begin(given, place, ends)}"

    def triggered_tags(self, given: Format, place: str, ends: Ends) -> str:
        """Group the tags by trigger: free text up to it, then what follows it in one of its tags."""
        tags, triggers = _list(given, "tags", place), _list(given, "triggers", place)
        follow: dict[str, list[str]] = {}
        whole = []
        for i, tag in enumerate(tags):
            where = f"{place}.tags[{i}]"
            begin = _str(tag, "begin", where) if isinstance(tag, Mapping) else ""
            trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
            if trigger is None:
                raise ValueError(f"{where}.begin is {brief(begin)}, but must begin with one of the triggers")
            rule = self._rule(f"{self._after_begin(tag, where, None)}")
            follow.setdefault(trigger, []).append(f"{self._text(begin.removeprefix(trigger))} {rule}")
            whole.append(f"{self._text(begin)} {rule}")
        first = _any_of(whole) if given.get("at_least_one") else None
        return self._dispatched(given, place, ends, follow, first, loop=not given.get("stop_after_first"))

    def dispatch(self, given: Format, place: str, ends: Ends) -> str:
        follow: dict[str, list[str]] = {}
        for i, rule in enumerate(_list(given, "rules", place)):
            if not isinstance(rule, list) or len(rule) != 2 or not isinstance(rule[0], str) or not rule[0]:
                raise ValueError(f"{place}.rules[{i}] is {brief(rule)}, but must be a pattern and a format")
            follow.setdefault(rule[0], []).append(self._write(rule[1], f"{place}.rules[{i}][1]", None))
        return self._dispatched(given, place, ends, follow, None, loop=given.get("loop", True))

    def tags_with_separator(self, given: Format, place: str, ends: Ends) -> str:
        tags = _list(given, "tags", place)
        tag = self._rule(_any_of([self._write(each, f"{place}.tags[{i}]", None) for i, each in enumerate(tags)]))
        more = "" if given.get("stop_after_first") else f" ({self._text(_str(given, 'separator', place))} {tag})*"
        return self._ended(f"{tag}{more}" if given.get("at_least_one") else f"({tag}{more})?", ends)

    def _dispatched(
        self, given: Format, place: str, ends: Ends, follow: Mapping[str, list[str]], first: str | None, loop: bool
    ) -> str:
        """Write free text in which each trigger is followed by what must follow it; `first` comes before any text."""
        if first is not None and not loop:
            return self._ended(first, ends)
        if ends is None:
            raise ValueError(f"{place}: {_TOLD_APART}")
        text = self._free_text(given, place)
        block = self._rule(_any_of([f"{self._until((t,), text)} {_any_of(each)}" for t, each in follow.items()]))
        rest = self._until(ends, text)
        if not loop:
            return f"({self._ended(block, ends)} | {rest})"
        return " ".join(filter(None, [first, f"{block}*", rest]))

    def _after_begin(self, tag: Format, place: str, ends: Ends) -> str:
        """Return what stands for the content and the end of a tag, and for what must follow it."""
        end = tag.get("end")
        if isinstance(end, Mapping):
            end_token = self._token(end, f"{place}.end")
            is_text = isinstance(tag.get("content"), Mapping) and tag["content"].get("type") == "any_text"
            content = (
                self._free_text(tag["content"], place)
                if is_text
                else self._write(tag.get("content"), f"{place}.content", None)
            )
            return self._ended(f"{content} {end_token}", ends)
        texts = [end] if isinstance(end, str) else end
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{place}.end is {brief(end)}, but must be a text, a list of texts, or a token")
        if not all(texts):
            return self._write(tag.get("content"), f"{place}.content", ends)
        return self._ended(self._write(tag.get("content"), f"{place}.content", tuple(texts)), ends)

    def _repeated(self, given: Format, place: str, ends: Ends, times: str) -> str:
        return self._ended(f"({self._write(given.get('content'), f'{place}.content', None)}){times}", ends)

    def _ended(self, written: str, ends: Ends) -> str:
        """Append the ends to what is written."""
        return self._counted(f"{written} {_any_of([self._text(end) for end in ends])}") if ends else written

    def _counted(self, written: str) -> str:
        """Return what is written, which may be a part of much; refuse too much before it is put together."""
        self._num_chars += len(written)
        if self._num_chars > 4 * MAX_GRAMMAR_CHARS:
            raise ValueError(
                f"format makes more than {4 * MAX_GRAMMAR_CHARS} characters of grammar; send a shorter one"
            )
        return written

    def _until(self, ends: Sequence[str], text: str) -> str:
        """Return what stands for free text up to one of the ends, and for that end."""
        found, plain = [], []
        for end in ends:
            before, *rest = self._tokenizer.split_special(end)
            if isinstance(before, int):
                found.append(f"{text} {self._joined([before, *rest])}")
            elif rest:
                found.append(f"{self._terminal(f'{text} {json.dumps(before)}')} {self._joined(rest)}")
            else:
                plain.append(json.dumps(end))
        if plain:
            found.append(self._rule(f"{text} ({' | '.join(plain)})", "[lazy]"))
        return _any_of(found) if found else text

    def _free_text(self, given: Format, place: str) -> str:
        """Return the terminal of text without what is excluded."""
        for name in ("max_tokens", "max_chars"):
            if given.get(name) is not None:
                raise ValueError(f"{place}.{name} is not supported")
        excluded = given.get("excludes") or []
        if not isinstance(excluded, list) or not all(isinstance(each, str) and each for each in excluded):
            raise ValueError(f"{place}.excludes is {brief(excluded)}, but must be a list of texts")
        if not excluded:
            return "TEXT"
        return self._terminal(f"TEXT & ~(TEXT ({' | '.join(map(json.dumps, excluded))}) TEXT)")

    def _json(self, given: Format, place: str) -> str:
        schema, most = given.get("json_schema"), given.get("max_whitespace_cnt")
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if not isinstance(schema, Mapping):
            raise ValueError(f"{place}.json_schema is {brief(schema)}, but must be an object")
        if most is None:
            return self._json_of(schema)
        if type(most) is not int or most < 0:
            raise ValueError(f"{place}.max_whitespace_cnt is {brief(most)}, but must be a number of characters")
        flexible = {"whitespace_pattern": rf"[\x20\x09\x0a\x0d]{{1,{most}}}"}
        return "%json " + json.dumps(prepare(schema, flexible if most else {"whitespace_flexible": False}))

    def _json_of(self, schema: Mapping[str, Any]) -> str:
        return self._counted("%json " + json.dumps(prepare(schema, self._options)))

    def _token(self, given: Format, place: str) -> str:
        wanted = given.get("token")
        token_id = self._tokenizer.raw.token_to_id(wanted) if isinstance(wanted, str) else wanted
        if given.get("type") != "token" or type(token_id) is not int or not 0 <= token_id < self._tokenizer.size:
            raise ValueError(f"{place} is {brief(given)}, but must be a token of this model, or a text")
        return f"<[{token_id}]>"

    def _text(self, text: str) -> str:
        """Write a text, in which special tokens stand for themselves."""
        return self._joined(self._tokenizer.split_special(text))

    def _joined(self, parts: Sequence[str | int]) -> str:
        return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts)

    def _is_plain(self, text: str) -> bool:
        """Whether no special token is in a text."""
        return self._tokenizer.split_special(text) in ([text], [])

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _rule_once(self, name: str, body: str) -> None:
        if (rule := f"{name}: {body}") not in self._rules:
            self._rules.append(rule)


_VALUES, _LIMITS = {"enum", "const", "$ref", "anyOf", "oneOf", "allOf"}, {"pattern", "format", "minLength", "maxLength"}
_JSON = {"json_schema", "style", "any_order", "max_whitespace_cnt"}
_FREE = {"excludes", "max_tokens", "max_chars"}
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
    "optional": (FormatWriter.optional, {"content"}),
    "plus": (FormatWriter.plus, {"content"}),
    "star": (FormatWriter.star, {"content"}),
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
"""How each type is written, and its fields."""


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


def _any_of(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _slashed(pattern: str) -> str:
    """Return a regular expression as it stands between slashes."""
    made, escaped = [], False
    for char in pattern:
        made.append("\\/" if char == "/" and not escaped else "\\n" if char == "\n" else char)
        escaped = char == "\\" and not escaped
    return "".join(made)
