"""Decoders on the kernels for NVIDIA cards: launches over buffers at fixed addresses, for graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from pypto_serving.kernels.cuda import attention
from pypto_serving.kernels.cuda.products import Bf16Matrix
from pypto_serving.kernels.cuda.rows import add_norm, embed, gather, split_heads
from pypto_serving.kernels.cuda.step import DispatchTensors, KVPages
from pypto_serving.model.card_weights import CardWeights
from pypto_serving.model.decoder.inventory import DecoderInventory
from pypto_serving.model.decoder.recipe import DecoderConfig
from pypto_serving.types.config import EngineConfig
from pypto_serving.util import ceil_div


class CudaDecoderLayer:
    """The weights of one layer: h += o(attend(qkv(norm(h)))); h += down(silu(gate(norm(h))) * up(norm(h)))."""

    def __init__(self, model: DecoderConfig, weights: CardWeights, index: int) -> None:
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        self.input_norm = weights.read(prefix + "input_layernorm.weight")
        self.mlp_norm = weights.read(prefix + "post_attention_layernorm.weight")
        projections = [prefix + module for module in model.names.qkv]
        self.qkv = weights.matrix(*projections)
        self.o = weights.matrix(attention + "o_proj")
        self.recipe = recipe = model.layers[index].attention
        self.qkv_bias = weights.read(*(f"{name}.bias" for name in projections)) if recipe.qkv_bias else None
        self.o_bias = weights.read(attention + "o_proj.bias") if recipe.o_bias else None
        self.head_norms = None
        if recipe.head_norms:
            norms = weights.read(attention + "q_norm.weight", attention + "k_norm.weight")
            self.head_norms = norms.view(2, model.head_dim)
        self.gate_up = weights.gated(*(prefix + module for module in model.names.gate_up))
        self.down = weights.matrix(prefix + model.names.down)


class CudaDecoder:
    """Owns the weights, KV pages and buffers of a dense decoder on torch's default device. Implements CardModel."""

    name = "decoder-cuda-1"

    def __init__(self, model: DecoderConfig, weights: CardWeights, config: EngineConfig) -> None:
        """Load the model and allocate everything. Raises ModelError."""
        rows = config.limits.max_rows
        tokens = max(rows, config.limits.max_num_batched_tokens)
        weights.expect(DecoderInventory(model, weights.headers), tokens)
        self.model = model
        self._embedding = weights.read("model.embed_tokens.weight")
        self._layers = [CudaDecoderLayer(model, weights, index) for index in range(model.num_layers)]
        self._norm = weights.read("model.norm.weight")
        self._head = Bf16Matrix(self._embedding) if model.tied_embeddings else weights.matrix(model.head)
        self._head.splits = 1  # nobody adds parts of logits
        weights.finish()
        device = self._norm.device
        every = {rope: rope.tables(config.limits.max_model_len) for rope in model.ropes}
        self._angles = {
            rope: (torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device))
            for rope, (cos, sin) in every.items()
        }
        group = config.cache.groups[0]
        blocks = config.cache.num_blocks[0]
        data = torch.zeros(blocks * group.block_bytes // 2, dtype=torch.bfloat16)
        self.pages = KVPages(data, blocks, model.num_layers, model.num_kv_heads, model.head_dim, group.block_size)
        chunks = attention.chunk_settings(device)
        self.tile_queries = chunks.queries(model.num_heads, model.num_kv_heads)
        splits = ceil_div(config.limits.max_model_len, attention.SPLIT)
        self._partial = torch.zeros(
            attention.num_partial(rows, model.num_heads, model.head_dim, splits), dtype=torch.float32
        )
        self._allocate(tokens, rows)

    def _allocate(self, num_tokens: int, rows: int) -> None:
        model, half = self.model, torch.bfloat16
        self._x = torch.zeros(num_tokens, model.hidden_size, dtype=torch.float32)
        self._h = torch.zeros(num_tokens, model.hidden_size, dtype=half)
        self._q = torch.zeros(num_tokens, model.num_heads, model.head_dim, dtype=half)
        self._attended = torch.zeros_like(self._q)
        self._inner = torch.zeros(num_tokens, max(model.mlp_widths), dtype=half)
        matrices = (matrix for layer in self._layers for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down))
        self._sums = torch.zeros(max(matrix.num_sums(num_tokens) for matrix in matrices), dtype=torch.float32)
        self._wanted = torch.zeros(rows, model.hidden_size, dtype=half)
        self.logits = torch.zeros(rows, model.vocab_size, dtype=torch.float32)

    def compute_layers(self, step: DispatchTensors, last_tokens: Tensor) -> None:
        """Write the keys and values of a dispatch's tokens, and its normalised hidden states."""
        tokens, eps, sums = step.num_tokens, self.model.rms_norm_eps, self._sums
        x, h, q, attended, inner = (
            buffer[:tokens] for buffer in (self._x, self._h, self._q, self._attended, self._inner)
        )
        embed(step.token_ids, last_tokens, self._embedding, x)
        add_norm(x, sums, 0, self._layers[0].input_norm, eps, h)
        norms = [*(layer.input_norm for layer in self._layers[1:]), self._norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, norms, strict=True)):
            splits, (cos, sin) = layer.qkv.multiply(h, sums), self._angles[layer.recipe.rope]
            split_heads(sums, splits, step, index, self.pages, q, layer.head_norms, layer.qkv_bias, cos, sin, eps)
            if step.num_splits:
                attention.attend_decodes(q, step, index, self.pages, self._partial, attended)
            else:
                attention.attend_chunks(q, step, index, self.pages, attended)
            add_norm(x, sums, layer.o.multiply(attended.flatten(1), sums), layer.mlp_norm, eps, h, layer.o_bias)
            layer.gate_up.multiply(h, inner, sums)
            add_norm(x, sums, layer.down.multiply(inner, sums), next_norm, eps, h)

    def compute_logits(self, rows: Tensor) -> None:
        """Compute logits of the hidden states at the indices `rows`, int32 [n]."""
        wanted = self._wanted[: len(rows)]
        gather(self._h, rows, wanted)
        self._head.multiply(wanted, self.logits.view(-1))
