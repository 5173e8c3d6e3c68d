"""Embedding and normalisation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.kernels import Engine, StepRows
from tests.kernels import references
from tests.kernels.layouts import Array, narrow, random_bf16
from tests.kernels.references import BFLOAT16, assert_close
from tests.kernels.stage import Stage, engine_of, matrix_of
from tests.thinning import examples

pytestmark = pytest.mark.thinned(2)

EPS = 1e-6


def norm(engine: Engine, x: Array, weight: Array, wanted: Array | None = None) -> Array:
    """Normalised rows [rows, width]: all, or the `wanted` ones."""
    stage, (tokens, width) = Stage(engine), x.shape
    rows = tokens if wanted is None else len(wanted)
    out = stage.strip_room(rows, width)
    stage.record.rms_norm(x, weight, EPS, out, StepRows.TOKENS if wanted is None else StepRows.LOGITS)
    stage.play(tokens, logits_rows=() if wanted is None else wanted)
    return stage.rows(out, rows, width)


@pytest.mark.parametrize("width", [2, 34, 1024])
@pytest.mark.parametrize("tokens", [1, 2, 13, 50])
def test_embedding(engine: Engine, tokens: int, width: int) -> None:
    rng = np.random.default_rng(tokens)
    table, ids = random_bf16(rng, 77, width), rng.integers(0, 77, tokens)
    stage = Stage(engine)
    plain, packed = stage.room(np.float32, tokens, width), stage.room(np.float32, tokens, width)
    stage.record.embed(narrow(table), plain)
    stage.record.embed(matrix_of(table), packed)
    stage.play(tokens, token_ids=ids)
    assert np.array_equal(plain, table[ids])
    assert np.array_equal(packed, table[ids])


@examples(12)
@given(rows=st.integers(1, 50), pairs=st.integers(1, 70), scale=st.sampled_from([1e-3, 1.0, 1e4]), seed=st.integers(0))
def test_norm(rows: int, pairs: int, scale: float, seed: int, engine: Engine) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((rows, 2 * pairs)) * scale).astype(np.float32)
    weight = rng.standard_normal(2 * pairs).astype(np.float32)
    wanted = references.norm(x, weight, EPS)
    assert_close(norm(engine, x, weight), wanted, 1.01 * BFLOAT16 * np.abs(wanted))


@pytest.mark.parametrize("wanted", [[], [4], [0, 2, 4], list(range(30)), [29, 0, 7]])
def test_norm_of_rows_with_logits(engine: Engine, wanted: list[int]) -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((30, 96)).astype(np.float32), np.ones(96, np.float32)
    assert np.array_equal(norm(engine, x, weight, np.array(wanted, int)), norm(engine, x, weight)[wanted])


@pytest.mark.parametrize("width", [34, 1000, 1024])
def test_a_norm_is_the_same_in_every_company(instruction_set: str, width: int) -> None:
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((50, width)).astype(np.float32), rng.standard_normal(width).astype(np.float32)
    whole = norm(engine_of(instruction_set), x, weight)
    for threads in (1, 2, 3, 5):
        for begin, end in [(0, 50), (0, 1), (7, 9), (20, 33), (26, 50)]:
            assert np.array_equal(norm(engine_of(instruction_set, threads), x[begin:end], weight), whole[begin:end])


def test_copies_of_embeddings(engine: Engine) -> None:
    table, ids = random_bf16(np.random.default_rng(0), 77, 34), np.arange(13) * 5
    stage = Stage(engine)
    plain, packed = stage.room(np.float32, 13, 4, 34), stage.room(np.float32, 13, 4, 34)
    stage.record.embed(narrow(table), plain)
    stage.record.embed(matrix_of(table), packed)
    stage.play(13, token_ids=ids)
    wanted = np.repeat(table[ids][:, None], 4, axis=1)
    assert np.array_equal(plain, wanted) and np.array_equal(packed, wanted)


def test_a_norm_of_columns(engine: Engine) -> None:
    """Some columns of wider rows."""
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((13, 200)).astype(np.float32), rng.standard_normal(64).astype(np.float32)
    assert np.array_equal(norm(engine, x[:, 80:144], weight), norm(engine, x[:, 80:144].copy(), weight))
