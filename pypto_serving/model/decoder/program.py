"""Decoders in readable torch: one step over packed rows with a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pypto_serving.kernels.constants import GATE_HALF
from pypto_serving.model.attention import KVArena, StepAttention, StepTensors, settle_query_rows
from pypto_serving.model.collectives import TorchCollectives
from pypto_serving.model.decoder.inventory import DecoderInventory
from pypto_serving.model.decoder.recipe import DecoderConfig, MlpRecipe, Part
from pypto_serving.model.layers import (
    Embedding,
    GatedMLP,
    Linear,
    SplitExperts,
    SplitMLP,
    TopKMoE,
    apply_rope_,
    rms_norm,
    settle_rows,
)
from pypto_serving.model.loader import TorchWeights
from pypto_serving.model.products import rows_of
from pypto_serving.model.rope import Rope
from pypto_serving.types.config import EngineConfig


@dataclass(frozen=True)
class Angles:
    """Cosines and sines [n, 1, dim] of a RoPE for apply_rope_, and factors of queries [n, 1, 1]."""

    cos: Tensor
    sin: Tensor
    query_factors: Tensor | None

    @classmethod
    def of(cls, rope: Rope, max_model_len: int, device: torch.device) -> Angles:
        """Compute those of every position."""
        cos, sin = (torch.from_numpy(table).to(device) for table in rope.tables(max_model_len))
        factors = rope.query_factors(max_model_len)
        return cls(
            torch.cat([cos, cos], dim=1)[:, None],
            torch.cat([-sin, sin], dim=1)[:, None],
            None if factors is None else torch.from_numpy(factors).to(device)[:, None],
        )

    def at(self, positions: Tensor) -> Angles:
        """Return those of tokens at these positions."""
        factors = self.query_factors
        return Angles(
            self.cos.index_select(0, positions),
            self.sin.index_select(0, positions),
            None if factors is None else factors.index_select(0, positions),
        )


class DecoderLayer:
    """Attention and MLP with pre-norms: h += o(attend(qkv(norm(h)))); h += mlp(norm(h)).

    Ranks split attention by heads, and the outputs of all other matrices.
    """

    def __init__(self, model: DecoderConfig, weights: TorchWeights, index: int, comm: TorchCollectives) -> None:
        prefix, rank = f"model.layers.{index}.", comm.rank
        self.index, self.model, self.comm, self.recipe = index, model, comm, model.layers[index].attention
        self.heads = rank.heads(model.num_heads, model.num_kv_heads)
        self.kv_heads = rank.kv_heads(model.num_kv_heads)
        self.input_norm = weights.read(prefix + "input_layernorm.weight")
        self.mlp_norm = weights.read(prefix + "post_attention_layernorm.weight")
        attention = prefix + "self_attn."
        self.attended = comm.parts(
            lambda rank: rows_of(rank.heads(model.num_heads, model.num_kv_heads), model.head_dim)
        )
        outputs = [rows_of(heads, model.head_dim) for heads in (self.heads, self.kv_heads, self.kv_heads)]
        self.qkv = _linear(weights, model.qkv(index), outputs, self.recipe.qkv_bias)
        self.o = _linear(weights, [Part(attention + "o_proj")], [rank.columns(model.hidden_size)], self.recipe.o_bias)
        self.head_norms = self._head_norms(weights, attention) if self.recipe.head_norms else None
        self.mlp = _mlp(model, weights, index, comm)

    def _head_norms(self, weights: TorchWeights, prefix: str) -> Tensor:
        """Read QK-norm weights, float32 [heads + kv_heads, head_dim], for queries times the softmax scale."""
        model = self.model
        q, k = (weights.read(f"{prefix}{name}_norm.weight").float() for name in "qk")
        q = q * model.head_dim**-0.5
        return torch.cat([q.expand(len(self.heads), -1), k.expand(len(self.kv_heads), -1)])

    def __call__(self, h: Tensor, angles: Angles, attention: StepAttention, arena: KVArena) -> Tensor:
        """Compute one layer over h [t, hidden], and write K and V of the step's tokens."""
        eps = self.model.rms_norm_eps
        q, k, v = self._heads(self.qkv(rms_norm(h, self.input_norm, eps)), angles)
        arena.write(self.index, attention.row_index, k, v)
        attended = torch.zeros(len(h), len(self.heads) * self.model.head_dim, dtype=h.dtype, device=h.device)
        attention(self.index, q, attended)
        attended = self.comm.join(attended, self.attended)
        h = h + self.comm.columns(self.o(attended), self.model.hidden_size)
        return h + self.mlp(rms_norm(h, self.mlp_norm, eps))

    def _heads(self, qkv: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Split [t, (heads + 2 kv_heads) * head_dim] into q, k and v; apply norms and RoPE in float32."""
        model, queries, rotated = self.model, len(self.heads), len(self.heads) + len(self.kv_heads)
        heads = qkv.view(len(qkv), -1, model.head_dim)
        qk = heads[:, :rotated].float().contiguous()
        if self.head_norms is None:
            qk[:, :queries] *= model.head_dim**-0.5
        else:
            qk = rms_norm(qk, None, model.rms_norm_eps).mul_(self.head_norms)
        apply_rope_(qk[..., : self.recipe.rope.dim], angles.cos, angles.sin)
        if angles.query_factors is not None:
            qk[:, :queries] *= angles.query_factors
        qk = qk.to(qkv.dtype)
        return qk[:, :queries], qk[:, queries:], heads[:, rotated:]


class TorchDecoder:
    """Owns weights and KV pages of a decoder, or a rank's part. `rows` is the fewest rows that a step computes.

    Weights and pages lie on torch's default device at construction; a step's tensors must lie there too.
    """

    name = "decoder-torch-1"

    def __init__(
        self, model: DecoderConfig, weights: TorchWeights, config: EngineConfig, comm: TorchCollectives | None = None
    ) -> None:
        inventory = DecoderInventory(model)
        weights.require(inventory.expected(), inventory.ignores)
        self.model, self._comm = model, comm or TorchCollectives()
        self.arena = KVArena(config.cache.groups[0], config.cache.num_blocks[0], weights.dtype, self._comm)
        self.pages = (self.arena.pages,)
        mine = self._comm.rank.vocabulary(model.vocab_size)
        table = weights.read("model.embed_tokens.weight", rows=[mine])
        self.embedding = Embedding(table, self._comm, mine)
        self.layers = [DecoderLayer(model, weights, i, self._comm) for i in range(model.num_layers)]
        self.norm = weights.read("model.norm.weight")
        self.lm_head = Linear(table if model.tied_embeddings else weights.lend("lm_head.weight", rows=[mine]))
        weights.finish()
        device = self.norm.device
        self._angles = {rope: Angles.of(rope, config.limits.max_model_len, device) for rope in model.ropes}
        queries = settle_query_rows(model.head_dim, self.norm.dtype)
        self.arena.query_rows = queries or self.arena.query_rows
        self.rows = settle_rows(self, self._comm, stable=queries is not None)

    def forward(self, step: StepTensors) -> Tensor:
        """Write the K/V of a step's tokens, then return logits of `step.logits_rows`, float32 [s, vocab]."""
        if not len(step.token_ids):
            return torch.empty(0, self.model.vocab_size, device=self.norm.device)
        attention = StepAttention(self.arena, step)
        angles = {rope: every.at(step.positions) for rope, every in self._angles.items()}
        h = self.embedding(step.token_ids)
        for layer in self.layers:
            h = layer(h, angles[layer.recipe.rope], attention, self.arena)
        if not len(step.logits_rows):
            return torch.empty(0, self.model.vocab_size, device=self.norm.device)
        h = h.index_select(0, step.logits_rows)
        logits = self.lm_head(rms_norm(h, self.norm, self.model.rms_norm_eps))
        return self._comm.columns(logits, self.model.vocab_size).float()


def _linear(
    weights: TorchWeights, parts: Sequence[Part], outputs: Sequence[range] | None = None, bias: bool = False
) -> Linear:
    """Concatenate `outputs` of the projections, by default all outputs of whole matrices."""
    rows = None if outputs is None else [part.rows(mine) for part, mine in zip(parts, outputs, strict=True)]
    biases = weights.read(*(f"{part.module}.bias" for part in parts), rows=rows) if bias else None
    return Linear(weights.lend(*(f"{part.module}.weight" for part in parts), rows=rows), biases)


def _mlp(model: DecoderConfig, weights: TorchWeights, index: int, comm: TorchCollectives) -> SplitMLP | TopKMoE:
    """Load the rank's part of a layer's MLP, or of its experts."""
    prefix, rank, recipe, hidden = f"model.layers.{index}.", comm.rank, model.layers[index].mlp, model.hidden_size
    if isinstance(recipe, MlpRecipe):
        parts = [*model.gate_up(index, recipe.width), Part(prefix + model.names.down)]
        mlp = _gated_mlp(weights, parts, rank.columns(recipe.width, GATE_HALF), rank.columns(hidden), recipe.bias)
        return SplitMLP(mlp, comm, recipe.width, hidden)
    outputs = rank.expert_columns(recipe.width, GATE_HALF), rank.expert_columns(hidden)
    members = {
        expert: _gated_mlp(weights, [Part(prefix + module) for module in model.names.expert(expert)], *outputs)
        for expert in rank.experts(recipe.count)
    }
    router = _linear(weights, [Part(prefix + model.names.router)])
    experts = SplitExperts(members, comm, recipe.count, recipe.width, hidden)
    return TopKMoE(router, experts, recipe.per_token, recipe.normalize)


def _gated_mlp(
    weights: TorchWeights, parts: Sequence[Part], inner: range, outputs: range, bias: bool = False
) -> GatedMLP:
    each = zip(parts, (inner, inner, outputs), strict=True)
    return GatedMLP(*(_linear(weights, [part], [mine], bias) for part, mine in each))
