"""DeepSeek V4 on the CPU kernels: the step recorded once, operation by operation. Torch-free."""

from __future__ import annotations

import math

import numpy as np

from pypto_serving.kernels import (
    INDEXER_TOKENS,
    PANEL,
    Engine,
    MlaSizes,
    NormRopeParams,
    Pages,
    Recording,
    Rows,
    Scoring,
    StripColumns,
    zeros,
)
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.inventory import DeepseekV4Inventory
from pypto_serving.model.deepseek_v4.parts import LayerKind
from pypto_serving.model.packed import PackedWeights
from pypto_serving.model.products import Feed, Products
from pypto_serving.model.rope import rope_tables
from pypto_serving.types.arrays import Float32Array, PairArray
from pypto_serving.types.config import EngineConfig
from pypto_serving.util import ceil_div

LOG2_E = math.log2(math.e)
_POST_COMB = 20
"""Hyper-connection coefficients post (4) and comb (4 x 4) of a token."""


class NativeDeepseekV4:
    """Owns packed weights, the arenas of all KV groups and the recorded step of a DeepSeek V4 model.

    A block is laid out by tensor, then layer, then row. Residual streams, compressor states, hyper-connections and
    routing are float32. `logits` is float32 [max_logits, vocab].
    """

    layout = "block, tensor, layer, row"
    """Order of the dimensions of a block's pages; part of the fingerprint."""

    @staticmethod
    def name(model: DeepseekV4Config, config: EngineConfig) -> str:
        """Name program and arithmetic, for the fingerprint."""
        return f"deepseek-v4-native-2 {model.storage.name}".rstrip()

    def __init__(self, model: DeepseekV4Config, weights: PackedWeights, engine: Engine, config: EngineConfig) -> None:
        inventory = DeepseekV4Inventory(model, weights.headers)
        weights.require(inventory.expected(), inventory.ignores, inventory.schemes(), inventory.sizes())
        self.model, self._weights = model, weights
        self.step = Recording(engine)
        self._arenas = Arenas(config, self.step)
        self.arenas = self._arenas.blocks
        self._buffers = Buffers(model, config)
        self._products = self._buffers.products(self.step, exact=config.activations == "bf16")
        self.logits = self._buffers.logits
        self._record(config)
        del self._weights

    def _record(self, config: EngineConfig) -> None:
        b, model = self._buffers, self.model
        self.step.embed(self._weights.table("embed.weight"), b.streams)
        tables = rope_tables(model.ropes(), config.max_model_len)
        for layer, kind in enumerate(model.kinds):
            self._record_hyper_connection_pre(f"layers.{layer}.hc_attn")
            self._record_attention(layer, kind, *tables[kind])
            self.step.hyper_connection_post(b.y, b.post_comb, b.streams)
            self._record_hyper_connection_pre(f"layers.{layer}.hc_ffn")
            self._record_experts(layer)
            self.step.hyper_connection_post(b.y, b.post_comb, b.streams)
        self._record_hyper_connection_pre("hc_head", Rows.LOGITS)
        normed = self._normed(self._weights.exact("norm.weight"), Rows.LOGITS)
        head = self._weights.rounded("head") if config.head == "int8" else self._weights.matrix(["head"])
        self._products.linear(normed, head, b.logits, Rows.LOGITS)

    def _normed(self, norm: Float32Array, rows: Rows = Rows.TOKENS) -> Feed:
        """Return RMSNorm(x) times `norm`."""
        b = self._buffers
        return self._products.normed(b.x, norm, self.model.rms_norm_eps, b.normed, rows)

    def _record_hyper_connection_pre(self, mixer: str, rows: Rows = Rows.TOKENS) -> None:
        """Record x = the weighted sum of streams."""
        b, hyper, eps = self._buffers, self.model.hyper, self.model.rms_norm_eps
        weight, base, scale = (self._weights.exact(f"{mixer}_{name}") for name in ("fn", "base", "scale"))
        ends = rows == Rows.LOGITS
        scale = np.repeat(scale, [4] if ends else [4, 4, 16])
        mixes, post_comb = (b.head_mixes, None) if ends else (b.mixes, b.post_comb)
        self.step.rms_norm_linear(b.streams, weight, eps, mixes, rows)
        self.step.hyper_connection_pre(b.streams, mixes, scale, base, hyper.eps, b.x, post_comb, hyper.iterations)

    def _record_attention(self, layer: int, kind: LayerKind, cos: Float32Array, sin: Float32Array) -> None:
        """Record y = wo_b(wo_a(attention)), wo_a by groups, and the writes to the KV cache."""
        b, model, weights = self._buffers, self.model, self._weights
        prefix, eps = f"layers.{layer}.attn.", model.rms_norm_eps
        parts = self._project(layer, kind)
        rope = NormRopeParams(dim=model.head_dim, cos=cos, sin=sin, eps=eps)
        latent = self._products.normed(parts["wq_a"], weights.exact(f"{prefix}q_norm.weight"), eps, b.latent)
        width = model.num_heads * model.head_dim
        indexed = [f"{prefix}indexer.wq_b"] if kind == "csa" else []
        self._products.linear(latent, weights.matrix([f"{prefix}wq_b", *indexed]), queries := b.heads[kind])
        query_rope = NormRopeParams(dim=model.head_dim, cos=cos, sin=sin, eps=eps, scale=model.head_dim**-0.5 * LOG2_E)
        self.step.norm_rope(queries[:, :width], model.num_heads, query_rope, b.queries)
        rows = self._arenas.pages("ori", "kv", layer)
        self.step.norm_rope(parts["wkv"], 1, _weighted(rope, weights.exact(f"{prefix}kv_norm.weight")), rows)
        entries = topk_indices = None
        if kind != "swa":
            entries = self._arenas.pages("cmp", kind, layer)
            self._record_compressor(f"{prefix}compressor.", parts, f"{kind}_state", layer, rope, entries)
        if kind == "csa":
            topk_indices = b.topk_indices
            self._record_indexer(layer, parts, queries[:, width:], rope)
        sinks = np.zeros(ceil_div(model.num_heads, PANEL) * PANEL, np.float32)
        sinks[: model.num_heads] = weights.exact(f"{prefix}attn_sink") * LOG2_E
        sizes = MlaSizes(range(model.num_heads), model.window, model.num_heads // model.o_groups)
        self.step.mla_attention(b.queries, sinks, rope, sizes, rows, b.attended, entries, topk_indices)
        (wo_a,) = weights.matrix([f"{prefix}wo_a"])
        self.step.linear_groups(b.attended, wo_a, model.o_lora_rank, b.out_latent)
        self._products.linear(self._products.strips(b.out_latent), weights.matrix([f"{prefix}wo_b"]), b.y)

    def _project(self, layer: int, kind: LayerKind) -> dict[str, Float32Array]:
        """Record all projections of the normed input. Return their columns by name."""
        names, prefix = _projections(kind), f"layers.{layer}.attn."
        normed, out = (
            self._normed(self._weights.exact(f"layers.{layer}.attn_norm.weight")),
            self._buffers.projected[kind],
        )
        self._products.linear(normed, self._weights.matrix([prefix + name for name in names]), out)
        ends = np.cumsum(self._buffers.widths[kind])
        return dict(zip(names, np.split(out, ends[:-1], axis=1), strict=True))

    def _record_compressor(
        self, prefix: str, parts: dict[str, Float32Array], group: str, layer: int, rope: NormRopeParams, entries: Pages
    ) -> None:
        local = prefix.split(".attn.")[1]
        kv, gates = parts[f"{local}wkv"], parts[f"{local}wgate"]
        ape = self._weights.exact(f"{prefix}ape")
        state = self._arenas.pages(group, "state", layer)
        self.step.compressor_state(kv, gates, ape, state)
        weighted = _weighted(rope, self._weights.exact(f"{prefix}norm.weight"))
        self.step.compress(state, ape.shape[1], weighted, entries)

    def _record_indexer(
        self, layer: int, parts: dict[str, Float32Array], queries: Float32Array, rope: NormRopeParams
    ) -> None:
        """Record the indexer: its compressor, query RoPE and top-k."""
        b, indexer = self._buffers, self.model.indexer
        assert indexer is not None
        keys = self._arenas.pages("idx", "key", layer)
        query_rope = NormRopeParams(dim=indexer.head_dim, cos=rope.cos, sin=rope.sin)
        key_rope = NormRopeParams(dim=indexer.head_dim, cos=rope.cos, sin=rope.sin, eps=rope.eps)
        prefix = f"layers.{layer}.attn.indexer.compressor."
        self._record_compressor(prefix, parts, "csa_inner_state", layer, key_rope, keys)
        self.step.norm_rope(queries, indexer.num_heads, query_rope, b.index_queries)
        scale = (indexer.num_heads * indexer.head_dim) ** -0.5
        head_weights = parts["indexer.weights_proj"]
        self.step.indexer_topk(b.index_queries, head_weights, scale, query_rope, keys, b.topk_indices, b.scores)

    def _record_experts(self, layer: int) -> None:
        """Record y = shared expert + weighted sum of the routed experts."""
        b, model, weights, products = self._buffers, self.model, self._weights, self._products
        prefix, experts = f"layers.{layer}.ffn.", model.experts
        norm = weights.exact(f"layers.{layer}.ffn_norm.weight")
        router = weights.exact(f"{prefix}gate.weight") * norm
        names = {part: [f"{prefix}experts.{e}.{part}" for e in range(experts.count)] for part in ("w1", "w2", "w3")}
        bias = tid2eid = None
        if layer in experts.hash_layers:
            tid2eid = weights.ids(f"{prefix}gate.tid2eid", experts.count)
        else:
            bias = weights.exact(f"{prefix}gate.bias")
        self.step.rms_norm_linear(b.x, router, model.rms_norm_eps, b.router_logits)
        logits, per_token = b.router_logits, experts.per_token
        routing = self.step.route(logits, per_token, Scoring.SQRT_SOFTPLUS, experts.scale, bias, tid2eid)
        normed = self._normed(norm)
        shared = weights.gate_up([f"{prefix}shared_experts.w1"], [f"{prefix}shared_experts.w3"])
        width = experts.intermediate_size
        products.swiglu(normed, shared, StripColumns(b.gated, width), experts.limit)
        products.linear(products.strips(b.gated), weights.matrix([f"{prefix}shared_experts.w2"]), b.y)
        rows = products.gathered(routing, normed, b.expert_rows)
        gate_up = weights.gate_up(names["w1"], names["w3"])
        products.expert_swiglu(routing, rows, gate_up, StripColumns(b.expert_gated, width), experts.limit)
        gated = products.strips(b.expert_gated, routing)
        products.expert_linear(routing, gated, weights.several(names["w2"]), b.expert_out)
        self.step.moe_combine(routing, b.expert_out, b.y)


def _projections(kind: LayerKind) -> list[str]:
    """List the projections of attention's normed input."""
    names = ["wq_a", "wkv"]
    if kind != "swa":
        names += ["compressor.wkv", "compressor.wgate"]
    if kind == "csa":
        names += ["indexer.compressor.wkv", "indexer.compressor.wgate", "indexer.weights_proj"]
    return names


def _weighted(rope: NormRopeParams, weight: Float32Array) -> NormRopeParams:
    return NormRopeParams(dim=rope.dim, cos=rope.cos, sin=rope.sin, eps=rope.eps, weight=weight)


class Arenas:
    """Owns the blocks of all KV groups, uint8 [num_blocks, block_bytes] each, and finds a layer's rows in them."""

    def __init__(self, config: EngineConfig, step: Recording) -> None:
        self._groups, self._step = config.groups, step
        counts = zip(config.groups, config.num_blocks, strict=True)
        self.blocks = tuple(zeros(np.uint8, count, group.block_bytes) for group, count in counts)
        self._known: dict[tuple[str, str, int], Pages] = {}

    def pages(self, name: str, tensor: str, layer: int) -> Pages:
        """Return the rows of a tensor of the group `name` in a layer."""
        if (name, tensor, layer) not in self._known:
            self._known[name, tensor, layer] = self._find(name, tensor, layer)
        return self._known[name, tensor, layer]

    def _find(self, name: str, wanted: str, layer: int) -> Pages:
        number = [group.name for group in self._groups].index(name)
        group, offset = self._groups[number], 0
        for tensor in group.tensors:
            layer_bytes = group.block_size // tensor.ratio * tensor.row_bytes
            if tensor.name == wanted:
                offset += tensor.layers.index(layer) * layer_bytes
                place = (number, group.block_size, tensor.ratio)
                return self._step.pages(self.blocks[number], offset, tensor.row_bytes, *place)
            offset += len(tensor.layers) * layer_bytes
        raise KeyError(wanted)


class Buffers:
    """Owns the activations of the largest step; see kernels/engine.py for layouts."""

    def __init__(self, model: DeepseekV4Config, config: EngineConfig) -> None:
        tokens, rows = config.max_num_batched_tokens, config.limits.max_logits
        hidden, experts, heads = model.hidden_size, model.experts, model.num_heads * model.head_dim
        entries = tokens * experts.per_token
        self.streams = zeros(np.float32, tokens, model.hyper.streams, hidden)
        self.mixes = zeros(np.float32, tokens, model.hyper.mixes)
        self.head_mixes = zeros(np.float32, rows, model.hyper.streams)
        self.post_comb = zeros(np.float32, tokens, _POST_COMB)
        self.x, self.y = (zeros(np.float32, tokens, hidden) for _ in range(2))
        self.normed = zeros(np.uint32, max(tokens, rows) * hidden // 2)
        shapes = {name: tensor.shape for name, tensor in DeepseekV4Inventory(model).model.items()}
        self.widths: dict[LayerKind, list[int]] = {}
        self.projected: dict[LayerKind, Float32Array] = {}
        self.heads: dict[LayerKind, Float32Array] = {}
        for kind in sorted(set(model.kinds)):
            prefix = f"layers.{model.kinds.index(kind)}.attn."
            self.widths[kind] = [shapes[f"{prefix}{name}.weight"][0] for name in _projections(kind)]
            indexed = shapes.get(f"{prefix}indexer.wq_b.weight", (0,))[0]
            self.projected[kind] = zeros(np.float32, tokens, sum(self.widths[kind]))
            self.heads[kind] = zeros(np.float32, tokens, heads + indexed)
        self.latent = zeros(np.uint32, tokens * model.q_lora_rank // 2)
        self.queries = _panels(tokens, model.num_heads, model.head_dim)
        if model.indexer is not None:
            self.index_queries = _panels(tokens, model.indexer.num_heads, model.indexer.head_dim)
            self.topk_indices = zeros(np.int32, tokens, model.indexer.topk)
            self.scores = zeros(np.float32, INDEXER_TOKENS, ceil_div(config.max_model_len, model.csa_ratio))
        self.attended = zeros(np.uint32, tokens * heads // 2)
        self.out_latent = zeros(np.uint32, tokens * model.o_groups * model.o_lora_rank // 2)
        self.router_logits = zeros(np.float32, tokens, experts.count)
        self.gated = zeros(np.uint32, tokens * experts.intermediate_size // 2)
        self.expert_rows = zeros(np.uint32, entries * hidden // 2)
        self.expert_gated = zeros(np.uint32, entries * experts.intermediate_size // 2)
        self.expert_out = zeros(np.float32, entries, hidden)
        self.logits = zeros(np.float32, rows, model.vocab_size)
        widest = max(hidden, model.q_lora_rank, model.o_groups * model.o_lora_rank, experts.intermediate_size)
        self._sizes = (max(tokens, rows), widest, entries, max(hidden, experts.intermediate_size))

    def products(self, step: Recording, exact: bool) -> Products:
        """Return what records products of these activations; see Products."""
        return Products(step, exact, *self._sizes)


def _panels(tokens: int, heads: int, dim: int) -> PairArray:
    """Allocate query panels, as MLA and the indexer read them."""
    return zeros(np.uint32, tokens, ceil_div(heads, PANEL), dim // 2, PANEL)
