"""The configuration of a DeepSeek V4 model, from config.json. Torch-free.

Every layer has a sliding window. There are three kinds of layers:

    swa  sliding-window attention alone
    csa  compressed sparse attention: one compressed entry per few tokens; an indexer selects the top-k
    hca  heavily compressed attention: one compressed entry per many tokens; queries attend to all of them
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast

from pypto_serving.errors import ModelError
from pypto_serving.model.checkpoint import FLOATS
from pypto_serving.model.fields import MOST_EXPERTS, MOST_LAYERS, Fields
from pypto_serving.model.formats import compressed_tensors
from pypto_serving.model.formats.quantization import SECTION, require
from pypto_serving.model.formats.schemes import DEEPSEEK_FP4, E8M0, PLAIN, Fp8, Int8, Scheme
from pypto_serving.model.inventory import Role
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

    There may be further entries for draft layers.
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


_BLOCK = (128, 128)


@dataclass(frozen=True, slots=True)
class Storage:
    """The possible schemes of matrices by role, likeliest first; other roles are plain.

    `name` is for people. Scales are called `scale`.
    """

    name: str = ""
    schemes: tuple[tuple[Role, tuple[Scheme, ...]], ...] = ()

    @classmethod
    def from_json(cls, config: Fields) -> Self:
        """Read `quantization_config` and `expert_dtype`; raises ModelError for what no release has."""
        if config.get(SECTION) is None:
            return cls()
        section = config.section(SECTION)
        if require(section, "quant_method", ("fp8", "compressed-tensors")) == "compressed-tensors":
            return cls._int8(section)
        require(section, "weight_block_size", (list(_BLOCK),))
        given = config.get("expert_dtype") or section.get("expert_dtype")
        config.require(given in ("fp4", "fp8", None), "expert_dtype", given, "fp4 or fp8")
        # Base releases, which say fp8, have float32 scales; repackaged ones, which say nothing, have e8m0.
        usual = "F32" if given == "fp8" else E8M0
        fp8 = Fp8(_BLOCK, "scale", (E8M0, *FLOATS), usual)
        experts: tuple[Scheme, ...] = (DEEPSEEK_FP4, fp8) if given == "fp4" else (fp8, DEEPSEEK_FP4)
        name = "fp8 with fp4 experts" if given == "fp4" else "fp8"
        return cls(name, (("latent", (fp8,)), ("linear", (fp8,)), ("expert", experts)))

    @classmethod
    def _int8(cls, section: Fields) -> Self:
        """Read W8A8: large matrices and experts are int8, and their scales have DeepSeek's name."""
        for rule in compressed_tensors.read(section).rules:
            for scheme in rule.schemes:
                served = scheme == PLAIN or isinstance(scheme, Int8)
                section.require(served, f"{SECTION}.config_groups", scheme.name, "int8 per channel")
        int8 = (Int8("scale"),)
        return cls("int8", (("linear", int8), ("expert", int8)))

    def schemes_of(self, role: Role) -> tuple[Scheme, ...]:
        """Return the possible schemes of tensors of a role, likeliest first."""
        return (*dict(self.schemes).get(role, ()), PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Config:
    """The values of config.json that programs need. `indexer` is None for a model without CSA layers.

    SWA layers use `rope`, the others `compress_rope`. Both rotate the last `rope_dim` channels of a head, in
    interleaved pairs. `mtp_layers` counts the draft layers of the checkpoint. They are read only `with_drafts`; then
    `kinds` includes them, after the model's own `num_layers`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    kinds: tuple[LayerKind, ...]
    csa_ratio: int
    hca_ratio: int
    window: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    indexer: Indexer | None
    experts: DeepseekV4Experts
    hyper: HyperConnections
    rope: Rope
    compress_rope: Rope
    rms_norm_eps: float
    max_position_embeddings: int
    mtp_layers: int
    storage: Storage
    num_kv_heads: int = 1

    @classmethod
    def from_json(cls, raw: dict[str, Any], source: str) -> Self:
        """Parse a config.json object; raises ModelError naming the key and value that cannot be served."""
        config = Fields(raw, source)
        refuse_unsupported(config)
        layers = config.positive_int("num_hidden_layers", most=MOST_LAYERS)
        kinds, ratios = read_layers(config, layers)
        head_dim = config.positive_int("head_dim")
        rope_dim = read_rope_dim(config, head_dim)
        max_len = config.positive_int("max_position_embeddings")
        heads, out_groups = config.positive_int("num_attention_heads"), config.positive_int("o_groups")
        config.require(heads * head_dim % out_groups == 0, "o_groups", out_groups, f"a divisor of {heads} x {head_dim}")
        rope, compress_rope = read_ropes(config, rope_dim, max_len)
        return cls(
            vocab_size=config.positive_int("vocab_size"),
            hidden_size=config.positive_int("hidden_size"),
            num_layers=layers,
            kinds=kinds,
            csa_ratio=ratios["csa"],
            hca_ratio=ratios["hca"],
            window=config.positive_int("sliding_window"),
            num_heads=heads,
            head_dim=head_dim,
            rope_dim=rope_dim,
            q_lora_rank=config.positive_int("q_lora_rank"),
            o_groups=out_groups,
            o_lora_rank=config.positive_int("o_lora_rank"),
            indexer=read_indexer(config, rope_dim) if "csa" in kinds else None,
            experts=read_experts(config, layers),
            hyper=HyperConnections(
                streams=config.positive_int("hc_mult"),
                iterations=config.positive_int("hc_sinkhorn_iters"),
                eps=config.positive_float("hc_eps", default=1e-6),
            ),
            rope=rope,
            compress_rope=compress_rope,
            rms_norm_eps=config.positive_float("rms_norm_eps", default=1e-6),
            max_position_embeddings=max_len,
            mtp_layers=config.natural("num_nextn_predict_layers", default=0, most=layers),
            storage=Storage.from_json(config),
        )

    def with_drafts(self) -> Self:
        """Return the model with its draft layer. Raises ModelError unless there is exactly one."""
        if self.mtp_layers != 1:
            raise ModelError(
                f"num_nextn_predict_layers is {self.mtp_layers}, but drafts need a model with 1 draft layer"
            )
        return replace(self, kinds=(*self.kinds, "swa"))

    @property
    def drafts(self) -> range:
        """The draft layers that are served."""
        return range(self.num_layers, len(self.kinds))

    def prefix(self, layer: int) -> str:
        """Return the prefix of the names of a layer's tensors."""
        return f"mtp.{layer - self.num_layers}." if layer in self.drafts else f"layers.{layer}."

    def first_row(self, layer: int) -> int:
        """Return the first position with a row in `ori`; a draft layer needs the stream of the previous token."""
        return int(layer in self.drafts)

    def layers_of(self, *kinds: LayerKind) -> tuple[int, ...]:
        """List the layers of `kinds`, ascending."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind in kinds)

    def ratio(self, kind: LayerKind) -> int:
        """Return the tokens per compressed entry in a layer of `kind`, 0 for none."""
        return {"swa": 0, "csa": self.csa_ratio, "hca": self.hca_ratio}[kind]

    def compressed_width(self, kind: LayerKind, dim: int) -> int:
        """Return the channels of kv, and of gates, that a compressor with entries of `dim` computes per token.

        In CSA layers windows overlap: a token has `dim` channels for the next window and `dim` for its own.
        """
        return 2 * dim if kind == "csa" else dim

    def ropes(self) -> dict[LayerKind, Rope]:
        """Return the RoPE of each kind of layer in the model."""
        return {kind: self.rope if kind == "swa" else self.compress_rope for kind in self.kinds}
