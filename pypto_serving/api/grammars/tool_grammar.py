"""Write the grammar of tool calls in the form of a model family, for outputs that must be calls."""

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
"""Returns the id of a special token, or None if the text is not a special token."""


def forced_calls(
    form: CallForm, functions: Sequence[Function], one: bool, special_id: SpecialId, options: Mapping[str, Any]
) -> Grammar:
    """Return the grammar of outputs that call `functions`: exactly once with `one`, else at least once.

    `options` are llguidance's JSON options. Raises RequestError that names the tool whose schema cannot be enforced.
    """
    with _refused():
        writer = _CallWriter(form, special_id, options).adding(functions)
        return writer.rules.grammar(f"start: {writer.calls(one)}")


def calls_beside_json(
    form: CallForm, functions: Sequence[Function], one: bool, special_id: SpecialId, options: Mapping[str, Any]
) -> Grammar:
    """Return the grammar of calls that `either` combines with a JSON schema. Raises like `forced_calls`.

    A form may write calls as plain JSON, without a mark. A grammar cannot distinguish JSON from similar text, so these
    calls are written as JSON schemas, too. They come one by one: a list would be one more kind of JSON.
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
    """Return the grammar of free text with calls; calls of strict functions must match their schemas.

    Wherever the form's parser would begin to read a call, a valid call must follow. Raises like `forced_calls`.
    """
    loose = [f if f.get("strict") else {"name": f["name"], "parameters": {"type": "object"}} for f in functions]
    with _refused():
        writer = _CallWriter(form, special_id, options).adding(loose)
        return writer.rules.grammar(*(writer.opened(one) if form.opens else writer.marked(one)))


def either(calls: Grammar, content_schema: str) -> Grammar:
    """Return the grammar of outputs that are either `calls` or JSON that matches `content_schema`."""
    return Grammar("lark", calls.text.replace("start: ", f"start: %json {content_schema} | ", 1))


class _CallWriter:
    """Writes the grammar rules for the calls of one request. Raises SchemaError that names the function at fault."""

    def __init__(self, form: CallForm, special_id: SpecialId, options: Mapping[str, Any]) -> None:
        special = {mark: token_id for mark in form.marks if (token_id := special_id(mark)) is not None}
        self.rules = GrammarText(split_at(special), options, close_objects=True)
        self._form = form
        self._calls: list[tuple[str, str]] = []

    def adding(self, functions: Sequence[Function]) -> Self:
        """Add a rule for the calls of each function, and return the writer."""
        self._calls += self.for_each(functions, self._call)
        return self

    def for_each(self, functions: Sequence[Function], write: Callable[[Function], T]) -> list[T]:
        """Return `write(function)` for each function; a SchemaError names the function."""
        made = []
        for function in functions:
            with self.rules.at(f"the parameters of {function['name']}"):
                made.append(write(function))
        return made

    def calls(self, one: bool) -> str:
        """Return the pattern of one call, or of several, with the text around and between them."""
        form = self._form
        begin, end = ("", "") if one and form.alone else (form.begin, form.end)
        return joined(self._calls_after(begin + form.head, one), self.rules.text(end))

    def marked(self, one: bool) -> list[str]:
        """Return the rules of free text in which calls must follow each start of calls."""
        form, rules, text = self._form, self.rules, self._without(self._tokens)
        blocks = []
        for start in form.starts:
            _, _, head = (form.begin + form.head).partition(start)
            calls = self._calls_after(head, one or not form.end)
            blocks.append(joined(rules.until([start], text), calls, rules.text(form.end)))
        return [f"start: block{'?' if one else '*'} {text}", f"block: {any_of(blocks)}"]

    def opened(self, one: bool) -> list[str]:
        """Return the rules of outputs that begin with calls, or with free text that does not begin like a call.

        Calls also follow each start with a special token. Text may not contain other starts: grammars cannot find them.
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
        """Return the starts that contain special tokens. The parser also takes text that spells one for the token."""
        return [start for start in self._form.starts if self.rules.split(start) != [start]]

    def _without(self, starts: Sequence[str]) -> str:
        """Return the terminal of text that contains none of `starts`."""
        return self.rules.terminal(" & ".join(["TEXT", *map(without, starts)])) if starts else "TEXT"

    def _calls_after(self, head: str, one: bool) -> str:
        """Return the pattern of a call after `head`, then of further calls unless only `one` is allowed."""
        first, form = self._any_call(head), self._form
        return first if one else f"{first} ({self._any_call(form.between + form.head)})*"

    def _any_call(self, head: str) -> str:
        """Return the pattern of any function's call; head and name are one terminal, since text beats a shorter one."""
        return any_of([joined(self.rules.text(head + name), rest) for name, rest in self._calls])

    def _call(self, function: Function) -> tuple[str, str]:
        """Return a call's fixed text from name to arguments, and the rule of the rest."""
        form, name, schema = self._form, function["name"], _parameters(function)
        if form.arguments == "python":
            check_name(name, all(part.isidentifier() for part in name.split(".")))
        arguments = ARGUMENTS[form.arguments](self.rules, schema)
        return name + form.middle, self.rules.new(joined(arguments, self.rules.text(form.tail)) or '""')


def _not_begun(pattern: str) -> str:
    return f"~{regex(pattern + ANY)}"


@contextmanager
def _refused() -> Iterator[None]:
    """Turn a SchemaError in the block into a RequestError."""
    try:
        yield
    except SchemaError as error:
        raise RequestError(f"tools: {error}", param="tools", code="unsupported_schema") from None


def _parameters(function: Function) -> Mapping[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}}


def _as_schema(form: CallForm, function: Function) -> Mapping[str, Any]:
    """Return the prepared schema of a whole call that is one JSON object."""
    whole, definitions = prepare_object(_parameters(function))
    key = "parameters" if '"parameters"' in form.middle else "arguments"
    properties = {"name": {"const": function["name"]}, key: as_object(whole)}
    return definitions.with_those_of({"type": "object", "properties": properties, "required": list(properties)})
