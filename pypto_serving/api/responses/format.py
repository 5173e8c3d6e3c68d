"""Write one response: whole, or as server-sent events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pypto_serving.api.chat.formats import OutputFormat
from pypto_serving.api.chat.output import Part, TextPart, ToolCallStart
from pypto_serving.api.errors import ApiError
from pypto_serving.api.generation.choice import Delta
from pypto_serving.api.generation.logprobs import TokenEntry
from pypto_serving.api.generation.output import Output
from pypto_serving.api.generation.usage import Usage
from pypto_serving.api.openai.chat_format import SHORT_ID
from pypto_serving.api.openai.logprobs import chat_logprobs
from pypto_serving.api.openai.sse import PING, encode, one_line
from pypto_serving.api.responses.tools import input_of

Done = Callable[[dict[str, Any]], None]
_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}


class ResponseFormat:
    """Write the answer of one request. See AnswerFormat.

    A response is a list of items: reasoning, messages and calls, in the order of the output. A part of the output adds
    to the last item, or begins the next one. The input of a custom tool is told at its end, when its JSON can be read.
    `echo` has the fields that repeat the body; `on_done` takes the response.
    """

    def __init__(self, response_id: str, model: str, form: OutputFormat | None, echo: bytes, on_done: Done) -> None:
        self._base = {"id": response_id, "object": "response", "created_at": int(time.time()), "model": model}
        self._echo: dict[str, Any] = msgspec.json.decode(echo)
        self._custom = {tool["name"] for tool in self._echo["tools"] if tool["type"] == "custom"}
        self._parser = None if form is None else form()
        self._short_ids = form is not None and form.short_ids
        self._on_done = on_done
        self._opened = False
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        self._unsent: list[TokenEntry] = []
        self._open_kind: str | None = None
        self._status = "in_progress"

    def response(self, outputs: list[Output], usage: Usage) -> dict[str, Any]:
        """Write the whole response."""
        (output,) = outputs
        entries, num_chars, taken = output.logprobs or [], 0, 0
        for i, text in enumerate(output.texts):
            num_chars += len(text)
            ends, first = i == len(output.texts) - 1, taken
            while taken < len(entries) and (ends or entries[taken].offset < num_chars):
                taken += 1
            self._write(Delta(0, text, entries[first:taken], output.finish_reason if ends else None))
        whole = self._object(usage)
        self._on_done(whole)
        return whole

    def opening(self, usage: Usage) -> bytes:
        """Write `response.created` and `response.in_progress`."""
        return self._open()

    def _open(self) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        begun = self._object(None)
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def ping(self, usage: Usage) -> bytes:
        """Write a comment."""
        return PING

    @property
    def writer(self) -> Callable[[Delta], bytes]:
        return self._write

    def closing(self, usage: Usage) -> bytes:
        """Write `response.completed`, or `response.incomplete`."""
        opening = self._open()
        whole = self._object(usage)
        self._on_done(whole)
        return opening + self._event(f"response.{self._status}", response=whole)

    def failure(self, error: ApiError) -> bytes:
        """Write `response.failed`, which ends the stream."""
        opening = self._open()
        self._status = "failed"
        failed = self._object(None) | {"error": {"code": "server_error", "message": error.message}}
        return opening + self._event("response.failed", response=failed)

    def _write(self, delta: Delta) -> bytes:
        ends = delta.finish_reason is not None
        self._unsent += delta.logprobs or ()
        parts = self._parts(delta.text, ends)
        written = b"".join(map(self._part_events, parts))
        if ends:
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            written += self._close(self._status)
        return written

    def _parts(self, text: str, ends: bool) -> Sequence[Part]:
        if self._parser is None:
            return [TextPart("content", text)] if text else []
        parts = self._parser.push(text)
        return parts + self._parser.finish() if ends else parts

    def _part_events(self, part: Part) -> bytes:
        written = b""
        if isinstance(part, ToolCallStart) or _kind(part) != self._open_kind:
            written = self._close("completed") + self._begin(part)
        if isinstance(part, ToolCallStart):
            self._unsent.clear()
            return written
        return written + self._add(part.text)

    def _begin(self, part: Part) -> bytes:
        kind, made = _kind(part), uuid.uuid4().hex
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        if kind == "message":
            item |= {"id": f"msg_{made}", "role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"id": f"rs_{made}", "summary": [], "content": []}
        else:
            call_id = made[:SHORT_ID] if self._short_ids else f"call_{made}"
            name = part.name if isinstance(part, ToolCallStart) else ""
            if name in self._custom:
                item = {"type": "custom_tool_call", "id": f"ctc_{made}", "call_id": call_id, "name": name, "input": ""}
            else:
                item |= {"id": f"fc_{made}", "call_id": call_id, "name": name, "arguments": ""}
        self._output.append(item)
        self._texts, self._logprobs, self._open_kind = [], [], kind
        written = self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)
        if kind in _PARTS:
            written += self._item_event("response.content_part.added", content_index=0, part=self._content(kind))
        return written

    def _add(self, text: str) -> bytes:
        kind = self._output[-1]["type"]
        self._texts.append(text)
        if kind == "custom_tool_call":
            return b""
        entries = self._unsent if kind == "message" else []
        self._unsent = []
        if kind == "function_call":
            return self._item_event("response.function_call_arguments.delta", delta=text)
        if kind == "reasoning":
            return self._item_event("response.reasoning_text.delta", content_index=0, delta=text)
        scored = (chat_logprobs(entries) or {"content": []})["content"]
        self._logprobs += scored
        return self._item_event(
            "response.output_text.delta", content_index=0, delta=text, logprobs=list(map(_without_bytes, scored))
        )

    def _close(self, status: str) -> bytes:
        """Write the end of the last item."""
        if self._open_kind is None:
            return b""
        self._open_kind = None
        item, text = self._output[-1], "".join(self._texts)
        kind = item["type"]
        if "status" in item:
            item["status"] = status
        if kind == "custom_tool_call":
            item["input"] = text = input_of(text)
            written = self._item_event("response.custom_tool_call_input.delta", delta=text)
            written += self._item_event("response.custom_tool_call_input.done", input=text)
        elif kind == "function_call":
            item["arguments"] = text = text or "{}"
            written = self._item_event("response.function_call_arguments.done", arguments=text)
        else:
            part = self._content(kind)
            item["content"] = [part]
            shown = {"logprobs": list(map(_without_bytes, self._logprobs))} if kind == "message" else {}
            written = self._item_event(f"response.{_PARTS[kind]}.done", content_index=0, text=text, **shown)
            written += self._item_event("response.content_part.done", content_index=0, part=part)
        return written + self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _content(self, kind: str) -> dict[str, Any]:
        """Return the part of an item that has its text so far."""
        part: dict[str, Any] = {"type": _PARTS[kind], "text": "".join(self._texts)}
        return part | {"annotations": [], "logprobs": [*self._logprobs]} if kind == "message" else part

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = one_line(encode({"type": kind, "sequence_number": self._number, **fields}))
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def _object(self, usage: Usage | None) -> dict[str, Any]:
        cut = self._status == "incomplete"
        return {
            **self._base,
            **self._echo,
            "status": self._status,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [*self._output],
            "service_tier": "default",
            "usage": None if usage is None else usage_object(usage),
        }


def usage_object(usage: Usage) -> dict[str, Any]:
    """Write token counts."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }


def _kind(part: Part) -> str:
    if isinstance(part, TextPart):
        return "reasoning" if part.kind == "reasoning" else "message"
    return "function_call"


def _without_bytes(scored: msgspec.Raw) -> dict[str, Any]:
    """Return what events tell of a token."""
    token = msgspec.json.decode(scored)
    top = [{"token": one["token"], "logprob": one["logprob"]} for one in token["top_logprobs"]]
    return {"token": token["token"], "logprob": token["logprob"], "top_logprobs": top}
