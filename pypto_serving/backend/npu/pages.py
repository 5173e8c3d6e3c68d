"""DevicePages: KV blocks of the pools on the device, copied for lower tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pypto_serving.backend.npu.device import Device
from pypto_serving.model.contract import Contract
from pypto_serving.types.arrays import BlockBytes
from pypto_serving.types.kv import Spans

_Copy = Callable[[str, Spans, BlockBytes], None]


class DevicePages:
    """One group of blocks, whose bytes lie in several places of several pools. Implements BlockMemory."""

    def __init__(self, device: Device, contract: Contract, num_blocks: int, block_bytes: int) -> None:
        self.block_bytes: tuple[int, ...] = (block_bytes,)
        self._device, self._contract, self._num_blocks = device, contract, num_blocks

    def read_blocks(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Return copies of the blocks."""
        found = self.staging(group, blocks)
        for block, content in zip(blocks, found, strict=True):
            self._each(block, content, self._device.read)
        return found

    def staging(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Return new memory."""
        return [np.empty(self.block_bytes[group], np.uint8) for _ in blocks]

    def write_blocks(self, group: int, blocks: Sequence[int], contents: Sequence[BlockBytes]) -> None:
        """Copy `contents` into the blocks."""
        for block, content in zip(blocks, contents, strict=True):
            self._each(block, content, self._device.write)

    def _each(self, block: int, content: BlockBytes, copy: _Copy) -> None:
        place = 0
        for name, spans in self._contract.pages(self._num_blocks, block).items():
            size = sum(end - begin for begin, end in spans)
            copy(name, spans, content[place : place + size])
            place += size
