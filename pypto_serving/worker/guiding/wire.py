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
    """What a guide process needs to start.

    `control` and `memory` are inherited file descriptors. `cpus`: where it may run; () for the CPUs of its parent.
    """

    control: int
    memory: int
    model_dir: str
    vocab_size: int
    max_rows: int
    cpus: tuple[int, ...]
    max_drafts: int = 0


class OpenRow(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Follow a row from its first output token on; it has `output` already. `life` names it, `row` is its mask."""

    life: int
    row: int
    guide: Guide
    eos_ids: bytes
    jumps: bool
    output: bytes


class AppendTokens(msgspec.Struct, frozen=True, array_like=True, tag="append", gc=False):
    """Rows `lives[i]` appended `counts[i]` of `token_ids`, row after row."""

    lives: list[int]
    counts: list[int]
    token_ids: bytes


class DraftTokens(msgspec.Struct, frozen=True, array_like=True, tag="draft", gc=False):
    """Rows `lives[i]` verify `counts[i]` of `token_ids`, row after row, after all that they appended."""

    lives: list[int]
    counts: list[int]
    token_ids: bytes


class DropRow(msgspec.Struct, frozen=True, array_like=True, tag="drop", gc=False):
    """A row needs no guide any more."""

    life: int


class RowChoice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a row of `num_tokens` output tokens may append next: see NextTokens, also for `forced` and `expected`.

    `is_masked`: whether its mask is in the shared memory.
    """

    life: int
    num_tokens: int
    forced: tuple[int, ...]
    is_masked: bool
    is_done: bool
    expected: tuple[int, ...] = ()


class RowAhead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The first `num_drafts` drafts of a row of `num_tokens` output tokens match, and masks after each are known.

    The masks are in the shared memory. Further drafts do not match, or nothing is known of them.
    """

    life: int
    num_tokens: int
    num_drafts: int


class RowRefusal(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why a row cannot go on; the process has forgotten it."""

    life: int
    status: int
    code: str
    message: str


class GuideAnswers(msgspec.Struct, frozen=True, array_like=True):
    """What is new of some rows."""

    choices: list[RowChoice]
    refusals: list[RowRefusal]
    aheads: list[RowAhead] = []


ToGuides = OpenRow | AppendTokens | DraftTokens | DropRow


class SharedMasks:
    """Memory that a worker and its guide process share.

    - `masks` [R, 1 + D, words]: what each row may choose next, and after each of D drafts. Written by the process
      before it answers, then read by the worker.
    - `num_heartbeats` [1]: how many turns the process began. It is alive while this grows.
    - `at_work` [2, 2]: for whom it works: life of the row, and `content_key` of its grammar; 0 for none. First the row
      whose token it follows, then the one whose grammar it compiles.
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
