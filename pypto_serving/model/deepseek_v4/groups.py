"""The KV groups of DeepSeek V4. Torch-free."""

from __future__ import annotations

import math

from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.types.kv import CompressedSpec, KVCacheGroupSpec, KVTensorSpec, StateSpec, WindowSpec
from pypto_serving.util import ceil_div

_MAX_BLOCK, _MAX_STATE_BLOCK = 128, 16


def kv_groups(model: DeepseekV4Config, dtype: str, block_size: int = 0) -> tuple[KVCacheGroupSpec, ...]:
    """List the KV groups of the model: latents of `dtype`, float32 compressor states.

    `block_size` is ignored: compression ratios and window decide.

    | group           | a row                                       | rows          |
    |-----------------|---------------------------------------------|---------------|
    | ori             | latent after RoPE: K and V of all heads     | one per token |
    | cmp csa, hca    | compressed latent after RoPE                | one per ratio |
    | idx             | indexer key after RoPE                      | one per ratio |
    | hca_state       | kv, then gates with position bias (ape)     | one per token |
    | csa_state       | the same, twice as wide: windows overlap    | one per token |
    | csa_inner_state | the same for the indexer's keys             | one per token |
    | streams         | residual streams that draft layers read     | one per token |

    A block is laid out by tensor, then layer, then row. A draft layer's row of `ori` at a position is that of the
    stream before it and the token there, so that it depends on no later token.
    """
    csa, hca, dim, size = model.layers_of("csa"), model.layers_of("hca"), model.head_dim, history_block(model)
    ori = KVTensorSpec(name="kv", layers=tuple(range(len(model.kinds))), dtype=dtype, row_shape=(dim,))
    groups: list[KVCacheGroupSpec] = [WindowSpec(name="ori", block_size=size, window=model.window, tensors=(ori,))]
    compressed = []
    if csa:
        compressed.append(_entries("csa", csa, dtype, dim, model.csa_ratio, "csa_state"))
    if hca:
        compressed.append(_entries("hca", hca, dtype, dim, model.hca_ratio, "hca_state"))
    if compressed:
        groups.append(CompressedSpec(name="cmp", block_size=size, tensors=tuple(compressed)))
    if csa:
        assert model.indexer is not None
        key = _entries("key", csa, dtype, model.indexer.head_dim, model.csa_ratio, "csa_inner_state")
        groups.append(CompressedSpec(name="idx", block_size=size, tensors=(key,)))
    if hca:
        groups.append(_state("hca_state", hca, 2 * dim, model.hca_ratio, 0))
    if csa:
        assert model.indexer is not None
        groups.append(_state("csa_state", csa, 4 * dim, model.csa_ratio, model.csa_ratio))
        groups.append(_state("csa_inner_state", csa, 4 * model.indexer.head_dim, model.csa_ratio, model.csa_ratio))
    if model.drafts:
        width = model.hyper.streams * model.hidden_size
        stream = KVTensorSpec(name="stream", layers=tuple(model.drafts), dtype="float32", row_shape=(width,))
        groups.append(StateSpec(name="streams", block_size=_MAX_STATE_BLOCK, period=1, overlap=1, tensors=(stream,)))
    return tuple(groups)


def history_block(model: DeepseekV4Config) -> int:
    """Choose the block size of `ori`, `cmp` and `idx`: about a window, and a multiple of every ratio."""
    ratios = math.lcm(*(model.ratio(kind) for kind in set(model.kinds) - {"swa"}))
    return ceil_div(min(model.window, _MAX_BLOCK), ratios) * ratios


def _entries(name: str, layers: tuple[int, ...], dtype: str, dim: int, ratio: int, source: str) -> KVTensorSpec:
    """Describe a tensor with one row of `dim` for every `ratio` tokens."""
    return KVTensorSpec(name=name, layers=layers, dtype=dtype, row_shape=(dim,), ratio=ratio, folded_from=source)


def _state(name: str, layers: tuple[int, ...], width: int, period: int, overlap: int) -> StateSpec:
    """Describe a group of compressor states: tokens of the open window, and `overlap` tokens before it."""
    size = max(n for n in range(1, min(period, _MAX_STATE_BLOCK) + 1) if period % n == 0)
    rows = KVTensorSpec(name="state", layers=layers, dtype="float32", row_shape=(width,))
    return StateSpec(name=name, block_size=size, period=period, overlap=overlap, tensors=(rows,))
