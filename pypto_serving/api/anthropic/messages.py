"""Write one message: whole, or as server-sent events."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.anthropic import answers
from pypto_serving.api.chat.formats import OutputFormat
from pypto_serving.api.chat.parsers.scanner import OutputPart, TextPart, ToolCallStart
from pypto_serving.api.chat.tools import as_object, object_in
from pypto_serving.api.common.body import ReadBody, answer_read
from pypto_serving.api.common.respond import AnswerFormat, encode, generate, named, one_line
from pypto_serving.api.generation.choice import ChoiceOutput, Delta, TokenUsage
from pypto_serving.api.generation.request import GenerationRequest
from pypto_serving.api.http.errors import ApiError


async def create_message(request: Request) -> Response:
    """Answer a conversation."""

    def new_format(body: ReadBody, wanted: GenerationRequest) -> AnswerFormat:
        return MessageFormat(body, wanted, request.state.request_id)

    return await generate(request, "messages", "msg_", new_format)


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation's prompt."""
    return await answer_read(request, "count_tokens")


_FIELDS = {"text": b'"text_delta","text"', "thinking": b'"thinking_delta","thinking"'}
_CALL_FIELDS = b'"input_json_delta","partial_json"'


class MessageFormat(AnswerFormat):
    """Write one message.

    A message is a list of blocks: text, thinking and calls, in the order of the output. Each part of the output extends
    the last block or begins the next one.
    """

    def __init__(self, body: ReadBody, wanted: GenerationRequest, request_id: str) -> None:
        self._id = wanted.id
        self._model = body.model
        self._form = body.new_parser or OutputFormat()
        self._parser = self._form()
        self._request_id = request_id
        self._cut = wanted.prompts[0].max_tokens != body.params.max_tokens
        """Whether the context ends before the client's max_tokens."""
        self._opened = False
        self._index = -1
        self._kind = ""
        self._calls = False
        self._stop_reason: answers.StopReason | None = None
        self._stop_sequence: str | None = None

    def response(self, outputs: list[ChoiceOutput], usage: TokenUsage) -> answers.Message:
        (output,) = outputs
        blocks: list[tuple[answers.ContentBlock, list[str]]] = []
        parts = [part for text in output.texts for part in self._parser.push(text)] + self._parser.finish()
        for part in parts:
            if self._begins(part):
                blocks.append((self._begin(part), []))
            if not isinstance(part, ToolCallStart):
                blocks[-1][1].append(part.text)
        for block, pieces in blocks:
            text = "".join(pieces)
            match block:
                case answers.TextBlock():
                    block.text = text
                case answers.ThinkingBlock():
                    block.thinking, block.signature = text, self._id
                case answers.ToolUseBlock():
                    block.input = as_object(object_in(text))
        self._finish(output.finish_reason, output.stop_reason)
        return self._message([block for block, _ in blocks], usage)

    def opening(self, usage: TokenUsage) -> bytes:
        """Write `message_start` at the first call, then nothing."""
        if self._opened:
            return b""
        self._opened = True
        return _event("message_start", self._message([], usage))

    def ping(self, usage: TokenUsage) -> bytes:
        """Write `ping`; before the first one, `message_start`, with which every stream must begin."""
        return self.opening(usage) + _event("ping")

    def closing(self, usage: TokenUsage) -> bytes:
        assert self._stop_reason is not None
        end = answers.MessageEnd(self._stop_reason, self._stop_sequence)
        return _event("message_delta", end, usage_object(usage)) + _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + one_line(error.anthropic_payload(self._request_id)) + b"\n\n"

    def event(self, delta: Delta) -> bytes:
        ends = delta.finish_reason is not None
        written = b"".join(map(self._part_events, self._parser.push(delta.text, ends)))
        if ends:
            written += self._close()
            self._finish(delta.finish_reason, delta.stop_reason)
        return written

    def _part_events(self, part: OutputPart) -> bytes:
        change = b""
        if self._begins(part):
            change = self._close()
            block = self._begin(part)
            change += _event("content_block_start", self._index, block)
        if isinstance(part, ToolCallStart):
            return change
        return change + self._delta(_FIELDS.get(self._kind, _CALL_FIELDS), part.text)

    def _delta(self, fields: bytes, text: str) -> bytes:
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b:%b}}\n\n'
            % (self._index, fields, one_line(encode(text)))
        )

    def _begins(self, part: OutputPart) -> bool:
        return isinstance(part, ToolCallStart) or _kind(part) != self._kind

    def _begin(self, part: OutputPart) -> answers.ContentBlock:
        """Begin a block; return it without its text."""
        self._kind = _kind(part)
        self._index += 1
        if self._kind == "text":
            return answers.TextBlock("")
        if self._kind == "thinking":
            return answers.ThinkingBlock("", "")
        self._calls = True
        name = part.name if isinstance(part, ToolCallStart) else ""
        return answers.ToolUseBlock(self._form.new_call_id("toolu_"), name, {})

    def _close(self) -> bytes:
        """Write the end of the last block. The signature of thinking is the message's id; nobody verifies it."""
        if self._index < 0:
            return b""
        signed = self._delta(b'"signature_delta","signature"', self._id) if self._kind == "thinking" else b""
        return signed + _event("content_block_stop", self._index)

    def _finish(self, reason: str | None, stopped_by: str | int | None) -> None:
        """Record why the output ended; `stopped_by` is the stop string, or the id of the stop token."""
        if reason == "length":
            self._stop_reason = "model_context_window_exceeded" if self._cut else "max_tokens"
        elif isinstance(stopped_by, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", stopped_by
        else:
            self._stop_reason = "tool_use" if self._calls and not self._parser.broken else "end_turn"

    def _message(self, content: list[answers.ContentBlock], usage: TokenUsage) -> answers.Message:
        return answers.Message(
            id=self._id,
            role="assistant",
            model=self._model,
            content=content,
            stop_reason=self._stop_reason,
            stop_sequence=self._stop_sequence,
            usage=usage_object(usage),
        )


def _event(kind: str, *fields: Any) -> bytes:
    return named(answers.EVENTS[kind](*fields))


def usage_object(usage: TokenUsage) -> answers.MessageUsage:
    """Write token counts. Each prompt token counts either as read from the cache or as input."""
    return answers.MessageUsage(
        input_tokens=usage.num_prompt_tokens - usage.num_cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.num_cached_tokens,
        output_tokens=usage.num_output_tokens,
        output_tokens_details=answers.ThinkingTokens(usage.num_reasoning_tokens),
    )


def _kind(part: OutputPart) -> str:
    if isinstance(part, TextPart):
        return "thinking" if part.kind == "reasoning" else "text"
    return "tool_use"
