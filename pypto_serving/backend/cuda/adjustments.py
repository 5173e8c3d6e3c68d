"""DeviceAdjustments: bring what changes logits to the device, and keep there the tokens that changes depend on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pypto_serving.backend.cuda.device import Card
from pypto_serving.kernels.cuda.adjusting import AdjustMemory, adjust
from pypto_serving.kernels.cuda.sampling import RowParameters
from pypto_serving.types.arrays import Int32Array
from pypto_serving.types.sampler import CHANGE, ChangeTable, LogitAdjustments
from pypto_serving.types.sampling import MAX_BAD_WORD_TOKENS, MAX_BIASES, MAX_STOP_IDS
from pypto_serving.types.step import BackendLimits
from pypto_serving.util import ceil_div

MAX_EOS_IDS = 1024
"""End tokens of a model, beside the stop ids of a request."""
NUM_PARTS = 6
ROW_INTS = CHANGE.itemsize // 4 + 2 * MAX_BIASES + MAX_STOP_IDS + MAX_EOS_IDS + 2 * MAX_BAD_WORD_TOKENS
"""The most that a row takes in a table: each bad word has a token at least."""


class TokenHistory:
    """Owns the tokens of all rows on the device: what it sampled itself, corrected by what the host collected.

    Rows are compared with a pinned copy, and what differs is copied: the tokens of a new request, or those that a
    grammar forced. A dispatch in flight of a row's former request may see tokens of the new one; its result is dropped.
    """

    def __init__(self, rows: int, max_len: int, device: Card) -> None:
        self.tokens = torch.full((rows, max_len), -1, dtype=torch.int32, device=device.torch_device)
        self._device = device
        self._pinned = device.pinned(4 * rows * max_len).view(torch.int32).view(rows, max_len)
        self._pinned.fill_(-1)
        self._right: Int32Array = np.zeros(rows, np.int32)
        self._copied_to: Int32Array = np.zeros(rows, np.int32)
        self.num_copies: Int32Array = np.zeros(rows, np.int32)

    def forget_rows(self) -> None:
        """Compare all tokens of all rows again, since some may have another request."""
        self._right[:] = 0

    def bring(self, rows: Int32Array, known: Int32Array, tokens: Int32Array) -> None:
        """Correct the first `known` [n] tokens of `rows` [n], which are in `tokens` [R, max_len]."""
        pinned, ahead, last = self._pinned.numpy(), known - self._right[rows], np.maximum(known - 1, 0)
        right = (ahead == 0) | ((ahead == 1) & (pinned[rows, last] == tokens[rows, last]))
        for row, end in zip(rows[~right].tolist(), known[~right].tolist(), strict=True):
            start = int(self._right[row]) if self._right[row] < end else 0
            differ = np.flatnonzero(pinned[row, start:end] != tokens[row, start:end])
            if len(differ):
                start += int(differ[0])
                pinned[row, start:end] = tokens[row, start:end]
                self._copied_to[row] = end
                self.num_copies[row] += 1
                self._device.copy(self.tokens[row, start:end], self._pinned[row, start:end])
        self._right[rows] = known

    def append(self, rows: Int32Array, positions: Int32Array, tokens: Int32Array, num_copies: Int32Array) -> None:
        """Take note of tokens that the device sampled, unless a copy came after the dispatch, which began with
        `num_copies` [n] of its rows, and covered them."""
        later = self.num_copies[rows] - num_copies
        kept = (later == 0) | ((later == 1) & (positions >= self._copied_to[rows]))
        kept &= positions < self._pinned.shape[1]
        self._pinned.numpy()[rows[kept], positions[kept]] = tokens[kept]


class _Staging(NamedTuple):
    """The pinned memory of one dispatch in flight, int32."""

    table: Tensor
    masks: Tensor


class DeviceAdjustments:
    """Owns the memory with which a device changes logits."""

    def __init__(self, limits: BackendLimits, vocab_size: int, device: Card, num_slots: int) -> None:
        rows, words = limits.max_num_seqs, ceil_div(vocab_size, 32)
        table_ints = NUM_PARTS + 1 + rows * ROW_INTS
        self.history = TokenHistory(rows, limits.max_model_len, device)
        self._device = device
        self._memory = AdjustMemory.empty(rows, vocab_size, table_ints, device.torch_device)
        self._staging = [
            _Staging(
                device.pinned(4 * table_ints).view(torch.int32),
                device.pinned(4 * rows * words).view(torch.int32).view(rows, words),
            )
            for _ in range(num_slots)
        ]
        self._table: ChangeTable | None = None

    def pack(self, slot: int, given: LogitAdjustments, changed: Int32Array, masks: Int32Array) -> int:
        """Bring tables, masks and tokens to the device. Write the rows and masks of RowParameters, int32 [n].

        Return the length of the longest history that penalties need.
        """
        staging, masked = self._staging[slot], np.flatnonzero(given.mask_rows >= 0)
        changed[:], masks[:] = given.rows, -1
        masks[masked] = np.arange(len(masked))
        if len(masked):
            staging.masks.numpy()[: len(masked)] = given.masks[given.mask_rows[masked]].view(np.int32)
            self._device.copy(self._memory.masks[: len(masked)], staging.masks[: len(masked)])
        if given.table is not self._table:
            self._table = given.table
            self.history.forget_rows()
            used = _pack_table(given.table, staging.table.numpy())
            self._device.copy(self._memory.table[:used], staging.table[:used])
        changes = given.table.changes[given.rows]
        penalized = (changes["repetition"] != 1) | (changes["frequency"] != 0) | (changes["presence"] != 0)
        penalized &= given.rows >= 0
        read = penalized | ((given.rows >= 0) & (changes["word_from"] < changes["word_to"]))
        if read.any():
            self.history.bring(given.rows[read], given.known[read], given.tokens)
        return int(given.positions[penalized].max(initial=0))

    def adjust(self, logits: Tensor, count: int, longest: int, given: RowParameters) -> Tensor:
        """Return changed logits of the first `count` rows."""
        return adjust(logits, count, longest, given, self.history.tokens, self._memory)


def _pack_table(table: ChangeTable, memory: Int32Array) -> int:
    """Write the places of the parts, and the parts. Return how many numbers that are."""
    changes = table.changes.view(np.int32)
    biases, bans = (table.bias_ids, table.bias_values.view(np.int32)), table.banned_ids
    parts = *biases, bans, table.word_starts, table.words, changes
    ends = NUM_PARTS + np.cumsum([len(part) for part in parts])
    if ends[-1] > len(memory):
        raise ValueError(f"changes of logits have {ends[-1]} numbers, but there is room for {len(memory)}")
    memory[:NUM_PARTS] = [NUM_PARTS, *ends[:-1]]
    np.concatenate(parts, out=memory[NUM_PARTS : ends[-1]])
    return int(ends[-1])
