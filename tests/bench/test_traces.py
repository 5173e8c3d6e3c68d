"""Loading traces, taking parts of them, scaling, prompts with the trace's reuse, and bounds on hit rates."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from fractions import Fraction

import numpy as np
import pytest

from pypto_serving.bench.traces import EXCERPT, Trace, TraceRequest, load_trace, lru_hits, parse_scale
from pypto_serving.errors import ConfigError

VOCAB_SIZE = 50_000


def line(timestamp=0, input_length=600, output_length=3, hash_ids=(0, 1)):
    return json.dumps(
        {
            "timestamp": timestamp,
            "input_length": input_length,
            "output_length": output_length,
            "hash_ids": list(hash_ids),
        }
    )


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(lines))
        return path

    return write


def test_the_excerpt_is_the_beginning_of_the_trace():
    trace = load_trace(EXCERPT)
    assert (len(trace.requests), trace.block_size) == (200, 512)
    assert trace.requests[0] == TraceRequest(0.0, 6758, 500, tuple(range(14)))
    assert trace.requests[-1].arrival_s == 72.0
    assert (EXCERPT.parent / "README.md").is_file()


def test_times_count_from_the_first_request_and_outputs_are_at_least_one(write):
    trace = load_trace(write(line(timestamp=5000), "", line(timestamp=6500, output_length=0)))
    assert [(r.arrival_s, r.output_len) for r in trace.requests] == [(0.0, 3), (1.5, 1)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{oops", "line 2: JSON is malformed"),
        ('{"timestamp": 1}', "line 2: Object missing required field `input_length`"),
        (line(input_length=0, hash_ids=()), "line 2: input_length must be at least 1, got 0"),
        (line(output_length=-1), "line 2: output_length must be at least 0, got -1"),
        (line(input_length=1025), "line 2: 2 hash_ids for an input_length of 1025; with one per 512 tokens there must"),
        (line(hash_ids=(0, -1)), "line 2: hash_ids must lie in [0, 2^43)"),
        (line(timestamp=-1), "line 2: timestamp -1 is before that of the last"),
    ],
)
def test_a_bad_line_is_named(write, bad, message):
    with pytest.raises(ConfigError) as raised:
        load_trace(write(line(), bad))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_that_is_missing_or_empty_is_refused(tmp_path, write):
    with pytest.raises(ConfigError, match="No such file"):
        load_trace(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="is empty"):
        load_trace(write(""))


def test_parts_and_speed():
    trace = load_trace(EXCERPT)
    assert trace.head(7, None).requests == trace.requests[:7]
    assert {r.arrival_s < 3.5 for r in trace.head(None, 3.5).requests} == {True}
    assert trace.head(None, 73.0) == trace
    assert trace.faster(4).requests[-1].arrival_s == 18.0
    for refused in (lambda: trace.head(0, None), lambda: trace.head(None, 0.0), lambda: trace.faster(0)):
        with pytest.raises(ConfigError):
            refused()


def test_equal_hash_ids_are_equal_tokens_and_the_last_block_is_cut():
    trace = Trace(requests=(TraceRequest(0, 1200, 1, (5, 9, 7)), TraceRequest(0, 600, 1, (5, 9))))
    first, second = (trace.token_ids(r, 0, VOCAB_SIZE) for r in trace.requests)
    assert (first.dtype, len(first), len(second)) == (np.int32, 1200, 600)
    assert (first[:600] == second).all()
    assert first.min() >= 0 and first.max() < VOCAB_SIZE
    assert len(set(first.tolist())) > 1100
    other = Trace(requests=(TraceRequest(0, 512, 1, (6,)),))
    assert (other.token_ids(other.requests[0], 0, VOCAB_SIZE) != first[:512]).mean() > 0.99
    assert (trace.token_ids(trace.requests[1], 1, VOCAB_SIZE) != second).mean() > 0.99


def test_tokens_are_the_same_everywhere():
    trace = Trace(requests=(TraceRequest(0, 4, 1, (5,)),), block_size=4)
    assert trace.token_ids(trace.requests[0], 0, VOCAB_SIZE).tolist() == [25991, 29360, 33775, 14166]


@pytest.mark.parametrize("scale", ["1/16", "0.0625", "1/512", "3/2"])
def test_scaling_keeps_the_reuse(scale):
    trace = load_trace(EXCERPT)
    scaled = trace.scaled(parse_scale(scale))
    assert scaled.block_size == 512 * Fraction(scale)
    for before, after in zip(trace.requests, scaled.requests, strict=True):
        assert after.hash_ids == before.hash_ids
        assert len(after.hash_ids) == -(-after.input_len // scaled.block_size)
        assert after.output_len == max(1, math.ceil(before.output_len * Fraction(scale)))
        assert len(scaled.token_ids(after, 0, VOCAB_SIZE)) == after.input_len


@pytest.mark.parametrize("scale", ["0", "-1", "x", "1/0", "0.3", "1/1024", "nan"])
def test_senseless_scales_are_refused(scale):
    with pytest.raises(ConfigError, match="--scale"):
        load_trace(EXCERPT).scaled(parse_scale(scale))


def plain_lru_hit_rate(requests, capacity):
    """The share of prompt tokens that hit in an LRU cache of 512-token blocks, without code of the package."""
    cache, hit_tokens = OrderedDict(), 0
    for request in requests:
        ids, hits = request["hash_ids"], 0
        while hits < len(ids) and ids[hits] in cache:
            hits += 1
        hit_tokens += min(hits, (request["input_length"] - 1) // 512) * 512
        for block in ids:
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > capacity // 512:
            cache.popitem(last=False)
    return hit_tokens / sum(request["input_length"] for request in requests)


@pytest.mark.parametrize("capacity", [2_000, 100_000, 1_000_000, 4_000_000, math.inf])
def test_lru_agrees_with_an_independent_one(capacity):
    trace = load_trace(EXCERPT)
    raw = [json.loads(text) for text in EXCERPT.read_text().splitlines()]
    assert sum(lru_hits(trace, capacity, 512)) / trace.prompt_tokens == plain_lru_hit_rate(raw, capacity)


def test_lru_by_hand():
    """Four blocks fit: the third request finds one block of its two, and the fourth one that was just used."""
    ids = [(0, 1), (2, 3), (4,), (0, 5), (4,)]
    trace = Trace(requests=tuple(TraceRequest(0, 10 * len(h), 1, h) for h in ids), block_size=10)
    assert lru_hits(trace, 40) == [0, 0, 0, 0, 9]
    assert lru_hits(trace, math.inf) == [0, 0, 0, 10, 9]
    assert lru_hits(trace, math.inf, 4) == [0, 0, 0, 8, 8]
