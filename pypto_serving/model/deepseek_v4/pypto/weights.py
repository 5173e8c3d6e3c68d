"""Weights of pypto-lib's DeepSeek V4 Flash programs, from the tensors of a W8A8 checkpoint. Torch-free.

`pypto-serving convert --format w8a8` makes such checkpoints of the released ones. Tensors of all layers of a kind lie
one after the other. Some matrices are transposed to [inputs, outputs], int8 ones with a scale for each output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from pypto_serving.errors import ModelError
from pypto_serving.model.checkpoint import StoredTensors, bfloat16
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.pypto.pools import MAX_TOKENS
from pypto_serving.model.rope import Rope
from pypto_serving.types.arrays import Array, BFloat16Array, Float32Array

Pieces = Iterable[Array]
Made = dict[str, tuple[str, str]]
"""For each argument: how it is made, and from which tensor of a layer."""


def _compressor(prefix: str, module: str) -> Made:
    return {
        f"{prefix}_wkv": ("bfloat16", f"{module}.wkv.weight"),
        f"{prefix}_wgate": ("bfloat16", f"{module}.wgate.weight"),
        f"{prefix}_ape": ("float", f"{module}.ape"),
        f"{prefix}_norm_w": ("bfloat16", f"{module}.norm.weight"),
    }


_MIXES = [f"hc_{block}_{part}" for block in ("attn", "ffn") for part in ("fn", "scale", "base")]
EVERY_LAYER: Made = {
    **{name: ("float", name) for name in _MIXES},
    **{f"shared_{name}": ("codes", f"ffn.shared_experts.{name}.weight") for name in ("w1", "w2", "w3")},
    **{f"shared_{name}_scale": ("float", f"ffn.shared_experts.{name}.scale") for name in ("w1", "w2", "w3")},
    "attn_norm_w": ("bfloat16", "attn_norm.weight"),
    "wq_a": ("transposed", "attn.wq_a.weight"),
    "wq_b": ("codes_transposed", "attn.wq_b.weight"),
    "wq_b_scale": ("float", "attn.wq_b.scale"),
    "wkv": ("transposed", "attn.wkv.weight"),
    "gamma_cq": ("bfloat16", "attn.q_norm.weight"),
    "gamma_ckv": ("bfloat16", "attn.kv_norm.weight"),
    "attn_sink": ("float", "attn.attn_sink"),
    "wo_a": ("grouped", "attn.wo_a.weight"),
    "wo_b": ("codes", "attn.wo_b.weight"),
    "wo_b_scale": ("float", "attn.wo_b.scale"),
    "norm_w": ("bfloat16", "ffn_norm.weight"),
    "gate_w": ("float", "ffn.gate.weight"),
    "gate_bias": ("bias", "ffn.gate.bias"),
    "tid2eid": ("ids", "ffn.gate.tid2eid"),
}
HCA = _compressor("hca_cmp", "attn.compressor")
CSA = {
    **_compressor("csa_cmp", "attn.compressor"),
    **_compressor("csa_inner", "attn.indexer.compressor"),
    "csa_idx_wq_b": ("codes_transposed", "attn.indexer.wq_b.weight"),
    "csa_idx_wq_b_scale": ("float", "attn.indexer.wq_b.scale"),
    "csa_weights_proj": ("transposed", "attn.indexer.weights_proj.weight"),
}
HEAD_MIX = {f"hc_head_{name}": ("float", f"hc_head_{name}") for name in ("fn", "scale", "base")}
DRAFT = {
    "enorm_w": ("float", "enorm.weight"),
    "hnorm_w": ("float", "hnorm.weight"),
    "e_proj_w": ("codes", "e_proj.weight"),
    "e_proj_w_scale": ("float", "e_proj.scale"),
    "h_proj_w": ("codes", "h_proj.weight"),
    "h_proj_w_scale": ("float", "h_proj.scale"),
    "mtp_norm_w": ("bfloat16", "norm.weight"),
    **{f"mtp_{name}": made for name, made in HEAD_MIX.items()},
}


class FlashWeights:
    """Reads the weights of a rank by argument, in pieces along dimension 0. Raises ModelError for other checkpoints.

    The ranks split the experts; each group of `tensor` ranks splits the output layer; each rank has all other weights.
    """

    def __init__(self, model: DeepseekV4Config, tensors: StoredTensors, ranks: int, tensor: int) -> None:
        if model.storage.name != "int8":
            raise ModelError("pypto-lib serves DeepSeek V4 in W8A8; convert the checkpoint to the format w8a8")
        self._model, self._tensors = model, tensors
        self._ranks, self._tensor = ranks, tensor
        self._how: Mapping[str, Callable[[str], Array]] = {
            "float": self._float,
            "bfloat16": self._bfloat16,
            "transposed": lambda name: np.ascontiguousarray(self._bfloat16(name).T),
            "codes": self._codes,
            "codes_transposed": lambda name: np.ascontiguousarray(self._codes(name).T),
            "grouped": self._grouped,
            "bias": self._bias,
            "ids": self._ids,
        }

    def of_rank(self, rank: int) -> Iterator[tuple[str, Pieces]]:
        """Yield the weights of the model's layers, embedding and output layer."""
        model, layers = self._model, range(self._model.num_layers)
        hadamard = self._hadamard()
        yield from self._each(EVERY_LAYER, [f"layers.{layer}." for layer in layers])
        yield from self._each(HCA, [f"layers.{layer}." for layer in model.layers_of("hca")])
        yield from self._each(CSA, [f"layers.{layer}." for layer in model.layers_of("csa")])
        yield "csa_hadamard_idx", (hadamard for _ in model.layers_of("csa"))
        yield from self._experts(rank, [f"layers.{layer}." for layer in layers])
        yield from self._each(HEAD_MIX, [""])
        yield "embed_weight", (self._bfloat16("embed.weight"),)
        yield "final_norm_w", (self._bfloat16("norm.weight"),)
        rows = model.vocab_size // self._tensor
        begin = rank % self._tensor * rows
        yield "lm_head_weight", (self._bfloat16("head.weight")[begin : begin + rows],)
        tables = [_rope_tables(rope) for rope in (model.rope, model.compress_rope)]
        for name, pair in zip(("freqs_cos", "freqs_sin"), zip(*tables, strict=True), strict=True):
            yield name, (table[None] for table in pair)

    def of_draft_layer(self, rank: int) -> Iterator[tuple[str, Pieces]]:
        """Yield the weights of the draft layer, by their names in decode_mtp."""
        smooth = np.ones(self._model.hidden_size, np.float32)
        for weights in (
            self._each(EVERY_LAYER | DRAFT, ["mtp.0."]),
            self._experts(rank, ["mtp.0."]),
            ((name, (smooth,)) for name in ("e_proj_smooth", "h_proj_smooth")),
        ):
            yield from ((f"mtp_{name}", pieces) for name, pieces in weights)

    def _each(self, made: Mapping[str, tuple[str, str]], prefixes: list[str]) -> Iterator[tuple[str, Pieces]]:
        for name, (how, tensor) in made.items():
            yield name, map(self._how[how], [prefix + tensor for prefix in prefixes])

    def _experts(self, rank: int, prefixes: list[str]) -> Iterator[tuple[str, Pieces]]:
        count = self._model.experts.count // self._ranks
        modules = [f"{p}ffn.experts.{e}." for p in prefixes for e in range(rank * count, (rank + 1) * count)]
        for matrix in ("w1", "w3", "w2"):
            codes, scales = ([f"{module}{matrix}.{part}" for module in modules] for part in ("weight", "scale"))
            yield f"routed_{matrix}", (self._codes(name)[None] for name in codes)
            yield f"routed_{matrix}_scale", (self._float(name)[None] for name in scales)

    def _float(self, name: str) -> Float32Array:
        stored = self._tensors[name]
        return self._tensors.read(stored, 0, int(np.prod(stored.shape))).reshape(stored.shape)

    def _bfloat16(self, name: str) -> BFloat16Array:
        stored = self._tensors[name]
        return self._tensors.read_bfloat16(stored, 0, int(np.prod(stored.shape))).reshape(stored.shape)

    def _codes(self, name: str) -> Array:
        return self._tensors.view(self._tensors[name])

    def _grouped(self, name: str) -> BFloat16Array:
        """Read [groups * rank, inputs of a group] as [groups, rank, inputs]."""
        return self._bfloat16(name).reshape(self._model.o_groups, self._model.o_lora_rank, -1)

    def _bias(self, name: str) -> Float32Array:
        """Read the bias of a layer that routes by score; zeros for one that routes by token."""
        return self._float(name) if self._tensors.has(name) else np.zeros(self._model.experts.count, np.float32)

    def _ids(self, name: str) -> Array:
        """Read the experts of each token; zeros for a layer that routes by score."""
        if self._tensors.has(name):
            return self._tensors.view(self._tensors[name]).astype(np.int32)
        return np.zeros((self._model.vocab_size, self._model.experts.per_token), np.int32)

    def _hadamard(self) -> BFloat16Array:
        """Return the normalised Hadamard matrix (Sylvester 1867) by which indexer queries and keys are rotated."""
        assert self._model.indexer is not None
        size = self._model.indexer.head_dim
        signs = np.ones((1, 1), np.float32)
        while len(signs) < size:
            signs = np.block([[signs, signs], [signs, -signs]])
        return bfloat16(signs / np.float32(size**0.5))


def _rope_tables(rope: Rope) -> tuple[BFloat16Array, BFloat16Array]:
    """Return cosines and sines [tokens, rope_dim], whose second half repeats the first."""
    cos, sin = (bfloat16(np.concatenate([table, table], axis=1)) for table in rope.tables(MAX_TOKENS))
    return cos, sin
