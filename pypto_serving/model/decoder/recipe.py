"""The description of a decoder: what each layer computes, and how checkpoints name its tensors. Torch-free.

A parser for each architecture (`model/families/`) makes it from config.json. Inventory, spec and all programs read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from pypto_serving.model.fields import MOST_LAYERS, Fields
from pypto_serving.model.formats.quantization import SECTION, Quantization
from pypto_serving.model.formats.schemes import PLAIN
from pypto_serving.model.formats.section import read_quantization
from pypto_serving.model.rope import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRecipe:
    """Grouped-query attention over the full history, with scores scaled by head_dim ** -0.5.

    head_norms: whether RMSNorm is applied to each query and key head before RoPE.
    qkv_bias, o_bias: whether projections have biases.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    head_norms: bool = False
    qkv_bias: bool = False
    o_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpRecipe:
    """SwiGLU of `width` inner outputs: down(silu(gate(x)) * up(x)). bias: whether all three matrices have one."""

    width: int
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsRecipe:
    """A mixture of `count` experts, each a SwiGLU of `width` inner outputs, chosen by the softmax of a router.

    normalize: whether the weights of the `per_token` chosen experts are divided by their sum.
    """

    count: int
    per_token: int
    width: int
    normalize: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecipe:
    """A layer with pre-norms: x += attention(norm(x)); x += mlp(norm(x))."""

    attention: AttentionRecipe
    mlp: MlpRecipe | ExpertsRecipe


@dataclass(frozen=True, slots=True)
class Part:
    """Some outputs of a stored matrix, from `first` on: a matrix that is stored after others."""

    module: str
    first: int = 0

    def rows(self, outputs: range) -> range:
        """Return where `outputs` of the part are in the stored matrix."""
        return range(self.first + outputs.start, self.first + outputs.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """The names of a layer's modules that differ between architectures.

    qkv, gate_up: matrices of their own, or a single one that holds them one after the other.
    mixtral: whether releases name experts in Mixtral's words; see `stored_names`.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    mixtral: bool = False

    def expert(self, index: int) -> tuple[str, str, str]:
        """Return the names of an expert's gate, up and down matrices."""
        gate, up, down = (f"mlp.experts.{index}.{part}_proj" for part in ("gate", "up", "down"))
        return gate, up, down


def parts_of(prefix: str, modules: Sequence[str], sizes: Sequence[int]) -> list[Part]:
    """Return the matrices of `sizes` outputs that `modules` hold: each its own, or all one after the other."""
    if len(modules) == len(sizes):
        return [Part(prefix + module) for module in modules]
    return [Part(prefix + modules[0], sum(sizes[:index])) for index in range(len(sizes))]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder: RMSNorm everywhere, and a recipe for each layer. The attention of layers differs only in its RoPE.

    window: the window of attention in some layers, if max_position_embeddings was cut to it; 0 otherwise.
    """

    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    tied_embeddings: bool
    max_position_embeddings: int
    window: int = 0
    layers: tuple[LayerRecipe, ...]
    names: TensorNames = TensorNames()
    quantization: Quantization | None = None

    @classmethod
    def from_fields(
        cls,
        config: Fields,
        *,
        head_norms: bool = False,
        qkv_bias: bool = False,
        o_bias: bool = False,
        mlp_bias: bool = False,
        window: int | None = None,
        rotates: Callable[[int], bool] = lambda layer: True,
        rotates_in_part: bool = False,
        experts: Callable[[int], ExpertsRecipe | None] = lambda layer: None,
        names: TensorNames | None = None,
    ) -> Self:
        """Read the keys that all architectures share. Raises ModelError naming an unsupported key and value.

        `window`: positions that a query of some layer sees. The model then serves sequences up to this length, in which
        every query sees all positions. `rotates` says whether a layer has RoPE, `rotates_in_part` whether it may
        rotate a part of each head; `experts` returns the experts of a layer, None for a dense layer.
        """
        activation = config.get("hidden_act") or "silu"
        config.require(activation in ("silu", "swish"), "hidden_act", activation, '"silu"')
        hidden, heads = config.positive_int("hidden_size"), config.positive_int("num_attention_heads")
        kv_heads = config.positive_int("num_key_value_heads", default=heads)
        config.require(heads % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of the {heads} heads")
        head_dim = config.positive_int("head_dim", default=max(1, hidden // heads))
        config.require(head_dim % 2 == 0, "head_dim", head_dim, "even")
        max_len = config.positive_int("max_position_embeddings")
        rope = Rope.from_config(config, head_dim, max_len, rotates_in_part)
        attention = AttentionRecipe(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope,
            head_norms=head_norms,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
        )
        still = replace(attention, rope=Rope(kind="none", dim=rope.dim, theta=rope.theta, trained_len=max_len))
        dense = MlpRecipe(width=config.positive_int("intermediate_size"), bias=mlp_bias)
        longest = max(max_len, rope.max_len)
        count = config.positive_int("num_hidden_layers", most=MOST_LAYERS)
        model = cls(
            vocab_size=config.positive_int("vocab_size"),
            hidden_size=hidden,
            rms_norm_eps=config.positive_float("rms_norm_eps", default=1e-6),
            tied_embeddings=config.flag("tie_word_embeddings", False),
            max_position_embeddings=min(longest, window or longest),
            window=window if window is not None and window < longest else 0,
            layers=tuple(
                LayerRecipe(attention=attention if rotates(layer) else still, mlp=experts(layer) or dense)
                for layer in range(count)
            ),
            names=names or TensorNames(),
            quantization=read_quantization(config),
        )
        model._check_quantization(config)
        return model

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> AttentionRecipe:
        """Return the attention of the first layer, which those of the others resemble but for its RoPE."""
        return self.layers[0].attention

    @property
    def unread(self) -> tuple[str, ...]:
        """Name keys of config.json that would change numbers elsewhere, and are not read."""
        return self.attention.rope.unread

    @property
    def ropes(self) -> list[Rope]:
        """Return the different RoPEs of the layers."""
        return list(dict.fromkeys(layer.attention.rope for layer in self.layers))

    def qkv(self, layer: int) -> list[Part]:
        """Return where the projections of queries, keys and values of a layer are stored."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return parts_of(f"model.layers.{layer}.", self.names.qkv, (queries, keys, keys))

    def gate_up(self, layer: int, width: int) -> list[Part]:
        """Return where gate and up of a dense layer of this width are stored."""
        return parts_of(f"model.layers.{layer}.", self.names.gate_up, (width, width))

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def experts(self) -> ExpertsRecipe | None:
        """Return the experts of the layers that have some, which are alike; None for a dense model."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertsRecipe)), None)

    @property
    def mlp_widths(self) -> Sequence[int]:
        """Return the different widths of dense layers; empty if all have experts."""
        return sorted({layer.mlp.width for layer in self.layers if isinstance(layer.mlp, MlpRecipe)})

    @property
    def head(self) -> str:
        """Return the module whose weights are the output layer."""
        return "model.embed_tokens" if self.tied_embeddings else "lm_head"

    def _check_quantization(self, config: Fields) -> None:
        """Raise ModelError if a tied embedding would be quantised."""
        if self.quantization is None or not self.tied_embeddings:
            return
        if self.quantization.schemes("lm_head")[0] != PLAIN:
            ignored = config.section(SECTION).get("ignore")
            wanted = "a list with lm_head, which is the embedding (tie_word_embeddings)"
            config.require(False, f"{SECTION}.ignore", ignored, wanted)


def sliding_window(config: Fields, used: bool) -> int | None:
    """Read the window of attention; None if no layer has one. `used` decides where config.json lists no layers."""
    kinds = config.get("layer_types") or []
    known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
    config.require(known, "layer_types", kinds, "a list of full_attention and sliding_attention")
    if "sliding_attention" in kinds or (used and not kinds and config.get("sliding_window") is not None):
        return config.positive_int("sliding_window")
    return None
