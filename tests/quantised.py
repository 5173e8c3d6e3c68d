"""Tiny checkpoints in every format of quantised weights, written by code of their own, and what they mean."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tests.checkpoints  # noqa: F401

# isort: split
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pypto_serving.model.null_models import FLASH
from tests.compressed import SCHEME, quantization_config

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, Tensor]
Quantise = Callable[[Tensor], tuple[Tensors, Tensor]]
"""From weights [n, k] to tensors by last component of the name, and the values that these mean."""


@dataclass(frozen=True)
class Format:
    """`section` of config.json for a list of modules left out, and what becomes of a matrix. `name` is the engine's."""

    name: str
    section: Callable[[list[str]], dict[str, Any]]
    quantise: Quantise


def spread(scales: Tensor, like: Tensor) -> Tensor:
    """Scales of blocks, each repeated over its block of a matrix; the last ones may stick out."""
    rows, columns = (-(-size // count) for size, count in zip(like.shape, scales.shape, strict=True))
    whole = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return whole[: like.shape[0], : like.shape[1]]


def packed(codes: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 words of 8 codes along a dimension, which may be padded: bits 4 i hold code order[i]."""
    codes = codes.to(torch.int64).movedim(dim, -1)
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 8)).unflatten(-1, (-1, 8))
    words = sum(padded[..., source] << (4 * i) for i, source in enumerate(order))
    assert isinstance(words, Tensor)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def paired(codes: Tensor) -> Tensor:
    """Bytes of two codes, the even one in the low half."""
    codes = codes.to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def int4_codes(weights: Tensor, group: int, zeros: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 to 15, scales and zero points [n, groups]."""
    groups = weights.unflatten(1, (-1, group or weights.shape[1]))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    if zeros:
        scales = ((high - low) / 15).to(dtype)
        points = (-low / scales.float()).round().clamp(0, 15)
    else:
        scales = (groups.abs().amax(2) / 7.5).to(dtype)
        points = torch.full_like(low, 8)
    codes = (weights / spread(scales.float(), weights) + spread(points, weights)).round().clamp(0, 15)
    return codes, scales, points


def int4(group: int, zeros: bool = False, dtype: torch.dtype = torch.bfloat16) -> Quantise:
    """pack-quantized."""

    def quantise(weights: Tensor) -> tuple[Tensors, Tensor]:
        codes, scales, points = int4_codes(weights, group, zeros, dtype)
        tensors = {
            "weight_packed": packed(codes, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weights.shape),
        }
        if zeros:
            tensors["weight_zero_point"] = packed(points, 0)
        return tensors, (codes - spread(points, codes)) * spread(scales.float(), codes)

    return quantise


def int4_bytes(group: int) -> Quantise:
    """int-quantized with 4 bits."""

    def quantise(weights: Tensor) -> tuple[Tensors, Tensor]:
        codes, scales, points = int4_codes(weights, group, False, torch.bfloat16)
        signed = codes - spread(points, codes)
        return {"weight": signed.to(torch.int8), "weight_scale": scales}, signed * spread(scales.float(), codes)

    return quantise


def gptq(group: int, zeros: bool, version: int) -> Quantise:
    def quantise(weights: Tensor) -> tuple[Tensors, Tensor]:
        codes, scales, points = int4_codes(weights, group, zeros, torch.float16)
        tensors = {
            "qweight": packed(codes.T, 0),
            "qzeros": packed(points.T, 1) - (0x11111111 if version == 1 else 0),
            "scales": scales.T.contiguous(),
            "g_idx": (torch.arange(codes.shape[1]) // (group or codes.shape[1])).to(torch.int32),
        }
        return tensors, (codes - spread(points, codes)) * spread(scales.float(), codes)

    return quantise


def awq(group: int, zeros: bool = True) -> Quantise:
    def quantise(weights: Tensor) -> tuple[Tensors, Tensor]:
        codes, scales, points = int4_codes(weights, group, zeros, torch.float16)
        tensors = {
            "qweight": packed(codes.T, 1, AWQ_ORDER),
            "qzeros": packed(points.T, 1, AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }
        return tensors, (codes - spread(points, codes)) * spread(scales.float(), codes)

    return quantise


def e2m1_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest 4-bit floats' codes, and their values."""
    codes = (values.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    signs = values < 0
    return codes + 8 * signs, E2M1[codes] * torch.where(signs, -1.0, 1.0)


def exponents(weights: Tensor, group: int) -> Tensor:
    """e8m0 scales [n, groups] with which 6 is at least the largest magnitude."""
    tops = weights.unflatten(1, (-1, group)).abs().amax(2)
    return ((tops / 6).log2().ceil() + 127).clamp(0, 254).to(torch.uint8)


def mxfp4(weights: Tensor) -> tuple[Tensors, Tensor]:
    scales = exponents(weights, 32)
    factors = spread(torch.exp2(scales.float() - 127), weights)
    codes, values = e2m1_codes(weights / factors)
    return {"weight_packed": paired(codes), "weight_scale": scales}, values * factors


def deepseek_fp4(weights: Tensor) -> tuple[Tensors, Tensor]:
    tensors, values = mxfp4(weights)
    scales = tensors["weight_scale"].view(torch.float8_e8m0fnu)
    return {"weight": tensors["weight_packed"].view(torch.int8), "scale": scales}, values


def nvfp4(codes_name: str, factor_name: str, divides: bool) -> Quantise:
    def quantise(weights: Tensor) -> tuple[Tensors, Tensor]:
        tops = weights.unflatten(1, (-1, 16)).abs().amax(2)
        factor = torch.tensor([2.0 ** torch.log2(tops.max() / 6 / 448).ceil()])
        scales = (tops / 6 / factor).to(torch.float8_e4m3fn)
        factors = spread(scales.float() * factor, weights)
        codes, values = e2m1_codes(weights / factors.clamp(min=1e-20))
        stored = 1 / factor if divides else factor.reshape(())
        return {codes_name: paired(codes), "weight_scale": scales, factor_name: stored}, values * factors

    return quantise


def fp8(block: tuple[int, int], name: str, dtype: torch.dtype = torch.bfloat16) -> Quantise:
    """F8_E4M3 with a scale per block, (1, 0) per output, (0, 0) per matrix."""

    def quantise(weights: Tensor) -> tuple[Tensors, Tensor]:
        n, k = weights.shape
        rows, columns = block[0] or n, block[1] or k
        whole = torch.nn.functional.pad(weights, (0, -k % columns, 0, -n % rows))
        tops = whole.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax((1, 3))
        scales = tops / 448 if dtype != torch.float8_e8m0fnu else torch.exp2((tops / 448).log2().ceil())
        scales = scales.to(dtype)
        factors = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:n, :k]
        codes = (weights / factors).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, name: scales if any(block) else scales.reshape(1)}, codes.float() * factors

    return quantise


def int8(name: str = "weight_scale") -> Quantise:
    def quantise(weights: Tensor) -> tuple[Tensors, Tensor]:
        scales = weights.abs().amax(1, keepdim=True) / 127
        codes = (weights / scales).round()
        stored = scales if name == "weight_scale" else scales[:, 0].contiguous()
        return {"weight": codes.to(torch.int8), name: stored}, codes * scales

    return quantise


def compressed(
    format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> Callable[[list[str]], dict[str, Any]]:
    """The section of compressed-tensors with one group."""

    def section(ignore: list[str]) -> dict[str, Any]:
        group = {"targets": ["Linear"], "weights": SCHEME | weights, "input_activations": inputs}
        return quantization_config(ignore) | {
            "format": format,
            "config_groups": {"group_0": group | {"output_activations": None}},
        }

    return section


def _int4(group: int, symmetric: bool = True) -> Callable[[list[str]], dict[str, Any]]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return compressed("pack-quantized", {"num_bits": 4, "symmetric": symmetric, **strategy})


def _listed(key: str, **section: Any) -> Callable[[list[str]], dict[str, Any]]:
    """A section with a list of modules left out under `key`."""
    return lambda ignore: section | {key: [name.removeprefix("re:.*").rstrip("$") for name in ignore]}


def _unlisted(**section: Any) -> Callable[[list[str]], dict[str, Any]]:
    return lambda _: section


_TOKEN = SCHEME | {"strategy": "token", "dynamic": True}
_FLOAT8 = {"num_bits": 8, "type": "float"}
_FLOAT4 = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group"}
_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "lm_head": False}
_AWQ = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "gemm"}
_AUTO = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
_NVFP4 = _FLOAT4 | {"group_size": 16, "strategy": "tensor_group"}

FORMATS: dict[str, Format] = {
    "int4_g32": Format("int4 g32", _int4(32), int4(32)),
    "int4_g64_f16": Format("int4 g64", _int4(64), int4(64, dtype=torch.float16)),
    "int4_g128_f32": Format("int4 g128", _int4(128), int4(128, dtype=torch.float32)),
    "int4_channel": Format("int4 per output", _int4(0), int4(0)),
    "int4_asym_g32": Format("int4 g32 with zero points", _int4(32, False), int4(32, zeros=True)),
    "int4_asym_channel": Format("int4 per output with zero points", _int4(0, False), int4(0, zeros=True)),
    "w4a8": Format(
        "int4 g128",
        compressed("int-quantized", {"num_bits": 4, "strategy": "group", "group_size": 128}, _TOKEN),
        int4_bytes(128),
    ),
    "w8a8": Format("w8a8", compressed("int-quantized", {}, _TOKEN), int8()),
    "fp8_channel": Format(
        "fp8 per output",
        compressed("float-quantized", _FLOAT8, _TOKEN | _FLOAT8),
        fp8((1, 0), "weight_scale"),
    ),
    "fp8_tensor": Format(
        "fp8 per matrix",
        compressed("naive-quantized", _FLOAT8 | {"strategy": "tensor"}),
        fp8((0, 0), "weight_scale", torch.float32),
    ),
    "fp8_block": Format(
        "fp8 128x128",
        compressed(
            "float-quantized",
            _FLOAT8 | {"strategy": "block", "block_structure": [128, 128]},
            _TOKEN | _FLOAT8 | {"strategy": "group", "group_size": 128},
        ),
        fp8((128, 128), "weight_scale"),
    ),
    "mxfp4": Format("mxfp4", compressed("mxfp4-pack-quantized", _FLOAT4), mxfp4),
    "nvfp4": Format(
        "nvfp4", compressed("nvfp4-pack-quantized", _NVFP4), nvfp4("weight_packed", "weight_global_scale", True)
    ),
    "modelopt": Format(
        "nvfp4",
        _listed("ignore", quant_method="modelopt", quant_algo="NVFP4", group_size=16),
        nvfp4("weight", "weight_scale_2", False),
    ),
    **{
        f"blocks_{name}": Format(
            "fp8 128x128", _listed("modules_to_not_convert", **_BLOCKS), fp8((128, 128), "weight_scale_inv", dtype)
        )
        for name, dtype in (
            ("bf16", torch.bfloat16),
            ("f16", torch.float16),
            ("f32", torch.float32),
            ("e8m0", torch.float8_e8m0fnu),
        )
    },
    "matrices_fp8": Format(
        "fp8 per matrix",
        _listed("ignored_layers", quant_method="fp8", activation_scheme="static"),
        fp8((0, 0), "weight_scale", torch.float32),
    ),
    "gptq": Format("int4 g32", _unlisted(**_GPTQ, sym=True), gptq(32, False, 1)),
    "gptq_asym": Format(
        "int4 g32 with zero points", _unlisted(**_GPTQ | {"desc_act": True}, sym=False), gptq(32, True, 1)
    ),
    "gptq_v2": Format(
        "int4 per output with zero points",
        _unlisted(**_GPTQ | {"group_size": -1}, sym=False, checkpoint_format="gptq_v2"),
        gptq(0, True, 2),
    ),
    "awq": Format(
        "int4 g64 with zero points",
        _listed("modules_to_not_convert", **_AWQ),
        awq(64),
    ),
    "auto_round": Format("int4 g32", _unlisted(**_AUTO, packing_format="auto_round:auto_gptq"), gptq(32, False, 1)),
    "auto_round_awq": Format("int4 g32", _unlisted(**_AUTO, packing_format="auto_round:auto_awq"), awq(32, False)),
}


def quantise(
    path: Path,
    format: str | Sequence[str],
    ignore: tuple[str, ...] = ("lm_head", "re:.*mlp.gate$"),
    head: bool = False,
) -> Tensors:
    """Quantise the linear layers of a Qwen3 checkpoint of one file in place, with `head` the output layer too.

    Of several formats, which take turns layer by layer, the section of the first is that of all. Return what matrices
    mean, by module.
    """
    formats = [FORMATS[name] for name in ([format] if isinstance(format, str) else format)]

    def of(name: str) -> Quantise | None:
        if head and name == "lm_head.weight":
            return formats[0].quantise
        layer = re.fullmatch(r"model\.layers\.(\d+)\..*(?:_proj|w[123])\.weight", name)
        return formats[int(layer[1]) % len(formats)].quantise if layer else None

    ignore = tuple(name for name in ignore if not (head and name == "lm_head"))
    means = _write(path, of)
    _configure(path, {"quantization_config": formats[0].section(list(ignore)), "dtype": "bfloat16"})
    return means


def quantise_parts(path: Path, formats: dict[str, str]) -> Tensors:
    """Quantise modules of a Qwen3 checkpoint, each by the first pattern that matches it, as compressed-tensors does."""

    def of(name: str) -> str | None:
        return next((format for pattern, format in formats.items() if re.fullmatch(pattern, name)), None)

    means = _write(path, lambda name: (format := of(name.removesuffix(".weight"))) and FORMATS[format].quantise)
    groups = {}
    for pattern, format in formats.items():
        section = FORMATS[format].section([])
        group = section["config_groups"]["group_0"] | {"targets": [f"re:{pattern}$"], "format": section["format"]}
        groups[f"group_{len(groups)}"] = group
    section = quantization_config([]) | {"format": "mixed-precision", "config_groups": groups}
    _configure(path, {"quantization_config": section, "dtype": "bfloat16"})
    return means


def _write(path: Path, chosen: Callable[[str], Quantise | None]) -> Tensors:
    """Quantise the tensors for which something is chosen; return what they mean. Others become bfloat16."""
    file, tensors, means = path / "model.safetensors", {}, {}
    for name, tensor in load_file(file).items():
        exact = tensor.dtype == torch.int64 or (tensor.dtype == torch.float32 and not name.endswith(".weight"))
        if (quantise := chosen(name)) is None:
            tensors[name] = tensor if exact else tensor.bfloat16()
            continue
        module = name.removesuffix(".weight")
        parts, means[module] = quantise(tensor.float())
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return means


def _configure(path: Path, changes: dict[str, Any]) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


_FLOATS = re.compile(r".*\.(compressor\.w(kv|gate)|weights_proj|gate)\.weight|(embed|head)\.weight")
_LATENTS = re.compile(r".*\.(wq_a|wkv|wo_a)\.weight")
_EXPERTS = re.compile(r".*\.experts\.\d+\.w\d\.weight")
_RELEASED = FLASH["quantization_config"]
DEEPSEEK_V4: dict[str, dict[str, Any]] = {
    "released": {"expert_dtype": "fp4", "quantization_config": _RELEASED},
    "base": {"expert_dtype": "fp8", "quantization_config": _RELEASED},
    "w8a8": {"quantization_config": quantization_config(["head"])},
}
"""What config.json has besides, by form."""


def _deepseek_quantise(form: str, name: str) -> Quantise | None:
    if form == "w8a8":
        return None if _LATENTS.fullmatch(name) else int8("scale")
    if form == "released" and _EXPERTS.fullmatch(name):
        return deepseek_fp4
    return fp8((128, 128), "scale", torch.float8_e8m0fnu if form == "released" else torch.float32)


def quantise_deepseek(path: Path, form: str, others: dict[str, Quantise | None] | None = None) -> Tensors:
    """Quantise a DeepSeek V4 checkpoint in place, as a release is; return what its matrices mean, by module.

    `others` are what becomes of modules that match a pattern instead.
    """

    def chosen(name: str) -> Quantise | None:
        if not name.endswith(".weight") or "norm" in name or _FLOATS.fullmatch(name):
            return None
        for pattern, quantise in (others or {}).items():
            if re.fullmatch(pattern, name.removesuffix(".weight")):
                return quantise
        return _deepseek_quantise(form, name)

    means = _write(path, chosen)
    _configure(path, DEEPSEEK_V4[form] | {"torch_dtype": "bfloat16"})
    return means
