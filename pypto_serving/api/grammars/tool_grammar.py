"""Write the grammar of tool calls in a family's form, for outputs that have to be calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from pypto_serving.api.chat.parsers.families import CallForm
from pypto_serving.api.grammars.grammar_text import ANY, GrammarText, any_of, joined, regex, without
from pypto_serving.api.grammars.json_schema import SchemaError
from pypto_serving.api.grammars.tool_arguments import ARGUMENTS, as_object, check_name, prepare_object
from pypto_serving.api.text.tokenizer import split_at
from pypto_serving.errors import RequestError
from pypto_serving.types.guide import Grammar

Function = Mapping[str, Any]
T = TypeVar("T")
SpecialId = Callable[[str], int | None]
"""Returns the id of a text that is a special token; None for others."""


def forced_calls(
    form: CallForm, functions: Sequence[Function], one: bool, special_id: SpecialId, options: Mapping[str, Any]
) -> Grammar:
    """Return the grammar of outputs that are calls of `functions`: only `one`, or one and more.

    `options` are llguidance's for JSON. Raises RequestError that names the tool whose schema cannot be enforced.
    """
    with _refused():
        writer = _CallWriter(form, special_id, options).adding(functions)
        return writer.rules.grammar(f"start: {writer.calls(one)}")


def calls_beside_json(
    form: CallForm, functions: Sequence[Function], one: bool, special_id: SpecialId, options: Mapping[str, Any]
) -> Grammar:
    """Return the grammar of calls for `either`. Raises like `forced_calls`.

    Calls that are JSON without a mark are written as schemas, too: a grammar cannot distinguish JSON from similar text.
    Such calls come one by one, never as a list, which would be one more kind of JSON.
    """
    if not form.opens or form.arguments != "json":
        return forced_calls(form, functions, one, special_id, options)
    with _refused():
        writer = _CallWriter(form, special_id, options)
        rules = writer.rules
        call = rules.new(any_of(writer.for_each(functions, lambda each: rules.prepared(_as_schema(form, each)))))
        more = "" if one or form.begin else f"({rules.text(form.between)} {call})*"
        return rules.grammar(f"start: {joined(call, more)}")


def strict_calls(
    form: CallForm, functions: Sequence[Function], one: bool, special_id: SpecialId, options: Mapping[str, Any]
) -> Grammar:
    """Return the grammar of free text in which calls follow the schemas of strict functions.

    Wherever the parser of the form would begin to read a call, one must follow. Raises like `forced_calls`.
    """
    loose = [f if f.get("strict") else {"name": f["name"], "parameters": {"type": "object"}} for f in functions]
    with _refused():
        writer = _CallWriter(form, special_id, options).adding(loose)
        return writer.rules.grammar(*(writer.opened(one) if form.opens else writer.marked(one)))


def either(calls: Grammar, content_schema: str) -> Grammar:
    """Return the grammar of outputs that are calls, or JSON of a schema."""
    return Grammar("lark", calls.text.replace("start: ", f"start: %json {content_schema} | ", 1))


class _CallWriter:
    """Write rules for the calls of one request. Raises SchemaError that names the function at fault."""

    def __init__(self, form: CallForm, special_id: SpecialId, options: Mapping[str, Any]) -> None:
        special = {mark: token_id for mark in form.marks if (token_id := special_id(mark)) is not None}
        self.rules = GrammarText(split_at(special), options, close_objects=True)
        self._form = form
        self._calls: list[tuple[str, str]] = []

    def adding(self, functions: Sequence[Function]) -> Self:
        """Write the rules of each function."""
        self._calls += self.for_each(functions, self._call)
        return self

    def for_each(self, functions: Sequence[Function], write: Callable[[Function], T]) -> list[T]:
        """Write something for each function; errors name it."""
        made = []
        for function in functions:
            with self.rules.at(f"the parameters of {function['name']}"):
                made.append(write(function))
        return made

    def calls(self, one: bool) -> str:
        """Write all calls of an output, with the text around and between them."""
        form = self._form
        begin, end = ("", "") if one and form.alone else (form.begin, form.end)
        return joined(self._calls_after(begin + form.head, one), self.rules.text(end))

    def marked(self, one: bool) -> list[str]:
        """Write free text in which each start of calls is followed by calls."""
        form, rules, text = self._form, self.rules, self._without(self._tokens)
        blocks = []
        for start in form.starts:
            _, _, head = (form.begin + form.head).partition(start)
            calls = self._calls_after(head, one or not form.end)
            blocks.append(joined(rules.until([start], text), calls, rules.text(form.end)))
        return [f"start: block{'?' if one else '*'} {text}", f"block: {any_of(blocks)}"]

    def opened(self, one: bool) -> list[str]:
        """Write calls at the beginning, or free text that does not begin like one; calls follow starts, too.

        Where no special token tells a start, its calls could not be followed: it does not stand in the text.
        """
        form, rules = self._form, self.rules
        first = [self.calls(one), *(joined(rules.text(a), self.calls(one), rules.text(b)) for a, b in form.fences)]
        text = self._without(form.starts)
        free = rules.terminal(f"{text} & {_not_begun(form.opens)}")
        rest = rules.terminal(f"{text} & {_not_begun(form.goes_on)}") if form.goes_on and not one else text
        close, blocks = rules.text(form.close), ""
        if self._tokens:
            starts = any_of([rules.text(start) for start in self._tokens])
            blocks = f"({joined(starts, self.calls(one), f'({close})?' if close else '', rest)}){'?' if one else '*'}"
        calls = rules.new(f"({' | '.join(first)}) {rest}")
        if one:
            return [f"start: {calls} | {joined(free, blocks)}"]
        return [f"start: {joined(f'({calls} | {free})', blocks)}"]

    @property
    def _tokens(self) -> list[str]:
        """Return the starts that hold special tokens: text that spells them is read as they are."""
        return [start for start in self._form.starts if self.rules.split(start) != [start]]

    def _without(self, starts: Sequence[str]) -> str:
        """Write text in which none of `starts` is spelled."""
        return self.rules.terminal(" & ".join(["TEXT", *map(without, starts)])) if starts else "TEXT"

    def _calls_after(self, head: str, one: bool) -> str:
        """Write a call after `head`, and maybe more calls."""
        first, form = self._any_call(head), self._form
        return first if one else f"{first} ({self._any_call(form.between + form.head)})*"

    def _any_call(self, head: str) -> str:
        """Write a call of any function. What tells it from text is one terminal: a shorter one would lose to text."""
        return any_of([joined(self.rules.text(head + name), rest) for name, rest in self._calls])

    def _call(self, function: Function) -> tuple[str, str]:
        """Return the name of a call with what follows it, and the rule of the rest."""
        form, name, schema = self._form, function["name"], _parameters(function)
        if form.arguments == "python":
            check_name(name, all(part.isidentifier() for part in name.split(".")))
        arguments = ARGUMENTS[form.arguments](self.rules, schema)
        return name + form.middle, self.rules.new(joined(arguments, self.rules.text(form.tail)) or '""')


def _not_begun(pattern: str) -> str:
    return f"~{regex(pattern + ANY)}"


@contextmanager
def _refused() -> Iterator[None]:
    """Turn what cannot be written into a RequestError."""
    try:
        yield
    except SchemaError as error:
        raise RequestError(f"tools: {error}", param="tools", code="unsupported_schema") from None


def _parameters(function: Function) -> Mapping[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}}


def _as_schema(form: CallForm, function: Function) -> Mapping[str, Any]:
    """Return the prepared schema of a call that is JSON as a whole."""
    whole, definitions = prepare_object(_parameters(function))
    key = "parameters" if '"parameters"' in form.middle else "arguments"
    properties = {"name": {"const": function["name"]}, key: as_object(whole)}
    return definitions.with_those_of({"type": "object", "properties": properties, "required": list(properties)})
