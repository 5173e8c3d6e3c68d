"""Serve POST /v1/completions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.common.body import ReadBody
from pypto_serving.api.common.respond import AnswerFormat, encode, generate
from pypto_serving.api.generation.choice import ChoiceOutput, Delta, TokenUsage
from pypto_serving.api.generation.logprobs import TokenEntry, text_offsets
from pypto_serving.api.generation.request import GenerationRequest
from pypto_serving.api.openai.chat import EventFormat
from pypto_serving.api.text.tokenizer import Tokenizer


async def create_completion(request: Request) -> Response:
    """Continue one or several prompts."""

    def new_format(body: ReadBody, wanted: GenerationRequest) -> AnswerFormat:
        kind = EchoFormat if body.shown.echo else CompletionFormat
        return kind(body, wanted, request.app.state.service.tokenizer)

    return await generate(request, "completions", "cmpl-", new_format)


class CompletionFormat(EventFormat):
    """Write `text_completion` objects."""

    whole_object = event_object = "text_completion"
    around_text = b',"text":%b'

    def __init__(self, body: ReadBody, wanted: GenerationRequest, tokenizer: Tokenizer | None) -> None:
        super().__init__(body, wanted, tokenizer)
        self._unbegun = set(range(self.num_choices)) if self.shown.token_ids else set[int]()

    def rare_event(self, delta: Delta) -> bytes:
        logprobs = None if delta.logprobs is None else completion_logprobs(delta.logprobs)
        return self.text_event(delta.index, delta.text, logprobs, delta.finish_reason, self.details(delta))

    def text_event(
        self, index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None, details: bytes = b""
    ) -> bytes:
        """Write any event. With token ids shown, the first event of a choice has the ids of its prompt."""
        if index in self._unbegun:
            self._unbegun.remove(index)
            details += b',"prompt_token_ids":' + encode(self.prompt_ids(index))
        return self.choice(index, b',"text":' + encode(text), logprobs, finish_reason, details)

    def response(self, outputs: Sequence[ChoiceOutput], usage: TokenUsage) -> dict[str, Any]:
        if len(outputs) > self.num_choices:
            outputs = best(outputs, len(self.prompts), self.shown.n)
        return super().response(outputs, usage)

    def whole_choice(self, output: ChoiceOutput) -> dict[str, Any]:
        index, entries = output.index, None if self.shown.logprobs is None else output.logprobs
        return {
            "index": index,
            "text": output.text,
            "logprobs": None if entries is None else completion_logprobs(entries),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if self.shown.token_ids else None,
            "prompt_logprobs": self.write_prompt_logprobs(index),
            "prompt_token_ids": self.prompt_ids(index) if self.shown.token_ids else None,
        }


def completion_logprobs(entries: Iterable[TokenEntry], shift: int = 0) -> dict[str, list[Any]]:
    """Write parallel lists with one entry per token; `top_logprobs` includes the chosen token.

    `shift` is added to the offsets.
    """
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in entries:
        found["tokens"].append(entry.chosen.shown_text)
        found["token_logprobs"].append(entry.chosen.shown_logprob if entry.scored else None)
        found["top_logprobs"].append(_top_by_text(entry) if entry.scored else None)
        found["text_offset"].append(shift + entry.offset)
    return found


def _top_by_text(entry: TokenEntry) -> dict[str, float]:
    """Map texts to log-probabilities. Of tokens with equal text (parts of characters), keep the most likely one."""
    found: dict[str, float] = {}
    for token in [*entry.top, entry.chosen]:
        found.setdefault(token.shown_text, token.shown_logprob)
    return found


class EchoFormat(CompletionFormat):
    """Writes completions whose text, and logprobs if asked for, begin with those of the prompt.

    In a stream, the first event of a choice has only the prompt. Events wait until the log-probabilities of their
    prompt are complete; these arrive with the first choice of the prompt.
    """

    def __init__(self, body: ReadBody, wanted: GenerationRequest, tokenizer: Tokenizer | None) -> None:
        super().__init__(body, wanted, tokenizer)
        self._texts: dict[int, str] = {}
        self._logprobs: dict[int, dict[str, list[Any]]] = {}
        self._held: list[list[Delta]] = [[] for _ in self.prompts]
        self._echoed: set[int] = set()

    def rare_event(self, delta: Delta) -> bytes:
        place = self.place(delta.index)
        self._held[place].append(delta)
        if self.shown.logprobs is not None and not self.prompt_logprobs[place].complete:
            return b""
        deltas, self._held[place] = self._held[place], []
        return b"".join(map(self._events, deltas))

    def _events(self, delta: Delta) -> bytes:
        """Write the event of a delta; before the first one of a choice, write the event of its prompt."""
        index, place, first = delta.index, self.place(delta.index), b""
        if index not in self._echoed:
            self._echoed.add(index)
            first = self.text_event(index, self._text(place), self._prompt_logprobs(place), None)
        shift, entries = len(self._text(place)), delta.logprobs
        logprobs = None if entries is None else completion_logprobs(entries, shift)
        return first + self.text_event(index, delta.text, logprobs, delta.finish_reason, self.details(delta))

    def whole_choice(self, output: ChoiceOutput) -> dict[str, Any]:
        place, found = self.place(output.index), super().whole_choice(output)
        if (begun := self._prompt_logprobs(place)) is not None:
            more = completion_logprobs(output.logprobs or [], len(self._text(place)))
            found["logprobs"] = {name: values + more[name] for name, values in begun.items()}
        return found | {"text": self._text(place) + output.text}

    def _text(self, place: int) -> str:
        """Return the text of a prompt; token ids are decoded only once."""
        prompt = self.prompts[place]
        if place not in self._texts:
            text = prompt.text
            if text is None and self.tokenizer is not None:
                text = self.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)
            self._texts[place] = text or ""
        return self._texts[place]

    def _prompt_logprobs(self, place: int) -> dict[str, list[Any]] | None:
        """Write the complete log-probabilities of a prompt in OpenAI's form; None unless they were asked for."""
        width = self.shown.logprobs
        if width is None:
            return None
        if place not in self._logprobs:
            offsets = text_offsets(self.prompts[place].token_ids, self._text(place), self.tokenizer)
            entries = self.prompt_logprobs[place].entries(width, self.names, offsets)
            self._logprobs[place] = completion_logprobs(entries)
        return self._logprobs[place]


def best(outputs: Sequence[ChoiceOutput], num_prompts: int, shown: int) -> list[ChoiceOutput]:
    """Return the `shown` best choices of each prompt, best first, with new indices."""
    made = len(outputs) // num_prompts
    groups = [outputs[start : start + made] for start in range(0, len(outputs), made)]
    found = [output for group in groups for output in sorted(group, key=_mean_logprob, reverse=True)[:shown]]
    for index, output in enumerate(found):
        output.index = index
    return found


def _mean_logprob(output: ChoiceOutput) -> float:
    values = [entry.chosen.logprob for entry in output.logprobs or ()]
    return math.fsum(values) / len(values) if values else 0.0
