"""Decoders on the CPU kernels: the step recorded once, operation by operation. Torch-free."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pypto_serving.kernels import (
    GATE_HALF,
    Engine,
    KVCacheLayer,
    Matrix,
    NativeCollectives,
    Recording,
    Scoring,
    StepRows,
    StripColumns,
    zeros,
)
from pypto_serving.model.decoder.inventory import DecoderInventory
from pypto_serving.model.decoder.recipe import AttentionRecipe, DecoderConfig, ExpertsRecipe
from pypto_serving.model.packed_weights import PackedWeights
from pypto_serving.model.products import AttentionShare, ExpertBuffers, Feed, Products, columns_of, rows_of
from pypto_serving.model.rope import Rope, Tables
from pypto_serving.parallel.topology import Rank
from pypto_serving.types.arrays import BFloat16Array, Float32Array, PairArray, UInt8Array
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import KVCacheGroupSpec, Spans

LOG2_E = math.log2(math.e)
NO_NORM = -1.0
"""The epsilon with which kernels leave heads as they are, times the weights; see csrc/rows.h."""


class NativeDecoder:
    """Owns packed weights, KV pages and the recorded step of a decoder, or one rank's part of them.

    For `pages` see KVCacheLayer, and csrc/ops.h for the layout of a head's part of a block. `logits` is float32
    [max_logits, vocab]. Ranks of a stage split every matrix by its outputs, and gather outputs if they need all. If
    they split the rows of attention, each has the whole matrices of attention.
    """

    draft_step = None

    layout = "block, layer, k or v, head, panels of 32 tokens: keys dim / 2 x 32 x 2, values dim / 32 x 16 x 32 x 2"
    """Order of the dimensions of a block's pages in bfloat16; part of the fingerprint, as the dtype is."""

    @staticmethod
    def name(model: DecoderConfig, config: EngineConfig) -> str:
        """Return a name of program and weights for the fingerprint, with the output layer if it embeds tokens."""
        rounded = "int8 embedding" if config.model.head == "int8" and model.tied_embeddings else ""
        return " ".join(filter(None, ("decoder-native-1", DecoderInventory(model).quantization(), rounded)))

    @staticmethod
    def kv_spans(model: DecoderConfig, config: EngineConfig, rank: Rank) -> list[Spans]:
        """Return, per KV group, the bytes of a block that a rank reads and writes."""
        _, heads = _heads(model, rank)
        each = config.cache.groups[0].block_bytes // (model.num_layers * 2 * model.num_kv_heads)
        firsts = [
            half * model.num_kv_heads for layer in rank.layers(model.num_layers) for half in (2 * layer, 2 * layer + 1)
        ]
        return [tuple((each * (first + heads.start), each * (first + heads.stop)) for first in firsts)]

    def __init__(
        self,
        model: DecoderConfig,
        weights: PackedWeights,
        engine: Engine,
        config: EngineConfig,
        rank: Rank | None = None,
        peers: NativeCollectives | None = None,
    ) -> None:
        inventory = DecoderInventory(model, weights.headers)
        weights.require(inventory.expected(), inventory.ignores, inventory.schemes, inventory.sizes())
        self.model, self._weights = model, weights
        self._rank, self._peers = rank or Rank(), peers or NativeCollectives()
        self.pages = _pages(config.cache.groups[0], config.cache.num_blocks[0], model, self._peers)
        self.arenas = (self.pages.view(np.uint8).reshape(len(self.pages), -1),)
        self.step = Recording(engine)
        self._attention = AttentionShare(self._rank, self._peers)
        self._buffers = DecoderBuffers(model, config, self._attention, self._peers)
        self.logits = self._buffers.logits
        self._products = self._buffers.products(self.step, exact=config.model.activations == "bf16")
        self._record(config)
        weights.finish()
        del self._weights

    def _record(self, config: EngineConfig) -> None:
        model, rank, mine = self.model, self._rank, self._rank.vocabulary(self.model.vocab_size)
        head: list[Matrix] = []
        if rank.projects or (rank.embeds and model.tied_embeddings):
            rounded = config.model.head == "int8"
            head = self._weights.rounded(model.head, mine) if rounded else self._matrix(model.head, mine)
        if rank.embeds:
            self._record_embedding(head, mine)
        self._peers.begin_stage(self.step, self._buffers.x)
        layers = rank.layers(model.num_layers)
        ropes = {model.layers[index].attention.rope for index in layers}
        tables = {rope: _tables(rope, config.limits.max_model_len) for rope in ropes}
        for index in layers:
            with self._attention.of(self.step, self._buffers.x) as x:
                self._record_attention(x, index, *tables[model.layers[index].attention.rope])
            self._record_mlp(index)
        if rank.projects:
            normed, logits = self._normed(self._buffers.x, "model.norm.weight", StepRows.LOGITS), self._buffers.logits
            self._products.linear(normed, head, columns_of(logits, mine), StepRows.LOGITS)
            self._peers.gather_logits(self.step, logits)
        self._peers.end_stage(self.step, self._buffers.x, self.logits)

    def _record_embedding(self, head: list[Matrix], mine: range) -> None:
        """Record x = embeddings; each rank has the embeddings of its tokens."""
        x, module = self._buffers.x, "model.embed_tokens"
        if mine and not self.model.tied_embeddings:
            packed = self._weights.embeds(module)
            table = self._matrix(module, mine)[0] if packed else self._weights.table(f"{module}.weight", mine)
            self.step.embed(table, x, mine.start)
        elif head:
            self.step.embed(head[0], x, mine.start)
        self._peers.barrier(self.step, x)

    def _matrix(self, module: str, outputs: range, bias: bool = False) -> list[Matrix]:
        return self._weights.matrix([module], [outputs], bias)

    def _normed(self, x: Float32Array, norm: str, rows: StepRows = StepRows.TOKENS) -> Feed:
        weight, eps = self._weights.vector(norm), self.model.rms_norm_eps
        return self._products.normed(x, weight, eps, self._buffers.normed, rows)

    def _add_to(
        self, x: Float32Array, rank: Rank, peers: NativeCollectives, strips: PairArray, module: str, bias: bool = False
    ) -> None:
        """Record x += W strips, after all `peers` have written the strips."""
        mine = rank.columns(self.model.hidden_size)
        peers.barrier(self.step, strips)
        matrix = self._matrix(module, mine, bias)
        self._products.linear_add(self._products.strips(strips), matrix, columns_of(x, mine))
        peers.barrier(self.step, x)

    def _record_attention(self, x: Float32Array, index: int, tables: Tables, query_tables: Tables) -> None:
        """Record x += o(attention(qkv(rms_norm(x))))."""
        model, b, share, prefix = self.model, self._buffers, self._attention, f"model.layers.{index}."
        recipe = model.layers[index].attention
        heads, kv_heads = _heads(model, share.rank)
        outputs = [rows_of(part, model.head_dim) for part in (heads, kv_heads, kv_heads)]
        parts = model.qkv(index)
        stored = [part.rows(mine) for part, mine in zip(parts, outputs, strict=True)]
        qkv = self._weights.matrix([part.module for part in parts], stored, bias=recipe.qkv_bias)
        self._products.linear(self._normed(x, f"{prefix}input_layernorm.weight"), qkv, b.projected)
        if heads:
            norms, eps = self._head_norms(recipe, prefix, len(heads), len(kv_heads)), model.rms_norm_eps
            cache = KVCacheLayer(self.pages, index, model.head_dim, kv_heads)
            eps = eps if recipe.head_norms else NO_NORM
            self.step.qk_norm_rope(b.projected, norms, *tables, eps, b.queries, cache, query_tables)
            width = model.num_heads * model.head_dim
            self.step.paged_attention(b.queries, cache, StripColumns(b.attended, width, outputs[0].start))
        self._add_to(x, share.rank, share.peers, b.attended, f"{prefix}self_attn.o_proj", recipe.o_bias)

    def _head_norms(self, recipe: AttentionRecipe, prefix: str, heads: int, kv_heads: int) -> NDArray[np.float32]:
        """Norm weights of query and key heads, [heads + kv_heads, head_dim], with the scores' scale in base 2.

        Without norms they are ones.
        """
        q = k = np.ones(recipe.head_dim, np.float32)
        if recipe.head_norms:
            q, k = (self._weights.vector(f"{prefix}self_attn.{name}_norm.weight") for name in "qk")
        q = (q.astype(np.float64) * (recipe.head_dim**-0.5 * LOG2_E)).astype(np.float32)
        return np.concatenate([np.tile(q, (heads, 1)), np.tile(k, (kv_heads, 1))])

    def _record_mlp(self, index: int) -> None:
        """x += down(silu(gate(norm(x))) * up(norm(x))), or the chosen experts' weighted sum of that."""
        b, prefix, recipe = self._buffers, f"model.layers.{index}.", self.model.layers[index].mlp
        normed = self._normed(b.x, f"{prefix}post_attention_layernorm.weight")
        if isinstance(recipe, ExpertsRecipe):
            self._record_experts(normed, prefix, recipe)
            return
        gate, up = self.model.gate_up(index, recipe.width)
        mine = self._rank.columns(recipe.width, GATE_HALF)
        gate_up = self._weights.gate_up([gate.module], [up.module], [gate.rows(mine)], [up.rows(mine)], recipe.bias)
        self._products.swiglu(normed, gate_up, StripColumns(b.gated, recipe.width, mine.start))
        self._add_to(b.x, self._rank, self._peers, b.gated, prefix + self.model.names.down, recipe.bias)

    def _record_experts(self, normed: Feed, prefix: str, experts: ExpertsRecipe) -> None:
        b, rank, count, hidden, names = (
            self._buffers,
            self._rank,
            experts.count,
            self.model.hidden_size,
            self.model.names,
        )
        gates, ups, downs = zip(*([prefix + part for part in names.expert(e)] for e in range(count)), strict=True)
        self._products.linear(normed, self._weights.matrix([prefix + names.router]), b.router_logits)
        scoring = Scoring.RENORMALIZED if experts.normalize else Scoring.SOFTMAX
        routing = self.step.route(b.router_logits, experts.per_token, scoring, computed=rank.experts(count))
        packed = self._weights.experts(rank, (gates, ups, downs), experts.width, hidden)
        out = columns_of(b.x, rank.columns(hidden))
        self._products.experts(routing, normed, packed, b.experts, rank, self._peers, out)
        self._peers.barrier(self.step, b.x)


def _tables(rope: Rope, max_model_len: int) -> tuple[Tables, Tables]:
    """Compute the tables of cosines and sines for keys, and those for queries."""
    tables, factors = rope.tables(max_model_len), rope.query_factors(max_model_len)
    return tables, tables if factors is None else (tables[0] * factors, tables[1] * factors)


def _heads(model: DecoderConfig, rank: Rank) -> tuple[range, range]:
    """Return the query heads of a rank, and their key and value heads."""
    heads = rank.heads(model.num_heads, model.num_kv_heads)
    return heads, rank.kv_heads(model.num_kv_heads) if heads else range(0)


class DecoderBuffers:
    """Activations of the largest step; gathered ones are shared by ranks. For layouts see kernels/forms.py."""

    def __init__(
        self, model: DecoderConfig, config: EngineConfig, attention: AttentionShare, peers: NativeCollectives
    ) -> None:
        tokens, rows = config.limits.max_num_batched_tokens, config.limits.max_logits
        heads, kv_heads = (len(part) for part in _heads(model, attention.rank))
        width, widest = model.num_heads * model.head_dim, max(model.mlp_widths, default=0)
        self.x = peers.zeros(np.float32, tokens, model.hidden_size)
        self.normed = zeros(np.uint32, max(tokens, rows) * model.hidden_size // 2)
        self.projected = zeros(np.float32, tokens, (heads + 2 * kv_heads) * model.head_dim)
        self.queries = zeros(np.uint16, tokens, heads, model.head_dim)
        self.attended = attention.peers.zeros(np.uint32, tokens * width // 2)
        self.gated = peers.zeros(np.uint32, tokens * widest // 2)
        self.logits = peers.zeros(np.float32, rows, model.vocab_size)
        self._sizes = [max(tokens, rows), max(model.hidden_size, width, widest)]
        if experts := model.experts:
            entries = tokens * experts.per_token
            self.router_logits = zeros(np.float32, tokens, experts.count)
            self.experts = ExpertBuffers(entries, model.hidden_size, experts.width, peers)
            self._sizes += [entries, max(model.hidden_size, experts.width)]

    def products(self, step: Recording, exact: bool) -> Products:
        """Return the Products that records products of these activations."""
        return Products(step, exact, *self._sizes)


def _pages(
    group: KVCacheGroupSpec, num_blocks: int, model: DecoderConfig, peers: NativeCollectives
) -> BFloat16Array | UInt8Array:
    heads = (num_blocks, model.num_layers, 2, model.num_kv_heads)
    num_bytes = group.block_bytes // math.prod(heads[1:])
    if group.tensors[0].dtype == "int8":
        return peers.zeros_for_all(np.uint8, *heads, num_bytes)
    return peers.zeros_for_all(np.uint16, *heads, num_bytes // 2)
