"""PromptLogprobs: log-probabilities of prompt tokens, as every wire carries them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # the command line starts without numpy
    from pypto_serving.types.draws import Logprobs


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural log-probabilities of n consecutive prompt tokens and of the k most likely tokens at their positions.

    Little-endian bytes: `values` float32 [n] and `ranks` int32 [n] of the prompt's own tokens; `top_ids` int32 [n, k]
    and `top_values` float32 [n, k], best first.
    """

    values: bytes
    ranks: bytes
    top_ids: bytes = b""
    top_values: bytes = b""

    @classmethod
    def pack(cls, found: Logprobs) -> PromptLogprobs:
        """Encode what a sampler returned."""
        return cls(
            found.values.astype("<f4", copy=False).tobytes(),
            found.ranks.astype("<i4", copy=False).tobytes(),
            found.best_ids.astype("<i4", copy=False).tobytes(),
            found.best_values.astype("<f4", copy=False).tobytes(),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.values) // 4
