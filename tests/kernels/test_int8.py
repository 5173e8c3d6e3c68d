"""Products of bytes: equal, bit by bit, to what numpy makes of exact sums."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.kernels import INT8, ElementType, Engine, Int8Strips, Matrix, Scoring, StepRows
from tests.kernels.layouts import (
    Array,
    bytes_from_strips,
    interleaved,
    quantized,
    random_bf16,
    rounded,
    to_byte_panels,
)
from tests.kernels.references import assert_close, norm, silu
from tests.kernels.stage import Stage, engine_of
from tests.thinning import examples

pytestmark = pytest.mark.thinned(2)

SIZES = [(1, 4), (16, 36), (31, 64), (33, 100), (100, 1024), (320, 96)]
ROWS = [1, 2, 3, 4, 11, 12, 13, 24, 25, 37, 50]


@dataclass(frozen=True)
class Weights:
    """int8 [n, k] with the scale of each output."""

    values: Array
    scales: Array

    @staticmethod
    def random(rng: np.random.Generator, n: int, k: int) -> Weights:
        """All values that a checkpoint may hold, -128 among them."""
        return Weights(rng.integers(-128, 128, (n, k), np.int8), rng.uniform(0.5, 2, n).astype(np.float32) / 1000)

    def interleaved(self, other: Weights) -> Weights:
        """This gate and the other's up, as a gated product wants them."""
        scales = interleaved(self.scales[:, None], other.scales[:, None])[:, 0]
        return Weights(interleaved(self.values, other.values), scales)

    def matrix(self, bias: Array | None = None) -> Matrix:
        """Packed by numpy."""
        return matrix_of([self], bias)

    def product(self, x: Array, bias: Array | float = 0) -> Array:
        """What the kernels should make of rows x [rows, k] of bfloat16, float32, to the last bit."""
        values, scales = quantized(x)
        sums = values.astype(np.int64) @ self.values.astype(np.int64).T
        out: Array = sums.astype(np.float32) * scales[:, None] * self.scales + np.float32(0) + bias
        return out


def matrix_of(several: list[Weights], bias: Array | None = None) -> Matrix:
    """Matrices of one shape, one behind the other."""
    n, k = several[0].values.shape
    padding = -n % 32

    def padded(rows: Array) -> Array:
        return np.pad(rows, (0, padding))

    words = np.concatenate([to_byte_panels(one.values) for one in several])
    scales = np.concatenate([padded(one.scales) for one in several])
    sums = [one.values.sum(1, dtype=np.int32) for one in several]
    compensation = np.concatenate([padded(-128 * each) for each in sums])
    return Matrix(words, n, k, None if bias is None else padded(bias), scales, compensation, INT8)


def quads_room(stage: Stage, rows: int, k: int) -> Int8Strips:
    return Int8Strips(stage.room(np.uint32, rows * k // 4), stage.room(np.float32, rows))


def quantize(stage: Stage, x: Array) -> Int8Strips:
    """Records the quantisation of rows x of bfloat16."""
    out = quads_room(stage, *x.shape)
    stage.record.quantize(stage.strips(x), x.shape[1], out)
    return out


def linear(engine: Engine, x: Array, weights: Weights, bias: Array | None = None) -> Array:
    stage = Stage(engine)
    out = stage.room(np.float32, len(x), len(weights.values))
    stage.record.linear(quantize(stage, x), weights.matrix(bias), out)
    stage.play(len(x))
    return out


def linear_swiglu(engine: Engine, x: Array, gate: Weights, up: Weights) -> Array:
    stage = Stage(engine)
    out = stage.strip_room(len(x), len(gate.values))
    stage.record.linear_swiglu(quantize(stage, x), gate.interleaved(up).matrix(), out)
    stage.play(len(x))
    return stage.rows(out, len(x), len(gate.values))


def assert_gated(found: Array, x: Array, gate: Weights, up: Weights) -> None:
    """Products are exact; what is left is the error of silu and the rounding to bfloat16."""
    wanted = silu(gate.product(x).astype(np.float64)) * up.product(x)
    assert_close(found, wanted, 1.01 * 2.0**-8 * np.abs(wanted) + 1e-30)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("rows", ROWS)
def test_quantised_rows(engine: Engine, rows: int) -> None:
    rng = np.random.default_rng(rows)
    for k in (4, 36, 64, 100, 1024, 3072):
        x = random_bf16(rng, rows, k, scale=float(rng.uniform(1e-3, 1e3)))
        stage = Stage(engine)
        out = quantize(stage, x)
        stage.play(rows)
        values, scales = quantized(x)
        assert np.array_equal(bytes_from_strips(out.words, rows, k, engine), values)
        assert np.array_equal(out.scales, scales)


def test_rows_at_the_ends_of_what_floats_hold(engine: Engine) -> None:
    """Zeros, what is too small to divide by, ties, and what is not finite."""
    x = np.zeros((7, 16), np.float32)
    x[1] = rounded(np.full(16, 1e-38, np.float32))
    x[2] = rounded(np.linspace(-3e38, 3e38, 16, dtype=np.float32))
    x[3] = np.arange(16) - 7.5
    x[3, 0] = 127
    x[4, 3], x[5, 3] = np.nan, np.inf
    x[6] = 1
    for rows in (x, x[:1], x[3:4], x[4:5]):
        stage = Stage(engine)
        out = quantize(stage, rows)
        stage.play(len(rows))
        finite = np.isfinite(rows).all(1)
        values, scales = quantized(np.where(finite[:, None], rows, 0))
        assert np.array_equal(bytes_from_strips(out.words, len(rows), 16, engine)[finite], values[finite])
        assert np.array_equal(out.scales[finite], scales[finite])
        assert not np.isfinite(out.scales[~finite]).any()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("rows", ROWS)
def test_norm(engine: Engine, rows: int) -> None:
    """Half a step of a byte and the rounding of float32 away from the exact row."""
    rng = np.random.default_rng(rows)
    for width in (4, 36, 60, 1024):
        x, weight = rng.standard_normal((rows, width), np.float32), random_bf16(rng, width) + 2
        stage = Stage(engine)
        out = quads_room(stage, rows, width)
        stage.record.rms_norm(x, weight, 1e-6, out)
        stage.play(rows)
        wanted = norm(x, weight, 1e-6)
        found = bytes_from_strips(out.words, rows, width, engine)
        assert_close(out.scales, np.abs(wanted).max(1) / 127, out.scales * 1e-6)
        assert_close(found * out.scales[:, None], wanted, out.scales[:, None] * 0.5001)
        assert (np.abs(found).max(1) == 127).all()


@pytest.mark.parametrize("wanted", [0, 1, 5, 26])
def test_norm_and_product_of_rows_with_logits(engine: Engine, wanted: int) -> None:
    rng = np.random.default_rng(wanted)
    x, weights, ones = random_bf16(rng, 30, 64), Weights.random(rng, 70, 64), np.ones(64, np.float32)
    rows = rng.permutation(30)[:wanted]

    def logits(tokens: int, chosen: Array) -> Array:
        stage = Stage(engine)
        normed, out = quads_room(stage, 30, 64), stage.room(np.float32, len(chosen), 70)
        stage.record.rms_norm(x, ones, 1e-6, normed, StepRows.LOGITS)
        stage.record.linear(normed, weights.matrix(), out, StepRows.LOGITS)
        stage.play(tokens, logits_rows=chosen)
        return out

    alone = [logits(30, rows[i : i + 1]) for i in range(wanted)]
    assert np.array_equal(logits(30, rows), np.concatenate([np.zeros((0, 70), np.float32), *alone]))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("rows", ROWS)
def test_product(engine: Engine, rows: int) -> None:
    rng = np.random.default_rng(rows)
    for n, k in SIZES:
        x, weights = random_bf16(rng, rows, k), Weights.random(rng, n, k)
        assert np.array_equal(linear(engine, x, weights), weights.product(x))


def test_the_largest_sums(engine: Engine) -> None:
    """Pairs of products that do not fit 16 bits, and sums that float32 rounds."""
    rng = np.random.default_rng(0)
    x = np.where(rng.random((3, 12288)) < 0.5, np.float32(-1), np.float32(1))
    extremes = np.array([[-128], [127]] * 20, np.int8)
    weights = Weights(np.repeat(extremes, 12288, axis=1) * np.sign(x[:1]).astype(np.int8), np.ones(40, np.float32))
    weights.values[::2][x[:1].repeat(20, 0) < 0] = 127
    assert np.array_equal(linear(engine, x, weights), weights.product(x))
    assert np.abs(weights.product(x)).max() > 12288 * 126


@examples(12)
@given(rows=st.integers(1, 50), n=st.integers(1, 100), quads=st.integers(1, 300), seed=st.integers(0))
def test_biased_product_on_top(rows: int, n: int, quads: int, seed: int, engine: Engine) -> None:
    rng = np.random.default_rng(seed)
    x, weights, bias = random_bf16(rng, rows, 4 * quads), Weights.random(rng, n, 4 * quads), random_bf16(rng, n)
    before = random_bf16(rng, rows, n)
    stage = Stage(engine)
    out = stage.copy(before)
    stage.record.linear_add(quantize(stage, x), weights.matrix(bias), out)
    stage.play(rows)
    assert np.array_equal(out, before + weights.product(x, bias))


@pytest.mark.parametrize("rows", [1, 3, 12, 13, 37, 509])
def test_gated_product(engine: Engine, rows: int) -> None:
    rng = np.random.default_rng(rows)
    for n, k in [(16, 4), (48, 36), (128, 1024)]:
        x, gate, up = random_bf16(rng, rows, k), Weights.random(rng, n, k), Weights.random(rng, n, k)
        assert_gated(linear_swiglu(engine, x, gate, up), x, gate, up)


def test_a_row_that_is_not_a_number_stays_alone(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    x, weights = random_bf16(rng, 20, 64), Weights.random(rng, 48, 64)
    wanted, gated = linear(engine, x, weights), linear_swiglu(engine, x, weights, weights)
    x[7, 5] = np.nan
    others = np.delete(np.arange(20), 7)
    assert np.array_equal(linear(engine, x, weights)[others], wanted[others])
    assert np.array_equal(linear_swiglu(engine, x, weights, weights)[others], gated[others])
    assert np.isnan(linear(engine, x, weights)[7]).all()


@pytest.mark.parametrize(("n", "k"), [(33, 36), (320, 1024), (1100, 96)])
def test_a_product_is_the_same_in_every_company(instruction_set: str, n: int, k: int) -> None:
    rng = np.random.default_rng(1)
    x, weights, other = random_bf16(rng, 50, k), *(Weights.random(rng, n // 16 * 16, k) for _ in range(2))
    whole, gated = weights.product(x), linear_swiglu(engine_of(instruction_set), x, weights, other)
    for threads in (1, 2, 3, 5):
        engine = engine_of(instruction_set, threads)
        for begin, end in [(0, 50), (0, 1), (7, 9), (20, 33), (26, 50)]:
            assert np.array_equal(linear(engine, x[begin:end], weights), whole[begin:end])
            assert np.array_equal(linear_swiglu(engine, x[begin:end], weights, other), gated[begin:end])


@pytest.mark.parametrize("tokens", [1, 2, 12, 13, 50])
def test_experts(engine: Engine, tokens: int) -> None:
    """Rows and their scales reach their experts; each multiplies with weights, scales and compensation of its own."""
    for count, per_token in [(1, 1), (8, 2), (8, 8), (64, 6)]:
        rng = np.random.default_rng(count)
        entries, width, inner = tokens * per_token, 36, 48
        gates, ups = ([Weights.random(rng, inner, width) for _ in range(count)] for _ in range(2))
        downs = [Weights.random(rng, width, inner) for _ in range(count)]
        x, logits = random_bf16(rng, tokens, width), rng.standard_normal((tokens, count)).astype(np.float32)
        stage = Stage(engine)
        rows, gated, narrow = quads_room(stage, entries, width), stage.strip_room(entries, inner), None
        narrow, y = quads_room(stage, entries, inner), stage.room(np.float32, entries, width)
        routing = stage.record.route(logits, per_token, Scoring.RENORMALIZED)
        stage.record.moe_gather(routing, quantize(stage, x), width, rows)
        gate_up = matrix_of([gate.interleaved(up) for gate, up in zip(gates, ups, strict=True)])
        stage.record.linear_swiglu(rows, gate_up, gated, routing=routing)
        stage.record.quantize(gated, inner, narrow, routing)
        stage.record.linear(narrow, matrix_of(downs), y, routing=routing)
        stage.play(tokens)
        chosen = np.argsort(-logits, axis=-1, kind="stable")[:, :per_token].ravel()
        begin = 0
        for expert in range(count):
            mine = np.flatnonzero(chosen == expert) // per_token
            end = begin + len(mine)
            values = stage.rows(gated[begin * inner // 2 : end * inner // 2], len(mine), inner)
            assert_gated(values, x[mine], gates[expert], ups[expert])
            assert np.array_equal(y[begin:end], downs[expert].product(values))
            begin = end


@pytest.mark.parametrize("parts", [[32, 32], [64, 16, 16], [16, 48, 5], [96, 33], [1], [31]])
def test_packing(engine: Engine, parts: list[int]) -> None:
    """Several matrices as one; what lies behind the last output of a half panel is zero."""
    rng = np.random.default_rng(0)
    several = [Weights.random(rng, n, 36) for n in parts]
    whole = matrix_of([Weights(*(np.concatenate([getattr(w, f) for w in several]) for f in ("values", "scales")))])
    words, compensation, offset = np.zeros_like(whole.words), np.zeros(Matrix.outputs(sum(parts)), np.int32), 0
    for weights in several:
        source = weights.values
        engine.pack(words, source, ElementType.I8, len(weights.values), 36, offset, compensation)
        offset += len(weights.values)
    assert np.array_equal(words, whole.words) and np.array_equal(compensation, whole.compensation)


@pytest.mark.parametrize(("n", "k"), [(16, 4), (48, 36), (128, 96)])
def test_packing_gate_and_up(engine: Engine, n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    gate, up = Weights.random(rng, n, k), Weights.random(rng, n, k)
    whole = gate.interleaved(up).matrix()
    words, compensation = np.zeros_like(whole.words), np.zeros(2 * n, np.int32)
    for half, weights in enumerate((gate, up)):
        engine.pack(words, weights.values, ElementType.I8, n, k, 0, compensation, half)
    assert np.array_equal(words, whole.words) and np.array_equal(compensation, whole.compensation)


@pytest.mark.parametrize(
    ("n", "k", "offset", "words", "outputs"),
    [(32, 6, 0, 64, 32), (32, 4, 8, 64, 64), (33, 4, 0, 32, 64), (33, 4, 0, 64, 32), (1, 4, 16, 31, 32)],
)
def test_what_does_not_fit_is_refused(engine: Engine, n: int, k: int, offset: int, words: int, outputs: int) -> None:
    source, out, compensation = np.zeros(256, np.int8), np.zeros(words, np.uint32), np.zeros(outputs, np.int32)
    with pytest.raises(ValueError, match=rf"\[{n}, {k}\]"):
        engine.pack(out, source, ElementType.I8, n, k, offset, compensation)


def test_a_product_of_bytes_and_numbers_is_refused(engine: Engine) -> None:
    stage = Stage(engine)
    weights = Weights.random(np.random.default_rng(0), 16, 4)
    with pytest.raises(ValueError, match="no activations for weights"):
        stage.record.linear(stage.strip_room(1, 4), weights.matrix(), stage.room(np.float32, 1, 16))
