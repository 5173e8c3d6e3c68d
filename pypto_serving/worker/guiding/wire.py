"""Messages between a worker and its guide process, and the memory that they share."""

from __future__ import annotations

import mmap

import msgspec
import numpy as np
from numpy.typing import NDArray

from pypto_serving.types.guide import Guide
from pypto_serving.types.sampler import MaskArray

HEAD_BYTES = 64


class GuideStart(msgspec.Struct, frozen=True):
    """Start parameters of a guide process.

    `control` and `memory` are inherited file descriptors. `cpus`: CPUs to run on; () for those of the parent.
    """

    control: int
    memory: int
    model_dir: str
    vocab_size: int
    max_rows: int
    cpus: tuple[int, ...]
    max_drafts: int = 0


class OpenRow(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Follow a row that already has `output`. `life` identifies it in messages; `row` is its index in the masks."""

    life: int
    row: int
    guide: Guide
    eos_ids: bytes
    jumps: bool
    output: bytes


class RowTokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens", gc=False):
    """Row `lives[i]` has appended `counts[i]` tokens, or verifies as many drafts after its appended tokens.

    `token_ids` concatenates those of all rows.
    """

    lives: list[int]
    counts: list[int]
    token_ids: bytes
    are_drafts: bool


class DropRow(msgspec.Struct, frozen=True, array_like=True, tag="drop", gc=False):
    """A row no longer needs a guide."""

    life: int


class RowChoice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The next tokens that a row with `num_tokens` output tokens may append; NextTokens describes the other fields.

    `is_masked`: the row's mask is in the shared memory.
    """

    life: int
    num_tokens: int
    forced: tuple[int, ...]
    is_masked: bool
    is_done: bool
    expected: tuple[int, ...] = ()


class RowAhead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The first `num_drafts` drafts of a row with `num_tokens` output tokens match its grammar.

    The shared memory has the mask after each. Further drafts do not match, or were not checked.
    """

    life: int
    num_tokens: int
    num_drafts: int


class RowRefusal(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The error that ends a row; the guide process no longer follows the row."""

    life: int
    status: int
    code: str
    message: str


class GuideAnswers(msgspec.Struct, frozen=True, array_like=True):
    """News of some rows."""

    choices: list[RowChoice]
    refusals: list[RowRefusal]
    aheads: list[RowAhead] = []


ToGuides = OpenRow | RowTokens | DropRow


class SharedMasks:
    """Memory that a worker and its guide process share.

    - `masks` [R, 1 + D, words]: masks of each row's next token, and of the token after each of D drafts. The guide
      process writes them before it answers; then the worker reads them.
    - `num_heartbeats` [1]: turns that the guide process has begun. It is alive while this grows.
    - `at_work` [2, 2]: row whose tokens it is following, row whose grammar it is compiling. Each is the row's life and
      the `content_key` of its grammar; 0 if there is no such row.
    """

    def __init__(self, fd: int, max_rows: int, vocab_size: int, max_drafts: int = 0) -> None:
        shape = max_rows, 1 + max_drafts, -(-vocab_size // 32)
        memory = mmap.mmap(fd, self.num_bytes(max_rows, vocab_size, max_drafts))
        self.at_work: NDArray[np.int64] = np.frombuffer(memory, np.int64, 4).reshape(2, 2)
        self.num_heartbeats: NDArray[np.int64] = np.frombuffer(memory, np.int64, 1, offset=32)
        self.masks: MaskArray = np.frombuffer(memory, np.uint32, offset=HEAD_BYTES).reshape(shape)

    @staticmethod
    def num_bytes(max_rows: int, vocab_size: int, max_drafts: int = 0) -> int:
        """Return the size of the memory."""
        return HEAD_BYTES + 4 * max_rows * (1 + max_drafts) * -(-vocab_size // 32)
