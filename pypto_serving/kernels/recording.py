"""Record a step as a list of operations, which one native call replays. The recording keeps its arrays alive."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.kernels.abi import Handle
from pypto_serving.kernels.constants import PANEL
from pypto_serving.kernels.engine import Engine
from pypto_serving.kernels.forms import (
    BF16,
    GroupStrips,
    Int8Strips,
    Matrix,
    StripColumns,
    Strips,
    activations,
    row_words,
    strip_columns,
)
from pypto_serving.kernels.links import Link, Mirrors, RankBarrier, RanksGone
from pypto_serving.kernels.operands import (
    UNGROUPED,
    Epilogue,
    KVCacheLayer,
    MlaSizes,
    NormRopeParams,
    PagedRows,
    Routing,
    Scoring,
    StepRows,
    first_row,
    gemm_fields,
    routing_fields,
    strip_words,
)
from pypto_serving.types.arrays import Array, BFloat16Array, Float32Array, Int32Array, PairArray, UInt8Array

StepArrays = tuple[Array, Array, Array, Array, Array, Sequence[Array], Sequence[Array]]
"""The arrays of a step, in the order of `Recording.replay`'s parameters."""


class Recording:
    """A step: operations in the order of recording, replayed by one native call.

    Each method records one operation of csrc/ops.h. Its docstring describes the effect of replaying the operation.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lib = engine, engine._lib
        self._handle = self._lib.record(engine._handle)
        self._groups = self._lib.structs["GroupTables"]
        self._kept: list[object] = []
        self.names: list[str] = []

    def _add(self, name: str, **fields: Any) -> Handle:
        """Record the operation `name` of csrc/ops.h with these fields, and keep their arrays alive.

        Raises TypeError or ValueError for fields of wrong types.
        """
        handle = self._lib.functions[name](self._handle, **fields)
        self._keep(fields)
        self.names.append(name)
        assert isinstance(handle, Handle)
        return handle

    def _keep(self, fields: Mapping[str, Any]) -> None:
        self._kept.extend(value for value in fields.values() if isinstance(value, np.ndarray))

    def embed(self, table: BFloat16Array | Matrix, x: Float32Array, first: int = 0) -> None:
        """Look up token embeddings: x [tokens, width] = rows of `table` [count, width].

        The table has the tokens from `first` on; rows of other tokens are not written. x may be [tokens, copies,
        width]; each row is then written `copies` times. A table may be packed, as a tied output layer is; ValueError
        is raised for forms that cannot be looked up.
        """
        sources: dict[str, Any] = {"table": table, "packed": None, "scales": None} | BF16.fields()
        if isinstance(table, Matrix):
            if not table.form.embeds:
                raise ValueError(f"embeddings cannot be {table.form}")
            sources = {"table": None, "packed": table.words, "scales": table.scales} | table.form.fields()
        count = table.n if isinstance(table, Matrix) else len(table)
        sizes = {"first": first, "count": count, "width": x.shape[-1], "copies": math.prod(x.shape[1:-1])}
        self._add("embed", **sources, **sizes, x=x)

    def rms_norm(
        self, x: Float32Array, weight: Float32Array, eps: float, out: Strips, rows: StepRows = StepRows.TOKENS
    ) -> None:
        """RMSNorm (arXiv:1910.07467) of x [tokens, width] times `weight` [width], into strips.

        x may be columns of an array. Int8 strips are quantized per row or per SCALED inputs.
        """
        start, stride = first_row(x)
        sizes = {"stride": stride, "width": x.shape[1], "eps": eps, "rows": rows}
        self._add("rms_norm", x=start, weight=weight, **sizes, **activations(out), **strip_words(out, "out", "scales"))

    def quantize(self, x: PairArray, k: int, out: Int8Strips | GroupStrips, routing: Routing | None = None) -> None:
        """Quantize bfloat16 strips [tokens, k] to int8, symmetrically: the largest magnitude under each scale is 127.

        There is one scale per row, or per SCALED inputs. With `routing`, the rows are expert inputs.
        """
        of = None if routing is None else routing.handle
        self._add("quantize", routing=of, x=x, k=k, **activations(out), **strip_words(out, "out", "scales"))

    def linear(
        self,
        x: Strips,
        matrix: Matrix,
        out: Float32Array,
        rows: StepRows = StepRows.TOKENS,
        routing: Routing | None = None,
    ) -> None:
        """GEMM: out [rows, n] = x W^T + b. `out` may be columns of an array.

        With `routing`, a grouped GEMM: out [entries, n] = x W_e^T, with the matrix of each entry's expert e.
        """
        self._linear(x, matrix, Epilogue.STORE, out, rows, routing)

    def linear_add(self, x: Strips, matrix: Matrix, out: Float32Array) -> None:
        """GEMM with residual: out [tokens, n] += x W^T + b. `out` may be columns of an array."""
        self._linear(x, matrix, Epilogue.ADD, out)

    def linear_swiglu(
        self,
        x: Strips,
        matrix: Matrix,
        out: PairArray | StripColumns,
        limit: float = math.inf,
        gates: Float32Array | None = None,
        routing: Routing | None = None,
    ) -> None:
        """GEMM with SwiGLU (arXiv:2002.05202): silu(x G^T) * (x U^T) into strips.

        `matrix` is packed from the halves gate G and up U. With `gates`, x G^T [tokens, n], it is only U.
        x G^T is clamped to at most `limit`, x U^T to [-limit, limit]. `routing` as in `linear`.
        """
        epilogue = Epilogue.SWIGLU if gates is None else Epilogue.STRIPS
        self._linear(x, matrix, epilogue, out, routing=routing, limit=limit, gates=gates)

    def linear_groups(self, x: PairArray, matrix: Matrix, group: int, out: PairArray | StripColumns) -> None:
        """Grouped GEMM: x_g W_g^T for each `group` of columns of `out`, into strips.

        The groups' strips x_g lie one after the other. Raises ValueError if a group is not whole panels.
        """
        if group % PANEL or (isinstance(out, StripColumns) and out.first % PANEL):
            raise ValueError(f"groups of {group} outputs are not whole panels")
        self._linear(x, matrix, Epilogue.STRIPS, out, group=group)

    def _linear(
        self,
        x: Strips,
        matrix: Matrix,
        epilogue: Epilogue,
        out: Array | StripColumns,
        rows: StepRows = StepRows.TOKENS,
        routing: Routing | None = None,
        group: int = UNGROUPED,
        limit: float = math.inf,
        gates: Float32Array | None = None,
    ) -> None:
        sizes = {"group": group, "limit": limit, "rows": rows}
        fields = gemm_fields(x, matrix, epilogue, out) | sizes | {"gates": gates}
        if routing is None:
            self._add("linear", **fields, bias=matrix.bias)
        else:
            self._add("expert_linear", **fields, bias=None, routing=routing.handle, places=matrix.places)

    def qk_norm_rope(
        self,
        x: Float32Array,
        weights: Float32Array,
        cos: Float32Array,
        sin: Float32Array,
        eps: float,
        queries: BFloat16Array,
        cache: KVCacheLayer,
        query_tables: tuple[Float32Array, Float32Array] | None = None,
    ) -> None:
        """QK-norm and RoPE of x [tokens, heads + 2 kv_heads, dim]; write the KV cache.

        `queries` [tokens, heads, dim] receives the queries. `weights` [heads + kv_heads, dim] are the norm weights,
        for queries times the softmax scale, log2(e) / sqrt(dim). `cos` and `sin` are [positions, rotated / 2]: the
        first dimensions of a head are rotated, a multiple of 32. `query_tables`: those of queries, if they differ.
        """
        inputs = {"x": x, "weights": weights, "cos": cos, "sin": sin, "eps": eps, "rotated": 2 * cos.shape[1]}
        inputs |= dict(zip(("query_cos", "query_sin"), query_tables or (cos, sin), strict=True))
        self._add("qk_norm_rope", **inputs, heads=queries.shape[1], queries=queries, **cache.fields())

    def paged_attention(self, queries: BFloat16Array, cache: KVCacheLayer, out: PairArray | StripColumns) -> None:
        """Causal attention of queries [tokens, heads, dim] over the paged KV cache, into strips."""
        _, heads, dim = queries.shape
        self._add("paged_attention", queries=queries, heads=heads, **cache.fields(), **strip_columns(out, heads * dim))

    def route(
        self,
        logits: Float32Array,
        per_token: int,
        scoring: Scoring,
        scale: float = 1.0,
        bias: Float32Array | None = None,
        tid2eid: Int32Array | None = None,
        computed: range | None = None,
    ) -> Routing:
        """Route each token to its top `per_token` experts by router logits [tokens, experts].

        Expert weights are multiplied by `scale`. With Scoring.SQRT_SOFTPLUS, `bias` [experts] is added to the scores
        only for the selection. `tid2eid` [vocab, per_token] selects by token id instead (hash routing). Operations on
        experts have matrices only for the experts `computed`, by default all, and skip the others. Raises ValueError
        if `per_token` exceeds the number of experts.
        """
        experts = logits.shape[1]
        routing = routing_fields(logits, per_token, scoring, range(experts) if computed is None else computed)
        routing |= {"scale": scale, "bias": bias, "tid2eid": tid2eid}
        self._add("router_topk", **routing)
        return Routing(self._add("moe_sort", **routing), experts, per_token)

    def moe_gather(self, routing: Routing, x: Strips, k: int, out: Strips) -> None:
        """Gather each expert's input rows from strips x [tokens, k] into strips `out`."""
        if activations(x) != activations(out):
            raise ValueError("activations and expert inputs must be of one form")
        parts = {**strip_words(x, "x", "scales"), **strip_words(out, "out", "out_scales")}
        self._add("moe_gather", routing=routing.handle, words=row_words(x, k), **parts)

    def moe_combine(self, routing: Routing, y: Float32Array, x: Float32Array) -> None:
        """Add the expert outputs y [entries, width] to x [tokens, width], weighted, in top-k order.

        Both may be columns of arrays.
        """
        (y_start, y_stride), (x_start, x_stride) = first_row(y), first_row(x)
        sizes = {"width": x.shape[1], "y_stride": y_stride, "x_stride": x_stride}
        self._add("moe_combine", routing=routing.handle, y=y_start, x=x_start, **sizes)

    def rms_norm_linear(
        self, x: Float32Array, weight: Float32Array, eps: float, out: Float32Array, rows: StepRows = StepRows.TOKENS
    ) -> None:
        """Unweighted RMSNorm and float32 GEMM: out [rows, outputs] = x / rms(x) W^T.

        x is [tokens, ...], W [outputs, width] with a multiple of 4 outputs. `out` may be columns of an array. Used for
        hyper-connections and routers.
        """
        (outputs, width), (start, stride) = weight.shape, first_row(out)
        sizes = {"width": width, "outputs": outputs, "stride": stride}
        self._add("rms_norm_linear", x=x, weight=weight, **sizes, eps=eps, rows=rows, out=start)

    def hyper_connection_pre(
        self,
        x: Float32Array,
        mixes: Float32Array,
        scale: Float32Array,
        base: Float32Array,
        eps: float,
        out: Float32Array,
        post_comb: Float32Array | None = None,
        iterations: int = 0,
    ) -> None:
        """Compute the block input: out [tokens, width] = sum over streams of pre * x [tokens, streams, width].

        The coefficients pre, post and comb come from mixes [rows, outputs] * scale + base, both [outputs]; comb is
        normalized by `iterations` of Sinkhorn. `post_comb` [tokens, 20] receives post (4) and comb (4 x 4). Without it,
        only pre is computed, for the rows that need logits.
        """
        rows = StepRows.LOGITS if post_comb is None else StepRows.TOKENS
        inputs = {"x": x, "mixes": mixes, "scale": scale, "base": base}
        sizes = {"width": out.shape[1], "eps": eps, "iterations": iterations, "rows": rows}
        self._add("hyper_connection_pre", **inputs, **sizes, post_comb=post_comb, out=out)

    def hyper_connection_post(self, y: Float32Array, post_comb: Float32Array, x: Float32Array) -> None:
        """Update streams x [tokens, streams, width] with the block output y [tokens, width]: post * y + comb^T x.

        Both may be columns of arrays.
        """
        (y_start, y_stride), (x_start, stride) = first_row(y), first_row(x[0])
        sizes = {"width": y.shape[1], "y_stride": y_stride, "stride": stride}
        self._add("hyper_connection_post", y=y_start, post_comb=post_comb, x=x_start, **sizes)

    def pages(
        self, arena: NDArray[np.uint8], offset: int, row_bytes: int, group: int, size: int, ratio: int
    ) -> PagedRows:
        """Describe paged rows: from `offset` on in each block of `arena` [blocks, bytes], one row per `ratio` tokens.

        A block holds `size` tokens. Raises ValueError if the rows do not fit.
        """
        if not 0 <= offset <= arena.shape[1] - size // ratio * row_bytes:
            raise ValueError(f"{size // ratio} rows from byte {offset} on are not within blocks of {arena.shape[1]}")
        strides = {"block_stride": arena.strides[0], "row_bytes": row_bytes}
        fields = {"data": arena[:1, offset:], **strides, "group": group, "size": size, "ratio": ratio}
        self._keep(fields)
        return PagedRows(self._lib.pages(self._handle, **fields))

    def norm_rope(
        self, x: Float32Array, heads: int, rope: NormRopeParams, out: PairArray | PagedRows, first: int = 0
    ) -> None:
        """RMSNorm and RoPE of x [tokens, heads * dim] at each token's position, rounded to bfloat16.

        `out`: query panels, uint32 [tokens, panels, dim / 2, 32], which receive heads from `first` on; or, with one
        head, pages, where the result goes to the token's slot. Raises ValueError for heads beyond the panels.
        """
        places: dict[str, Any] = (
            {"out": None, "pages": out.handle} if isinstance(out, PagedRows) else {"out": out, "pages": None}
        )
        panels = 0 if isinstance(out, PagedRows) else out.shape[1]
        if panels and not 0 <= first <= panels * PANEL - heads:
            raise ValueError(f"{heads} heads from {first} on are not within {panels} panels")
        start, stride = first_row(x)
        sizes = {"stride": stride, "heads": heads, "first": first, "panels": panels}
        self._add("norm_rope", x=start, **sizes, **rope.fields(), **places)

    def store_rows(self, x: Float32Array, pages: PagedRows) -> None:
        """Copy x [tokens, ...] to the tokens' slots."""
        self._add("store_rows", x=x, width=math.prod(x.shape[1:]), pages=pages.handle)

    def previous_rows(self, pages: PagedRows, x: Float32Array) -> None:
        """Copy the row at the position before each token's to x [tokens, ...]; zeros for position 0."""
        self._add("previous_rows", x=x, width=math.prod(x.shape[1:]), pages=pages.handle)

    def compressor_state(self, kv: Float32Array, gates: Float32Array, ape: Float32Array, state: PagedRows) -> None:
        """Write the tokens' compressor state, rows [kv | gates + ape[p % ratio]].

        `kv` and `gates` are [tokens, width]; `ape` [ratio, width] is the learned position bias.
        """
        ratio, width = ape.shape
        (kv_start, stride), (gates_start, gates_stride) = first_row(kv), first_row(gates)
        if stride != gates_stride:
            raise ValueError(f"kv and gates have different row strides: {stride} and {gates_stride}")
        inputs = {"kv": kv_start, "gates": gates_start, "ape": ape, "stride": stride}
        self._add("compressor_state", **inputs, width=width, ratio=ratio, pages=state.handle)

    def compress(self, state: PagedRows, width: int, rope: NormRopeParams, entries: PagedRows) -> None:
        """Compress every window that a token of the step completes into one entry; see Compress in csrc/ops.h."""
        self._add("compress", state=state.handle, width=width, **rope.fields(), pages=entries.handle)

    def indexer_topk(
        self,
        queries: PairArray,
        weights: Float32Array,
        scale: float,
        rope: NormRopeParams,
        keys: PagedRows,
        indices: Int32Array,
        scores: Float32Array,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        """Write the top-k entries of each token that sees more than k to indices [tokens, k], ascending.

        The score is the sum over heads of weight * scale * relu(query . key). `queries` are in panels; `weights` are
        [tokens, heads]. `scores` [INDEXER_TOKENS, most entries that a token sees] is scratch memory. Only part `part`
        of `parts` of the tokens is computed. Raises ValueError if there is no such part.
        """
        if not 0 <= part < parts:
            raise ValueError(f"part {part} of {parts}")
        start, stride = first_row(weights)
        inputs = {"queries": queries, "weights": start, "stride": stride, "scale": scale, "keys": keys.handle}
        sizes = {"heads": weights.shape[1], "dim": rope.dim, "topk": indices.shape[1], "max_entries": scores.shape[1]}
        sizes |= {"part": part, "parts": parts}
        self._add("indexer_topk", **inputs, **sizes, scores=scores, indices=indices)

    def mla_attention(
        self,
        queries: PairArray,
        sinks: Float32Array,
        rope: NormRopeParams,
        sizes: MlaSizes,
        kv: PagedRows,
        out: PairArray,
        compressed_kv: PagedRows | None = None,
        indices: Int32Array | None = None,
    ) -> None:
        """MLA over the sliding window of `kv` and over `compressed_kv`, whose entries are K and V of all heads.

        `queries` are in panels. With `indices`, only the indexer's top-k compressed entries are used. The attention
        sinks [panels * 32] are in base 2. The output is rotated back by the query position (inverse RoPE), written to
        strips [tokens, group * dim] of each group of heads, one group after the other.
        """
        topk = 0 if indices is None else indices.shape[1]
        inputs = {"queries": queries, "sinks": sinks, "cos": rope.cos, "sin": rope.sin, "indices": indices}
        heads = {"heads": len(sizes.heads), "first": sizes.heads.start, "group": sizes.group}
        counts = {"dim": rope.dim, "rope_dim": rope.rope_dim, "topk": topk}
        counts |= {"window": sizes.window, "begin": sizes.begin}
        pages = {"kv": kv.handle, "compressed_kv": None if compressed_kv is None else compressed_kv.handle}
        self._add("mla_attention", **inputs, **heads, **counts, **pages, out=out)

    def wait(self, barrier: RankBarrier) -> None:
        """Wait until every rank has reached this operation; then all of their writes are visible."""
        self._lib.record_barrier(self._handle, barrier.handle)
        self._kept.append(barrier)
        self.names.append("barrier")

    def exchange(self, link: Link, sent: Mirrors, received: Mirrors, counts: UInt8Array) -> None:
        """Exchange arrays with the other host: send this host's part of `sent`, receive the other's of `received`.

        If that fails, close the barrier with these `counts`.
        """
        sizes = {"num_sent": len(sent), "num_received": len(received), "num_counts": RankBarrier.num_ranks(counts)}
        arrays = {"sent": sent.structs, "received": received.structs, "counts": counts}
        self._add("exchange", link=link.handle, **arrays, **sizes)
        self._kept += [link, sent, received]

    def send_slot(self, link: Link, mirrors: Mirrors, counts: UInt8Array) -> None:
        """Send the array of the step's slot, one of `mirrors`; if that fails, close the barrier with these `counts`."""
        num_counts = RankBarrier.num_ranks(counts)
        self._add("send_slot", link=link.handle, mirrors=mirrors.structs, counts=counts, num_counts=num_counts)
        self._kept += [link, mirrors]

    def pass_rows(
        self, source: Float32Array, out: Float32Array, part: int, parts: int, rows: StepRows = StepRows.TOKENS
    ) -> None:
        """Copy part `part` of `parts` of the columns of all rows to the same columns of `out`.

        One side may have a further first dimension, the steps in flight, indexed by the step's slot.
        """
        sides = {"from": source, "to": out}
        slots = {
            f"{name}_slot": each.strides[0] // 4 * (each.ndim > other.ndim)
            for (name, each), other in zip(sides.items(), (out, source), strict=True)
        }
        width = math.prod(min(source, out, key=np.ndim).shape[1:])
        self._add("pass", **sides, **slots, width=width, part=part, parts=parts, rows=rows)

    @contextmanager
    def share_of_rows(
        self, rank: int, ranks: int, token_cost: int, x: Float32Array, mine: Float32Array
    ) -> Iterator[None]:
        """Restrict operations recorded in the block to the share of rows that `rank` of `ranks` computes.

        The share of x [tokens, ...] is copied to `mine`, from token 0 on, and back at the end. All shares have about
        the same work: a token costs `token_cost`, plus 1 per token of its context. Attention in all layers uses the
        same shares.
        """
        width = math.prod(x.shape[1:])
        self._lib.begin_share(self._handle, rank, ranks, token_cost)
        self._add("copy_share", **{"from": x, "to": mine, "width": width, "returns": 0})
        yield
        self._add("copy_share", **{"from": mine, "to": x, "width": width, "returns": 1})
        self._lib.end_share(self._handle)

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
        slot: int = 0,
    ) -> None:
        """Compute one step. The arrays are those of StepInputs: int32, contiguous except between the tables' rows.

        `slot` is its index among the steps in flight. The time of each operation is added to `seconds` [operations].
        Raises ValueError if `seconds` has another length, RanksGone if a barrier was closed.
        """
        if seconds is not None and len(seconds) != len(self.names):
            raise ValueError(f"seconds must be {len(self.names)} numbers, not {len(seconds)}")
        groups = self._tables(slots, block_tables)
        counts = (len(token_ids), len(context_lens), len(logits_rows), slot)
        arrays = (token_ids, positions, query_start, context_lens, logits_rows, groups)
        if not self._lib.replay(self._handle, *counts, *arrays, seconds):
            raise RanksGone

    def _tables(self, slots: Sequence[Array], block_tables: Sequence[Array]) -> NDArray[np.void]:
        return self._groups.array([(s, *first_row(table)) for s, table in zip(slots, block_tables, strict=True)])

    def replay_published(
        self, board: UInt8Array, buffers: Sequence[StepArrays], drafting: Recording | None = None
    ) -> None:
        """Replay each step published on a StepBoard in the memory `board`, until a barrier or the board is closed.

        A step takes the first elements of the arrays in one of `buffers`. Steps in the last buffer replay `drafting`
        instead, if given.
        """
        groups = [self._tables(slots, tables) for *_, slots, tables in buffers]
        fields = [(*arrays[:5], tables) for arrays, tables in zip(buffers, groups, strict=True)]
        other = None if drafting is None else drafting._handle
        self._lib.replay_published(
            self._handle, other, board, self._lib.structs["StepArrays"].array(fields), len(buffers)
        )

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._lib.forget(self._handle)
            self._handle = None
