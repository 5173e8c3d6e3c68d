"""`bench trace` against a real server of the bundled model: the hits that the server tells are those of the trace."""

from __future__ import annotations

import json

import pytest

from pypto_serving.bench.traces import Trace, TraceRequest, lru_hits
from tests.bench.command import invoke
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e


TURNS = [(1024, (0, 1)), (2048, (0, 1, 2, 3)), (1100, (7, 8, 9)), (2500, (0, 1, 2, 3, 4)), (1100, (7, 8, 9))]
"""Prompt tokens and hash ids; a second lies between two of them, far more than one takes."""


def replay(tmp_path, server, turns):
    rows = [
        {"timestamp": 1000 * i, "input_length": length, "output_length": 32, "hash_ids": ids}
        for i, (length, ids) in enumerate(turns)
    ]
    path = tmp_path / "turns.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    result = invoke("trace", str(path), "--scale", "1/16", "--base-url", server.url, *where)
    assert result.exit_code == 0, result.output
    return json.loads((tmp_path / "r.json").read_text())


@pytest.mark.soak
def test_hits_of_a_replay_are_those_of_the_trace(tmp_path):
    """The server's blocks are the trace's, scaled by 1/16."""
    with Server("--block-size", "32") as server:
        saved = replay(tmp_path, server, TURNS)
        hits = server.metric("vllm:prefix_cache_hits_total")
    assert saved["completed"] == 5 and saved["input_lens"] == [64, 128, 69, 157, 69]
    assert saved["output_lens"] == [2] * 5
    trace = Trace(requests=tuple(TraceRequest(0.0, -(-n // 16), 2, ids) for n, ids in TURNS), block_size=32)
    assert saved["total_cached_tokens"] == hits == sum(lru_hits(trace, float("inf"), 32))
    assert saved["cached_tokens_by_tier"]["device"] == hits


def test_a_replay_tells_what_came_from_host_memory(tmp_path):
    """The device holds two and a half of these prompts, so the first one is gone when it comes again."""
    turns = [(16384, tuple(range(first, first + 32))) for first in (0, 100, 200, 0)]
    options = ("--kv-memory", "2.5MiB", "--max-model-len", "1200", "--kv-host-memory", "64MiB", "--block-size", "32")
    with Server(*options) as server:
        saved = replay(tmp_path, server, turns)
    cached = saved["cached_tokens_by_tier"]
    assert saved["total_cached_tokens"] == cached["device"] + cached["host"] == 992
    assert cached["host"] > 0
