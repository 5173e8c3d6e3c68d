"""docs/compatibility.md says of every field what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from anthropic.types import message_create_params as messages
from openai.types import completion_create_params as completions
from openai.types import decision_create_params as decisions
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses

from pypto_serving.api.anthropic.messages_body import MessagesBody
from pypto_serving.api.common.body import Body
from pypto_serving.api.decisions.decision_body import DecisionBody
from pypto_serving.api.openai.schemas import ChatBody, CompletionBody
from pypto_serving.api.responses.response_body import ResponsesBody

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
ENDPOINTS: dict[str, tuple[type[Body], type]] = {
    "Completions": (CompletionBody, completions.CompletionCreateParamsBase),
    "Chat completions": (ChatBody, chats.CompletionCreateParamsBase),
    "Decisions": (DecisionBody, decisions.DecisionCreateParams),
    "Messages": (MessagesBody, messages.MessageCreateParamsBase),
    "Responses": (ResponsesBody, responses.ResponseCreateParamsBase),
}
Row = tuple[str, str]


def rows_of(section: str) -> dict[str, Row]:
    """The fields of a section's table, with what the server does and the notes."""
    text = DOCUMENT.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| `(\w+)` \| [^|]+ \| (\w+) \| ([^|]*) \|$", text.replace("| |", "|  |"), re.MULTILINE)
    rows = {name: (here, note) for name, here, note in found}
    assert len(rows) == len(found) == text.count("\n|") - 2, "each row is a field, and each field is there once"
    return rows


def expected(name: str, schema: type[Body]) -> str:
    if name in schema.model_fields:
        return "yes"
    return "no" if name in schema.rules.neutral else "ignored"


@pytest.mark.parametrize("section", ENDPOINTS)
def test_every_field_is_described_as_it_is_handled(section: str) -> None:
    schema, official = ENDPOINTS[section]
    rules = schema.rules
    rows = rows_of(section)
    known = {*schema.model_fields, *rules.neutral, *rules.accepted, *rules.named, *official.__annotations__, "stream"}
    assert sorted(known - rows.keys()) == []
    for name, (here, note) in rows.items():
        assert here == expected(name, schema), name
        named = note.startswith("named")
        assert named == (name in rules.named), name
        assert (note == "unknown") == (here == "ignored" and not named and name not in rules.accepted), name
        if here == "no":
            values = [json.dumps(value) for value in rules.neutral[name]]
            assert note.startswith("but ") == bool(values) and all(f"`{value}`" in note for value in values), name
