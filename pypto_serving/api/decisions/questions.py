"""Read questions, and write them as a model reads them. Raises RequestError that names the place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec

from pypto_serving.api.chat.tools import refuse
from pypto_serving.api.decisions.inputs import read_content
from pypto_serving.api.decisions.schemas import MAX_LEVELS, MAX_NAME_CHARS, MAX_OPTIONS
from pypto_serving.api.generation.labels import YES_NO, Kind, labels_of
from pypto_serving.util import brief

_KINDS = get_args(Kind)
"""A tuple, in which anything may be looked up: what a client sends as a type may be a list."""
_LISTS = {"choice": ("choices", "value", MAX_OPTIONS), "score": ("levels", "label", MAX_LEVELS)}
_TASKS = {
    "predicate": ("Statement", "Is the statement true of the input? Answer with Yes or No only."),
    "choice": ("Question", "Answer with the letters before one option only."),
    "score": ("Question", "Answer with the number of one level only."),
}


class Question(msgspec.Struct, frozen=True):
    """A question. `values` are what its labels stand for; `descriptions` say more of them, "" for nothing."""

    kind: Kind
    name: str | None
    instructions: str
    values: list[str | bool]
    descriptions: list[str]

    @property
    def labels(self) -> list[str]:
        """Return what the model is asked to answer with, in the order of `values`."""
        return labels_of(self.kind, len(self.values))

    def text(self) -> str:
        """Return the question with its options, and how to answer it."""
        head, task = _TASKS[self.kind]
        options = zip(self.labels, self.values, self.descriptions, strict=True)
        lines = [f"{label}: {_shown(value)}{more and f' - {more}'}" for label, value, more in options]
        return "\n".join([f"{head}: {self.instructions}", *(lines if self.kind != "predicate" else ()), task])


def read_questions(given: Sequence[Any]) -> list[Question]:
    """Return the questions of a body, of which there is at least one."""
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
    """Return the values and descriptions of choices or levels. A text and a truth value are never the same choice."""
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
