"""A step as a recording: a list of operations that one native call replays. It keeps the arrays it was given alive."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.kernels.engine import PANEL, Engine, Matrix, Quads, Strips
from pypto_serving.types.arrays import Array, BFloat16Array, Float32Array, Int32Array, PairArray

INDEX_TOKENS = 16
"""Tokens whose entries are scored before they choose, as csrc/ops.h has it."""


class Rows(enum.IntEnum):
    """Which rows of a step an operation works on: all tokens, or those whose logits are wanted."""

    TOKENS = 0
    LOGITS = 1


class _Finish(enum.IntEnum):
    STORE = 0
    ADD = 1
    GATE = 2
    NARROW = 3


class Scoring(enum.IntEnum):
    """How the shares of a token's experts are made of its logits; see csrc/ops.h."""

    SOFTMAX = 0
    NORMALIZED = 1
    SOFTPLUS = 2


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
class Pages:
    """Handle of the rows that one tensor of a layer has in the blocks of a KV group."""

    handle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turning:
    """What becomes of vectors of `dim` numbers: norm (eps < 0: none), weight, scale, rotation of the trailing ones.

    Neighbours are turned in pairs, by angles `cos` and `sin` [positions, pairs].
    """

    dim: int
    cos: Float32Array
    sin: Float32Array
    eps: float = -1.0
    weight: Float32Array | None = None
    scale: float = 1.0

    @property
    def rotary(self) -> int:
        """Dimensions that are turned."""
        return 2 * int(self.cos.shape[1])

    def arguments(self) -> tuple[Array | None, Array, Array, int, int, float]:
        """All but the scale, as the library takes them."""
        return self.weight, self.cos, self.sin, self.dim, self.rotary, self.eps


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Query heads, tokens of a window, and groups of heads whose outputs are multiplied by themselves."""

    heads: int
    window: int
    groups: int


@dataclass(frozen=True, slots=True)
class Routing:
    """Handle of a recorded routing: which tokens go to which experts of a layer."""

    handle: int
    experts: int
    per_token: int


def _parts(x: Strips) -> tuple[PairArray, Float32Array | None]:
    return (x.words, x.scales) if isinstance(x, Quads) else (x, None)


def _factors(x: Strips, matrix: Matrix) -> tuple[Array | None, ...]:
    """What a product reads of both. Raises ValueError where one is of bytes and the other is not."""
    words, x_scales = _parts(x)
    if (x_scales is None) == matrix.int8:
        raise ValueError("a product's activations and weights must both be bytes, or neither")
    return words, x_scales, matrix.words, matrix.scales, matrix.compensation


def _stride(x: Float32Array) -> int:
    """Elements from one row to the next."""
    return int(x.strides[0] // x.itemsize)


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
        """x [tokens, width] = rows of `table` [vocab, width]; or [tokens, copies, width], each row so many times."""
        self._add("embed", table, None, x.shape[-1], math.prod(x.shape[1:-1]), x)

    def embed_packed(self, table: Matrix, x: Float32Array) -> None:
        """As `embed`, rows of a packed `table` [vocab, width]."""
        self._add("embed", None, table.words, x.shape[-1], math.prod(x.shape[1:-1]), x)

    def norm(self, x: Float32Array, weight: Float32Array, eps: float, out: Strips, rows: Rows = Rows.TOKENS) -> None:
        """Strips of x / rms(x) * weight, x [tokens, width], which may be columns of an array: arXiv:1910.07467."""
        self._add("norm", x, _stride(x), weight, x.shape[1], eps, rows, *_parts(out))

    def quantize(self, x: PairArray, k: int, out: Quads, routing: Routing | None = None) -> None:
        """Strips of bytes from strips of bfloat16, [tokens, k], or of experts' rows: a row's largest becomes 127."""
        self._add("quantize", None if routing is None else routing.handle, x, k, *_parts(out))

    def linear(self, x: Strips, matrix: Matrix, out: Float32Array, rows: Rows = Rows.TOKENS) -> None:
        """out [rows, n] = x W^T + b."""
        self._linear(x, matrix, _Finish.STORE, out, rows)

    def linear_add(self, x: Strips, matrix: Matrix, out: Float32Array) -> None:
        """out [tokens, n] += x W^T + b."""
        self._linear(x, matrix, _Finish.ADD, out, Rows.TOKENS)

    def linear_gate(self, x: Strips, matrix: Matrix, out: PairArray, limit: float = math.inf) -> None:
        """Strips of silu(x G^T) * (x U^T), for a matrix packed from G and U with `pack_gate`.

        x G^T is at most `limit`, and x U^T lies in [-limit, limit].
        """
        self._linear(x, matrix, _Finish.GATE, out, Rows.TOKENS, limit=limit)

    def linear_groups(self, x: PairArray, matrix: Matrix, groups: int, out: PairArray) -> None:
        """Strips of x_g W_g^T side by side: each group of outputs has strips x of its own, one behind the other.

        Raises ValueError where a group's outputs are not whole panels.
        """
        if matrix.n % groups or matrix.n // groups % PANEL:
            raise ValueError(f"{groups} groups of {matrix.n} outputs are not whole panels")
        self._linear(x, matrix, _Finish.NARROW, out, Rows.TOKENS, group=matrix.n // groups)

    def _linear(
        self,
        x: Strips,
        matrix: Matrix,
        finish: _Finish,
        out: Array,
        rows: Rows,
        group: int = 0,
        limit: float = math.inf,
    ) -> None:
        sizes = (matrix.n, matrix.k, group or Matrix.outputs(matrix.n), limit)
        self._add("linear", *_factors(x, matrix), matrix.bias, *sizes, rows, finish, out)

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

    def route(
        self,
        logits: Float32Array,
        per_token: int,
        scoring: Scoring,
        scale: float = 1.0,
        bias: Float32Array | None = None,
        table: Int32Array | None = None,
    ) -> Routing:
        """Send each token to the `per_token` best of the experts in logits [tokens, experts]; shares are times `scale`.

        With Scoring.SOFTPLUS, `bias` [experts] is added to the scores that choose; a `table` [vocab, per_token] names
        the experts of each token id instead.
        """
        tokens, experts = logits.shape
        entries = tokens * per_token
        chosen, order, place = (np.zeros(entries, np.int32) for _ in range(3))
        share = np.zeros(entries, np.float32)
        starts, active = (np.zeros(experts + 1, np.int32) for _ in range(2))
        scores = np.zeros((tokens, 2, experts), np.float32) if scoring == Scoring.SOFTPLUS else None
        inputs = (experts, per_token, scoring, scale, logits, scores, bias, table)
        handle = self._add("route", *inputs, chosen, share, order, place, starts, active)
        return Routing(handle, experts, per_token)

    def gather(self, routing: Routing, x: Strips, k: int, out: Strips) -> None:
        """Strips of each expert's rows, from strips x of all tokens."""
        words, scales = _parts(x)
        out_words, out_scales = _parts(out)
        width = k // 2 if scales is None else k // 4
        self._add("gather", routing.handle, words, width, out_words, scales, out_scales)

    def expert_linear(self, routing: Routing, x: Strips, matrix: Matrix, out: Float32Array) -> None:
        """out [entries, n] = x W_e^T, each entry with the matrix of its expert."""
        self._expert_linear(routing, x, matrix, math.inf, _Finish.STORE, out)

    def expert_gate(self, routing: Routing, x: Strips, matrix: Matrix, out: PairArray, limit: float = math.inf) -> None:
        """As `linear_gate`, each entry with the matrix of its expert."""
        self._expert_linear(routing, x, matrix, limit, _Finish.GATE, out)

    def _expert_linear(
        self, routing: Routing, x: Strips, matrix: Matrix, limit: float, finish: _Finish, out: Array
    ) -> None:
        sizes = (matrix.n, matrix.k, limit, finish)
        self._add("expert_linear", routing.handle, *_factors(x, matrix), *sizes, out)

    def combine(self, routing: Routing, y: Float32Array, x: Float32Array) -> None:
        """x [tokens, width] += the entries y of each token, times their share, in slot order."""
        self._add("combine", routing.handle, y, x.shape[1], x)

    def products(
        self, x: Float32Array, weight: Float32Array, eps: float, out: Float32Array, rows: Rows = Rows.TOKENS
    ) -> None:
        """out [rows, outputs] = x / rms(x) W^T in float32, x [tokens, ...], W [outputs, width]: outputs in fours."""
        self._add("products", x, weight, weight.shape[1], weight.shape[0], eps, rows, out)

    def stream_inputs(
        self,
        x: Float32Array,
        products: Float32Array,
        scale: Float32Array,
        base: Float32Array,
        eps: float,
        out: Float32Array,
        mixes: Float32Array | None = None,
        iterations: int = 0,
    ) -> None:
        """out [tokens, width] = the mixture of streams x that their `products` [rows, outputs] ask for.

        `scale` and `base` are [outputs]. With `mixes` [tokens, 20], also how the next output and the streams are mixed;
        without, for the rows whose logits are wanted.
        """
        rows = Rows.LOGITS if mixes is None else Rows.TOKENS
        self._add("stream_inputs", x, products, scale, base, out.shape[1], eps, iterations, rows, mixes, out)

    def stream_outputs(self, y: Float32Array, mixes: Float32Array, x: Float32Array) -> None:
        """Mix y [tokens, width] into streams x [tokens, streams, width], and those with each other."""
        self._add("stream_outputs", y, mixes, y.shape[1], x)

    def pages(self, arena: NDArray[np.uint8], offset: int, row_bytes: int, group: int, size: int, ratio: int) -> Pages:
        """Rows of `row_bytes` from `offset` on of each block [blocks, bytes], one for `ratio` of its `size` tokens."""
        self._kept.append(arena)
        address = arena.ctypes.data + offset
        return Pages(self._add("pages", address, arena.strides[0], row_bytes, group, size, ratio))

    def turn(self, x: Float32Array, heads: int, turning: Turning, out: PairArray | Pages) -> None:
        """`heads` vectors of each row of x [tokens, heads * dim], turned by its position, in bfloat16.

        They become panels of pairs, uint32 [tokens, panels, dim / 2, 32], or the token's row in pages.
        """
        places = (None, out.handle) if isinstance(out, Pages) else (out, None)
        self._add("turn", x, _stride(x), heads, *turning.arguments(), turning.scale, *places)

    def compressor_state(self, values: Float32Array, gates: Float32Array, position: Float32Array, state: Pages) -> None:
        """The tokens' rows of `state`, [values | gates + position[p % ratio]]: [tokens, width] and [ratio, width]."""
        ratio, width = position.shape
        self._add("compressor_state", values, gates, position, _stride(values), width, ratio, state.handle)

    def compress(self, state: Pages, width: int, turning: Turning, entries: Pages) -> None:
        """The entries that tokens of the step complete, from states of `width` values; see csrc/ops.h."""
        self._add("compress", state.handle, width, *turning.arguments(), entries.handle)

    def index(
        self,
        queries: PairArray,
        weights: Float32Array,
        scale: float,
        turning: Turning,
        keys: Pages,
        chosen: Int32Array,
        scores: Float32Array,
    ) -> None:
        """chosen [tokens, top]: the best of more than `top` entries, ascending.

        By the sum over queries, in panels, of weight * scale * max(0, query . key); weights are [tokens, heads].
        `scores` [INDEX_TOKENS, most entries that a token knows] is overwritten.
        """
        sizes = (weights.shape[1], turning.dim, chosen.shape[1])
        arguments = (keys.handle, scores.shape[1], scores, chosen)
        self._add("index", queries, weights, _stride(weights), scale, *sizes, *arguments)

    def latent_attend(
        self,
        queries: PairArray,
        sinks: Float32Array,
        turning: Turning,
        sizes: LatentSizes,
        rows: Pages,
        out: PairArray,
        entries: Pages | None = None,
        chosen: Int32Array | None = None,
    ) -> None:
        """Attention of queries in panels over a window of `rows` and over `entries`, or those `chosen`; turned back.

        `sinks` [panels * 32] are in base 2. `out` is strips of [tokens, heads * dim / groups], group by group.
        """
        top = 0 if chosen is None else chosen.shape[1]
        self._add(
            "latent_attend",
            *(queries, sinks, turning.cos, turning.sin),
            *(sizes.heads, turning.dim, turning.rotary, sizes.window, sizes.groups, top),
            *(rows.handle, None if entries is None else entries.handle, chosen, out),
        )

    def replay(
        self,
        token_ids: Array,
        positions: Array,
        query_start: Array,
        context_lens: Array,
        logits_rows: Array,
        slots: Sequence[Array],
        block_tables: Sequence[Array],
        seconds: NDArray[np.float64] | None = None,
    ) -> None:
        """Compute one step; the arrays are those of StepInputs, int32 and contiguous but for the tables' rows.

        `seconds` [operations], where given, grows by the time that each operation took.
        """
        tables = zip(slots, block_tables, strict=True)
        groups = np.array([[s.ctypes.data, t.ctypes.data, t.strides[0] // 4] for s, t in tables], np.int64)
        self._lib.pypto_replay(
            self._handle,
            len(token_ids),
            len(context_lens),
            len(logits_rows),
            *(a.ctypes.data for a in (token_ids, positions, query_start, context_lens, logits_rows, groups)),
            None if seconds is None else seconds.ctypes.data,
        )

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._lib.pypto_forget(self._handle)
            self._handle = None
