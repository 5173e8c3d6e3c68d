"""Fit conversations to templates that take system messages only at the beginning, or roles only in turns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any

from pypto_serving.errors import RequestError

Message = dict[str, Any]
INSTRUCTING = ("system", "developer")
_CALL = {"id": "call00001", "type": "function", "function": {"name": "qz_call", "arguments": {"qz_key": "qz_value"}}}


def _says(role: str, text: str) -> Message:
    return {"role": role, "content": text}


_FIRST, _ASKS, _ASKS_MORE = _says("system", "qz_first"), _says("user", "qz_asks"), _says("user", "qz_more")
_ANSWERS = _says("assistant", "qz_answers")
_CALLS = {**_says("assistant", ""), "tool_calls": [_CALL]}
_RESULT = {**_says("tool", "qz_result"), "tool_call_id": _CALL["id"], "name": "qz_call"}


class Manners:
    """Forms of conversations that a template accepts, found by rendering short ones. `render` raises RequestError."""

    def __init__(self, render: Callable[[Sequence[Mapping[str, Any]]], str]) -> None:
        self._render = render

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

    def _takes(self, plain: Sequence[Message], tried: Sequence[Message]) -> bool:
        """Return whether the rendered `tried` has all texts in order, or if the template cannot even render `plain`."""
        return self._shows(tried) or not self._shows(plain)

    def _shows(self, messages: Sequence[Message]) -> bool:
        try:
            prompt, at = self._render(messages), 0
        except RequestError:
            return False
        for text in filter(None, (message["content"] for message in messages)):
            at = prompt.find(text, at)
            if at < 0:
                return False
        return True

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages to render.

        - Merge system and developer messages at the beginning.
        - Keep later ones if the template accepts them; else append their text to the preceding turn of user or tool, or
          put it before the user's text that follows.
        - Merge consecutive messages of one role if the template requires alternating roles.
        """
        fitted = _join_first(messages)
        start = int(fitted[0]["role"] in INSTRUCTING) if fitted else 0
        if start and not self.takes_system:
            fitted = _move(fitted, 0)
        elif any(message["role"] in INSTRUCTING for message in fitted[start:]) and not self.takes_later_system:
            fitted = _move(fitted, start)
        pairs = {(one["role"], other["role"]) for one, other in pairwise(fitted)}
        if pairs & {("user", "user"), ("assistant", "assistant")} and not self.takes_repeated_roles:
            fitted = _join(fitted, ("user", "assistant"))
        if ("tool", "user") in pairs and not self.takes_user_after_tool:
            fitted = _join(fitted, ("tool",), ("user",))
        return fitted


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
