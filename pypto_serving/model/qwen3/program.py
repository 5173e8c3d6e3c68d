"""Qwen3 and Qwen3-MoE in readable torch: one step over packed rows with a paged KV cache."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from pypto_serving.model.attention import KVArena, StepAttention, settle_query_rows
from pypto_serving.model.layers import GatedMLP, Linear, MoE, apply_rope_, rms_norm, settle_rows
from pypto_serving.model.loader import Weights
from pypto_serving.model.qwen3.config import Qwen3Config
from pypto_serving.model.qwen3.inventory import Qwen3Inventory
from pypto_serving.model.step import StepTensors
from pypto_serving.types.config import EngineConfig

logger = logging.getLogger(__name__)


class DecoderLayer:
    """Attention and MLP with pre-norms: h += o(attend(qkv(norm(h)))); h += mlp(norm(h))."""

    def __init__(self, model: Qwen3Config, weights: Weights, index: int) -> None:
        prefix = f"model.layers.{index}."
        self.index, self.model = index, model
        self.input_norm = weights.read(prefix + "input_layernorm.weight")
        self.mlp_norm = weights.read(prefix + "post_attention_layernorm.weight")
        attention = prefix + "self_attn."
        self.qkv = _linear(weights, *(f"{attention}{name}_proj" for name in "qkv"))
        self.o = _linear(weights, attention + "o_proj")
        self.head_norms = self._head_norms(weights, attention)
        experts = model.experts
        self.mlp: GatedMLP | MoE
        if experts is None or index not in experts.layers:
            self.mlp = _gated_mlp(weights, prefix + "mlp.")
        else:
            members = [_gated_mlp(weights, f"{prefix}mlp.experts.{e}.") for e in range(experts.count)]
            router = _linear(weights, prefix + "mlp.gate")
            self.mlp = MoE(router, members, experts.per_token, experts.normalize)

    def _head_norms(self, weights: Weights, prefix: str) -> Tensor:
        """Read QK-norm weights, float32 [heads + kv_heads, head_dim]; those of queries include the softmax scale."""
        model = self.model
        q, k = (weights.read(f"{prefix}{name}_norm.weight").float() for name in "qk")
        q = q * model.head_dim**-0.5
        return torch.cat([q.expand(model.num_heads, -1), k.expand(model.num_kv_heads, -1)])

    def __call__(self, h: Tensor, cos: Tensor, sin: Tensor, attention: StepAttention, arena: KVArena) -> Tensor:
        """Compute one layer over h [t, hidden], and write K and V of the step's tokens."""
        eps = self.model.rms_norm_eps
        q, k, v = self._heads(self.qkv(rms_norm(h, self.input_norm, eps)), cos, sin)
        arena.write(self.index, 0, attention.row_index, k)
        arena.write(self.index, 1, attention.row_index, v)
        attended = torch.zeros(len(h), self.o.in_features, dtype=h.dtype, device=h.device)
        attention(self.index, q, attended)
        h = h + self.o(attended)
        return h + self.mlp(rms_norm(h, self.mlp_norm, eps))

    def _heads(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [t, (heads + 2 kv_heads) * head_dim] into q, k and v; apply QK-norm and RoPE in float32."""
        model, rotated = self.model, self.model.num_heads + self.model.num_kv_heads
        heads = qkv.view(len(qkv), -1, model.head_dim)
        qk = rms_norm(heads[:, :rotated].float().contiguous(), None, model.rms_norm_eps)
        qk = apply_rope_(qk.mul_(self.head_norms), cos, sin).to(qkv.dtype)
        return qk[:, : model.num_heads], qk[:, model.num_heads :], heads[:, rotated:]

    def linears(self) -> list[Linear]:
        return [self.qkv, self.o, *self.mlp.linears()]


class Qwen3Program:
    """Owns weights and KV pages of a Qwen3 model. `rows` is the fewest rows that a step computes.

    Weights and pages lie on torch's default device at construction; a step's tensors must lie there too.
    """

    name = "qwen3-torch-2"

    def __init__(self, model: Qwen3Config, weights: Weights, config: EngineConfig) -> None:
        inventory = Qwen3Inventory(model)
        weights.require(inventory.expected(), inventory.ignores)
        self.model = model
        self.arena = KVArena(config.groups[0], config.num_blocks[0], weights.dtype)
        self.pages = (self.arena.pages,)
        self.embedding = weights.read("model.embed_tokens.weight")
        self.layers = [DecoderLayer(model, weights, i) for i in range(model.num_layers)]
        self.norm = weights.read("model.norm.weight")
        self.lm_head = Linear(self.embedding if model.tied_embeddings else weights.lend("lm_head.weight"))
        device = self.embedding.device
        cos, sin = (torch.from_numpy(table).to(device) for table in model.rope.tables(config.max_model_len))
        self._cos, self._sin = torch.cat([cos, cos], dim=1)[:, None], torch.cat([-sin, sin], dim=1)[:, None]
        self.rows = self._settle_rows()

    def _settle_rows(self) -> int:
        """Find the fewest rows per call from which results do not depend on the row count. Warn if there are none."""
        linears = [self.lm_head, *(linear for layer in self.layers for linear in layer.linears())]
        rows, stable = settle_rows(linears)
        queries = settle_query_rows(self.model.head_dim, self.embedding.dtype)
        self.arena.query_rows = queries or self.arena.query_rows
        if queries is None or not stable:
            logger.warning("matrix products on this machine depend on the row count: outputs may vary with the batch")
        return rows

    def forward(self, step: StepTensors) -> Tensor:
        """Write the K/V of a step's tokens, then return logits of `step.logits_rows`, float32 [s, vocab]."""
        if not len(step.token_ids):
            return torch.empty(0, self.model.vocab_size, device=self.embedding.device)
        attention = StepAttention(self.arena, step)
        cos, sin = self._cos.index_select(0, step.positions), self._sin.index_select(0, step.positions)
        h = self.embedding.index_select(0, step.token_ids)
        for layer in self.layers:
            h = layer(h, cos, sin, attention, self.arena)
        if not len(step.logits_rows):
            return torch.empty(0, self.model.vocab_size, device=self.embedding.device)
        h = h.index_select(0, step.logits_rows)
        return self.lm_head(rms_norm(h, self.norm, self.model.rms_norm_eps)).float()


def _linear(weights: Weights, *names: str) -> Linear:
    """Concatenate the named projections along their outputs."""
    biases = [f"{name}.bias" for name in names]
    bias = weights.read(*biases) if weights.has(biases[0]) else None
    return Linear(weights.lend(*(f"{name}.weight" for name in names)), bias)


def _gated_mlp(weights: Weights, prefix: str) -> GatedMLP:
    gate, up, down = (_linear(weights, f"{prefix}{name}_proj") for name in ("gate", "up", "down"))
    return GatedMLP(gate, up, down)
