"""Products with packed weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.kernels import Engine, StepRows
from tests.kernels import references
from tests.kernels.layouts import Array, interleaved, random_bf16
from tests.kernels.references import BFLOAT16, assert_close, assert_gated, product, product_error, silu
from tests.kernels.stage import Stage, engine_of, matrix_of
from tests.thinning import examples

pytestmark = pytest.mark.thinned(2)

SIZES = [(1, 2), (16, 34), (31, 64), (33, 34), (100, 1024), (320, 96)]
ROWS = [1, 2, 3, 4, 11, 12, 13, 24, 25, 37, 50]


def linear(engine: Engine, x: Array, weights: Array, bias: Array | None = None) -> Array:
    stage = Stage(engine)
    out = stage.room(np.float32, len(x), len(weights))
    stage.record.linear(stage.strips(x), matrix_of(weights, bias), out)
    stage.play(len(x))
    return out


def linear_swiglu(engine: Engine, x: Array, gate: Array, up: Array, bias: Array | None = None) -> Array:
    stage = Stage(engine)
    out = stage.strip_room(len(x), len(gate))
    stage.record.linear_swiglu(stage.strips(x), matrix_of(interleaved(gate, up), bias), out)
    stage.play(len(x))
    return stage.rows(out, len(x), len(gate))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("rows", ROWS)
def test_product(engine: Engine, rows: int) -> None:
    rng = np.random.default_rng(rows)
    for n, k in SIZES:
        x, weights = random_bf16(rng, rows, k), random_bf16(rng, n, k)
        assert_close(linear(engine, x, weights), product(x, weights), product_error(x, weights))


@examples(12)
@given(rows=st.integers(1, 50), n=st.integers(1, 100), pairs=st.integers(1, 300), seed=st.integers(0))
def test_biased_product_on_top(rows: int, n: int, pairs: int, seed: int, engine: Engine) -> None:
    rng = np.random.default_rng(seed)
    x, weights, bias = random_bf16(rng, rows, 2 * pairs), random_bf16(rng, n, 2 * pairs), random_bf16(rng, n)
    before = random_bf16(rng, rows, n)
    stage = Stage(engine)
    out = stage.copy(before)
    stage.record.linear_add(stage.strips(x), matrix_of(weights, bias), out)
    stage.play(rows)
    wanted = product(x, weights) + bias + before
    assert_close(out, wanted, product_error(x, weights) + 2e-7 * (np.abs(bias) + np.abs(before) + np.abs(wanted)))
    assert np.array_equal(out, linear(engine, x, weights, bias) + before)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 12, 13, 37, 509])
def test_gated_product(engine: Engine, rows: int, biased: bool) -> None:
    rng = np.random.default_rng(rows)
    for n, k in [(16, 2), (48, 34), (128, 1024)]:
        x, gate, up = random_bf16(rng, rows, k), random_bf16(rng, n, k, scale=3.0), random_bf16(rng, n, k)
        bias = random_bf16(rng, 2 * n) if biased else None
        assert_gated(linear_swiglu(engine, x, gate, up, bias), x, gate, up, bias)


def test_gates_far_from_zero(engine: Engine) -> None:
    """silu tends to 0 on the left and to x on the right, and overflows nowhere."""
    x = np.array([[1.0, 0.0]], np.float32)
    gate, up = np.zeros((16, 2), np.float32), np.ones((16, 2), np.float32)
    gate[:, 0] = [-1e9, -1e4, -200, -128, -100, -90, -88, -87, -1, 0, 1, 87, 88, 128, 1e4, 1e38]
    found, gate = linear_swiglu(engine, x, gate, up)[0], gate[:, 0]
    assert_close(found, silu(references.double(gate)), BFLOAT16 * 1.01 * np.abs(gate) * (gate > -80) + 1e-28)


@pytest.mark.parametrize("wanted", [0, 1, 5, 26])
def test_product_of_rows_with_logits(engine: Engine, wanted: int) -> None:
    """As many rows as have logits, whatever the number of tokens."""
    rng = np.random.default_rng(0)
    x, weights = random_bf16(rng, max(1, wanted), 64), random_bf16(rng, 70, 64)
    stage = Stage(engine)
    out = stage.room(np.float32, wanted, 70)
    stage.record.linear(stage.strips(x), matrix_of(weights), out, StepRows.LOGITS)
    stage.play(30, logits_rows=np.arange(wanted))
    assert np.array_equal(out, linear(engine, x, weights)[:wanted])


def test_an_empty_step_does_nothing(engine: Engine) -> None:
    stage = Stage(engine)
    x, out = stage.strips(np.ones((1, 64), np.float32)), stage.room(np.float32, 1, 32)
    stage.record.linear(x, matrix_of(np.ones((32, 64), np.float32)), out)
    stage.play(0)
    assert np.isnan(out).all()


def test_a_row_that_is_not_a_number_stays_alone(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    x, weights = random_bf16(rng, 20, 64), random_bf16(rng, 48, 64)
    wanted, gated = linear(engine, x, weights), linear_swiglu(engine, x, weights, weights)
    x[7, 3], x[13] = np.nan, np.inf
    others = np.delete(np.arange(20), [7, 13])
    assert np.array_equal(linear(engine, x, weights)[others], wanted[others])
    assert np.array_equal(linear_swiglu(engine, x, weights, weights)[others], gated[others])
    assert np.isnan(linear(engine, x, weights)[7]).all()


@pytest.mark.parametrize(("n", "k"), [(33, 34), (320, 1024), (1100, 96)])
def test_a_product_is_the_same_in_every_company(instruction_set: str, n: int, k: int) -> None:
    rng = np.random.default_rng(1)
    x, weights, other = random_bf16(rng, 50, k), random_bf16(rng, n // 16 * 16, k), random_bf16(rng, n // 16 * 16, k)
    whole = linear(engine_of(instruction_set), x, weights)
    gated = linear_swiglu(engine_of(instruction_set), x, weights, other)
    for threads in (1, 2, 3, 5):
        engine = engine_of(instruction_set, threads)
        for begin, end in [(0, 50), (0, 1), (7, 9), (20, 33), (26, 50)]:
            assert np.array_equal(linear(engine, x[begin:end], weights), whole[begin:end])
            assert np.array_equal(linear_swiglu(engine, x[begin:end], weights, other), gated[begin:end])


@pytest.mark.parametrize("rows", [1, 13, 50])
def test_a_limit_of_gates(engine: Engine, rows: int) -> None:
    """Gates are at most as large, ups lie between; what is not a number stays so."""
    rng, limit = np.random.default_rng(rows), 1.5
    x, gate, up = (random_bf16(rng, n, 64, scale=0.5) for n in (rows, 48, 48))
    x[-1] = np.nan if rows > 1 else x[-1]
    stage = Stage(engine)
    out = stage.strip_room(rows, 48)
    stage.record.linear_swiglu(stage.strips(x), matrix_of(interleaved(gate, up)), out, limit)
    stage.play(rows)
    found, ordinary = stage.rows(out, rows, 48), np.isfinite(x).all(1)
    x, found, rest = x[ordinary], found[ordinary], found[~ordinary]
    g, u = np.minimum(product(x, gate), limit), np.clip(product(x, up), -limit, limit)
    assert (g == limit).any() and (np.abs(u) == limit).any() and np.isnan(rest).all()
    error = 3 * (product_error(x, gate) + product_error(x, up)) + 1e-6
    assert_close(found, silu(g) * u, 1.01 * BFLOAT16 * np.abs(silu(g) * u) + error)


@pytest.mark.parametrize("rows", [1, 13, 37])
def test_products_into_columns(engine: Engine, rows: int) -> None:
    """What lies beside them stays as it was."""
    rng = np.random.default_rng(rows)
    x, before = random_bf16(rng, rows, 64), random_bf16(rng, rows, 150)
    parts = [random_bf16(rng, n, 64) for n in (48, 33, 5)]
    stage = Stage(engine)
    out, begin = stage.copy(before), 10
    wanted = before.copy()
    for part, record in zip(parts, (stage.record.linear, stage.record.linear_add, stage.record.linear), strict=True):
        columns = slice(begin, begin + len(part))
        record(stage.strips(x), matrix_of(part), out[:, columns])
        wanted[:, columns] = linear(engine, x, part) + (before[:, columns] if record == stage.record.linear_add else 0)
        begin += len(part) + 20
    stage.play(rows)
    assert np.array_equal(out, wanted)


@pytest.mark.parametrize("rows", [1, 13, 50])
def test_gates_apart_from_up(engine: Engine, rows: int) -> None:
    """The bits of both in one matrix, with and without a limit."""
    rng = np.random.default_rng(rows)
    for n in (16, 32, 48):
        x, gate, up = (random_bf16(rng, count, 64, scale=0.5) for count in (rows, n, n))
        for limit in (1.5, np.inf):
            stage = Stage(engine)
            gates, (apart, whole) = stage.room(np.float32, rows, n), (stage.strip_room(rows, n) for _ in range(2))
            strips = stage.strips(x)
            stage.record.linear(strips, matrix_of(gate), gates)
            stage.record.linear_swiglu(strips, matrix_of(up), apart, limit, gates)
            stage.record.linear_swiglu(strips, matrix_of(interleaved(gate, up)), whole, limit)
            stage.play(rows)
            assert np.array_equal(apart, whole)


def test_gates_apart_are_whole_half_panels(engine: Engine) -> None:
    stage, matrix = Stage(engine), matrix_of(np.zeros((40, 32), np.float32))
    with pytest.raises(ValueError, match="40 outputs are not whole half panels"):
        gates = stage.room(np.float32, 1, 40)
        stage.record.linear_swiglu(stage.strip_room(1, 32), matrix, stage.strip_room(1, 40), gates=gates)


@pytest.mark.parametrize("rows", [1, 2, 13, 37])
@pytest.mark.parametrize(("groups", "n"), [(1, 96), (3, 32), (4, 64)])
def test_groups_with_strips_of_their_own(engine: Engine, rows: int, groups: int, n: int) -> None:
    rng = np.random.default_rng(rows)
    parts, weights = random_bf16(rng, groups, rows, 34), random_bf16(rng, groups, n, 34)
    stage = Stage(engine)
    x = np.concatenate([stage.strips(part) for part in parts])
    out = stage.strip_room(rows, groups * n)
    stage.record.linear_groups(x, matrix_of(weights.reshape(-1, 34)), n, out)
    stage.play(rows)
    for found, part, mine in zip(
        np.split(stage.rows(out, rows, groups * n), groups, axis=1), parts, weights, strict=True
    ):
        wanted = product(part, mine)
        assert_close(found, wanted, 1.01 * BFLOAT16 * np.abs(wanted) + product_error(part, mine))


def test_groups_are_whole_panels(engine: Engine) -> None:
    stage = Stage(engine)
    with pytest.raises(ValueError, match="whole panels"):
        stage.record.linear_groups(stage.strip_room(1, 32), matrix_of(np.zeros((96, 32), np.float32)), 48, np.zeros(48))
