"""Specifications of a KV cache: groups of layers, each with one id space of blocks."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar

import msgspec

from pypto_serving.errors import ConfigError
from pypto_serving.util import ceil_div

DEFAULT_BLOCK_SIZE = 32
"""Tokens per KV block: one panel of the CPU kernels."""

CHECKPOINT_TOKENS = 2048
"""Keep resume blocks of windows and states at multiples of this, and at the ends of prompts and turns."""

RUN_TOKENS = 16
"""While a sequence decodes, windows and states take and free blocks of at least this many tokens at once."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1, "int32": 4, "uint64": 8}

Spans = tuple[tuple[int, int], ...]
"""Ranges of bytes of a block, as half-open intervals in order."""


class KVTensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a group: in each of `layers` it has a row of `row_shape` for every `ratio` source tokens.

    `folded_from`: the rolling-state group from whose rows a compressed entry is computed, if there is one.
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


class _AbstractStruct(abc.ABCMeta, msgspec.StructMeta):
    """The type of structs with abstract methods."""


class GroupSpec(msgspec.Struct, metaclass=_AbstractStruct, frozen=True, kw_only=True, tag_field="kind"):
    """Layers that are addressed by one block table. A block holds `block_size` source tokens of every layer.

    | spec           | kind           | a query at position p reads                  | needed to resume at n tokens  |
    |----------------|----------------|----------------------------------------------|-------------------------------|
    | FullSpec       | full           | rows [0, p]                                  | all blocks of [0, n)          |
    | CompressedSpec | compressed     | entries w < (p + 1) // ratio                 | all blocks of [0, n)          |
    | WindowSpec     | sliding_window | rows [max(0, p - window + 1), p]             | blocks of [n - window + 1, n) |
    | StateSpec      | rolling_state  | rows [p // period * period - overlap, p]     | blocks of those rows of n     |

    The content of a block depends on `key_lookahead` tokens after it. Raises ConfigError for impossible values.
    """

    keeps_history: ClassVar[bool]
    """Whether every block of a sequence is needed until the request ends."""

    name: str
    tensors: tuple[KVTensorSpec, ...]
    block_size: int
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

    @property
    def kind(self) -> str:
        """The kind's name, as in the table."""
        return str(self.__struct_config__.tag)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        return sum(len(t.layers) * (self.block_size // t.ratio) * t.row_bytes for t in self.tensors)

    @property
    def run(self) -> int:
        """Number of blocks that a growing table takes at once."""
        return 1

    def table_blocks(self, num_tokens: int) -> int:
        """Return the largest length, including freed blocks, of the table of a sequence of `num_tokens` tokens."""
        return ceil_div(num_tokens, self.block_size * self.run) * self.run

    @abc.abstractmethod
    def first_needed(self, num_tokens: int) -> int:
        """Return the first position whose row is read by the token at position `num_tokens` or a later one."""

    @abc.abstractmethod
    def min_live_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a request needs at once while it grows to `num_tokens`, one token at a time.

        Checkpoints are not counted.
        """

    @abc.abstractmethod
    def live_blocks(self, num_tokens: int, step_tokens: int, step: int) -> int:
        """Return the most blocks that a request of `num_tokens` holds while `step_tokens` of them are not committed.

        `step` is the distance of resume points.
        """

    @abc.abstractmethod
    def blocks_per_token(self, step: int) -> Fraction:
        """Return the blocks that a cached sequence takes per token."""


class FullSpec(GroupSpec, frozen=True, kw_only=True, tag="full"):
    """Attention to all earlier tokens."""

    keeps_history: ClassVar[bool] = True

    def first_needed(self, num_tokens: int) -> int:
        return 0

    def min_live_blocks(self, num_tokens: int) -> int:
        return ceil_div(num_tokens, self.block_size)

    def live_blocks(self, num_tokens: int, step_tokens: int, step: int) -> int:
        return ceil_div(num_tokens, self.block_size)

    def blocks_per_token(self, step: int) -> Fraction:
        return Fraction(1, self.block_size)


class CompressedSpec(FullSpec, frozen=True, kw_only=True, tag="compressed"):
    """Attention to entries that each represent `ratio` earlier tokens."""


class RecentSpec(GroupSpec, frozen=True, kw_only=True):
    """A group whose queries read only the last rows, whose blocks are needed.

    A query at position p reads the rows of its period up to p, and `overlap` rows before that period: positions
    [p // period * period - overlap, p]. A row that is no longer needed is never needed again.
    """

    keeps_history: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def period(self) -> int: ...

    @property
    @abc.abstractmethod
    def overlap(self) -> int: ...

    @property
    def run(self) -> int:
        return max(1, RUN_TOKENS // self.block_size)

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens // self.period * self.period - self.overlap)

    def last_reader(self, position: int) -> int:
        """Return the last position that reads the row at `position`."""
        return (position + self.overlap) // self.period * self.period + self.period - 1

    def read_blocks(self, step_tokens: int) -> int:
        """Return the most blocks from the first row that `step_tokens` successive tokens read to the end of their runs.

        The last token may be the first one of a run. A run begins at a multiple of gcd(period, tokens of a run).
        """
        shared = math.gcd(self.period, self.run * self.block_size)
        before = ceil_div(step_tokens - 1, shared) * shared
        return self.run + ceil_div(before + self.period - shared + self.overlap, self.block_size)

    def resume_blocks(self, step: int) -> int:
        """Return the most blocks needed to resume at a multiple of `step` tokens, where a block ends.

        A multiple lies at most `period - gcd(period, step)` tokens into its period.
        """
        return ceil_div(self.period - math.gcd(self.period, step) + self.overlap, self.block_size)

    def min_live_blocks(self, num_tokens: int) -> int:
        recent = range(max(0, num_tokens - math.lcm(self.block_size, self.period)), num_tokens)
        return max(n // self.block_size - self.first_needed(n) // self.block_size + 1 for n in recent)

    def live_blocks(self, num_tokens: int, step_tokens: int, step: int) -> int:
        """Return the blocks that uncommitted tokens read or take, plus resume blocks at the last multiple of `step`."""
        total = self.table_blocks(num_tokens)
        return min(total, self.read_blocks(step_tokens)) + min(total, self.resume_blocks(step))

    def blocks_per_token(self, step: int) -> Fraction:
        """Return the resume blocks at checkpoints, per token, times two for those at the ends of prompts and turns."""
        return Fraction(2 * self.resume_blocks(step), CHECKPOINT_TOKENS)


class WindowSpec(RecentSpec, frozen=True, kw_only=True, tag="sliding_window"):
    """Attention to a window of `window` tokens, including the query itself."""

    window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ConfigError(f"KV group {self.name}: a sliding window of {self.window} tokens must be at least 1")

    @property
    def period(self) -> int:
        return 1

    @property
    def overlap(self) -> int:
        return self.window - 1


class StateSpec(RecentSpec, frozen=True, kw_only=True, tag="rolling_state"):
    """A state that is folded every `period` tokens, from the rows of that period and of `overlap` tokens before it.

    A block may hold several periods, part of one, or neither whole. With period 4, overlap 4 and blocks of 16 tokens:

        tokens  0       8       16      24      32
        periods |---|---|---|---|---|---|---|---|
        blocks  [       0       |       1       )
                            [-------)               token 19 reads [12, 20): blocks 0 and 1
                                [----)              token 20 reads [16, 21): block 0 is not needed
                                            [---)   resuming at 32 needs [28, 32): block 1
    """

    period: int
    overlap: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period < 1 or self.overlap < 0:
            raise ConfigError(
                f"KV group {self.name}: period {self.period} must be at least 1, and overlap {self.overlap} at least 0"
            )


KVCacheGroupSpec = FullSpec | CompressedSpec | WindowSpec | StateSpec


def resume_step(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the distance of resume points, at which a block ends in every group."""
    return math.lcm(*(group.block_size for group in groups))


def max_live_blocks(groups: Sequence[KVCacheGroupSpec], num_tokens: int, step_tokens: int) -> tuple[int, ...]:
    """Return, per group, the most blocks that a request of `num_tokens` holds; see `live_blocks`."""
    step = resume_step(groups)
    return tuple(group.live_blocks(num_tokens, step_tokens, step) for group in groups)


def publication_lag(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return how many tokens after a computed one must be known to compute the keys of all blocks up to it."""
    return max(group.key_lookahead for group in groups)
