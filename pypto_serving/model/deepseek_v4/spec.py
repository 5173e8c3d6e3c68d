"""DeepSeek V4 checkpoints: configuration, tensors and KV groups. Torch-free.

Layers are of three kinds, all with a sliding window: `swa` has nothing else; `csa` (compressed sparse attention)
adds the best of one compressed entry for every few tokens, which an indexer chooses; `hca` (heavily compressed
attention) adds one for every many tokens, all of them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

from pypto_serving.errors import ModelError
from pypto_serving.model.checkpoint import INT64, describe_index
from pypto_serving.model.deepseek_v4.storage import Role, Shape, Storage, Stored, Tensor
from pypto_serving.model.fields import Fields
from pypto_serving.model.rope import Rope
from pypto_serving.types.kv import DTYPE_BYTES, GroupKind, KVCacheGroupSpec, KVTensorSpec
from pypto_serving.types.model import ModelSpec, StoredTensors
from pypto_serving.util import ceil_div

LayerKind = Literal["swa", "csa", "hca"]

_KINDS: dict[str, LayerKind] = {
    "sliding_attention": "swa",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
_MAX_BLOCK, _MAX_STATE_BLOCK = 128, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Chooses the `topk` compressed entries that a query of a CSA layer attends to."""

    num_heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The feed-forward part of every layer. Layers in `hash_layers` route by token id, the others by score."""

    count: int
    per_token: int
    intermediate_size: int
    scale: float
    limit: float
    hash_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnections:
    """Residual streams: how many, and the rounds and the floor of the Sinkhorn normalisation that mixes them."""

    streams: int
    iterations: int
    eps: float

    @property
    def mixes(self) -> int:
        """Outputs of a mixing projection: what enters, what leaves, and how streams go on."""
        return (2 + self.streams) * self.streams


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Config:
    """What the program needs to know of a config.json. `indexer` is None for a model without CSA layers.

    `rope` rotates in SWA layers, `compress_rope` in the others; both turn the last `rope_dim` channels of a head, in
    pairs of neighbours. `mtp_layers` are draft layers in the checkpoint, which nothing reads.
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
    experts: Experts
    hyper: HyperConnections
    rope: Rope
    compress_rope: Rope
    rms_norm_eps: float
    max_position_embeddings: int
    mtp_layers: int
    storage: Storage

    @classmethod
    def from_json(cls, raw: dict[str, Any], source: str) -> Self:
        """Parse a config.json object; raises ModelError naming the key and value that cannot be served."""
        config = Fields(raw, source)
        _refuse_unsupported(config)
        layers = config.positive_int("num_hidden_layers")
        kinds, ratios = _read_layers(config, layers)
        head_dim = config.positive_int("head_dim")
        rope_dim = _read_rope_dim(config, head_dim)
        max_len = config.positive_int("max_position_embeddings")
        heads, groups = config.positive_int("num_attention_heads"), config.positive_int("o_groups")
        config.require(heads * head_dim % groups == 0, "o_groups", groups, f"a divisor of {heads} x {head_dim}")
        rope, compress_rope = _read_ropes(config, rope_dim, max_len)
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
            o_groups=groups,
            o_lora_rank=config.positive_int("o_lora_rank"),
            indexer=_read_indexer(config, rope_dim) if "csa" in kinds else None,
            experts=_read_experts(config, layers),
            hyper=HyperConnections(
                streams=config.positive_int("hc_mult"),
                iterations=config.positive_int("hc_sinkhorn_iters"),
                eps=config.positive_float("hc_eps", default=1e-6),
            ),
            rope=rope,
            compress_rope=compress_rope,
            rms_norm_eps=config.positive_float("rms_norm_eps", default=1e-6),
            max_position_embeddings=max_len,
            mtp_layers=config.natural("num_nextn_predict_layers", default=0),
            storage=Storage.from_json(config),
        )

    def layers_of(self, *kinds: LayerKind) -> tuple[int, ...]:
        """Layers of these kinds, ascending."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind in kinds)

    def ratio(self, kind: LayerKind) -> int:
        """Tokens per compressed entry in a layer of `kind`; 0 where there is none."""
        return {"swa": 0, "csa": self.csa_ratio, "hca": self.hca_ratio}[kind]

    def compressed_width(self, kind: LayerKind, dim: int) -> int:
        """Channels of keys, and of gates, that a compressor with entries of `dim` makes of a token.

        In CSA layers windows overlap: a token has `dim` channels for the window behind its own and `dim` for its own.
        """
        return 2 * dim if kind == "csa" else dim

    def ropes(self) -> dict[LayerKind, Rope]:
        """Rotation in each kind of layer that there is."""
        return {kind: self.rope if kind == "swa" else self.compress_rope for kind in self.kinds}

    def tensors(self) -> dict[str, Shape]:
        """Name and shape of every tensor that a plain checkpoint must have."""
        return {name: tensor.shape for name, tensor in self.inventory().items()}

    def stored(self, mtp: bool = True) -> dict[str, Stored]:
        """Every tensor as the files of a release hold it, with draft layers if `mtp`."""
        inventory = self.inventory() | (self._mtp_inventory() if mtp else {})
        return {
            key: stored
            for name, tensor in inventory.items()
            for key, stored in self.storage.stored(name, tensor).items()
        }

    def num_parameters(self, mtp: bool = False) -> int:
        """Elements of all float tensors before quantisation, with draft layers if `mtp`."""
        inventory = self.inventory() | (self._mtp_inventory() if mtp else {})
        return sum(tensor.count for tensor in inventory.values() if tensor.role != "ids")

    def inventory(self) -> dict[str, Tensor]:
        """Every tensor of the model by upstream name, without draft layers."""
        vocab, hidden = self.vocab_size, self.hidden_size
        tensors = {"embed.weight": Tensor((vocab, hidden))}
        for layer, kind in enumerate(self.kinds):
            prefix = f"layers.{layer}."
            tensors |= {prefix + name: tensor for name, tensor in self._layer_tensors(layer, kind).items()}
        tensors |= {"norm.weight": Tensor((hidden,)), "head.weight": Tensor((vocab, hidden))}
        return tensors | self._head_mix_tensors()

    def _head_mix_tensors(self) -> dict[str, Tensor]:
        streams = self.hyper.streams
        shapes = {"fn": (streams, streams * self.hidden_size), "base": (streams,), "scale": (1,)}
        return {f"hc_head_{name}": Tensor(shape, "float") for name, shape in shapes.items()}

    def _layer_tensors(self, layer: int, kind: LayerKind) -> dict[str, Tensor]:
        hidden, streams = self.hidden_size, self.hyper.streams
        tensors = {f"{part}_norm.weight": Tensor((hidden,)) for part in ("attn", "ffn")}
        for part in ("attn", "ffn"):
            tensors[f"hc_{part}_fn"] = Tensor((self.hyper.mixes, streams * hidden), "float")
            tensors[f"hc_{part}_base"] = Tensor((self.hyper.mixes,), "float")
            tensors[f"hc_{part}_scale"] = Tensor((3,), "float")
        tensors |= {f"attn.{name}": tensor for name, tensor in self._attention_tensors(kind).items()}
        return tensors | {f"ffn.{name}": tensor for name, tensor in self._expert_tensors(layer).items()}

    def _attention_tensors(self, kind: LayerKind) -> dict[str, Tensor]:
        hidden, heads, rank, groups = self.hidden_size, self.num_heads * self.head_dim, self.q_lora_rank, self.o_groups
        tensors = {
            "wq_a.weight": Tensor((rank, hidden), "latent"),
            "q_norm.weight": Tensor((rank,)),
            "wq_b.weight": Tensor((heads, rank), "linear"),
            "wkv.weight": Tensor((self.head_dim, hidden), "latent"),
            "kv_norm.weight": Tensor((self.head_dim,)),
            "wo_a.weight": Tensor((groups * self.o_lora_rank, heads // groups), "latent"),
            "wo_b.weight": Tensor((hidden, groups * self.o_lora_rank), "linear"),
            "attn_sink": Tensor((self.num_heads,), "float"),
        }
        if kind != "swa":
            tensors |= self._compressor_tensors("compressor.", kind, self.head_dim)
        if kind == "csa":
            assert self.indexer is not None
            dim, count = self.indexer.head_dim, self.indexer.num_heads
            tensors["indexer.wq_b.weight"] = Tensor((count * dim, rank), "linear")
            tensors["indexer.weights_proj.weight"] = Tensor((count, hidden), "precise")
            tensors |= self._compressor_tensors("indexer.compressor.", kind, dim)
        return tensors

    def _compressor_tensors(self, prefix: str, kind: LayerKind, dim: int) -> dict[str, Tensor]:
        width = self.compressed_width(kind, dim)
        return {
            f"{prefix}wkv.weight": Tensor((width, self.hidden_size), "precise"),
            f"{prefix}wgate.weight": Tensor((width, self.hidden_size), "precise"),
            f"{prefix}ape": Tensor((self.ratio(kind), width), "float"),
            f"{prefix}norm.weight": Tensor((dim,)),
        }

    def _expert_tensors(self, layer: int) -> dict[str, Tensor]:
        experts, hidden = self.experts, self.hidden_size
        tensors = {"gate.weight": Tensor((experts.count, hidden), "precise")}
        if layer in experts.hash_layers:
            tensors["gate.tid2eid"] = Tensor((self.vocab_size, experts.per_token), "ids")
        else:
            tensors["gate.bias"] = Tensor((experts.count,), "float")
        members: list[tuple[str, Role]] = [(f"experts.{e}", "expert") for e in range(experts.count)]
        for name, role in [*members, ("shared_experts", "linear")]:
            tensors[f"{name}.w1.weight"] = Tensor((experts.intermediate_size, hidden), role)
            tensors[f"{name}.w2.weight"] = Tensor((hidden, experts.intermediate_size), role)
            tensors[f"{name}.w3.weight"] = Tensor((experts.intermediate_size, hidden), role)
        return tensors

    def _mtp_inventory(self) -> dict[str, Tensor]:
        """Draft layers: an SWA layer routed by score, what joins stream and token, and an end of its own."""
        hidden = self.hidden_size
        layer = self._layer_tensors(self.num_layers, "swa") | self._head_mix_tensors()
        layer |= {f"{name}.weight": Tensor((hidden, hidden), "linear") for name in ("e_proj", "h_proj")}
        layer |= {f"{name}.weight": Tensor((hidden,)) for name in ("enorm", "hnorm", "norm")}
        return {f"mtp.{i}.{name}": tensor for i in range(self.mtp_layers) for name, tensor in layer.items()}

    def ignores(self, name: str) -> bool:
        """True for tensors of draft layers, which nothing needs."""
        return name.startswith("mtp.")

    def integers(self) -> dict[str, str]:
        """Names of tensors that are no floats, and their stored dtypes."""
        return {name: INT64 for name, tensor in self.inventory().items() if tensor.role == "ids"}

    @property
    def block_size(self) -> int:
        """Tokens in a block of the groups `ori`, `cmp` and `idx`: a multiple of every ratio, and about a window."""
        ratios = math.lcm(*(self.ratio(kind) for kind in set(self.kinds) - {"swa"}))
        return ceil_div(min(self.window, _MAX_BLOCK), ratios) * ratios

    def kv_groups(self, dtype: str, block_size: int = 0) -> tuple[KVCacheGroupSpec, ...]:
        """The cache families of the layers there are; `block_size` is ignored, since ratios decide.

        | group           | a row                                       | rows          |
        |-----------------|---------------------------------------------|---------------|
        | ori             | rotated latent, key and value of all heads  | one per token |
        | cmp csa, hca    | the same of a compressed entry              | one per ratio |
        | idx             | rotated key of the indexer                  | one per ratio |
        | hca_state       | keys, then gates with position bias         | one per token |
        | csa_state       | the same, twice as wide: windows overlap    | one per token |
        | csa_inner_state | the same for the indexer's keys             | one per token |

        A block holds tensor after tensor, in it layer after layer, in it row after row.
        """
        csa, hca, dim, size = self.layers_of("csa"), self.layers_of("hca"), self.head_dim, self.block_size
        ori = KVTensorSpec(name="kv", layers=tuple(range(self.num_layers)), dtype=dtype, row_shape=(dim,))
        groups = [_group("ori", "sliding_window", size, ori, window=self.window)]
        compressed = []
        if csa:
            compressed.append(_entries("csa", csa, dtype, dim, self.csa_ratio, "csa_state"))
        if hca:
            compressed.append(_entries("hca", hca, dtype, dim, self.hca_ratio, "hca_state"))
        if compressed:
            groups.append(_group("cmp", "compressed", size, *compressed))
        if csa:
            assert self.indexer is not None
            key = _entries("key", csa, dtype, self.indexer.head_dim, self.csa_ratio, "csa_inner_state")
            groups.append(_group("idx", "compressed", size, key))
        if hca:
            groups.append(_state("hca_state", hca, 2 * dim, self.hca_ratio, 0))
        if csa:
            assert self.indexer is not None
            groups.append(_state("csa_state", csa, 4 * dim, self.csa_ratio, self.csa_ratio))
            groups.append(_state("csa_inner_state", csa, 4 * self.indexer.head_dim, self.csa_ratio, self.csa_ratio))
        return tuple(groups)

    def spec(self, path: str, architecture: str, dtype: str, block_size: int, eos: tuple[int, ...]) -> ModelSpec:
        """The checkpoint as the engine sees it."""
        quantised = self.storage.name
        stored, required = self.stored(), self.stored(mtp=False)
        resident = sum(tensor.count * self._item_bytes(tensor, dtype) for tensor in self.inventory().values())
        return ModelSpec(
            path=path,
            architecture=architecture,
            dtype=dtype,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
            num_parameters=self.num_parameters(),
            weight_bytes=sum(tensor.num_bytes for tensor in required.values()) if quantised else resident,
            packed_bytes=self._packed_bytes(),
            position_bytes=sum(rope.position_bytes for rope in set(self.ropes().values())),
            needs_torch=self._needs_torch(dtype),
            quantization=quantised,
            obstacle=_QUANTISED.format(quantised) if quantised else "",
            own_blocks=True,
            stored=_count(stored),
            index=describe_index(path, required, self.ignores),
            kv_groups=self.kv_groups(dtype),
            eos_token_ids=eos,
        )

    def _packed_bytes(self) -> int:
        """Bytes of the weights as the CPU kernels hold them: routers in float32, other matrices in bfloat16."""
        sizes = {"float": 4, "ids": 4}
        return sum(
            tensor.count * (4 if name.endswith("ffn.gate.weight") else sizes.get(tensor.role, 2))
            for name, tensor in self.inventory().items()
        )

    def _needs_torch(self, dtype: str) -> str:
        """Why the CPU kernels cannot serve the model, if so; see csrc/kernels.h for the layouts behind the numbers."""
        if dtype != "bfloat16":
            return "the kernels serve --dtype bfloat16 only"
        experts, indexer = self.experts, self.indexer
        sizes = {
            "head_dim": (self.head_dim, 32, 512),
            "qk_rope_head_dim": (self.rope_dim, 16, 512),
            "num_attention_heads": (self.num_heads, self.o_groups, 128),
            "hidden_size": (self.hidden_size, 16, 0),
            "q_lora_rank": (self.q_lora_rank, 16, 0),
            "o_lora_rank": (self.o_lora_rank, 32, 0),
            "moe_intermediate_size": (experts.intermediate_size, 16, 0),
            "n_routed_experts": (experts.count, 4, 0),
            "compress rate": (max(2 * self.csa_ratio, self.hca_ratio), 1, 128),
        }
        if indexer is not None:
            sizes |= {"index_head_dim": (indexer.head_dim, 32, 256), "index_n_heads": (indexer.num_heads, 1, 128)}
        for name, (size, unit, most) in sizes.items():
            if size % unit or size > most > 0:
                bound = f" up to {most}" if most else ""
                return f"the kernels need a {name} that is a multiple of {unit}{bound}, not {size}"
        return "" if self.hyper.streams == 4 else f"the kernels mix 4 streams, not {self.hyper.streams}"

    def _item_bytes(self, tensor: Tensor, dtype: str) -> int:
        """Bytes of an element in memory."""
        return {"precise": 4, "float": 4, "ids": 8}.get(tensor.role, DTYPE_BYTES[dtype])


_QUANTISED = "its weights are {}, which is not served yet: it needs a checkpoint of bfloat16 or float32"


def _group(name: str, kind: GroupKind, block_size: int, *tensors: KVTensorSpec, window: int = 0) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(name=name, kind=kind, block_size=block_size, window=window, tensors=tensors)


def _entries(name: str, layers: tuple[int, ...], dtype: str, dim: int, ratio: int, source: str) -> KVTensorSpec:
    """One row of `dim` for every `ratio` tokens."""
    return KVTensorSpec(name=name, layers=layers, dtype=dtype, row_shape=(dim,), ratio=ratio, folded_from=source)


def _state(name: str, layers: tuple[int, ...], width: int, period: int, overlap: int) -> KVCacheGroupSpec:
    """Float32 rows of the tokens whose entry is not closed yet, and of `overlap` tokens before them."""
    size = max(n for n in range(1, min(period, _MAX_STATE_BLOCK) + 1) if period % n == 0)
    rows = KVTensorSpec(name="state", layers=layers, dtype="float32", row_shape=(width,))
    return KVCacheGroupSpec(
        name=name, kind="rolling_state", block_size=size, period=period, overlap=overlap, tensors=(rows,)
    )


def _count(stored: dict[str, Stored]) -> tuple[StoredTensors, ...]:
    """How many tensors there are of each dtype, and their bytes; the largest share first."""
    counts, sizes = Counter(t.dtype for t in stored.values()), Counter[str]()
    for tensor in stored.values():
        sizes[tensor.dtype] += tensor.num_bytes
    return tuple(StoredTensors(dtype=dtype, count=counts[dtype], num_bytes=size) for dtype, size in sizes.most_common())


def _refuse_unsupported(config: Fields) -> None:
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


def _read_layers(config: Fields, count: int) -> tuple[tuple[LayerKind, ...], dict[LayerKind, int]]:
    """The kind of every layer, and the ratios: `layer_types` and `compress_rates`, or `compress_ratios` of releases.

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


def _read_rope_dim(config: Fields, head_dim: int) -> int:
    factor = config.positive_float("partial_rotary_factor", default=1 / 8)
    dim = config.positive_int("qk_rope_head_dim", default=max(1, int(head_dim * factor)))
    config.require(dim % 2 == 0 and dim <= head_dim, "qk_rope_head_dim", dim, f"even and at most {head_dim}")
    return dim


def _read_ropes(config: Fields, dim: int, max_len: int) -> tuple[Rope, Rope]:
    """Rotation of SWA layers, and of the others; cosines and sines are never scaled unless a factor is given."""
    config.section("rope_parameters", "rope_scaling")
    given = config.get("rope_parameters", "rope_scaling") or {}
    theta = config.positive_float("rope_theta", default=10000.0)
    compress_theta = config.positive_float("compress_rope_theta", default=160000.0)
    config.require(compress_theta > 1, "compress_rope_theta", compress_theta, "above 1")
    if "main" in given and "compress" in given:
        main, compress = given["main"], given["compress"]
    else:
        main, compress = {}, {key: value for key, value in given.items() if key != "rope_theta"}
    return _rope(config, main, theta, dim, max_len), _rope(config, compress, compress_theta, dim, max_len)


def _rope(config: Fields, values: dict[str, Any], theta: float, dim: int, max_len: int) -> Rope:
    values = {"rope_theta": theta, "attention_factor": 1.0} | values
    values.pop("partial_rotary_factor", None)
    kind = values.get("rope_type") or values.get("type") or "default"
    config.require(kind in ("default", "yarn"), "rope_type", kind, "default or yarn")
    return Rope.from_config(Fields({"rope_parameters": values}, config.source), dim, max_len)


def _read_indexer(config: Fields, rope_dim: int) -> Indexer:
    dim = config.positive_int("index_head_dim")
    config.require(dim >= rope_dim, "index_head_dim", dim, f"at least {rope_dim}, the rotated part")
    return Indexer(num_heads=config.positive_int("index_n_heads"), head_dim=dim, topk=config.positive_int("index_topk"))


def _read_experts(config: Fields, num_layers: int) -> Experts:
    count = config.positive_int("n_routed_experts", "num_local_experts")
    per_token = config.positive_int("num_experts_per_tok")
    config.require(per_token <= count, "num_experts_per_tok", per_token, f"at most n_routed_experts, {count}")
    types = config.get("mlp_layer_types")
    if types is None:
        hashed: tuple[int, ...] = tuple(range(min(num_layers, config.natural("num_hash_layers", default=3))))
    else:
        known = {"hash_moe", "moe"}
        holds = isinstance(types, list) and len(types) >= num_layers and set(types[:num_layers]) <= known
        config.require(holds, "mlp_layer_types", types, f"hash_moe or moe for each of {num_layers} layers")
        hashed = tuple(layer for layer in range(num_layers) if types[layer] == "hash_moe")
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=config.positive_int("moe_intermediate_size"),
        scale=config.positive_float("routed_scaling_factor", default=1.0),
        limit=config.positive_float("swiglu_limit"),
        hash_layers=hashed,
    )
