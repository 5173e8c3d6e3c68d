"""Write one answer in Ollama's form: whole, or as lines of JSON."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from pypto_serving.api.chat.formats import OutputFormat
from pypto_serving.api.chat.parsers.scanner import OutputPart, TextPart, ToolCallStart, read_output
from pypto_serving.api.chat.tools import as_object, object_in
from pypto_serving.api.common.respond import AnswerFormat, encode
from pypto_serving.api.generation.choice import ChoiceOutput, Delta, TokenUsage
from pypto_serving.api.http.errors import ApiError


def written_time(seconds: float) -> str:
    """Return a time since 1970 as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class LineFormat(AnswerFormat):
    """Writes one answer of a chat, or of a prompt. A call is written when its arguments are complete."""

    media_type = "application/x-ndjson"

    def __init__(self, model: str, is_chat: bool, form: OutputFormat | None = None) -> None:
        self._model = model
        self._is_chat = is_chat
        self._parser = (form or OutputFormat())()
        self._call: tuple[str, list[str]] | None = None
        self._started_ns = self._first_ns = time.monotonic_ns()
        self._reason: str | None = None

    def loaded(self) -> dict[str, Any]:
        """Return what answers a body without words."""
        return self._answer(True) | {"done_reason": "load"}

    def response(self, outputs: list[ChoiceOutput], usage: TokenUsage) -> dict[str, Any]:
        (output,) = outputs
        read = read_output(self._parser, output.texts)
        self._reason = output.finish_reason
        calls = [_call(call.name, call.arguments) for call in read.tool_calls]
        return self._last(usage, read.content, read.reasoning, calls)

    def opening(self, usage: TokenUsage) -> bytes:
        self._first_ns = time.monotonic_ns()
        return b""

    def event(self, delta: Delta) -> bytes:
        self._reason = delta.finish_reason
        ends = delta.finish_reason is not None
        written = b"".join(map(self._line, self._parser.push(delta.text, ends)))
        return written + self._close() if ends else written

    def closing(self, usage: TokenUsage) -> bytes:
        return encode(self._last(usage)) + b"\n"

    def failure(self, error: ApiError) -> bytes:
        return error.ollama_payload() + b"\n"

    def _line(self, part: OutputPart) -> bytes:
        if isinstance(part, TextPart):
            said = (part.text, "") if part.kind == "content" else ("", part.text)
            return self._close() + encode(self._answer(False, *said)) + b"\n"
        if isinstance(part, ToolCallStart):
            written = self._close()
            self._call = (part.name, [])
            return written
        assert self._call is not None
        self._call[1].append(part.text)
        return b""

    def _close(self) -> bytes:
        """Write the call that is complete."""
        if self._call is None:
            return b""
        (name, pieces), self._call = self._call, None
        return encode(self._answer(False, calls=[_call(name, "".join(pieces))])) + b"\n"

    def _answer(
        self, done: bool, content: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        answer: dict[str, Any] = {"model": self._model, "created_at": written_time(time.time())}
        rest: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return answer | {"response": content, **rest, "done": done}
        if calls:
            rest["tool_calls"] = calls
        return answer | {"message": {"role": "assistant", "content": content, **rest}, "done": done}

    def _last(
        self, usage: TokenUsage, content: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Return the last line, or the whole answer; its times are nanoseconds."""
        ended_ns = time.monotonic_ns()
        return self._answer(True, content, thinking, calls) | {
            "done_reason": self._reason,
            "total_duration": ended_ns - self._started_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.num_prompt_tokens,
            "prompt_eval_duration": self._first_ns - self._started_ns,
            "eval_count": usage.num_output_tokens,
            "eval_duration": ended_ns - self._first_ns,
        }


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": as_object(object_in(arguments))}}
