"""Write completions that begin with their prompt, as `echo` asks."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from pypto_serving.api.common.logprobs import completion_logprobs
from pypto_serving.api.common.sse import Head
from pypto_serving.api.generation.choice import ChoiceOutput, Delta
from pypto_serving.api.generation.prompt_scores import prompt_text, text_offsets
from pypto_serving.api.openai.completion_format import CompletionFormat


class EchoFormat(CompletionFormat):
    """Write completions whose text begins with the prompt, and whose logprobs, if asked for, with those of the prompt.

    In a stream the first event of a choice has the prompt alone. Events wait until the log-probabilities of their
    prompt are complete: the first choice of a prompt brings them.
    """

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._echoes = [_Echo(head, place) for place in range(len(head.prompts))]
        self._held: list[list[Delta]] = [[] for _ in head.prompts]
        self._echoed: set[int] = set()

    def rare_event(self, delta: Delta) -> bytes:
        place = self.head.place(delta.index)
        self._held[place].append(delta)
        if not self._echoes[place].complete:
            return b""
        deltas, self._held[place] = self._held[place], []
        return b"".join(map(self._events, deltas))

    def _events(self, delta: Delta) -> bytes:
        """Write the event of a delta, behind that of its prompt if it is the first of its choice."""
        index, echo = delta.index, self._echoes[self.head.place(delta.index)]
        first = b""
        if index not in self._echoed:
            self._echoed.add(index)
            first = self.text_event(index, echo.text, echo.logprobs, None)
        logprobs = completion_logprobs(delta.logprobs, len(echo.text))
        return first + self.text_event(index, delta.text, logprobs, delta.finish_reason, self.details(delta))

    def whole_choice(self, output: ChoiceOutput) -> dict[str, Any]:
        echo, found = self._echoes[self.head.place(output.index)], super().whole_choice(output)
        if echo.logprobs is not None:
            more = completion_logprobs(output.logprobs or [], len(echo.text))
            found["logprobs"] = {name: values + more[name] for name, values in echo.logprobs.items()}
        return found | {"text": echo.text + output.text}


class _Echo:
    """The text of a prompt, and its log-probabilities in OpenAI's form once they are complete."""

    def __init__(self, head: Head, place: int) -> None:
        self._head, self._prompt = head, head.prompts[place]
        self._scores = head.scores[place] if head.shown.logprobs is not None else None

    @property
    def complete(self) -> bool:
        return self._scores is None or self._scores.complete

    @cached_property
    def text(self) -> str:
        prompt = self._prompt
        return prompt_text(prompt.token_ids, self._head.tokenizer) if prompt.text is None else prompt.text

    @cached_property
    def logprobs(self) -> dict[str, list[Any]] | None:
        head, width = self._head, self._head.shown.logprobs
        if self._scores is None or width is None:
            return None
        offsets = text_offsets(self._prompt.token_ids, self.text, head.tokenizer)
        return completion_logprobs(self._scores.entries(width, head.names, offsets))
