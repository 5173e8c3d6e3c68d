"""Tiny random DeepSeek V4 models of `transformers`, and their checkpoints with upstream names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pypto_serving.model.openmp  # noqa: F401

# isort: split
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from pypto_serving.model.deepseek_v4.released import FLASH

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"

_LEFT_OUT = {
    "architectures",
    "model_type",
    "topk_method",
    "attention_bias",
    "torch_dtype",
    "expert_dtype",
    "quantization_config",
}
TINY: dict[str, Any] = {key: value for key, value in FLASH.items() if key not in _LEFT_OUT} | {
    "vocab_size": 320,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_hash_layers": 2,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 16,
    "bos_token_id": 256,
    "eos_token_id": 258,
}
"""As released but small: layers SWA with hash routing, CSA with hash routing, HCA, CSA."""

FAST: dict[str, Any] = {key: value for key, value in TINY.items() if key != "compress_ratios"} | {
    "layer_types": [SLIDING, SPARSE, HEAVY, SPARSE],
    "compress_rates": {SPARSE: 4, HEAVY: 16},
    "sliding_window": 16,
    "index_topk": 8,
}
"""The same layers with ratios and a window that 90 tokens exercise."""

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    r"(attn|ffn)_hc\.(fn|base|scale)": r"hc_\1_\2",
    r"self_attn\.sinks": "attn.attn_sink",
    r"self_attn\.q_a_proj": "attn.wq_a",
    r"self_attn\.q_a_norm": "attn.q_norm",
    r"self_attn\.q_b_proj": "attn.wq_b",
    r"self_attn\.kv_proj": "attn.wkv",
    r"self_attn\.kv_norm": "attn.kv_norm",
    r"self_attn\.o_a_proj": "attn.wo_a",
    r"self_attn\.o_b_proj": "attn.wo_b",
    r"self_attn\.compressor\.indexer\.q_b_proj": "attn.indexer.wq_b",
    r"self_attn\.compressor\.indexer\.scorer\.weights_proj": "attn.indexer.weights_proj",
    r"self_attn\.compressor\.indexer\.": "attn.indexer.compressor.",
    r"self_attn\.compressor\.": "attn.compressor.",
    r"mlp\.gate\.e_score_correction_bias": "ffn.gate.bias",
    r"mlp\.": "ffn.",
}
_PARTS = {"kv_proj": "wkv", "gate_proj": "wgate", "position_bias": "ape", "kv_norm": "norm"}
_SHARED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_GLOBAL = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
}


def random_model(seed: int = 0, **config: Any) -> transformers.PreTrainedModel:
    """A model of `transformers`, float32, whose parts are random enough to matter."""
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**json.loads(json.dumps(config))))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("tid2eid"):
                experts = torch.rand(len(tensor), config["n_routed_experts"], generator=generator).argsort(dim=1)
                tensor.copy_(experts[:, : tensor.shape[1]])
            else:
                spread, centre = _spread(name)
                tensor.normal_(centre, spread, generator=generator)
    return model.eval()


def _spread(name: str) -> tuple[float, float]:
    """Standard deviation and mean of a random tensor."""
    if name.endswith(("position_bias", "sinks")):
        return 1.0, 0.0
    if name.endswith(("hc.base", "hc_base")):
        return 0.5, 0.0
    if name.endswith(("hc.scale", "hc_scale")):
        return 0.0, 1.0
    if name.endswith("e_score_correction_bias"):
        return 0.1, 0.0
    if "norm" in name:
        return 0.1, 1.0
    return 0.15, 0.0


def check_greedy(model: transformers.PreTrainedModel, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Each answer is what `model`, greedily, makes of its prompt. Its steps are slow, so it is asked once."""
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(dim=1).tolist() == answer


def upstream(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state of `transformers` with the names, and the experts one by one, of released checkpoints."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        layer = re.fullmatch(r"model\.(layers\.\d+\.)(.*)", name)
        if layer is None:
            renamed[_GLOBAL[name]] = tensor.clone()
            continue
        prefix, rest = layer.groups()
        if rest == "mlp.experts.gate_up_proj":
            for expert, gate_up in enumerate(tensor):
                gate, up = gate_up.chunk(2)
                renamed[f"{prefix}ffn.experts.{expert}.w1.weight"] = gate.clone()
                renamed[f"{prefix}ffn.experts.{expert}.w3.weight"] = up.clone()
        elif rest == "mlp.experts.down_proj":
            for expert, down in enumerate(tensor):
                renamed[f"{prefix}ffn.experts.{expert}.w2.weight"] = down.clone()
        else:
            renamed[prefix + _upstream_name(rest)] = tensor.clone()
    return renamed


def _upstream_name(rest: str) -> str:
    for pattern, name in _LAYER_NAMES.items():
        found = re.match(pattern, rest)
        if found is not None:
            rest = found.expand(name) + rest[found.end() :]
            break
    parts = _PARTS if "compressor." in rest else _SHARED if "shared_experts." in rest else {}
    for old, new in parts.items():
        rest = re.sub(rf"\b{old}\b", new, rest)
    return rest


def write_checkpoint(path: Path, model: transformers.PreTrainedModel, config: dict[str, Any], dtype: str) -> None:
    """Config and weights of `model` as a release has them: mixing, sinks and biases stay float32."""
    path.mkdir(parents=True, exist_ok=True)
    served = getattr(torch, dtype)
    tensors = upstream(model.state_dict())
    for name, tensor in tensors.items():
        exact = name.startswith("hc_") or re.search(r"\.hc_|attn_sink|\.ape$|gate\.bias", name)
        if tensor.is_floating_point() and not exact:
            tensors[name] = tensor.to(served)
    save_file(tensors, path / "model.safetensors")
    names = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": dtype}
    (path / "config.json").write_text(json.dumps(config | names))
