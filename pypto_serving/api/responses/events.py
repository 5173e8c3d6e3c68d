"""Describe the events of POST /v1/responses with `stream`."""

from __future__ import annotations

from pypto_serving.api.openai.answers import Answer
from pypto_serving.api.responses.answers import OutputItem, OutputText, ReasoningText, ResponseObject


class Event(Answer, tag_field="type"):
    """Base of all events, which are counted from 0."""

    sequence_number: int


class WholeEvent(Event):
    """Base of events that tell the whole response."""

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
    """A token; unlike the item, the events do not tell its bytes."""

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
