"""The contract of the double's Qwen3, as pypto-lib describes one."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
REVISION = os.environ.get("PYPTO_LIB_DOUBLE_REVISION", "2026-08")


@dataclass(frozen=True)
class TensorArgSpec:
    """An argument; sizes with a name are dynamic."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    direction: str = "in"


@dataclass(frozen=True)
class KernelSpec:
    """A stage."""

    args: tuple[TensorArgSpec, ...]


@dataclass(frozen=True)
class ModelContract:
    """What an engine reads of a contract."""

    limits: dict[str, int]
    kernels: dict[str, KernelSpec]
    load_kernels: Callable[[], None]

    def abi_fingerprint(self) -> str:
        stages = {name: [vars(arg) for arg in kernel.args] for name, kernel in self.kernels.items()}
        return json.dumps([self.limits, stages], sort_keys=True)


def make_contract(config: Any) -> ModelContract:
    """Describe the programs of a model."""
    stages = arguments(config)
    limits = {
        "batch": 16,
        "max_seq": 4096,
        "page_size": 128,
        "vocab": padded(config.vocab_size),
        "real_vocab": config.vocab_size,
        "num_layers": config.num_hidden_layers,
    }

    def load_kernels() -> None:
        for stage, args in stages.items():
            path = FOLDER / f"{stage}_fwd.py"
            spec = importlib.util.spec_from_file_location(f"_double_tiny_qwen3_{stage}", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            setattr(module, f"qwen3_{stage}_host", module.make_host(config, args))

    return ModelContract(limits, {name: KernelSpec(args) for name, args in stages.items()}, load_kernels)


def padded(vocab_size: int) -> int:
    return -(-vocab_size // 512) * 512


def arguments(config: Any) -> dict[str, tuple[TensorArgSpec, ...]]:
    """List the arguments of both stages, in the order of their kernels."""
    layers, hidden, dim = config.num_hidden_layers, config.hidden_size, config.head_dim
    queries, keys, inner = config.num_attention_heads * dim, config.num_key_value_heads * dim, config.intermediate_size
    vocab, ids_in = padded(config.vocab_size), REVISION == "2026-08"

    def arg(name: str, dtype: str, *shape: int | str, out: bool = False) -> TensorArgSpec:
        return TensorArgSpec(name, dtype, shape, "out" if out else "in")

    attention = (
        arg("input_rms_weight", "float32", layers, hidden),
        arg("wq", "bfloat16", layers * hidden, queries),
        arg("wk", "bfloat16", layers * hidden, keys),
        arg("wv", "bfloat16", layers * hidden, keys),
        arg("q_norm_weight", "float32", layers, dim),
        arg("k_norm_weight", "float32", layers, dim),
    )
    rope = (arg("rope_cos", "float32", 4096, dim), arg("rope_sin", "float32", 4096, dim))
    caches = (arg("k_cache", "bfloat16", "rows", dim), arg("v_cache", "bfloat16", "rows", dim))
    wo, post = arg("wo", "bfloat16", layers * queries, hidden), arg("post_rms_weight", "float32", layers, hidden)
    mlp = (
        arg("w_gate", "bfloat16", layers * hidden, inner),
        arg("w_up", "bfloat16", layers * hidden, inner),
        arg("w_down", "bfloat16", layers * inner, hidden),
    )
    head = (arg("final_norm_weight", "float32", 1, hidden), arg("lm_head_weight", "bfloat16", vocab, hidden))
    embed, out = arg("embed_weight", "bfloat16", vocab, hidden), arg("out", "float32", "batch", vocab, out=True)
    table = arg("block_table", "int32", "table")
    seq_lens = arg("seq_lens", "int32", "batch")
    prefill = (
        arg("input_ids", "int32", "tokens") if ids_in else arg("hidden_states", "bfloat16", "tokens", hidden),
        seq_lens,
        arg("chunk_lens", "int32", "batch"),
        arg("chunk_offsets", "int32", "batch"),
        *attention,
        *rope,
        table,
        arg("slot_mapping", "int32", "tokens"),
        *caches,
        wo,
        *((*mlp, post) if ids_in else (post, *mlp)),
        *head,
        *((embed,) if ids_in else ()),
        out,
    )
    slots = arg("slot_mapping", "int32", "batch")
    decode = (*attention, seq_lens, table, slots, *rope, *caches, wo, *mlp, post, *head, out)
    if not ids_in:
        return {"prefill": prefill, "decode": (arg("hidden_states", "bfloat16", "batch", hidden), *decode)}
    ids = (
        arg("sampled_ids_in", "int32", "batch", 8),
        arg("sampled_ids", "int32", "batch", 8, out=True),
        arg("next_hidden", "bfloat16", "batch", hidden, out=True),
    )
    return {"prefill": prefill, "decode": (*decode, embed, *ids)}
