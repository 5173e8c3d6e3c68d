"""Write choices as server-sent events or as one object; constant parts are encoded once per request."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from pypto_serving.api.common.logprobs import prompt_logprobs
from pypto_serving.api.common.shown import Shown
from pypto_serving.api.common.usage import usage_object
from pypto_serving.api.generation.choice import ChoiceOutput, Delta, TokenUsage
from pypto_serving.api.generation.prompt_scores import PromptScores
from pypto_serving.api.generation.request import FittedPrompt, GenerationRequest
from pypto_serving.api.http.errors import ApiError
from pypto_serving.api.service import Service
from pypto_serving.api.text.tokenizer import Tokenizer

encode = msgspec.json.encode
DONE, PING = b"data: [DONE]\n\n", b": ping\n\n"


def one_line(event: bytes) -> bytes:
    """Escape the characters beyond ASCII at which some clients split lines: U+0085, U+2028 and U+2029."""
    event = event.replace(b"\xc2\x85", b"\\u0085")
    return event.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")


def named(event: msgspec.Struct) -> bytes:
    """Write a server-sent event that is named by the type of its data."""
    return f"event: {event.__struct_config__.tag}\ndata: ".encode() + one_line(encode(event)) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """What all objects of one response share: fields, what they show, and the prompts.

    `created` is in seconds since the epoch. `scores` are those of each prompt, or () if nobody asked.
    """

    id: str
    created: int
    model: str
    shown: Shown
    prompts: Sequence[FittedPrompt]
    scores: Sequence[PromptScores]
    tokenizer: Tokenizer | None

    @classmethod
    def of(cls, service: Service, wanted: GenerationRequest, model: str, shown: Shown) -> Self:
        kind, _, own = wanted.id.partition("-")
        shown_id = f"{kind}-{shown.request_id or own}"
        return cls(shown_id, int(time.time()), model, shown, wanted.prompts, wanted.scores, service.tokenizer)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.shown.n

    @property
    def names(self) -> Tokenizer | None:
        """Return what names tokens in log-probabilities; None if their ids do."""
        return None if self.shown.tokens_as_ids else self.tokenizer

    def place(self, index: int) -> int:
        """Return the place of a choice's prompt."""
        return index // self.shown.n

    def prompt_ids(self, index: int) -> list[int]:
        """Return the token ids of a choice's prompt."""
        return list(self.prompts[self.place(index)].token_ids)

    def prompt_logprobs(self, index: int) -> list[dict[str, Any] | None] | None:
        """Write the log-probabilities of a choice's prompt in vLLM's form; None if they are not to be shown."""
        width = self.shown.prompt_logprobs
        return None if width is None else prompt_logprobs(self.scores[self.place(index)].entries(width, self.names))


class EventFormat(ABC):
    """Write the choices of one response: as events of a stream, or all at once.

    Events are `{**base, "choices": [{"index": i, MIDDLE, "logprobs": ..., "finish_reason": ..., DETAILS}]}`.
    `around_text` is MIDDLE for nothing but text; %b stands for the text. If usage is shown, every event has
    `"usage": null`, or the usage of its choice so far, and a last event without choices has the whole usage.
    """

    def __init__(self, head: Head, whole: str, event: str, around_text: bytes) -> None:
        """`whole` and `event` are the values of `object` in a whole response and in an event."""
        self.head = head
        self._base = {"id": head.id, "object": whole, "created": head.created, "model": head.model}
        self._head = one_line(b"data: " + encode({**self._base, "object": event})[:-1] + b',"choices":[')
        self._usage = b',"usage":null' if head.shown.usage else b""
        self._num_tokens = [0] * head.num_choices
        before, after = around_text.split(b"%b")
        self._before = [b'%b{"index":%d%b' % (self._head, i, before) for i in range(head.num_choices)]
        self._after = after + b',"logprobs":null,"finish_reason":null}]' + self._usage + b"}\n\n"

    def ping(self, usage: TokenUsage) -> bytes:
        """Write a comment, which clients take for no token."""
        return PING

    def opening(self, usage: TokenUsage) -> bytes:
        """Write the events before the first token."""
        return b""

    @property
    def writer(self) -> Callable[[Delta], bytes]:
        """Return what writes the events of one delta; b"" if it is held back for later."""
        shown = self.head.shown
        return self.rare_event if shown.echo or shown.token_ids or shown.usage_so_far else self.event

    def event(self, delta: Delta) -> bytes:
        """Write the events of one delta of a response that shows no details; b"" if it is held back for later."""
        if delta.logprobs is None and delta.finish_reason is None:
            text = encode(delta.text)
            if not delta.text.isascii():
                text = one_line(text)
            return self._before[delta.index] + text + self._after
        return self.rare_event(delta)

    @abstractmethod
    def rare_event(self, delta: Delta) -> bytes:
        """Write the events of a delta with logprobs, a finish reason or details; b"" if it is held back for later."""

    def details(self, delta: Delta) -> bytes:
        """Write what the last event of a delta has beside text, logprobs and finish reason, beginning with a comma."""
        found = b""
        if delta.finish_reason is not None:
            found += b',"stop_reason":' + encode(delta.stop_reason)
        if delta.token_ids is not None:
            self._num_tokens[delta.index] += len(delta.token_ids)
            if self.head.shown.token_ids:
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
        """Write any event. `middle`, `details` and `above`, which stands beside `choices`, begin with a comma."""
        return b'%b{"index":%d%b,"logprobs":%b,"finish_reason":%b%b}]%b%b}\n\n' % (
            self._head,
            index,
            one_line(middle),
            b"null" if logprobs is None else one_line(encode(logprobs)),
            b"null" if finish_reason is None else encode(finish_reason),
            one_line(details),
            above,
            self._usage_so_far(index) if self.head.shown.usage_so_far else self._usage,
        )

    def _usage_so_far(self, index: int) -> bytes:
        num_prompt, num_output = len(self.head.prompts[self.head.place(index)].token_ids), self._num_tokens[index]
        counts = {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}
        return b',"usage":' + encode(counts)

    def closing(self, usage: TokenUsage) -> bytes:
        """Write the last events of a stream, with the usage if it is to be shown."""
        shown = self._head + b'],"usage":' + encode(self._whole_usage(usage)) + b"}\n\n" if self._usage else b""
        return shown + DONE

    def failure(self, error: ApiError) -> bytes:
        """Write the event that ends a stream in which `error` came up."""
        return one_line(b"data: " + error.payload() + b"\n\n")

    def response(self, outputs: list[ChoiceOutput], usage: TokenUsage) -> dict[str, Any]:
        """Write the whole response of a request that does not stream."""
        return {
            **self._base,
            "choices": [self.whole_choice(output) for output in outputs],
            "usage": self._whole_usage(usage),
            "service_tier": self.head.shown.service_tier,
            "system_fingerprint": None,
            "kv_transfer_params": None,
        }

    def _whole_usage(self, usage: TokenUsage) -> dict[str, Any]:
        num_cut = sum(prompt.num_cut for prompt in self.head.prompts) if self.head.shown.truncation else None
        return usage_object(usage, num_cut)

    @abstractmethod
    def whole_choice(self, output: ChoiceOutput) -> dict[str, Any]:
        """Write one choice of a whole response."""
