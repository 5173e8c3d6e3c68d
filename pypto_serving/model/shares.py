"""Which outputs of a model's matrices, and which rows of attention, a rank computes. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from pypto_serving.kernels import NativeCollectives, Recording, zeros
from pypto_serving.parallel.topology import Rank
from pypto_serving.types.arrays import Float32Array


def rows_of(heads: range, dim: int) -> range:
    """Return the outputs of a projection that make these heads."""
    return range(heads.start * dim, heads.stop * dim)


def columns_of(x: Float32Array, outputs: range) -> Float32Array:
    """Return the columns of x [rows, width] that these outputs become."""
    return x[:, outputs.start : outputs.stop]


def expert_outputs(rank: Rank, count: int, outputs: range) -> list[range]:
    """Return `outputs` for each of the rank's experts, and none for the others of `count`."""
    mine = rank.experts(count)
    return [outputs if expert in mine else range(0) for expert in range(count)]


def cut(sizes: Sequence[int], outputs: range) -> list[range]:
    """Return which outputs of each of several matrices are among `outputs` of all, one after the other.

    sizes        64 ------------ 32 ---- 96 ----------------
    outputs               [40          100)
    result                [40, 64) [0, 32) [0, 4)
    """
    cuts, begin = [], 0
    for size in sizes:
        first, last = (min(max(edge - begin, 0), size) for edge in (outputs.start, outputs.stop))
        cuts.append(range(first, last))
        begin += size
    return cuts


class AttentionShare:
    """A rank's part of all attention layers: its heads of all rows, or all heads of its share of the rows.

    rank, peers: whose part of the weights it has, and who computes the same rows with it.
    """

    def __init__(self, rank: Rank, peers: NativeCollectives) -> None:
        self._whole, self._all = rank, peers
        self._splits_rows = rank.topology.data > 1
        self.rank, self.peers = rank.attention, NativeCollectives() if self._splits_rows else peers
        self._mine: Float32Array | None = None

    @contextmanager
    def of(self, step: Recording, x: Float32Array) -> Iterator[Float32Array]:
        """Record what is computed of x [tokens, ..., width] between its layers; yield it, or the share of it."""
        if not self._splits_rows:
            yield x
            return
        if self._mine is None:
            self._mine = zeros(np.float32, *x.shape)
        with step.share_of_rows(self._whole.tensor, self._whole.topology.data, x.shape[-1], x, self._mine):
            yield self._mine
        self._all.barrier(step, x)
