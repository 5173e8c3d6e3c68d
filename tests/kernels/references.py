"""What the kernels should compute, in float64, and how far rounding may lead them away from it."""

from __future__ import annotations

import numpy as np

from tests.kernels.layouts import Array

FLOAT32 = 2.0**-24
"""Half a step of float32, relative."""
BFLOAT16 = 2.0**-8
"""Half a step of bfloat16, relative."""


def double(x: Array) -> Array:
    return np.asarray(x, np.float64)


def norm(x: Array, weight: Array, eps: float) -> Array:
    x = double(x)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * double(weight)


def product(x: Array, weights: Array) -> Array:
    return double(x) @ double(weights).T


def product_error(x: Array, weights: Array) -> Array:
    """A bound for sums in float32, in whatever order."""
    return x.shape[-1] * FLOAT32 * product(np.abs(x), np.abs(weights)) + 1e-30


def silu(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Heads [t, heads, dim] rotated by angles [t, half], each in the plane of dimensions i and i + half."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = double(cos)[:, None], double(sin)[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def attention(queries: Array, keys: Array, values: Array, first: int) -> Array:
    """Causal attention in base 2 of queries [t, heads, dim] at positions `first` on over keys, values [n, kv, dim]."""
    shared = queries.shape[1] // keys.shape[1]
    keys, values = (np.repeat(double(x), shared, axis=1) for x in (keys, values))
    scores = np.einsum("thd,nhd->htn", double(queries), keys)
    seen = np.arange(len(keys)) <= first + np.arange(len(queries))[:, None]
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp2(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("htn,nhd->thd", weights, values)


def choices(logits: Array, per_token: int) -> Array:
    """Experts [t, per_token] of each token, likeliest first, ties to the lower one."""
    return np.argsort(-double(logits), axis=-1, kind="stable")[:, :per_token]


def shares(logits: Array, chosen: Array, normalize: bool) -> Array:
    """Shares [t, per_token] of the chosen experts."""
    odds = np.exp(double(logits) - double(logits).max(-1, keepdims=True))
    mine = np.take_along_axis(odds, chosen, axis=-1)
    return mine / (mine if normalize else odds).sum(-1, keepdims=True)


def assert_close(found: Array, wanted: Array, error: Array | float) -> None:
    """Every element of `found` lies within `error` of the wanted one; NaN does not."""
    wrong = ~(np.abs(double(found) - wanted) <= error)
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} differ, first {where}: {found[where]}, not {wanted[where]}"
        )


def assert_gated(found: Array, x: Array, gate: Array, up: Array, bias: Array | None = None) -> None:
    """`found` is silu(x G^T) * (x U^T); `bias` is that of the interleaved rows."""
    g_bias, u_bias = (0, 0) if bias is None else (bias.reshape(-1, 2, 16)[:, i].ravel() for i in (0, 1))
    g, u = product(x, gate) + g_bias, product(x, up) + u_bias
    g_error, u_error = product_error(x, gate) + np.abs(g) * 2e-7, product_error(x, up) + np.abs(u) * 2e-7
    error = 1.1 * np.abs(u) * g_error + np.abs(silu(g)) * u_error + 1e-30
    assert_close(found, silu(g) * u, 1.01 * BFLOAT16 * np.abs(silu(g) * u) + error)
