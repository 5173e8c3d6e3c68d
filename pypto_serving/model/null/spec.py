"""Specs of models without weights: KV groups for the null backend. Torch-free."""

from __future__ import annotations

from pypto_serving.types.kv import KVCacheGroupSpec, KVTensorSpec
from pypto_serving.types.model import ModelSpec


def _row(name: str, layers: int, width: int, dtype: str, ratio: int = 1, folded_from: str = "") -> KVTensorSpec:
    return KVTensorSpec(
        name=name, layers=tuple(range(layers)), dtype=dtype, row_shape=(width,), ratio=ratio, folded_from=folded_from
    )


def plain_groups(block_size: int = 16) -> tuple[KVCacheGroupSpec, ...]:
    """One full-history group, as Qwen3 has."""
    return (
        KVCacheGroupSpec(name="kv", kind="full", block_size=block_size, tensors=(_row("kv", 28, 2048, "bfloat16"),)),
    )


def deepseek_v4_groups() -> tuple[KVCacheGroupSpec, ...]:
    """The six cache families of DeepSeek V4 Flash: 43 layers, of which 21 CSA (ratio 4) and 20 HCA (ratio 128)."""
    return (
        KVCacheGroupSpec(
            name="ori", kind="sliding_window", block_size=128, window=128, tensors=(_row("kv", 43, 512, "bfloat16"),)
        ),
        KVCacheGroupSpec(
            name="cmp",
            kind="compressed",
            block_size=128,
            tensors=(
                _row("csa", 21, 512, "bfloat16", 4, "csa_state"),
                _row("hca", 20, 512, "bfloat16", 128, "hca_state"),
            ),
        ),
        KVCacheGroupSpec(
            name="idx", kind="compressed", block_size=128, tensors=(_row("key", 21, 132, "int8", 4, "csa_inner_state"),)
        ),
        _state("hca_state", 8, 128, 0, _row("state", 20, 1024, "float32")),
        _state("csa_state", 4, 4, 4, _row("state", 21, 2048, "float32")),
        _state("csa_inner_state", 4, 4, 4, _row("state", 21, 512, "float32")),
    )


def _state(name: str, block_size: int, period: int, overlap: int, tensor: KVTensorSpec) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(
        name=name, kind="rolling_state", block_size=block_size, period=period, overlap=overlap, tensors=(tensor,)
    )


def null_spec(name: str = "plain") -> ModelSpec:
    """A model without weights: `plain` or `deepseek_v4` name its KV groups. Raises KeyError for other names."""
    groups = {"plain": plain_groups, "deepseek_v4": deepseek_v4_groups}[name]()
    return ModelSpec(
        path="",
        architecture="Null",
        dtype="bfloat16",
        num_layers=43 if name == "deepseek_v4" else 28,
        vocab_size=129280 if name == "deepseek_v4" else 151936,
        max_position_embeddings=1 << 20 if name == "deepseek_v4" else 40960,
        num_parameters=0,
        weight_bytes=0,
        kv_groups=groups,
    )
