"""Checkpoints in the form that llm-compressor writes W8A8 in, and `transformers` made to compute as they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tests.checkpoints

# isort: split
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional

SCHEME: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "channel",
    "symmetric": True,
    "type": "int",
}


def quantization_config(ignore: list[str]) -> dict[str, Any]:
    """The section of config.json, as llm-compressor spells it."""
    inputs = SCHEME | {"dynamic": True, "observer": None, "strategy": "token"}
    group = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"], "weights": SCHEME}
    return {
        "config_groups": {"group_0": group},
        "format": "int-quantized",
        "global_compression_ratio": 1.5,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


def compress(path: Path, ignore: tuple[str, ...] = ("lm_head", "re:.*mlp.gate$"), exact: bool = False) -> Path:
    """Quantise the checkpoint of one file in the folder `path` in place.

    `exact` writes what the int8 weights stand for in float32 instead, for a reference without quantised weights.
    """
    file, config = path / "model.safetensors", json.loads((path / "config.json").read_text())
    tensors = {}
    for name, tensor in load_file(file).items():
        if not name.endswith("_proj.weight") and (name != "lm_head.weight" or "lm_head" in ignore):
            tensors[name] = tensor.bfloat16()
            continue
        weights, scales = quantize(tensor.float())
        tensors |= {name: weights * scales.float()} if exact else {name: weights, f"{name}_scale": scales}
    save_file(tensors, file, metadata={"format": "pt"})
    section = {} if exact else {"quantization_config": quantization_config(list(ignore))}
    (path / "config.json").write_text(json.dumps(config | section | {"dtype": "float32" if exact else "bfloat16"}))
    return path


def quantize(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [n, k] and scales [n, 1] in bfloat16, for which -128 may occur."""
    scales = (weights.abs().amax(1, keepdim=True) / 127.5).bfloat16()
    return (weights / scales.float()).round().clamp(-128, 127).to(torch.int8), scales


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Rows rounded to multiples of a 127th of their largest magnitude."""
    scales = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return ((x.float() / scales).round() * scales).to(x.dtype)


def reference(path: Path, dtype: torch.dtype, lm_head: bool = False) -> transformers.PreTrainedModel:
    """The model of an exact checkpoint (see `compress`), its linear layers' inputs rounded to bytes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = tests.checkpoints.with_dtype(model, dtype).eval()
    for name, module in model.named_modules():
        if name.endswith("_proj") or (lm_head and name == "lm_head"):
            module.register_forward_pre_hook(lambda _, inputs: (as_bytes(inputs[0]),))
        elif name.endswith("mlp.experts"):
            module.forward = _Experts(module)
    return model


class _Experts:
    """The forward of transformers' experts, with inputs of both products rounded to bytes."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        module, x, out = self._module, as_bytes(x), torch.zeros_like(x)
        for expert in range(module.num_experts):
            tokens, slots = torch.where(chosen == expert)
            gate, up = functional.linear(x[tokens], module.gate_up_proj[expert]).chunk(2, dim=-1)
            y = functional.linear(as_bytes(functional.silu(gate) * up), module.down_proj[expert])
            out.index_add_(0, tokens, (y * shares[tokens, slots, None]).to(out.dtype))
        return out
