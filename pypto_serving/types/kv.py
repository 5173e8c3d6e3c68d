"""What a KV cache is made of: groups of layers that share one id space of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from pypto_serving.errors import ConfigError

GroupKind = Literal["full", "sliding_window", "compressed", "rolling_state"]

CHECKPOINT_TOKENS = 2048
"""Beside the ends of prompts and turns, tails of window and state groups are kept at multiples of so many tokens."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1, "int32": 4, "uint64": 8}


class KVTensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a group, present in each of `layers`: a row of `row_shape` for every `ratio` source tokens.

    `folded_from` names the rolling-state group whose rows a compressed entry is folded from, if there is one.
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

    `window` is in tokens and counts the query itself. `period` and `overlap` are in tokens. `key_lookahead` is
    the number of tokens after a block that its content depends on. Raises ConfigError for impossible values.
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
        if self.kind == "rolling_state" and (self.period < 1 or self.period % self.block_size):
            raise ConfigError(
                f"KV group {self.name}: period {self.period} must be a positive multiple of the "
                f"block size {self.block_size}"
            )

    @property
    def keeps_history(self) -> bool:
        """True where every block of a sequence stays needed until the request ends."""
        return self.kind in ("full", "compressed")

    def first_needed(self, num_tokens: int) -> int:
        """First position whose row must exist before the token at position `num_tokens` can be computed."""
        if self.kind == "sliding_window":
            return max(0, num_tokens - self.window + 1)
        if self.kind == "rolling_state":
            return max(0, num_tokens // self.period * self.period - self.overlap)
        return 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        return sum(len(t.layers) * (self.block_size // t.ratio) * t.row_bytes for t in self.tensors)

    def min_live_blocks(self, num_tokens: int) -> int:
        """Most blocks a request needs at once while it grows to `num_tokens` one by one, checkpoints not counted."""
        recent = range(max(0, num_tokens - 2 * (self.window + self.period) - self.block_size), num_tokens)
        return max(n // self.block_size - self.first_needed(n) // self.block_size + 1 for n in recent)

    def read_blocks(self, step_tokens: int) -> int:
        """Most blocks of a window or state that `step_tokens` tokens, and what they read, lie in."""
        if self.kind == "rolling_state":
            overlap = -(-self.overlap // self.block_size) * self.block_size
            return -(-(overlap + self.period - 1 + step_tokens) // self.block_size)
        return (self.window - 1 + step_tokens + self.block_size - 2) // self.block_size + 1

    def tail_blocks(self, step: int) -> int:
        """Most blocks that resuming a window or state at a multiple of `step` tokens, where a block ends, needs."""
        if self.kind == "rolling_state":
            return -(-(self.period - math.gcd(self.period, step) + self.overlap) // self.block_size)
        return -(-(self.window - 1) // self.block_size)


def resume_step(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Sequences can be resumed at multiples of so many tokens, where a block ends in every group."""
    return math.lcm(*(group.block_size for group in groups))


def max_live_blocks(groups: Sequence[KVCacheGroupSpec], num_tokens: int, step_tokens: int) -> tuple[int, ...]:
    """Most blocks of each group that a request of `num_tokens` holds, `step_tokens` of them computed and not settled.

    Of windows and states that is what it reads, and the tail at which the last checkpoint can be resumed.
    """
    step = resume_step(groups)

    def live(group: KVCacheGroupSpec) -> int:
        total = -(-num_tokens // group.block_size)
        if group.keeps_history:
            return total
        return min(total, group.read_blocks(step_tokens)) + min(total, group.tail_blocks(step))

    return tuple(live(group) for group in groups)


def publication_lag(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Tokens after a computed one that must be known before the keys of all blocks up to it are."""
    return max(group.key_lookahead for group in groups)
