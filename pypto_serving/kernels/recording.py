"""A step as a recording: a list of operations that one native call replays. It keeps the arrays it was given alive."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.kernels.arguments import Handle, Pointer
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

    def fields(self) -> dict[str, Any]:
        """Return the fields of Cache in csrc/ops.h. Raises ValueError for pages that are not contiguous."""
        if not self.pages.flags.c_contiguous:
            raise ValueError("pages of a cache must be contiguous")
        _, layers, _, kv_heads, elements = self.pages.shape
        keys, values = (Pointer(self.pages[:1, self.layer, half]) for half in (0, 1))
        sizes = {"kv_heads": kv_heads, "dim": self.dim, "size": elements // self.dim}
        return {"keys": keys, "values": values, "block_stride": layers * 2 * kv_heads * elements, **sizes}


@dataclass(frozen=True, slots=True)
class Pages:
    """Handle of the rows that one tensor of a layer has in the blocks of a KV group."""

    handle: Handle


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

    def fields(self) -> dict[str, Any]:
        """Return the fields of Turning in csrc/ops.h."""
        sizes = {"dim": self.dim, "rotary": self.rotary, "eps": self.eps, "scale": self.scale}
        return {"weight": self.weight, "cos": self.cos, "sin": self.sin, **sizes}


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Query heads, tokens of a window, and groups of heads whose outputs are multiplied by themselves."""

    heads: int
    window: int
    groups: int


@dataclass(frozen=True, slots=True)
class Routing:
    """Handle of a recorded routing: which tokens go to which experts of a layer."""

    handle: Handle
    experts: int
    per_token: int


def _parts(x: Strips, words: str = "x", scales: str = "x_scales") -> dict[str, Array | None]:
    """Make fields of the words of activations and, of bytes, their scales."""
    return {words: x.words, scales: x.scales} if isinstance(x, Quads) else {words: x, scales: None}


def _factors(x: Strips, matrix: Matrix) -> dict[str, Array | None]:
    """Make fields of what a product reads. Raises ValueError where one factor is of bytes and the other is not."""
    if isinstance(x, Quads) != matrix.int8:
        raise ValueError("a product's activations and weights must both be bytes, or neither")
    weights = {"weight": matrix.words, "scales": matrix.scales, "compensation": matrix.compensation}
    return {**_parts(x), **weights}


def _product(x: Strips, matrix: Matrix, finish: _Finish, out: Array) -> dict[str, Any]:
    """Make the fields of Linear in csrc/ops.h that all products have.

    Raises TypeError where `out` has not the type that they write.
    """
    dtype = np.float32 if finish in (_Finish.STORE, _Finish.ADD) else np.uint32
    if out.dtype != dtype:
        raise TypeError(f"a product with {finish.name} writes {np.dtype(dtype)}, not {out.dtype}")
    return {**_factors(x, matrix), "n": matrix.n, "k": matrix.k, "finish": finish, "out": out}


def _columns(x: Array) -> tuple[Array | Pointer, int]:
    """Point to x [rows, width], which may be columns of an array; also the elements from one row to the next.

    Raises ValueError where the elements of a row are not contiguous.
    """
    stride, step = x.strides
    if step != x.itemsize:
        raise ValueError(f"rows of {list(x.shape)} are not contiguous")
    return x if x.flags.c_contiguous else Pointer(x), stride // step


class Recording:
    """A step, recorded once as a list of operations in the order of the calls, and replayed by one native call."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lib = engine, engine._lib
        self._handle = self._lib.record(engine._handle)
        self._groups = self._lib.structs["GroupTables"]
        self._kept: list[object] = []
        self.names: list[str] = []

    def _add(self, name: str, **fields: Any) -> Handle:
        """Record the operation `name` of csrc/ops.h on these fields, and keep their arrays alive.

        Raises TypeError or ValueError for fields of other types.
        """
        handle = self._lib.functions[name](self._handle, **fields)
        self._keep(fields)
        self.names.append(name)
        assert isinstance(handle, Handle)
        return handle

    def _keep(self, fields: Mapping[str, Any]) -> None:
        self._kept.extend(value for value in fields.values() if isinstance(value, np.ndarray | Pointer))

    def embed(self, table: BFloat16Array, x: Float32Array) -> None:
        """x [tokens, width] = rows of `table` [vocab, width]; or [tokens, copies, width], each row so many times."""
        self._embed(table, None, x)

    def embed_packed(self, table: Matrix, x: Float32Array) -> None:
        """As `embed`, rows of a packed `table` [vocab, width]."""
        self._embed(None, table.words, x)

    def _embed(self, table: BFloat16Array | None, packed: PairArray | None, x: Float32Array) -> None:
        copies = math.prod(x.shape[1:-1])
        self._add("embed", table=table, packed=packed, width=x.shape[-1], copies=copies, x=x)

    def norm(self, x: Float32Array, weight: Float32Array, eps: float, out: Strips, rows: Rows = Rows.TOKENS) -> None:
        """Strips of x / rms(x) * weight, x [tokens, width], which may be columns of an array: arXiv:1910.07467."""
        start, stride = _columns(x)
        sizes = {"stride": stride, "width": x.shape[1], "eps": eps, "rows": rows}
        self._add("norm", x=start, weight=weight, **sizes, **_parts(out, "out", "scales"))

    def quantize(self, x: PairArray, k: int, out: Quads, routing: Routing | None = None) -> None:
        """Strips of bytes from strips of bfloat16, [tokens, k], or of experts' rows: a row's largest becomes 127."""
        of = None if routing is None else routing.handle
        self._add("quantize", routing=of, x=x, k=k, **_parts(out, "out", "scales"))

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
        sizes = {"group": group or Matrix.outputs(matrix.n), "limit": limit, "rows": rows}
        self._add("linear", **_product(x, matrix, finish, out), bias=matrix.bias, **sizes)

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
        inputs = {"x": x, "weights": weights, "cos": cos, "sin": sin, "eps": eps}
        self._add("heads", **inputs, heads=queries.shape[1], queries=queries, **cache.fields())

    def attend(self, queries: BFloat16Array, cache: CacheLayer, out: PairArray) -> None:
        """Strips of causal attention of queries [tokens, heads, dim] over the cache."""
        self._add("attend", queries=queries, heads=queries.shape[1], **cache.fields(), out=out)

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
        sizes = {"experts": experts, "per_token": per_token, "scoring": scoring, "scale": scale}
        scores = np.zeros((tokens, 2, experts), np.float32) if scoring == Scoring.SOFTPLUS else None
        inputs = {"logits": logits, "scores": scores, "bias": bias, "table": table}
        entries = {name: np.zeros(tokens * per_token, np.int32) for name in ("chosen", "order", "place")}
        share = np.zeros(tokens * per_token, np.float32)
        places = {name: np.zeros(experts + 1, np.int32) for name in ("starts", "active")}
        routing = {**sizes, **inputs, **entries, "share": share, **places}
        self._add("choose", **routing)
        return Routing(self._add("sort", **routing), experts, per_token)

    def gather(self, routing: Routing, x: Strips, k: int, out: Strips) -> None:
        """Strips of each expert's rows, from strips x of all tokens."""
        if isinstance(x, Quads) != isinstance(out, Quads):
            raise ValueError("strips and those gathered from them must both be bytes, or neither")
        parts = {**_parts(x, "x", "scales"), **_parts(out, "out", "out_scales")}
        self._add("gather", routing=routing.handle, pairs=k // (4 if isinstance(x, Quads) else 2), **parts)

    def expert_linear(self, routing: Routing, x: Strips, matrix: Matrix, out: Float32Array) -> None:
        """out [entries, n] = x W_e^T, each entry with the matrix of its expert."""
        self._expert_linear(routing, x, matrix, math.inf, _Finish.STORE, out)

    def expert_gate(self, routing: Routing, x: Strips, matrix: Matrix, out: PairArray, limit: float = math.inf) -> None:
        """As `linear_gate`, each entry with the matrix of its expert."""
        self._expert_linear(routing, x, matrix, limit, _Finish.GATE, out)

    def _expert_linear(
        self, routing: Routing, x: Strips, matrix: Matrix, limit: float, finish: _Finish, out: Array
    ) -> None:
        sizes = {"group": Matrix.outputs(matrix.n), "limit": limit, "rows": Rows.TOKENS}
        self._add("expert_linear", routing=routing.handle, **_product(x, matrix, finish, out), bias=None, **sizes)

    def combine(self, routing: Routing, y: Float32Array, x: Float32Array) -> None:
        """x [tokens, width] += the entries y of each token, times their share, in slot order."""
        self._add("combine", routing=routing.handle, y=y, width=x.shape[1], x=x)

    def products(
        self, x: Float32Array, weight: Float32Array, eps: float, out: Float32Array, rows: Rows = Rows.TOKENS
    ) -> None:
        """out [rows, outputs] = x / rms(x) W^T in float32, x [tokens, ...], W [outputs, width]: outputs in fours."""
        outputs, width = weight.shape
        self._add("products", x=x, weight=weight, width=width, outputs=outputs, eps=eps, rows=rows, out=out)

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
        inputs = {"x": x, "products": products, "scale": scale, "base": base}
        sizes = {"width": out.shape[1], "eps": eps, "iterations": iterations, "rows": rows}
        self._add("stream_inputs", **inputs, **sizes, mixes=mixes, out=out)

    def stream_outputs(self, y: Float32Array, mixes: Float32Array, x: Float32Array) -> None:
        """Mix y [tokens, width] into streams x [tokens, streams, width], and those with each other."""
        self._add("stream_outputs", y=y, mixes=mixes, width=y.shape[1], x=x)

    def pages(self, arena: NDArray[np.uint8], offset: int, row_bytes: int, group: int, size: int, ratio: int) -> Pages:
        """Rows of `row_bytes` from `offset` on of each block [blocks, bytes], one for `ratio` of its `size` tokens."""
        if not 0 <= offset <= arena.shape[1] - size // ratio * row_bytes:
            raise ValueError(f"{size // ratio} rows from byte {offset} on are not within blocks of {arena.shape[1]}")
        strides = {"block_stride": arena.strides[0], "row_bytes": row_bytes}
        fields = {"data": Pointer(arena[:, offset:]), **strides, "group": group, "size": size, "ratio": ratio}
        self._keep(fields)
        return Pages(self._lib.pages(self._handle, **fields))

    def turn(self, x: Float32Array, heads: int, turning: Turning, out: PairArray | Pages) -> None:
        """`heads` vectors of each row of x [tokens, heads * dim], turned by its position, in bfloat16.

        They become panels of pairs, uint32 [tokens, panels, dim / 2, 32], or the token's row in pages.
        """
        places = {"out": None, "pages": out.handle} if isinstance(out, Pages) else {"out": out, "pages": None}
        start, stride = _columns(x)
        self._add("turn", x=start, stride=stride, heads=heads, **turning.fields(), **places)

    def compressor_state(self, values: Float32Array, gates: Float32Array, position: Float32Array, state: Pages) -> None:
        """The tokens' rows of `state`, [values | gates + position[p % ratio]]: [tokens, width] and [ratio, width]."""
        ratio, width = position.shape
        (values_start, stride), (gates_start, gates_stride) = _columns(values), _columns(gates)
        if stride != gates_stride:
            raise ValueError(f"values and gates lie {stride} and {gates_stride} numbers apart")
        inputs = {"values": values_start, "gates": gates_start, "position": position, "stride": stride}
        self._add("compressor_state", **inputs, width=width, ratio=ratio, pages=state.handle)

    def compress(self, state: Pages, width: int, turning: Turning, entries: Pages) -> None:
        """The entries that tokens of the step complete, from states of `width` values; see csrc/ops.h."""
        self._add("compress", state=state.handle, width=width, **turning.fields(), pages=entries.handle)

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
        start, stride = _columns(weights)
        inputs = {"queries": queries, "weights": start, "stride": stride, "scale": scale, "keys": keys.handle}
        sizes = {"heads": weights.shape[1], "dim": turning.dim, "top": chosen.shape[1], "most": scores.shape[1]}
        self._add("index", **inputs, **sizes, scores=scores, chosen=chosen)

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
        inputs = {"queries": queries, "sinks": sinks, "cos": turning.cos, "sin": turning.sin, "chosen": chosen}
        dims = {"heads": sizes.heads, "dim": turning.dim, "rotary": turning.rotary}
        counts = {"window": sizes.window, "groups": sizes.groups, "top": top}
        pages = {"rows": rows.handle, "entries": None if entries is None else entries.handle}
        self._add("latent_attend", **inputs, **dims, **counts, **pages, out=out)

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
        if seconds is not None and len(seconds) != len(self.names):
            raise ValueError(f"seconds must be {len(self.names)} numbers, not {len(seconds)}")
        groups = self._groups.array([(s, *_columns(table)) for s, table in zip(slots, block_tables, strict=True)])
        counts = (len(token_ids), len(context_lens), len(logits_rows))
        arrays = (token_ids, positions, query_start, context_lens, logits_rows, groups)
        self._lib.replay(self._handle, *counts, *arrays, seconds)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._lib.forget(self._handle)
            self._handle = None
