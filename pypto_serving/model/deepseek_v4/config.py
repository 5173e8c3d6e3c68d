"""A DeepSeek V4 model as its config.json describes it. Torch-free.

Every layer has a sliding window. There are three kinds of layers:

    swa  sliding-window attention alone
    csa  compressed sparse attention: one compressed entry per few tokens; an indexer selects the top-k
    hca  heavily compressed attention: one compressed entry per many tokens; queries attend to all of them
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from pypto_serving.errors import ModelError
from pypto_serving.model.deepseek_v4 import parts
from pypto_serving.model.deepseek_v4.parts import DeepseekV4Experts, HyperConnections, Indexer, LayerKind
from pypto_serving.model.deepseek_v4.storage import Storage
from pypto_serving.model.fields import MOST_LAYERS, Fields
from pypto_serving.model.rope import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Config:
    """The values of config.json that programs need. `indexer` is None for a model without CSA layers.

    SWA layers use `rope`, the others `compress_rope`. Both rotate the last `rope_dim` channels of a head, in
    interleaved pairs. `mtp_layers` counts the draft layers of the checkpoint. They are read only `with_drafts`; then
    `kinds` has them too, after the `num_layers` of the model itself.
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

    @classmethod
    def from_json(cls, raw: dict[str, Any], source: str) -> Self:
        """Parse a config.json object; raises ModelError naming the key and value that cannot be served."""
        config = Fields(raw, source)
        parts.refuse_unsupported(config)
        layers = config.positive_int("num_hidden_layers", most=MOST_LAYERS)
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
            mtp_layers=config.natural("num_nextn_predict_layers", default=0, most=layers),
            storage=Storage.from_json(config),
        )

    def with_drafts(self) -> Self:
        """Return the model with its draft layer. Raises ModelError where there is not exactly one."""
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
        """Return what the names of a layer's tensors begin with."""
        return f"mtp.{layer - self.num_layers}." if layer in self.drafts else f"layers.{layer}."

    def first_row(self, layer: int) -> int:
        """Return the first position with a row in `ori`. A draft layer joins a token with the stream before it."""
        return int(layer in self.drafts)

    def layers_of(self, *kinds: LayerKind) -> tuple[int, ...]:
        """List the layers of `kinds`, ascending."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind in kinds)

    def ratio(self, kind: LayerKind) -> int:
        """Return the tokens per compressed entry in a layer of `kind`, 0 for none."""
        return {"swa": 0, "csa": self.csa_ratio, "hca": self.hca_ratio}[kind]

    def compressed_width(self, kind: LayerKind, dim: int) -> int:
        """Return the channels of kv, and of gates, that a compressor with entries of `dim` computes per token.

        In CSA layers windows overlap: a token has `dim` channels for the window after its own and `dim` for its own.
        """
        return 2 * dim if kind == "csa" else dim

    def ropes(self) -> dict[LayerKind, Rope]:
        """Return the RoPE of each kind of layer in the model."""
        return {kind: self.rope if kind == "swa" else self.compress_rope for kind in self.kinds}
