"""Describe messages and the events of a stream, in the form in which they are sent."""

from __future__ import annotations

from typing import Any, Literal, Union

from pypto_serving.api.common.described import Answer, tagged

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class Tagged(Answer, tag_field="type"):
    """Base of objects that are distinguished by their `type`."""


class ThinkingTokens(Answer):
    thinking_tokens: int


class MessageUsage(Answer):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class TextBlock(Tagged, tag="text"):
    text: str


class ThinkingBlock(Tagged, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Tagged, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Message(Tagged, tag="message"):
    """The answer of POST /v1/messages."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class ErrorCode(Answer):
    error_code: str


class MessageErrorDetails(Answer):
    type: str
    message: str
    details: ErrorCode | None = None


class MessageError(Tagged, tag="error"):
    """Every error of the Messages API, and the last event of a stream that fails."""

    error: MessageErrorDetails
    request_id: str


class TokenCount(Answer):
    """The answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageEnd(Answer):
    stop_reason: StopReason
    stop_sequence: str | None


DELTAS = tagged(
    Tagged,
    {
        "text_delta": {"text": str},
        "thinking_delta": {"thinking": str},
        "signature_delta": {"signature": str},
        "input_json_delta": {"partial_json": str},
    },
)
EVENTS = tagged(
    Tagged,
    {
        "message_start": {"message": Message},
        "content_block_start": {"index": int, "content_block": ContentBlock},
        "content_block_delta": {"index": int, "delta": Union[tuple(DELTAS.values())]},  # noqa: UP007
        "content_block_stop": {"index": int},
        "message_delta": {"delta": MessageEnd, "usage": MessageUsage},
        "message_stop": {},
        "ping": {},
    },
)
MessageEvent: Any = Union[(*EVENTS.values(), MessageError)]
"""One event of POST /v1/messages with `stream`."""
