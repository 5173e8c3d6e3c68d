"""Qwen3 and Qwen3-MoE on the CPU kernels: the step recorded once, operation by operation. Torch-free."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pypto_serving.kernels import (
    Engine,
    Int8Strips,
    KVCacheLayer,
    Matrix,
    Recording,
    Routing,
    Rows,
    Scoring,
    Strips,
    most_int8_words,
    strips_for,
    zeros,
)
from pypto_serving.model.packed import PackedWeights
from pypto_serving.model.qwen3.config import Experts, Qwen3Config
from pypto_serving.model.qwen3.inventory import Qwen3Inventory
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import KVCacheGroupSpec

LOG2_E = math.log2(math.e)


class NativeQwen3:
    """Owns packed weights, KV pages and the recorded step of a Qwen3 model.

    `pages` is bfloat16 as uint16 [blocks, layers, k or v, kv_heads, block_size * head_dim]; csrc/ops.h says how a
    head's part of a block is laid out. `logits` is float32 [max_logits, vocab].
    """

    layout = "block, layer, k or v, head, panels of 32 tokens: keys dim / 2 x 32 x 2, values dim / 32 x 16 x 32 x 2"
    """Order of the dimensions of a block's pages; part of the fingerprint."""

    @staticmethod
    def name(model: Qwen3Config, config: EngineConfig) -> str:
        """Name program and weights, for the fingerprint. The output layer counts where tokens are embedded by it."""
        rounded = "int8 embedding" if config.head == "int8" and model.tied_embeddings else ""
        return " ".join(filter(None, ("qwen3-native-2", Qwen3Inventory(model).quantization(), rounded)))

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
        buffers = Buffers(model, tokens, config.limits.max_logits, exact=config.activations == "bf16")
        self.logits = buffers.logits
        embedding, module = "model.embed_tokens", model.head
        lm_head = weights.rounded(module) if config.head == "int8" else weights.matrix([module])
        if model.tied_embeddings:
            self.step.embed_packed(lm_head, buffers.x)
        else:
            self.step.embed(weights.table(f"{embedding}.weight"), buffers.x)
        cos, sin = model.rope.tables(config.max_model_len)
        for index in range(model.num_layers):
            self._record_attention(weights, buffers, index, cos, sin)
            self._record_mlp(weights, buffers, index)
        norm = weights.vector("model.norm.weight")
        normed = buffers.inputs(lm_head, buffers.normed)
        self.step.rms_norm(buffers.x, norm, model.rms_norm_eps, normed, Rows.LOGITS)
        self.step.linear(normed, lm_head, buffers.logits, Rows.LOGITS)

    def _record_attention(
        self, weights: PackedWeights, b: Buffers, index: int, cos: NDArray[np.float32], sin: NDArray[np.float32]
    ) -> None:
        """Record x += o(attention(qkv(rms_norm(x))))."""
        model, prefix = self.model, f"model.layers.{index}."
        eps, cache = model.rms_norm_eps, KVCacheLayer(self.pages, index, model.head_dim)
        qkv = weights.matrix([f"{prefix}self_attn.{name}_proj" for name in "qkv"], bias=model.attention_bias)
        o = weights.matrix([f"{prefix}self_attn.o_proj"], bias=model.attention_bias)
        normed = b.inputs(qkv, b.normed)
        self.step.rms_norm(b.x, weights.vector(f"{prefix}input_layernorm.weight"), eps, normed)
        self.step.linear(normed, qkv, b.projected)
        self.step.qk_norm_rope(b.projected, self._head_norms(weights, prefix), cos, sin, eps, b.queries, cache)
        self.step.paged_attention(b.queries, cache, b.attended)
        self.step.linear_add(self._gemm_input(b.attended, o, b), o, b.x)

    def _gemm_input(self, x: NDArray[np.uint32], matrix: Matrix, b: Buffers, routing: Routing | None = None) -> Strips:
        """Return the GEMM input for `matrix`: strips x, or x quantized to int8."""
        inputs = b.inputs(matrix, x)
        if not isinstance(inputs, np.ndarray):
            self.step.quantize(x, matrix.k, inputs, routing)
        return inputs

    def _head_norms(self, weights: PackedWeights, prefix: str) -> NDArray[np.float32]:
        """Norm weights of query and key heads, [heads + kv_heads, head_dim], with the scores' scale in base 2."""
        model = self.model
        q, k = (weights.vector(f"{prefix}self_attn.{name}_norm.weight") for name in "qk")
        q = (q.astype(np.float64) * (model.head_dim**-0.5 * LOG2_E)).astype(np.float32)
        return np.concatenate([np.tile(q, (model.num_heads, 1)), np.tile(k, (model.num_kv_heads, 1))])

    def _record_mlp(self, weights: PackedWeights, b: Buffers, index: int) -> None:
        """x += down(silu(gate(norm(x))) * up(norm(x))), or the chosen experts' weighted sum of that."""
        model, prefix = self.model, f"model.layers.{index}."
        norm = weights.vector(f"{prefix}post_attention_layernorm.weight")
        if model.experts is not None and index in model.experts.layers:
            self.step.rms_norm(b.x, norm, model.rms_norm_eps, b.normed)
            self._record_experts(weights, b, f"{prefix}mlp.", model.experts)
            return
        gate_up = weights.gate_up([f"{prefix}mlp.gate_proj"], [f"{prefix}mlp.up_proj"])
        down = weights.matrix([f"{prefix}mlp.down_proj"])
        normed = b.inputs(gate_up, b.normed)
        self.step.rms_norm(b.x, norm, model.rms_norm_eps, normed)
        self.step.linear_swiglu(normed, gate_up, b.gated)
        self.step.linear_add(self._gemm_input(b.gated, down, b), down, b.x)

    def _record_experts(self, weights: PackedWeights, b: Buffers, prefix: str, experts: Experts) -> None:
        names = {part: [f"{prefix}experts.{e}.{part}_proj" for e in range(experts.count)] for part in _PARTS}
        router = weights.matrix([f"{prefix}gate"])
        gate_up, down = weights.gate_up(names["gate"], names["up"]), weights.several(names["down"])
        self.step.linear(self._gemm_input(b.normed, router, b), router, b.router_logits)
        scoring = Scoring.RENORMALIZED if experts.normalize else Scoring.SOFTMAX
        routing = self.step.route(b.router_logits, experts.per_token, scoring)
        rows = b.expert_inputs(gate_up)
        self.step.moe_gather(routing, self._gemm_input(b.normed, gate_up, b), self.model.hidden_size, rows)
        self.step.expert_swiglu(routing, rows, gate_up, b.expert_gated)
        gated = self._gemm_input(b.expert_gated, down, b, routing)
        self.step.expert_linear(routing, gated, down, b.expert_out)
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
        most, words = max(tokens, rows), max(tokens, rows) * most_int8_words(widest)
        if experts := model.experts:
            entries = tokens * experts.per_token
            most, words = max(most, entries), max(words, entries * most_int8_words(experts.intermediate_size))
            self.expert_int8 = _int8_strips(entries, entries * most_int8_words(model.hidden_size))
            self.router_logits = zeros(np.float32, tokens, experts.count)
            self.expert_rows = zeros(np.uint32, entries * model.hidden_size // 2)
            self.expert_gated = zeros(np.uint32, entries * experts.intermediate_size // 2)
            self.expert_out = zeros(np.float32, entries, model.hidden_size)
        self.int8_strips = _int8_strips(most, words)

    def inputs(self, matrix: Matrix, x: NDArray[np.uint32]) -> Strips:
        """Return where the GEMM input for `matrix` goes: bfloat16 strips x, or int8 strips."""
        return strips_for(matrix.form, x, self.int8_strips, self._exact)

    def expert_inputs(self, matrix: Matrix) -> Strips:
        """Return where the experts' rows for `matrix` go."""
        return strips_for(matrix.form, self.expert_rows, self.expert_int8, self._exact)


def _int8_strips(rows: int, size: int) -> Int8Strips:
    return Int8Strips(zeros(np.uint32, size), zeros(np.float32, rows))


def _pages(group: KVCacheGroupSpec, num_blocks: int, model: Qwen3Config) -> NDArray[np.uint16]:
    shape = (num_blocks, model.num_layers, 2, model.num_kv_heads, group.block_size * model.head_dim)
    return zeros(np.uint16, *shape)
