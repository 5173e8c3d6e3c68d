"""What operations must do at least, from their shapes alone; and steps to do it in.

Bytes are those that must come from memory or go there if nothing is in a cache: weights, keys and values once per
operation, activations in and out. Operations are multiplications and additions; attention's are those that causality
asks for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pypto_serving.backend.base import StepInputs
from pypto_serving.model.decoder.inventory import DecoderInventory
from pypto_serving.model.decoder.recipe import DecoderConfig, ExpertsRecipe
from pypto_serving.model.formats.schemes import PLAIN, Fp8, Int8, Plain
from pypto_serving.types.config import Head
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
    def shape(self) -> str:
        """Return the shape as text for a table."""
        first = f"batch {len(self.queries)}" if max(self.queries) == 1 else f"{self.tokens} queries"
        return f"{first}, context {self.contexts[0]}{f', {self.shared} shared' * bool(self.shared)}"

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


def linear(
    rows: int,
    n: int,
    k: int,
    finish: str = "store",
    matrices: float = 1,
    int8: bool = False,
    stored: float | None = None,
) -> Work:
    """A product with weights [n, k], or of `rows` rows with so many matrices; gated, it has n / 2 outputs.

    `stored` is the bytes of a matrix, by default of bfloat16. Of int8 activations, each row also has a scale.
    """
    out, each = {"store": F32, "add": 2 * F32, "gate": BF16 / 2}[finish], INT8 if int8 else BF16
    activations = rows * (k * each + n * out + F32 * int8)
    return Work(matrices * (BF16 * n * k if stored is None else stored) + activations, 2 * rows * n * k, int8)


def quantize(rows: int, k: int) -> Work:
    """bfloat16 to int8 and a scale: a comparison and a product per element."""
    return Work(rows * (k * (BF16 + INT8) + F32), 2 * rows * k)


def kv_bytes(dim: int, int8: bool = False) -> int:
    """Bytes of a token's key or value of a head; of int8, it has a scale."""
    return dim + F32 if int8 else dim * BF16


def attend(batch: Batch, heads: int, kv_heads: int, dim: int, int8: bool = False) -> Work:
    """Causal attention over the batch's history. Over int8, products are of bytes and 16-bit numbers, which takes as
    long as products of bfloat16.
    """
    seen = sum(q * c - q * (q - 1) // 2 for q, c in zip(batch.queries, batch.contexts, strict=True))
    known = sum(batch.contexts) - (len(batch.contexts) - 1) * batch.shared
    cache = 2 * known * kv_heads * kv_bytes(dim, int8)
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


class Matrices:
    """The matrices of a model as kernels read them. `head`: what the output layer is served in, as an engine has it."""

    def __init__(self, model: DecoderConfig, head: Head = "auto") -> None:
        inventory = DecoderInventory(model)
        self._schemes, self._sizes = dict(inventory.schemes), inventory.sizes()
        self._sizes[model.head] = (model.vocab_size, model.hidden_size)
        if head == "int8":
            self._schemes[model.head] = Int8()

    def int8(self, module: str) -> bool:
        """Return True if activations become int8 for this matrix."""
        return not isinstance(self._schemes.get(module, PLAIN), Plain | Fp8)

    def linear(self, modules: Sequence[str], rows: int, finish: str = "store", matrices: float = 1) -> Work:
        """A product with these modules as one matrix."""
        sizes = [self._sizes[module] for module in modules]
        stored = sum(
            self._schemes.get(module, PLAIN).packed_bytes(*size) for module, size in zip(modules, sizes, strict=True)
        )
        n, k = sum(n for n, _ in sizes), sizes[0][1]
        return linear(rows, n, k, finish, matrices, self.int8(modules[0]), stored)

    def quantized(self, module: str, rows: int) -> Iterator[Operation]:
        """What makes activations int8 for this matrix, if they become that."""
        if self.int8(module):
            yield Operation("quantize", "quantize", quantize(rows, self._sizes[module][1]))


def operations(model: DecoderConfig, batch: Batch, head: Head = "auto") -> Iterator[Operation]:
    """The operations of a step, in the order in which NativeDecoder records them."""
    tokens, width, rows = batch.tokens, model.hidden_size, len(batch.queries)
    split = (model.num_heads, model.num_kv_heads, model.head_dim)
    matrices = Matrices(model, head)
    yield Operation("embed", "embed", embed(tokens, width))
    for layer in range(model.num_layers):
        attention, mlp = (f"model.layers.{layer}.{part}." for part in ("self_attn", "mlp"))
        qkv, o = [f"{attention}{name}_proj" for name in "qkv"], f"{attention}o_proj"
        yield Operation("norm", "rms_norm", norm(tokens, width, matrices.int8(qkv[0])))
        yield Operation("qkv", "linear", matrices.linear(qkv, tokens))
        yield Operation("heads", "qk_norm_rope", heads(tokens, *split))
        yield Operation("attend", "paged_attention", attend(batch, *split))
        yield from matrices.quantized(o, tokens)
        yield Operation("o", "linear", matrices.linear([o], tokens, "add"))
        if isinstance(recipe := model.layers[layer].mlp, ExpertsRecipe):
            yield from _experts(recipe, tokens, width, mlp, matrices)
            continue
        gate_up, down = [f"{mlp}gate_proj", f"{mlp}up_proj"], f"{mlp}down_proj"
        yield Operation("norm", "rms_norm", norm(tokens, width, matrices.int8(gate_up[0])))
        yield Operation("gate/up", "linear", matrices.linear(gate_up, tokens, "gate"))
        yield from matrices.quantized(down, tokens)
        yield Operation("down", "linear", matrices.linear([down], tokens, "add"))
    yield Operation("norm", "rms_norm", norm(rows, width, matrices.int8(model.head)))
    yield Operation("lm_head", "linear", matrices.linear([model.head], rows))


def _experts(experts: ExpertsRecipe, tokens: int, width: int, prefix: str, matrices: Matrices) -> Iterator[Operation]:
    per_token, entries = experts.per_token, tokens * experts.per_token
    active, router = expected_active(experts.count, per_token, tokens), f"{prefix}gate"
    gate, up, down = (f"{prefix}experts.0.{name}_proj" for name in ("gate", "up", "down"))
    yield Operation("norm", "rms_norm", norm(tokens, width, matrices.int8(router)))
    yield Operation("router", "linear", matrices.linear([router], tokens))
    yield Operation("route", "router_topk", route(tokens, experts.count, per_token))
    yield Operation("route", "moe_sort", Work(0, 0))
    if matrices.int8(gate) != matrices.int8(router):
        yield Operation("norm", "rms_norm", norm(tokens, width, matrices.int8(gate)))
    yield Operation("gather", "moe_gather", gather(tokens, per_token, width, matrices.int8(gate)))
    yield Operation("experts gate/up", "expert_linear", matrices.linear([gate, up], entries, "gate", active))
    yield from matrices.quantized(down, entries)
    yield Operation("experts down", "expert_linear", matrices.linear([down], entries, "store", active))
    yield Operation("combine", "moe_combine", combine(tokens, per_token, width))
