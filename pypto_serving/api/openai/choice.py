"""One output sequence on its way from token ids to what a client reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from pypto_serving.api.generation.stops import StopStrings
from pypto_serving.api.text.detokenizer import Detokenizer
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.types.request import RequestOutput, TokenLogprobs
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.tokens import id_list

ONE_ID = 4
"""Bytes of one token id."""
LOWEST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON lacks."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """Log-probabilities of one output token; `offset` is where its text begins in the output, in characters."""

    token: bytes
    logprob: float
    top: list[tuple[bytes, float]]
    offset: int


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What an engine output added to a choice; `logprobs` is None where the request asked for none."""

    index: int
    text: str
    logprobs: list[TokenEntry] | None
    finish_reason: str | None


class Output:
    """All deltas of one choice, collected."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.texts: list[str] = []
        self.logprobs: list[TokenEntry] | None = None
        self.finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        """Append; deltas come in order."""
        self.texts.append(delta.text)
        self.finish_reason = delta.finish_reason
        if delta.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs.extend(delta.logprobs)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Choice:
    """Detokenises one sequence, matches its stop strings and counts. Owned by its Generation.

    `last_s` is when its last output came, for its owner to keep.
    """

    __slots__ = (
        "_detokenizer",
        "_entries",
        "_min_tokens",
        "_num_chars",
        "_plain_text",
        "_stops",
        "_tokenizer",
        "cached_by_tier",
        "finish_reason",
        "index",
        "last_s",
        "num_cached",
        "num_prompt",
        "num_tokens",
        "request_id",
    )

    def __init__(
        self,
        index: int,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.index = index
        self.request_id = request_id
        self.num_prompt = len(prompt)
        self.last_s = 0.0
        self.num_tokens = 0
        self.num_cached = 0
        self.cached_by_tier: tuple[int, ...] = ()
        self.finish_reason: str | None = None
        self._min_tokens = params.min_tokens
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt, params.skip_special_tokens)
        self._stops = StopStrings(params.stop) if params.stop else None
        self._entries: list[TokenEntry] | None = None if params.logprobs is None else []
        self._num_chars = 0
        plain = self._stops is None and self._entries is None
        self._plain_text = self._detokenizer.push if plain and self._detokenizer is not None else None

    def take(self, output: RequestOutput) -> Delta | None:
        """Add an engine output; the delta to send, or None while there is nothing to show.

        Sets `finish_reason` with the last one; where a stop string was found the engine may not know yet.
        """
        data, reason = output.token_ids, output.finish_reason
        if output.num_cached_tokens > self.num_cached:
            self.num_cached = output.num_cached_tokens
        if self._plain_text is not None and reason is None and len(data) == ONE_ID:
            self.num_tokens += 1
            text = self._plain_text(int.from_bytes(data, "little"))
            return Delta(self.index, text, None, None) if text else None
        return self._take_any(id_list(data), output)

    def _take_any(self, ids: Sequence[int], output: RequestOutput) -> Delta | None:
        """Any number of tokens, the last ones, stop strings and log-probabilities."""
        text, reason = "", output.finish_reason
        self.cached_by_tier = output.cached_by_tier or self.cached_by_tier
        silent_at = len(ids) - 1 if reason == "stop" and ids and ids[-1] == output.stop_token_id else -1
        for i, token_id in enumerate(ids):
            self.num_tokens += 1
            if self._entries is not None and output.logprobs is not None:
                self._entries.append(self._entry(token_id, output.logprobs[i]))
            if i != silent_at:
                text += self._push(token_id)
            if self._stops is not None and self._stops.matched is not None:
                reason = "stop"
                break
        if reason is not None:
            text += self._flush()
            self.finish_reason = "stop" if self._stopped else reason
        elif not text:
            return None
        entries, self._entries = self._entries, None if self._entries is None else []
        return Delta(self.index, text, entries, self.finish_reason)

    @property
    def _stopped(self) -> bool:
        return self._stops is not None and self._stops.matched is not None

    def _push(self, token_id: int) -> str:
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push(token_id)
        self._num_chars += len(text)
        if self._stops is None or self.num_tokens <= self._min_tokens:
            return text
        return self._stops.push(text)

    def _flush(self) -> str:
        text = "" if self._detokenizer is None else self._detokenizer.flush()
        if self._stops is None:
            return text
        return self._stops.push(text) + self._stops.flush()

    def _entry(self, token_id: int, logprobs: TokenLogprobs) -> TokenEntry:
        ids = id_list(logprobs.top_ids)
        values = np.frombuffer(logprobs.top_logprobs, dtype="<f4").tolist()
        top = [(self._bytes(i), max(value, LOWEST_LOGPROB)) for i, value in zip(ids, values, strict=True)]
        return TokenEntry(self._bytes(token_id), max(logprobs.logprob, LOWEST_LOGPROB), top, self._num_chars)

    def _bytes(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return f"token_id:{token_id}".encode()
        return self._tokenizer.token_bytes(token_id)
