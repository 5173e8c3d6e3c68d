"""Record products with packed weights, or a rank's share of them, for native programs of all families. Torch-free.

Weights that multiply the same activations are a list of matrices, one for each form in the checkpoint. Each is
multiplied with activations of the matching form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from pypto_serving.kernels import (
    GATE_HALF,
    Int8Strips,
    Matrix,
    NativeCollectives,
    Recording,
    Routing,
    StepRows,
    StripColumns,
    Strips,
    activations,
    most_int8_words,
    strips_for,
    zeros,
)
from pypto_serving.parallel.topology import Rank
from pypto_serving.types.arrays import Float32Array, PairArray

Gated = Sequence[Matrix]
"""Gate and up, interleaved in one matrix, or separate if their forms differ."""


class Int8Room:
    """Owns the memory of quantized inputs: `rows` of at most k. `holds`: its present content while recording."""

    def __init__(self, rows: int, k: int, exact: bool) -> None:
        self.strips = Int8Strips(zeros(np.uint32, rows * most_int8_words(k, exact)), zeros(np.float32, rows))
        self.holds: object = None


class Feed:
    """Activations in the form that a matrix multiplies: bfloat16 strips, or int8 ones in a room that feeds share.

    `write` records the operation that writes them for a matrix; it is called only by `record_for`.
    """

    def __init__(self, pairs: PairArray, room: Int8Room, exact: bool, write: Callable[[Matrix, Strips], None]) -> None:
        self._pairs, self._room, self._exact, self._write = pairs, room, exact, write
        self._has_pairs = False

    def record_for(self, matrix: Matrix) -> Strips:
        """Return the activations for `matrix`; record the operation that writes them, unless done already."""
        strips = strips_for(matrix.form, self._pairs, self._room.strips, self._exact)
        if isinstance(strips, np.ndarray):
            if not self._has_pairs:
                self._write(matrix, strips)
            self._has_pairs = True
        elif self._room.holds != (wanted := (self, tuple(activations(strips).values()))):
            self._write(matrix, strips)
            self._room.holds = wanted
        return strips


class ExpertBuffers:
    """Owns the activations of experts with `width` inner outputs, for the entries of the largest step."""

    def __init__(self, entries: int, hidden: int, width: int, peers: NativeCollectives) -> None:
        self.width = width
        self.rows = zeros(np.uint32, entries * hidden // 2)
        self.gated = peers.zeros(np.uint32, entries * width // 2)
        self.out = peers.zeros(np.float32, entries, hidden)


class Products:
    """Records products and the operations that write their inputs. Owns the memory of quantized inputs and gates.

    A step has `rows` rows of at most `widest` inputs, and with experts `entries` rows of at most `expert_widest`.
    With `exact`, codes multiply int16 activations, not int8 ones.
    """

    def __init__(
        self, step: Recording, exact: bool, rows: int, widest: int, entries: int = 0, expert_widest: int = 0
    ) -> None:
        self._step, self._exact = step, exact
        self._room, self._expert_room = Int8Room(rows, widest, exact), Int8Room(entries, expert_widest, exact)
        self._gates: dict[tuple[int, int], Float32Array] = {}

    def normed(
        self, x: Float32Array, weight: Float32Array, eps: float, out: PairArray, rows: StepRows = StepRows.TOKENS
    ) -> Feed:
        """Return a feed of RMSNorm of x [tokens, k] times `weight`; `out` is for bfloat16."""
        return Feed(out, self._room, self._exact, lambda _, strips: self._step.rms_norm(x, weight, eps, strips, rows))

    def strips(self, x: PairArray, routing: Routing | None = None) -> Feed:
        """Return a feed of strips x that an earlier operation wrote; with `routing`, of expert inputs."""

        def write(matrix: Matrix, strips: Strips) -> None:
            if not isinstance(strips, np.ndarray):
                self._step.quantize(x, matrix.k, strips, routing)

        return Feed(x, self._room if routing is None else self._expert_room, self._exact, write)

    def gathered(self, routing: Routing, x: Feed, out: PairArray) -> Feed:
        """Return a feed of each expert's rows of x; `out` is for bfloat16."""
        return Feed(out, self._expert_room, self._exact, partial(self._gather, routing, x))

    def _gather(self, routing: Routing, x: Feed, matrix: Matrix, strips: Strips) -> None:
        self._step.moe_gather(routing, x.record_for(matrix), matrix.k, strips)

    def linear(self, x: Feed, matrices: Sequence[Matrix], out: Float32Array, rows: StepRows = StepRows.TOKENS) -> None:
        """Record a GEMM: out [rows, all n] = x W^T + b."""
        for matrix, columns in _columns(matrices, out):
            self._step.linear(x.record_for(matrix), matrix, columns, rows)

    def linear_add(self, x: Feed, matrices: Sequence[Matrix], out: Float32Array) -> None:
        """Record a GEMM with residual: out [tokens, all n] += x W^T + b."""
        for matrix, columns in _columns(matrices, out):
            self._step.linear_add(x.record_for(matrix), matrix, columns)

    def swiglu(
        self,
        x: Feed,
        sets: Sequence[Gated],
        out: StripColumns,
        limit: float = math.inf,
        routing: Routing | None = None,
    ) -> None:
        """Record a GEMM with SwiGLU, into strips; see Recording.linear_swiglu. Each set may be of some experts."""
        for *apart, last in sets:
            gates = None
            for gate in apart:
                strips, gates = x.record_for(gate), self._gates_for(out.rows, gate.n)
                self._step.linear(strips, gate, gates, routing=routing)
            self._step.linear_swiglu(x.record_for(last), last, out, limit, gates, routing)

    def experts(
        self,
        routing: Routing,
        x: Feed,
        packed: tuple[Sequence[Gated], Sequence[Matrix]],
        buffers: ExpertBuffers,
        rank: Rank,
        peers: NativeCollectives,
        out: Float32Array,
        limit: float = math.inf,
    ) -> None:
        """Record out [tokens, own columns] += the weighted sum of the chosen experts' results for x.

        `packed`: gate and up, then down, of the rank's experts. An expert on a single rank needs no inner barrier.
        """
        (gate_up, down), b = packed, buffers
        inner, outer = rank.expert_columns(b.width, GATE_HALF), rank.expert_columns(b.out.shape[1])
        rows = self.gathered(routing, x, b.rows)
        self.swiglu(rows, gate_up, StripColumns(b.gated, b.width, inner.start), limit, routing)
        if rank.topology.tensor > rank.topology.expert:
            peers.barrier(self._step, b.gated)
        gated, part = self.strips(b.gated, routing), columns_of(b.out, outer)
        for matrix in down:
            self._step.linear(gated.record_for(matrix), matrix, part, routing=routing)
        if rank.topology.expert > 1:  # else the columns that a rank adds to `out` are its own
            peers.barrier(self._step, b.out)
        if mine := rank.columns(b.out.shape[1]):
            self._step.moe_combine(routing, columns_of(b.out, mine), out)

    def _gates_for(self, rows: int, n: int) -> Float32Array:
        if (rows, n) not in self._gates:
            self._gates[rows, n] = zeros(np.float32, rows, n)
        return self._gates[rows, n]


def _columns(matrices: Sequence[Matrix], out: Float32Array) -> list[tuple[Matrix, Float32Array]]:
    """Return each matrix with its columns of `out`."""
    ends = np.cumsum([matrix.n for matrix in matrices])
    return [(matrix, out[:, end - matrix.n : end]) for matrix, end in zip(matrices, ends, strict=True)]


def rows_of(heads: range, dim: int) -> range:
    """Return the outputs of a projection that form these heads."""
    return range(heads.start * dim, heads.stop * dim)


def columns_of(x: Float32Array, outputs: range) -> Float32Array:
    """Return the columns of x [rows, width] for these outputs."""
    return x[:, outputs.start : outputs.stop]


def expert_outputs(rank: Rank, count: int, outputs: range) -> list[range]:
    """Return `outputs` for each of the rank's experts, and none for the others of `count`."""
    mine = rank.experts(count)
    return [outputs if expert in mine else range(0) for expert in range(count)]


def cut(sizes: Sequence[int], outputs: range) -> list[range]:
    """Return, for each of several concatenated matrices of `sizes`, its own part of `outputs`.

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

    rank: the rank whose part of the weights it uses; peers: the ranks that compute the same rows.
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
