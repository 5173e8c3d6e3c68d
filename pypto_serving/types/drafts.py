"""How drafts are made."""

from __future__ import annotations

from typing import Literal

import msgspec

DEFAULT_DRAFTS = 4
MAX_DRAFTS = 16
"""Max drafts of a row in one step, on a CPU."""
SHORTEST_MATCH, LONGEST_MATCH = 2, 64
NGRAM_TOKEN_BYTES = 16
"""Memory of the index, for each token of a row."""


class NgramConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts are what followed the last tokens of a row before: at least `shortest` of them.

    Beyond `longest` tokens no match is better than another.
    """

    shortest: int = SHORTEST_MATCH
    longest: int = LONGEST_MATCH


class Speculation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user gives, with vLLM's names. Raises ValueError."""

    method: Literal["ngram", "mtp"]
    num_speculative_tokens: int = DEFAULT_DRAFTS
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFTS:
            raise ValueError
        if self.ngram is None and (self.prompt_lookup_min, self.prompt_lookup_max) != (None, None):
            raise ValueError
        if self.ngram is not None and not 1 <= self.ngram.shortest <= self.ngram.longest <= LONGEST_MATCH:
            raise ValueError

    @property
    def ngram(self) -> NgramConfig | None:
        """Return the bounds of matches; one that was not given follows from the other. None if nothing is looked up."""
        if self.method != "ngram":
            return None
        longest = LONGEST_MATCH if self.prompt_lookup_max is None else self.prompt_lookup_max
        shortest = min(SHORTEST_MATCH, longest) if self.prompt_lookup_min is None else self.prompt_lookup_min
        return NgramConfig(shortest=shortest, longest=longest)
