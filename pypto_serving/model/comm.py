"""Comm: how the ranks of a torch program put together what each of them has computed."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pypto_serving.kernels import RanksGone
from pypto_serving.kernels.constants import PANEL
from pypto_serving.parallel.topology import Rank
from pypto_serving.types.arrays import Array

CPU_COLLECTIVES = "gloo"
"""The backend of torch.distributed for tensors of the CPU."""


def _zeros(dtype: Any, *shape: int) -> Array:
    """Map zeros. Memory is committed when first written."""
    return np.frombuffer(mmap.mmap(-1, int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)


class Comm:
    """What `rank` shares with the others of its tensor group: memory for KV pages, and a group of torch.distributed.

    `connect` joins the group, at the first collective. A sole rank needs neither: what it has computed is whole, and
    every method returns at once.

    Ranks split outputs. So parts do not overlap, and their sum is exact: each rank adds zeros to the parts of others.
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
        """Return True for a sole rank."""
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

    def sum(self, parts: Tensor) -> Tensor:
        """Add up `parts` of all ranks, in place, of which each is zero where others have computed."""
        if not self.alone:
            self._wait(self._group.allreduce, [parts])
        return parts

    def columns(self, part: Tensor, width: int, unit: int = PANEL) -> Tensor:
        """Join the columns that each rank has of a matrix of `width`, whole units each: [n, own] to [n, width]."""
        return self.join(part, self.rank.columns(width, unit), width)

    def columns_of(self, parts: Sequence[Tensor], widths: Sequence[int]) -> list[Tensor]:
        """Join the columns of several matrices of these widths at once; see `columns`."""
        if self.alone:
            return list(parts)
        whole = parts[0].new_zeros(len(parts[0]), sum(widths))
        for part, room in zip(parts, whole.split(widths, 1), strict=True):
            own = self.rank.columns(room.shape[1])
            room[:, own.start : own.stop] = part
        return [joined.contiguous() for joined in self.sum(whole).split(widths, 1)]

    def join(self, part: Tensor, columns: range, width: int) -> Tensor:
        """Join parts that are these `columns` of `width`: [n, own] to [n, width]."""
        if self.alone:
            return part
        whole = part.new_zeros(len(part), width)
        whole[:, columns.start : columns.stop] = part
        return self.sum(whole)

    def largest(self, value: int) -> int:
        """Return the largest `value` of all ranks."""
        if self.alone:
            return value
        tensor = torch.tensor([value])
        self._wait(self._group.allreduce, [tensor], dist.ReduceOp.MAX)
        return int(tensor)

    def meet(self) -> None:
        """Wait for the other ranks; what they wrote to shared memory can be read then."""
        if not self.alone:
            self._wait(self._group.barrier)

    def _wait(self, collective: Callable[..., dist.Work], *arguments: Any) -> None:
        try:
            collective(*arguments).wait()
        except RuntimeError:  # all that torch says of a connection that was closed
            raise RanksGone from None


def join_group(rank: Rank, store: int, patience_s: float, backend: str = CPU_COLLECTIVES) -> dist.ProcessGroup:
    """Join the group of all ranks, who find each other in `store`, the descriptor of an empty file that all have.

    gloo asks for no password, so it listens on the loopback interface only. A collective fails where a rank keeps the
    others waiting for `patience_s`.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
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
    """Name the loopback interface."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
