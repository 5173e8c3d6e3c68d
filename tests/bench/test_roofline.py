"""The benchmark of limits: its arithmetic by hand, and its smallest parts for real."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import roofline_kernels
import roofline_work as work
from roofline_kernels import QUANTIZED, Bench, Product, Result, Rounds
from roofline_limits import BandwidthMemory, peak
from roofline_report import Ceilings, Rated, kernel_table, speed_table, step_table
from roofline_steps import REST, STEP, Steps
from roofline_work import Batch, Work

from pypto_serving.kernels import Engine, runnable
from pypto_serving.types.config import Head
from tests.checkpoints import make_checkpoint
from tests.needs import needs_kernels
from tests.quantised import quantise

MEBIBYTE = 1 << 20


@pytest.fixture
def bench() -> Bench:
    return Bench(Engine("", 1), budget_s=0.0, memory=BandwidthMemory(4 * MEBIBYTE))


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (work.linear(3, 32, 8), Work(2 * 32 * 8 + 2 * 3 * 8 + 4 * 3 * 32, 2 * 3 * 32 * 8)),
        (work.linear(3, 32, 8, "add"), Work(512 + 48 + 8 * 96, 1536)),
        (work.linear(3, 32, 8, "gate"), Work(512 + 48 + 2 * 3 * 16, 1536)),
        (work.linear(3, 32, 8, "store", 2.5), Work(2.5 * 512 + 48 + 384, 1536)),
        (work.linear(3, 32, 8, int8=True, stored=300), Work(300 + 3 * (8 + 4 * 32 + 4), 1536, int8=True)),
        (work.quantize(3, 8), Work(3 * (8 * 3 + 4), 2 * 24)),
        (work.norm(3, 8, int8=True), Work(8 * 4 + 3 * 8 * 5, 5 * 24)),
        (work.embed(3, 8), Work(3 * 8 * 6, 0)),
        (work.norm(3, 8), Work(8 * 4 + 3 * 8 * 6, 4 * 24)),
        (work.heads(1, 2, 1, 4), Work(3 * 4 * 4 + 4 * 4 * 6 + 4 * 4, 7 * 3 * 4)),
        (work.route(2, 8, 2), Work(2 * 8 * 4 + 2 * 2 * 8, 32)),
        (work.gather(2, 3, 8), Work(2 * 8 * 2 + 2 * 3 * 8 * 2, 0)),
        (work.combine(2, 3, 8), Work(4 * (6 * 8 + 2 * 16), 2 * 8 * 7)),
    ],
)
def test_work_of_an_operation(found: Work, wanted: Work) -> None:
    assert found == wanted


@pytest.mark.parametrize("batch", [Batch.decode(3, 20), Batch.prefill(4, 4), Batch.prefill(3, 40)])
def test_attention_counts_what_causality_asks_for(batch: Batch) -> None:
    seen = sum(range(c - q + 1, c + 1)[i] for q, c in zip(batch.queries, batch.contexts, strict=True) for i in range(q))
    found = work.attend(batch, 4, 2, 32)
    assert found.flops == seen * 4 * 32 * 2 * 2
    assert found.bytes == 2 * (2 * sum(batch.contexts) * 2 * 32) + 2 * 2 * batch.tokens * 4 * 32
    int8 = work.attend(batch, 4, 2, 32, int8=True)
    assert found.bytes - int8.bytes == 2 * sum(batch.contexts) * 2 * (32 - 4) and int8.flops == found.flops


def test_active_experts() -> None:
    assert work.expected_active(8, 2, 1) == 2
    assert work.expected_active(4, 2, 2) == 3
    assert math.isclose(work.expected_active(8, 2, 1000), 8)


def test_a_batch_is_a_step() -> None:
    batch = Batch((1, 3), (33, 36))
    inputs = batch.inputs(np.random.default_rng(0))
    assert inputs.positions.tolist() == [32, 33, 34, 35]
    assert inputs.query_start.tolist() == [0, 1, 4] and inputs.logits_rows.tolist() == [0, 3]
    assert sorted(inputs.block_tables[0].ravel().tolist()) == [1, 2, 3, 4]
    first, second = inputs.block_tables[0][:, 1]
    assert inputs.slot_mapping[0].tolist() == [32 * first, *(32 * second + offset for offset in (1, 2, 3))]


def ceilings() -> Ceilings:
    return Ceilings(bandwidths=[5.0, 10.0], peaks=[100.0], int8_peaks=[200.0], single_peaks=[50.0])


def rounds(count: int) -> Rounds:
    """Rounds at 10 bytes and 100 operations per second, the second one at half of that."""
    slowed = np.where(np.arange(count) == 1, 0.5, 1.0)
    return Rounds(np.zeros((count, 1)), 10 * slowed, 100 * slowed, 200 * slowed)


def test_the_larger_limit_binds_and_limits_add_up() -> None:
    memory, compute = Work(100, 20), Work(10, 400)
    assert (memory.seconds(10, 100, 200), compute.seconds(10, 100, 200)) == (10, 4)
    assert Work(10, 400, int8=True).seconds(10, 100, 200) == 2
    result = Result.of("both", "", [memory, compute], [28, 35, 56], rounds(3))
    assert (result.limit, result.best, result.median, result.fraction) == (14, 28, 35, 0.5)
    assert Rated.of(result, ceilings()).bound == "memory"


def test_tables() -> None:
    one = rounds(1)
    alone = [
        Result.of("norm", "M=1", [Work(10, 4)], [2.0], one),
        Result.of("embed", "M=1", [Work(10, 0)], [4.0], one),
    ]
    rated = [Rated.of(result, ceilings()) for result in alone]
    rows = kernel_table(rated)
    assert [len(row) for row in rows] == [len(rows[0])] * 3
    assert rows[1][-2:] == ["memory", "50%"]
    step = [Result.of("norm", "s", [Work(10, 4)], [2.0], one), Result.of(REST, "s", [], [2.0], one)]
    whole = [Rated.of(result, ceilings()) for result in (*step, Result.of(STEP, "s", [Work(10, 4)], [4.0], one))]
    assert [row[4] for row in step_table(whole)[1:]] == ["50.0%", "50.0%", "100.0%"]
    assert speed_table(whole, {"s": 8})[1] == ["s", "2.0", "2.0", "8.0", "25%"]


@needs_kernels
@pytest.mark.parametrize("instruction_set", runnable())
def test_limits_of_this_machine(instruction_set: str) -> None:
    engine = Engine(instruction_set, 2)
    assert BandwidthMemory(4 * MEBIBYTE).bandwidth(engine, repeat=2) > 0
    assert peak(engine, repeat=1) > 0 and peak(engine, repeat=1, int8=True) > 0


@needs_kernels
def test_products_and_attention_are_measured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline_kernels, "ROTATED_BYTES", MEBIBYTE)
    found = [
        *(roofline_kernels.linear(Product("x", 64, 32, finish), bench)(3)[0] for finish in ("store", "add", "gate")),
        *(roofline_kernels.attend(bench)(batch)[0] for batch in (Batch.decode(2, 33), Batch.prefill(5, 33))),
    ]
    assert all(0 < result.best <= result.median for result in found)
    int8 = [
        *roofline_kernels.linear(Product("x", 64, 32, "add", int8=True), bench)(3),
        *(roofline_kernels.attend(bench, int8=True)(batch)[0] for batch in (Batch.decode(2, 33), Batch.prefill(5, 33))),
    ]
    assert all(0 < result.best <= result.median for result in int8)


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "stored", "head"),
    [
        ("qwen3", "", "auto"),
        ("qwen3", "w8a8", "auto"),
        ("qwen3_moe", "int4_g32", "int8"),
        ("qwen3_moe", "fp8_block", "auto"),
    ],
)
def test_steps_are_measured(tmp_path: Path, bench: Bench, kind: str, stored: str, head: Head) -> None:
    model = make_checkpoint(tmp_path / "model", kind)
    if stored:
        quantise(model, stored)
    steps = Steps(model, "", 1, [Batch.decode(2, 20), Batch.prefill(5, 20)], head)
    for batch in steps.batches:
        results = {result.name: result for result in steps.measure(batch, bench)}
        parts = [result.best for name, result in results.items() if name != STEP]
        assert sum(parts) == pytest.approx(results[STEP].best)
        assert {"embed", "norm", "qkv", "heads", "attend", "o", "lm_head", REST, STEP} <= set(results)


@needs_kernels
@pytest.mark.parametrize("product", QUANTIZED, ids=lambda product: product.name)
def test_products_of_quantized_weights(product: Product, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few bytes: the work counts all that are packed."""
    monkeypatch.setattr(roofline_kernels, "ROTATED_BYTES", 1)
    (result,) = roofline_kernels.linear(replace(product, n=32, k=128), bench)(2)
    bits = 8 * result.works[0].bytes / (32 * 128)
    assert result.median > 0 and 4 < bits < 12 and result.works[0].int8 == product.int8
