"""Paged rows of DeepSeek V4's KV groups, and the slots of a step's tokens in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pypto_serving.model.collectives import TorchCollectives
from pypto_serving.model.loader import torch_dtype
from pypto_serving.model.step import StepTensors
from pypto_serving.types.kv import KVCacheGroupSpec


class TorchPages:
    """Owns the blocks of one KV group whose rows all have one width: `rows` [blocks * rows per block, width].

    A block holds tensor after tensor, and each tensor layer after layer. One hidden block after the others stays zero
    and serves positions that do not exist. Memory is committed when first written. All ranks have the same blocks.
    """

    def __init__(self, group: KVCacheGroupSpec, num_blocks: int, comm: TorchCollectives) -> None:
        tensors = group.tensors
        (width,) = {tensor.row_shape[0] for tensor in tensors}
        with torch.inference_mode(False):  # others may write pages too
            memory = comm.pages((num_blocks + 1) * group.block_bytes).view(num_blocks + 1, -1)
            self.blocks = memory.view(torch_dtype(tensors[0].dtype))
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
        """Return the rows of one tensor in one layer."""
        return LayerRows(self, *self._starts[tensor, layer])


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Rows of one tensor in one layer. Slots count source tokens; `ratio` of them share a row."""

    pages: TorchPages
    start: int
    ratio: int

    def _index(self, slots: Tensor) -> Tensor:
        block, offset = slots // self.pages.block_size, slots % self.pages.block_size
        return block * self.pages.rows_per_block + self.start + offset // self.ratio

    def write(self, slots: Tensor, values: Tensor) -> None:
        """Store `values` [n, width] in `slots` [n]."""
        self.pages.rows.index_copy_(0, self._index(slots), values.to(self.pages.rows.dtype))

    def read(self, slots: Tensor) -> Tensor:
        """Read the rows of `slots` [n, k] in float32, [n, k, width]."""
        return self.pages.rows.index_select(0, self._index(slots).flatten()).float().view(*slots.shape, -1)


class StepSlots:
    """Slots of one step's tokens in every KV group.

    `owners` [t] is the row of each token. Padding belongs to an extra row after the last one, with null blocks.
    """

    def __init__(self, step: StepTensors, pages: Mapping[str, TorchPages]) -> None:
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
        """Find the slots of `positions` [n, k] in the sequences of `tokens` [n]; a zero row where not `exists`."""
        pages, table = self._pages[group], self._tables[group]
        index = (positions // pages.block_size).clamp(0, table.shape[1] - 1)
        blocks = table[self.owners[tokens][:, None], index].where(exists, pages.zero_block)
        return blocks * pages.block_size + positions % pages.block_size
