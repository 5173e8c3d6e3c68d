"""TorchCollectives: combine the results of the ranks of a torch program."""

from __future__ import annotations

import logging
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pypto_serving.kernels import RanksGone
from pypto_serving.kernels.constants import PANEL
from pypto_serving.parallel.topology import Rank
from pypto_serving.types.arrays import Array

logger = logging.getLogger(__name__)

COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""The backend of torch.distributed for tensors of each type of device."""


def _zeros(dtype: Any, *shape: int) -> Array:
    """Map zeros. Memory is committed when first written."""
    return np.frombuffer(mmap.mmap(-1, int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)


class TorchCollectives:
    """Shared memory for KV pages, and a torch.distributed group, of `rank` and the others of its tensor group.

    `connect` joins the group, at the first collective. A single rank needs neither: its results are complete, and every
    method returns at once.

    Ranks split outputs. So most parts are columns, which lie beside each other in the order of ranks. Others do not
    overlap, so that their sum is exact: each rank adds zeros to the parts of others. Columns are gathered, since gloo
    takes three times as long for a sum.

    Methods raise RanksGone where another rank has ended.
    """

    def __init__(
        self,
        rank: Rank | None = None,
        connect: Callable[[], dist.ProcessGroup] | None = None,
        zeros: Callable[..., Array] = _zeros,
    ) -> None:
        self.rank = rank or Rank()
        self._connect, self._zeros = connect, zeros
        self._joined: dist.ProcessGroup | None = None
        if (connect is None) != self.alone:
            raise ValueError("ranks connect if there are several")

    @property
    def alone(self) -> bool:
        """Return whether there is only one rank."""
        return self.rank.topology.tensor == 1

    @property
    def _group(self) -> dist.ProcessGroup:
        if self._joined is None:
            assert self._connect is not None
            self._joined = self._connect()
        return self._joined

    def pages(self, num_bytes: int) -> Tensor:
        """Allocate zeros that all ranks read and write, uint8 [num_bytes], on torch's default device."""
        memory = torch.from_numpy(self._zeros(np.uint8, num_bytes))
        return memory.to(torch.get_default_device())

    def parts(self, of: Callable[[Rank], range]) -> list[range]:
        """Return `of(rank)` for each rank."""
        return [of(rank) for rank in self.rank.topology.ranks]

    def columns(self, part: Tensor, width: int, unit: int = PANEL) -> Tensor:
        """Join the columns that each rank has of a matrix of `width`, whole units each: [n, own] to [n, width]."""
        return self.join(part, self.split(width, unit))

    def split(self, width: int, unit: int = PANEL) -> list[range]:
        """Return the columns of each rank in a matrix of `width`."""
        return self.parts(lambda rank: rank.columns(width, unit))

    def join(self, part: Tensor, columns: Sequence[range]) -> Tensor:
        """Join parts that are these columns, by rank: [n, own] to [n, all]."""
        return self.join_several([part], [columns])[0]

    def join_several(self, parts: Sequence[Tensor], columns: Sequence[Sequence[range]]) -> list[Tensor]:
        """Join parts of several matrices in one all-gather; `columns` are by matrix, then by rank. See `join`."""
        if self.alone:
            return list(parts)
        sizes = [[len(own) for own in of_rank] for of_rank in zip(*columns, strict=True)]
        own = torch.cat(list(parts), 1)
        own = F.pad(own, (0, max(map(sum, sizes)) - own.shape[1]))
        every = own.new_empty(len(sizes), *own.shape)
        self._wait(self._group.allgather, [list(every.unbind(0))], [own])
        by_rank = [each[:, : sum(size)].split(size, 1) for each, size in zip(every, sizes, strict=True)]
        return [torch.cat(matrix, 1) for matrix in zip(*by_rank, strict=True)]

    def sum(self, parts: Tensor) -> Tensor:
        """Add up the `parts` of all ranks in place, an all-reduce. Each part is zero where others have computed."""
        if not self.alone:
            self._wait(self._group.allreduce, [parts])
        return parts

    def largest(self, value: int) -> int:
        """Return the largest `value` of all ranks."""
        if self.alone:
            return value
        tensor = torch.tensor([value])
        self._wait(self._group.allreduce, [tensor], dist.ReduceOp.MAX)
        return int(tensor)

    def barrier(self) -> None:
        """Wait for the other ranks; then their writes to shared memory can be read."""
        if not self.alone:
            self._wait(self._group.barrier)

    def _wait(self, collective: Callable[..., dist.Work], *arguments: Any) -> None:
        try:
            collective(*arguments).wait()
        except RuntimeError as error:  # all that torch says of a connection that was closed
            logger.warning("a collective failed: %s", str(error).partition("\n")[0])
            raise RanksGone from None


def join_group(rank: Rank, store: int, patience_s: float) -> dist.ProcessGroup:
    """Join the group of all ranks, who find each other in `store`, the descriptor of an empty file that all have.

    torch's default device decides between COLLECTIVES. These have no authentication, so they listen only on the
    loopback interface. A collective fails if a rank makes the others wait for `patience_s`.
    """
    backend = COLLECTIVES[torch.get_default_device().type]
    os.environ[f"{backend.upper()}_SOCKET_IFNAME"] = _loopback()
    size = rank.topology.num_ranks
    file = dist.FileStore(f"/proc/self/fd/{store}", size)  # type: ignore[attr-defined]
    try:
        dist.init_process_group(
            backend, store=file, rank=rank.index, world_size=size, timeout=timedelta(seconds=patience_s)
        )
    except RuntimeError:
        raise RanksGone from None
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _loopback() -> str:
    """Return the name of the loopback interface."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
