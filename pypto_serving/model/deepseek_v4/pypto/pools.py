"""The pools of pypto-lib's DeepSeek V4 Flash programs, and our KV groups with their block sizes. Torch-free.

| pool            | KV group        | tokens of a block | rows of a block |
|-----------------|-----------------|-------------------|-----------------|
| ori             | ori             | 128               | 128             |
| hca_cmp         | cmp             | 128               | 1               |
| csa_cmp         | cmp             | 128               | 32              |
| idx             | idx             | 128               | 32              |
| hca_state       | hca_state       | 8                 | 8               |
| csa_state       | csa_state       | 4                 | 4               |
| csa_inner_state | csa_inner_state | 4                 | 4               |

Both compressed pools have the block ids of one group. The draft layer's pool has those of `ori`.

A program's table is a ring: block i of a sequence is entry i modulo `block_counts`. Our tables have an entry for every
block of a sequence, so the counts are their widths, and the rings never wrap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pypto_serving.model.deepseek_v4.config import DeepseekV4Config, LayerKind
from pypto_serving.model.deepseek_v4.spec import kv_groups
from pypto_serving.types.kv import KVCacheGroupSpec, KVTensorSpec, Spans

MAX_TOKENS = 16384
"""Longest sequence of the programs."""


@dataclass(frozen=True, slots=True)
class CachePool:
    """A pool: its tokens per block, its group, the layers that it has, its tensors, and names of arguments about it."""

    tokens: int
    group: str
    kind: LayerKind | None
    tensors: tuple[str, ...]
    decode_table: str
    prefill_table: str
    slot_mapping: str

    def layers(self, model: DeepseekV4Config) -> int:
        """Count the layers that have rows in it."""
        return model.num_layers if self.kind is None else len(model.layers_of(self.kind))

    def ratio(self, model: DeepseekV4Config) -> int:
        """Return the tokens per row."""
        return model.ratio(self.kind) if self.kind is not None and self.group in ("cmp", "idx") else 1


def _pool(name: str, tokens: int, kind: LayerKind | None, *tensors: str, group: str = "", slots: str = "") -> CachePool:
    table = f"{name.replace('_state', '_compress_state')}_block_table"
    decode_table = "block_table" if name == "ori" else table
    return CachePool(tokens, group or name, kind, tensors, decode_table, table, f"{slots or name}_slot_mapping")


POOLS: Mapping[str, CachePool] = {
    "ori": _pool("ori", 128, None, "kv_cache"),
    "hca_cmp": _pool("hca_cmp", 128, "hca", "hca_cmp_kv", group="cmp"),
    "csa_cmp": _pool("csa_cmp", 128, "csa", "csa_cmp_kv", group="cmp"),
    "idx": _pool("idx", 128, "csa", "idx_kv_cache", "idx_kv_scale", slots="csa_idx"),
    "hca_state": _pool("hca_state", 8, "hca", "hca_compress_state"),
    "csa_state": _pool("csa_state", 4, "csa", "csa_compress_state"),
    "csa_inner_state": _pool("csa_inner_state", 4, "csa", "csa_inner_compress_state"),
}
"""The pools in the order of `block_counts`."""
TABLE_WIDTHS: Mapping[str, int] = {name: MAX_TOKENS // pool.tokens for name, pool in POOLS.items()}


def npu_groups(model: DeepseekV4Config, drafts: bool = False) -> tuple[KVCacheGroupSpec, ...]:
    """Return the KV groups of the model with the pools' block sizes and dtypes; with rows of the draft layer if asked.

    Indexer keys are int8, with a scale each.
    """
    sizes = {pool.group: pool.tokens for pool in POOLS.values()}
    found = []
    for group in kv_groups(model, "bfloat16"):
        tensors = group.tensors
        if group.name == "idx":
            tensors = tuple(each for tensor in tensors for each in _scaled(tensor))
        if group.name == "ori" and drafts:
            layers = (model.num_layers,)
            tensors = (*tensors, msgspec.structs.replace(tensors[0], name="mtp", layers=layers))
        found.append(msgspec.structs.replace(group, block_size=sizes[group.name], tensors=tensors))
    return tuple(found)


def _scaled(tensor: KVTensorSpec) -> tuple[KVTensorSpec, KVTensorSpec]:
    keys = msgspec.structs.replace(tensor, dtype="int8")
    return keys, msgspec.structs.replace(tensor, name="scale", dtype="float32", row_shape=(1,))


def block_sizes(
    model: DeepseekV4Config, groups: Sequence[KVCacheGroupSpec], num_blocks: Sequence[int]
) -> dict[str, int]:
    """Return the sizes named in the pools' shapes, for `num_blocks` of each of our groups."""
    blocks = {group.name: count for group, count in zip(groups, num_blocks, strict=True)}
    found = {f"{name.upper()}_BLOCKS": pool.layers(model) * blocks[pool.group] for name, pool in POOLS.items()}
    return found | {"MTP_BLOCKS": blocks["ori"]}


_TENSORS = {
    ("ori", "kv"): "kv_cache",
    ("ori", "mtp"): "mtp_kv_cache",
    ("cmp", "csa"): "csa_cmp_kv",
    ("cmp", "hca"): "hca_cmp_kv",
    ("idx", "key"): "idx_kv_cache",
    ("idx", "scale"): "idx_kv_scale",
    ("hca_state", "state"): "hca_compress_state",
    ("csa_state", "state"): "csa_compress_state",
    ("csa_inner_state", "state"): "csa_inner_compress_state",
}
"""Arguments by KV group and its tensor."""


def pages(group: KVCacheGroupSpec, num_blocks: int, block: int) -> dict[str, Spans]:
    """Return the bytes of a block of `group` in each tensor of a rank, for tiers.

    Layers lie one after the other: the j-th layer of a pool has blocks [j * num_blocks, (j + 1) * num_blocks).
    """
    found = {}
    for tensor in group.tensors:
        size = group.block_size // tensor.ratio * tensor.row_bytes
        starts = [(place * num_blocks + block) * size for place in range(len(tensor.layers))]
        found[_TENSORS[group.name, tensor.name]] = tuple((start, start + size) for start in starts)
    return found
