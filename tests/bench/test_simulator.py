"""Virtual time: latencies that can be worked out by hand, hits beside the bound, and what a machine refuses."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from fractions import Fraction

import pytest

from pypto_serving.bench.simulator import PROMPT_VOCABULARY, SPEEDS, Machine, Simulator
from pypto_serving.bench.traces import EXCERPT, Trace, TraceRequest, load_trace, lru_hits
from pypto_serving.errors import ConfigError
from pypto_serving.types.arrays import unpack_ids

TIME = {"step_s": 1.0, "token_s": 0.01, "row_s": 0.1}


def machine(**changes):
    values = {"block_size": 4, "device_tokens": 400, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    return Machine(**(values | TIME | changes))


def trace_of(*requests, block_size=4):
    """Requests as (arrival_s, input_len, output_len, hash_ids)."""
    return Trace(requests=tuple(TraceRequest(*request) for request in requests), block_size=block_size)


class Watched(Simulator):
    """Keeps what each request was given."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.tokens = defaultdict(list)

    def _take_output(self, output):
        self.tokens[int(output.request_id)] += unpack_ids(output.token_ids).tolist()
        super()._take_output(output)


def test_latencies_of_one_request():
    """20 prompt tokens in steps of 16 and 4, then two tokens one by one."""
    simulated = Simulator(trace_of((0.0, 20, 3, (0, 1, 2, 3, 4))), machine()).run()
    (record,) = simulated.records
    assert record.ttft_s == pytest.approx(1.26 + 1.14)
    assert record.itls_s == pytest.approx([1.11, 1.11])
    assert record.latency_s == simulated.duration_s == pytest.approx(2.40 + 2.22)
    assert (simulated.num_steps, record.prompt_tokens, record.output_tokens) == (4, 20, 3)


def test_a_request_waits_for_the_step_that_runs_and_idle_time_is_skipped():
    simulated = Simulator(trace_of((0.0, 8, 1, (0, 1)), (0.5, 8, 1, (2, 3)), (100.0, 8, 1, (4, 5))), machine()).run()
    assert [r.ttft_s for r in simulated.records] == pytest.approx([1.18, 0.68 + 1.18, 1.18])
    assert simulated.duration_s == pytest.approx(101.18)


def test_requests_one_after_the_other_reach_the_bound():
    trace = trace_of(*((1e4 * i, r.input_len, r.output_len, r.hash_ids) for i, r in enumerate(excerpt(60).requests)))
    trace = Trace(requests=trace.requests, block_size=excerpt(60).block_size)
    records = Simulator(trace, machine(block_size=trace.block_size, device_tokens=10**6)).run().records
    hits = lru_hits(trace, math.inf, trace.block_size)
    assert [r.cached_tokens for r in records] == hits and sum(hits) > 0
    assert all(r.cached_by_tier == {"device": r.cached_tokens} for r in records)


def excerpt(count):
    return load_trace(EXCERPT).head(count, None).scaled(Fraction(1, 16))


def test_outputs_are_unlike_any_other_tokens():
    same = (0.0, 12, 5, (0, 1, 2))
    simulator = Watched(trace_of(same, same, same), machine())
    simulator.run()
    everything = [token for tokens in simulator.tokens.values() for token in tokens]
    assert everything and min(everything) >= PROMPT_VOCABULARY
    assert len(set(everything)) == len(everything) == 15


def test_preempted_requests_go_on_with_the_same_tokens():
    """Blocks run out while outputs grow."""
    requests = [(0.0, 8, 30, (2 * i, 2 * i + 1)) for i in range(6)]
    calm, tight = (Watched(trace_of(*requests), machine(device_tokens=size)) for size in (400, 80))
    assert calm.run().num_preemptions == 0
    assert tight.run().num_preemptions > 0
    assert tight.tokens == calm.tokens


def test_the_same_trace_gives_the_same_run():
    trace = excerpt(40)
    runs = [Simulator(trace, machine(block_size=32, device_tokens=64_000), 3).run() for _ in range(2)]
    assert runs[0] == runs[1]


def test_progress_counts_requests():
    finished = []
    Simulator(excerpt(10), machine(block_size=32, device_tokens=64_000)).run(lambda: finished.append(1))
    assert len(finished) == 10


def test_tiers_become_slots_per_group():
    sizes = machine(host_tokens=41, disk_tokens=80)
    token_bytes = 28 * 2048 * 2
    assert sizes.num_tokens == 521
    assert [(t.tier, t.num_slots, t.size_bytes) for t in sizes.tiers] == [
        ("host", (10,), 40 * token_bytes),
        ("disk", (20,), 80 * token_bytes),
    ]
    assert machine().tiers == ()


def test_a_prompt_comes_back_from_host_memory():
    """The second request takes all but two of the first one's blocks; the third finds two of them in host memory."""
    first, second = (20, 1, (0, 1, 2, 3, 4)), (36, 1, tuple(range(10, 19)))
    trace = trace_of((0.0, *first), (100.0, *second), (200.0, *first))
    alone, tiered = (Simulator(trace, machine(device_tokens=44, host_tokens=n)).run() for n in (0, 400))
    assert [r.cached_by_tier for r in alone.records] == [{"device": 0}, {"device": 0}, {"device": 8}]
    assert tiered.records[2].cached_by_tier == {"device": 8, "host": 8}
    assert tiered.records[2].cached_tokens == 16
    speed, num_bytes = SPEEDS["host"], 2 * machine().group.block_bytes
    assert tiered.records[2].ttft_s == pytest.approx(speed.latency_s + num_bytes / speed.bytes_per_s + 1.14)


def test_tiers_change_when_tokens_come_but_not_which():
    """Conversations that go on in random order, each with the prompt before and two more blocks."""
    order, turns = random.Random(0).choices(range(20), k=80), Counter()
    requests = []
    for i, conversation in enumerate(order):
        turns[conversation] += 1
        ids = tuple(range(100 * conversation, 100 * conversation + 2 * turns[conversation]))
        requests.append((10.0 * i, 4 * len(ids), 2, ids))
    tokens, rates = [], []
    for sizes in ({}, {"host_tokens": 300}, {"host_tokens": 200, "disk_tokens": 1000}):
        simulator = Watched(trace_of(*requests), machine(device_tokens=100, **sizes))
        records = simulator.run().records
        assert all(sum(r.cached_by_tier.values()) == r.cached_tokens for r in records)
        tokens.append(simulator.tokens)
        rates.append(sum(r.cached_tokens for r in records))
    assert tokens[0] == tokens[1] == tokens[2]
    assert rates[0] < rates[1] < rates[2]


@pytest.mark.parametrize(("host_tokens", "least"), [(0, 24), (100, 28)])
def test_a_device_too_small_for_the_longest_request_is_refused(host_tokens, least):
    """With a tier there has to be a block to move beside it. The advice works."""
    trace = trace_of((0.0, 20, 3, (0, 1, 2, 3, 4)))
    too_small = least - 4
    message = f"--device-tokens {too_small}: the longest request has 23 tokens; give at least {least}"
    with pytest.raises(ConfigError, match=message):
        Simulator(trace, machine(device_tokens=too_small, host_tokens=host_tokens))
    assert len(Simulator(trace, machine(device_tokens=least, host_tokens=host_tokens)).run().records) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: machine(block_size=0),
        lambda: machine(device_tokens=3),
        lambda: machine(host_tokens=3),
        lambda: machine(disk_tokens=-1),
        lambda: machine(max_num_seqs=0),
        lambda: machine(max_num_batched_tokens=1),
        lambda: machine(step_s=0.0),
        lambda: machine(token_s=-1.0),
        lambda: machine(row_s=math.nan),
    ],
)
def test_senseless_values_are_refused(make):
    with pytest.raises(ConfigError):
        make()
