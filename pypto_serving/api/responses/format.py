"""Write one response: whole, or as server-sent events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pypto_serving.api.chat.formats import OutputFormat
from pypto_serving.api.chat.parsers.scanner import OutputPart, TextPart, ToolCallStart
from pypto_serving.api.common.body import ReadBody
from pypto_serving.api.common.described import ResponseUsage, TokenLogprob, chat_logprobs
from pypto_serving.api.common.respond import AnswerFormat, named
from pypto_serving.api.generation.choice import ChoiceOutput, Delta, TokenUsage
from pypto_serving.api.generation.logprobs import TokenEntry
from pypto_serving.api.generation.request import GenerationRequest
from pypto_serving.api.http.errors import ApiError
from pypto_serving.api.responses import answers
from pypto_serving.api.responses.history import Called, callable_tools, input_of

Done = Callable[[answers.ResponseObject], None]


class ResponseFormat(AnswerFormat):
    """Writes one response.

    A response is a list of items: reasoning, messages and calls, in the order of the output. Each part of the output
    extends the last item or begins the next one. The input of a custom tool is sent at its end, when its JSON can be
    parsed. `on_done` takes the response.
    """

    def __init__(self, body: ReadBody, wanted: GenerationRequest, on_done: Done) -> None:
        assert body.repeated is not None
        repeated: dict[str, Any] = msgspec.json.decode(body.repeated.echo)
        begun = {"id": wanted.id, "object": "response", "created_at": int(time.time()), "model": body.model}
        self._base: dict[str, Any] = begun | repeated
        self._tools = callable_tools(repeated["tools"])
        self._form = body.new_parser or OutputFormat()
        self._parser = self._form()
        self._on_done = on_done
        self._opened = False
        self._number = 0
        self._output: list[answers.OutputItem] = []
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        self._unsent: list[TokenEntry] = []
        self._open_kind: str | None = None
        self._status: answers.Status = "in_progress"

    def response(self, outputs: list[ChoiceOutput], usage: TokenUsage) -> answers.ResponseObject:
        (output,) = outputs
        entries, num_chars, taken = output.logprobs or [], 0, 0
        for i, text in enumerate(output.texts):
            num_chars += len(text)
            ends, first = i == len(output.texts) - 1, taken
            while taken < len(entries) and (ends or entries[taken].offset < num_chars):
                taken += 1
            self.event(Delta(0, text, entries[first:taken], output.finish_reason if ends else None))
        whole = self._object(usage)
        self._on_done(whole)
        return whole

    def opening(self, usage: TokenUsage) -> bytes:
        return self._open()

    def _open(self) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        begun = self._object(None)
        written = self._event("response.created", begun)
        return written + self._event("response.in_progress", begun)

    def closing(self, usage: TokenUsage) -> bytes:
        opening = self._open()
        whole = self._object(usage)
        self._on_done(whole)
        return opening + self._event(f"response.{self._status}", whole)

    def failure(self, error: ApiError) -> bytes:
        opening = self._open()
        self._status = "failed"
        failed = self._object(None)
        failed.error = answers.ResponseFailure("server_error", error.message)
        return opening + self._event("response.failed", failed)

    def event(self, delta: Delta) -> bytes:
        ends = delta.finish_reason is not None
        self._unsent += delta.logprobs or ()
        written = b"".join(map(self._part_events, self._parser.push(delta.text, ends)))
        if ends:
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            written += self._close(self._status)
        return written

    def _part_events(self, part: OutputPart) -> bytes:
        written = b""
        if isinstance(part, ToolCallStart) or _kind(part) != self._open_kind:
            written = self._close("completed") + self._begin(part)
        if isinstance(part, ToolCallStart):
            self._unsent.clear()
            return written
        return written + self._add(part.text)

    def _begin(self, part: OutputPart) -> bytes:
        item = self._new_item(part)
        self._output.append(item)
        self._texts, self._logprobs, self._open_kind = [], [], _kind(part)
        written = self._event("response.output_item.added", self._index, item)
        if isinstance(item, answers.OutputMessage):
            written += self._event("response.content_part.added", *self._place, 0, answers.OutputText("", [], []))
        elif isinstance(item, answers.ReasoningItem):
            written += self._event("response.content_part.added", *self._place, 0, answers.ReasoningText(""))
        return written

    def _new_item(self, part: OutputPart) -> answers.OutputItem:
        kind, made = _kind(part), uuid.uuid4().hex
        if kind == "message":
            return answers.OutputMessage(f"msg_{made}", "in_progress", "assistant", [])
        if kind == "reasoning":
            return answers.ReasoningItem(f"rs_{made}", "in_progress", [], [])
        call_id = self._form.new_call_id("call_")
        name = part.name if isinstance(part, ToolCallStart) else ""
        called = self._tools.get(name, Called(name))
        if called.is_custom:
            return answers.CustomToolCallItem(f"ctc_{made}", call_id, called.name, "", called.namespace)
        return answers.FunctionCallItem(f"fc_{made}", "in_progress", call_id, called.name, "", called.namespace)

    def _add(self, text: str) -> bytes:
        self._texts.append(text)
        entries, self._unsent = self._unsent, []
        match self._output[-1]:
            case answers.OutputMessage():
                scored = (chat_logprobs(entries) or {"content": []})["content"]
                self._logprobs += scored
                return self._event("response.output_text.delta", *self._place, 0, text, _without_bytes(scored))
            case answers.ReasoningItem():
                return self._event("response.reasoning_text.delta", *self._place, 0, text)
            case answers.FunctionCallItem():
                return self._event("response.function_call_arguments.delta", *self._place, text)
            case answers.CustomToolCallItem():
                return b""

    def _close(self, status: answers.Status) -> bytes:
        """Write the end of the last item."""
        if self._open_kind is None:
            return b""
        self._open_kind = None
        item, text = self._output[-1], "".join(self._texts)
        match item:
            case answers.OutputMessage():
                item.status, item.content = status, [answers.OutputText(text, [], [*self._logprobs])]
                told = _without_bytes(self._logprobs)
                written = self._event("response.output_text.done", *self._place, 0, text, told)
                written += self._event("response.content_part.done", *self._place, 0, item.content[0])
            case answers.ReasoningItem():
                item.status, item.content = status, [answers.ReasoningText(text)]
                written = self._event("response.reasoning_text.done", *self._place, 0, text)
                written += self._event("response.content_part.done", *self._place, 0, item.content[0])
            case answers.FunctionCallItem():
                item.status, item.arguments = status, text or "{}"
                written = self._event("response.function_call_arguments.done", *self._place, item.arguments)
            case answers.CustomToolCallItem():
                item.input = input_of(text)
                written = self._event("response.custom_tool_call_input.delta", *self._place, item.input)
                written += self._event("response.custom_tool_call_input.done", *self._place, item.input)
        return written + self._event("response.output_item.done", self._index, item)

    @property
    def _index(self) -> int:
        return len(self._output) - 1

    @property
    def _place(self) -> tuple[str, int]:
        """Return the first fields of an event within the last item."""
        return self._output[-1].id, self._index

    def _event(self, kind: str, *fields: Any) -> bytes:
        """Write the next event, of a type in EVENTS."""
        event = answers.EVENTS[kind](self._number, *fields)
        self._number += 1
        return named(event)

    def _object(self, usage: TokenUsage | None) -> answers.ResponseObject:
        return answers.ResponseObject(
            **self._base,
            status=self._status,
            completed_at=int(time.time()) if self._status == "completed" else None,
            error=None,
            incomplete_details=answers.IncompleteDetails("max_output_tokens") if self._status == "incomplete" else None,
            output=[*self._output],
            service_tier="default",
            usage=None if usage is None else ResponseUsage.of(usage),
        )


def _kind(part: OutputPart) -> str:
    if isinstance(part, TextPart):
        return "reasoning" if part.kind == "reasoning" else "message"
    return "call"


def _without_bytes(scored: Sequence[msgspec.Raw]) -> list[answers.TextLogprobs]:
    """Return log-probabilities in the form for events."""
    tokens = (msgspec.json.decode(token, type=TokenLogprob) for token in scored)
    return [
        answers.TextLogprobs(
            token.token, token.logprob, [answers.TextLogprob(one.token, one.logprob) for one in token.top_logprobs]
        )
        for token in tokens
    ]
