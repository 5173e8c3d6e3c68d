"""The sizes that graphs are captured for, and how a dispatch is packed for one of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from torch import Tensor

from pypto_serving.backend.base import StepInputs
from pypto_serving.kernels.cuda import attention
from pypto_serving.kernels.cuda.step import DispatchTensors, max_tiles, tiles_of_chunks
from pypto_serving.types.arrays import Int32Array
from pypto_serving.types.step import BackendLimits
from pypto_serving.util import ceil_div

Packed = TypeVar("Packed", Int32Array, Tensor)

CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens of prompt dispatches that have a graph."""
ROWS_OF_CHUNKS = 16
"""Rows of prompts that a graph has tiles for; dispatches with more take a larger graph, or none."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The padded sizes of a dispatch: tokens, rows, block ids a row, splits of decodes, and tiles of chunks.

    Decodes have one token a row and no tiles, chunks no splits.
    """

    tokens: int
    rows: int
    width: int
    splits: int = 0
    tiles: int = 0

    @property
    def num_ints(self) -> int:
        """Return how many int32 a packed dispatch takes at most."""
        return self._starts[-1]

    @property
    def _counts(self) -> tuple[int, ...]:
        tokens, rows = self.tokens, self.rows
        return tokens, tokens, tokens, rows, rows + 1, 2 * self.tiles, rows * self.width

    @property
    def _starts(self) -> list[int]:
        """Return where parts begin, and the end. Kernels read those that are aligned in words of 16 bytes."""
        return [0, *np.cumsum([ceil_div(count, 4) * 4 for count in self._counts]).tolist()]

    def _parts(self, data: Packed) -> list[Packed]:
        return [data[start : start + count] for start, count in zip(self._starts, self._counts, strict=False)]

    def tensors(self, data: Tensor) -> DispatchTensors:
        """View a packed dispatch, int32 on the device."""
        token_ids, positions, slots, context_lens, query_start, tiles, tables = self._parts(data)
        return DispatchTensors(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_start=query_start,
            context_lens=context_lens,
            block_tables=tables.view(self.rows, self.width),
            tiles=tiles.view(-1, 2),
            num_splits=self.splits,
        )

    def pack(self, inputs: StepInputs, queries: int, out: Int32Array) -> int:
        """Write a dispatch, in tiles of `queries` queries, to `out`. Return how many int32 of it the device needs.

        A pending row's first token is -1 - row: the device has the token itself.
        """
        rows, num_tokens = len(inputs.context_lens), len(inputs.token_ids)
        token_ids, positions, slots, context_lens, query_start, tiles, tables = self._parts(out)
        for part, values in (
            (token_ids, inputs.token_ids),
            (positions, inputs.positions),
            (slots, inputs.slot_mapping[0]),
            (context_lens, inputs.context_lens),
            (query_start, inputs.query_start),
        ):
            part[: len(values)] = values
        for part in (token_ids, positions, slots):
            part[num_tokens:] = 0
        if self.tiles:
            tiles[:] = tiles_of_chunks(inputs.query_start, inputs.context_lens, queries, self.tiles).reshape(-1)
        if len(pending := inputs.pending):
            token_ids[inputs.query_start[pending]] = -1 - inputs.rows[pending]
        table = inputs.block_tables[0]
        tables[: rows * self.width].reshape(rows, self.width)[:, : table.shape[1]] = table[:, : self.width]
        return self._starts[-2] + rows * self.width


class StepSizing:
    """Chooses the sizes of dispatches. A tile of a chunk has `queries` queries."""

    def __init__(self, limits: BackendLimits, block_size: int, queries: int) -> None:
        self._limits, self._block_size, self._queries = limits, block_size, queries
        self._longest = ceil_div(limits.max_model_len, block_size)
        most = ceil_div(limits.max_model_len, attention.SPLIT)
        self._splits = (*(4**i for i in range(16) if 4**i < most), most)

    @cached_property
    def decodes(self) -> tuple[StepSizes, ...]:
        """Return the sizes of decodes that have graphs."""
        rows = [count for count in self._limits.traits.padded_rows if count <= self._limits.max_rows]
        return tuple(self._decode(count, splits) for count in rows for splits in self._splits)

    @cached_property
    def chunks(self) -> tuple[StepSizes, ...]:
        """Return the sizes of prompt dispatches that have graphs, ascending."""
        budget = self._limits.max_num_batched_tokens
        return tuple(self._chunk(tokens, ROWS_OF_CHUNKS) for tokens in (*(c for c in CHUNKS if c < budget), budget))

    @property
    def largest(self) -> Iterator[StepSizes]:
        """List sizes that any dispatch fits into."""
        yield self.decodes[-1]
        yield self._chunk(self._limits.max_num_batched_tokens, self._limits.max_num_seqs)

    def of(self, inputs: StepInputs) -> StepSizes:
        """Return the sizes for a dispatch: the smallest that have a graph, if any have."""
        if inputs.kind == "decode":
            needed = ceil_div(int(inputs.context_lens.max()), attention.SPLIT)
            splits = next(count for count in self._splits if count >= needed)
            return self._decode(len(inputs.context_lens), splits)
        tokens, tiles = len(inputs.token_ids), int((-(-np.diff(inputs.query_start) // self._queries)).sum())
        fitting = (sizes for sizes in self.chunks if sizes.tokens >= tokens and sizes.tiles >= tiles)
        return next(fitting, self._chunk(self._limits.max_num_batched_tokens, len(inputs.context_lens)))

    def _decode(self, rows: int, splits: int) -> StepSizes:
        width = min(self._longest, ceil_div(splits * attention.SPLIT, self._block_size))
        return StepSizes(tokens=rows, rows=rows, width=width, splits=splits)

    def _chunk(self, tokens: int, rows: int) -> StepSizes:
        return StepSizes(
            tokens=tokens,
            rows=self._limits.max_num_seqs,
            width=self._longest,
            tiles=max_tiles(tokens, min(rows, self._limits.max_num_seqs), self._queries),
        )
