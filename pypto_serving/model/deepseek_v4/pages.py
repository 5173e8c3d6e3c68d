"""Paged rows of DeepSeek V4's cache families, and where the tokens of a step find theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pypto_serving.model.loader import torch_dtype
from pypto_serving.model.step import StepTensors
from pypto_serving.types.kv import KVCacheGroupSpec


class Pages:
    """Owns the blocks of one KV group, all of whose rows are equally wide: `rows` [blocks * rows per block, width].

    In a block lies tensor after tensor, in it layer after layer. One hidden block behind the others is always zero
    and stands for what does not exist. Memory is committed when first written.
    """

    def __init__(self, group: KVCacheGroupSpec, num_blocks: int, device: torch.device) -> None:
        tensors = group.tensors
        (width,) = {tensor.row_shape[0] for tensor in tensors}
        memory = np.zeros((num_blocks + 1, group.block_bytes), dtype=np.uint8)
        with torch.inference_mode(False):  # others may write pages too
            self.blocks = torch.from_numpy(memory).to(device).view(torch_dtype(tensors[0].dtype))
        self.rows = self.blocks.view(-1, width)
        self.block_size, self.zero_block = group.block_size, num_blocks
        self.rows_per_block = self.blocks.shape[1] // width
        self._starts: dict[tuple[str, int], tuple[int, int]] = {}
        start = 0
        for tensor in tensors:
            for layer in tensor.layers:
                self._starts[tensor.name, layer] = (start, tensor.ratio)
                start += group.block_size // tensor.ratio

    def layer(self, tensor: str, layer: int) -> LayerRows:
        """The rows of one tensor in one layer."""
        return LayerRows(self, *self._starts[tensor, layer])


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Rows of one tensor in one layer; slots count source tokens, of which `ratio` share a row."""

    pages: Pages
    start: int
    ratio: int

    def _index(self, slots: Tensor) -> Tensor:
        block, offset = slots // self.pages.block_size, slots % self.pages.block_size
        return block * self.pages.rows_per_block + self.start + offset // self.ratio

    def write(self, slots: Tensor, values: Tensor) -> None:
        """Store `values` [n, width] in `slots` [n]."""
        self.pages.rows.index_copy_(0, self._index(slots), values.to(self.pages.rows.dtype))

    def read(self, slots: Tensor) -> Tensor:
        """Rows of `slots` [n, k] in float32, [n, k, width]."""
        return self.pages.rows.index_select(0, self._index(slots).flatten()).float().view(*slots.shape, -1)


class StepRows:
    """Where the tokens of one step are read and written, in every group.

    `owners` [t] is the row of each token; padding belongs to a row behind the last one, which has null blocks.
    """

    def __init__(self, step: StepTensors, pages: Mapping[str, Pages]) -> None:
        self.token_ids, self.positions = step.token_ids, step.positions
        places = torch.arange(len(step.token_ids), device=step.positions.device)
        self.owners = torch.searchsorted(step.query_start[1:].contiguous(), places, right=True)
        self.slots = dict(zip(pages, step.slots, strict=True))
        self._pages = pages
        self._tables = {
            name: torch.nn.functional.pad(table, (0, 0, 0, 1))
            for name, table in zip(pages, step.block_tables, strict=True)
        }

    def find(self, group: str, tokens: Tensor, positions: Tensor, exists: Tensor) -> Tensor:
        """Slots of `positions` [n, k] of the sequences of `tokens` [n]; a zero row where nothing `exists`."""
        pages, table = self._pages[group], self._tables[group]
        index = (positions // pages.block_size).clamp(0, table.shape[1] - 1)
        blocks = table[self.owners[tokens][:, None], index].where(exists, pages.zero_block)
        return blocks * pages.block_size + positions % pages.block_size
