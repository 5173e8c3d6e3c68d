"""KVCacheGroupSpec: which rows are read and which blocks hold them, against counting, for blocks of any size."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.types.kv import KVTensorSpec, StateSpec, WindowSpec, max_live_blocks
from pypto_serving.util import ceil_div

ROW = KVTensorSpec(name="t", layers=(0,), dtype="float32", row_shape=(1,))
SIZES = st.one_of(st.integers(1, 12), st.sampled_from([16, 128]))
WINDOWS = st.builds(
    lambda size, window: WindowSpec(name="w", tensors=(ROW,), block_size=size, window=window),
    SIZES,
    st.integers(1, 40),
)
STATES = st.builds(
    lambda size, period, overlap: StateSpec(name="s", tensors=(ROW,), block_size=size, period=period, overlap=overlap),
    SIZES,
    st.integers(1, 20),
    st.integers(0, 20),
)


Tail = WindowSpec | StateSpec


def first_read(spec: Tail, position: int) -> int:
    """The table in GroupSpec."""
    if isinstance(spec, WindowSpec):
        return max(0, position - spec.window + 1)
    return max(0, position // spec.period * spec.period - spec.overlap)


def num_blocks(spec: Tail, start: int, end: int) -> int:
    """Blocks that positions [start, end) lie in."""
    return len({position // spec.block_size for position in range(start, end)})


def period(spec: Tail) -> int:
    return spec.period if isinstance(spec, StateSpec) else 1


def reach(spec: Tail) -> int:
    """More tokens than lie between a query and the first row that it reads."""
    return spec.period + spec.overlap if isinstance(spec, StateSpec) else spec.window


@given(st.one_of(WINDOWS, STATES), st.integers(0, 300))
def test_rows_are_needed_from_their_position_to_their_last_reader(spec: Tail, position: int) -> None:
    assert spec.first_needed(position) == first_read(spec, position) <= position
    readers = [p for p in range(position, position + 100) if first_read(spec, p) <= position]
    assert readers == list(range(position, spec.last_reader(position) + 1))


@given(st.one_of(WINDOWS, STATES), st.integers(1, 200))
def test_a_step_holds_at_most_these_blocks(spec: Tail, step_tokens: int) -> None:
    """From the first row that it reads to the end of the run of blocks that it ends in."""
    run_tokens = max(16 // spec.block_size, 1) * spec.block_size
    positions = range(reach(spec), reach(spec) + math.lcm(run_tokens, period(spec)))
    ends = (ceil_div(n + step_tokens, run_tokens) * run_tokens for n in positions)
    counted = (num_blocks(spec, first_read(spec, n), end) for n, end in zip(positions, ends, strict=True))
    assert spec.read_blocks(step_tokens) == max(counted)


@given(st.one_of(WINDOWS, STATES), st.integers(1, 12))
def test_a_tail_is_at_most_these_blocks(spec: Tail, factor: int) -> None:
    step = spec.block_size * factor
    ends = range(step, (period(spec) + 1) * step + reach(spec), step)
    counted = (num_blocks(spec, first_read(spec, n), n) for n in ends)
    assert spec.resume_blocks(step) == max(counted)


@given(st.one_of(WINDOWS, STATES), st.integers(1, 300))
def test_a_sequence_that_grows_by_one_needs_at_most_these_blocks(spec: Tail, num_tokens: int) -> None:
    counted = (num_blocks(spec, first_read(spec, n), n + 1) for n in range(num_tokens))
    assert spec.min_live_blocks(num_tokens) == max(counted)


def test_a_page_holds_many_periods() -> None:
    """The states of DeepSeek V4 in pages of 128 tokens: what decoding reads lies in one block or two."""
    csa = StateSpec(name="csa", tensors=(ROW,), block_size=128, period=4, overlap=4)
    hca = StateSpec(name="hca", tensors=(ROW,), block_size=128, period=128)
    assert [csa.first_needed(n) for n in (0, 3, 4, 7, 128, 131, 132, 256)] == [0, 0, 0, 0, 124, 124, 128, 252]
    assert [csa.last_reader(n) for n in (0, 123, 124, 127, 128)] == [7, 127, 131, 131, 135]
    assert [spec.read_blocks(1) for spec in (csa, hca)] == [2, 1]
    assert [spec.resume_blocks(128) for spec in (csa, hca)] == [1, 0]
    assert max_live_blocks((csa, hca), 4096, 512) == (6 + 1, 5)
