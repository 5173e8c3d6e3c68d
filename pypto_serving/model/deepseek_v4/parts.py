"""The parts of a DeepSeek V4 configuration, and how they are read from config.json. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, cast

from pypto_serving.errors import ModelError
from pypto_serving.model.fields import MOST_EXPERTS, Fields
from pypto_serving.model.rope import Rope

LayerKind = Literal["swa", "csa", "hca"]

_KINDS: dict[str, LayerKind] = {
    "sliding_attention": "swa",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Sizes of the lightning indexer, which selects the `topk` compressed entries of a query in CSA layers."""

    num_heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Experts:
    """Sizes of the MoE of every layer. Layers in `hash_layers` route by token id, the others by score."""

    count: int
    per_token: int
    intermediate_size: int
    scale: float
    limit: float
    hash_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnections:
    """Hyper-connections: the number of residual streams, and iterations and eps of Sinkhorn."""

    streams: int
    iterations: int
    eps: float

    @property
    def mixes(self) -> int:
        """Count the coefficients of a token: pre, post and comb."""
        return (2 + self.streams) * self.streams


def refuse_unsupported(config: Fields) -> None:
    """Raise ModelError for variants of the family, and for values that no release has."""
    model_type = config.get("model_type") or "deepseek_v4"
    config.require(model_type == "deepseek_v4", "model_type", model_type, '"deepseek_v4": variants are not supported')
    wanted: dict[str, tuple[Any, ...]] = {
        "num_key_value_heads": (1,),
        "n_shared_experts": (1,),
        "n_group": (1,),
        "topk_group": (1,),
        "hidden_act": ("silu",),
        "scoring_func": ("sqrtsoftplus",),
        "topk_method": ("noaux_tc",),
        "norm_topk_prob": (True,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "tie_word_embeddings": (False,),
    }
    for key, allowed in wanted.items():
        value = config.get(key)
        config.require(value is None or value in allowed, key, value, json.dumps(allowed[0]))


def read_layers(config: Fields, count: int) -> tuple[tuple[LayerKind, ...], dict[LayerKind, int]]:
    """Read the kind of every layer, and the ratios: `layer_types` and `compress_rates`, or `compress_ratios`.

    There may be more entries than layers: draft layers have some.
    """
    rates = config.section("compress_rates")
    csa = rates.positive_int("compressed_sparse_attention", default=config.positive_int("compress_rate_csa", default=4))
    hca = rates.positive_int(
        "heavily_compressed_attention", default=config.positive_int("compress_rate_hca", default=128)
    )
    key = "compress_ratios" if config.get("layer_types") is None else "layer_types"
    known = {0: "swa", hca: "hca", csa: "csa"} if key == "compress_ratios" else dict(_KINDS)
    given = config.get(key)
    if given is None:
        raise ModelError(f"{config.source}: compress_ratios is missing")
    config.require(isinstance(given, list) and len(given) >= count, key, given, f"a list of at least {count} entries")
    for value in given[:count]:
        config.require(
            isinstance(value, int | str) and value in known, key, value, "one of " + ", ".join(map(str, known))
        )
    kinds = tuple(cast(LayerKind, known[value]) for value in given[:count])
    return kinds, {"swa": 0, "csa": csa, "hca": hca}


def read_rope_dim(config: Fields, head_dim: int) -> int:
    factor = config.positive_float("partial_rotary_factor", default=1 / 8)
    dim = config.positive_int("qk_rope_head_dim", default=max(1, int(head_dim * factor)))
    config.require(dim % 2 == 0 and dim <= head_dim, "qk_rope_head_dim", dim, f"even and at most {head_dim}")
    return dim


def read_ropes(config: Fields, dim: int, max_len: int) -> tuple[Rope, Rope]:
    """Read the RoPE of SWA layers and of the others. Cosines and sines are scaled only by an explicit factor."""
    config.section("rope_parameters", "rope_scaling")
    given = config.get("rope_parameters", "rope_scaling") or {}
    theta = config.positive_float("rope_theta", default=10000.0)
    compress_theta = config.positive_float("compress_rope_theta", default=160000.0)
    config.require(compress_theta > 1, "compress_rope_theta", compress_theta, "above 1")
    if "main" in given and "compress" in given:
        main, compress = given["main"], given["compress"]
        for name, part in (("main", main), ("compress", compress)):
            config.require(isinstance(part, dict), f"{name} of the rope parameters", part, "an object")
    else:
        main, compress = {}, {key: value for key, value in given.items() if key != "rope_theta"}
    return _rope(config, main, theta, dim, max_len), _rope(config, compress, compress_theta, dim, max_len)


def _rope(config: Fields, values: dict[str, Any], theta: float, dim: int, max_len: int) -> Rope:
    values = {"rope_theta": theta, "attention_factor": 1.0} | values
    values.pop("partial_rotary_factor", None)
    kind = values.get("rope_type") or values.get("type") or "default"
    config.require(kind in ("default", "yarn"), "rope_type", kind, "default or yarn")
    return Rope.from_config(Fields({"rope_parameters": values}, config.source), dim, max_len)


def read_indexer(config: Fields, rope_dim: int) -> Indexer:
    dim = config.positive_int("index_head_dim")
    config.require(dim >= rope_dim, "index_head_dim", dim, f"at least {rope_dim}, the rotated part")
    return Indexer(num_heads=config.positive_int("index_n_heads"), head_dim=dim, topk=config.positive_int("index_topk"))


def read_experts(config: Fields, num_layers: int) -> DeepseekV4Experts:
    count = config.positive_int("n_routed_experts", "num_local_experts", most=MOST_EXPERTS // num_layers)
    per_token = config.positive_int("num_experts_per_tok")
    config.require(per_token <= count, "num_experts_per_tok", per_token, f"at most n_routed_experts, {count}")
    types = config.get("mlp_layer_types")
    if types is None:
        hashed: tuple[int, ...] = tuple(range(min(num_layers, config.natural("num_hash_layers", default=3))))
    else:
        known = ("hash_moe", "moe")
        holds = (
            isinstance(types, list) and len(types) >= num_layers and all(kind in known for kind in types[:num_layers])
        )
        config.require(holds, "mlp_layer_types", types, f"hash_moe or moe for each of {num_layers} layers")
        hashed = tuple(layer for layer in range(num_layers) if types[layer] == "hash_moe")
    return DeepseekV4Experts(
        count=count,
        per_token=per_token,
        intermediate_size=config.positive_int("moe_intermediate_size"),
        scale=config.positive_float("routed_scaling_factor", default=1.0),
        limit=config.positive_float("swiglu_limit"),
        hash_layers=hashed,
    )
