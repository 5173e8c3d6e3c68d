"""`bench trace` against a real server of the bundled model: the hits that the server tells are those of the trace."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pypto_serving.bench.traces import Trace, TraceRequest, lru_hits
from pypto_serving.cli.bench import bench_app
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e


def test_hits_of_a_replay_are_those_of_the_trace(tmp_path):
    """Requests come one after the other by far; the server's blocks are the trace's, scaled by 1/16."""
    turns = [(1024, (0, 1)), (2048, (0, 1, 2, 3)), (1100, (7, 8, 9)), (2500, (0, 1, 2, 3, 4)), (1100, (7, 8, 9))]
    rows = [
        {"timestamp": 1000 * i, "input_length": length, "output_length": 32, "hash_ids": ids}
        for i, (length, ids) in enumerate(turns)
    ]
    path = tmp_path / "turns.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    with Server("--block-size", "32") as server:
        arguments = ["trace", str(path), "--scale", "1/16", "--base-url", server.url, *where]
        result = CliRunner().invoke(bench_app, arguments)
        assert result.exit_code == 0, result.output
        hits = server.metric("vllm:prefix_cache_hits_total")
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["completed"] == 5 and saved["input_lens"] == [64, 128, 69, 157, 69]
    assert saved["output_lens"] == [2] * 5
    trace = Trace(requests=tuple(TraceRequest(0.0, -(-n // 16), 2, ids) for n, ids in turns), block_size=32)
    assert saved["total_cached_tokens"] == hits == sum(lru_hits(trace, float("inf"), 32))
