"""Steps of all partitions as inputs of pypto-lib's DeepSeek V4 Flash programs, and their outputs. Torch-free.

A partition's step has its own rows, blocks and tables; None is a step without tokens. Programs recognize padding by
position 0 in block 0, the null block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pypto_serving.model.contract import StepArrays
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.pypto.arguments import (
    DECODE_TOKENS,
    LOGIT_ROWS,
    PREFILL_TILE,
    REQUESTS,
    STEP_TOKENS,
)
from pypto_serving.model.deepseek_v4.pypto.pools import MAX_TOKENS, POOLS, TABLE_WIDTHS, CachePool
from pypto_serving.types.arrays import Array, BFloat16Array, Float32Array, Int32Array
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.util import ceil_div

NO_SLOT = NO_ROW = -1
LONGEST = MAX_TOKENS - (STEP_TOKENS - 1)
"""Longest served sequence: after its last token there is room for the padding token of a decode."""


class FlashStep(StepArrays, Protocol):
    """A partition's dispatch; StepInputs of the backends has it."""

    @property
    def logits_rows(self) -> Int32Array: ...


Partitions = Sequence[FlashStep | None]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a dispatch. Implements FlashStep."""

    token_ids: Int32Array
    positions: Int32Array
    query_start: Int32Array
    context_lens: Int32Array
    logits_rows: Int32Array
    slot_mapping: tuple[Int32Array, ...]
    block_tables: tuple[Int32Array, ...]

    @classmethod
    def of(cls, step: FlashStep, row: int) -> Row:
        """View the row of this index."""
        begin, end = step.query_start[row : row + 2].tolist()
        wanted = step.logits_rows[(begin <= step.logits_rows) & (step.logits_rows < end)]
        return cls(
            token_ids=step.token_ids[begin:end],
            positions=step.positions[begin:end],
            query_start=np.array([0, end - begin], np.int32),
            context_lens=step.context_lens[row : row + 1],
            logits_rows=wanted - begin,
            slot_mapping=tuple(slots[begin:end] for slots in step.slot_mapping),
            block_tables=tuple(table[row : row + 1] for table in step.block_tables),
        )


class FlashSteps:
    """Lays out the steps of `ranks` partitions, whose KV groups are `npu_groups`."""

    def __init__(self, model: DeepseekV4Config, groups: Sequence[KVCacheGroupSpec], ranks: int) -> None:
        self._model, self._ranks = model, ranks
        self._places = {group.name: place for place, group in enumerate(groups)}

    def decode(self, steps: Partitions) -> dict[str, Array]:
        """Return the inputs of a decode. Raises ValueError for rows of more than a token and a draft.

        Row i of a partition has tokens 2 i and 2 i + 1. A row of one token is padded with the same token; its writes
        are overwritten before they are read, or go to the null block.
        """
        ranks = self._require_ranks(steps)
        values: dict[str, Array] = {
            "position_ids": np.zeros((ranks, DECODE_TOKENS), np.int32),
            "kv_seq_lens": np.zeros((ranks, REQUESTS), np.int32),
            "input_ids": np.zeros((ranks, DECODE_TOKENS), np.int64),
            "num_tokens_per_owner": np.zeros(ranks, np.int32),
            "logit_row_indices": np.full((ranks, LOGIT_ROWS), NO_ROW, np.int32),
            "block_counts": np.empty((ranks, REQUESTS, len(POOLS)), np.int32),
        }
        values["block_counts"][...] = list(TABLE_WIDTHS.values())
        for name, pool in POOLS.items():
            values[pool.decode_table] = np.zeros((ranks, REQUESTS, TABLE_WIDTHS[name]), np.int32)
        for rank, step in enumerate(steps):
            if step is not None:
                self._fill_decode(step, {name: value[rank] for name, value in values.items() if value.ndim > 1})
                values["num_tokens_per_owner"][rank] = STEP_TOKENS * len(step.context_lens)
        return values

    def _fill_decode(self, step: FlashStep, values: Mapping[str, Array]) -> None:
        rows, counts = len(step.context_lens), np.diff(step.query_start)
        if rows > REQUESTS or (counts > STEP_TOKENS).any():
            raise ValueError(f"a partition decodes {REQUESTS} rows of {STEP_TOKENS} tokens at most")
        places = np.arange(STEP_TOKENS)
        tokens = step.query_start[:-1, None] + np.minimum(places, counts[:, None] - 1)
        used = STEP_TOKENS * rows
        values["input_ids"][:used] = step.token_ids[tokens].reshape(-1)
        values["position_ids"][:used] = (step.positions[step.query_start[:-1], None] + places).reshape(-1)
        values["kv_seq_lens"][:rows] = step.context_lens
        wanted = _decode_places(step)
        values["logit_row_indices"][wanted] = wanted
        for pool in POOLS.values():
            self._fill_table(values[pool.decode_table], step, pool)

    def decode_mtp(self, steps: Partitions, slots: Int32Array, generations: Int32Array) -> dict[str, Array]:
        """Return the inputs of a decode with MTP, whose rows all have a draft.

        slots, generations [ranks, 4]: slot of each row's state, -1 for padding, and number of the slot's life.
        Once a slot has a state, the device replaces tokens, positions and lengths according to it.
        """
        return {
            **self.decode(steps),
            "mtp_tail_slot_ids": slots,
            "mtp_state_generations": generations,
            "mtp_logit_row_indices": np.repeat(_last_places()[None], self._ranks, axis=0),
            "mtp_num_tokens": np.array(DECODE_TOKENS, np.int32),
        }

    def prefill(self, steps: Partitions, embedding: BFloat16Array) -> dict[str, Array]:
        """Return the inputs of a prefill, at most one row of each partition; `embedding` [vocab, hidden].

        Tokens are padded to whole tiles of the longest row; padding has no slots. Raises ValueError.
        """
        ranks = self._require_ranks(steps)
        longest = max((len(step.token_ids) for step in steps if step is not None), default=0)
        tokens = max(1, ceil_div(longest, PREFILL_TILE)) * PREFILL_TILE
        values: dict[str, Array] = {
            "x_hc": np.zeros((ranks, tokens, self._model.hyper.streams, self._model.hidden_size), np.float32),
            "position_ids": np.zeros((ranks, tokens), np.int32),
            "input_ids": np.zeros((ranks, tokens), np.int64),
            "num_tokens_per_owner": np.zeros(ranks, np.int32),
            "logit_row_indices": np.full((ranks, LOGIT_ROWS), NO_ROW, np.int32),
        }
        for name, pool in POOLS.items():
            values[pool.prefill_table] = np.zeros((ranks, TABLE_WIDTHS[name]), np.int32)
            values[pool.slot_mapping] = np.full((ranks, tokens), NO_SLOT, np.int64)
        for rank, step in enumerate(steps):
            if step is not None:
                self._fill_prefill(step, {name: value[rank] for name, value in values.items() if value.ndim > 1})
                values["num_tokens_per_owner"][rank] = len(step.token_ids)
                values["x_hc"][rank, : len(step.token_ids)] = _embedded(embedding, step.token_ids)[:, None]
        return values

    def _fill_prefill(self, step: FlashStep, values: Mapping[str, Array]) -> None:
        if len(step.context_lens) != 1:
            raise ValueError(f"a partition prefills one row at a time, not {len(step.context_lens)}")
        count = len(step.token_ids)
        values["position_ids"][:count] = step.positions
        values["input_ids"][:count] = step.token_ids
        values["logit_row_indices"][: len(step.logits_rows)] = step.logits_rows
        for pool in POOLS.values():
            self._fill_table(values[pool.prefill_table][None], step, pool)
            values[pool.slot_mapping][:count] = self._slots(step, pool)

    def _slots(self, step: FlashStep, pool: CachePool) -> Array:
        """Return the row of a pool that each token writes, NO_SLOT where it completes no entry."""
        ratio, slots = pool.ratio(self._model), step.slot_mapping[self._places[pool.group]]
        return np.where((step.positions + 1) % ratio == 0, slots // ratio, NO_SLOT)

    def _fill_table(self, target: Int32Array, step: FlashStep, pool: CachePool) -> None:
        """Copy the blocks that contain tokens of each row; later entries of a step's tables are undefined."""
        table = step.block_tables[self._places[pool.group]]
        for row, length in enumerate(step.context_lens.tolist()):
            blocks = ceil_div(length, pool.tokens)
            target[row, :blocks] = table[row, :blocks]

    def _require_ranks(self, steps: Partitions) -> int:
        if len(steps) != self._ranks:
            raise ValueError(f"a dispatch has {self._ranks} partitions, not {len(steps)}")
        return self._ranks


def rounds(steps: Partitions) -> Iterator[list[Row | None]]:
    """Yield the prefills for these steps: the first row of each partition, then the second, and so on."""
    counts = [0 if step is None else len(step.context_lens) for step in steps]
    for row in range(max(counts, default=0)):
        pairs = zip(steps, counts, strict=True)
        yield [Row.of(step, row) if step is not None and row < count else None for step, count in pairs]


def decode_logits(step: FlashStep, logits: Float32Array) -> Float32Array:
    """Return the logits [s, vocab] that a partition's decode asked for, from its output [8, vocab]."""
    return logits[_decode_places(step)]


def prefill_logits(row: Row, logits: Float32Array) -> Float32Array:
    """Return the logits [s, vocab] that a partition's row asked for, from its output [8, vocab]."""
    return logits[: len(row.logits_rows)]


def accepted(rows: int, sampled_ids: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Return how many tokens each of a partition's rows keeps, and these, row after row.

    sampled_ids [8, 8]: the main model's choices in column 0, by token. counts [4]: 1, or 2 for a row whose draft was
    right.
    """
    chosen = sampled_ids[: STEP_TOKENS * rows, 0].reshape(rows, STEP_TOKENS)
    kept = np.arange(STEP_TOKENS) < counts[:rows, None]
    return counts[:rows], chosen[kept]


def state_of(num_tokens: int, last: int, draft: int, generation: int) -> tuple[Array, Array]:
    """Return the MTP state of a slot for a sequence of `num_tokens` with this last token: tokens [2] and meta [4].

    Its position is that of the second-last token, from whose logits the last one was sampled.
    """
    return np.array([last, draft], np.int64), np.array([1, generation, num_tokens - 2, 0], np.int32)


def _decode_places(step: FlashStep) -> Int32Array:
    """Return the indices in a decode of tokens that need logits: token j of row i is at 2 i + j."""
    owners = np.searchsorted(step.query_start[1:], step.logits_rows, side="right")
    places: Int32Array = (STEP_TOKENS * owners + step.logits_rows - step.query_start[owners]).astype(np.int32)
    return places


def _last_places() -> Int32Array:
    """Return the last token of each request, int32 [8]: entry i gives the next draft of row i."""
    found = np.full(LOGIT_ROWS, NO_ROW, np.int32)
    found[:REQUESTS] = np.arange(REQUESTS) * STEP_TOKENS + STEP_TOKENS - 1
    return found


def _embedded(embedding: BFloat16Array, token_ids: Int32Array) -> Float32Array:
    found: Float32Array = (embedding[token_ids].astype("<u4") << 16).view("<f4")
    return found
