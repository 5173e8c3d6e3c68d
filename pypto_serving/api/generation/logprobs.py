"""Hold the log-probabilities of output tokens and of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import msgspec
import numpy as np

from pypto_serving.api.text.detokenizer import Detokenizer
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import RequestError
from pypto_serving.types.arrays import id_list
from pypto_serving.types.sampler import Logprobs
from pypto_serving.types.step import PromptLogprobs, TokenLogprobs

MAX_LOGPROBS_OF_ANSWER = 2**20
"""Limit of log-probabilities of output tokens in an answer that is not streamed, over all choices.

Each takes about 170 bytes before the answer is encoded, and 220 more during encoding: 400 MB in all."""


LOWEST_LOGPROB = -9999.0
"""Sent instead of minus infinity, which JSON cannot express."""


class ScoredToken(msgspec.Struct, frozen=True, gc=False):
    """A token and its natural log-probability; `rank` 1 is the most likely.

    `utf8`: the bytes of the token; None if the model has no tokenizer.
    """

    token_id: int
    logprob: float
    rank: int
    utf8: bytes | None

    @property
    def shown_bytes(self) -> bytes:
        """Return the bytes of the token, or its id as text without a tokenizer."""
        return f"token_id:{self.token_id}".encode() if self.utf8 is None else self.utf8

    @property
    def shown_text(self) -> str:
        """Return the text of `shown_bytes`; parts of characters become U+FFFD."""
        return self.shown_bytes.decode("utf-8", errors="replace")

    @property
    def shown_logprob(self) -> float:
        """Return the log-probability, or LOWEST_LOGPROB for minus infinity."""
        return max(self.logprob, LOWEST_LOGPROB)


class TokenEntry(msgspec.Struct, frozen=True, gc=False):
    """The log-probabilities at one position: of the chosen token, and of the most likely ones, best first.

    `offset`: where the token begins in the text, in characters. `ends`: the token ended the sequence and has no text.
    The first token of a prompt is not `scored`, since nothing precedes it.
    """

    chosen: ScoredToken
    top: list[ScoredToken]
    offset: int
    ends: bool = False
    scored: bool = True


def _scored(tokenizer: Tokenizer | None, token_id: int, logprob: float, rank: int) -> ScoredToken:
    return ScoredToken(token_id, logprob, rank, None if tokenizer is None else tokenizer.token_bytes(token_id))


def token_entry(
    token_id: int, logprobs: TokenLogprobs, tokenizer: Tokenizer | None, offset: int, ends: bool
) -> TokenEntry:
    """Decode the engine's log-probabilities for one output token."""
    score = partial(_scored, tokenizer)
    ids = id_list(logprobs.top_ids)
    values = np.frombuffer(logprobs.top_logprobs, dtype="<f4").tolist()
    top = [score(i, value, rank) for rank, (i, value) in enumerate(zip(ids, values, strict=True), 1)]
    return TokenEntry(score(token_id, logprobs.logprob, logprobs.rank), top, offset, ends)


MAX_ANSWER_PROMPT_LOGPROBS = 2**18
"""Limit of log-probabilities of prompts in one answer, over all choices; each takes about 60 bytes."""


def check_num_prompt_logprobs(num_tokens: int, num_choices: int, width: int) -> None:
    """Raise RequestError if `width` + 1 log-probabilities per prompt token and choice are too many for one answer."""
    if num_tokens * num_choices * (1 + width) > MAX_ANSWER_PROMPT_LOGPROBS:
        problem = f"{num_tokens} prompt tokens in {num_choices} choices with the {width} most likely tokens of each"
        message = f"log-probabilities of {problem} are more than {MAX_ANSWER_PROMPT_LOGPROBS}"
        raise RequestError(f"{message}; send several requests, or ask for fewer", param="prompt_logprobs")


class CollectedPromptLogprobs:
    """The log-probabilities of one prompt's tokens, for all of its choices. Filled by the Generation.

    The first token has none.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._parts: list[PromptLogprobs] = []
        self._missing = len(token_ids) - 1

    def add(self, part: PromptLogprobs) -> None:
        """Append a part from the engine."""
        self._parts.append(part)
        self._missing -= part.num_tokens

    @property
    def complete(self) -> bool:
        """Whether all log-probabilities have arrived."""
        return self._missing <= 0

    def entries(
        self, width: int, tokenizer: Tokenizer | None, offsets: Sequence[int] | None = None
    ) -> Iterator[TokenEntry]:
        """Yield the entry of each token, with the `width` most likely tokens; `offsets` as of `text_offsets`."""
        score = partial(_scored, tokenizer)
        ids, at = self._token_ids, offsets or [0] * len(self._token_ids)
        yield TokenEntry(score(ids[0], 0.0, 0), [], at[0], scored=False)
        i = 1
        for part in self._parts:
            found = Logprobs.unpack(part)
            best = zip(found.best_ids[:, :width].tolist(), found.best_values[:, :width].tolist(), strict=True)
            for value, rank, tops in zip(found.values.tolist(), found.ranks.tolist(), best, strict=True):
                top = [score(*each, place) for place, each in enumerate(zip(*tops, strict=True), 1)]
                yield TokenEntry(score(ids[i], value, rank), top, at[i])
                i += 1


def text_offsets(token_ids: Sequence[int], text: str, tokenizer: Tokenizer | None) -> list[int]:
    """Return where each token of a prompt begins in its `text`, in characters.

    Special tokens that `text` lacks have no width in it. If the tokenizer changed the text, offsets are inexact.
    """
    if tokenizer is None:
        return [0] * len(token_ids)
    for skip_special in (False, True):
        detokenizer = Detokenizer(tokenizer, (), skip_special)
        ends = np.cumsum([len(detokenizer.push(token_id)) for token_id in token_ids])
        if ends[-1] + len(detokenizer.flush()) == len(text):
            break
    return [0, *np.minimum(ends, len(text))[:-1].tolist()]
