"""The memory of a DeepSeek V4 model on the CPU kernels: KV arenas and activations. Torch-free."""

from __future__ import annotations

from typing import Any

import numpy as np

from pypto_serving.kernels import INDEXER_TOKENS, PANEL, NativeCollectives, PagedRows, Recording, zeros
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config, LayerKind
from pypto_serving.model.deepseek_v4.inventory import DeepseekV4Inventory
from pypto_serving.model.products import AttentionShare, ExpertBuffers, Products
from pypto_serving.types.arrays import Float32Array
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import KVCacheGroupSpec, Spans
from pypto_serving.util import ceil_div

_POST_COMB = 20
"""Hyper-connection coefficients post (4) and comb (4 x 4) of a token."""
_ADDS = np.concatenate([np.ones(4), np.eye(4).ravel()]).astype(np.float32)
"""Coefficients post and comb that add a vector to each stream."""


def layer_spans(group: KVCacheGroupSpec, layers: range) -> Spans:
    """Return the bytes of a group's block that belong to these layers."""
    found, begin = [], 0
    for tensor in group.tensors:
        size = group.block_size // tensor.ratio * tensor.row_bytes
        places = [begin + size * place for place, layer in enumerate(tensor.layers) if layer in layers]
        found += [(place, place + size) for place in places]
        begin += size * len(tensor.layers)
    return tuple(found)


class Arenas:
    """Owns the blocks of all KV groups, uint8 [num_blocks, block_bytes] each, and finds a layer's rows in them."""

    def __init__(self, config: EngineConfig, peers: NativeCollectives) -> None:
        self._groups = config.cache.groups
        counts = zip(config.cache.groups, config.cache.num_blocks, strict=True)
        self.blocks = tuple(peers.zeros_for_all(np.uint8, count, group.block_bytes) for group, count in counts)

    def pages(self, step: Recording, name: str, wanted: str, layer: int) -> PagedRows:
        """Return the rows of a tensor of the group `name` in a layer, for operations of `step`."""
        number = [group.name for group in self._groups].index(name)
        group, offset = self._groups[number], 0
        for tensor in group.tensors:
            layer_bytes = group.block_size // tensor.ratio * tensor.row_bytes
            if tensor.name == wanted:
                offset += tensor.layers.index(layer) * layer_bytes
                place = (number, group.block_size, tensor.ratio)
                return step.pages(self.blocks[number], offset, tensor.row_bytes, *place)
            offset += len(tensor.layers) * layer_bytes
        raise KeyError(wanted)


class DeepseekV4Buffers:
    """Owns the activations of the largest step; gathered ones are shared by ranks. For layouts see kernels/forms.py."""

    def __init__(
        self, model: DeepseekV4Config, config: EngineConfig, attention: AttentionShare, peers: NativeCollectives
    ) -> None:
        rank, tokens, rows = attention.rank, config.limits.max_num_batched_tokens, config.limits.max_logits
        hidden, experts, heads = model.hidden_size, model.experts, len(rank.heads(model.num_heads))
        entries = tokens * experts.per_token
        self.streams = peers.zeros(np.float32, tokens, model.hyper.streams, hidden)
        self.mixes = zeros(np.float32, tokens, model.hyper.mixes)
        self.head_mixes = zeros(np.float32, rows, model.hyper.streams)
        self.post_comb = zeros(np.float32, tokens, _POST_COMB)
        self.x = zeros(np.float32, tokens, hidden)
        self.y = zeros(np.float32, tokens, len(rank.columns(hidden)))
        self.normed = zeros(np.uint32, max(tokens, rows) * hidden // 2)
        inventory = DeepseekV4Inventory(model)
        self.widths: dict[LayerKind, dict[str, int]] = {}
        self.projected: dict[LayerKind, Float32Array] = {}
        self.heads: dict[LayerKind, Float32Array] = {}
        for kind in sorted(set(model.kinds)):
            self.widths[kind] = inventory.projected(kind)
            indexer = model.indexer if kind == "csa" else None
            indexed = len(rank.heads(indexer.num_heads)) * indexer.head_dim if indexer else 0
            self.projected[kind] = attention.peers.zeros(np.float32, tokens, sum(self.widths[kind].values()))
            self.heads[kind] = zeros(np.float32, tokens, heads * model.head_dim + indexed)
        self.latent = zeros(np.uint32, tokens * model.q_lora_rank // 2)
        self.queries = zeros(*_panels(tokens, heads, model.head_dim))
        if model.indexer is not None:
            self.index_queries = attention.peers.zeros(
                *_panels(tokens, model.indexer.num_heads, model.indexer.head_dim)
            )
            self.topk_indices = attention.peers.zeros(np.int32, tokens, model.indexer.topk)
            self.scores = zeros(np.float32, INDEXER_TOKENS, ceil_div(config.limits.max_model_len, model.csa_ratio))
        self.attended = attention.peers.zeros(np.uint32, tokens * model.num_heads * model.head_dim // 2)
        self.out_latent = attention.peers.zeros(np.uint32, tokens * model.o_groups * model.o_lora_rank // 2)
        self.router_logits = peers.zeros(np.float32, tokens, experts.count)
        self.gated = peers.zeros(np.uint32, tokens * experts.intermediate_size // 2)
        self.experts = ExpertBuffers(entries, hidden, experts.intermediate_size, peers)
        self.logits = peers.zeros(np.float32, rows, model.vocab_size)
        widest = max(hidden, model.q_lora_rank, model.o_groups * model.o_lora_rank, experts.intermediate_size)
        streams = tokens * model.hyper.streams if model.drafts else 0
        if streams:
            self.embedded = peers.zeros(np.float32, tokens, hidden)
            self.stream_rows = zeros(np.uint32, streams * hidden // 2)
            self.added = np.tile(_ADDS, (tokens, 1))
        self._sizes = (max(tokens, rows, streams), widest, entries, max(hidden, experts.intermediate_size))

    def products(self, step: Recording, exact: bool) -> Products:
        """Return the Products that records products of these activations."""
        return Products(step, exact, *self._sizes)


def _panels(tokens: int, heads: int, dim: int) -> tuple[Any, ...]:
    """Return type and shape of query panels for MLA and the indexer."""
    return np.uint32, tokens, ceil_div(heads, PANEL), dim // 2, PANEL
