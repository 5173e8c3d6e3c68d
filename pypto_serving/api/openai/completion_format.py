"""Write completions."""

from __future__ import annotations

from typing import Any

from pypto_serving.api.common.logprobs import completion_logprobs
from pypto_serving.api.common.sse import EventFormat, Head, encode
from pypto_serving.api.generation.choice import ChoiceOutput, Delta, TokenUsage
from pypto_serving.api.openai.best_of import best


class CompletionFormat(EventFormat):
    """Write `text_completion` objects."""

    def __init__(self, head: Head) -> None:
        super().__init__(head, "text_completion", "text_completion", b',"text":%b')
        self._unbegun = set(range(head.num_choices)) if head.shown.token_ids else set[int]()

    def rare_event(self, delta: Delta) -> bytes:
        logprobs = completion_logprobs(delta.logprobs)
        return self.text_event(delta.index, delta.text, logprobs, delta.finish_reason, self.details(delta))

    def text_event(
        self, index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None, details: bytes = b""
    ) -> bytes:
        """Write any event; with token ids shown, the first one of a choice has those of its prompt."""
        if index in self._unbegun:
            self._unbegun.remove(index)
            details += b',"prompt_token_ids":' + encode(self.head.prompt_ids(index))
        return self.choice(index, b',"text":' + encode(text), logprobs, finish_reason, details)

    def response(self, outputs: list[ChoiceOutput], usage: TokenUsage) -> dict[str, Any]:
        head = self.head
        if len(outputs) > head.num_choices:
            outputs = best(outputs, len(head.prompts), head.shown.n)
        return super().response(outputs, usage)

    def whole_choice(self, output: ChoiceOutput) -> dict[str, Any]:
        head, index = self.head, output.index
        return {
            "index": index,
            "text": output.text,
            "logprobs": None if head.shown.logprobs is None else completion_logprobs(output.logprobs),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if head.shown.token_ids else None,
            "prompt_logprobs": head.prompt_logprobs(index),
            "prompt_token_ids": head.prompt_ids(index) if head.shown.token_ids else None,
        }
