"""The scheduler's benchmark: its traces, and a small one for real."""

from __future__ import annotations

import itertools

import msgspec
from scheduler import Ours, cells
from scheduler_trace import PREFIX_TOKENS, Arrival, Replay, Trace, at_context, replay, steady, with_waiting

from pypto_serving.model.null_models import deepseek_v4_groups


def small(*arrivals: Arrival) -> Trace:
    return Trace("small", 2, 64, 512, 40, 2, 6, arrivals)


def test_a_trace_survives_its_line() -> None:
    for trace in (steady(4), at_context(100), with_waiting(3)):
        assert msgspec.json.decode(msgspec.json.encode(trace), type=Trace) == trace
        assert all(one.step <= other.step for one, other in itertools.pairwise(trace.arrivals))


def test_prompts_share_prefixes_and_nothing_else() -> None:
    first, second, alone = Arrival(0, 20, 4, 1), Arrival(3, 30, 4, 1), Arrival(0, 20, 4)
    one, other = first.token_ids(0), second.token_ids(1)
    assert (len(one), len(other), len(alone.token_ids(0))) == (PREFIX_TOKENS + 20, PREFIX_TOKENS + 30, 20)
    assert one[:PREFIX_TOKENS] == other[:PREFIX_TOKENS]
    assert one[PREFIX_TOKENS:] == alone.token_ids(0) == first.token_ids(0)[PREFIX_TOKENS:]
    assert one[PREFIX_TOKENS:] != other[PREFIX_TOKENS : PREFIX_TOKENS + 20]


def test_steps_sample_what_the_trace_asks_for() -> None:
    """64 of 70 prompt tokens in the first step, then one token a step; the second request ends, the third follows."""
    trace = small(Arrival(0, 70, 100), Arrival(2, 10, 2), Arrival(2, 10, 100))
    found = replay(trace, Ours(trace))
    assert found.tokens == 7 + 2 + 4
    assert found.step_us > 0


def test_rows_are_always_taken() -> None:
    trace = steady(4)
    found = replay(trace, Ours(trace))
    assert found.tokens > 0.95 * 4 * (trace.warm + trace.steps)


def test_the_groups_of_deepseek_v4_do_the_same_work() -> None:
    trace = at_context(1000)
    assert replay(trace, Ours(trace, deepseek_v4_groups())).tokens == replay(trace, Ours(trace)).tokens


def test_a_row_of_the_table() -> None:
    trace, plain, v4 = small(), Replay(10, 9, 1, 50, 5), Replay(15, 9, 1, 60, 5)
    assert cells(trace, [plain, v4]) == ["small", "10", "9", "1", "50", "15", "9", "1", "60", "1.50", "1.20"]
    assert cells(trace, [plain, v4, Replay(40, 39, 4, 0, 5)])[-2:] == ["0.25", "0.25"]
    assert cells(trace, [plain, v4, Replay(15, 39, 4, 0, 6)])[0] == "small (5 and 6 tokens)"
