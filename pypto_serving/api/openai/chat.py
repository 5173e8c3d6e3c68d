"""Serve POST /v1/chat/completions; write choices as server-sent events or as one object."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.chat.parsers.scanner import OutputPart, TextPart, ToolCallStart, read_output
from pypto_serving.api.common.body import ReadBody
from pypto_serving.api.common.described import chat_logprobs
from pypto_serving.api.common.respond import DONE, AnswerFormat, encode, generate, one_line
from pypto_serving.api.generation.choice import ChoiceOutput, Delta, TokenUsage
from pypto_serving.api.generation.logprobs import TokenEntry
from pypto_serving.api.generation.request import GenerationRequest
from pypto_serving.api.http.errors import ApiError
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.types.tier import TIERS


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""

    def new_format(body: ReadBody, wanted: GenerationRequest) -> AnswerFormat:
        kind = ChatFormat if body.new_parser is None else ParsedChatFormat
        return kind(body, wanted, request.app.state.service.tokenizer)

    return await generate(request, "chat", "chatcmpl-", new_format)


class EventFormat(AnswerFormat):
    """Writes the choices of one response, as events of a stream or all at once. Constant parts are encoded only once.

    Events are `{**base, "choices": [{"index": i, MIDDLE, "logprobs": ..., "finish_reason": ..., DETAILS}]}`.
    `around_text` is MIDDLE for plain text, with %b in place of the text. If usage is shown, every event has
    `"usage": null`, or the usage of its choice so far, and a last event without choices has the whole usage.
    """

    whole_object: ClassVar[str]
    event_object: ClassVar[str]
    around_text: ClassVar[bytes]

    def __init__(self, body: ReadBody, wanted: GenerationRequest, tokenizer: Tokenizer | None) -> None:
        self.shown = shown = body.shown
        self.prompts = wanted.prompts
        self.prompt_logprobs = wanted.prompt_logprobs
        self.tokenizer = tokenizer
        self.names = None if shown.tokens_as_ids else tokenizer
        """Decodes the names of tokens in log-probabilities; None if tokens are named by their ids."""
        self.num_choices = len(self.prompts) * shown.n
        kind, _, own = wanted.id.partition("-")
        shown_id = f"{kind}-{shown.request_id or own}"
        self._base = {"id": shown_id, "object": self.whole_object, "created": int(time.time()), "model": body.model}
        self._head = one_line(b"data: " + encode({**self._base, "object": self.event_object})[:-1] + b',"choices":[')
        self._usage = b',"usage":null' if shown.usage else b""
        self._num_tokens = [0] * self.num_choices
        before, after = self.around_text.split(b"%b")
        self._before = [b'%b{"index":%d%b' % (self._head, i, before) for i in range(self.num_choices)]
        self._after = after + b',"logprobs":null,"finish_reason":null}]' + self._usage + b"}\n\n"

    @property
    def writer(self) -> Callable[[Delta], bytes]:
        shown = self.shown
        return self.rare_event if shown.echo or shown.token_ids or shown.usage_so_far else self.event

    def event(self, delta: Delta) -> bytes:
        """Return the events of one delta, for a response without details; b"" if the delta is held back for later."""
        if delta.logprobs is None and delta.finish_reason is None:
            text = encode(delta.text)
            if not delta.text.isascii():
                text = one_line(text)
            return self._before[delta.index] + text + self._after
        return self.rare_event(delta)

    @abstractmethod
    def rare_event(self, delta: Delta) -> bytes:
        """Return the events of a delta with logprobs, finish reason or details; b"" if it is held back for later."""

    @abstractmethod
    def whole_choice(self, output: ChoiceOutput) -> dict[str, Any]:
        """Write one choice of a whole response."""

    def place(self, index: int) -> int:
        """Return the index of a choice's prompt."""
        return index // self.shown.n

    def prompt_ids(self, index: int) -> list[int]:
        """Return the token ids of a choice's prompt."""
        return list(self.prompts[self.place(index)].token_ids)

    def write_prompt_logprobs(self, index: int) -> list[dict[str, Any] | None] | None:
        """Write the log-probabilities of a choice's prompt in vLLM's form; None unless they were asked for.

        For each prompt token, an object maps the ids of this token and of the most likely ones to log-probabilities.
        """
        width = self.shown.prompt_logprobs
        if width is None:
            return None
        entries = self.prompt_logprobs[self.place(index)].entries(width, self.names)
        return [_by_id(entry) if entry.scored else None for entry in entries]

    def details(self, delta: Delta) -> bytes:
        """Write the further fields of the last event of a delta, beginning with a comma."""
        found = b""
        if delta.finish_reason is not None:
            found += b',"stop_reason":' + encode(delta.stop_reason)
        if delta.token_ids is not None:
            self._num_tokens[delta.index] += len(delta.token_ids)
            if self.shown.token_ids:
                found += b',"token_ids":' + encode(delta.token_ids)
        return found

    def choice(
        self,
        index: int,
        middle: bytes,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        details: bytes = b"",
        above: bytes = b"",
    ) -> bytes:
        """Write any event. `middle`, `details`, and `above` (fields beside `choices`) begin with a comma."""
        return b'%b{"index":%d%b,"logprobs":%b,"finish_reason":%b%b}]%b%b}\n\n' % (
            self._head,
            index,
            one_line(middle),
            b"null" if logprobs is None else one_line(encode(logprobs)),
            b"null" if finish_reason is None else encode(finish_reason),
            one_line(details),
            above,
            self._usage_so_far(index) if self.shown.usage_so_far else self._usage,
        )

    def _usage_so_far(self, index: int) -> bytes:
        num_prompt, num_output = len(self.prompts[self.place(index)].token_ids), self._num_tokens[index]
        counts = {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}
        return b',"usage":' + encode(counts)

    def closing(self, usage: TokenUsage) -> bytes:
        shown = self._head + b'],"usage":' + encode(self._whole_usage(usage)) + b"}\n\n" if self._usage else b""
        return shown + DONE

    def failure(self, error: ApiError) -> bytes:
        return one_line(b"data: " + error.payload() + b"\n\n")

    def response(self, outputs: Sequence[ChoiceOutput], usage: TokenUsage) -> dict[str, Any]:
        return {
            **self._base,
            "choices": [self.whole_choice(output) for output in outputs],
            "usage": self._whole_usage(usage),
            "service_tier": self.shown.service_tier,
            "system_fingerprint": None,
            "kv_transfer_params": None,
        }

    def _whole_usage(self, usage: TokenUsage) -> dict[str, Any]:
        """Write token counts, the cached prompt tokens of each tier, the output tokens of reasoning, and drafts.

        Accepted drafts are part of the completion tokens, rejected ones are not.
        """
        prompt_details: dict[str, Any] = {
            "cached_tokens": usage.num_cached_tokens,
            "cached_tokens_by_tier": dict(zip(TIERS, usage.cached_by_tier, strict=True)),
        }
        if self.shown.truncation:
            prompt_details["truncated_tokens"] = sum(prompt.num_cut for prompt in self.prompts)
        return {
            "prompt_tokens": usage.num_prompt_tokens,
            "completion_tokens": usage.num_output_tokens,
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
            "prompt_tokens_details": prompt_details,
            "completion_tokens_details": {
                "reasoning_tokens": usage.num_reasoning_tokens,
                "accepted_prediction_tokens": usage.num_accepted_drafts,
                "rejected_prediction_tokens": usage.num_rejected_drafts,
            },
        }


def _by_id(entry: TokenEntry) -> dict[str, Any]:
    return {
        str(token.token_id): {"logprob": token.shown_logprob, "rank": token.rank, "decoded_token": token.shown_text}
        for token in (entry.chosen, *entry.top)
    }


class ChatFormat(EventFormat):
    """Write `chat.completion` objects and chunks."""

    whole_object, event_object = "chat.completion", "chat.completion.chunk"
    around_text = b',"delta":{"content":%b}'

    def opening(self, usage: TokenUsage) -> bytes:
        role = b',"delta":{"role":"assistant","content":""}'
        ids = b',"prompt_token_ids":' + encode(self.prompt_ids(0)) if self.shown.token_ids else b""
        return b"".join(self.choice(i, role, None, None, above=ids) for i in range(self.num_choices))

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
            "token_ids": output.token_ids if self.shown.token_ids else None,
        }

    def response(self, outputs: Sequence[ChoiceOutput], usage: TokenUsage) -> dict[str, Any]:
        prompt = {
            "prompt_logprobs": self.write_prompt_logprobs(0),
            "prompt_token_ids": self.prompt_ids(0) if self.shown.token_ids else None,
        }
        return super().response(outputs, usage) | prompt

    def _answer(self, output: ChoiceOutput) -> dict[str, Any]:
        """Write `message` and `finish_reason`, which depend on the text."""
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"message": message, "finish_reason": output.finish_reason}


class ParsedChatFormat(ChatFormat):
    """Writes chats whose outputs have reasoning and tool calls beside content.

    Reasoning is sent under both names that clients use. The arguments of a call are sent as they are generated.
    """

    def __init__(self, body: ReadBody, wanted: GenerationRequest, tokenizer: Tokenizer | None) -> None:
        super().__init__(body, wanted, tokenizer)
        assert body.new_parser is not None
        self._form = body.new_parser
        self._parsers = [self._form() for _ in range(self.num_choices)]
        self._num_calls = [0] * self.num_choices

    def event(self, delta: Delta) -> bytes:
        """Write one event for each part of `delta`; b"" if the delta completes no part."""
        index, parser = delta.index, self._parsers[delta.index]
        ends = delta.finish_reason is not None
        parts = parser.push(delta.text, ends)
        if not ends and len(parts) == 1 and delta.logprobs is None and delta.token_ids is None:  # most deltas
            part = parts[0]
            if isinstance(part, TextPart) and part.kind == "content":
                return super().event(Delta(index, part.text, None, None))
        bodies = [b',"delta":' + encode(self._delta(index, part)) for part in parts]
        details = self.details(delta)
        if not bodies and (details or delta.logprobs is not None):
            bodies = [b',"delta":{}']
        reason = _finish_reason(delta.finish_reason, self._num_calls[index] > 0 and not parser.broken)
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
            call = {"index": self._num_calls[index], **self._tool_call(part.name, "")}
            self._num_calls[index] += 1
            return {"tool_calls": [call]}
        return {"tool_calls": [{"index": self._num_calls[index] - 1, "function": {"arguments": part.text}}]}

    def _answer(self, output: ChoiceOutput) -> dict[str, Any]:
        read = read_output(self._form(), output.texts)
        message: dict[str, Any] = {"role": "assistant", "content": read.content, "refusal": None}
        if read.reasoning:
            message |= {"reasoning_content": read.reasoning, "reasoning": read.reasoning}
        if read.tool_calls:
            calls = [self._tool_call(call.name, call.arguments) for call in read.tool_calls]
            message |= {"content": read.content or None, "tool_calls": calls}
        called = bool(read.tool_calls) and not read.broken
        return {"message": message, "finish_reason": _finish_reason(output.finish_reason, called)}

    def _tool_call(self, name: str, arguments: str) -> dict[str, Any]:
        call_id = self._form.new_call_id("call_")
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _finish_reason(reason: str | None, called: bool) -> str | None:
    """Return `reason`, but OpenAI's "tool_calls" for a stop after whole calls."""
    return "tool_calls" if reason == "stop" and called else reason
