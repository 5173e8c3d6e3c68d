"""Engines and their threads: many small steps, many lives, and what they leave behind."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pypto_serving.errors import ConfigError
from pypto_serving.kernels import Engine, KVCacheLayer, Recording, Scoring, runnable
from pypto_serving.kernels.abi import INSTRUCTION_SETS
from tests.kernels.layouts import random_bf16
from tests.kernels.stage import Stage, engine_of, matrix_of
from tests.needs import needs_kernels

pytestmark = needs_kernels


def thread_ids() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def assert_threads(wanted: int) -> None:
    """The process has so many threads; the system may list one that was joined for a moment longer."""
    for _ in range(10000):
        if len(thread_ids()) == wanted:
            break
    assert len(thread_ids()) == wanted


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def record_chain(stage: Stage, links: int) -> np.ndarray:
    """A recording whose operations each need all of what the one before has written; adds 1 with each link."""
    x = stage.copy(np.zeros((7, 64), np.float32))
    strips = stage.strip_room(7, 64)
    for _ in range(links):
        stage.record.rms_norm(x, np.zeros(64, np.float32), 1e-6, strips)
        stage.record.linear_add(strips, matrix_of(np.zeros((64, 64), np.float32), np.ones(64, np.float32)), x)
    return x


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_many_small_steps_in_a_row(threads: int) -> None:
    stage = Stage(engine_of(runnable()[0], threads))
    x = record_chain(stage, links=4)
    for step in range(1, 301):
        stage.play(7)
        if step % 100 == 0:
            assert (x == 4 * step).all()


@pytest.mark.parametrize("threads", [1, 4])
def test_operations_of_all_sizes_meet_at_the_barriers(instruction_set: str, threads: int) -> None:
    """Of each operation, every thread sees all that the one before has written."""
    rng = np.random.default_rng(0)
    stage = Stage(engine_of(instruction_set, threads))
    x = random_bf16(rng, 13, 64)
    one, two = stage.room(np.float32, 13, 640), stage.room(np.float32, 13, 640)
    weights, strips = random_bf16(rng, 640, 64), stage.strip_room(13, 640)
    narrow_one, narrow_two = random_bf16(rng, 33, 640), stage.room(np.float32, 13, 33)
    first = stage.strips(x)
    stage.record.linear(first, matrix_of(weights), one)
    stage.record.rms_norm(one, np.ones(640, np.float32), 1e-6, strips)
    stage.record.linear(strips, matrix_of(narrow_one), narrow_two)
    stage.record.linear(first, matrix_of(weights), two)
    wanted = None
    for _ in range(100):
        one[...], two[...], narrow_two[...] = np.nan, np.nan, np.nan
        stage.play(13)
        assert np.array_equal(one, two)
        wanted = narrow_two.copy() if wanted is None else wanted
        assert np.array_equal(narrow_two, wanted)


def test_engines_side_by_side() -> None:
    engines = [Engine("portable", threads) for threads in (1, 2, 3)]
    stages = [Stage(engine) for engine in engines]
    rows = [record_chain(stage, links=2) for stage in stages]
    for _ in range(50):
        for stage in stages:
            stage.play(7)
    assert all((x == 100).all() for x in rows)


def test_a_closed_engine_leaves_no_thread() -> None:
    before = len(thread_ids())
    for threads in (1, 2, 3, 5):
        engine = Engine(threads=threads)
        assert_threads(before + threads - 1)
        engine.close()
        engine.close()
        assert_threads(before)
    Engine(threads=4)
    gc.collect()
    assert_threads(before)


def assert_leaves_nothing(live: Callable[[], None]) -> None:
    """Where each life left a cache line or more, every round of lives would grow the process by pages."""
    sizes = []
    for _ in range(6):
        for _ in range(100):
            live()
        gc.collect()
        sizes.append(resident_bytes())
    assert min(after - before for before, after in itertools.pairwise(sizes)) <= 4096, sizes


def test_many_engines_leave_no_memory() -> None:
    def live() -> None:
        stage = Stage(engine := Engine(threads=3))
        record_chain(stage, links=2)
        pages = np.zeros((2, 1, 2, 4, 16 * 32), np.uint16)
        stage.record.paged_attention(
            np.zeros((7, 4, 32), np.uint16), KVCacheLayer(pages, 0, 32), stage.strip_room(7, 128)
        )
        stage.play(7)
        engine.close()

    threads = len(thread_ids())
    assert_leaves_nothing(live)
    assert_threads(threads)


def test_many_recordings_leave_no_memory() -> None:
    engine = engine_of(runnable()[0], 2)
    logits = np.zeros((50, 8), np.float32)

    def live() -> None:
        recording = Recording(engine)
        for _ in range(20):
            recording.route(logits, 2, Scoring.RENORMALIZED)

    assert_leaves_nothing(live)


def test_threads_stay_on_the_cpus_they_were_given() -> None:
    allowed = os.sched_getaffinity(0)
    one = {min(allowed)}
    before = thread_ids()
    try:
        engine = Engine(threads=3, cpus=one)
        fresh = thread_ids() - before
        assert len(fresh) == 2
        assert all(os.sched_getaffinity(int(thread)) == one for thread in fresh)
        engine.close()
    finally:
        os.sched_setaffinity(0, allowed)


def test_the_best_is_the_default() -> None:
    engine = Engine()
    assert engine.instruction_set == runnable()[0] == next(name for name in INSTRUCTION_SETS if name in runnable())
    assert runnable()[-1] == "portable"
    assert engine.strip_rows == {"avx2": 4, "portable": 2}.get(engine.instruction_set, 12)


@pytest.mark.parametrize("name", ["sve", "AVX2", "avx", "portable "])
def test_an_instruction_set_that_does_not_exist(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} here; this installation has .*portable"):
        Engine(name)


def test_operations_are_named_and_timed() -> None:
    stage = Stage(engine_of(runnable()[0], 2))
    logits = np.zeros((5, 8), np.float32)
    stage.record.rms_norm(np.ones((5, 64), np.float32), np.ones(64, np.float32), 1e-6, stage.strip_room(5, 64))
    stage.record.route(logits, 2, Scoring.RENORMALIZED)
    assert stage.record.names == ["rms_norm", "router_topk", "moe_sort"]
    seconds = np.zeros(3)
    for _ in range(3):
        before = seconds.copy()
        stage.play(5, seconds=seconds)
        assert (seconds > before).all()
