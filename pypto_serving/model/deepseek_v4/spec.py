"""Description of DeepSeek V4 for the engine: KV groups, bytes of weights, programs, family object. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pypto_serving.kernels.constants import HYPER_CONNECTION_STREAMS, MAX_DIM, MAX_LATENT, MAX_LATENT_HEADS, PANEL
from pypto_serving.model.checkpoint import StoredTensor
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.inventory import DeepseekV4Inventory
from pypto_serving.model.formats.schemes import DEEPSEEK_FP4, Int8
from pypto_serving.model.inventory import describe_model
from pypto_serving.model.registry import ModelFamily, Serving, refused_dtype
from pypto_serving.parallel.topology import TokenBytes
from pypto_serving.types.kv import CompressedSpec, KVCacheGroupSpec, KVTensorSpec, StateSpec, WindowSpec
from pypto_serving.types.model import ModelSpec
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

    A block is laid out by tensor, then layer, then row. A draft layer's row of `ori` at a position is computed from the
    previous stream and the token there, so it does not depend on later tokens.
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


def model_spec(config: DeepseekV4Config, serving: Serving, headers: Mapping[str, StoredTensor]) -> ModelSpec:
    """Describe the checkpoint to the engine. The KV groups have block sizes and dtypes of their own."""
    inventory = DeepseekV4Inventory(config, headers)
    option, reason = refused_dtype(serving.dtype)
    return describe_model(
        config,
        inventory,
        serving.dtype,
        inventory.packed_bytes(head=Int8() if serving.head == "int8" else None),
        _token_bytes(config, inventory),
        position_bytes=sum(rope.position_bytes for rope in set(config.ropes().values())),
        needs_torch=reason or _needs_torch(config),
        needs_torch_option=option,
        quantization=config.storage.name,
        choices=("activations", "head") if DEEPSEEK_FP4 in config.storage.schemes_of("expert") else ("head",),
        own_blocks=True,
        kv_groups=kv_groups(config, serving.dtype),
    )


def _token_bytes(config: DeepseekV4Config, inventory: DeepseekV4Inventory) -> TokenBytes:
    """Count the bytes of a token in the buffers of `buffers.py`."""
    hidden, experts, hyper, kinds = config.hidden_size, config.experts, config.hyper, set(config.kinds)
    width, latent = config.num_heads * config.head_dim, config.o_groups * config.o_lora_rank
    projected = sum(sum(inventory.projected(kind).values()) for kind in kinds)
    attention = 4 * projected + (4 * len(kinds) + 2) * width + 2 * latent
    attention += _panel_bytes(config.num_heads, config.head_dim)
    if (indexer := config.indexer) is not None:
        attention += 4 * indexer.topk + _panel_bytes(indexer.num_heads, indexer.head_dim)
        attention += 4 * indexer.num_heads * indexer.head_dim if "csa" in kinds else 0
    streams, entries = 4 * hyper.streams * hidden, experts.per_token
    mixing = 4 * (2 * hyper.mixes - hyper.streams)
    drafting = 2 * hyper.streams * hidden + 4 * hyper.mixes if config.drafts else 0
    embedded = 4 * hidden if config.drafts else 0
    inner = 4 * experts.count + 2 * experts.intermediate_size * (1 + entries)
    return TokenBytes(
        whole=mixing + drafting + 2 * config.q_lora_rank + hidden * (6 + 2 * entries),
        split=streams + embedded + inner + 4 * hidden * (1 + entries),
        attention=attention,
        passed=streams,
    )


def _panel_bytes(heads: int, dim: int) -> int:
    """Count the bytes of queries in panels."""
    return 2 * ceil_div(heads, PANEL) * PANEL * dim


def _needs_torch(config: DeepseekV4Config) -> str:
    """Return why the CPU kernels cannot serve the model, or "".

    The bounds follow from the layouts in csrc/ops.h.
    """
    for name, (size, unit, most) in _kernel_sizes(config).items():
        if size % unit or size > most > 0:
            bound = f" up to {most}" if most else ""
            return f"the kernels need a {name} that is a multiple of {unit}{bound}, not {size}"
    streams, wanted = config.hyper.streams, HYPER_CONNECTION_STREAMS
    return "" if streams == wanted else f"the kernels mix {wanted} streams, not {streams}"


def _kernel_sizes(config: DeepseekV4Config) -> dict[str, tuple[int, int, int]]:
    """Return by name the sizes that the kernels limit: (size, required divisor, maximum or 0)."""
    sizes = {
        "head_dim": (config.head_dim, 32, MAX_LATENT),
        "qk_rope_head_dim": (config.rope_dim, 16, MAX_LATENT),
        "num_attention_heads": (config.num_heads, config.o_groups, MAX_LATENT_HEADS),
        "hidden_size": (config.hidden_size, 16, 0),
        "q_lora_rank": (config.q_lora_rank, 16, 0),
        "o_lora_rank": (config.o_lora_rank, 32, 0),
        "moe_intermediate_size": (config.experts.intermediate_size, 16, 0),
        "n_routed_experts": (config.experts.count, 4, 0),
        "compress rate": (max(2 * config.csa_ratio, config.hca_ratio), 1, 128),
    }
    indexer = config.indexer
    if indexer is not None:
        sizes |= {"index_head_dim": (indexer.head_dim, 32, MAX_DIM), "index_n_heads": (indexer.num_heads, 1, 128)}
    return sizes


FAMILY = ModelFamily(
    parse=DeepseekV4Config.from_json,
    inventory=DeepseekV4Inventory,
    kv_groups=kv_groups,
    spec=model_spec,
    torch_program="pypto_serving.model.deepseek_v4.program:DeepseekV4Program",
    kernel_program="pypto_serving.model.deepseek_v4.native:NativeDeepseekV4",
    conversion="pypto_serving.model.deepseek_v4.convert:plan_conversion",
    with_drafts=DeepseekV4Config.with_drafts,
)
