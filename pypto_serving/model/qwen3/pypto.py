"""Compiled programs of dense Qwen3 models: arguments, weights and KV pages, in two revisions. Torch-free.

| revision | embeds   | chooses greedy ids  | rows of a page              |
|----------|----------|---------------------|-----------------------------|
| 2026-06  | the host | no                  | layer, page, head, token    |
| 2026-08  | device   | decode, beside logits | layer, page, token, head  |

Sizes that a dispatch chooses: T tokens, B rows, BM entries of their block tables; ROWS are those of the KV pools.

A program over n devices takes inputs once, and everything else for each device: `wq` becomes `wq_0`, `wq_1` and so on.
A device has its heads and their pages, its part of the columns between an MLP's products, and its part of the
vocabulary for logits. Each device embeds all tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from pypto_serving.model.checkpoint import StoredTensors, bfloat16
from pypto_serving.model.contract import Argument, Sizes, StageName, StepArrays, of_role
from pypto_serving.model.decoder.recipe import DecoderConfig
from pypto_serving.parallel.topology import part
from pypto_serving.types.arrays import Array, BFloat16Array, Int32Array
from pypto_serving.types.kv import Spans
from pypto_serving.util import ceil_div

Revision = Literal["2026-06", "2026-08"]
PAGE_TOKENS, BATCH_ROWS, MAX_TOKENS = 128, 16, 4096
VOCABULARY_MULTIPLE, IDS_PAD = 512, 8
RMS_NORM_EPS = 1e-6
_TRANSPOSED = {
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "w_gate": "mlp.gate_proj",
    "w_up": "mlp.up_proj",
    "w_down": "mlp.down_proj",
}
_SPLIT_BY_INPUTS = ("wo", "w_down")
"""Matrices that devices split by inputs, so that their products are summed over devices."""
_NORMS = {
    "input_rms_weight": "input_layernorm",
    "q_norm_weight": "self_attn.q_norm",
    "k_norm_weight": "self_attn.k_norm",
    "post_rms_weight": "post_attention_layernorm",
}

_LAYER, _LAST = "input_rms_weight wq wk wv q_norm_weight k_norm_weight", "final_norm_weight lm_head_weight"
_IN_PREFILL = (
    f"seq_lens chunk_lens chunk_offsets {_LAYER} rope_cos rope_sin block_table slot_mapping k_cache v_cache wo"
)
_MLP = "w_gate w_up w_down"
_IN_DECODE = f"{_LAYER} seq_lens block_table slot_mapping rope_cos rope_sin k_cache v_cache wo {_MLP} post_rms_weight"
_ORDER: Mapping[Revision, Mapping[StageName, str]] = {
    "2026-06": {
        "prefill": f"hidden_states {_IN_PREFILL} post_rms_weight {_MLP} {_LAST} out",
        "decode": f"hidden_states {_IN_DECODE} {_LAST} out",
    },
    "2026-08": {
        "prefill": f"input_ids {_IN_PREFILL} {_MLP} post_rms_weight {_LAST} embed_weight out",
        "decode": f"{_IN_DECODE} {_LAST} out embed_weight sampled_ids_in sampled_ids next_hidden",
    },
}
"""The arguments of each program, in order."""


class Qwen3Contract:
    """The programs of one model, for sequences of up to `max_model_len` tokens. Implements Contract.

    `devices` divides the model's KV heads and the columns of its MLP.
    """

    def __init__(
        self, model: DecoderConfig, revision: Revision, max_model_len: int, max_step_tokens: int, devices: int = 1
    ) -> None:
        self.model, self.revision, self.devices = model, str(revision), devices
        self.table_width = ceil_div(max_model_len, PAGE_TOKENS)
        self.vocabulary = ceil_div(model.vocab_size, VOCABULARY_MULTIPLE * devices) * VOCABULARY_MULTIPLE * devices
        self.kv_heads = model.num_kv_heads // devices
        self._ids_in = revision == "2026-08"
        order = "token, head" if self._ids_in else "head, token"
        self.layout = f"k or v, layer, page of {PAGE_TOKENS}, {order}"
        if devices > 1:
            self.layout = f"device of {devices}, {self.layout}"
        self.most: Sizes = {"T": max_step_tokens, "B": BATCH_ROWS, "BM": BATCH_ROWS * self.table_width}
        self.stages: Mapping[StageName, tuple[Argument, ...]] = {
            stage: self._on_devices([self._arguments(stage)[name] for name in order.split()])
            for stage, order in _ORDER[revision].items()
        }
        self.logits = self._each("out")

    @staticmethod
    def obstacle(model: DecoderConfig) -> str:
        """Return why the programs cannot serve a model, or ""."""
        if model.experts is not None:
            return "they have no experts"
        if not model.attention.head_norms:
            return "they need norms of query and key heads, as Qwen3 has them"
        if model.attention.qkv_bias or model.attention.o_bias:
            return "their projections have no bias"
        if model.rms_norm_eps != RMS_NORM_EPS:
            return f"their norms have the epsilon {RMS_NORM_EPS}, not {model.rms_norm_eps}"
        return "they take bfloat16 weights" if model.quantization is not None else ""

    def _each(self, name: str) -> tuple[str, ...]:
        """Return the names of an argument on all devices."""
        return (name,) if self.devices == 1 else tuple(f"{name}_{device}" for device in range(self.devices))

    def _on_devices(self, arguments: Sequence[Argument]) -> tuple[Argument, ...]:
        """Return the arguments of all devices, given those of one."""
        if self.devices == 1:
            return tuple(arguments)
        own = of_role(arguments, "weight", "cache", "output")
        names = [self._each(argument.name) for argument in own]
        each = [
            replace(argument, name=of_devices[device], device=device)
            for device in range(self.devices)
            for argument, of_devices in zip(own, names, strict=True)
        ]
        return (*of_role(arguments, "input"), *each)

    def _arguments(self, stage: StageName) -> dict[str, Argument]:
        """Return the arguments of a device by name, in the order of weights, caches, inputs and outputs."""
        model, layers, hidden = self.model, self.model.num_layers, self.model.hidden_size
        queries, keys = model.num_heads // self.devices * model.head_dim, self.kv_heads * model.head_dim
        inner, vocabulary = model.mlp_widths[0] // self.devices, self.vocabulary // self.devices
        tokens = "T" if stage == "prefill" else "B"
        arguments = [
            Argument("input_rms_weight", "float32", (layers, hidden)),
            Argument("wq", "bfloat16", (layers * hidden, queries)),
            Argument("wk", "bfloat16", (layers * hidden, keys)),
            Argument("wv", "bfloat16", (layers * hidden, keys)),
            Argument("q_norm_weight", "float32", (layers, model.head_dim)),
            Argument("k_norm_weight", "float32", (layers, model.head_dim)),
            Argument("rope_cos", "float32", (MAX_TOKENS, model.head_dim)),
            Argument("rope_sin", "float32", (MAX_TOKENS, model.head_dim)),
            Argument("k_cache", "bfloat16", ("ROWS", model.head_dim), "cache"),
            Argument("v_cache", "bfloat16", ("ROWS", model.head_dim), "cache"),
            Argument("wo", "bfloat16", (layers * queries, hidden)),
            Argument("post_rms_weight", "float32", (layers, hidden)),
            Argument("w_gate", "bfloat16", (layers * hidden, inner)),
            Argument("w_up", "bfloat16", (layers * hidden, inner)),
            Argument("w_down", "bfloat16", (layers * inner, hidden)),
            Argument("final_norm_weight", "float32", (1, hidden)),
            Argument("lm_head_weight", "bfloat16", (vocabulary, hidden)),
            Argument("embed_weight", "bfloat16", (self.vocabulary, hidden)),
            Argument("input_ids", "int32", (tokens,), "input"),
            Argument("hidden_states", "bfloat16", (tokens, hidden), "input"),
            Argument("sampled_ids_in", "int32", ("B", IDS_PAD), "input"),
            *(Argument(name, "int32", ("B",), "input") for name in ("seq_lens", "chunk_lens", "chunk_offsets")),
            Argument("block_table", "int32", ("BM",), "input"),
            Argument("slot_mapping", "int32", (tokens,), "input"),
            Argument("out", "float32", ("B", vocabulary), "output"),
            Argument("sampled_ids", "int32", ("B", IDS_PAD), "output"),
            Argument("next_hidden", "bfloat16", ("B", hidden), "output"),
        ]
        return {argument.name: argument for argument in arguments}

    def inputs(self, stage: StageName, step: StepArrays, embedding: BFloat16Array | None) -> dict[str, Array]:
        """Implement Contract. Tokens of row i are [chunk_offsets[i], chunk_offsets[i] + chunk_lens[i])."""
        values: dict[str, Array] = {
            "seq_lens": step.context_lens,
            "block_table": self._table(step.block_tables[0]),
            "slot_mapping": step.slot_mapping[0],
        }
        if stage == "prefill":
            values |= {"chunk_lens": np.diff(step.query_start), "chunk_offsets": step.query_start[:-1]}
        if embedding is not None:
            values["hidden_states"] = embedding[step.token_ids]
        elif stage == "prefill":
            values["input_ids"] = step.token_ids
        else:
            ids = np.zeros((len(step.token_ids), IDS_PAD), np.int32)
            ids[:, 0] = step.token_ids
            values["sampled_ids_in"] = ids
        return values

    def _table(self, tables: Int32Array) -> Int32Array:
        """Return the flat block table: entry i * width + j is the page of tokens [128 j, 128 (j + 1)) of row i."""
        rows, blocks = tables.shape
        flat = np.zeros((rows, self.table_width), np.int32)
        flat[:, :blocks] = tables
        return flat.reshape(-1)

    def embedding(self, tensors: StoredTensors) -> BFloat16Array | None:
        """Implement Contract."""
        return None if self._ids_in else self._rows(tensors, "model.embed_tokens.weight")

    def weights(self, tensors: StoredTensors) -> Iterator[tuple[str, Iterable[Array]]]:
        """Implement Contract. Matrices become [inputs, outputs], those of all layers one after the other."""
        for device in range(self.devices):
            for name, pieces in self._weights_of(tensors, device):
                yield self._each(name)[device], pieces

    def _weights_of(self, tensors: StoredTensors, device: int) -> Iterator[tuple[str, Iterable[Array]]]:
        model = self.model
        for name, module in _NORMS.items():
            yield name, (self._vector(tensors, f"model.layers.{i}.{module}") for i in range(model.num_layers))
        for name, module in _TRANSPOSED.items():
            modules = [f"model.layers.{i}.{module}" for i in range(model.num_layers)]
            yield name, (self._transposed(tensors, each, device, name in _SPLIT_BY_INPUTS) for each in modules)
        yield "final_norm_weight", (self._vector(tensors, "model.norm"),)
        cos, sin = model.attention.rope.tables(MAX_TOKENS)
        yield "rope_cos", (np.concatenate([cos, cos], axis=1),)
        yield "rope_sin", (np.concatenate([sin, sin], axis=1),)
        head, mine = self._rows(tensors, f"{model.head}.weight"), part(self.vocabulary, self.devices, device)
        own = head[mine.start : mine.stop]
        yield "lm_head_weight", (own, np.broadcast_to(head[:1], (len(mine) - len(own), model.hidden_size)))
        if self._ids_in:
            table = self._rows(tensors, "model.embed_tokens.weight")
            padding = self.vocabulary - model.vocab_size
            yield "embed_weight", (table, np.zeros((padding, model.hidden_size), np.uint16))

    def _vector(self, tensors: StoredTensors, module: str) -> Array:
        """Read a norm as float32 [1, n], rounded to bfloat16, the serving dtype."""
        stored = tensors[f"{module}.weight"]
        exact = tensors.read(stored, 0, stored.shape[0])[None]
        return (bfloat16(exact).astype("<u4") << 16).view("<f4")

    def _transposed(self, tensors: StoredTensors, module: str, device: int, by_inputs: bool) -> Array:
        """Read a device's part of a matrix as [inputs, outputs]."""
        whole = self._rows(tensors, f"{module}.weight").T
        mine = part(whole.shape[0 if by_inputs else 1], self.devices, device)
        return np.ascontiguousarray(whole[mine.start : mine.stop] if by_inputs else whole[:, mine.start : mine.stop])

    def _rows(self, tensors: StoredTensors, name: str) -> BFloat16Array:
        stored = tensors[name]
        return tensors.read_bfloat16(stored, 0, stored.shape[0] * stored.shape[1]).reshape(stored.shape)

    def pages(self, num_pages: int, page: int) -> Mapping[str, Spans]:
        """Implement Contract. In each pool, layer l has its rows of a page at l * pages + page."""
        size = PAGE_TOKENS * self.kv_heads * self.model.head_dim * 2
        firsts = [size * (layer * num_pages + page) for layer in range(self.model.num_layers)]
        spans = tuple((first, first + size) for first in firsts)
        pools = zip(self._each("k_cache"), self._each("v_cache"), strict=True)
        return dict.fromkeys((name for pair in pools for name in pair), spans)
