"""What is known about a checkpoint before anything is loaded."""

from __future__ import annotations

import msgspec

from pypto_serving.types.kv import KVCacheGroupSpec


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint as its files describe it. `dtype` is the serving dtype of weights, activations and KV.

    `max_position_embeddings` is the longest sequence in tokens, rope scaling included. `weight_bytes` counts
    the weights as they will lie in memory.
    """

    path: str
    architecture: str
    dtype: str
    num_layers: int
    vocab_size: int
    max_position_embeddings: int
    num_parameters: int
    weight_bytes: int
    kv_groups: tuple[KVCacheGroupSpec, ...]
    eos_token_ids: tuple[int, ...] = ()
