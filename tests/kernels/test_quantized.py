"""Products of 4-bit codes and of FP8: close to those of the values that they stand for, and the same in all company."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.kernels import Engine, GroupStrips, Matrix, Scoring, StepRows, runnable
from pypto_serving.types.weights import CodesForm, Fp8Form, Layout, Table
from tests.kernels.layouts import Array, interleaved, random_bf16, rounded
from tests.kernels.quantized import (
    FORMS,
    FP8_FORMS,
    Quantized,
    groups_from_strips,
    packed,
    packed_experts,
    packed_gates,
    quantized_groups,
    random_codes,
    random_fp8,
    rounded_groups,
)
from tests.kernels.references import BFLOAT16, FLOAT32, assert_close, choices, double, norm, product, silu
from tests.kernels.stage import Stage, engine_of
from tests.thinning import examples

pytestmark = pytest.mark.thinned(2)

SIZES = [(1, 32), (33, 160), (70, 352)]
ROWS = [1, 2, 4, 5, 12, 13, 37]
INT4, E2M1 = CodesForm(Table.INT4, 128, "F16", zeros=True), CodesForm(Table.E2M1, 32, "F8_E8M0")


def strips_for(stage: Stage, matrix: Matrix, rows: int, k: int) -> GroupStrips:
    words = stage.room(np.uint32, rows * GroupStrips.row_words(k, matrix.form.span))
    return GroupStrips(words, matrix.form.span, matrix.form.offset)


def quantize(stage: Stage, x: Array, matrix: Matrix) -> GroupStrips:
    """Records the quantisation of rows x of bfloat16."""
    out = strips_for(stage, matrix, *x.shape)
    stage.record.quantize(stage.strips(x), x.shape[1], out)
    return out


def linear(engine: Engine, x: Array, matrix: Matrix, wide: bool = False) -> Array:
    """The product with int8 activations, or with bfloat16 ones."""
    stage = Stage(engine)
    out = stage.room(np.float32, len(x), matrix.n)
    stage.record.linear(stage.strips(x) if wide else quantize(stage, x, matrix), matrix, out)
    stage.play(len(x))
    return out


def linear_swiglu(engine: Engine, x: Array, matrix: Matrix, wide: bool = False) -> Array:
    stage = Stage(engine)
    out = stage.strip_room(len(x), matrix.n // 2)
    stage.record.linear_swiglu(stage.strips(x) if wide else quantize(stage, x, matrix), matrix, out)
    stage.play(len(x))
    return stage.rows(out, len(x), matrix.n // 2)


def inputs(x: Array, wide: bool) -> Array:
    """What the weights are multiplied with."""
    return double(x) if wide else rounded_groups(x)


def error_of(x: Array, weights: Quantized, wide: bool) -> Array:
    """Roundings to float32: one for each group and block, or for each product of bfloat16."""
    k = weights.values.shape[1]
    roundings = k if wide else -(-k // weights.form.span) + -(-k // 128)
    return (roundings + 4) * FLOAT32 * product(np.abs(inputs(x, wide)), np.abs(weights.values)) + 1e-30


def assert_product(found: Array, x: Array, weights: Quantized, wide: bool) -> None:
    assert_close(found, product(inputs(x, wide), weights.values), error_of(x, weights, wide))


@pytest.mark.parametrize("rows", [1, 2, 12, 13, 37])
def test_groups_of_quantised_rows(engine: Engine, rows: int) -> None:
    rng = np.random.default_rng(rows)
    for k in (32, 96, 160, 1024):
        for form in (FORMS[0], INT4, E2M1, CodesForm(Table.E2M1, 16, "BF16")):
            matrix = packed(engine, [random_codes(rng, 16, k, form)])
            x = random_bf16(rng, rows, k, scale=float(rng.uniform(1e-3, 1e3)))
            stage = Stage(engine)
            out = quantize(stage, x, matrix)
            stage.play(rows)
            values, scales, sums = groups_from_strips(out, rows, k, engine)
            wanted, wanted_scales = quantized_groups(x)
            assert np.array_equal(values, wanted) and np.array_equal(scales, wanted_scales)
            starts = np.arange(0, k, out.span)
            assert np.array_equal(sums, -out.offset * np.add.reduceat(wanted.astype(np.int32), starts, axis=1))


@pytest.mark.parametrize("rows", [1, 2, 13, 37])
def test_groups_of_the_norm(engine: Engine, rows: int) -> None:
    """Half a step of a byte and the rounding of float32 away from the exact row; the sums are those of the bytes."""
    rng = np.random.default_rng(rows)
    for width in (32, 160, 1024, 2880):
        matrix = packed(engine, [random_codes(rng, 16, width, E2M1)])
        x, weight = rng.standard_normal((rows, width), np.float32), random_bf16(rng, width) + 2
        stage = Stage(engine)
        out = strips_for(stage, matrix, rows, width)
        stage.record.rms_norm(x, weight, 1e-6, out)
        stage.play(rows)
        values, scales, sums = groups_from_strips(out, rows, width, engine)
        steps = np.repeat(scales, 128, axis=1)[:, :width]
        assert_close(values * double(steps), norm(x, weight, 1e-6), steps * 0.5001)
        assert np.array_equal(sums, -12 * values.astype(np.int32).reshape(rows, -1, 32).sum(2))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_products_of_codes(instruction_set: str, rows: int, wide: bool) -> None:
    engine, rng = engine_of(instruction_set), np.random.default_rng(rows)
    for form in FORMS:
        for n, k in SIZES:
            x, weights = random_bf16(rng, rows, k), random_codes(rng, n, k, form, factor=0.75)
            assert_product(linear(engine, x, packed(engine, [weights]), wide), x, weights, wide)


@pytest.mark.parametrize("rows", ROWS)
def test_products_of_fp8(instruction_set: str, rows: int) -> None:
    engine, rng = engine_of(instruction_set), np.random.default_rng(rows)
    for form in FP8_FORMS:
        for n, k in SIZES:
            x, weights = random_bf16(rng, rows, k), random_fp8(rng, n, k, form)
            assert_product(linear(engine, x, packed(engine, [weights]), wide=True), x, weights, wide=True)


@pytest.mark.parametrize("wide", [False, True])
def test_long_rows(instruction_set: str, wide: bool) -> None:
    """The last block is half as long; every sum is as large as it can be."""
    engine, k, rng = engine_of(instruction_set), 2880, np.random.default_rng(0)
    x = rounded(np.where(rng.random((3, k)) < 0.5, np.float32(-1), np.float32(1)))
    for form in FORMS:
        weights = random_codes(rng, 48, k, form)
        assert_product(linear(engine, x, packed(engine, [weights]), wide), x, weights, wide)
    largest = CodesForm(Table.E2M1, 128, "F32")
    weights = random_codes(rng, 16, k, largest)
    weights.stored.codes[:] = 0xFF  # -6 everywhere
    weights.values[:] = -6.0 * np.repeat(weights.stored.scales.astype(np.float64), 128, axis=1)[:, :k]
    x[0] = 1
    assert_product(linear(engine, x, packed(engine, [weights]), wide), x, weights, wide)


def test_every_fp8_number_is_exact(engine: Engine) -> None:
    """Each of the 254 times one."""
    x = np.zeros((4, 32), np.float32)
    x[np.arange(4), np.arange(4)] = 1
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F] + [0, 0], np.uint8)
    weights = random_fp8(np.random.default_rng(0), 64, 32, Fp8Form((1 << 20, 1 << 20)))
    weights.values[:] *= 0
    weights.stored.weights[:] = 0
    weights.stored.weights[:, :4] = codes.reshape(64, 4)
    found = linear(engine, x, packed(engine, [weights]), wide=True)
    magnitudes = codes.reshape(64, 4) & 0x7F
    wanted = np.where(magnitudes < 8, magnitudes * 2.0**-9, (8 + magnitudes % 8) * 2.0 ** (magnitudes // 8 - 10.0))
    wanted = np.where(codes.reshape(64, 4) < 128, wanted, -wanted) * double(weights.stored.scales)
    assert np.array_equal(found.T, wanted.astype(np.float32))


def test_every_e8m0_scale_is_exact(engine: Engine) -> None:
    """Those from 2^-127 on; 255 is not a number."""
    form = CodesForm(Table.E2M1, 32, "F8_E8M0")
    weights = random_codes(np.random.default_rng(0), 255, 32, form)
    weights.stored.scales[:, 0] = np.arange(255)
    weights.stored.codes[:] = 0x22  # 1 everywhere
    x = np.zeros((2, 32), np.float32)
    x[:, 3] = 2.0**-6, 2.0**6
    small, large = linear(engine, x, packed(engine, [weights]), wide=True)
    assert np.array_equal(small[8:], (2.0 ** (np.arange(8, 255) - 133.0)).astype(np.float32))
    assert np.array_equal(large[:8], (2.0 ** (np.arange(8) - 121.0)).astype(np.float32))


@examples(8)
@given(rows=st.integers(1, 40), n=st.integers(1, 100), runs=st.integers(1, 20), seed=st.integers(0), wide=st.booleans())
def test_biased_product_on_top(rows: int, n: int, runs: int, seed: int, wide: bool, engine: Engine) -> None:
    rng = np.random.default_rng(seed)
    form = FORMS[seed % len(FORMS)]
    x, bias, before = random_bf16(rng, rows, 32 * runs), random_bf16(rng, n), random_bf16(rng, rows, n)
    weights = random_codes(rng, n, 32 * runs, form)
    matrix, stage = packed(engine, [weights], bias), Stage(engine)
    out = stage.copy(before)
    stage.record.linear_add(stage.strips(x) if wide else quantize(stage, x, matrix), matrix, out)
    stage.play(rows)
    assert np.array_equal(out, before + linear(engine, x, matrix, wide))
    plain = linear(engine, x, packed(engine, [weights]), wide)
    assert np.array_equal(linear(engine, x, matrix, wide), plain + bias)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 12, 37])
def test_gated_product(engine: Engine, rows: int, wide: bool) -> None:
    rng = np.random.default_rng(rows)
    for form in (FORMS[0], INT4, E2M1):
        for n, k in [(16, 32), (48, 416)]:
            x = random_bf16(rng, rows, k)
            gate, up = (random_codes(rng, n, k, form, factor=factor) for factor in (1, 2))
            found = linear_swiglu(engine, x, packed_gates(engine, gate, up), wide)
            g, u = (linear(engine, x, packed(engine, [part]), wide).astype(np.float64) for part in (gate, up))
            assert_close(found, silu(g) * u, 1.01 * BFLOAT16 * np.abs(silu(g) * u) + 1e-30)


def test_gated_product_of_fp8(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    x, gate, up = random_bf16(rng, 14, 256), *(random_fp8(rng, 64, 256, Fp8Form((32, 128))) for _ in range(2))
    found = linear_swiglu(engine, x, packed_gates(engine, gate, up), wide=True)
    g, u = (linear(engine, x, packed(engine, [part]), wide=True).astype(np.float64) for part in (gate, up))
    assert_close(found, silu(g) * u, 1.01 * BFLOAT16 * np.abs(silu(g) * u) + 1e-30)


def test_a_row_that_is_not_a_number_stays_alone(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    for wide in (False, True):
        for form in (FORMS[0], INT4, E2M1):
            x, matrix = random_bf16(rng, 20, 256), packed(engine, [random_codes(rng, 48, 256, form)])
            wanted = linear(engine, x, matrix, wide)
            x[7, 5], x[13, 200] = np.nan, np.inf
            found, others = linear(engine, x, matrix, wide), np.delete(np.arange(20), [7, 13])
            assert np.array_equal(found[others], wanted[others])
            assert np.isnan(found[7]).all() and not np.isfinite(found[13]).any()


def matrices(engine: Engine, n: int, k: int) -> list[tuple[Matrix, Matrix, bool]]:
    """A matrix, gates and whether activations are wide: of every form."""
    rng = np.random.default_rng(1)
    all_of = []
    for form in FORMS:
        one, two = (random_codes(rng, n, k, form) for _ in range(2))
        both = packed(engine, [one]), packed_gates(engine, one, two)
        all_of += [(*both, False), (*both, True)]
    for fp8 in FP8_FORMS:
        one, two = (random_fp8(rng, n, k, fp8) for _ in range(2))
        all_of.append((packed(engine, [one]), packed_gates(engine, one, two), True))
    return all_of


def test_a_product_is_the_same_in_every_company(instruction_set: str) -> None:
    """Whatever the other rows, their number, and the threads."""
    x = random_bf16(np.random.default_rng(0), 37, 672)
    for matrix, gates, wide in matrices(engine_of(instruction_set), 96, 672):
        one = engine_of(instruction_set)
        whole, gated = linear(one, x, matrix, wide), linear_swiglu(one, x, gates, wide)
        for count in (*range(1, 14), 20, 24, 25, 36):
            assert np.array_equal(linear(one, x[:count], matrix, wide), whole[:count])
        for threads in (2, 5):
            engine = engine_of(instruction_set, threads)
            for begin, end in [(0, 37), (7, 9), (20, 33), (36, 37)]:
                assert np.array_equal(linear(engine, x[begin:end], matrix, wide), whole[begin:end])
                assert np.array_equal(linear_swiglu(engine, x[begin:end], gates, wide), gated[begin:end])


@pytest.mark.parametrize("form", FORMS)
def test_instruction_sets_agree(form: CodesForm) -> None:
    """To the last bit, where they have a fused multiplication and addition."""
    weights, x = random_codes(np.random.default_rng(0), 70, 416, form), random_bf16(np.random.default_rng(1), 13, 416)
    fused = [name for name in runnable() if name != "portable"]
    found = [linear(engine_of(name), x, packed(engine_of(name), [weights])) for name in fused]
    assert all(np.array_equal(one, found[0]) for one in found)


def test_columns_do_not_depend_on_each_other(engine: Engine) -> None:
    """Matrices side by side give what each gives alone."""
    rng = np.random.default_rng(0)
    for form in FORMS:
        parts = [random_codes(rng, n, 160, form, factor=n / 8) for n in (32, 16, 48, 5)]
        x = random_bf16(rng, 14, 160)
        for wide in (False, True):
            alone = [linear(engine, x, packed(engine, [part]), wide) for part in parts]
            assert np.array_equal(linear(engine, x, packed(engine, parts), wide), np.concatenate(alone, axis=1))


@pytest.mark.parametrize("wanted", [1, 5, 26])
def test_norm_and_product_of_rows_with_logits(engine: Engine, wanted: int) -> None:
    rng = np.random.default_rng(wanted)
    x, ones = random_bf16(rng, 30, 160), np.ones(160, np.float32)
    matrix, rows = packed(engine, [random_codes(rng, 70, 160, INT4)]), rng.permutation(30)[:wanted]

    def logits(chosen: Array) -> Array:
        stage = Stage(engine)
        normed, out = strips_for(stage, matrix, 30, 160), stage.room(np.float32, len(chosen), 70)
        stage.record.rms_norm(x, ones, 1e-6, normed, StepRows.LOGITS)
        stage.record.linear(normed, matrix, out, StepRows.LOGITS)
        stage.play(30, logits_rows=chosen)
        return out

    assert np.array_equal(logits(rows), np.concatenate([logits(rows[i : i + 1]) for i in range(wanted)]))


@pytest.mark.parametrize("rows", [1, 13, 37])
@pytest.mark.parametrize("form", [E2M1, Fp8Form((32, 64))])
def test_groups_with_strips_of_their_own(engine: Engine, rows: int, form: CodesForm | Fp8Form) -> None:
    rng = np.random.default_rng(rows)
    make = random_fp8 if isinstance(form, Fp8Form) else random_codes
    weights, parts = make(rng, 192, 64, form), random_bf16(rng, 3, rows, 64)  # type: ignore[operator]
    matrix, stage = packed(engine, [weights]), Stage(engine)
    out = stage.strip_room(rows, 192)
    stage.record.linear_groups(np.concatenate([stage.strips(part) for part in parts]), matrix, 64, out)
    stage.play(rows)
    for i, (found, part) in enumerate(zip(np.split(stage.rows(out, rows, 192), 3, axis=1), parts, strict=True)):
        wanted = product(part, weights.values[64 * i : 64 * i + 64])
        error = product(np.abs(part), np.abs(weights.values[64 * i : 64 * i + 64])) * 64 * FLOAT32
        assert_close(found, wanted, 1.01 * BFLOAT16 * np.abs(wanted) + error)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("tokens", [1, 13, 50])
def test_experts(engine: Engine, tokens: int, wide: bool) -> None:
    """Rows with their scales and sums reach their experts; each multiplies with weights and factors of its own."""
    for form, (count, per_token) in [(INT4, (8, 8)), (E2M1, (16, 2))]:
        rng, width, inner = np.random.default_rng(count + tokens), 160, 64
        x, logits = random_bf16(rng, tokens, width), rng.standard_normal((tokens, count)).astype(np.float32)
        gates = [[random_codes(rng, inner, width, form, factor=1 + e % 3) for _ in range(2)] for e in range(count)]
        downs = [[random_codes(rng, width, inner, form, factor=1 + e % 2)] for e in range(count)]
        gate_up, down = packed_experts(engine, gates), packed_experts(engine, downs)
        stage, entries = Stage(engine), tokens * per_token
        routing = stage.record.route(logits, per_token, Scoring.RENORMALIZED)
        gated, y = stage.strip_room(entries, inner), stage.room(np.float32, entries, width)
        rows = stage.strip_room(entries, width) if wide else strips_for(stage, gate_up, entries, width)
        stage.record.moe_gather(routing, stage.strips(x) if wide else quantize(stage, x, gate_up), width, rows)
        stage.record.linear_swiglu(rows, gate_up, gated, routing=routing)
        if wide:
            stage.record.linear(gated, down, y, routing=routing)
        else:
            second = strips_for(stage, down, entries, inner)
            stage.record.quantize(gated, inner, second, routing)
            stage.record.linear(second, down, y, routing=routing)
        stage.play(tokens)
        order, begin = np.argsort(chosen := choices(logits, per_token).ravel(), kind="stable"), 0
        for expert in range(count):
            mine = order[chosen[order] == expert] // per_token
            if not len(mine):
                continue
            strips = gated[begin * inner // 2 : (begin + len(mine)) * inner // 2]
            values = stage.rows(strips, len(mine), inner)
            assert np.array_equal(values, linear_swiglu(engine, x[mine], packed_gates(engine, *gates[expert]), wide))
            one = linear(engine, values, packed(engine, downs[expert]), wide)
            assert np.array_equal(y[begin : begin + len(mine)], one)
            begin += len(mine)


def test_activations_of_another_form_are_refused(engine: Engine) -> None:
    rng, stage = np.random.default_rng(0), Stage(engine)
    codes, others = (packed(engine, [random_codes(rng, 16, 64, form)]) for form in (FORMS[0], E2M1))
    fp8, out = packed(engine, [random_fp8(rng, 16, 64, FP8_FORMS[0])]), stage.room(np.float32, 1, 16)
    groups = quantize(stage, np.zeros((1, 64), np.float32), codes)
    for matrix in (others, fp8):
        with pytest.raises(ValueError, match="no activations for weights"):
            stage.record.linear(groups, matrix, out)
    routing = stage.record.route(np.zeros((1, 4), np.float32), 1, Scoring.SOFTMAX)
    with pytest.raises(ValueError, match="one form"):
        stage.record.moe_gather(routing, groups, 64, strips_for(stage, others, 1, 64))
    with pytest.raises(ValueError, match="embeddings cannot be"):
        stage.record.embed(fp8, stage.room(np.float32, 1, 64))


@pytest.mark.parametrize("form", [FORMS[2], INT4])
def test_layouts_of_one_matrix_are_packed_alike(engine: Engine, form: CodesForm) -> None:
    for n, k in [(8, 32), (40, 96), (136, 160), (400, 256)]:
        same = []
        for layout in Layout:
            weights = random_codes(np.random.default_rng(n), n, k, form, layout)
            same.append(packed(engine, [weights]).words)
        assert all(np.array_equal(words, same[0]) for words in same)


def test_interleaving_is_that_of_rows(engine: Engine) -> None:
    """Gate and up by 16 are as if their rows were."""
    rng = np.random.default_rng(0)
    gate, up = (random_codes(rng, 64, 96, INT4) for _ in range(2))
    parts = [interleaved(getattr(gate.stored, f), getattr(up.stored, f)) for f in ("codes", "scales", "zeros")]
    stored = type(gate.stored)(INT4, Layout.ROWS, *parts)
    one = packed(engine, [Quantized(stored, interleaved(gate.values, up.values))])
    assert np.array_equal(one.words, packed_gates(engine, gate, up).words)
