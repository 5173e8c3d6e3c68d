"""DeepSeek V4 on the CPU kernels: the step recorded once, operation by operation. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from pypto_serving.kernels import (
    GATE_HALF,
    PANEL,
    Engine,
    Matrix,
    MlaSizes,
    NativeCollectives,
    NormRopeParams,
    PagedRows,
    Recording,
    Routing,
    Scoring,
    StepRows,
    StripColumns,
)
from pypto_serving.model.deepseek_v4.buffers import Arenas, DeepseekV4Buffers, layer_spans
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config, LayerKind
from pypto_serving.model.deepseek_v4.inventory import DeepseekV4Inventory
from pypto_serving.model.packed_weights import PackedWeights
from pypto_serving.model.products import AttentionShare, Feed, columns_of, cut, rows_of
from pypto_serving.model.rope import rope_tables
from pypto_serving.parallel.topology import Rank
from pypto_serving.types.arrays import Float32Array
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import Spans
from pypto_serving.util import ceil_div

LOG2_E = math.log2(math.e)
_ROUTER_UNIT = 4
"""Outputs that the router computes at once."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The shared data of a rank's recorders: its part of the weights, the KV arenas, the activations."""

    model: DeepseekV4Config
    weights: PackedWeights
    rank: Rank
    peers: NativeCollectives
    attention: AttentionShare
    buffers: DeepseekV4Buffers
    arenas: Arenas
    rope_tables: Mapping[LayerKind, tuple[Float32Array, Float32Array]]


class LayerRecorder:
    """Records layers of a model, or a rank's part of them, into `step`. Recorders of a model share all other data.

    Ranks of a stage split every matrix by its outputs, and gather outputs if they need all. Each rank computes data
    shared by all heads, such as rows of the KV cache, so all write the same bytes. If ranks split the rows of
    attention, each has the whole matrices of attention.
    """

    def __init__(self, step: Recording, part: ModelPart, config: EngineConfig) -> None:
        self.step, self._part = step, part
        self._model, self._weights, self._buffers = part.model, part.weights, part.buffers
        self._rank, self._peers, self._attention = part.rank, part.peers, part.attention
        self._products = part.buffers.products(step, exact=config.model.activations == "bf16")
        self._head_is_int8 = config.model.head == "int8"

    def layer(self, layer: int) -> None:
        """Record a layer: the streams after it, and its rows of the KV cache."""
        b, prefix = self._buffers, self._model.prefix(layer)
        with self._attention.of(self.step, b.streams) as streams:
            self._hyper_connection_pre(streams, f"{prefix}hc_attn")
            self._record_attention(layer)
            self._hyper_connection_post(streams, self._attention.rank, self._attention.peers)
        self._hyper_connection_pre(b.streams, f"{prefix}hc_ffn")
        self._record_experts(layer)
        self._hyper_connection_post(b.streams, self._rank, self._peers)

    def embed(self, out: Float32Array) -> None:
        """Record out [tokens, ..., hidden] = the embeddings of the tokens."""
        if mine := self._rank.vocabulary(self._model.vocab_size):
            self.step.embed(self._weights.table("embed.weight", mine), out, mine.start)
        self._peers.barrier(self.step, out)

    def logits(self, prefix: str = "") -> None:
        """Record the logits of the streams, by the head mix and norm called `prefix`."""
        b, mine = self._buffers, self._rank.vocabulary(self._model.vocab_size)
        self._hyper_connection_pre(b.streams, f"{prefix}hc_head", StepRows.LOGITS)
        normed = self._normed(self._weights.exact(f"{prefix}norm.weight"), StepRows.LOGITS)
        head = self._weights.rounded("head", mine) if self._head_is_int8 else self._matrix("head", mine)
        self._products.linear(normed, head, columns_of(b.logits, mine), StepRows.LOGITS)
        self._peers.gather_logits(self.step, b.logits)

    def store_streams(self) -> None:
        """Record writing the streams to the KV cache, from which draft layers read them one token later."""
        self.step.store_rows(self._buffers.streams, self._pages("streams", "stream", self._model.drafts.start))

    def draft_input(self, layer: int) -> None:
        """Record the streams of a draft layer: the previous token's streams joined with the token's embedding.

        stream = e_proj rms(embedding) + h_proj rms(stream of the token before).
        """
        b, prefix, eps = self._buffers, self._model.prefix(layer), self._model.rms_norm_eps
        mine, hidden = self._rank.columns(self._model.hidden_size), self._model.hidden_size
        y, rows = b.y[:, : len(mine)], b.streams.reshape(-1, hidden)
        self.embed(b.embedded)
        enorm = self._weights.exact(f"{prefix}enorm.weight")
        embedding = self._products.normed(b.embedded, enorm, eps, b.normed)
        self._products.linear(embedding, self._matrix(f"{prefix}e_proj", mine), y)
        before = self._pages("streams", "stream", layer)
        for streams in (b.streams, *self._peers.copies(b.streams)):
            self.step.previous_rows(before, streams)
        norm, h_proj = self._weights.exact(f"{prefix}hnorm.weight"), self._matrix(f"{prefix}h_proj", mine)
        normed = self._products.normed(rows, norm, eps, b.stream_rows, StepRows.STREAMS)
        for matrix in h_proj:
            normed.record_for(matrix)
        self._peers.barrier(self.step)
        self._products.linear(normed, h_proj, columns_of(rows, mine), StepRows.STREAMS)
        if mine:
            self.step.hyper_connection_post(y, b.added, b.streams[:, :, mine.start : mine.stop])
        self._peers.barrier(self.step, b.streams)

    def draft_rows(self, layer: int) -> None:
        """Record only a draft layer's rows of the KV cache, which suffice for tokens before the last."""
        with self._attention.of(self.step, self._buffers.streams) as streams:
            self._hyper_connection_pre(streams, f"{self._model.prefix(layer)}hc_attn")
            self._record_latent(layer, self._project(layer))

    def _pages(self, group: str, tensor: str, layer: int) -> PagedRows:
        return self._part.arenas.pages(self.step, group, tensor, layer)

    def _rope(self, layer: int) -> NormRopeParams:
        """Return norm and RoPE of a head in a layer."""
        cos, sin = self._part.rope_tables[self._model.kinds[layer]]
        return NormRopeParams(dim=self._model.head_dim, cos=cos, sin=sin, eps=self._model.rms_norm_eps)

    def _matrix(self, module: str, outputs: range) -> list[Matrix]:
        return self._weights.matrix([module], [outputs])

    def _normed(self, norm: Float32Array, rows: StepRows = StepRows.TOKENS) -> Feed:
        """Return RMSNorm(x) times `norm`."""
        b = self._buffers
        return self._products.normed(b.x, norm, self._model.rms_norm_eps, b.normed, rows)

    def _hyper_connection_pre(self, streams: Float32Array, mixer: str, rows: StepRows = StepRows.TOKENS) -> None:
        """Record x = the weighted sum of streams."""
        b, hyper, eps = self._buffers, self._model.hyper, self._model.rms_norm_eps
        weight, base, scale = (self._weights.exact(f"{mixer}_{name}") for name in ("fn", "base", "scale"))
        ends = rows == StepRows.LOGITS
        scale = np.repeat(scale, [4] if ends else [4, 4, 16])
        mixes, post_comb = (b.head_mixes, None) if ends else (b.mixes, b.post_comb)
        self.step.rms_norm_linear(streams, weight, eps, mixes, rows)
        self.step.hyper_connection_pre(streams, mixes, scale, base, hyper.eps, b.x, post_comb, hyper.iterations)

    def _hyper_connection_post(self, streams: Float32Array, rank: Rank, peers: NativeCollectives) -> None:
        """Record the streams from y: the rank's columns."""
        if mine := rank.columns(self._model.hidden_size):
            y, post_comb = self._buffers.y[:, : len(mine)], self._buffers.post_comb
            self.step.hyper_connection_post(y, post_comb, streams[:, :, mine.start : mine.stop])
        peers.barrier(self.step, streams)

    def _record_attention(self, layer: int) -> None:
        """Record y = wo_b(wo_a(attention)), wo_a by groups, and the writes to the KV cache."""
        b, model, weights, kind = self._buffers, self._model, self._weights, self._model.kinds[layer]
        prefix, eps = f"{model.prefix(layer)}attn.", model.rms_norm_eps
        parts, rope = self._project(layer), self._rope(layer)
        latent = self._products.normed(parts["wq_a"], weights.exact(f"{prefix}q_norm.weight"), eps, b.latent)
        heads, queries = self._attention.rank.heads(model.num_heads), self._record_queries(layer, latent)
        width = len(heads) * model.head_dim
        if heads:
            query_rope = replace(rope, scale=model.head_dim**-0.5 * LOG2_E)
            self.step.norm_rope(queries[:, :width], len(heads), query_rope, b.queries)
        rows = self._record_latent(layer, parts)
        entries = topk_indices = None
        if kind != "swa":
            entries = self._pages("cmp", kind, layer)
            self._record_compressor(f"{prefix}compressor.", parts, f"{kind}_state", layer, rope, entries)
        if kind == "csa":
            topk_indices = b.topk_indices
            self._record_indexer(layer, parts, queries[:, width:], rope)
        sinks = np.zeros(ceil_div(len(heads), PANEL) * PANEL, np.float32)
        sinks[: len(heads)] = weights.exact(f"{prefix}attn_sink")[heads.start : heads.stop] * LOG2_E
        sizes = MlaSizes(heads, model.window, model.num_heads // model.o_groups, begin=model.first_row(layer))
        if heads:
            self.step.mla_attention(b.queries, sinks, rope, sizes, rows, b.attended, entries, topk_indices)
        self._record_output(prefix)

    def _record_latent(self, layer: int, parts: dict[str, Float32Array]) -> PagedRows:
        """Record the tokens' rows of the KV cache, and return those of the layer."""
        rows, norm = self._pages("ori", "kv", layer), f"{self._model.prefix(layer)}attn.kv_norm.weight"
        self.step.norm_rope(parts["wkv"], 1, replace(self._rope(layer), weight=self._weights.exact(norm)), rows)
        return rows

    def _record_queries(self, layer: int, latent: Feed) -> Float32Array:
        """Record the projections of the query latent: heads of attention, then those of the indexer."""
        model, indexer, rank = self._model, self._model.indexer, self._attention.rank
        prefix, kind = f"{model.prefix(layer)}attn.", model.kinds[layer]
        names, outputs = [f"{prefix}wq_b"], [rows_of(rank.heads(model.num_heads), model.head_dim)]
        if kind == "csa":
            assert indexer is not None
            names.append(f"{prefix}indexer.wq_b")
            outputs.append(rows_of(rank.heads(indexer.num_heads), indexer.head_dim))
        self._products.linear(latent, self._weights.matrix(names, outputs), out := self._buffers.heads[kind])
        return out

    def _record_output(self, prefix: str) -> None:
        """Record y = wo_b(wo_a(attended)), wo_a by groups of heads."""
        b, model, rank, peers = self._buffers, self._model, self._attention.rank, self._attention.peers
        width = model.o_groups * model.o_lora_rank
        inner = rank.columns(width)
        peers.barrier(self.step, b.attended)
        for wo_a in self._matrix(f"{prefix}wo_a", inner):
            out = StripColumns(b.out_latent, width, inner.start)
            self.step.linear_groups(b.attended, wo_a, model.o_lora_rank, out)
        peers.barrier(self.step, b.out_latent)
        wo_b = self._matrix(f"{prefix}wo_b", rank.columns(model.hidden_size))
        self._products.linear(self._products.strips(b.out_latent), wo_b, b.y)

    def _project(self, layer: int) -> dict[str, Float32Array]:
        """Record all projections of the normed input. Return their columns by name."""
        prefix, kind = self._model.prefix(layer), self._model.kinds[layer]
        out, named = self._buffers.projected[kind], self._buffers.widths[kind]
        names, widths = [f"{prefix}attn.{name}" for name in named], list(named.values())
        mine = self._attention.rank.columns(sum(widths))
        normed = self._normed(self._weights.exact(f"{prefix}attn_norm.weight"))
        self._products.linear(normed, self._weights.matrix(names, cut(widths, mine)), columns_of(out, mine))
        self._attention.peers.barrier(self.step, out)
        return dict(zip(named, np.split(out, np.cumsum(widths)[:-1], axis=1), strict=True))

    def _record_compressor(
        self,
        prefix: str,
        parts: dict[str, Float32Array],
        group: str,
        layer: int,
        rope: NormRopeParams,
        entries: PagedRows,
    ) -> None:
        local = prefix.split(".attn.")[1]
        kv, gates = parts[f"{local}wkv"], parts[f"{local}wgate"]
        ape = self._weights.exact(f"{prefix}ape")
        state = self._pages(group, "state", layer)
        self.step.compressor_state(kv, gates, ape, state)
        weighted = replace(rope, weight=self._weights.exact(f"{prefix}norm.weight"))
        self.step.compress(state, ape.shape[1], weighted, entries)

    def _record_indexer(
        self, layer: int, parts: dict[str, Float32Array], queries: Float32Array, rope: NormRopeParams
    ) -> None:
        """Record the indexer: its compressor, query RoPE and top-k."""
        b, indexer, rank, peers = self._buffers, self._model.indexer, self._attention.rank, self._attention.peers
        assert indexer is not None
        keys = self._pages("idx", "key", layer)
        query_rope = NormRopeParams(dim=indexer.head_dim, cos=rope.cos, sin=rope.sin)
        key_rope = NormRopeParams(dim=indexer.head_dim, cos=rope.cos, sin=rope.sin, eps=rope.eps)
        prefix = f"{self._model.prefix(layer)}attn.indexer.compressor."
        self._record_compressor(prefix, parts, "csa_inner_state", layer, key_rope, keys)
        if heads := rank.heads(indexer.num_heads):
            self.step.norm_rope(queries, len(heads), query_rope, b.index_queries, heads.start)
        peers.barrier(self.step, b.index_queries)
        scale = (indexer.num_heads * indexer.head_dim) ** -0.5
        inputs = (b.index_queries, parts["indexer.weights_proj"], scale, query_rope, keys)
        tokens = (rank.tensor, rank.topology.tensor)
        self.step.indexer_topk(*inputs, b.topk_indices, b.scores, *tokens)
        peers.barrier(self.step, b.topk_indices)

    def _record_experts(self, layer: int) -> None:
        """Record y = shared expert + weighted sum of the routed experts."""
        b, products, rank, hidden = self._buffers, self._products, self._rank, self._model.hidden_size
        experts, limit = self._model.experts, self._model.experts.limit
        width = experts.intermediate_size
        norm = self._weights.exact(f"{self._model.prefix(layer)}ffn_norm.weight")
        prefix, inner, mine = f"{self._model.prefix(layer)}ffn.", rank.columns(width, GATE_HALF), rank.columns(hidden)
        self._record_router(prefix, norm)
        normed = self._normed(norm)
        shared = self._weights.gate_up([f"{prefix}shared_experts.w1"], [f"{prefix}shared_experts.w3"], [inner])
        products.swiglu(normed, shared, StripColumns(b.gated, width, inner.start), limit)
        self._peers.barrier(self.step, b.router_logits, b.gated)
        y = b.y[:, : len(mine)]
        products.linear(products.strips(b.gated), self._matrix(f"{prefix}shared_experts.w2", mine), y)
        routing = self._route(layer)
        w1, w2, w3 = ([f"{prefix}experts.{e}.{part}" for e in range(experts.count)] for part in ("w1", "w2", "w3"))
        packed = self._weights.experts(rank, (w1, w3, w2), width, hidden)
        products.experts(routing, normed, packed, b.experts, rank, self._peers, y, limit)

    def _record_router(self, prefix: str, norm: Float32Array) -> None:
        b, mine = self._buffers, self._rank.columns(self._model.experts.count, _ROUTER_UNIT)
        router = self._weights.exact(f"{prefix}gate.weight")[mine.start : mine.stop] * norm
        if mine:
            logits = columns_of(b.router_logits, mine)
            self.step.rms_norm_linear(b.x, router, self._model.rms_norm_eps, logits)

    def _route(self, layer: int) -> Routing:
        experts, prefix = self._model.experts, f"{self._model.prefix(layer)}ffn.gate."
        bias = tid2eid = None
        if layer in experts.hash_layers:
            tid2eid = self._weights.ids(f"{prefix}tid2eid", experts.count)
        else:
            bias = self._weights.exact(f"{prefix}bias")
        logits, scoring, mine = self._buffers.router_logits, Scoring.SQRT_SOFTPLUS, self._rank.experts(experts.count)
        return self.step.route(logits, experts.per_token, scoring, experts.scale, bias, tid2eid, mine)


class NativeDeepseekV4:
    """Owns packed weights, the arenas of all KV groups and the recorded step of a DeepSeek V4 model, or a rank's part.

    A block is laid out by tensor, then layer, then row. Residual streams, compressor states, hyper-connections and
    routing are float32. `logits` is float32 [max_logits, vocab]. `draft_step` computes draft layers for one token of
    each row, with logits of the token after the next; None without draft layers. Draft layers are in the last stage,
    which has the streams and the output layer; in other stages, `draft_step` is empty.
    """

    layout = "block, tensor, layer, row"
    """Order of the dimensions of a block's pages; part of the fingerprint."""

    @staticmethod
    def name(model: DeepseekV4Config, config: EngineConfig) -> str:
        """Return a name of program and arithmetic for the fingerprint."""
        return f"deepseek-v4-native-2 {model.storage.name}".rstrip()

    @staticmethod
    def kv_spans(model: DeepseekV4Config, config: EngineConfig, rank: Rank) -> list[Spans]:
        """Return, per KV group, the bytes of a block that a rank reads and writes, which all heads share."""
        layers = rank.layers(model.num_layers)
        end = model.drafts.stop if rank.projects else layers.stop
        return [layer_spans(group, range(layers.start, end)) for group in config.cache.groups]

    def __init__(
        self,
        model: DeepseekV4Config,
        weights: PackedWeights,
        engine: Engine,
        config: EngineConfig,
        rank: Rank | None = None,
        peers: NativeCollectives | None = None,
    ) -> None:
        inventory = DeepseekV4Inventory(model, weights.headers)
        weights.require(inventory.expected(), inventory.ignores, inventory.schemes, inventory.sizes())
        rank, peers = rank or Rank(), peers or NativeCollectives()
        self.step = Recording(engine)
        self.draft_step = Recording(engine) if model.drafts else None
        arenas, attention = Arenas(config, peers), AttentionShare(rank, peers)
        self._buffers, ropes = (
            DeepseekV4Buffers(model, config, attention, peers),
            rope_tables(model.ropes(), config.limits.max_model_len),
        )
        self.arenas, self.logits = arenas.blocks, self._buffers.logits
        self._record(config, ModelPart(model, weights, rank, peers, attention, self._buffers, arenas, ropes))
        weights.finish()

    def _record(self, config: EngineConfig, part: ModelPart) -> None:
        b, model, rank = part.buffers, part.model, part.rank
        record = LayerRecorder(self.step, part, config)
        if rank.embeds:
            record.embed(b.streams)
        part.peers.begin_stage(self.step, b.streams)
        for layer in rank.layers(model.num_layers):
            record.layer(layer)
        if rank.projects:
            if model.drafts:
                record.store_streams()
            record.logits()
            for layer in model.drafts:
                record.draft_input(layer)
                record.draft_rows(layer)
        part.peers.end_stage(self.step, b.streams, b.logits)
        if self.draft_step is not None and rank.projects:
            self._record_drafting(LayerRecorder(self.draft_step, part, config), part)

    def _record_drafting(self, record: LayerRecorder, part: ModelPart) -> None:
        """Record a drafting step. It stores its streams in place of the future token's, for use by the next draft."""
        (layer,) = part.model.drafts
        record.draft_input(layer)
        record.layer(layer)
        record.store_streams()
        record.logits(part.model.prefix(layer))
        part.peers.hand_over(record.step, part.buffers.logits)
