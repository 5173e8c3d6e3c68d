"""What the library's kernels look like from Python: an Engine of threads, and a Recording of a step.

Activations travel between operations as float32 rows, `[rows, width]`, or as strips, the layout that products read
(csrc/kernels.h): of bfloat16 pairs, or of quads of bytes with a scale for each row. All are numpy arrays of the
caller's; a recording keeps those it was given alive.
"""

from __future__ import annotations

import ctypes
import enum
import math
import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.errors import ConfigError
from pypto_serving.kernels.library import library, runnable
from pypto_serving.util import ceil_div

Array = NDArray[Any]
Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]
BFloat16Array = NDArray[np.uint16]
PairArray = NDArray[np.uint32]

PANEL = 32
"""Outputs per panel of packed weights."""

_GATE_HALF = 16


class Stored(enum.IntEnum):
    """Element types that weights are packed from."""

    BF16 = 0
    F32 = 1
    F16 = 2
    I8 = 3


class Rows(enum.IntEnum):
    """Which rows of a step an operation works on: all tokens, or those whose logits are wanted."""

    TOKENS = 0
    LOGITS = 1


class _Finish(enum.IntEnum):
    STORE = 0
    ADD = 1
    GATE = 2


@dataclass(frozen=True, slots=True)
class Matrix:
    """Packed weights of matrices [n, k]: pairs of bfloat16, uint32 [panels of all * k / 2 * 32]; see csrc/kernels.h.

    Where they are bytes, `words` are quads, [panels of all * k / 4 * 32], and there are `scales` and `compensation`,
    [panels of all * 32].
    """

    words: PairArray
    n: int
    k: int
    bias: Float32Array | None = None
    scales: Float32Array | None = None
    compensation: Int32Array | None = None

    @property
    def int8(self) -> bool:
        """True if the weights are bytes."""
        return self.scales is not None

    @staticmethod
    def size(n: int, k: int, count: int = 1) -> int:
        """Pairs that `count` matrices [n, k] take."""
        return Matrix.outputs(n, count) * k // 2

    @staticmethod
    def outputs(n: int, count: int = 1) -> int:
        """Outputs of `count` matrices of n outputs in whole panels."""
        return count * ceil_div(n, PANEL) * PANEL


@dataclass(frozen=True, slots=True)
class Quads:
    """Activations as bytes: strips of quads, uint32 [rows * k / 4], and each row's scale, float32 [rows]."""

    words: PairArray
    scales: Float32Array


Strips = PairArray | Quads
"""Activations that a product reads: as many bits as the weights of its matrix have."""


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """Keys and values of one layer in an arena of pages, uint16 [blocks, layers, 2, kv_heads, size * dim]."""

    pages: BFloat16Array
    layer: int
    dim: int

    def arguments(self) -> tuple[int, int, int, int, int, int]:
        """Addresses of keys and values in block 0, uint16 per block, kv heads, dim, tokens per block."""
        _, layers, _, kv_heads, elements = self.pages.shape
        keys = self.pages.ctypes.data + self.layer * 2 * kv_heads * elements * 2
        stride = layers * 2 * kv_heads * elements
        return keys, keys + kv_heads * elements * 2, stride, kv_heads, self.dim, elements // self.dim


@dataclass(frozen=True, slots=True)
class Routing:
    """Handle of a recorded routing: which tokens go to which experts of a layer."""

    handle: int
    experts: int
    per_token: int


class _Pool:
    """Owns the memory that small arrays come from, one behind the other, so that huge pages hold all of them."""

    def __init__(self) -> None:
        self._left = np.zeros(0, np.uint8)

    def take(self, size: int) -> NDArray[np.uint8]:
        """Zeros that nobody else has; they live as long as an array refers to them."""
        if size >= _POOL_BYTES:
            return _map(size)
        if size > len(self._left):
            self._left = _map(_POOL_BYTES)
        taken, self._left = self._left[:size], self._left[ceil_div(size, _LINE_BYTES) * _LINE_BYTES :]
        return taken


_HUGE_PAGE_BYTES, _POOL_BYTES, _LINE_BYTES = 2 << 20, 64 << 20, 64
_POOL = _Pool()


def _map(size: int) -> NDArray[np.uint8]:
    """Private memory of the system that begins with a huge page.

    Shared memory gets huge pages by another setting of the system, which is off by default.
    """
    lib = library()
    assert lib is not None
    mapped = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapped, np.uint8)
    memory = memory[-memory.ctypes.data % _HUGE_PAGE_BYTES :][:size]
    lib.pypto_huge_pages(memory.ctypes.data, size)
    return memory


def zeros(dtype: Any, *shape: int) -> Array:
    """Memory that takes room when it is first written, in huge pages where the system has them."""
    array: Array = _POOL.take(math.prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
    return array


def hashes(array: Array) -> NDArray[np.uint64]:
    """A hash of each piece of `array`, computed by this thread: any change of its bytes changes one of them."""
    lib = library()
    assert lib is not None
    out = np.zeros(lib.pypto_pieces(array.nbytes), np.uint64)
    lib.pypto_hash(array.ctypes.data, array.nbytes, out.ctypes.data)
    return out


def _allowed_cpus() -> set[int]:
    """CPUs that this process may use; empty where the system does not tell, and then threads run anywhere."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _has_room(out: PairArray, stored: Stored, n: int, k: int, compensation: Int32Array | None) -> bool:
    if stored != Stored.I8:
        return k % 2 == 0 and Matrix.size(n, k) <= out.size
    outputs = Matrix.outputs(n)
    return k % 4 == 0 and outputs * k // 4 <= out.size and compensation is not None and outputs <= compensation.size


def _address(array: Array | None) -> int | None:
    return None if array is None else array.ctypes.data


class Engine:
    """Owns `threads` threads, the caller's among them, that run kernels for one instruction set on `cpus`."""

    def __init__(self, instruction_set: str = "", threads: int = 1, cpus: set[int] | None = None) -> None:
        """Raises ConfigError where this machine does not run `instruction_set` (by default its best)."""
        lib = library()
        chosen = sorted(_allowed_cpus() if cpus is None else cpus)
        mask = (ctypes.c_int * len(chosen))(*chosen)
        self._handle = lib.pypto_open(instruction_set.encode(), threads, mask, len(chosen)) if lib is not None else None
        if lib is None or not self._handle:
            if runnable() and instruction_set in ("", *runnable()):
                raise ConfigError(f"the system does not start {threads} threads; give fewer with --num-threads")
            has = ", ".join(runnable()) or "none: it was built without a C++ compiler"
            raise ConfigError(f"no kernels for {instruction_set or 'this machine'} here; this installation has {has}")
        self._lib = lib
        self.instruction_set = instruction_set or runnable()[0]
        self.threads = threads
        self.caller_cpus = set(chosen[:1]) if len(chosen) == threads else set(chosen)

    def pin_caller(self) -> None:
        """Keep the calling thread, and those that it starts, off the CPUs that the engine's own threads keep to."""
        if self.caller_cpus:
            os.sched_setaffinity(0, self.caller_cpus)

    @property
    def strip_rows(self) -> int:
        """Most rows in a strip of activations."""
        return int(self._lib.pypto_strip_rows(self._handle))

    def pack(
        self,
        out: PairArray,
        source: int,
        stored: Stored,
        n: int,
        k: int,
        offset: int = 0,
        compensation: Int32Array | None = None,
    ) -> None:
        """Rows of a stored matrix [n, k] at address `source` become outputs `offset` on of packed `out`.

        Those of bytes also fill `compensation`. Raises ValueError where the rows would not lie in whole half panels of
        `out`, or k is not whole words.
        """
        if offset % _GATE_HALF or not _has_room(out, stored, offset + n, k, compensation):
            raise ValueError(f"[{n}, {k}] does not go into {out.size} words at output {offset}")
        self._lib.pypto_pack(self._handle, out.ctypes.data, _address(compensation), source, stored, n, k, offset, 0)

    def pack_gate(
        self,
        out: PairArray,
        source: int,
        stored: Stored,
        n: int,
        k: int,
        half: int,
        compensation: Int32Array | None = None,
    ) -> None:
        """Rows of a stored matrix [n, k] become half 0 (gate) or 1 (up) of each panel of `out`; see `pack`."""
        if n % _GATE_HALF or not _has_room(out, stored, 2 * n, k, compensation):
            raise ValueError(f"[{n}, {k}] does not go into half of {out.size} words")
        offset = half * _GATE_HALF
        self._lib.pypto_pack(self._handle, out.ctypes.data, _address(compensation), source, stored, n, k, offset, 1)

    def read(self, out: Array, file: int, offset: int) -> NDArray[np.uint64]:
        """Fill `out` from `offset` on of an open file, and return its `hashes`; raises OSError."""
        pieces = np.zeros(self._lib.pypto_pieces(out.nbytes), np.uint64)
        arguments = (out.ctypes.data, out.nbytes, pieces.ctypes.data)
        if error := self._lib.pypto_read(self._handle, file, offset, *arguments):
            raise OSError(error, os.strerror(error))
        return pieces

    def close(self) -> None:
        """End the threads."""
        if self._handle:
            self._lib.pypto_close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


def _parts(x: Strips) -> tuple[PairArray, Float32Array | None]:
    return (x.words, x.scales) if isinstance(x, Quads) else (x, None)


def _factors(x: Strips, matrix: Matrix) -> tuple[Array | None, ...]:
    """What a product reads of both. Raises ValueError where one is of bytes and the other is not."""
    words, x_scales = _parts(x)
    if (x_scales is None) == matrix.int8:
        raise ValueError("a product's activations and weights must both be bytes, or neither")
    return words, x_scales, matrix.words, matrix.scales, matrix.compensation


class Recording:
    """A step, recorded once as a list of operations in the order of the calls, and replayed by one native call."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lib = engine, engine._lib
        self._handle = self._lib.pypto_record(engine._handle)
        self._kept: list[object] = []
        self.names: list[str] = []

    def _add(self, name: str, *arguments: Any) -> Any:
        """Call a function of the library; arrays become addresses and are kept, None becomes a null pointer."""
        self._kept.extend(argument for argument in arguments if isinstance(argument, np.ndarray))
        values = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
        result = getattr(self._lib, f"pypto_{name}")(self._handle, *values)
        self.names += [name] * (self._lib.pypto_operations(self._handle) - len(self.names))
        return result

    def embed(self, table: BFloat16Array, x: Float32Array) -> None:
        """x [tokens, width] = rows of `table` [vocab, width]."""
        self._add("embed", table, None, x.shape[1], x)

    def embed_packed(self, table: Matrix, x: Float32Array) -> None:
        """x [tokens, width] = rows of a packed `table` [vocab, width]."""
        self._add("embed", None, table.words, x.shape[1], x)

    def norm(self, x: Float32Array, weight: Float32Array, eps: float, out: Strips, rows: Rows = Rows.TOKENS) -> None:
        """Strips of x / rms(x) * weight, x [tokens, width]: arXiv:1910.07467."""
        self._add("norm", x, weight, x.shape[1], eps, rows, *_parts(out))

    def quantize(self, x: PairArray, k: int, out: Quads, routing: Routing | None = None) -> None:
        """Strips of bytes from strips of bfloat16, [tokens, k], or of experts' rows: a row's largest becomes 127."""
        self._add("quantize", None if routing is None else routing.handle, x, k, *_parts(out))

    def linear(self, x: Strips, matrix: Matrix, out: Float32Array, rows: Rows = Rows.TOKENS) -> None:
        """out [rows, n] = x W^T + b."""
        self._linear(x, matrix, _Finish.STORE, out, rows)

    def linear_add(self, x: Strips, matrix: Matrix, out: Float32Array) -> None:
        """out [tokens, n] += x W^T + b."""
        self._linear(x, matrix, _Finish.ADD, out, Rows.TOKENS)

    def linear_gate(self, x: Strips, matrix: Matrix, out: PairArray) -> None:
        """Strips of silu(x G^T) * (x U^T), for a matrix packed from G and U with `pack_gate`."""
        self._linear(x, matrix, _Finish.GATE, out, Rows.TOKENS)

    def _linear(self, x: Strips, matrix: Matrix, finish: _Finish, out: Array, rows: Rows) -> None:
        self._add("linear", *_factors(x, matrix), matrix.bias, matrix.n, matrix.k, rows, finish, out)

    def heads(
        self,
        x: Float32Array,
        weights: Float32Array,
        cos: Float32Array,
        sin: Float32Array,
        eps: float,
        queries: BFloat16Array,
        cache: CacheLayer,
    ) -> None:
        """Queries, keys and values from x [tokens, heads + 2 kv_heads, dim]: head norm, rotation, cache write.

        `weights` [heads + kv_heads, dim] are the norms' weights, those of queries times log2(e) / sqrt(dim); `cos` and
        `sin` are [positions, dim / 2]; `queries` become [tokens, heads, dim].
        """
        self._kept.append(cache.pages)
        self._add("heads", x, weights, cos, sin, eps, queries.shape[1], queries, *cache.arguments())

    def attend(self, queries: BFloat16Array, cache: CacheLayer, out: PairArray) -> None:
        """Strips of causal attention of queries [tokens, heads, dim] over the cache."""
        self._kept.append(cache.pages)
        self._add("attend", queries, queries.shape[1], *cache.arguments(), out)

    def route(self, logits: Float32Array, per_token: int, normalize: bool) -> Routing:
        """Send each token to the `per_token` likeliest of the experts in logits [tokens, experts]."""
        tokens, experts = logits.shape
        entries = tokens * per_token
        chosen, order, place = (np.zeros(entries, np.int32) for _ in range(3))
        share = np.zeros(entries, np.float32)
        starts, active = (np.zeros(experts + 1, np.int32) for _ in range(2))
        handle = self._add("route", experts, per_token, normalize, logits, chosen, share, order, place, starts, active)
        return Routing(handle, experts, per_token)

    def gather(self, routing: Routing, x: Strips, k: int, out: Strips) -> None:
        """Strips of each expert's rows, from strips x of all tokens."""
        words, scales = _parts(x)
        out_words, out_scales = _parts(out)
        width = k // 2 if scales is None else k // 4
        self._add("gather", routing.handle, words, width, out_words, scales, out_scales)

    def expert_linear(self, routing: Routing, x: Strips, matrix: Matrix, out: Float32Array) -> None:
        """out [entries, n] = x W_e^T, each entry with the matrix of its expert."""
        self._add("expert_linear", routing.handle, *_factors(x, matrix), matrix.n, matrix.k, _Finish.STORE, out)

    def expert_gate(self, routing: Routing, x: Strips, matrix: Matrix, out: PairArray) -> None:
        """As `linear_gate`, each entry with the matrix of its expert."""
        self._add("expert_linear", routing.handle, *_factors(x, matrix), matrix.n, matrix.k, _Finish.GATE, out)

    def combine(self, routing: Routing, y: Float32Array, x: Float32Array) -> None:
        """x [tokens, width] += the entries y of each token, times their share, in slot order."""
        self._add("combine", routing.handle, y, x.shape[1], x)

    def replay(
        self,
        token_ids: Array,
        positions: Array,
        query_start: Array,
        context_lens: Array,
        logits_rows: Array,
        slots: Array,
        block_table: Array,
        seconds: NDArray[np.float64] | None = None,
    ) -> None:
        """Compute one step; the arrays are those of StepInputs, int32 and contiguous but for the table's rows.

        `seconds` [operations], where given, grows by the time that each operation took.
        """
        self._lib.pypto_replay(
            self._handle,
            len(token_ids),
            len(context_lens),
            len(logits_rows),
            block_table.strides[0] // 4,
            *(a.ctypes.data for a in (token_ids, positions, query_start, context_lens, logits_rows, slots)),
            block_table.ctypes.data,
            None if seconds is None else seconds.ctypes.data,
        )

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._lib.pypto_forget(self._handle)
            self._handle = None
