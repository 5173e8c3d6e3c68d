"""What operations must do at least, from their shapes alone; and steps to do it in.

Bytes are those that must come from memory or go there if nothing is in a cache: weights, keys and values once per
operation, activations in and out. Operations are multiplications and additions; attention's are those that causality
asks for.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from pypto_serving.backend.base import StepInputs
from pypto_serving.model.qwen3.config import Experts, Qwen3Config
from pypto_serving.model.qwen3.inventory import Qwen3Inventory
from pypto_serving.util import ceil_div

INT8, BF16, F32 = 1, 2, 4
"""Bytes per element."""
BLOCK = 32
"""Tokens per block of the KV cache."""


@dataclass(frozen=True)
class Work:
    """Bytes to move and operations to compute, on int8 or on bfloat16, at least."""

    bytes: float
    flops: float
    int8: bool = False

    def compute_seconds(self, peak: float, int8_peak: float) -> float:
        """The least time on a machine that computes so many operations per second."""
        return self.flops / (int8_peak if self.int8 else peak)

    def seconds(self, bandwidth: float, peak: float, int8_peak: float) -> float:
        """The least time on a machine that moves `bandwidth` bytes per second as well."""
        return max(self.bytes / bandwidth, self.compute_seconds(peak, int8_peak))


@dataclass(frozen=True)
class Batch:
    """A step: row i computes the last `queries[i]` of its `contexts[i]` tokens. The first `shared` of them, whole
    blocks, are the same in all rows and lie in the same blocks.
    """

    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    shared: int = 0

    @staticmethod
    def decode(rows: int, context: int = 1, shared: int = 0) -> Batch:
        """One token for each of `rows` rows."""
        return Batch((1,) * rows, (context,) * rows, shared)

    @staticmethod
    def prefill(queries: int, context: int) -> Batch:
        """The last `queries` tokens of one prompt."""
        return Batch((queries,), (context,))

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.queries)

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache that hold its history, and the null block."""
        common = self.shared // BLOCK
        return 1 + common + sum(ceil_div(context, BLOCK) - common for context in self.contexts)

    def inputs(self, rng: np.random.Generator, vocab: int = 1) -> StepInputs:
        """Random tokens in random blocks; logits of each row's last token."""
        widths, common = [ceil_div(context, BLOCK) for context in self.contexts], self.shared // BLOCK
        blocks = iter(rng.permutation(np.arange(1, self.num_blocks)))
        table = np.zeros((len(widths), max(widths)), np.int32)
        table[:, :common] = list(itertools.islice(blocks, common))
        for row, width in zip(table, widths, strict=True):
            row[common:width] = list(itertools.islice(blocks, width - common))
        positions = [np.arange(c - q, c) for q, c in zip(self.queries, self.contexts, strict=True)]
        slots = [row[p // BLOCK] * BLOCK + p % BLOCK for row, p in zip(table, positions, strict=True)]
        starts = np.cumsum([0, *self.queries])
        return StepInputs(
            token_ids=rng.integers(0, vocab, self.tokens, np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            query_start=starts.astype(np.int32),
            context_lens=np.asarray(self.contexts, np.int32),
            logits_rows=(starts[1:] - 1).astype(np.int32),
            slot_mapping=(np.concatenate(slots).astype(np.int32),),
            block_tables=(table,),
            fresh_blocks=(np.zeros(0, np.int32),),
        )


def linear(rows: int, n: int, k: int, finish: str = "store", matrices: float = 1, int8: bool = False) -> Work:
    """A product with weights [n, k], or of `rows` rows with so many matrices; gated, it has n / 2 outputs.

    Of int8, each output also has a scale and an offset, and each row a scale.
    """
    out, each = {"store": F32, "add": 2 * F32, "gate": BF16 / 2}[finish], INT8 if int8 else BF16
    scales = matrices * n * 2 * F32 + rows * F32 if int8 else 0
    return Work(matrices * n * k * each + rows * (k * each + n * out) + scales, 2 * rows * n * k, int8)


def quantized_linear(rows: int, n: int, k: int, weight_bytes: int, int8: bool) -> Work:
    """A product with so many bytes of quantized weights, by int8 or bfloat16 activations."""
    return Work(weight_bytes + rows * (k * (INT8 if int8 else BF16) + n * F32), 2 * rows * n * k, int8)


def quantize(rows: int, k: int) -> Work:
    """bfloat16 to int8 and a scale: a comparison and a product per element."""
    return Work(rows * (k * (BF16 + INT8) + F32), 2 * rows * k)


def attend(batch: Batch, heads: int, kv_heads: int, dim: int) -> Work:
    """Causal attention over the batch's history."""
    seen = sum(q * c - q * (q - 1) // 2 for q, c in zip(batch.queries, batch.contexts, strict=True))
    known = sum(batch.contexts) - (len(batch.contexts) - 1) * batch.shared
    cache = 2 * known * kv_heads * dim * BF16
    return Work(cache + 2 * batch.tokens * heads * dim * BF16, 4 * seen * heads * dim)


def embed(tokens: int, width: int) -> Work:
    """Rows of a bfloat16 table in float32."""
    return Work(tokens * width * (BF16 + F32), 0)


def norm(rows: int, width: int, int8: bool = False) -> Work:
    """x / rms(x) * weight: a square, an addition and two products per element; to int8, a product more."""
    out = INT8 if int8 else BF16
    return Work(width * F32 + rows * width * (F32 + out), (5 if int8 else 4) * rows * width)


def heads(tokens: int, heads: int, kv_heads: int, dim: int) -> Work:
    """Norms and rotation (3 operations per element) of queries and keys; values are copied."""
    turned, all_heads = heads + kv_heads, heads + 2 * kv_heads
    angles = dim * F32
    return Work(turned * dim * F32 + tokens * (all_heads * dim * (F32 + BF16) + angles), 7 * tokens * turned * dim)


def route(tokens: int, experts: int, per_token: int) -> Work:
    """Softmax over all experts; a choice and its share per slot."""
    return Work(tokens * (experts * F32 + per_token * 8), 2 * tokens * experts)


def gather(tokens: int, per_token: int, width: int, int8: bool = False) -> Work:
    """Rows to their experts."""
    return Work(tokens * (1 + per_token) * width * (INT8 if int8 else BF16), 0)


def combine(tokens: int, per_token: int, width: int) -> Work:
    """Experts' rows back to their tokens, weighted."""
    return Work(tokens * (per_token + 2) * width * F32, tokens * width * (2 * per_token + 1))


def expected_active(experts: int, per_token: int, tokens: int) -> float:
    """Experts that at least one token goes to, on average, where all are equally likely."""
    return experts * (1 - (1 - per_token / experts) ** tokens)


@dataclass(frozen=True)
class Operation:
    """One operation of a recorded step: what it does there, its name in Recording.names, and its work."""

    label: str
    name: str
    work: Work


def operations(model: Qwen3Config, batch: Batch) -> Iterator[Operation]:
    """The operations of a step, in the order in which NativeQwen3 records them."""
    tokens, width, rows = batch.tokens, model.hidden_size, len(batch.queries)
    split = (model.num_heads, model.num_kv_heads, model.head_dim)
    queries, projected = split[0] * split[2], (split[0] + 2 * split[1]) * split[2]
    int8 = Qwen3Inventory(model).int8_weights()
    yield Operation("embed", "embed", embed(tokens, width))
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        bytes_in, bytes_out = (f"{prefix}self_attn.{name}_proj.weight" in int8 for name in "qo")
        yield Operation("norm", "rms_norm", norm(tokens, width, bytes_in))
        yield Operation("qkv", "linear", linear(tokens, projected, width, int8=bytes_in))
        yield Operation("heads", "qk_norm_rope", heads(tokens, *split))
        yield Operation("attend", "paged_attention", attend(batch, *split))
        yield from _quantized(bytes_out, tokens, queries)
        yield Operation("o", "linear", linear(tokens, width, queries, "add", int8=bytes_out))
        if model.experts is not None and layer in model.experts.layers:
            yield from _experts(model.experts, tokens, width, f"{prefix}mlp.", int8)
            continue
        inner = model.intermediate_size
        bytes_in, bytes_out = (f"{prefix}mlp.{name}_proj.weight" in int8 for name in ("gate", "down"))
        yield Operation("norm", "rms_norm", norm(tokens, width, bytes_in))
        yield Operation("gate/up", "linear", linear(tokens, 2 * inner, width, "gate", int8=bytes_in))
        yield from _quantized(bytes_out, tokens, inner)
        yield Operation("down", "linear", linear(tokens, width, inner, "add", int8=bytes_out))
    head = "lm_head.weight" in int8
    yield Operation("norm", "rms_norm", norm(rows, width, head))
    yield Operation("lm_head", "linear", linear(rows, model.vocab_size, width, int8=head))


def _quantized(wanted: bool, rows: int, k: int) -> Iterator[Operation]:
    if wanted:
        yield Operation("quantize", "quantize", quantize(rows, k))


def _experts(experts: Experts, tokens: int, width: int, prefix: str, int8: Collection[str]) -> Iterator[Operation]:
    per_token, inner = experts.per_token, experts.intermediate_size
    active, entries = expected_active(experts.count, per_token, tokens), tokens * per_token
    router = f"{prefix}gate.weight" in int8
    gate_up, down = (f"{prefix}experts.0.{name}_proj.weight" in int8 for name in ("gate", "down"))
    yield Operation("norm", "rms_norm", norm(tokens, width, router))
    yield Operation("router", "linear", linear(tokens, experts.count, width, int8=router))
    yield Operation("route", "router_topk", route(tokens, experts.count, per_token))
    yield Operation("route", "moe_sort", Work(0, 0))
    if gate_up != router:
        yield Operation("norm", "rms_norm", norm(tokens, width, gate_up))
    yield Operation("gather", "moe_gather", gather(tokens, per_token, width, gate_up))
    expert_swiglu = linear(entries, 2 * inner, width, "gate", active, gate_up)
    yield Operation("experts gate/up", "expert_linear", expert_swiglu)
    yield from _quantized(down, entries, inner)
    yield Operation("experts down", "expert_linear", linear(entries, width, inner, "store", active, down))
    yield Operation("combine", "moe_combine", combine(tokens, per_token, width))
