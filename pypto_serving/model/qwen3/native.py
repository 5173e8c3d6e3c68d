"""Qwen3 and Qwen3-MoE on the CPU kernels: the step recorded once, operation by operation. Torch-free."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pypto_serving.kernels import Engine, KVCacheLayer, Recording, Rows, Scoring, StripColumns, zeros
from pypto_serving.model.packed import PackedWeights
from pypto_serving.model.products import Feed, Products
from pypto_serving.model.qwen3.config import Experts, Qwen3Config
from pypto_serving.model.qwen3.inventory import Qwen3Inventory
from pypto_serving.types.arrays import BFloat16Array, UInt8Array
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import KVCacheGroupSpec

LOG2_E = math.log2(math.e)


class NativeQwen3:
    """Owns packed weights, KV pages and the recorded step of a Qwen3 model.

    `pages` are those of KVCacheLayer; csrc/ops.h says how a head's part of a block is laid out. `logits` is float32
    [max_logits, vocab].
    """

    layout = "block, layer, k or v, head, panels of 32 tokens: keys dim / 2 x 32 x 2, values dim / 32 x 16 x 32 x 2"
    """Order of the dimensions of a block's pages in bfloat16; part of the fingerprint, as the dtype is."""

    @staticmethod
    def name(model: Qwen3Config, config: EngineConfig) -> str:
        """Name program and weights, for the fingerprint. The output layer counts where tokens are embedded by it."""
        rounded = "int8 embedding" if config.head == "int8" and model.tied_embeddings else ""
        return " ".join(filter(None, ("qwen3-native-3", Qwen3Inventory(model).quantization(), rounded)))

    def __init__(self, model: Qwen3Config, weights: PackedWeights, engine: Engine, config: EngineConfig) -> None:
        inventory = Qwen3Inventory(model, weights.headers)
        weights.require(inventory.expected(), inventory.ignores, inventory.schemes, inventory.sizes())
        self.model = model
        self.pages = _pages(config.groups[0], config.num_blocks[0], model)
        self.arenas = (self.pages.view(np.uint8).reshape(len(self.pages), -1),)
        self.step = Recording(engine)
        self._record(weights, config)

    def _record(self, weights: PackedWeights, config: EngineConfig) -> None:
        model, tokens = self.model, config.max_num_batched_tokens
        buffers = Buffers(model, tokens, config.limits.max_logits)
        self.logits = buffers.logits
        self._products = buffers.products(self.step, exact=config.activations == "bf16")
        embedding, module = "model.embed_tokens", model.head
        (lm_head,) = weights.rounded(module) if config.head == "int8" else weights.matrix([module])
        if model.tied_embeddings:
            self.step.embed_packed(lm_head, buffers.x)
        else:
            self.step.embed(weights.table(f"{embedding}.weight"), buffers.x)
        cos, sin = model.rope.tables(config.max_model_len)
        for index in range(model.num_layers):
            self._record_attention(weights, buffers, index, cos, sin)
            self._record_mlp(weights, buffers, index)
        normed = self._normed(weights, "model.norm.weight", buffers, Rows.LOGITS)
        self._products.linear(normed, [lm_head], buffers.logits, Rows.LOGITS)

    def _normed(self, weights: PackedWeights, norm: str, b: Buffers, rows: Rows = Rows.TOKENS) -> Feed:
        return self._products.normed(b.x, weights.vector(norm), self.model.rms_norm_eps, b.normed, rows)

    def _record_attention(
        self, weights: PackedWeights, b: Buffers, index: int, cos: NDArray[np.float32], sin: NDArray[np.float32]
    ) -> None:
        """Record x += o(attention(qkv(rms_norm(x))))."""
        model, prefix = self.model, f"model.layers.{index}."
        eps, cache = model.rms_norm_eps, KVCacheLayer(self.pages, index, model.head_dim)
        qkv = weights.matrix([f"{prefix}self_attn.{name}_proj" for name in "qkv"], bias=model.attention_bias)
        o = weights.matrix([f"{prefix}self_attn.o_proj"], bias=model.attention_bias)
        self._products.linear(self._normed(weights, f"{prefix}input_layernorm.weight", b), qkv, b.projected)
        self.step.qk_norm_rope(b.projected, self._head_norms(weights, prefix), cos, sin, eps, b.queries, cache)
        self.step.paged_attention(b.queries, cache, b.attended)
        self._products.linear_add(self._products.strips(b.attended), o, b.x)

    def _head_norms(self, weights: PackedWeights, prefix: str) -> NDArray[np.float32]:
        """Norm weights of query and key heads, [heads + kv_heads, head_dim], with the scores' scale in base 2."""
        model = self.model
        q, k = (weights.vector(f"{prefix}self_attn.{name}_norm.weight") for name in "qk")
        q = (q.astype(np.float64) * (model.head_dim**-0.5 * LOG2_E)).astype(np.float32)
        return np.concatenate([np.tile(q, (model.num_heads, 1)), np.tile(k, (model.num_kv_heads, 1))])

    def _record_mlp(self, weights: PackedWeights, b: Buffers, index: int) -> None:
        """x += down(silu(gate(norm(x))) * up(norm(x))), or the chosen experts' weighted sum of that."""
        model, prefix = self.model, f"model.layers.{index}."
        normed = self._normed(weights, f"{prefix}post_attention_layernorm.weight", b)
        if model.experts is not None and index in model.experts.layers:
            self._record_experts(weights, b, normed, f"{prefix}mlp.", model.experts)
            return
        gate_up = weights.gate_up([f"{prefix}mlp.gate_proj"], [f"{prefix}mlp.up_proj"])
        self._products.swiglu(normed, gate_up, StripColumns(b.gated, model.intermediate_size))
        down = weights.matrix([f"{prefix}mlp.down_proj"])
        self._products.linear_add(self._products.strips(b.gated), down, b.x)

    def _record_experts(self, weights: PackedWeights, b: Buffers, normed: Feed, prefix: str, experts: Experts) -> None:
        names = {part: [f"{prefix}experts.{e}.{part}_proj" for e in range(experts.count)] for part in _PARTS}
        self._products.linear(normed, weights.matrix([f"{prefix}gate"]), b.router_logits)
        scoring = Scoring.RENORMALIZED if experts.normalize else Scoring.SOFTMAX
        routing = self.step.route(b.router_logits, experts.per_token, scoring)
        rows = self._products.gathered(routing, normed, b.expert_rows)
        gate_up = weights.gate_up(names["gate"], names["up"])
        self._products.expert_swiglu(routing, rows, gate_up, StripColumns(b.expert_gated, experts.intermediate_size))
        gated = self._products.strips(b.expert_gated, routing)
        self._products.expert_linear(routing, gated, weights.several(names["down"]), b.expert_out)
        self.step.moe_combine(routing, b.expert_out, b.x)


_PARTS = ("gate", "up", "down")


class Buffers:
    """Activations of a step of up to `tokens` tokens, of which `rows` get logits; see kernels/engine.py for layouts.

    With `exact`, 4-bit codes multiply bfloat16 activations.
    """

    def __init__(self, model: Qwen3Config, tokens: int, rows: int, exact: bool = False) -> None:
        self._exact = exact
        heads = model.num_heads + 2 * model.num_kv_heads
        self.x = zeros(np.float32, tokens, model.hidden_size)
        self.normed = zeros(np.uint32, max(tokens, rows) * model.hidden_size // 2)
        self.projected = zeros(np.float32, tokens, heads * model.head_dim)
        self.queries = zeros(np.uint16, tokens, model.num_heads, model.head_dim)
        self.attended = zeros(np.uint32, tokens * model.num_heads * model.head_dim // 2)
        self.gated = zeros(np.uint32, tokens * model.intermediate_size // 2)
        self.logits = zeros(np.float32, rows, model.vocab_size)
        widest = max(model.hidden_size, model.num_heads * model.head_dim, model.intermediate_size)
        self._sizes = [max(tokens, rows), widest]
        if experts := model.experts:
            entries = tokens * experts.per_token
            self.router_logits = zeros(np.float32, tokens, experts.count)
            self.expert_rows = zeros(np.uint32, entries * model.hidden_size // 2)
            self.expert_gated = zeros(np.uint32, entries * experts.intermediate_size // 2)
            self.expert_out = zeros(np.float32, entries, model.hidden_size)
            self._sizes += [entries, max(model.hidden_size, experts.intermediate_size)]

    def products(self, step: Recording, exact: bool) -> Products:
        """Return what records products of these activations; see Products."""
        return Products(step, exact, *self._sizes)


def _pages(group: KVCacheGroupSpec, num_blocks: int, model: Qwen3Config) -> BFloat16Array | UInt8Array:
    heads = (num_blocks, model.num_layers, 2, model.num_kv_heads)
    num_bytes = group.block_bytes // math.prod(heads[1:])
    if group.tensors[0].dtype == "int8":
        return zeros(np.uint8, *heads, num_bytes)
    return zeros(np.uint16, *heads, num_bytes // 2)
