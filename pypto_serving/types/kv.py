"""Specs of a KV cache: groups of layers that share one id space of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from pypto_serving.errors import ConfigError
from pypto_serving.util import ceil_div

GroupKind = Literal["full", "sliding_window", "compressed", "rolling_state"]

CHECKPOINT_TOKENS = 2048
"""Tails of windows and states are kept at multiples of this, and at the ends of prompts and turns."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1, "int32": 4, "uint64": 8}


class KVTensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a group: in each of `layers` it has a row of `row_shape` for every `ratio` source tokens.

    `folded_from` names the rolling-state group from whose rows a compressed entry is folded, if there is one.
    """

    name: str
    layers: tuple[int, ...]
    dtype: str
    row_shape: tuple[int, ...]
    ratio: int = 1
    folded_from: str = ""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in one layer."""
        return math.prod(self.row_shape) * DTYPE_BYTES[self.dtype]


class KVCacheGroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that are addressed by one block table. A block holds `block_size` source tokens of every layer.

    | kind           | a query at position p reads                  | needed to resume at n tokens            |
    |----------------|----------------------------------------------|-----------------------------------------|
    | full           | rows [0, p]                                  | all blocks of [0, n)                    |
    | compressed     | entries w < (p + 1) // ratio                 | all blocks of [0, n)                    |
    | sliding_window | rows [max(0, p - window + 1), p]             | blocks of [max(0, n - window + 1), n)   |
    | rolling_state  | rows [p // period * period - overlap, p]     | blocks of [n // period * period - overlap, n) |

    `window`, `period`, `overlap` and `key_lookahead` are in tokens. The window counts the query itself. The content of
    a block depends on `key_lookahead` tokens after it. A block may hold several periods of a state, part of one, or
    neither whole: rows that a query reads are an interval of positions, and its blocks are those the interval lies in.
    With period 4, overlap 4 and blocks of 16 tokens:

        tokens  0       8       16      24      32
        periods |---|---|---|---|---|---|---|---|
        blocks  [       0       |       1       )
                            [-------)               token 19 reads [12, 20): blocks 0 and 1
                                [----)              token 20 reads [16, 21): block 0 is free
                                            [---)   resuming at 32 needs [28, 32): block 1

    Raises ConfigError for impossible values.
    """

    name: str
    kind: GroupKind
    tensors: tuple[KVTensorSpec, ...]
    block_size: int
    window: int = 0
    period: int = 0
    overlap: int = 0
    key_lookahead: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"KV group {self.name}: block size {self.block_size} must be at least 1")
        for tensor in self.tensors:
            if tensor.ratio < 1 or self.block_size % tensor.ratio:
                raise ConfigError(
                    f"KV group {self.name}: block size {self.block_size} must be a multiple of the compress ratio "
                    f"{tensor.ratio} of {tensor.name}; choose a multiple of {tensor.ratio}"
                )
        if self.kind == "sliding_window" and self.window < 1:
            raise ConfigError(f"KV group {self.name}: a sliding window of {self.window} tokens must be at least 1")
        if self.kind == "rolling_state" and (self.period < 1 or self.overlap < 0):
            raise ConfigError(
                f"KV group {self.name}: period {self.period} must be at least 1, and overlap {self.overlap} at least 0"
            )

    @property
    def keeps_history(self) -> bool:
        """Whether every block of a sequence stays needed until the request ends."""
        return self.kind in ("full", "compressed")

    def first_needed(self, num_tokens: int) -> int:
        """Return the first position whose row the token at position `num_tokens`, or one after it, reads."""
        if self.kind == "sliding_window":
            return max(0, num_tokens - self.window + 1)
        if self.kind == "rolling_state":
            return max(0, num_tokens // self.period * self.period - self.overlap)
        return 0

    def last_reader(self, position: int) -> int:
        """Return the last position that reads the row at `position` of a window or state."""
        if self.kind == "sliding_window":
            return position + self.window - 1
        return (position + self.overlap) // self.period * self.period + self.period - 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        return sum(len(t.layers) * (self.block_size // t.ratio) * t.row_bytes for t in self.tensors)

    def min_live_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a request needs at once while it grows to `num_tokens` one token at a time.

        Checkpoints are not counted. The number repeats after every common multiple of block size and period.
        """
        recent = range(max(0, num_tokens - math.lcm(self.block_size, self.period or 1)), num_tokens)
        return max(n // self.block_size - self.first_needed(n) // self.block_size + 1 for n in recent)

    def read_blocks(self, step_tokens: int) -> int:
        """Return the most blocks that `step_tokens` successive tokens of a window or state, and what they read, lie in.

        What they read begins anywhere in a block of a window. In a state it begins `overlap` tokens before a multiple
        of `period`, that is at an offset equal to -overlap modulo gcd(period, block_size).
        """
        if self.kind == "rolling_state":
            shared = math.gcd(self.period, self.block_size)
            start = self.block_size - shared + -self.overlap % shared
            return ceil_div(start + self.overlap + self.period - 1 + step_tokens, self.block_size)
        start = self.block_size - 1
        return ceil_div(start + self.window - 1 + step_tokens, self.block_size)

    def tail_blocks(self, step: int) -> int:
        """Return the most blocks that resuming a window or state at a multiple of `step` tokens needs.

        A block ends there, and the multiple lies at most `period - gcd(period, step)` tokens into a period.
        """
        if self.kind == "rolling_state":
            return ceil_div(self.period - math.gcd(self.period, step) + self.overlap, self.block_size)
        return ceil_div(self.window - 1, self.block_size)

    def live_blocks(self, num_tokens: int, step_tokens: int, step: int) -> int:
        """Return the most blocks that a request of `num_tokens` holds while `step_tokens` of them are not settled.

        For a window or state, those are the blocks it reads and the tail of the last multiple of `step`.
        """
        total = ceil_div(num_tokens, self.block_size)
        if self.keeps_history:
            return total
        return min(total, self.read_blocks(step_tokens)) + min(total, self.tail_blocks(step))


def resume_step(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the distance of positions at which sequences can be resumed: there a block ends in every group."""
    return math.lcm(*(group.block_size for group in groups))


def max_live_blocks(groups: Sequence[KVCacheGroupSpec], num_tokens: int, step_tokens: int) -> tuple[int, ...]:
    """Return the most blocks of each group that a request of `num_tokens` holds; see `live_blocks`."""
    step = resume_step(groups)
    return tuple(group.live_blocks(num_tokens, step_tokens, step) for group in groups)


def publication_lag(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return how many tokens after a computed one must be known before the keys of all blocks up to it are."""
    return max(group.key_lookahead for group in groups)
