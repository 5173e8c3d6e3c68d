"""Which part of attention a rank computes, and on which activations. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from pypto_serving.kernels import NativeCollectives, Recording, zeros
from pypto_serving.parallel.topology import Rank
from pypto_serving.types.arrays import Float32Array


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
