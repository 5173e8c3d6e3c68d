"""Which outputs of a model's matrices a rank has. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

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
    """Return which outputs of each of several matrices are among `outputs` of all, one behind the other.

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
