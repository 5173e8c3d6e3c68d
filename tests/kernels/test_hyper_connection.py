"""Hyper-connections: mixes in float32, mixtures of streams, and streams post_comb with each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from pypto_serving.kernels import Engine, StepRows
from tests.kernels.layouts import Array
from tests.kernels.references import FLOAT32, assert_close, double
from tests.kernels.stage import Stage, engine_of

pytestmark = pytest.mark.thinned(2)

STREAMS, MIXES = 4, 24
NORM_EPS, EPS, ITERATIONS = 1e-6, 1e-6, 20


@dataclass(frozen=True)
class Mixing:
    """Weights [outputs, 4 * width], and a scale and a base of each output."""

    weight: Array
    scale: Array
    base: Array


def make_mixing(width: int, outputs: int = MIXES) -> Mixing:
    rng = np.random.default_rng(width)
    weight = rng.standard_normal((outputs, STREAMS * width), np.float32) * np.float32((STREAMS * width) ** -0.5)
    return Mixing(weight, *(rng.standard_normal((2, outputs), np.float32) * np.float32(0.7)))


def random_streams(tokens: int, width: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((tokens, STREAMS, width), np.float32) * 3


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def post_comb(mixing: Mixing, x: Array) -> tuple[Array, Array, Array]:
    """Float64: post_comb of the input [t, 4], of the output [t, 4], and from stream to stream [t, 4, 4]."""
    flat = double(x).reshape(len(x), -1)
    flat /= np.sqrt((flat**2).mean(-1, keepdims=True) + NORM_EPS)
    m = flat @ double(mixing.weight).T * double(mixing.scale) + double(mixing.base)
    comb = np.exp(m[:, 8:].reshape(-1, 4, 4))
    if comb.size:
        comb = comb / comb.sum(-1, keepdims=True) + EPS
        comb /= comb.sum(-2, keepdims=True) + EPS
        for _ in range(ITERATIONS - 1):
            comb /= comb.sum(-1, keepdims=True) + EPS
            comb /= comb.sum(-2, keepdims=True) + EPS
    return sigmoid(m[:, :4]) + EPS, 2 * sigmoid(m[:, 4:8]), comb


def run(engine: Engine, mixing: Mixing, x: Array, y: Array) -> tuple[Array, Array]:
    """What enters a block [t, width], and the streams after y [t, width] has left it."""
    tokens, _, width = x.shape
    stage = Stage(engine)
    streams, mixes = stage.copy(x), stage.room(np.float32, tokens, MIXES)
    entering, post_comb = stage.room(np.float32, tokens, width), stage.room(np.float32, tokens, 20)
    record = stage.record
    record.rms_norm_linear(streams, mixing.weight, NORM_EPS, mixes)
    record.hyper_connection_pre(streams, mixes, mixing.scale, mixing.base, EPS, entering, post_comb, ITERATIONS)
    record.hyper_connection_post(y, post_comb, streams)
    stage.play(tokens)
    return entering, streams


@pytest.mark.parametrize("width", [16, 48, 1024])
@pytest.mark.parametrize("tokens", [1, 2, 5, 40])
def test_what_enters_and_what_becomes_of_the_streams(engine: Engine, tokens: int, width: int) -> None:
    mixing, x = make_mixing(width), random_streams(tokens, width)
    y = np.random.default_rng(1).standard_normal((tokens, width), np.float32)
    entering, streams = run(engine, mixing, x, y)
    pre, post, comb = post_comb(mixing, x)
    assert_close(entering, np.einsum("tj,tjd->td", pre, double(x)), 100 * FLOAT32 * 10)
    wanted = post[..., None] * double(y)[:, None] + np.einsum("tjk,tjd->tkd", comb, double(x))
    assert_close(streams, wanted, 200 * FLOAT32 * 10)


@pytest.mark.parametrize("rows", [[], [4], [0, 7, 20]])
def test_the_end_of_the_streams(engine: Engine, rows: list[int]) -> None:
    """Of tokens whose logits are wanted, where they lie; of the others nothing."""
    mixing, x = make_mixing(64, STREAMS), random_streams(21, 64)
    stage = Stage(engine)
    mixes, out = stage.room(np.float32, max(1, len(rows)), STREAMS), stage.room(np.float32, 21, 64)
    stage.record.rms_norm_linear(x, mixing.weight, NORM_EPS, mixes, StepRows.LOGITS)
    stage.record.hyper_connection_pre(x, mixes, mixing.scale, mixing.base, EPS, out)
    stage.play(21, logits_rows=rows)
    pre, _, _ = post_comb(mixing, x)
    assert_close(out[rows], np.einsum("tj,tjd->td", pre, double(x))[rows], 1e-4)
    assert np.isnan(np.delete(out, rows, axis=0)).all()


def test_large_numbers_stay_finite(engine: Engine) -> None:
    """A gate far beyond what e^x holds is 0 or 1."""
    mixing, x = make_mixing(32), random_streams(3, 32)
    mixing.base[:] = np.where(np.arange(MIXES) % 2, 300, -300)
    entering, streams = run(engine, mixing, x, np.ones((3, 32), np.float32))
    assert np.isfinite(entering).all() and np.isfinite(streams).all()


def test_a_token_is_the_same_in_every_company(instruction_set: str) -> None:
    mixing, x = make_mixing(80), random_streams(50, 80)
    y = np.random.default_rng(1).standard_normal((50, 80), np.float32)
    whole = run(engine_of(instruction_set), mixing, x, y)
    for threads in (1, 2, 3, 5):
        for begin, end in [(0, 50), (0, 1), (7, 9), (20, 33)]:
            found = run(engine_of(instruction_set, threads), mixing, x[begin:end].copy(), y[begin:end].copy())
            assert all(np.array_equal(a, b[begin:end]) for a, b in zip(found, whole, strict=True))
