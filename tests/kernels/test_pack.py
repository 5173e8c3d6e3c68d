"""Weights of every stored type into panels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pypto_serving.kernels import INT8, ElementType, Engine, Matrix, pack_rounded
from tests.kernels.layouts import Array, interleaved, narrow, rounded, to_panels
from tests.kernels.stage import Stage

pytestmark = pytest.mark.thinned(2)

UNTOUCHED = 0xFFFFFFFF


def stored_forms(weights: Array) -> Iterator[tuple[ElementType, Array, Array]]:
    """Type, what a file holds, and the float32 values that it stands for."""
    yield ElementType.BF16, narrow(weights), rounded(weights)
    yield ElementType.F32, weights, weights
    half = weights.astype(np.float16)
    yield ElementType.F16, half, half.astype(np.float32)


def room(pairs: int) -> Array:
    return np.full(pairs, UNTOUCHED, np.uint32)


@pytest.mark.parametrize(("n", "k"), [(1, 2), (16, 34), (31, 64), (33, 2), (48, 34), (320, 96)])
def test_pack(engine: Engine, n: int, k: int) -> None:
    weights = np.random.default_rng(n).standard_normal((n, k)).astype(np.float32)
    for stored, source, values in stored_forms(weights):
        out = room(Matrix.size(n, k))
        engine.pack(out, source, stored, n, k)
        wanted = to_panels(values).reshape(-1, k // 2, 32)
        written = np.arange(wanted.shape[0] * 32) // 16 < -(-n // 16)
        found = out.reshape(wanted.shape)
        for panel, halves in enumerate(written.reshape(-1, 32)):
            assert np.array_equal(found[panel][:, halves], wanted[panel][:, halves])
            assert (found[panel][:, ~halves] == UNTOUCHED).all()


@pytest.mark.parametrize("parts", [[32, 32], [64, 16, 16], [16, 48, 5], [96, 33]])
def test_packing_several_matrices_as_one(engine: Engine, parts: list[int]) -> None:
    rng, k = np.random.default_rng(0), 34
    matrices = [rng.standard_normal((n, k)).astype(np.float32) for n in parts]
    out, offset = np.zeros(Matrix.size(sum(parts), k), np.uint32), 0
    for matrix in matrices:
        engine.pack(out, matrix, ElementType.F32, len(matrix), k, offset)
        offset += len(matrix)
    assert np.array_equal(out, to_panels(np.concatenate(matrices)))


@pytest.mark.parametrize(("n", "k"), [(16, 2), (48, 34), (128, 96)])
def test_packing_gate_and_up(engine: Engine, n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    gate, up = (rng.standard_normal((n, k)).astype(np.float32) for _ in range(2))
    for (stored, *gates), (_, *ups) in zip(stored_forms(gate), stored_forms(up), strict=True):
        out = room(Matrix.size(2 * n, k))
        engine.pack(out, gates[0], stored, n, k, half=0)
        engine.pack(out, ups[0], stored, n, k, half=1)
        assert np.array_equal(out, to_panels(interleaved(gates[1], ups[1])))


def test_every_float16_is_rounded_right(engine: Engine) -> None:
    """Zeros, denormals, infinities and all else."""
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    source = np.where(np.isnan(bits), np.float16(0), bits).reshape(64, 1024)
    out = room(Matrix.size(64, 1024))
    engine.pack(out, source, ElementType.F16, 64, 1024)
    assert np.array_equal(out, to_panels(source.astype(np.float32)))


@pytest.mark.parametrize("stored", [ElementType.F32, ElementType.F16, ElementType.BF16])
def test_not_a_number_stays_so(engine: Engine, stored: ElementType) -> None:
    """Even where rounding would carry beyond its last bit."""
    sources = {
        ElementType.F32: np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32),
        ElementType.F16: np.array([np.nan] * 2, np.float16),
    }
    source = sources.get(stored, np.array([0x7FC1, 0xFFC0], np.uint16))
    out = room(Matrix.size(1, 2))
    engine.pack(out, source, stored, 1, 2)
    assert np.isnan((out[:1].view(np.uint16).astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.parametrize(
    ("n", "k", "offset", "pairs"),
    [
        (32, 3, 0, 64),
        (32, 2, 8, 64),
        (33, 2, 0, 32),
        (32, 2, 32, 32),
        (1, 2, 16, 31),
        (1, 2, 0, 0),
        (32, 2, -32, 64),
        (-32, 2, 32, 64),
    ],
)
def test_what_does_not_fit_is_refused(engine: Engine, n: int, k: int, offset: int, pairs: int) -> None:
    source = np.zeros(256, np.uint16)
    with pytest.raises(ValueError, match=rf"\[{n}, {k}\]"):
        engine.pack(room(pairs), source, ElementType.BF16, n, k, offset)


@pytest.mark.parametrize(("n", "k", "pairs"), [(16, 3, 64), (8, 2, 64), (32, 2, 32), (16, 4, 63)])
def test_gates_that_do_not_fit_are_refused(engine: Engine, n: int, k: int, pairs: int) -> None:
    source = np.zeros(256, np.uint16)
    with pytest.raises(ValueError, match=rf"\[{n}, {k}\]"):
        engine.pack(room(pairs), source, ElementType.BF16, n, k, half=0)
    with pytest.raises(ValueError, match="half is 5"):
        engine.pack(room(256), source, ElementType.BF16, 16, 2, half=5)


@pytest.mark.parametrize(("n", "k"), [(1, 4), (31, 64), (33, 8), (320, 96)])
def test_packing_rounded(engine: Engine, n: int, k: int) -> None:
    """Floats become the same as int8 that was rounded elsewhere, and tokens are embedded by what became of them."""
    weights = np.random.default_rng(n).standard_normal((n, k)).astype(np.float32)
    weights[n // 2] = 0
    for stored, source, values in stored_forms(weights):
        values, outputs = rounded(values), Matrix.outputs(n)
        found, wanted = (
            Matrix(np.zeros(outputs * k // 4, np.uint32), n, k, None, *own(outputs), INT8) for _ in range(2)
        )
        pack_rounded(engine, found, source, stored, n)
        scales = np.abs(values).max(1) / np.float32(127)
        assert found.scales is not None and np.array_equal(found.scales[:n], scales)
        steps = values / np.where(scales > 0, scales, 1)[:, None]
        stage = Stage(engine)
        x = stage.room(np.float32, n, k)
        stage.record.embed(found, x)
        stage.play(n, token_ids=np.arange(n))
        codes = np.rint(x / np.where(scales > 0, scales, 1)[:, None])
        assert np.abs(codes - steps).max() < 0.501 and np.array_equal(x, codes.astype(np.float32) * scales[:, None])
        engine.pack(wanted.words, codes.astype(np.int8), ElementType.I8, n, k, 0, wanted.compensation)
        assert np.array_equal(found.words, wanted.words)
        assert wanted.compensation is not None and np.array_equal(found.compensation, wanted.compensation)


def own(outputs: int) -> tuple[Array, Array]:
    return np.zeros(outputs, np.float32), np.zeros(outputs, np.int32)


def test_what_does_not_become_int8(engine: Engine) -> None:
    source, small = np.zeros((33, 8), np.float32), Matrix(room(32 * 2), 33, 8, None, *own(32), INT8)
    for matrix, stored, rows, message in (
        (small, ElementType.F32, 33, r"\[33, 8\] does not go into 64 words"),
        (small, ElementType.I8, 8, "8 rows of I8 do not become weights of"),
        (Matrix(room(32 * 4), 32, 8), ElementType.F32, 8, "8 rows of F32 do not become weights of"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_rounded(engine, matrix, source, stored, rows)
    with pytest.raises(ValueError, match="bytes hold no"):
        pack_rounded(engine, small, source[:2], ElementType.F32, 32)
