"""The time to read a conversation grows with its length, however many parts it has."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from pypto_serving.api.anthropic import history as anthropic
from pypto_serving.api.chat.leaving_out import LeftOut
from pypto_serving.api.ollama.ollama_body import answer_calls
from pypto_serving.api.prompting.manners import Manners
from pypto_serving.api.responses import history as responses
from pypto_serving.errors import RequestError

TEXT = "x" * 500
MANY = 30_000
MOST_S = 20
"""Joining each part to those before it takes a minute."""
Json = dict[str, Any]


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < MOST_S


def said(role: str, text: str = TEXT) -> Json:
    return {"role": role, "content": text}


def joined(separator: str = "\n", texts: int = MANY) -> str:
    return separator.join([TEXT] * texts)


def test_blocks_of_one_message() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": TEXT}] * MANY}
    assert anthropic.read_history(None, [message], LeftOut("messages")) == [said("user", joined())]


def test_messages_of_one_role() -> None:
    thought = {"type": "thinking", "thinking": TEXT}
    use = {"type": "tool_use", "id": "c", "name": "now", "input": {}}
    told = {"role": "assistant", "content": [thought, use, {"type": "text", "text": TEXT}]}
    (read,) = anthropic.read_history(None, [told] * MANY, LeftOut("messages"))
    assert read["content"] == read["reasoning_content"] == joined() and len(read["tool_calls"]) == MANY


@pytest.mark.parametrize("leads", [True, False])
def test_system_messages_of_a_response(leads: bool) -> None:
    item = {"type": "message", **said("developer")}
    first = [] if leads else [{"type": "message", **said("user")}]
    read = responses.read_history(TEXT if leads else None, [*first, *[item] * MANY], LeftOut("input"))
    if leads:
        assert read == [said("system", joined("\n\n", MANY + 1))]
    else:
        assert len(read) == MANY + 1


def test_items_of_the_assistant() -> None:
    items = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": TEXT}]},
        {"type": "message", **said("assistant")},
    ]
    (read,) = responses.read_history(None, items * MANY, LeftOut("input"))
    assert read["content"] == read["reasoning_content"] == joined()


def test_results_of_calls_without_ids() -> None:
    calls = [{"function": {"name": f"tool{i}", "arguments": {}}} for i in range(MANY)]
    results = [{"role": "tool", "tool_name": f"tool{i}"} for i in reversed(range(MANY))]
    nameless = [{"role": "tool"} for _ in range(MANY)]
    answer_calls([{"role": "assistant", "tool_calls": calls}, *results])
    answer_calls([{"role": "assistant", "tool_calls": calls}, *nameless])
    ids = [f"call0000{i}" for i in range(MANY)]
    assert [result["tool_call_id"] for result in reversed(results)] == ids
    assert [result["tool_call_id"] for result in nameless] == ids


def one_first_and_in_turns(messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
    """A template that takes a system message at the beginning only, and roles only in turns."""
    roles = [message["role"] for message in messages]
    if "system" in roles[1:] or any(one == other for one, other in pairwise(roles)):
        raise RequestError("not like this")
    return "".join(message["content"] for message in messages)


def test_messages_that_a_template_takes_only_as_one() -> None:
    manners = Manners(one_first_and_in_turns)
    first, turn = said("system", "first"), said("user")
    assert manners.fit([first, *[turn] * MANY]) == [first, said("user", joined("\n\n"))]
    later = [said("system")] * MANY
    assert manners.fit([first, turn, *later]) == [first, said("user", joined("\n\n", MANY + 1))]
    answer = said("assistant", "yes")
    assert manners.fit([first, answer, *later, turn])[-1] == said("user", joined("\n\n", MANY + 1))
