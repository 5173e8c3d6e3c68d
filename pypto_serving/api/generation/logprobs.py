"""Carry the log-probabilities of output tokens."""

from __future__ import annotations

import msgspec
import numpy as np

from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.types.arrays import id_list
from pypto_serving.types.step import TokenLogprobs

MAX_LOGPROBS_OF_ANSWER = 2**20
"""Bounds the log-probabilities of output tokens in an answer that is not streamed, over all choices.

Each takes about 170 bytes until the answer is written, and 220 while it is: 400 MB in all."""


LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""


class ScoredToken(msgspec.Struct, frozen=True, gc=False):
    """A token and its natural log-probability; `rank` 1 is the most likely.

    `utf8` are the bytes that it stands for, None if the model has no tokenizer.
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
        """Return the log-probability as JSON can have it."""
        return max(self.logprob, LOWEST_LOGPROB)


class TokenEntry(msgspec.Struct, frozen=True, gc=False):
    """The log-probabilities at one output position: of the chosen token and of the most likely ones, best first.

    `offset` is where the text of the token begins in the output, in characters. `ends`: the token ended the sequence
    and has no text. The first token of a prompt is not `scored`, since nothing precedes it.
    """

    chosen: ScoredToken
    top: list[ScoredToken]
    offset: int
    ends: bool = False
    scored: bool = True


def token_entry(
    token_id: int, logprobs: TokenLogprobs, tokenizer: Tokenizer | None, offset: int, ends: bool = False
) -> TokenEntry:
    """Decode what the engine sent for one output token."""

    def score(token_id: int, logprob: float, rank: int) -> ScoredToken:
        utf8 = None if tokenizer is None else tokenizer.token_bytes(token_id)
        return ScoredToken(token_id, logprob, rank, utf8)

    ids = id_list(logprobs.top_ids)
    values = np.frombuffer(logprobs.top_logprobs, dtype="<f4").tolist()
    top = [score(i, value, rank) for rank, (i, value) in enumerate(zip(ids, values, strict=True), 1)]
    return TokenEntry(score(token_id, logprobs.logprob, logprobs.rank), top, offset, ends)
