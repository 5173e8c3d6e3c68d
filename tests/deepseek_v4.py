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
from safetensors.torch import load_file, save_file
from torch import Tensor

from pypto_serving.model.null_models import FLASH

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


class RandomDrafts:
    """The draft layer of a random model, put together from parts of `transformers`, which has none."""

    def __init__(self, seed: int, config: dict[str, Any]) -> None:
        swa = {"num_hidden_layers": 1, "num_hash_layers": 0}
        swa |= {"layer_types": [SLIDING]} if "layer_types" in config else {"compress_ratios": [0]}
        self.model = random_model(seed, **(config | swa))
        generator, hidden = torch.Generator().manual_seed(seed), config["hidden_size"]
        self.own = {f"{name}_proj.weight": torch.empty(hidden, hidden) for name in ("e", "h")}
        self.own |= {f"{name}norm.weight": torch.empty(hidden) for name in ("e", "h")}
        for name, tensor in self.own.items():
            spread, centre = _spread(name)
            tensor.normal_(centre, spread, generator=generator)

    def state(self) -> dict[str, Tensor]:
        """Its tensors, with the names of released checkpoints."""
        state = upstream(self.model.state_dict())
        shared = {"embed.weight", "head.weight"}
        return {
            f"mtp.0.{name.removeprefix('layers.0.')}": tensor
            for name, tensor in (state | self.own).items()
            if name not in shared
        }

    @torch.no_grad()
    def __call__(self, model: transformers.PreTrainedModel, streams: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [t, vocab] and streams [t, n, hidden], from `streams` [t, n, hidden] and the `tokens` after them.

        Embeddings and output layer are those of `model`.
        """
        inner, norms = self.model.model, {}
        for name in ("e", "h"):
            norms[name] = type(inner.norm)(streams.shape[-1], eps=inner.norm.variance_epsilon)
            norms[name].weight.data = self.own[f"{name}norm.weight"]
        embedded = norms["e"](model.model.embed_tokens(tokens)) @ self.own["e_proj.weight"].T
        joined = norms["h"](streams) @ self.own["h_proj.weight"].T + embedded[:, None]
        found: list[Tensor] = []
        hook = inner.hc_head.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0][0]))
        first = inner.layers[0].register_forward_pre_hook(
            lambda _, inputs, named: ((joined[None], *inputs[1:]), named), with_kwargs=True
        )
        x = inner(tokens[None]).last_hidden_state[0]
        hook.remove()
        first.remove()
        logits: Tensor = model.lm_head(x)
        return logits, found[0]


def let_drafts_agree(path: Path, damping: float = 0.015) -> None:
    """Change a checkpoint so that its draft layer is right often, though not always.

    Layers add less to the streams, so that the next token follows mostly from the last one, in draft layers too.
    """
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("wo_b.weight", "w2.weight")):
            tensors[name] = tensor * damping
    hidden, own = len(tensors["norm.weight"]), tensors["norm.weight"].dtype
    tensors["mtp.0.e_proj.weight"] = torch.eye(hidden, dtype=own)
    tensors["mtp.0.h_proj.weight"] = torch.zeros(hidden, hidden, dtype=own)
    tensors["mtp.0.enorm.weight"] = torch.ones(hidden, dtype=own)
    for name in ("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"):
        tensors[f"mtp.0.{name}"] = tensors[name].clone()
    save_file(tensors, path / "model.safetensors")


@torch.no_grad()
def streams_of(model: transformers.PreTrainedModel, tokens: Tensor) -> Tensor:
    """The streams [t, n, hidden] of `model` before its head."""
    found: list[Tensor] = []
    hook = model.model.hc_head.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0][0]))
    model(tokens[None])
    hook.remove()
    return found[0]


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


def write_checkpoint(
    path: Path, model: transformers.PreTrainedModel, config: dict[str, Any], dtype: str, seed: int = 0
) -> None:
    """Config and weights of `model` and a draft layer, as released: mixing, sinks and biases stay float32."""
    path.mkdir(parents=True, exist_ok=True)
    served = getattr(torch, dtype)
    tensors = upstream(model.state_dict()) | RandomDrafts(seed, config).state()
    for name, tensor in tensors.items():
        exact = name.startswith("hc_") or re.search(r"\.hc_|attn_sink|\.ape$|gate\.bias", name)
        if tensor.is_floating_point() and not exact:
            tensors[name] = tensor.to(served)
    save_file(tensors, path / "model.safetensors")
    names = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": dtype}
    (path / "config.json").write_text(json.dumps(config | names))
