"""DeepSeek V4 checkpoints: configuration, tensors and KV groups. Torch-free.

Layers are of three kinds, all with a sliding window: `swa` has nothing else; `csa` (compressed sparse attention)
adds the best of one compressed entry for every few tokens, which an indexer chooses; `hca` (heavily compressed
attention) adds one for every many tokens, all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from pypto_serving.model.checkpoint import INT64
from pypto_serving.model.contents import Shape, Stored
from pypto_serving.model.deepseek_v4 import groups, parts
from pypto_serving.model.deepseek_v4.inventory import draft_tensors, model_tensors
from pypto_serving.model.deepseek_v4.parts import Experts, HyperConnections, Indexer, LayerKind
from pypto_serving.model.deepseek_v4.storage import Storage
from pypto_serving.model.fields import Fields
from pypto_serving.model.rope import Rope
from pypto_serving.types.kv import DTYPE_BYTES, KVCacheGroupSpec
from pypto_serving.types.model import ModelSpec
from pypto_serving.util import ceil_div

_MAX_BLOCK = 128


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
        parts.refuse_unsupported(config)
        layers = config.positive_int("num_hidden_layers")
        kinds, ratios = parts.read_layers(config, layers)
        head_dim = config.positive_int("head_dim")
        rope_dim = parts.read_rope_dim(config, head_dim)
        max_len = config.positive_int("max_position_embeddings")
        heads, out_groups = config.positive_int("num_attention_heads"), config.positive_int("o_groups")
        config.require(heads * head_dim % out_groups == 0, "o_groups", out_groups, f"a divisor of {heads} x {head_dim}")
        rope, compress_rope = parts.read_ropes(config, rope_dim, max_len)
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
            indexer=parts.read_indexer(config, rope_dim) if "csa" in kinds else None,
            experts=parts.read_experts(config, layers),
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
        return {name: tensor.shape for name, tensor in model_tensors(self).items()}

    def stored(self, dtype: str = "bfloat16", mtp: bool = True) -> dict[str, Stored]:
        """Every tensor as files hold it, those in `dtype` that are not quantised; with draft layers if `mtp`."""
        inventory = model_tensors(self) | (draft_tensors(self) if mtp else {})
        return {
            key: stored
            for name, tensor in inventory.items()
            for key, stored in self.storage.stored(name, tensor, dtype).items()
        }

    def num_parameters(self, mtp: bool = False) -> int:
        """Elements of all float tensors before quantisation, with draft layers if `mtp`."""
        inventory = model_tensors(self) | (draft_tensors(self) if mtp else {})
        return sum(tensor.count for tensor in inventory.values() if tensor.role != "ids")

    def ignores(self, name: str) -> bool:
        """True for tensors of draft layers, which nothing needs."""
        return name.startswith("mtp.")

    def integers(self) -> dict[str, str]:
        """Names of tensors that are no floats, and their stored dtypes."""
        return {name: INT64 for name, tensor in model_tensors(self).items() if tensor.role == "ids"}

    @property
    def block_size(self) -> int:
        """Tokens in a block of the groups `ori`, `cmp` and `idx`: a multiple of every ratio, and about a window."""
        ratios = math.lcm(*(self.ratio(kind) for kind in set(self.kinds) - {"swa"}))
        return ceil_div(min(self.window, _MAX_BLOCK), ratios) * ratios

    def kv_groups(self, dtype: str, block_size: int = 0) -> tuple[KVCacheGroupSpec, ...]:
        """The cache families; `block_size` is ignored, since ratios and window decide."""
        return groups.kv_groups(self, dtype)

    def spec(self, path: str, architecture: str, dtype: str, block_size: int) -> ModelSpec:
        """The checkpoint as the engine sees it."""
        quantised = self.storage.name
        return ModelSpec(
            path=path,
            architecture=architecture,
            dtype=dtype,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
            num_parameters=self.num_parameters(),
            weight_bytes=self._weight_bytes(dtype),
            packed_bytes=self._packed_bytes(),
            position_bytes=sum(rope.position_bytes for rope in set(self.ropes().values())),
            needs_torch=self._needs_torch(dtype),
            quantization=quantised,
            obstacle=_QUANTISED.format(quantised) if quantised else "",
            own_blocks=True,
            kv_groups=self.kv_groups(dtype),
        )

    def _weight_bytes(self, dtype: str) -> int:
        """Bytes of the weights as torch holds them; quantised ones as they are stored."""
        if self.storage.name:
            return sum(tensor.num_bytes for tensor in self.stored(mtp=False).values())
        sizes = {"precise": 4, "float": 4, "ids": 8}
        return sum(t.count * sizes.get(t.role, DTYPE_BYTES[dtype]) for t in model_tensors(self).values())

    def _packed_bytes(self) -> int:
        """Bytes of the weights as the CPU kernels hold them: routers in float32, other matrices in bfloat16."""
        sizes = {"float": 4, "ids": 4}
        return sum(
            tensor.count * (4 if name.endswith("ffn.gate.weight") else sizes.get(tensor.role, 2))
            for name, tensor in model_tensors(self).items()
        )

    def _needs_torch(self, dtype: str) -> str:
        """Why the CPU kernels cannot serve the model, if so; see csrc/ops.h for the layouts behind the numbers."""
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


_QUANTISED = "its weights are {}, which is not served yet: it needs a checkpoint of bfloat16 or float32"
