"""Check the messages of a conversation and group them into DeepSeek V4's turns; tool results join the user's turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pypto_serving.api.chat.tools import read_calls, read_tools, refuse
from pypto_serving.util import brief

Role = Literal["system", "user", "developer", "assistant", "latest_reminder"]
Message = Mapping[str, Any]
Call = tuple[str, Mapping[str, Any]]

ROLES = ("system", "user", "developer", "assistant", "tool", "latest_reminder")
INSTRUCTING: tuple[Role, ...] = ("system", "developer")
"""Roles whose messages may have tools and a response_format."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. `tools` are OpenAI's function objects; `schema` is the JSON schema that the answer should follow.

    A user's `text` joins all messages between two answers: the user's own and tool results. An assistant's turn that is
    not `ended` is continued by the model.
    """

    role: Role
    text: str
    tools: Sequence[Mapping[str, Any]] = ()
    schema: Mapping[str, Any] | None = None
    reasoning: str = ""
    calls: Sequence[Call] = ()
    ended: bool = True


def read_turns(messages: Sequence[Message]) -> list[Turn]:
    """Make the turns of a conversation. Raises RequestError that names the message at fault."""
    turns: list[Turn] = []
    said = _Said()
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.get("role")
        if role not in ROLES:
            refuse(f"{where}.role", f"is {brief(role)}, but must be one of {', '.join(ROLES)}")
        text = _text(message, "content", where)
        if role == "user":
            said.words(text)
        elif role == "tool":
            said.result(text, _text(message, "tool_call_id", where), where)
        else:
            turns += said.turns()
            turns.append(_turn(message, role, text, where))
        if role == "assistant" and message.get("tool_calls"):
            said.expect(_call_ids(message, where))
    return turns + said.turns()


def with_request(
    turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], schema: Mapping[str, Any] | None
) -> list[Turn]:
    """Add the request's tools and schema to the leading system or developer turn; make one if there is none."""
    if not tools and not schema:
        return list(turns)
    leads = bool(turns) and turns[0].role in INSTRUCTING
    head, rest = (turns[0], turns[1:]) if leads else (Turn("system", ""), turns)
    return [replace(head, tools=tools or head.tools, schema=schema or head.schema), *rest]


class _Said:
    """Collect the messages between two answers; remember the order of all earlier calls by their ids."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._num_calls = 0
        self._blocks: list[tuple[str | None, str]] = []
        self._have_ids: bool | None = None

    def expect(self, call_ids: Sequence[str]) -> None:
        """Remember the calls of an answer; a repeated id belongs to the later call."""
        for call_id in call_ids:
            self._num_calls += 1
            if call_id:
                self._places[call_id] = self._num_calls

    def words(self, text: str) -> None:
        self._blocks.append((None, text))

    def result(self, text: str, call_id: str, where: str) -> None:
        """Add a tool result. Either all results have ids, or none has and they come in the order of their calls."""
        if call_id and call_id not in self._places:
            known = brief(list(self._places)) if self._places else "none"
            refuse(f"{where}.tool_call_id", f"is {brief(call_id)}, but the ids of earlier calls are {known}")
        if self._have_ids not in (None, bool(call_id)):
            refuse(f"{where}.tool_call_id", "must be in all results of an answer's calls, or in none of them")
        self._have_ids = bool(call_id)
        self._blocks.append((call_id, f"<tool_result>{text}</tool_result>"))

    def turns(self) -> list[Turn]:
        """Return the user's turn, if there are messages; tool results are put in the order of their calls."""
        if not self._blocks:
            return []
        results = [block for block in self._blocks if block[0] is not None]
        in_order = iter(sorted(results, key=lambda block: self._places.get(block[0] or "", 0)))
        texts = [text if call_id is None else next(in_order)[1] for call_id, text in self._blocks]
        self._blocks, self._have_ids = [], None
        return [Turn("user", "\n\n".join(texts))]


def _turn(message: Message, role: Role, text: str, where: str) -> Turn:
    """Make the turn of a message whose role is neither user nor tool."""
    if role == "assistant":
        reasoning = _text(message, "reasoning_content", where) or _text(message, "reasoning", where)
        open_ended = bool(message.get("prefix") or message.get("wo_eos"))
        return Turn(role, text, reasoning=reasoning, calls=_calls(message, where), ended=not open_ended)
    if role == "developer" and not text:
        refuse(f"{where}.content", "is empty; a developer message must say something")
    tools = read_tools(message.get("tools"), f"{where}.tools")
    schema = message.get("response_format")
    if schema is not None and not isinstance(schema, dict):
        refuse(f"{where}.response_format", f"is {brief(schema)}, but must be a JSON schema")
    if role not in INSTRUCTING and (tools or schema is not None):
        refuse(where, "has tools or a response_format; only system and developer messages, and the request, may")
    return Turn(role, text, tools, schema)


def _calls(message: Message, where: str) -> list[Call]:
    """Return names and arguments; text that is not a JSON object becomes the only argument."""
    return [
        (call["function"]["name"], arguments if isinstance(arguments, dict) else {"arguments": arguments})
        for call, arguments in read_calls(message, where)
    ]


def _call_ids(message: Message, where: str) -> list[str]:
    return [_text(call, "id", f"{where}.tool_calls[{i}]") for i, call in enumerate(message.get("tool_calls") or [])]


def _text(entry: Message, field: str, where: str) -> str:
    """Return a string field, "" if it is left out."""
    value = entry.get(field)
    if not isinstance(value, str | None):
        refuse(f"{where}.{field}", f"is {brief(value)}, but must be a string")
    return value or ""
