"""Serve POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.chat.formats import OutputFormat
from pypto_serving.api.chat.output import OutputPart, TextPart, ToolCallStart, read_output
from pypto_serving.api.common.answers import chat_logprobs
from pypto_serving.api.common.body import BodySource
from pypto_serving.api.common.respond import encode, respond
from pypto_serving.api.generation.choice import ChoiceOutput, Delta, TokenUsage
from pypto_serving.api.openai.event_format import EventFormat, Head
from pypto_serving.api.service import Service


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    reading: BodySource = request.app.state.reading
    body = await reading.read(request, "chat")
    wanted = body.generation(f"chatcmpl-{uuid.uuid4().hex}")
    head = Head.of(service, wanted, body.model, body.shown)
    form = ChatFormat(head) if body.new_parser is None else ParsedChatFormat(head, body.new_parser)
    return await respond(request, wanted, form, stream=body.stream, headers=body.headers(), ping_s=body.ping_s)


class ChatFormat(EventFormat):
    """Write `chat.completion` objects and chunks."""

    def __init__(self, head: Head) -> None:
        super().__init__(head, "chat.completion", "chat.completion.chunk", b',"delta":{"content":%b}')

    def opening(self, usage: TokenUsage) -> bytes:
        role = b',"delta":{"role":"assistant","content":""}'
        ids = b',"prompt_token_ids":' + encode(self.head.prompt_ids(0)) if self.head.shown.token_ids else b""
        return b"".join(self.choice(i, role, None, None, above=ids) for i in range(self.head.num_choices))

    def rare_event(self, delta: Delta) -> bytes:
        content = b',"delta":{"content":' + encode(delta.text) + b"}" if delta.text else b',"delta":{}'
        logprobs, details = chat_logprobs(delta.logprobs), self.details(delta)
        return self.choice(delta.index, content, logprobs, delta.finish_reason, details)

    def whole_choice(self, output: ChoiceOutput) -> dict[str, Any]:
        return {
            "index": output.index,
            "logprobs": chat_logprobs(output.logprobs),
            **self._answer(output),
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if self.head.shown.token_ids else None,
        }

    def response(self, outputs: list[ChoiceOutput], usage: TokenUsage) -> dict[str, Any]:
        prompt = {
            "prompt_logprobs": self.head.write_prompt_logprobs(0),
            "prompt_token_ids": self.head.prompt_ids(0) if self.head.shown.token_ids else None,
        }
        return super().response(outputs, usage) | prompt

    def _answer(self, output: ChoiceOutput) -> dict[str, Any]:
        """Write `message` and `finish_reason`, which depend on the text."""
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"message": message, "finish_reason": output.finish_reason}


class ParsedChatFormat(ChatFormat):
    """Write chats whose outputs have reasoning and tool calls beside content.

    Reasoning is sent under both names that clients use. The arguments of a call are sent as they come.
    """

    def __init__(self, head: Head, form: OutputFormat) -> None:
        super().__init__(head)
        self._form = form
        self._parsers = [form() for _ in range(head.num_choices)]
        self._num_calls = [0] * head.num_choices

    def event(self, delta: Delta) -> bytes:
        """Write one event for each part of `delta`; b"" if it completes none."""
        index, parser = delta.index, self._parsers[delta.index]
        parts = parser.push(delta.text)
        if delta.finish_reason is not None:
            parts += parser.finish()
        elif len(parts) == 1 and delta.logprobs is None and delta.token_ids is None:  # most deltas
            part = parts[0]
            if isinstance(part, TextPart) and part.kind == "content":
                return super().event(Delta(index, part.text, None, None))
        bodies = [b',"delta":' + encode(self._delta(index, part)) for part in parts]
        details = self.details(delta)
        if not bodies and (details or delta.logprobs is not None):
            bodies = [b',"delta":{}']
        reason = _finish_reason(delta.finish_reason, self._num_calls[index])
        events = [self.choice(index, body, None, None) for body in bodies[:-1]]
        events += [self.choice(index, body, chat_logprobs(delta.logprobs), reason, details) for body in bodies[-1:]]
        return b"".join(events)

    rare_event = event

    def _delta(self, index: int, part: OutputPart) -> dict[str, Any]:
        if isinstance(part, TextPart):
            if part.kind == "reasoning":
                return {"reasoning_content": part.text, "reasoning": part.text}
            return {"content": part.text}
        if isinstance(part, ToolCallStart):
            call = {"index": self._num_calls[index], **_tool_call(self._form, part.name, "")}
            self._num_calls[index] += 1
            return {"tool_calls": [call]}
        return {"tool_calls": [{"index": self._num_calls[index] - 1, "function": {"arguments": part.text}}]}

    def _answer(self, output: ChoiceOutput) -> dict[str, Any]:
        read = read_output(self._form(), output.texts)
        message: dict[str, Any] = {"role": "assistant", "content": read.content, "refusal": None}
        if read.reasoning:
            message |= {"reasoning_content": read.reasoning, "reasoning": read.reasoning}
        if read.tool_calls:
            calls = [_tool_call(self._form, call.name, call.arguments) for call in read.tool_calls]
            message |= {"content": read.content or None, "tool_calls": calls}
        return {"message": message, "finish_reason": _finish_reason(output.finish_reason, len(read.tool_calls))}


def _tool_call(form: OutputFormat, name: str, arguments: str) -> dict[str, Any]:
    return {"id": form.new_call_id("call_"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _finish_reason(reason: str | None, num_calls: int) -> str | None:
    """Return OpenAI's "tool_calls" for a stop after calls."""
    return "tool_calls" if reason == "stop" and num_calls else reason
