"""Describe responses, their items, and the events of a stream, in the form in which they are sent."""

from __future__ import annotations

from typing import Any, Literal

from pypto_serving.api.common.described import Answer, ResponseUsage, TokenLogprob

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


class WholeEvent(Event):
    """Base of events that contain the whole response."""

    response: ResponseObject


class ResponseCreated(WholeEvent, tag="response.created"):
    pass


class ResponseInProgress(WholeEvent, tag="response.in_progress"):
    pass


class ResponseCompleted(WholeEvent, tag="response.completed"):
    pass


class ResponseIncomplete(WholeEvent, tag="response.incomplete"):
    pass


class ResponseFailed(WholeEvent, tag="response.failed"):
    pass


class OutputItemAdded(Event, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class OutputItemDone(Event, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ItemEvent(Event):
    """Base of events within an item."""

    item_id: str
    output_index: int


class PartEvent(ItemEvent):
    """Base of events within a part of an item's content."""

    content_index: int


class ContentPartAdded(PartEvent, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class ContentPartDone(PartEvent, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextLogprob(Answer):
    token: str
    logprob: float


class TextLogprobs(TextLogprob):
    """The log-probabilities of a token in events; unlike items, these lack the token's bytes."""

    top_logprobs: list[TextLogprob]


class OutputTextDelta(PartEvent, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TextLogprobs]


class OutputTextDone(PartEvent, tag="response.output_text.done"):
    text: str
    logprobs: list[TextLogprobs]


class ReasoningTextDelta(PartEvent, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(PartEvent, tag="response.reasoning_text.done"):
    text: str


class FunctionCallArgumentsDelta(ItemEvent, tag="response.function_call_arguments.delta"):
    delta: str


class FunctionCallArgumentsDone(ItemEvent, tag="response.function_call_arguments.done"):
    arguments: str


class CustomToolCallInputDelta(ItemEvent, tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomToolCallInputDone(ItemEvent, tag="response.custom_tool_call_input.done"):
    input: str


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | FunctionCallArgumentsDelta
    | FunctionCallArgumentsDone
    | CustomToolCallInputDelta
    | CustomToolCallInputDone
)
