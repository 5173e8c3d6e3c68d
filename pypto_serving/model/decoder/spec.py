"""Description of decoders for the engine: KV groups, bytes of weights, programs, and family object. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pypto_serving.kernels.constants import CODES_INPUTS, ITEM_ROWS, MAX_DIM
from pypto_serving.model.checkpoint import StoredTensor
from pypto_serving.model.decoder.inventory import DecoderInventory
from pypto_serving.model.decoder.recipe import DecoderConfig, MlpRecipe
from pypto_serving.model.formats.cards import card_bytes, card_obstacle
from pypto_serving.model.formats.schemes import PLAIN, Int8
from pypto_serving.model.inventory import describe_model
from pypto_serving.model.registry import ModelFamily, Serving, refused_dtype
from pypto_serving.parallel.topology import TokenBytes
from pypto_serving.types.kv import DTYPE_BYTES, FullSpec, KVCacheGroupSpec, KVTensorSpec
from pypto_serving.types.model import ModelSpec


def kv_groups(config: DecoderConfig, dtype: str, block_size: int) -> tuple[KVCacheGroupSpec, ...]:
    """Describe one full-history group: keys after QK-norm and RoPE, and values. int8 has a scale per token and head."""
    layers, heads, row = tuple(range(config.num_layers)), (config.num_kv_heads,), (config.num_kv_heads, config.head_dim)
    tensors = [KVTensorSpec(name=name, layers=layers, dtype=dtype, row_shape=row) for name in ("k", "v")]
    if dtype == "int8":
        scales = ("k_scale", "v_scale")
        tensors += [KVTensorSpec(name=name, layers=layers, dtype="float32", row_shape=heads) for name in scales]
    return (FullSpec(name="kv", tensors=tuple(tensors), block_size=block_size),)


def model_spec(config: DecoderConfig, serving: Serving, headers: Mapping[str, StoredTensor]) -> ModelSpec:
    """Describe the checkpoint to the engine."""
    inventory = DecoderInventory(config, headers)
    choices, (option, reason) = _choices(inventory), _refused_option(serving)
    rounded = Int8() if serving.head == "int8" and "head" in choices else None
    return describe_model(
        config,
        inventory,
        serving.dtype,
        inventory.packed_bytes(DTYPE_BYTES[serving.dtype], rounded),
        _token_bytes(config),
        window=config.window,
        position_bytes=sum(rope.position_bytes for rope in config.ropes),
        needs_torch=reason or _needs_torch(inventory),
        needs_torch_option=option,
        no_card=_no_card(inventory, serving),
        card_bytes=card_bytes(inventory),
        quantization=inventory.quantization(),
        choices=choices,
        kv_groups=kv_groups(config, "int8" if serving.kv_dtype == "int8" else serving.dtype, serving.block_size),
    )


def _token_bytes(config: DecoderConfig) -> TokenBytes:
    """Count the bytes of a token in the buffers of `native.py`."""
    hidden, experts = config.hidden_size, config.experts
    width, rotated = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    whole, split = 2 * hidden, 4 * hidden + 2 * max(config.mlp_widths, default=0)
    if experts is not None:
        whole += 4 * experts.count + 2 * hidden * experts.per_token
        split += (2 * experts.width + 4 * hidden) * experts.per_token
    return TokenBytes(whole=whole, split=split, attention=8 * width + 8 * rotated, passed=4 * hidden)


def _choices(inventory: DecoderInventory) -> tuple[str, ...]:
    """List the options that the model leaves open."""
    config, choices = inventory.config, ["kv_dtype"]
    if inventory.inputs_of_codes():
        choices.append("activations")
    plain = inventory.schemes.get(config.head, PLAIN) == PLAIN and f"{config.head}.weight" not in inventory.blocks
    if plain and config.hidden_size % 4 == 0:
        choices.append("head")
    return tuple(choices)


def _refused_option(serving: Serving) -> tuple[str, str]:
    """Return the option whose value the CPU kernels refuse, and why; both are "" if they accept all."""
    option, reason = refused_dtype(serving.dtype)
    if not option and serving.block_size % 32:
        return "block_size", f"the kernels need blocks of a multiple of 32 tokens, not {serving.block_size}"
    return option, reason


def _needs_torch(inventory: DecoderInventory) -> str:
    """Return why the CPU kernels cannot serve the model, or "".

    The bounds follow from the layouts in csrc/ops.h.
    """
    config: DecoderConfig = inventory.config
    experts, quantized = config.experts, config.quantization is not None
    widths = [*config.mlp_widths, *([experts.width] if experts else [])]
    if config.head_dim % 32 or config.head_dim > MAX_DIM:
        return f"the kernels need a head_dim of 32, 64, ... {MAX_DIM}, not {config.head_dim}"
    if config.attention.rope.dim % 32:
        return f"the kernels rotate 32, 64, ... dimensions of a head, not {config.attention.rope.dim}"
    if config.num_heads // config.num_kv_heads > ITEM_ROWS:
        return f"the kernels share a key among at most {ITEM_ROWS} queries"
    if quantized and config.hidden_size % 4:
        return f"quantised weights need a hidden_size that is a multiple of 4, not {config.hidden_size}"
    for inputs in inventory.inputs_of_codes():
        if inputs % CODES_INPUTS:
            return f"4-bit weights need inputs in multiples of {CODES_INPUTS}, not {inputs}"
    if quantized and max(config.hidden_size, *widths, config.num_heads * config.head_dim) >= 1 << 17:
        return "sums of int8 products need sizes below 131,072"
    if config.hidden_size % 2 or any(width % 16 for width in widths):
        return f"the kernels need an even hidden_size and intermediate sizes that are multiples of 16, not {widths}"
    return ""


def _no_card(inventory: DecoderInventory, serving: Serving) -> str:
    """Say why the kernels for NVIDIA cards cannot serve the model, or nothing if they can."""
    config: DecoderConfig = inventory.config
    sizes = config.hidden_size, *config.mlp_widths, config.num_heads * config.head_dim, config.vocab_size
    if serving.dtype != "bfloat16":
        return f"it computes in bfloat16, not {serving.dtype} (see dtype)"
    if serving.kv_dtype == "int8":
        return "it keeps keys and values in bfloat16, not int8 (see kv-dtype)"
    if config.experts is not None:
        return "it has no kernels for experts yet"
    if any(isinstance(layer.mlp, MlpRecipe) and layer.mlp.bias for layer in config.layers):
        return "it has no kernels for biases in an MLP"
    if config.attention.rope.dim < config.head_dim or config.attention.rope.query_growth:
        return "its kernels rotate whole heads, and scale no queries by position"
    if config.head_dim not in (16, 32, 64, 128, 256):
        return f"its kernels need a head_dim of 16, 32, 64, 128 or 256, not {config.head_dim}"
    if any(size % 16 for size in sizes):
        return f"its kernels need sizes that are multiples of 16, not {sizes}"
    return card_obstacle(inventory, inventory.joined())


def decoder_family(parse: Callable[[dict[str, Any], str], DecoderConfig]) -> ModelFamily:
    """Return the family of the architectures whose config.json `parse` reads."""
    return ModelFamily(
        parse=parse,
        inventory=DecoderInventory,
        kv_groups=kv_groups,
        spec=model_spec,
        torch_program="pypto_serving.model.decoder.program:TorchDecoder",
        kernel_program="pypto_serving.model.decoder.native:NativeDecoder",
        conversion="pypto_serving.model.decoder.convert:plan_conversion",
        card_program="pypto_serving.model.decoder.cuda:CudaDecoder",
    )
