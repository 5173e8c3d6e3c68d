"""Describe responses, their items, and the events of a stream, in the form in which they are sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Union

from pypto_serving.api.common.described import Answer, ResponseUsage, TokenLogprob, tagged

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class Item(Answer, tag_field="type"):
    """Base of the items of a response."""

    id: str


class OutputText(Answer, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningText(Answer, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(Item, tag="message"):
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Item, tag="reasoning"):
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class FunctionCallItem(Item, tag="function_call"):
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomToolCallItem(Item, tag="custom_tool_call"):
    call_id: str
    name: str
    input: str
    namespace: str | None = None


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomToolCallItem


class ResponseFailure(Answer):
    code: str
    message: str


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"]


class ResponseObject(Answer):
    """The answer of POST /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    instructions: str | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    max_output_tokens: int | None
    previous_response_id: str | None
    reasoning: dict[str, Any]
    text: dict[str, Any]
    top_logprobs: int
    truncation: Literal["disabled"]
    background: bool
    status: Status
    completed_at: int | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    service_tier: Literal["default"]
    usage: ResponseUsage | None


class DeletedResponse(Answer):
    id: str
    object: Literal["response"]
    deleted: bool


class ResponseInputTokens(Answer):
    """The answer of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(Answer):
    """The answer of GET /v1/responses/{response_id}/input_items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Event(Answer, tag_field="type"):
    """Base of all events, which are counted from 0."""

    sequence_number: int


class TextLogprob(Answer):
    token: str
    logprob: float


class TextLogprobs(TextLogprob):
    """The log-probabilities of a token in events; unlike items, these lack the token's bytes."""

    top_logprobs: list[TextLogprob]


_ITEM = {"item_id": str, "output_index": int}
_PART = _ITEM | {"content_index": int}
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "response.created": {"response": ResponseObject},
    "response.in_progress": {"response": ResponseObject},
    "response.completed": {"response": ResponseObject},
    "response.incomplete": {"response": ResponseObject},
    "response.failed": {"response": ResponseObject},
    "response.output_item.added": {"output_index": int, "item": OutputItem},
    "response.output_item.done": {"output_index": int, "item": OutputItem},
    "response.content_part.added": {**_PART, "part": OutputText | ReasoningText},
    "response.content_part.done": {**_PART, "part": OutputText | ReasoningText},
    "response.output_text.delta": {**_PART, "delta": str, "logprobs": list[TextLogprobs]},
    "response.output_text.done": {**_PART, "text": str, "logprobs": list[TextLogprobs]},
    "response.reasoning_text.delta": {**_PART, "delta": str},
    "response.reasoning_text.done": {**_PART, "text": str},
    "response.function_call_arguments.delta": {**_ITEM, "delta": str},
    "response.function_call_arguments.done": {**_ITEM, "arguments": str},
    "response.custom_tool_call_input.delta": {**_ITEM, "delta": str},
    "response.custom_tool_call_input.done": {**_ITEM, "input": str},
}
"""The fields of each type of event, after its number: those of an item, and of a part of its content, first."""


EVENTS = tagged(Event, _FIELDS, "response.")
ResponseEvent: Any = Union[tuple(EVENTS.values())]  # noqa: UP007
