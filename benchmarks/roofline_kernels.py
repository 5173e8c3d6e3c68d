"""Every kernel by itself, on memory that is in no cache."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import roofline_work as work
from numpy.typing import NDArray
from roofline_limits import BandwidthMemory, peak
from roofline_work import BLOCK, Batch, Work

from pypto_serving.backend.base import StepInputs
from pypto_serving.kernels import (
    BLOCK_FORMS,
    INT8,
    Engine,
    GroupStrips,
    Int8Strips,
    KVCacheLayer,
    Matrix,
    PackedForm,
    Recording,
    Scoring,
    Strips,
    pack_blocks,
    pack_quantized,
    packed_form,
    zeros,
)
from pypto_serving.kernels.constants import PANEL
from pypto_serving.model.checkpoint import BLOCKS
from pypto_serving.model.formats.schemes import Int8
from pypto_serving.types.weights import CodesForm, Fp8Form, Layout, StoredCodes, StoredFp8, StoredQuantized, Table

Array = NDArray[Any]
Call = Callable[[], object]

ROTATED_BYTES = 300 << 20
"""Operations take turns on at least so many bytes of weights or cache, so that no cache holds what the next reads."""
LEAST_ROUNDS, LEAST_CALLS = 3, 4
"""Rounds that count, and calls of a round."""
MOST_TOKENS = 2048
"""Tokens of the largest step that is measured."""
_POOL = 4_194_301
_WEIGHT_SCALE = 1 / 32


@dataclass(frozen=True)
class Rounds:
    """Rounds of a measurement: seconds [rounds, operations], and the machine's limits [rounds] in bytes and operations
    per second, on bfloat16 and on int8: the better of those just before and just after.
    """

    seconds: Array
    bandwidths: Array
    peaks: Array
    int8_peaks: Array

    @property
    def calls(self) -> Array:
        """Mean seconds of an operation [rounds]."""
        mean: Array = self.seconds.mean(axis=1)
        return mean

    def limits(self, works: Sequence[Work]) -> Array:
        """Least possible seconds [rounds] of `works`, one after the other."""
        moments = zip(self.bandwidths, self.peaks, self.int8_peaks, strict=True)
        return np.array([sum(w.seconds(*moment) for w in works) for moment in moments])


@dataclass(frozen=True)
class Result:
    """Seconds that `works` take, one after the other.

    `limit` and `fraction` are medians over the rounds: the least possible time, and its share of the time taken.
    """

    name: str
    shape: str
    works: tuple[Work, ...]
    best: float
    median: float
    limit: float
    fraction: float

    @staticmethod
    def of(name: str, shape: str, works: Sequence[Work], seconds: Any, rounds: Rounds) -> Result:
        """Make a result from the mean time of a call in each round."""
        limits = rounds.limits(works)
        middle = (float(np.median(values)) for values in (seconds, limits, limits / seconds))
        return Result(name, shape, tuple(works), float(np.min(seconds)), *middle)


@dataclass(frozen=True)
class Group:
    """Cases that share memory: `prepare(bench)` makes it and returns what measures one case."""

    name: str
    cases: tuple[Any, ...]
    prepare: Callable[[Bench], Callable[[Any], list[Result]]]


class Bench:
    """Measures recordings of `engine` for about `budget_s` each, in turns with the machine's limits."""

    def __init__(self, engine: Engine, budget_s: float, memory: BandwidthMemory) -> None:
        self.engine, self.budget_s, self._memory = engine, budget_s, memory
        self.rng = np.random.default_rng(0)
        self._pool = self.rng.standard_normal(_POOL, np.float32)
        self._lead = (
            np.ones((MOST_TOKENS, 16), np.float32),
            np.ones(16, np.float32),
            np.zeros(8 * MOST_TOKENS, np.uint32),
        )

    def normal(self, count: int, scale: float = 1.0) -> NDArray[np.uint16]:
        """Normal random numbers in bfloat16, in huge pages; they repeat after some megabytes, at odd distances."""
        return fill(zeros(np.uint16, count), bfloat16(self._pool[:count] * np.float32(scale)))

    def matrix(self, n: int, k: int, count: int = 1, int8: bool = False) -> Matrix:
        """Packed random weights of `count` matrices [n, k]."""
        size, outputs = Matrix.size(n, k, count), Matrix.outputs(n, count)
        if not int8:
            return Matrix(self.normal(2 * size, _WEIGHT_SCALE).view(np.uint32), n, k)
        words = self.normal(size, _WEIGHT_SCALE).view(np.uint32)
        return Matrix(words, n, k, None, np.ones(outputs, np.float32), np.zeros(outputs, np.int32), INT8)

    def strips(self, rows: int, width: int, int8: bool = False) -> Strips:
        """Random activations in strips of pairs or quads."""
        if not int8:
            return self.normal(rows * width).view(np.uint32)
        return Int8Strips(self.normal(rows * width // 2).view(np.uint32), np.ones(rows, np.float32))

    def recording(self) -> Recording:
        """A new recording. Its first operation, while which the threads wake up, is not measured."""
        recording = Recording(self.engine)
        x, weight, out = self._lead
        recording.rms_norm(x, weight, 1e-6, out)
        return recording

    def measure(self, recording: Recording, inputs: Callable[[], StepInputs]) -> Rounds:
        """Replay a recording again and again, with the inputs of each time; the first round does not count."""
        found: list[Array] = []
        limits = self.rounds(lambda: found.append(replay(recording, inputs())[1:]))
        return Rounds(np.array(found[1:]), *limits)

    def rounds(self, once: Callable[[], None]) -> tuple[Array, Array, Array]:
        """Call it again and again. Return the limits around each call but the first, [rounds] each."""
        seen = [self._limits()]
        until = math.inf
        while len(seen) <= LEAST_ROUNDS + 1 or time.perf_counter() < until:
            once()
            seen.append(self._limits())
            until = min(until, time.perf_counter() + self.budget_s)
        around = np.maximum(seen[1:-1], seen[2:])
        return around[:, 0], around[:, 1], around[:, 2]

    def _limits(self) -> tuple[float, float, float]:
        peaks = (peak(self.engine, repeat=1, int8=int8) for int8 in (False, True))
        return self._memory.bandwidth(self.engine, repeat=2), *peaks


def fill(out: Array, values: Array) -> Array:
    """Write `values` into a flat `out`, over and over."""
    for start in range(0, out.size, values.size):
        part = out[start : start + values.size]
        part[:] = values[: part.size]
    return out


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to the nearest."""
    return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def replay(recording: Recording, inputs: StepInputs) -> NDArray[np.float64]:
    """Run a step; returns the seconds of each operation."""
    seconds = np.zeros(len(recording.names))
    arrays = (inputs.token_ids, inputs.positions, inputs.query_start, inputs.context_lens, inputs.logits_rows)
    recording.replay(*arrays, inputs.slot_mapping, inputs.block_tables, seconds)
    return seconds


@dataclass(frozen=True)
class Product:
    """A product with weights [n, k] in a form, by default bfloat16 or int8; `int8` activations or bfloat16 ones.

    `blocks`: a type of GGUF instead, with int16 activations or `int8` ones.
    """

    name: str
    n: int
    k: int
    finish: str = "store"
    int8: bool = False
    form: CodesForm | Fp8Form | None = None
    blocks: str = ""


WIDTH, HEADS, KV_HEADS, DIM, VOCAB = 1024, 16, 8, 128, 151936
"""The shape of Qwen3-0.6B."""
LINEARS = tuple(
    Product("int8 " * int8 + name, n, k, finish, int8)
    for int8 in (False, True)
    for name, n, k, finish in (
        ("qkv", 4096, WIDTH, "store"),
        ("o", WIDTH, 2048, "add"),
        ("gate/up", 6144, WIDTH, "gate"),
        ("down", WIDTH, 3072, "add"),
        ("lm_head", VOCAB, WIDTH, "store"),
    )
)
QUANTIZED = tuple(
    Product(name, 4096, 4096, "store", int8, form)
    for name, int8, form in (
        ("int4 g128", True, CodesForm(Table.INT4, 128, "BF16")),
        ("int4 g128 zeros", True, CodesForm(Table.INT4, 128, "F16", zeros=True)),
        ("int4 g32", True, CodesForm(Table.INT4, 32, "BF16")),
        ("mxfp4", True, CodesForm(Table.E2M1, 32, "F8_E8M0")),
        ("int4 g128 a16", False, CodesForm(Table.INT4, 128, "BF16")),
        ("mxfp4 a16", False, CodesForm(Table.E2M1, 32, "F8_E8M0")),
        ("fp8", False, Fp8Form((128, 128))),
    )
)


GGUF = tuple(
    Product(f"gguf {name}{' int8' * int8}", 4096, 4096, "store", int8, blocks=name)
    for name in BLOCK_FORMS
    for int8 in (False, True)
)


def stored_blocks(rng: np.random.Generator, name: str, n: int, k: int) -> NDArray[np.uint8]:
    """Random rows of blocks whose scales are ordinary numbers."""
    type = BLOCKS[name]
    blocks = rng.integers(0, 120, (n * k // type.weights, type.bytes), np.uint8)
    for at in type.halves:
        blocks[:, at : at + 2] = np.array([0.01], "<f2").view(np.uint8)
    return blocks.reshape(n, -1)


def stored(rng: np.random.Generator, form: CodesForm | Fp8Form, n: int, k: int) -> StoredQuantized:
    """A random matrix whose scales are ordinary numbers."""
    if isinstance(form, Fp8Form):
        scales = np.full((-(-n // form.block[0]), -(-k // form.block[1])), 0.01, np.float32)
        return StoredFp8(form, rng.integers(0, 0x7F, (n, k), np.uint8), scales)
    bits = {"BF16": np.uint16(0x3C00), "F16": np.float16(0.01), "F8_E8M0": np.uint8(120)}[form.scale_dtype]
    groups = (n, k // form.group)
    points = rng.integers(0, 16, groups, np.uint8) if form.zeros else None
    return StoredCodes(form, Layout.ROWS, rng.integers(0, 256, (n, k // 2), np.uint8), np.full(groups, bits), points)


def matrices(bench: Bench, product: Product) -> list[Matrix]:
    """At least LEAST_CALLS equal matrices, of more bytes than any cache holds; small ones repeat."""
    n, k = product.n, product.k
    if product.form is None and not product.blocks:
        each = n * k * (1 if product.int8 else 2)
        several = [bench.matrix(n, k, int8=product.int8) for _ in range(-(-ROTATED_BYTES // each))]
        return several * -(-LEAST_CALLS // len(several))
    packed = BLOCK_FORMS[product.blocks] if product.form is None else packed_form(product.form, n, k)
    words, scales = packed.words(n, k), np.ones(n, np.float32) if packed.codes else None
    first = Matrix(zeros(np.uint32, words), n, k, None, scales, None, packed)
    if product.form is None:
        pack_blocks(bench.engine, first, product.blocks, stored_blocks(bench.rng, product.blocks, n, k))
    else:
        pack_quantized(bench.engine, first, stored(bench.rng, product.form, n, k), n)
    count = max(LEAST_CALLS, -(-ROTATED_BYTES // (4 * words)))
    return [first, *(replace(first, words=fill(zeros(np.uint32, words), first.words)) for _ in range(count - 1))]


def group_strips(bench: Bench, rows: int, k: int, form: PackedForm, wide: bool = False) -> Strips:
    """Random activations in int8 or, if `wide`, int16, as a product with groups of weights reads them."""
    words = zeros(np.uint32, rows * GroupStrips.row_words(k, form.span, wide))
    groups = GroupStrips(words, form.span, form.offset, wide)
    quantizing = bench.recording()
    quantizing.quantize(bench.strips(rows, k), k, groups)
    bench.measure(quantizing, lambda: Batch.decode(rows).inputs(bench.rng))
    return groups


def linear(product: Product, bench: Bench) -> Callable[[int], list[Result]]:
    """Products of several row counts with rotating weights."""
    n, k, int8, several = product.n, product.k, product.int8, matrices(bench, product)
    if product.blocks:
        size: int | None = n * k // BLOCKS[product.blocks].weights * BLOCKS[product.blocks].bytes
    elif product.form is not None:
        size = 4 * several[0].words.size
    else:
        size = Int8().packed_bytes(n, k) if int8 else None

    def run(rows: int) -> list[Result]:
        if product.blocks or (int8 and product.form is not None):
            x = group_strips(bench, rows, k, several[0].form, wide=not int8)
        else:
            x = bench.strips(rows, k, int8)
        recording, gated = bench.recording(), product.finish == "gate"
        out = zeros(np.uint32, rows * n // 4) if gated else zeros(np.float32, rows, n)
        methods = {"store": recording.linear, "add": recording.linear_add, "gate": recording.linear_swiglu}
        for matrix in several:
            methods[product.finish](x, matrix, out)
        inputs = Batch.decode(rows).inputs(bench.rng)
        rounds = bench.measure(recording, lambda: inputs)
        works = [work.linear(rows, n, k, product.finish, int8=int8 or bool(product.blocks), stored=size)]
        return [Result.of(f"linear {product.name}", f"M={rows}", works, rounds.calls, rounds)]

    return run


def attend(bench: Bench, int8: bool = False) -> Callable[[Batch], list[Result]]:
    """Attention over as many layers as it takes for all caches to be too small."""

    def run(batch: Batch) -> list[Result]:
        tokens, head_bytes = batch.tokens, work.kv_bytes(DIM, int8)
        layers = -(-ROTATED_BYTES // (batch.num_blocks * 2 * KV_HEADS * BLOCK * head_bytes))
        shape = (batch.num_blocks, layers, 2, KV_HEADS, BLOCK * head_bytes)
        pages = int8_pages(bench, shape) if int8 else bench.normal(math.prod(shape) // 2).reshape(*shape[:-1], -1)
        queries = bench.normal(tokens * HEADS * DIM, DIM**-0.5)
        out, recording = zeros(np.uint32, tokens * HEADS * DIM // 2), bench.recording()
        for layer in range(max(layers, LEAST_CALLS)):
            recording.paged_attention(
                queries.reshape(tokens, HEADS, DIM), KVCacheLayer(pages, layer % layers, DIM), out
            )
        inputs = batch.inputs(bench.rng)
        rounds = bench.measure(recording, lambda: inputs)
        works = [work.attend(batch, HEADS, KV_HEADS, DIM, int8)]
        kind = "decode" if max(batch.queries) == 1 else "prefill"
        return [Result.of(f"attend {'int8 ' * int8}{kind}", batch.shape, works, rounds.calls, rounds)]

    return run


def int8_pages(bench: Bench, shape: tuple[int, ...]) -> Array:
    """Random bytes with equal scales after each panel."""
    pages = fill(zeros(np.uint8, math.prod(shape)), bench.rng.integers(0, 256, _POOL, np.uint8))
    pages.view(np.float32).reshape(-1, PANEL * (DIM // 4 + 1))[:, -PANEL:] = 0.01
    return pages.reshape(shape)


EXPERTS, PER_TOKEN, EXPERT_WIDTH, EXPERT_INNER, EXPERT_LAYERS = 128, 8, 2048, 768, 8


def experts(bench: Bench) -> Callable[[int], list[Result]]:
    """A mixture of experts; layers share the weights, and each routes by random numbers of its own."""
    gate_up = bench.matrix(2 * EXPERT_INNER, EXPERT_WIDTH, EXPERTS)
    down = bench.matrix(EXPERT_WIDTH, EXPERT_INNER, EXPERTS)

    def run(tokens: int) -> list[Result]:
        entries, recording = tokens * PER_TOKEN, bench.recording()
        x, out = bench.strips(tokens, EXPERT_WIDTH), zeros(np.float32, tokens, EXPERT_WIDTH)
        rows, gated = zeros(np.uint32, entries * EXPERT_WIDTH // 2), zeros(np.uint32, entries * EXPERT_INNER // 2)
        y = zeros(np.float32, entries, EXPERT_WIDTH)
        logits = bench.rng.standard_normal((EXPERT_LAYERS, tokens, EXPERTS), np.float32)
        # One kind of operation after the other, so that a round tells them apart.
        routings = [recording.route(layer, PER_TOKEN, Scoring.RENORMALIZED) for layer in logits]
        for routing in routings:
            recording.moe_gather(routing, x, EXPERT_WIDTH, rows)
        for routing in routings:
            recording.linear_swiglu(rows, gate_up, gated, routing=routing)
        for routing in routings:
            recording.linear(gated, down, y, routing=routing)
        for routing in routings:
            recording.moe_combine(routing, y, out)
        inputs = Batch.decode(tokens).inputs(bench.rng)
        rounds = bench.measure(recording, lambda: inputs)
        seconds = rounds.seconds.reshape(len(rounds.seconds), -1, EXPERT_LAYERS).mean(axis=2)
        seconds[:, 1] += seconds[:, 0]  # a routing is two operations
        works = _expert_works(tokens, _mean_active(logits))
        return [
            Result.of(name, f"M={tokens}", [each], seconds[:, i], rounds) for i, (name, each) in enumerate(works, 1)
        ]

    return run


def _mean_active(logits: NDArray[np.float32]) -> float:
    chosen = np.argsort(logits)[..., -PER_TOKEN:]
    return float(np.mean([len(np.unique(layer)) for layer in chosen]))


def _expert_works(tokens: int, active: float) -> Iterator[tuple[str, Work]]:
    entries, width, inner = tokens * PER_TOKEN, EXPERT_WIDTH, EXPERT_INNER
    yield "route", work.route(tokens, EXPERTS, PER_TOKEN)
    yield "gather", work.gather(tokens, PER_TOKEN, width)
    yield "experts gate/up", work.linear(entries, 2 * inner, width, "gate", active)
    yield "experts down", work.linear(entries, width, inner, "store", active)
    yield "combine", work.combine(tokens, PER_TOKEN, width)


def groups(quick: bool) -> list[Group]:
    """All there is to measure, or a little of everything."""
    rows = (1, 16, 128) if quick else (1, 2, 4, 8, 16, 32, 64, 128, 512)
    few = (1, 4, 32) if quick else (1, 2, 4, 8, 16, 32, 128)
    decode = ((1, 1024), (8, 1024)) if quick else tuple((b, c) for b in (1, 8, 32) for c in (128, 1024, 4096))
    prefill = ((512, 512),) if quick else ((512, 512), (512, 2048), (2048, 2048))
    return [
        *(Group(f"linear {one.name}", rows, functools.partial(linear, one)) for one in LINEARS),
        *(
            Group(f"attend {'int8 ' * int8}{name}", cases, functools.partial(attend, int8=int8))
            for int8 in (False, True)
            for name, cases in (
                ("decode", (*(Batch.decode(b, c) for b, c in decode), Batch.decode(16, 1104, 1024))),
                ("prefill", tuple(Batch.prefill(q, c) for q, c in prefill)),
            )
        ),
        Group("experts", (8,) if quick else (1, 8, 64), experts),
        *(Group(f"linear {one.name}", few, functools.partial(linear, one)) for one in (*QUANTIZED, *GGUF)),
    ]
