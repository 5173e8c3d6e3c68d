"""Mixture of experts: who goes where, every expert's products, and how they come together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.kernels import Engine, Matrix, Scoring
from tests.kernels import references
from tests.kernels.layouts import Array, interleaved, random_bf16, to_panels, to_strips
from tests.kernels.references import assert_close, assert_gated, double, product, product_error
from tests.kernels.stage import Stage, engine_of
from tests.thinning import examples

pytestmark = pytest.mark.thinned(2)


@dataclass(frozen=True)
class Layer:
    """A random layer of experts [count, ...]: gate, up [inner, width] and down [width, inner]."""

    gate: Array
    up: Array
    down: Array
    per_token: int
    normalize: bool = True

    @property
    def count(self) -> int:
        return len(self.gate)


def make_layer(count: int, per_token: int, width: int = 34, inner: int = 48, normalize: bool = True) -> Layer:
    rng = np.random.default_rng(count)
    gate, up = (random_bf16(rng, count, inner, width, scale=width**-0.5) for _ in range(2))
    return Layer(gate, up, random_bf16(rng, count, width, inner, scale=inner**-0.5), per_token, normalize)


def packed(weights: Array) -> Matrix:
    """Matrices [count, n, k], one behind the other."""
    return Matrix(np.concatenate([to_panels(w) for w in weights]), *weights.shape[1:])


def packed_gates(layer: Layer) -> Matrix:
    return packed(np.stack([interleaved(g, u) for g, u in zip(layer.gate, layer.up, strict=True)]))


@dataclass(frozen=True)
class Sorted:
    """Entries (token * per_token + slot) by expert, then token; `groups` of each expert."""

    chosen: Array

    @property
    def order(self) -> Array:
        return np.argsort(self.chosen.ravel(), kind="stable")

    def groups(self, count: int) -> list[Array]:
        return [self.order[np.sort(self.chosen.ravel()) == expert] for expert in range(count)]


def expert_rows(stage: Stage, strips: Array, groups: list[Array], k: int) -> list[Array]:
    """Each expert's rows [entries, k], which lie in strips of their own."""
    parts = np.split(strips, np.cumsum([len(group) for group in groups[:-1]], dtype=int) * k // 2)
    return [stage.rows(part, len(group), k) for part, group in zip(parts, groups, strict=True)]


def record_layer(stage: Stage, layer: Layer, x: Array, logits: Array, out: Array) -> tuple[Array, Array, Array]:
    """Records the layer, from x in strips onto `out`; returns what lies between: rows, gated rows, products."""
    (tokens, width), inner = out.shape, layer.gate.shape[1]
    entries = tokens * layer.per_token
    rows, gated = stage.strip_room(entries, width), stage.strip_room(entries, inner)
    y = stage.room(np.float32, entries, width)
    scoring = Scoring.RENORMALIZED if layer.normalize else Scoring.SOFTMAX
    routing = stage.record.route(logits, layer.per_token, scoring)
    stage.record.moe_gather(routing, x, width, rows)
    stage.record.linear_swiglu(rows, packed_gates(layer), gated, routing=routing)
    stage.record.linear(gated, packed(layer.down), y, routing=routing)
    stage.record.moe_combine(routing, y, out)
    return rows, gated, y


def run(engine: Engine, layer: Layer, x: Array, logits: Array, onto: Array) -> Array:
    """onto + the experts' weighted sums, [tokens, width]."""
    tokens, width, inner = len(x), x.shape[1], layer.gate.shape[1]
    stage = Stage(engine)
    out = stage.copy(onto)
    rows, gated, y = record_layer(stage, layer, stage.strips(x), logits, out)
    stage.play(tokens)

    groups = Sorted(references.choices(logits, layer.per_token)).groups(layer.count)
    everywhere = zip(groups, expert_rows(stage, rows, groups, width), strict=True)
    assert all(np.array_equal(found, x[group // layer.per_token]) for group, found in everywhere)
    check_products(layer, groups, expert_rows(stage, rows, groups, width), expert_rows(stage, gated, groups, inner), y)
    check_sums(layer, logits, groups, y, onto, out)
    return out


def check_products(layer: Layer, groups: list[Array], rows: list[Array], gated: list[Array], y: Array) -> None:
    """Every expert's rows went through its own matrices."""
    begin = 0
    for expert, group in enumerate(groups):
        found, begin = y[begin : begin + len(group)], begin + len(group)
        assert_gated(gated[expert], rows[expert], layer.gate[expert], layer.up[expert])
        error = product_error(gated[expert], layer.down[expert])
        assert_close(found, product(gated[expert], layer.down[expert]), error)


def check_sums(layer: Layer, logits: Array, groups: list[Array], y: Array, onto: Array, out: Array) -> None:
    """Each token got its experts' rows by their shares."""
    chosen = references.choices(logits, layer.per_token)
    shares = references.shares(logits, chosen, layer.normalize)
    by_entry = np.empty_like(y)
    by_entry[np.concatenate(groups)] = y
    parts = shares[..., None] * by_entry.reshape(*chosen.shape, -1)
    assert_close(out, onto + parts.sum(1), 1e-6 * (np.abs(onto) + np.abs(parts).sum(1) + 1e-3))


def random_step(layer: Layer, tokens: int, seed: int) -> tuple[Array, Array, Array]:
    """x, logits and what the sums are added to."""
    rng = np.random.default_rng(seed)
    width = layer.gate.shape[2]
    logits = rng.standard_normal((tokens, layer.count)).astype(np.float32) * 3
    return random_bf16(rng, tokens, width), logits, random_bf16(rng, tokens, width)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 12, 13, 50])
def test_a_layer_of_experts(engine: Engine, tokens: int, normalize: bool) -> None:
    for count, per_token in [(1, 1), (8, 2), (8, 8), (64, 6)]:
        layer = make_layer(count, per_token, normalize=normalize)
        run(engine, layer, *random_step(layer, tokens, seed=tokens))


@examples(8)
@given(
    tokens=st.integers(1, 50),
    experts=st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
    pairs=st.integers(1, 40),
    halves=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_any_sizes(tokens: int, experts: tuple[int, int], pairs: int, halves: int, seed: int, engine: Engine) -> None:
    layer = make_layer(*experts, width=2 * pairs, inner=16 * halves)
    run(engine, layer, *random_step(layer, tokens, seed))


@pytest.mark.parametrize("level", [0.0, -80.0, 300.0])
def test_ties_go_to_the_lower_expert(engine: Engine, level: float) -> None:
    """`run` compares with a stable sort, whatever the size of the logits."""
    layer = make_layer(8, 3)
    x, logits, onto = random_step(layer, 29, seed=0)
    run(engine, layer, x, np.round(logits / 3) + np.float32(level), onto)
    run(engine, layer, x, np.full_like(logits, level), onto)


def test_all_tokens_to_one_expert_and_none_elsewhere(engine: Engine) -> None:
    layer = make_layer(16, 1)
    x, logits, onto = random_step(layer, 50, seed=1)
    logits[:, 11] = 50
    run(engine, layer, x, logits, onto)


def test_a_smaller_step_after_a_larger_one(engine: Engine) -> None:
    """Logits, places and starts of the step before are of no account."""
    layer = make_layer(8, 2)
    _, logits, onto = random_step(layer, 40, seed=2)
    stage = Stage(engine)
    routed, y, out = logits.copy(), random_bf16(np.random.default_rng(0), 80, 34), onto.copy()
    routing = stage.record.route(routed, 2, Scoring.RENORMALIZED)
    stage.record.moe_combine(routing, y, out)
    for tokens in (40, 1, 13, 40, 2):
        out[...], routed[:tokens] = onto, logits[40 - tokens :]
        stage.play(tokens)
        groups = Sorted(references.choices(routed[:tokens], 2)).groups(8)
        check_sums(layer, routed[:tokens], groups, y[: 2 * tokens], onto[:tokens], out[:tokens])
        assert np.array_equal(out[tokens:], onto[tokens:])


def test_a_token_that_is_not_a_number_stays_alone(engine: Engine) -> None:
    """It goes to some experts, whose other rows do not notice."""
    layer = make_layer(8, 2)
    x, logits, onto = random_step(layer, 20, seed=4)
    stage = Stage(engine)
    out = stage.copy(onto)
    source = stage.strips(x)
    record_layer(stage, layer, source, logits, out)
    stage.play(20)
    wanted = out.copy()
    x[5], logits[5], out[...] = np.nan, np.nan, onto
    source[...] = to_strips(x, engine)
    stage.play(20)
    others = np.delete(np.arange(20), 5)
    assert np.array_equal(out[others], wanted[others]) and np.isnan(out[5]).all()


@pytest.mark.parametrize("width", [34, 256])
def test_a_token_is_the_same_in_every_company(instruction_set: str, width: int) -> None:
    layer = make_layer(8, 2, width)
    step = random_step(layer, 50, seed=3)
    whole = run(engine_of(instruction_set), layer, *step)
    for threads in (1, 2, 3, 5):
        for begin, end in [(0, 50), (0, 1), (7, 9), (20, 33)]:
            found = run(engine_of(instruction_set, threads), layer, *(part[begin:end].copy() for part in step))
            assert np.array_equal(found, whole[begin:end])


def routed(engine: Engine, tokens: int, shares: Array, **options: Any) -> Array:
    """What `combine` makes of experts whose outputs are unit vectors: shares [tokens, experts]."""
    logits, per_token = shares, 3
    experts = logits.shape[1]
    stage = Stage(engine)
    routing = stage.record.route(logits, per_token, Scoring.SQRT_SOFTPLUS, **options)
    rows = stage.strip_room(tokens * per_token, 2 * experts)
    units = np.zeros((experts, 2 * experts, 2), np.float32)
    units[np.arange(experts), np.arange(experts), 0] = 1
    y, out = (
        stage.room(np.float32, tokens * per_token, 2 * experts),
        stage.copy(np.zeros((tokens, 2 * experts), np.float32)),
    )
    ones = np.zeros((tokens, 2), np.float32)
    ones[:, 0] = 1
    stage.record.moe_gather(routing, stage.strips(ones), 2, rows)
    stage.record.linear(rows, packed(units), y, routing=routing)
    stage.record.moe_combine(routing, y, out)
    stage.play(tokens, token_ids=np.arange(tokens) % 7)
    return out[:, :experts]


@pytest.mark.parametrize("tokens", [1, 14, 40])
@pytest.mark.parametrize("choice", ["scores", "bias", "table"])
def test_softplus_scores(engine: Engine, tokens: int, choice: str) -> None:
    """Shares are sqrt(log(1 + e^logit)) over their sum, whatever chose; far below zero they keep their digits."""
    rng, experts = np.random.default_rng(tokens), 20
    logits = (rng.standard_normal((tokens, experts)) * 6).astype(np.float32)
    logits[0] -= 40
    scores = np.sqrt(np.logaddexp(0, double(logits)))
    bias = rng.standard_normal(experts).astype(np.float32) if choice == "bias" else None
    table = rng.random((7, experts)).argsort(1)[:, :3].astype(np.int32) if choice == "table" else None
    found = routed(engine, tokens, logits, scale=1.5, bias=bias, tid2eid=table)
    chosen = references.choices(scores + (0 if bias is None else bias), 3)
    if table is not None:
        chosen = table[np.arange(tokens) % 7]
    mine = np.take_along_axis(scores, chosen, axis=1)
    wanted = np.zeros((tokens, experts))
    np.put_along_axis(wanted, chosen, 1.5 * mine / mine.sum(1, keepdims=True), axis=1)
    assert_close(found, wanted, 2e-6)


@pytest.mark.parametrize("tokens", [1, 13, 50])
def test_matrices_of_some_experts(engine: Engine, tokens: int) -> None:
    """Sets of experts with matrices of their own, whose gates may lie apart, give the bits of one set."""
    layer, rng = make_layer(8, 3, width=64), np.random.default_rng(tokens)
    x, logits = random_bf16(rng, tokens, 64), rng.standard_normal((tokens, 8)).astype(np.float32)
    stage = Stage(engine)
    rows, gated, y = record_layer(stage, layer, stage.strips(x), logits, stage.room(np.float32, tokens, 64))
    entries, inner = tokens * 3, layer.gate.shape[1]
    routing = stage.record.route(logits, 3, Scoring.RENORMALIZED)
    found, products = stage.strip_room(entries, inner), stage.room(np.float32, entries, 64)
    gates = stage.room(np.float32, entries, inner)
    for members in ([6, 1], [0, 2, 3, 4, 5, 7]):
        places = np.full(8, -1, np.int32)
        places[members] = np.arange(len(members))
        some = replace(layer, gate=layer.gate[members], up=layer.up[members])
        if len(members) == 2:
            stage.record.linear(rows, replace(packed(some.gate), places=places), gates, routing=routing)
            up = replace(packed(some.up), places=places)
            stage.record.linear_swiglu(rows, up, found, gates=gates, routing=routing)
        else:
            stage.record.linear_swiglu(rows, replace(packed_gates(some), places=places), found, routing=routing)
        stage.record.linear(gated, replace(packed(layer.down[members]), places=places), products, routing=routing)
    stage.play(tokens)
    assert np.array_equal(found, gated) and np.array_equal(products, y)
