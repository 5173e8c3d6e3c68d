"""Read the input and the questions of a decision, and write them as text for the model.

Raises RequestError that names the field at fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec

from pypto_serving.api.chat.tools import is_shallow, refuse, string_in, text_of
from pypto_serving.api.common.body import MAX_MESSAGES
from pypto_serving.api.generation.labels import YES_NO, Kind, labels_of
from pypto_serving.util import brief

MAX_QUESTIONS, MAX_OPTIONS, MAX_LEVELS = 400, 255, 10
MAX_NAME_CHARS = 1024
MAX_JSON_LEVELS, MAX_JSON_VALUES, MAX_JSON_BYTES = 32, 10_000, 256 << 10
"""Limits of the levels, values and bytes of one JSON part."""
_PARTS = {
    "user": {"input_text": "text", "input_json": "data"},
    "assistant": {"output_text": "text", "refusal": "refusal"},
}
"""The field that contains the text, by role and type of the part."""
_WORDS = {"input_text": "text"}
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
Item = Mapping[str, Any]


def read_input(given: Any) -> str:
    """Return the input as one text. A conversation becomes a transcript, since it is judged, not continued.

    A text, or a single message of a user, stays unchanged.
    """
    if isinstance(given, str):
        text = given
    elif isinstance(given, list) and 0 < len(given) <= MAX_MESSAGES:
        turns = list(_Transcript().read(given))
        text = turns[0][1] if [head for head, _ in turns] == ["user"] else "\n\n".join(f"[{h}]\n{t}" for h, t in turns)
    else:
        shown = f"a list of {len(given)} items" if isinstance(given, list) else brief(given)
        refuse("input", f"is {shown}, but must be a text, or a list of 1 to {MAX_MESSAGES} items")
    if not text.strip():
        refuse("input", "is empty; send something to decide about")
    return text


class _Transcript:
    """Reads the items of a conversation. Remembers the calls so far."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def read(self, items: Sequence[Any]) -> Iterator[tuple[str, str]]:
        """Iterate over the heading and the text of each item."""
        for i, item in enumerate(items):
            where = f"input[{i}]"
            if not isinstance(item, Mapping):
                refuse(where, f"is {brief(item)}, but must be an object")
            kind = item.get("type", "message")
            if kind == "message":
                yield self._message(item, where)
            elif isinstance(kind, str) and kind in _CALLS:
                name = self._names[string_in(item, "call_id", where)] = string_in(item, "name", where)
                yield f"assistant calls {name}", string_in(item, _CALLS[kind], where)
            elif isinstance(kind, str) and kind.removesuffix("_output") in _CALLS:
                yield self._result(item, where)
            else:
                refuse(f"{where}.type", f"is {brief(kind)}, but must be 'message', a tool's call, or its output")

    def _message(self, item: Item, where: str) -> tuple[str, str]:
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            refuse(f"{where}.role", f"is {brief(role)}, but must be 'user', 'assistant', 'system' or 'developer'")
        return role, read_content(item.get("content"), f"{where}.content", _PARTS.get(role, _WORDS))

    def _result(self, item: Item, where: str) -> tuple[str, str]:
        call_id = string_in(item, "call_id", where)
        if call_id not in self._names:
            refuse(f"{where}.call_id", f"is {brief(call_id)}, but no earlier call has this id")
        return f"result of {self._names[call_id]}", read_content(item.get("output"), f"{where}.output", _WORDS)


def read_content(content: Any, where: str, fields: Mapping[str, str] = _PARTS["user"]) -> str:
    """Return the text of a content: a string, or parts joined by line breaks; see `text_of` for `fields`."""
    if isinstance(content, list) and "input_json" in fields:
        content = [_with_json(part, f"{where}[{i}]") for i, part in enumerate(content)]
    return text_of(content, where, fields)


def _with_json(part: Any, where: str) -> Any:
    """Return a part with its JSON data, if any, written as text."""
    if isinstance(part, Mapping) and part.get("type") == "input_json":
        return {**part, "data": _json(part.get("data"), f"{where}.data")}
    return part


def _json(data: Any, where: str) -> str:
    if not isinstance(data, dict) and not (isinstance(data, list) and all(isinstance(one, dict) for one in data)):
        refuse(where, f"is {brief(data)}, but must be an object or a list of objects")
    if not is_shallow(data, MAX_JSON_LEVELS):
        refuse(where, f"has more than {MAX_JSON_LEVELS} levels; nest less")
    if _num_values(data) > MAX_JSON_VALUES:
        refuse(where, f"has more than {MAX_JSON_VALUES} values; send fewer")
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    if len(text.encode()) > MAX_JSON_BYTES:
        refuse(where, f"has more than {MAX_JSON_BYTES} bytes; send less")
    return text


def _num_values(data: Any) -> int:
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return 1 + sum(map(_num_values, inner))


_KINDS = get_args(Kind)
"""A tuple, not a set: a client may send a list as the type, which has no hash."""
_LISTS = {"choice": ("choices", "value", MAX_OPTIONS), "score": ("levels", "label", MAX_LEVELS)}
_TASKS = {
    "predicate": ("Statement", "Is the statement true of the input? Answer with Yes or No only."),
    "choice": ("Question", "Answer with the letters before one option only."),
    "score": ("Question", "Answer with the number of one level only."),
}


class Question(msgspec.Struct, frozen=True):
    """A question. Its labels stand for `values`; `descriptions` explain these, or are ""."""

    kind: Kind
    name: str | None
    instructions: str
    values: list[str | bool]
    descriptions: list[str]

    @property
    def labels(self) -> list[str]:
        """Return the possible answers of the model, in the order of `values`."""
        return labels_of(self.kind, len(self.values))

    def text(self) -> str:
        """Return the question with its options, and how to answer it."""
        head, task = _TASKS[self.kind]
        options = zip(self.labels, self.values, self.descriptions, strict=True)
        lines = [f"{label}: {_shown(value)}{more and f' - {more}'}" for label, value, more in options]
        return "\n".join([f"{head}: {self.instructions}", *(lines if self.kind != "predicate" else ()), task])


def read_questions(given: Sequence[Any]) -> list[Question]:
    """Return the questions of a body, at least one."""
    if not given:
        refuse("questions", "is an empty list; ask at least one question")
    return [_question(one, f"questions[{i}]") for i, one in enumerate(given)]


def _question(given: Any, where: str) -> Question:
    kind: Any = given.get("type") if isinstance(given, Mapping) else None
    if kind not in _KINDS:
        refuse(f"{where}.type", f"is {brief(kind)}, but must be 'predicate', 'choice' or 'score'")
    name = given.get("name")
    if not isinstance(name, str | None) or len(name or "") > MAX_NAME_CHARS:
        refuse(f"{where}.name", f"is {brief(name)}, but must be a string of at most {MAX_NAME_CHARS} characters")
    instructions = read_content(given.get("instructions"), f"{where}.instructions")
    values, descriptions = _options(given, kind, where)
    return Question(kind, name, instructions, values, descriptions)


def _options(given: Mapping[str, Any], kind: str, where: str) -> tuple[list[str | bool], list[str]]:
    """Return the values and descriptions of choices or levels. A text never equals a boolean."""
    if kind == "predicate":
        return [*YES_NO], [""] * len(YES_NO)
    field, key, most = _LISTS[kind]
    options, place = given.get(field), f"{where}.{field}"
    if not isinstance(options, list) or not 2 <= len(options) <= most:
        shown = f"a list of {len(options)}" if isinstance(options, list) else brief(options)
        refuse(place, f"is {shown}, but must be a list of 2 to {most} {field}")
    seen: set[tuple[type, str | bool]] = set()
    values, descriptions = [], []
    for i, option in enumerate(options):
        value = option.get(key) if isinstance(option, Mapping) else None
        if not isinstance(value, str) and not (kind == "choice" and isinstance(value, bool)):
            allowed = "a string, true or false" if kind == "choice" else "a string"
            refuse(f"{place}[{i}].{key}", f"is {brief(value)}, but must be {allowed}")
        if kind == "choice" and (type(value), value) in seen:
            refuse(f"{place}[{i}].{key}", f"is {brief(value)} again; give each choice a value of its own")
        seen.add((type(value), value))
        more = option.get("description")
        if not isinstance(more, str | None):
            refuse(f"{place}[{i}].description", f"is {brief(more)}, but must be a string")
        values.append(value)
        descriptions.append(more or "")
    return values, descriptions


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else "true" if value else "false"
