"""Log-probabilities of output tokens and of prompt tokens, as every wire carries them."""

from __future__ import annotations

import msgspec


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural log-probabilities of one output token, before temperature and filters.

    `top_ids` (int32) and `top_logprobs` (float32) are the most likely tokens, best first.
    """

    logprob: float
    rank: int
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural log-probabilities of n consecutive prompt tokens and of the k most likely tokens at their positions.

    Little-endian bytes: `values` float32 [n] and `ranks` int32 [n] of the prompt's own tokens; `top_ids` int32 [n, k]
    and `top_values` float32 [n, k], best first.
    """

    values: bytes
    ranks: bytes
    top_ids: bytes = b""
    top_values: bytes = b""

    @property
    def num_tokens(self) -> int:
        return len(self.values) // 4
