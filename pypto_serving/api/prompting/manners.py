"""Fit conversations to a chat template, whatever forms of conversations it accepts."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import chain, pairwise, takewhile
from typing import Any, Literal, get_args

from pypto_serving.api.chat.tools import as_object
from pypto_serving.api.prompting.tools_in_words import INSTRUCTING
from pypto_serving.errors import RequestError

Message = dict[str, Any]
_CALL = {"id": "call00001", "type": "function", "function": {"name": "qz_call", "arguments": {"qz_key": "qz_value"}}}


def _says(role: str, text: str) -> Message:
    return {"role": role, "content": text}


_FIRST, _ASKS, _ASKS_MORE = _says("system", "qz_first"), _says("user", "qz_asks"), _says("user", "qz_more")
_ANSWERS = _says("assistant", "qz_answers")
_CALLS = {**_says("assistant", ""), "tool_calls": [_CALL]}
_RESULT = {**_says("tool", "qz_result"), "tool_call_id": _CALL["id"], "name": "qz_call"}
_OTHER_CALL = {**_CALL, "id": "call00002", "function": {"name": "qz_call", "arguments": {"qz_key": "qz_other"}}}
_OTHER_RESULT = {**_RESULT, "tool_call_id": _OTHER_CALL["id"]}
_KEY = {"type": "string", "description": "qz_text"}
_FUNCTION = {
    "name": "qz_call",
    "description": "qz_text",
    "parameters": {"type": "object", "properties": {"qz_key": _KEY}, "required": ["qz_key"]},
}
ToolPlace = Literal["tools", "functions", "system"]
Values = Mapping[str, Any]
_NO_VALUES: Values = {}


def place_tools(
    place: ToolPlace | None, messages: list[Message], functions: Sequence[Mapping[str, Any]]
) -> tuple[list[Message], Values]:
    """Return messages and values of a template that takes tools in this place.

    - `tools`: as the value of this name, which has them already
    - `functions`: as JSON in the value of this name, beside the day (Firefunction)
    - `system`: as JSON in the field `tools` of the system message (Phi-4-mini)
    """
    if place not in ("functions", "system"):
        return messages, {}
    text = json.dumps(functions, ensure_ascii=False)
    if place == "functions":
        return messages, {"functions": text, "datetime": f"{datetime.now():%Y-%m-%d}"}
    if not functions:
        return messages, {}
    has_system = bool(messages) and messages[0]["role"] == "system"
    first = messages[0] if has_system else _says("system", "")
    return [{**first, "tools": text}, *messages[int(has_system) :]], {}


class Manners:
    """Forms of conversations that a template accepts, found by rendering short ones.

    `render` takes messages and more values. It raises RequestError.
    """

    def __init__(self, render: Callable[[Sequence[Mapping[str, Any]], Values], str]) -> None:
        self._render = render

    @cached_property
    def place_of_tools(self) -> ToolPlace | None:
        """Where the template takes the tools of a request, if it shows them."""
        for place in get_args(ToolPlace):
            if "qz_call" in self._with_tools([_ASKS], place):
                return place  # type: ignore[no-any-return]
        return None

    @cached_property
    def takes_developers(self) -> bool:
        """Whether the template shows a message of the role developer."""
        return self._takes([_FIRST, _ASKS], [{**_FIRST, "role": "developer"}, _ASKS])

    @cached_property
    def takes_answer_first(self) -> bool:
        """Whether an assistant message may come first."""
        return self._takes([_ASKS], [_ANSWERS, _ASKS])

    @cached_property
    def takes_system_before_calls(self) -> bool:
        """Whether the template shows the system message when the last message is the result of a tool."""
        called = [_ASKS, _with_form(_CALLS, *self.form_of_calls), _RESULT]
        return self._takes(called, [_FIRST, *called])

    @cached_property
    def takes_several_calls(self) -> bool:
        """Whether the template shows all calls of a message."""
        calls = _with_form({**_CALLS, "tool_calls": [_CALL, _OTHER_CALL]}, *self.form_of_calls)
        return not self.shows_calls or "qz_other" in self._shown([_ASKS, calls, _RESULT, _OTHER_RESULT])

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template shows a system message at the beginning."""
        return self._takes([_ASKS], [_FIRST, _ASKS])

    @cached_property
    def takes_later_system(self) -> bool:
        """Whether the template shows later system messages in place, after user and after assistant messages."""
        later, last = _says("system", "qz_later"), _says("system", "qz_last")
        return self._takes([_FIRST, _ASKS], [_FIRST, _ASKS, later, _ANSWERS, last, _ASKS_MORE])

    @cached_property
    def takes_repeated_roles(self) -> bool:
        """Whether a user message may follow another."""
        return self._takes([_ASKS], [_ASKS, _ASKS_MORE])

    @cached_property
    def takes_user_after_tool(self) -> bool:
        """Whether a user message may follow the result of a tool."""
        return self._takes([_ASKS, _CALLS, _RESULT], [_ASKS, _CALLS, _RESULT, _ASKS_MORE])

    @cached_property
    def form_of_calls(self) -> tuple[bool, bool]:
        """Whether calls are shown only beside a null content, and only with their arguments as text."""
        for as_text in (False, True):
            for null in (False, True):
                prompt = self._prompt([_ASKS, _with_form(_CALLS, null, as_text), _RESULT])
                if "qz_key" in prompt and "qz_value" in prompt:
                    return null, as_text
        return False, False

    @cached_property
    def shows_calls(self) -> bool:
        """Whether the template shows a call and its result."""
        messages = [_ASKS, _with_form(_CALLS, *self.form_of_calls), _RESULT]
        return all(text in self._shown(messages) for text in ("qz_value", "qz_result"))

    @cached_property
    def takes_raw_arguments(self) -> bool:
        """Whether calls are shown whose arguments are text that is not JSON, as a model may have written it."""
        function = {"name": "qz_call", "arguments": '{"qz_key": "qz_value'}
        message = _with_form({**_CALLS, "tool_calls": [{**_CALL, "function": function}]}, *self.form_of_calls)
        prompt = self._prompt([_ASKS, message, _RESULT])
        return "qz_key" in prompt and "qz_value" in prompt

    def _takes(self, plain: Sequence[Message], tried: Sequence[Message]) -> bool:
        """Return whether the rendered `tried` has all texts in order, or if the template cannot even render `plain`."""
        return self._shows(tried) or not self._shows(plain)

    def _shows(self, messages: Sequence[Message]) -> bool:
        prompt, at = self._prompt(messages), 0
        for text in filter(None, (message["content"] for message in messages)):
            at = prompt.find(text, at)
            if at < 0:
                return False
        return bool(prompt)

    def _prompt(self, messages: Sequence[Message], values: Values = _NO_VALUES) -> str:
        """Return the rendered messages, "" if the template refuses them."""
        try:
            return self._render(messages, values)
        except RequestError:
            return ""

    def _with_tools(self, messages: list[Message], place: ToolPlace | None) -> str:
        messages, values = place_tools(place, messages, [_FUNCTION])
        tools = [{"type": "function", "function": _FUNCTION}] if place == "tools" else None
        return self._prompt(messages, {"tools": tools, **values})

    def _shown(self, messages: list[Message]) -> str:
        """Return the rendered messages, with tools if the template refuses them without."""
        return self._prompt(messages) or self._with_tools(messages, self.place_of_tools)

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages to render.

        - Merge system and developer messages at the beginning.
        - Keep later ones if the template accepts them; else append their text to the preceding turn of user or tool, or
          put it before the user's text that follows.
        - Merge consecutive messages of one role if the template requires alternating roles.
        - Put an empty user message before an assistant's that must not be the first.
        - Put the system message into the first user turn where the template drops it after calls (Mistral Nemo).
        - Give each call a message of its own, with its result, if the template takes one call at a time (Llama 3).
        - Give calls in the form that the template shows. Arguments that are not a JSON object are text, or if the
          template cannot show that, the text of the only argument `arguments`.
        """
        fitted = _join_first(messages)
        start = int(fitted[0]["role"] in INSTRUCTING) if fitted else 0
        if fitted[start:] and fitted[start]["role"] == "assistant" and not self.takes_answer_first:
            fitted.insert(start, _says("user", ""))
        called = any("tool_calls" in message for message in fitted)
        if start and not (self.takes_system and (not called or self.takes_system_before_calls)):
            fitted = _move(fitted, 0)
        elif any(message["role"] in INSTRUCTING for message in fitted[start:]) and not self.takes_later_system:
            fitted = _move(fitted, start)
        if any(len(message.get("tool_calls", ())) > 1 for message in fitted) and not self.takes_several_calls:
            fitted = _one_by_one(fitted)
        pairs = {(one["role"], other["role"]) for one, other in pairwise(fitted)}
        if pairs & {("user", "user"), ("assistant", "assistant")} and not self.takes_repeated_roles:
            fitted = _join(fitted, ("user", "assistant"))
        if ("tool", "user") in pairs and not self.takes_user_after_tool:
            fitted = _join(fitted, ("tool",), ("user",))
        calls = [call["function"] for message in fitted for call in message.get("tool_calls", ())]
        raw = any(isinstance(function["arguments"], str) for function in calls) and not self.takes_raw_arguments
        if calls and (raw or any(self.form_of_calls)):
            fitted = [_with_form(message, *self.form_of_calls, raw) for message in fitted]
        return fitted


def _with_form(message: Message, null: bool, as_text: bool, wraps: bool = False) -> Message:
    """Return a message whose calls have no content, if it is empty and `null`, and arguments `as_text`.

    Arguments that are text already become an only argument if the form `wraps` them.
    """
    if "tool_calls" not in message:
        return message
    functions = [{**call["function"]} for call in message["tool_calls"]]
    for function in functions:
        given = as_object(function["arguments"]) if wraps else function["arguments"]
        as_is = isinstance(given, str) or not as_text
        function["arguments"] = given if as_is else json.dumps(given, ensure_ascii=False)
    calls = [{**call, "function": function} for call, function in zip(message["tool_calls"], functions, strict=True)]
    content = None if null and not message["content"] else message["content"]
    return {**message, "content": content, "tool_calls": calls}


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Give each call a message of its own, with its result after it. Without ids they belong together in order."""
    split: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls", ())
        results: dict[str | None, deque[Message]] = defaultdict(deque)
        while len(calls) > 1 and at < len(messages) and messages[at]["role"] == "tool":
            results[messages[at].get("tool_call_id")].append(messages[at])
            at += 1
        for i, call in enumerate(calls):
            split.append({**(message if i == 0 else _says("assistant", "")), "tool_calls": [call]})
            own = results[call.get("id")]
            split += [own.popleft() for _ in range(len(own) if call.get("id") else min(1, len(own)))]
        split += chain.from_iterable(results.values()) if calls else [message]
    return split


class _Joining:
    """Collects messages. Joins all texts of one at the end, since each join copies what was there."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._texts: list[list[Any]] = []

    @property
    def last(self) -> Message:
        return self.messages[-1] if self.messages else {}

    def add(self, message: Message, before: Sequence[Any] = ()) -> None:
        """Add a message that begins with the texts `before`."""
        self.messages.append(dict(message))
        self._texts.append([*before, message.get("content")])

    def append(self, message: Message) -> None:
        """Append the text of a message to the last one."""
        self._texts[-1].append(message.get("content"))

    def finish(self) -> list[Message]:
        for message, texts in zip(self.messages, self._texts, strict=True):
            if len(texts) > 1:
                message["content"] = "\n\n".join(filter(None, texts))
        return self.messages


def _join_first(messages: Sequence[Message]) -> list[Message]:
    """Merge the system and developer messages at the beginning."""
    leading = list(takewhile(lambda message: message["role"] in INSTRUCTING, messages))
    if len(leading) < 2:
        return list(messages)
    texts = [message["content"] for message in leading if message.get("content")]
    return [{**leading[0], "content": "\n\n".join(texts)}, *messages[len(leading) :]]


def _join(messages: Sequence[Message], roles: Collection[str], others: Collection[str] = ()) -> list[Message]:
    """Merge each message into the preceding one if that has one of `roles`, and the same role or one of `others`."""
    joined = _Joining()
    for message in messages:
        last = joined.last
        same = message["role"] in others if others else message["role"] == last.get("role")
        if last.get("role") in roles and same and not last.get("tool_calls"):
            joined.append(message)
            if "tool_calls" in message:
                last["tool_calls"] = message["tool_calls"]
        else:
            joined.add(message)
    return joined.finish()


def _move(messages: Sequence[Message], start: int) -> list[Message]:
    """Move the texts of system messages from `start` on into neighbouring turns."""
    moved, waiting = _Joining(), list[Any]()
    for message in messages[:start]:
        moved.add(message)
    for message in messages[start:]:
        if message["role"] not in INSTRUCTING:
            if waiting and message["role"] not in _HEARD:
                moved.add(_says("user", ""), waiting)
                waiting = []
            moved.add(message, waiting)
            waiting = []
        elif moved.last.get("role") in _HEARD:
            moved.append(message)
        else:
            waiting.append(message.get("content"))
    if waiting:
        moved.add(_says("user", ""), waiting)
    return moved.finish()


_HEARD = ("user", "tool")
"""Roles of messages that the model answers."""
