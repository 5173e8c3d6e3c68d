"""The card as a program sees it: memory, copies, graphs and events, all in the order of one stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pypto_serving.errors import ConfigError
from pypto_serving.kernels.cuda.launch import Call, run
from pypto_serving.types.arrays import BlockBytes

MAX_PINNED_BYTES = 256 << 20
"""Pinned memory of a thread and group. More blocks at once go through other memory, which is slower."""


class CardEvent(Protocol):
    """A point in the order of a device's work."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""


class Card(Protocol):
    """What a program needs of a device besides launches, which go through `kernels.cuda.launch`."""

    torch_device: torch.device
    name: str
    """Of the kind of device, for fingerprints."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate host memory that the device copies from and to by itself, uint8 [num_bytes]."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between the device and pinned memory, after all work before it. Returns at once."""

    def capture(self, work: Callable[[], None]) -> Call:
        """Make launches into a graph, after they ran once. Return what runs the graph."""

    def record(self) -> CardEvent:
        """Return an event after all work before it."""

    def exchange(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy each second tensor to the first, beside the device's other work, and wait. Any thread may call it."""


class CudaCard:
    """A card. All work of its program is in one stream of the thread that made it. Implements Card."""

    def __init__(self, index: int) -> None:
        """Open the card. Raises ConfigError where torch has none of this index."""
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            raise ConfigError(
                f"torch {torch.__version__} sees {count} CUDA cards, and this replica needs number {index}"
            )
        self.torch_device = torch.device("cuda", index)
        capability = torch.cuda.get_device_capability(index)
        self.name = "sm_{}{}".format(*capability)
        torch.cuda.set_device(index)
        self._stream = torch.cuda.Stream()
        torch.cuda.set_stream(self._stream)
        self._copies = torch.cuda.Stream()
        self._graphs = torch.cuda.graph_pool_handle()

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        run(lambda: target.copy_(source, non_blocking=True))

    def capture(self, work: Callable[[], None]) -> Call:
        work()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graphs, stream=self._stream):
            work()
        return graph.replay

    def record(self) -> CardEvent:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def exchange(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        with torch.cuda.stream(self._copies):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        event.synchronize()


class NoCard:
    """Stands for a card where launches are only listed: its tensors have no memory. Implements Card."""

    torch_device = torch.device("meta")
    name = "none"

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def copy(self, target: Tensor, source: Tensor) -> None:
        raise NotImplementedError

    def capture(self, work: Callable[[], None]) -> Call:
        raise NotImplementedError

    def record(self) -> CardEvent:
        raise NotImplementedError

    def exchange(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        raise NotImplementedError


class CardBlocks:
    """The KV blocks in a card's memory, copied beside its steps. Implements BlockMemory.

    Owns no memory of the card; each thread has pinned memory of its own.

    `arenas[g]` is uint8 [num_blocks, block_bytes] on the device. What `read_blocks` and `staging` return is valid until
    the same thread calls one of them again for the group.
    """

    def __init__(self, arenas: Sequence[Tensor], device: Card) -> None:
        self._arenas, self._device = arenas, device
        self.block_bytes = tuple(arena.shape[1] for arena in arenas)
        self._threads = threading.local()

    def read_blocks(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Copy blocks to this thread's pinned memory."""
        room, arena = self._room(group, len(blocks)), self._arenas[group]
        self._device.exchange([(place, arena[block]) for place, block in zip(room, blocks, strict=True)])
        return list(room.numpy())

    def staging(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Return this thread's pinned memory."""
        return list(self._room(group, len(blocks)).numpy())

    def write_blocks(self, group: int, blocks: Sequence[int], contents: Sequence[BlockBytes]) -> None:
        """Copy the filled memory to blocks."""
        arena, filled = self._arenas[group], map(torch.from_numpy, contents)
        self._device.exchange([(arena[block], content) for block, content in zip(blocks, filled, strict=True)])

    def _room(self, group: int, count: int) -> Tensor:
        """Return memory of this thread for `count` blocks, uint8 [count, block_bytes]; pinned unless they are many."""
        size = count * self.block_bytes[group]
        if size > MAX_PINNED_BYTES:
            return torch.empty(count, self.block_bytes[group], dtype=torch.uint8, device="cpu")
        rooms: dict[int, Tensor] = self._threads.__dict__.setdefault("rooms", {})
        if group not in rooms or len(rooms[group]) < size:
            rooms[group] = self._device.pinned(size)
        return rooms[group][:size].view(count, -1)
